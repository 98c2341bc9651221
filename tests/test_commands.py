"""First contact: what the commands say where something is missing, mistyped or not there."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from codegen import __main__ as cli
from codegen import audit, toolchain, tryout
from codegen import compile as compiler
from codegen.artifacts import Record
from dsl_kernels.spec import VariantSpec

ROOT = Path(__file__).resolve().parent.parent
needs_compiler = pytest.mark.skipif(
    not toolchain.have_compiler(), reason="needs nvidia-cutlass-dsl"
)
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
    cli.matrix_command("sm_90a", "merge_*")
    assert capsys.readouterr().out.count(RAW) == 2


def tried(monkeypatch: pytest.MonkeyPatch, folder: Path, built: Any, checked: Any) -> str:
    """What ``make try`` prints of a build and of a check, each a result or an error."""

    def outcome(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(compiler, "build", lambda *a, **k: outcome(built))
    monkeypatch.setattr("snapmla.selfcheck.check", lambda *a: outcome(checked))
    console = Console(file=io.StringIO(), width=60)
    good = tryout.run(VariantSpec(op="merge"), folder, console, check=True)
    assert not good
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_try_prints_messages_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from snapmla.selfcheck import Result

    spec = VariantSpec(op="merge")
    broken = compiler.BuildError(spec, [RAW])
    assert tried(monkeypatch, tmp_path, broken, None).startswith(f"merge_obf16_sm90a: {RAW}\n")
    record = Record(spec.name, spec.symbol, {}, "", "", [], "", "", "")
    monkeypatch.setattr(audit, "problems", lambda record: [RAW])
    text = tried(monkeypatch, tmp_path, record, ValueError(RAW))
    assert f"problem {RAW}\nsoftware GPU: ValueError: {RAW}\n" in text
    text = tried(monkeypatch, tmp_path, record, Result(False, RAW))
    assert f"\nsoftware GPU: wrong: {RAW}\n" in text


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
