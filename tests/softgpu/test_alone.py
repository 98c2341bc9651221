"""The software GPU stands alone: it, its README and its tests do without the rest."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "softgpu" / "README.md"
REST = {"snapmla", "codegen", "dsl_kernels", "profiles"}  # tests.support.alone refuses them
NEEDED = {"numpy", "torch", "tvm_ffi"}
NEEDED_BY = {"__main__.py": {"typer"}, "pytest_plugin.py": {"pytest"}}


def imported(text: str) -> Iterator[str]:
    """Modules that a source imports, inside functions and for types only too; its own are left out.

    ``from a import b`` is a.b, whether b is a module or not.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = getattr(node.args[0], "value", None)
            if function in ("import_module", "__import__") and isinstance(first, str):
                yield first
            elif function == "Source" and isinstance(first, str):
                yield f"tests.support.{first}"  # tests.support.planting starts it


def tops(text: str) -> set[str]:
    """The packages outside the standard library that a source imports from."""
    return {name.partition(".")[0] for name in imported(text)} - sys.stdlib_module_names


def test_softgpu_imports_numpy_torch_and_tvm_ffi() -> None:
    files = sorted((ROOT / "softgpu").rglob("*.py"))
    assert len(files) > 60
    for path in files:
        allowed = NEEDED | NEEDED_BY.get(str(path.relative_to(ROOT / "softgpu")), set())
        assert tops(path.read_text()) <= allowed, path


def reached() -> dict[str, Path]:
    """Sources of the software GPU's tests, and of what they use of ``tests``, by module."""
    found: dict[str, Path] = {}
    todo = [f"tests.softgpu.{path.stem}" for path in Path(__file__).parent.glob("*.py")]
    while todo:
        name = todo.pop()
        path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        if name not in found and path.is_file():
            found[name] = path
            names = [n for n in imported(path.read_text()) if n.startswith("tests.")]
            todo += [*names, *(n.rpartition(".")[0] for n in names)]
    return found


def test_its_tests_reach_nothing_else() -> None:
    found = reached()
    assert len(found) > 40 and {"tests.support.ptx", "tests.support.ws_chain"} <= set(found)
    wrong = {name: tops(path.read_text()) & REST for name, path in found.items()}
    assert not {name: packages for name, packages in wrong.items() if packages}


def alone(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Python without the rest of the repository."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import tests.support.alone; "
    run = [sys.executable, "-P", "-c", start + command[0], *command[1:]]
    return subprocess.run(run, capture_output=True, text=True, cwd=folder, timeout=300)


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTGPU_CACHE_DIR", str(tmp_path))
    text = README.read_text()
    assert len(text.splitlines()) <= 60
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert len(blocks) == 3
    (tmp_path / "readme.py").write_text("\n".join(blocks))
    done = alone("import runpy; runpy.run_path('readme.py')", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    [shown] = re.findall(r"print\(hazard\)  # (.*)", text)
    assert done.stdout.splitlines()[0] == shown


@pytest.mark.whole_matrix
def test_its_tests_are_collected_alone() -> None:
    options = "-q", "--collect-only", "--confcutdir=tests/softgpu", "-ptests.support.alone"
    plugins = "-psoftgpu.pytest_plugin", "-ppytester", "-pno:cacheprovider"
    start = "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    done = alone(start, *options, *plugins, "tests/softgpu", folder=ROOT)
    assert done.returncode == 0, done.stdout
    assert "tests/softgpu/test_wgmma.py::" in done.stdout


# ---------------------------------------------------------------- the checks can fail


@pytest.mark.parametrize("text", [
    "import codegen.link", "def f():\n    from codegen import link",
    "import importlib\nimportlib.import_module('codegen.link')", "__import__('codegen')",
])  # fmt: skip
def test_an_import_is_found(text: str) -> None:
    assert tops(f"import os\nfrom . import ops\nimport numpy.typing\n{text}") == {
        "numpy",
        "codegen",
    }


def test_the_rest_is_refused(tmp_path: Path) -> None:
    for name in sorted(REST):
        assert (ROOT / name).is_dir()
    start = (
        "\nfor name in sys.argv[1:]:\n try: __import__(name)\n"
        " except ModuleNotFoundError as error: print(error)"
    )
    done = alone(start, *REST, folder=tmp_path)
    assert sorted(done.stdout.splitlines()) == [f"{n}: softgpu stands alone" for n in sorted(REST)]
