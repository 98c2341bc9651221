"""Software GPU: exported objects, linked, checked by their own host code, and run."""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import softgpu
import softgpu.loader
import softgpu.testing
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import __main__ as commands
from snapmla.testing import explanations, selfcheck
from snapmla.testing.__main__ import main
from softgpu import __main__ as forms
from softgpu import accumulate, mutate
from softgpu.runtime import as_cuda, link
from tests.support.needs import needs_compiler

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def append() -> variants.Artifact:
    return variants.find_or_build(VariantSpec(op="append_kv"), need_library=False)


@pytest.fixture(scope="module")
def fetch() -> variants.Artifact:
    spec = VariantSpec(op="fetch_dequant", mode="indices")
    return variants.find_or_build(spec, need_library=False)


def test_two_objects_in_one_process(append: variants.Artifact, fetch: variants.Artifact) -> None:
    cache = selfcheck.poisoned_cache(3, 16)
    torch.manual_seed(0)
    c, rope = torch.randn(5, 512).bfloat16(), torch.randn(5, 64).bfloat16()
    slots = torch.tensor([3, 40, -1, 17, 9], dtype=torch.int32)
    append_kv = softgpu.load(append.obj, append.ptx, append.symbol)
    fetch_dequant = softgpu.load(fetch.obj, fetch.ptx, fetch.symbol)
    out_c, out_r = torch.zeros(4, 512).bfloat16(), torch.zeros(4, 64).bfloat16()
    for _ in range(2):  # alternately: neither has taken the other's launches over
        append_kv(cache.content_u8, cache.rope, cache.scale, c, rope, slots)
        rows = torch.tensor([3, 40, 17, 9], dtype=torch.int32)
        fetch_dequant(cache.content_u8, cache.rope, cache.scale, rows, out_c, out_r)
    kept = c[[0, 1, 3, 4]].float()
    assert (out_c.float() - kept).abs().max() <= kept.abs().max() / 16
    assert append_kv.last_stats[0].instructions > 0
    assert append_kv.launches[0].kernel != fetch_dequant.launches[0].kernel


def test_argument_errors_of_the_object_come_through(append: variants.Artifact) -> None:
    kernel = softgpu.load(append.obj, append.ptx, append.symbol)
    cache = selfcheck.poisoned_cache(3, 16)
    c, rope = torch.randn(5, 500).bfloat16(), torch.randn(5, 64).bfloat16()
    slots = torch.zeros(5, dtype=torch.int32)
    with pytest.raises(ValueError, match="512"):
        kernel(cache.content_u8, cache.rope, cache.scale, c, rope, slots)
    with pytest.raises(TypeError):
        kernel(cache.content_u8)


def test_out_of_bounds_against_the_real_tensors(append: variants.Artifact) -> None:
    """A slot beyond a pool whose scale tensor is cut short is caught at the byte."""
    kernel = softgpu.load(append.obj, append.ptx, append.symbol)
    cache = selfcheck.poisoned_cache(4, 16)
    c, rope = torch.randn(1, 512).bfloat16(), torch.randn(1, 64).bfloat16()
    slots = torch.tensor([63], dtype=torch.int32)
    content = cache.content_u8.clone()
    short = content.flatten()[: content.numel() - 256]
    lying = torch.as_strided(content, content.shape, content.stride())
    original, softgpu.loader._span = (
        softgpu.loader._span,
        lambda t: short.numel() if t.data_ptr() == lying.data_ptr() else original(t),
    )
    try:
        with pytest.raises(softgpu.MemoryFault, match=r"argument 0 uint8\[4, 16, 512\]") as error:
            kernel(lying, cache.rope, cache.scale, c, rope, slots)
    finally:
        softgpu.loader._span = original
    assert ".py:" in str(error.value)  # the kernel's source line


def test_linking_is_cached_and_keyed_by_content(
    append: variants.Artifact, fetch: variants.Artifact, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("SOFTGPU_CACHE_DIR", str(tmp_path))
    first = link(append.obj)
    stamp = first.stat().st_mtime_ns
    assert link(append.obj) == first and first.stat().st_mtime_ns == stamp
    assert link(fetch.obj) != first
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".so", ".so"]


def test_missing_compiler_is_said_clearly(
    append: variants.Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTGPU_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(softgpu.ToolchainError, match="no C compiler found"):
        link(append.obj)


def test_object_and_ptx_must_belong_together(
    append: variants.Artifact, fetch: variants.Artifact
) -> None:
    kernel = softgpu.load(append.obj, fetch.ptx, append.symbol)
    cache = selfcheck.poisoned_cache(3, 16)
    c, rope = torch.randn(5, 512).bfloat16(), torch.randn(5, 64).bfloat16()
    with pytest.raises(softgpu.LaunchError, match="one compile"):
        kernel(cache.content_u8, cache.rope, cache.scale, c, rope, torch.zeros(5).int())


def test_cuda_disguise_keeps_strides() -> None:
    """DLPack export rewrites strides of extents below 2; a CUDA caller's tensor keeps them."""
    import tvm_ffi

    x = torch.zeros(1, 4, 64)[:, ::2, :48]
    y = as_cuda(x)
    assert tuple(y.shape) == (1, 2, 48) and tuple(y.strides) == x.stride()
    assert "cuda" in str(y.device)
    assert isinstance(y, tvm_ffi.Tensor)
    assert ctypes.c_float.from_address(x.data_ptr()).value == 0.0


KERNELS, MODES = (("etap", 16), ("etap", 64), ("dual_wg", 64)), ("early", "late", "random")
EVERYDAY = tuple(zip(KERNELS, MODES, strict=True))


@pytest.mark.parametrize("pipeline, rows, mode", [
    pytest.param(*k, mode, marks=() if (k, mode) in EVERYDAY else pytest.mark.whole_matrix)
    for k in KERNELS for mode in MODES
])  # fmt: skip
def test_decode(pipeline: str, rows: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTGPU_ASYNC", mode)
    monkeypatch.setenv("SOFTGPU_SEED", "5")
    spec = VariantSpec(op="decode", pipeline=pipeline, row_tile=rows)
    artifact = variants.find_or_build(spec, need_library=False)
    result = selfcheck.check(spec, artifact.directory)
    assert result.passed, result.summary


def test_command_line(append: variants.Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    assert forms.main(["coverage", str(append.ptx)]) == 0
    assert "0 not modelled" in capsys.readouterr().out
    assert main(["run", append.name, "--dir", str(append.directory)]) == 0
    assert "ok" in capsys.readouterr().out


def test_command_line_prints_collected_hazards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = variants.find_or_build(VariantSpec(op="plan_decode"), need_library=False)
    for file in plan.directory.glob(f"{plan.name}.*"):
        shutil.copy(file, tmp_path)
    arguments = ["run", plan.name, "--dir", str(tmp_path), "--hazards", "collect"]
    assert main(arguments) == 0
    copy, record = tmp_path / plan.ptx.name, tmp_path / f"{plan.name}.json"
    known = json.loads(record.read_text())
    record.write_text(
        json.dumps({k: v for k, v in known.items() if k not in ("checksums", "digest")})
    )
    lines = copy.read_text().split("\n")
    barriers = [i for i, line in enumerate(lines) if "bar.sync" in line]
    copy.write_text("\n".join(x for i, x in enumerate(lines) if i not in barriers))
    assert main(arguments) == 1
    assert "FAILED" in (said := capsys.readouterr().out) and "hazard [race]" in said


def test_mutants_of_chosen_lines(
    append: variants.Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    """A survivor passes if it is explained, and no other instruction is looked at.  What comes
    before the wait for the grid before is found by name: that grid wrote the same."""
    kernel = variants.load(append, "cpu")
    assert isinstance(kernel, softgpu.LoadedKernel)
    wait, launch = mutate.sites(kernel.program(kernel.entry))
    asked = ["mutate", append.name, "--dir", str(append.directory), "--seeds", "1", "--lines"]
    why = ["--explained", "1 x griddepcontrol.launch_dependents"]
    assert main([*asked, launch.source, *why]) == 0
    said = capsys.readouterr().out
    assert "0 of 1 mutants killed" in said and wait.source not in said
    assert main([*asked, wait.source]) == 0
    assert "1 of 1 mutants killed" in (said := capsys.readouterr().out)
    assert "(early-dependent-access, schedule 0)" in said
    assert main([*asked, "append_kv.py:1"]) == 2
    assert "append_kv.py:1" in capsys.readouterr().err


def test_what_is_explained_has_fewer_schedules(
    append: variants.Artifact, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of each landing; what no explanation names has all of them."""
    tried: list[int] = []
    study = mutate.study

    def told(*given: Any) -> Any:
        for outcome in study(*given):
            tried.append(outcome.seed)
            yield outcome

    monkeypatch.setattr(mutate, "study", told)
    asked = ["mutate", append.name, "--dir", str(append.directory), "--seeds", "4"]
    alone = [*asked, "--lines", "append_kv.py:*", "--explained"]
    assert main([*alone, "griddepcontrol.launch_dependents"]) == 0
    assert "at most 4 schedules each, 3 where explained" in capsys.readouterr().out
    assert main([*alone, "1 x griddepcontrol.launch_dependents"]) == 0
    assert main([*alone, "bar.warp.sync"]) == 1
    launches = [max(tried[i : i + 2]) for i in range(0, 6, 2)]
    assert launches == [3, 3, 4]


def test_what_was_run_is_told(append: variants.Artifact, tmp_path: Path) -> None:
    """To ``--record``: the launches, the same whoever runs them, and mutants that survived."""
    at, asked = str(append.directory), ["--seeds", "1", "--record"]
    files = [tmp_path / name for name in ("check", "mutate")]
    assert main(["check", append.name, "--dir", at, *asked, str(files[0])]) == 0
    why = ["--explained", "griddepcontrol"]
    assert main(["mutate", append.name, "--dir", at, *asked, str(files[1]), *why]) == 0
    checked, studied = (json.loads(file.read_text()) for file in files)
    assert checked == {"launches": studied["launches"]} and len(checked["launches"]) == 24
    survivors = [s["instruction"] for s in studied["survivors"]]
    assert survivors == ["griddepcontrol.launch_dependents"]
    assert main(["mutate", append.name, "--dir", at, "--explained", "wait @ no such role"]) == 2


def test_the_role_is_of_the_file_that_was_compiled() -> None:
    """Two folders may have a file of one name: the PTX states the whole path."""
    role = "S freed by one lane"
    text = explanations.ROLES[role].text
    found = []
    for arch in ("sm90", "sm100"):
        path = f"dsl_kernels/{arch}/fp8/softmax_role.py"
        lines = (explanations.KERNELS.parent / path).read_text().splitlines()
        for number in [i + 1 for i, line in enumerate(lines) if text in line] or [1]:
            site = mutate.Site(0, "", f"softmax_role.py:{number}", 1, "wait", path)
            found.append(explanations.roles(site))
    assert found == [(), (role,)]
    for path in ("", "../README.md", "dsl_kernels/none.py", "/etc/hostname"):
        assert explanations.roles(mutate.Site(0, "", "x.py:1", 1, "wait", path)) == ()


def test_every_role_is_played() -> None:
    """A renamed function takes its role along, or this fails."""
    left = dict(explanations.ROLES)
    for path in explanations.KERNELS.rglob("*.py"):
        text, spans = explanations.read(path, path.stat().st_mtime_ns)
        for role, (functions, said) in list(left.items()):
            mine = (s for s in spans if any(fnmatch.fnmatchcase(s[0], glob) for glob in functions))
            if any(said in line for _, first, last in mine for line in text[first - 1 : last]):
                del left[role]
    assert not left


@pytest.mark.parametrize(("explained", "fails"), [
    (["fence"], True), (["fence", "wait"], False), (["fence", "wait @ b"], True),
    (["fence", "1 x wait"], True), (["fence", "2 x wait"], False), (["1 x fence", "wait"], False),
    (["1 x wait", "fence", "wait @ b"], False), (["1 x wait", "fence", "wait @ c"], True),
    (["fence", "wait", "wait 2"], False), (["fence", "wait 1"], True),
])  # fmt: skip
def test_survivors_that_are_explained(explained: list[str], fails: bool) -> None:
    """Explanations by instruction, by instruction and role, and with a number of them."""
    found = [("fence", ()), ("wait", ("a",)), ("wait", ("a", "b"))]
    survivors = [explanations.Survivor(text, roles, 10) for text, roles in found]
    assert bool(explanations.unexplained(survivors, explained)) == fails


def test_operands_that_are_no_registers_belong_to_an_instruction() -> None:
    texts = {
        "@%p1 bar.sync 1, 128": "bar.sync 1, 128", "mbarrier.x %p1, [%r1], %r2": "mbarrier.x",
        "wgmma.wait_group.sync.aligned 1": "wgmma.wait_group.sync.aligned 1",
    }  # fmt: skip
    for text, want in texts.items():
        assert explanations.instruction(mutate.Site(0, "", "x.py:1", 1, text)) == want


def test_parts_of_the_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disjoint, together all, as long as one another where what is explained survives; what one
    counted explanation is about stays together."""
    texts = ["wait %r1"] * 4 + ["fence"] * 3 + ["commit"] * 6 + ["wait %r1"] * 2
    files = ["a.py:1"] * 13 + ["b.py:1"] * 2
    sites = [mutate.Site(pc, "", files[pc], pc, text) for pc, text in enumerate(texts)]
    monkeypatch.setattr(explanations, "roles", lambda site: (site.source[:1],))
    why = ["fence", "2 x wait @ a", "9 x wait"]
    parts = [commands._part(sites, f"{k}/3", why, 10) for k in (1, 2, 3)]
    assert sorted(site.pc for part in parts for site in part) == list(range(15))
    assert any(set(sites[:4]) <= set(part) for part in parts)
    assert commands._part(sites, "1/1", why, 10) == sites
    survivors = [sum(site.text == "fence" for site in part) for part in parts]
    assert sorted(survivors) == [0, 1, 2]
    with pytest.raises(typer.Exit):
        commands._part(sites, "3/2", why, 10)


@pytest.mark.parametrize("line, said", [
    ("run x --accumulate fast", "fast"), ("run x --async soon", "soon"),
    ("run x --hazards on", "off, raise, collect"), ("check x --seeds 0", "--seeds"),
    ("coverage nowhere.ptx", "nowhere.ptx"), ("run no_such_variant", "no_such_variant"),
])  # fmt: skip
def test_command_line_refuses(
    line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    command = forms.main if line.startswith("coverage") else main
    assert command(line.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value", "said"), [
    ("SEED", "abc", "a whole number, got 'abc'"), ("ASYNC", "foo", "one of early, late, random"),
    ("HAZARDS", "on", "one of off, raise, collect"), ("ACCUMULATE", "x", "one of "),
])  # fmt: skip
@pytest.mark.parametrize("command", ["run", "check"])
def test_command_line_refuses_an_environment_of_no_meaning(
    append: variants.Artifact, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    command: str, name: str, value: str, said: str,
) -> None:  # fmt: skip
    """In one sentence, not at the end of a traceback; once in a process of its own."""
    monkeypatch.setenv(f"SOFTGPU_{name}", value)
    words = [command, append.name, "--dir", str(append.directory)]
    if (command, name) == ("run", "SEED"):
        code = subprocess.run([sys.executable, "-m", "snapmla.testing", *words]).returncode
    else:
        code = main(words)
    out, err = capfd.readouterr()
    assert code == 2 and not out
    assert err.startswith(f"SOFTGPU_{name}: expected {said}")
    assert err.count("\n") == 1


def test_run_takes_what_the_environment_says(
    append: variants.Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... unless the command line says otherwise."""
    seen: list[softgpu.Options] = []

    def check(*_: object) -> selfcheck.Result:
        seen.append(softgpu.loader._override.options)
        return selfcheck.Result(True, "")

    monkeypatch.setattr(selfcheck, "check", check)
    for name, value in {
        "ASYNC": "late",
        "SEED": "3",
        "HAZARDS": "1",
        "ACCUMULATE": "exact",
    }.items():
        monkeypatch.setenv(f"SOFTGPU_{name}", value)
    words = ["run", append.name, "--dir", str(append.directory)]
    assert main(words) == main([*words, "--seed", "-1", "--async", "random"]) == 0
    exact = accumulate.BY_NAME["exact"]
    facts = [(o.asynchronous, o.seed, o.hazards, o.accumulate) for o in seen]
    assert facts == [("late", 3, "raise", exact), ("random", None, "raise", exact)]


def test_coverage_reports_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = softgpu.testing.module("frobnicate.b32 %r1, %r2;", [])
    path = tmp_path / "x.ptx"
    path.write_text(text)
    assert forms.main(["coverage", str(path)]) == 1
    assert "frobnicate.b32  MISSING" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pipeline", "rows"),
    [("etap", 16), pytest.param("dual_wg", 64, marks=pytest.mark.whole_matrix)],
)
@pytest.mark.parametrize("opcode", ["wgmma.wait_group", "mbarrier.arrive.shared", "bar.sync"])
def test_a_removed_synchronisation_shows(pipeline: str, rows: int, opcode: str) -> None:
    """Late completion and shuffled warps make a missing wait, arrival or barrier visible."""
    spec = VariantSpec(op="decode", pipeline=pipeline, row_tile=rows)
    artifact = variants.find_or_build(spec, need_library=False)
    good, bad = (variants.load(artifact, "cpu") for _ in range(2))
    good.options = softgpu.Options(asynchronous="late", seed=0)
    assert selfcheck.check_kernel(spec, good).passed
    bad.options = good.options
    program = bad.program(good.launches[0].kernel)
    removed = [ins for ins in program.kernel.code if ins.opcode.startswith(opcode)]
    assert removed
    for ins in removed:
        kind, _, guard, negated = program.code[ins.pc]
        program.code[ins.pc] = (kind, lambda w, m: None, guard, negated)
    with contextlib.suppress(softgpu.SoftGpuError):
        assert not selfcheck.check_kernel(spec, bad).passed
