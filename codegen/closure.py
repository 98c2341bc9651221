"""Source files that a kernel is made of, and their hash.

They are the closure of its module, and of the record of the cache that it reads or writes
(``VariantSpec.format``), which its module is given.  The closure follows imports *within*
``dsl_kernels`` by reading the syntax tree, so it needs no compiler: editing one kernel file changes
the keys of its own variants and of no others.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import dsl_kernels
from dsl_kernels import registry
from dsl_kernels.spec import VariantSpec

PACKAGE = "dsl_kernels"
ROOT = Path(dsl_kernels.__file__).resolve().parent


def _path_of(module: str) -> Path | None:
    """Source file of a dotted module name, None if there is none."""
    top, *names = module.split(".")
    if top != PACKAGE:  # a kernel module of somebody else's family
        found = importlib.util.find_spec(module)
        return None if found is None or found.origin is None else Path(found.origin)
    base = ROOT.joinpath(*names)
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@functools.cache
def _imports(module: str, path: Path, _mtime_ns: int) -> tuple[str, ...]:
    """Modules of the package that ``module`` imports, candidates included."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found: set[str] = set()
    for node in _executed(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*prefix, *([node.module] if node.module else [])])
            found.add(base)
            found.update(f"{base}.{a.name}" for a in node.names)
    return tuple(sorted(m for m in found if m.split(".")[0] == PACKAGE))


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING:``, which no compile sees."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        skipped = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        todo.extend(node.orelse if skipped else ast.iter_child_nodes(node))  # type: ignore[attr-defined]


def closure(module: str) -> list[Path]:
    """Source files of ``module`` and of all it imports within the package, sorted."""
    seen: dict[str, Path] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        path = _path_of(name)
        if path is None or name in seen:
            continue
        seen[name] = path
        todo.extend(_imports(name, path, path.stat().st_mtime_ns))
        if name.startswith(f"{PACKAGE}."):
            todo.append(name.rpartition(".")[0])  # importing a.b runs a/__init__.py
    return sorted(set(seen.values()))


@functools.cache
def _digest(path: Path, _mtime_ns: int) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def has_source(spec: VariantSpec) -> bool:
    """True if the kernel module that builds ``spec`` exists."""
    module = registry.module_name(spec)
    return module is not None and _path_of(module) is not None


def sources(spec: VariantSpec) -> tuple[str, list[str]]:
    """(hash, file names relative to the package's parent) of the kernel that builds ``spec``.

    Raises ValueError if no kernel module builds it.
    """
    module = registry.module_name(spec)
    if module is None:
        raise ValueError(f"spec: no kernel module builds {spec.name}")
    modules = [module] if spec.format is None else [module, spec.format.module]
    files = {_name_of(path): path for path in sorted({p for m in modules for p in closure(m)})}
    digest = hashlib.sha256()
    for name, path in files.items():
        digest.update(name.encode())
        digest.update(_digest(path, path.stat().st_mtime_ns))
    return digest.hexdigest()[:16], list(files)


def _name_of(path: Path) -> str:
    """Path of a source as records name it: relative to the package's parent, where that can be."""
    inside = path.is_relative_to(ROOT.parent)
    return str(path.relative_to(ROOT.parent)) if inside else path.name
