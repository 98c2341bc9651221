"""First contact: what the commands say where something is missing, mistyped or not there."""

from __future__ import annotations

import ast
import io
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from codegen import __main__ as cli
from codegen import audit, matrix, tryout
from codegen import compile as compiler
from codegen.artifacts import Record
from dsl_kernels.spec import VariantSpec
from profiles import device
from snapmla.errors import VariantError
from snapmla.runtime import variants
from snapmla.testing import __main__ as testing
from snapmla.testing import selfcheck
from tests.support import ROOT
from tests.support.needs import needs_compiler

Done = subprocess.CompletedProcess[str]
# What rich would take for markup or for an emoji (a line number between colons is one).
RAW = "p[stage] of [/some/path] at decode.py:100: [red]"
WITHOUT_COMPILER = """
import importlib.abc, importlib.metadata, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "cutlass":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def version(name, real=importlib.metadata.version):
    if name.startswith("nvidia-cutlass-dsl"):
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)

importlib.metadata.version = version
sys.meta_path.insert(0, Blocked())
"""


def python(*arguments: str, path: Path = ROOT, **environment: str) -> Done:
    """Runs this interpreter in the checkout, with ``path`` before other places of modules."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=300,
        env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}", **environment},
    )  # fmt: skip


# ---------------------------------------------------------------- text is printed as it is


@pytest.mark.parametrize(
    "command",
    ["precompile", "build merge_obf16_sm90a", "try merge_obf16_sm90a", "bundle", "docs"],
)
def test_advice_without_the_compiler_is_whole(tmp_path: Path, command: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_COMPILER)
    done = python("-m", "codegen", *command.split(), path=tmp_path)
    assert done.returncode == 1 and not done.stderr
    assert done.stdout == ("nvidia-cutlass-dsl is not installed: pip install 'snapmla[compile]'\n")


def test_codegen_prints_messages_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    cli._fail(RAW)
    cli._show_failures({"merge_obf16_sm90a": [RAW, "b"]})
    assert capsys.readouterr().out == f"{RAW}\n{RAW}; b\n  merge_obf16_sm90a\n"


@needs_compiler
def test_reasons_of_the_matrix_are_printed_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("codegen.matrix.exclusion", lambda spec, ask_kernels: RAW)
    cli.matrix_command("sm_90a", "merge_o*")
    assert capsys.readouterr().out.count(RAW) == 2


def tried(monkeypatch: pytest.MonkeyPatch, folder: Path, built: Any) -> str:
    """What ``make try`` prints of a build, a record or an error."""

    def outcome(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(compiler, "build", lambda *a, **k: outcome(built))
    console = Console(file=io.StringIO(), width=60)
    good = tryout.run(VariantSpec(op="merge"), folder, console)
    assert not good
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_try_prints_messages_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = VariantSpec(op="merge")
    broken = compiler.BuildError(spec, [RAW])
    assert tried(monkeypatch, tmp_path, broken).startswith(f"merge_obf16_sm90a: {RAW}\n")
    record = Record(spec.name, spec.symbol, {}, "", "", [], "", "", "")
    (tmp_path / f"{spec.name}.ptx").write_text("")
    monkeypatch.setattr(audit, "problems", lambda record: [RAW])
    assert f"\nproblem {RAW}\n" in tried(monkeypatch, tmp_path, record)


@pytest.mark.parametrize("package", ["codegen", "softgpu", "snapmla", "profiles"])
def test_consoles_read_no_markup(package: str) -> None:
    """Every rich console that prints: what is printed comes from data."""
    for path in (ROOT / package).rglob("*.py"):
        tree = ast.parse(path.read_text())
        asked = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        for node in ast.walk(tree):
            name = getattr(getattr(node, "func", None), "id", "")
            if name == "Console" and id(node) not in asked:  # Console().is_terminal prints nothing
                given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
                assert given.get("markup") is given.get("emoji") is False, f"{path}:{node.lineno}"


def test_a_check_builds_the_planner_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After ``make try`` alone there is the one variant; only its planner is asked for."""
    asked: list[str] = []

    def build(spec: VariantSpec, *, need_library: bool) -> SimpleNamespace:
        asked.append(spec.name)
        return SimpleNamespace(directory=tmp_path)

    def load(spec: VariantSpec, directory: Path) -> str:
        if spec.op == "plan_decode" and spec.name not in asked:
            raise VariantError(f"{spec.name}: not built")
        return spec.name

    monkeypatch.setattr(selfcheck, "load", load)
    monkeypatch.setattr(variants, "find_or_build", build)
    planner = VariantSpec(op="plan_decode")
    for _ in range(2):
        assert selfcheck.load_or_build(planner, tmp_path) == "plan_decode_sm90a"
    assert asked == ["plan_decode_sm90a"]
    job = selfcheck.Workload(VariantSpec.from_name("decode_etap_r16_p64_obf16_sm90a"), tmp_path).job
    assert job is not None


# ---------------------------------------------------------------- make


def make(*words: str, cwd: Path = ROOT) -> Done:
    """Runs make with this interpreter."""
    command = ["make", "-s", f"PY={sys.executable}", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300)


def test_help_lists_every_target_and_variable() -> None:
    """Targets without a text, and variables without one, are forgotten ones."""
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, flags=re.M)) - {"setup"}  # PY= sets nothing up
    assert targets == set(re.findall(r"^\.PHONY: (.*)", text, flags=re.M)[0].split()) - {"setup"}
    variables = set(re.findall(r"^(\w+) \?=", text, flags=re.M)) | {
        "PY", "VARIANT", "TORCH_INDEX", "SLICE", "LIMIT", "ONLY", "ARCHS", "CUDAS", "MACHINES",
    }  # fmt: skip
    done = make("help")
    listed = re.findall(r"^  ([\w-]+) +\S", done.stdout, flags=re.M)
    assert done.returncode == 0 and sorted(listed) == sorted({"setup"} | targets | variables)


@pytest.mark.parametrize("target", ["try", "profile"])
def test_make_names_the_variable_that_is_missing(target: str) -> None:
    done = make(target)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert f"VARIANT= names no variant: make {target} VARIANT=decode_" in line


def test_make_try_compiles_then_runs() -> None:
    done = make("-n", "try", "VARIANT=merge_obf16_sm90a")
    commands = [line.removeprefix(f"{sys.executable} ") for line in done.stdout.splitlines()]
    assert commands == [
        "-m codegen try merge_obf16_sm90a",
        "-m snapmla.testing run --hazards collect merge_obf16_sm90a",
    ]  # fmt: skip


def test_make_bench_names_the_variable_that_is_wrong() -> None:
    done = make("bench", "BENCH=h200-tabel")
    first, *rest = done.stderr.splitlines()
    assert first.startswith("preset (make's BENCH=): expected one of snapmla-fig5, ")
    assert first.endswith(", got 'h200-tabel' (did you mean 'h200-table'?)")
    assert done.returncode and not done.stdout and all(line.startswith("make") for line in rest)


def test_clean_removes_what_was_made_and_no_more(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    sources = [
        "snapmla",
        "snapmla_cli",
        "codegen",
        "dsl_kernels",
        "softgpu",
        "profiles",
        "tests",
        "docs",
    ]
    kept = {*(f"{folder}/a.py" for folder in sources), "notes/__pycache__/mine", "venv/notes"}
    made = {"build/variants/a.o", ".mypy_cache/a", "snapmla/__pycache__/a.pyc"}
    for name in {*kept, *made, ".venv/pyvenv.cfg"}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def there() -> set[str]:
        files = (p for p in tmp_path.rglob("*") if p.is_file() and p.name != "Makefile")
        return {str(p.relative_to(tmp_path)) for p in files}

    assert make("clean", cwd=tmp_path).returncode == 0
    assert there() == {*kept, ".venv/pyvenv.cfg"}
    assert make("distclean", "VENV=venv", cwd=tmp_path).returncode == 0
    assert there() == {*kept, ".venv/pyvenv.cfg"}, "what is no environment stays"
    assert make("distclean", cwd=tmp_path).returncode == 0
    assert there() == kept


# ---------------------------------------------------------------- names of variants


@pytest.mark.parametrize(
    ("name", "words", "close"),
    [
        ("decode_etap_r64_p64_obf16", "expected a target at its end, _sm90a or _sm100a",
         "decode_etap_r64_p64_obf16_sm90a"),
        ("decode_etap_r64_p64_obf16_sm90", "expected a target at its end, _sm90a or _sm100a",
         "decode_etap_r64_p64_obf16_sm90a or "),
        ("merge", "expected a target at its end", "merge_obf16_sm90a or merge_of32_sm90a or "),
        ("decode_etpa_r64_p64_obf16_sm90a",
         "pipeline: expected one of etap, dual_wg, f16, ws, pair at ",
         "decode_etap_r64_p64_obf16_sm90a or "),
        ("decode_etap_p64_r64_obf16_sm90a", "row_tile: expected one of r16, ",
         "decode_etap_r64_p64_obf16_sm90a or "),
        ("quantise_q_xbf16_token_sm90a", "expected to start with one of ",
         "quantize_q_xbf16_token_sm90a or "),
    ],
)  # fmt: skip
def test_wrong_name_gets_close_ones(name: str, words: str, close: str) -> None:
    with pytest.raises(ValueError) as caught:
        matrix.named(name)
    text = str(caught.value)
    assert text.startswith(f"variant name {name!r}: {words}") and f"did you mean {close}" in text
    assert text.count("did you mean") == 1 and text.count("\n") == 0


def test_nonsense_is_close_to_nothing() -> None:
    for name in ("", "nonsense", "mergers"):
        with pytest.raises(ValueError, match=r"expected to start with one of [^;]*$"):
            matrix.named(name)


def test_variants_outside_the_matrix_have_names_too() -> None:
    name = "decode_etap_r64_p64_obf16_st3_sm90a"
    assert matrix.named(name).stages == 3


@needs_compiler
@pytest.mark.parametrize("command", ["build", "try", "header"])
def test_codegen_says_what_is_wrong_with_a_name(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "decode_etap_r64_p64_obf16"])
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert "_sm90a" in result.output and "did you mean decode_etap_r64_p64_obf16_sm90a?" in (
        result.output
    )


def test_softgpu_says_what_is_close_to_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--dir", str(tmp_path), "merge_obf16"]
    assert testing.main(words) == 2
    assert "matches 'merge_obf16'; `make precompile` builds them all\n" in capsys.readouterr().err
    for name in ("merge_obf16_sm90a", "plan_decode_sm90a"):
        (tmp_path / f"{name}.ptx").touch()
    assert testing.main(words) == 2
    error = capsys.readouterr().err
    assert error.endswith("matches 'merge_obf16'; did you mean merge_obf16_sm90a?\n")


# ---------------------------------------------------------------- without a GPU


@pytest.mark.parametrize(
    "command",
    [
        "-m profiles.host_time", "-m profiles.bench merge_cost", "-m profiles.bench dsa_cost",
        "-m profiles.bench dsa_step_cost",
        "-m profiles.bench h200-table", "-m profiles.parallel_cost",
        "-m profiles.record_softgpu record", "-m profiles.record_wgmma record",
        "-m profiles.ncu merge_obf16_sm90a", "tests/gpu/check_decode.py --parts correctness",
        "-m profiles.record_cost record",
    ],
)  # fmt: skip
def test_without_a_gpu_it_is_one_sentence(tmp_path: Path, command: str) -> None:
    slow = {"profiles.record_softgpu", "profiles.record_wgmma", "profiles.ncu"}
    slow |= {"profiles.record_cost"}
    slow |= {"merge_cost", "dsa_cost", "dsa_step_cost"}  # a table says which options it takes
    if slow.isdisjoint(command.split()):  # the others answer before they import torch
        (tmp_path / "sitecustomize.py").write_text(WITHOUT_COMPILER.replace("cutlass", "torch"))
    out = [] if "ncu" in command else ["--out", str(tmp_path / "out")]
    done = python(*command.split(), *out, path=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == "profiling needs a CUDA device: the driver shows none here\n"
    assert not (tmp_path / "out").exists()


def test_a_torch_without_cuda_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "visible", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(
        SystemExit, match=r"that torch can use: torch [\d.]+.* is built without CUDA"
    ):
        device.require_cuda()


def test_help_and_the_software_gpu_need_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "visible", lambda: 0)
    for words in (["--help"], ["-h"], ["--device", "cpu"], ["--device=cpu"]):
        device.require_cuda(words)
    with pytest.raises(SystemExit):
        device.require_cuda(["--device", "cuda"])


# ---------------------------------------------------------------- make lint


@pytest.mark.parametrize("installed", [False, True])
def test_lint_with_and_without_what_a_gpu_machine_has(tmp_path: Path, installed: bool) -> None:
    """What mypy says of imports, with the project's settings, must not depend on triton's."""
    venv.create(tmp_path / "venv", with_pip=False)
    interpreter = tmp_path / "venv" / "bin" / "python"
    if installed:
        (purelib,) = (tmp_path / "venv").glob("lib/python*/site-packages")
        for name in ("triton/__init__.py", "triton/language.py", "pynvml.py"):
            (purelib / name).parent.mkdir(exist_ok=True)
            (purelib / name).touch()
    sources = "".join(path.read_text() for path in (ROOT / "profiles").glob("*.py"))
    imports = re.findall(r"^ *(import (?:triton|pynvml).*\n)", sources, flags=re.M)
    assert len(imports) == 5
    (tmp_path / "use.py").write_text("".join(imports))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"),
         "--python-executable", str(interpreter), "--cache-dir", str(tmp_path / "cache"), "use.py"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
