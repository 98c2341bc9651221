"""Packages point one way: whoever imports is above what it imports.

The graph comes from the syntax trees, so imports inside functions count too; those under
``if TYPE_CHECKING:`` do not, because nothing runs them.
"""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from codegen import toolchain

ROOT = Path(__file__).resolve().parent.parent
# From the bottom.
FLOORS = ("dsl_kernels", "softgpu", "codegen", "snapmla", "snapmla_cli", "profiles")
ABOVE = ("tests", "docs", "examples")


class Import(NamedTuple):
    """One import: where it stands, and the modules (dotted) at both ends."""

    file: str
    line: int
    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.source} imports {self.target}"


def modules(root: Path, packages: Iterable[str]) -> dict[str, Path]:
    """Source files of the packages by dotted name."""
    found = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING:``."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        todo += node.orelse if typing_only else ast.iter_child_nodes(node)


def targets(node: ast.AST, package: str) -> list[str]:
    """What an import statement, or ``import_module`` of a constant, names; relative to a package.

    ``from a import b`` is a.b, whether b is a module or not; ``imports`` cuts it down.
    """
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = [node.module] if node.module else []
        if node.level:
            base = ["." * node.level + ".".join(base)]
        name = importlib.util.resolve_name(".".join(base), package)
        return [f"{name}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
        ("import_module", "__import__")
    ):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return [importlib.util.resolve_name(first.value, package)]
    return []


def imports(root: Path, packages: Iterable[str]) -> list[Import]:
    """Every import of a module of the packages, or of what lies above them all, in order."""
    known = modules(root, packages)
    found = set()
    for source, path in known.items():
        package = source if path.name == "__init__.py" else source.rpartition(".")[0]
        for node in executed(ast.parse(path.read_text(), str(path))):
            for name in targets(node, package):
                while name and name not in known and name not in ABOVE:
                    name = name.rpartition(".")[0]
                if name:
                    file, line = str(path.relative_to(root)), getattr(node, "lineno", 0)
                    found.add(Import(file, line, source, name))
    return sorted(found)


def upward(found: Iterable[Import], floors: tuple[str, ...]) -> list[str]:
    """The imports that point to a higher floor."""
    height = {name: i for i, name in enumerate((*floors, *ABOVE))}

    def of(module: str) -> int:
        return height[module.partition(".")[0]]

    return [str(each) for each in found if of(each.target) > of(each.source)]


def circle(found: Iterable[Import]) -> list[str]:
    """The imports of one circle among modules, an empty list if there is none."""
    found = list(found)
    graph: dict[str, set[str]] = {}
    for each in found:
        graph.setdefault(each.source, set()).add(each.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        nodes: list[str] = error.args[1]  # each is imported by the next
        pairs = set(zip(nodes[1:], nodes[:-1], strict=True))
        return [str(each) for each in found if (each.source, each.target) in pairs]
    return []


def reached(found: Iterable[Import], start: str) -> set[str]:
    """All modules that ``start`` imports, by way of others too."""
    graph: dict[str, set[str]] = {}
    for each in found:
        graph.setdefault(each.source, set()).add(each.target)
    seen, todo = {start}, [start]
    while todo:
        new = graph.get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return seen


def private_names(root: Path, packages: Iterable[str]) -> list[str]:
    """Where a module takes a name with a leading underscore from another: imported, or by a dot."""
    known = modules(root, packages)
    found = []
    for source, path in known.items():
        package = source if path.name == "__init__.py" else source.rpartition(".")[0]
        tree = ast.parse(path.read_text(), str(path))
        taken: list[tuple[int, str]] = []
        bound = set()  # names that stand for modules here
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = zip(targets(node, package), node.names, strict=True)
                ours = [(name, alias) for name, alias in names if name.split(".")[0] in packages]
                taken += [(node.lineno, name) for name, _ in ours if name not in known]
                bound |= {alias.asname or alias.name for name, alias in ours if name in known}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in bound:
                taken.append((node.lineno, ast.unparse(node)))
        for line, name in taken:
            last = name.rpartition(".")[2]
            if last.startswith("_") and not last.startswith("__"):
                found.append(f"{path.relative_to(root)}:{line}: {name}")
    return found


# ---------------------------------------------------------------- the checkout


@pytest.fixture(scope="module")
def drawn() -> list[Import]:
    """The imports of the checkout."""
    return imports(ROOT, FLOORS)


def test_every_package_has_a_floor() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - set(ABOVE) == set(FLOORS)


def test_no_import_points_up(drawn: list[Import]) -> None:
    assert len(drawn) > 400, "the graph is not drawn"
    wrong = upward(drawn, FLOORS)
    assert not wrong, "\n" + "\n".join(wrong)


def test_no_circle_among_modules(drawn: list[Import]) -> None:
    """At run time, imports inside functions included."""
    wrong = circle(drawn)
    assert not wrong, "\n" + "\n".join(wrong)


def test_what_is_maintained_imports_no_frozen_study(drawn: list[Import]) -> None:
    studies = "profiles.studies"
    assert any(each.source.startswith(studies) for each in drawn)
    found = [each for each in drawn if each.target.startswith(studies)]
    assert not [str(each) for each in found if not each.source.startswith(studies)]


def test_no_private_name_crosses_modules() -> None:
    wrong = private_names(ROOT, FLOORS)
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "start", ["snapmla", "snapmla.flash_mla", "snapmla.flash_mla_fp8", "snapmla.bundle"]
)
def test_service_reaches_no_reference(drawn: list[Import], start: str) -> None:
    seen = reached(drawn, start)
    assert "snapmla.dense.decode" in seen
    public = {"snapmla.reference", "snapmla.metrics", "snapmla.selfcheck"}
    assert not {name for name in seen if name.startswith("snapmla.testing")} | (seen & public)


SERVICE = """
import sys
import torch, snapmla

cache = snapmla.PagedKVCache.allocate(num_pages=2, page_size=64, device="cpu")
joint = torch.randn(70, 576).bfloat16()
snapmla.append_kv(cache, joint[:, :512], joint[:, 512:], torch.arange(70, dtype=torch.int32))
table, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([70], dtype=torch.int32)
plan = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=2)
q = torch.randn(1, 1, 16, 576).bfloat16()
query = snapmla.quantize_q(q[..., :512], q[..., 512:])
out, lse = snapmla.decode(query, cache, table, lengths, softmax_scale=0.1, plan=plan)
assert bool(torch.isfinite(out).all()) and "softgpu.tensor_core" in sys.modules
print(sorted(name for name in sys.modules if name.startswith("snapmla.testing")))
"""


@pytest.mark.skipif(not toolchain.have_compiler(), reason="needs nvidia-cutlass-dsl")
def test_a_decode_imports_no_reference() -> None:
    done = subprocess.run([sys.executable, "-c", SERVICE], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# ---------------------------------------------------------------- the checks can fail


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Two packages, low < high: an upward import in a function, a circle, private names."""
    files = {
        "low/__init__.py": "",
        "low/a.py": """
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                from high import top
            from . import b
            def run():
                from high.top import peak
            """,
        "low/b.py": "from low.c import value\n",
        "low/c.py": """
            value = 1
            def late():
                from .b import value
            """,
        "low/d.py": "import importlib\nimportlib.import_module('tests.cases')\n",
        "high/__init__.py": "",
        "high/top.py": """
            import low.b
            from low import c as lowest
            from low.c import _hidden
            peak = lowest._value + low.b._other + lowest.value
            """,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text).lstrip())
    return tmp_path


def test_an_upward_import_is_found(house: Path) -> None:
    found = imports(house, ("low", "high"))
    assert upward(found, ("low", "high")) == [
        "low/a.py:6: low.a imports high.top",
        "low/d.py:2: low.d imports tests",
    ]
    assert upward(found, ("high", "low")) == [
        "high/top.py:1: high.top imports low.b",
        "high/top.py:2: high.top imports low.c",
        "high/top.py:3: high.top imports low.c",
        "low/d.py:2: low.d imports tests",
    ]


def test_a_circle_is_found(house: Path) -> None:
    found = imports(house, ("low", "high"))
    assert circle(found) == [
        "low/b.py:1: low.b imports low.c",
        "low/c.py:3: low.c imports low.b",
    ]
    assert not circle(each for each in found if each.source != "low.c")
    assert reached(found, "high.top") == {"high.top", "low.b", "low.c"}


def test_a_private_name_is_found(house: Path) -> None:
    assert private_names(house, ("low", "high")) == [
        "high/top.py:3: low.c._hidden",
        "high/top.py:4: lowest._value",
        "high/top.py:4: low.b._other",
    ]
