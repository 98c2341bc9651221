"""One variant's build: when it counts, what an interrupted or damaged one leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from codegen import artifacts, audit
from codegen import compile as compiler
from codegen.artifacts import Record
from codegen.precompile import precompile
from dsl_kernels.blocks import budget as bud
from snapmla.runtime import variants
from tests.support.builds import CHEAP, borrow
from tests.support.needs import needs_compiler

pytestmark = needs_compiler


def test_interrupted_build_is_redone(tmp_path: Path) -> None:
    files = artifacts.paths(tmp_path, CHEAP)
    files["o"].write_bytes(b"half")  # what a killed run leaves: no record
    assert compiler.up_to_date(CHEAP, tmp_path, False) is None
    report = precompile([CHEAP], tmp_path, jobs=1, linked=False)
    assert set(report.built) == {CHEAP.name}
    assert compiler.up_to_date(CHEAP, tmp_path, False) is not None
    files["ptx"].unlink()
    assert compiler.up_to_date(CHEAP, tmp_path, False) is None


@pytest.mark.parametrize("suffix", ["o", "ptx", "so", "json"])
def test_damage_is_seen(
    variant_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """So ``precompile`` repairs it without ``--force``; what a library needs is a link."""
    precompile([CHEAP], variant_dir, jobs=1)
    borrow("merge_obf16", variant_dir, tmp_path)
    files = artifacts.paths(tmp_path, CHEAP)
    if not files[suffix].exists():
        pytest.skip("nothing can be linked here")
    before = files[suffix].read_bytes()
    assert compiler.up_to_date(CHEAP, tmp_path, True) is not None
    files[suffix].write_bytes(before[:-3] + b"?" + before[-2:])
    assert compiler.up_to_date(CHEAP, tmp_path, True) is None
    assert (compiler.up_to_date(CHEAP, tmp_path, False) is None) is (suffix != "so")
    monkeypatch.setattr(compiler, "build", lambda spec, out, linked: "compiled")
    made, _ = compiler.ensure(CHEAP, tmp_path)
    assert (made != "compiled") is (suffix == "so")
    if suffix == "so":
        assert files["so"].read_bytes() == before
        assert compiler.up_to_date(CHEAP, tmp_path, True) is not None


def test_what_a_killed_build_left_is_removed(tmp_path: Path) -> None:
    theirs = ".merge_obf16_sm100a.o.abc"  # of another variant, which may be in work
    for name in (".merge_obf16_sm90a.o.abc", ".manifest.json.x1", theirs):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / ".merge_obf16_sm90a.so.def").mkdir()
    (tmp_path / ".merge_obf16_sm90a.so.def" / "launch.o").touch()
    with artifacts.lock(tmp_path, CHEAP.name):
        artifacts.write_manifest(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {".locks", artifacts.MANIFEST, theirs}


@pytest.fixture
def fake_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> dict[str, int]:
    """``build`` without the compiler; the dict's entries become fields of the record."""
    measured: dict[str, int] = {"registers": 32, "threads": 128}

    def read(record: Record, _: object) -> None:
        for name, value in measured.items():
            setattr(record, name, value)

    obj = tmp_path_factory.mktemp("fake") / "variant.o"
    obj.write_bytes(b"new")
    made = compiler._Made(obj, "new", b"", "", [], None)
    monkeypatch.setattr(compiler, "_compile", lambda spec, tmp: made)
    readers = ("read_ptxas", "read_ptx", "read_host_module", "read_sass", "read_counts")
    for reader in (*readers, "read_host", "read_target"):
        monkeypatch.setattr(audit, reader, read)
    monkeypatch.setenv("CUTE_DSL_ARCH", CHEAP.arch)
    return measured


def test_build_with_problems_is_not_up_to_date(
    tmp_path: Path, fake_compiler: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``make try`` leaves what it built, for its own check only."""
    fake_compiler["spill_stores"] = 8
    assert audit.problems(compiler.build(CHEAP, tmp_path, linked=False, strict=False))
    assert compiler.up_to_date(CHEAP, tmp_path, False) is None
    monkeypatch.setattr("snapmla.runtime.env.variant_dirs", lambda: [tmp_path])
    monkeypatch.setenv("SNAPMLA_NO_JIT", "0")
    monkeypatch.setattr(variants, "compile_variant", lambda spec: "compiled anew")
    assert variants.find_or_build(CHEAP, need_library=False) == "compiled anew"
    fake_compiler["spill_stores"] = 0
    compiler.build(CHEAP, tmp_path, linked=False)
    assert compiler.up_to_date(CHEAP, tmp_path, False) is not None
    assert variants.find_or_build(CHEAP, need_library=False) != "compiled anew"


def test_killed_rebuild_leaves_no_record(
    tmp_path: Path, fake_compiler: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.build(CHEAP, tmp_path, linked=False)
    files = artifacts.paths(tmp_path, CHEAP)
    write = artifacts.write_atomic

    def killed(path: Path, data: bytes | str) -> None:
        if path == files["ptx"]:
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(artifacts, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        compiler.build(CHEAP, tmp_path, linked=False)
    assert compiler.up_to_date(CHEAP, tmp_path, False) is None
    assert variants.find(CHEAP, [tmp_path]) is None


def test_unlinked_rebuild_drops_the_old_library(
    tmp_path: Path, fake_compiler: dict[str, int]
) -> None:
    files = artifacts.paths(tmp_path, CHEAP)
    files["so"].write_bytes(b"of older sources")
    compiler.build(CHEAP, tmp_path, linked=False)
    found = variants.find(CHEAP, [tmp_path])
    assert found is not None and found.library is None


@pytest.mark.whole_matrix
def test_two_processes_compile_a_missing_variant_once(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from dsl_kernels.spec import VariantSpec\n"
        "from snapmla.runtime import env, variants as runtime\n"
        "env.variant_dirs = lambda: [pathlib.Path(sys.argv[1])]\n"
        "env.compile_dir = lambda: pathlib.Path(sys.argv[1])\n"
        "print(runtime.find_or_build(VariantSpec(op='merge'), need_library=False).ptx)"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], cwd=artifacts.ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in both:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert out.strip() == str(tmp_path / "merge_obf16_sm90a.ptx")
    assert compiler.up_to_date(CHEAP, tmp_path, False) is not None
    assert not list(tmp_path.glob(".*.o.*")), "temporary files are left"


def test_plan_of_shared_memory_names_barriers_one_by_one() -> None:
    """Those that the budget knows; a kernel with two storages has no plan."""
    rings = (bud.Barrier("p_full", 4, {"a": 4}, 2), bud.Barrier("p_empty", 8, {"b": 8}, 2),
             bud.Barrier("one_full", 1, {"c": 1}))  # fmt: skip
    budget = bud.Budget(groups=(bud.WarpGroup("all", 0),), smem=0, barriers=rings)
    fields = [("p_bar", 32, 0), ("one_bar", 8, 32), ("other_bar", 16, 40), ("p", 64, 128)]
    names = [
        ["p_bar.full[0]", 0], ["p_bar.full[1]", 8], ["p_bar.empty[0]", 16], ["p_bar.empty[1]", 24],
        ["one_bar.full[0]", 32], ["other_bar", 40], ["p", 128],
    ]  # fmt: skip
    assert compiler.shared_plan([fields, fields], budget) == names
    assert compiler.shared_plan([fields], None) == [[name, at] for name, _, at in fields]
    assert (
        compiler.shared_plan([fields, fields[1:]], budget) == compiler.shared_plan([], budget) == []
    )
