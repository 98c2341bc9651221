"""Enumerations of formats of a cache in service code, by the syntax trees: ``python -m
tests.support.format_names`` prints it.

    names          constants that have the name of a format of bytes in them
    comparisons    a format beside a constant, by ``==``, ``in`` and the like

A format is told by its record's fields instead.  Service code is ``SERVICE`` without ``FREE``: the
formats' own folder, and what speaks other libraries' names.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from dsl_kernels.formats.registered import BYTES, FORMATS
from tests.support import ROOT

SERVICE = ("dsl_kernels", "codegen", "snapmla")
FREE = (
    "dsl_kernels/formats/", "snapmla/testing/", "snapmla/integrations/",
    "snapmla/compat/flash_mla/", "snapmla/compat/flash_mla_fp8.py", "snapmla/compat/deep_gemm.py",
    "snapmla/compat/vllm.py",
)  # fmt: skip
# A value that is a format's name: how it is called, and of which objects ``name`` or ``dtype`` is.
FORMAT_WORDS = ("format", "fmt", "cache_dtype", "kv_format", "cache_format", "cache_name")
OWNERS = {"name": ("record", "source", "target", "own", "fmt", "form"), "dtype": ("model",)}
EQUAL = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")


def sources(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """(path, syntax tree) of service code."""
    gc.disable()  # between trees it would take longer than they do
    try:
        for package in SERVICE:
            for path in sorted((root / package).rglob("*.py")):
                name = path.relative_to(root).as_posix()
                if not name.startswith(FREE):
                    yield name, ast.parse(path.read_text(), name)
    finally:
        gc.enable()


def names(tree: ast.Module) -> list[int]:
    """Lines of constants with a format of bytes in them; docstrings are none."""
    named = re.compile(r"\b(" + "|".join(map(re.escape, sorted(BYTES))) + r")\b")
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if id(node) not in prose and named.search(node.value)
    ]


def comparisons(tree: ast.Module) -> list[int]:
    """Lines of comparisons of a format with a constant.

    A constant is a literal, or a name in capitals, an element or an attribute of it.  One side is a
    format by its word; or the constant is known for one: made of ``Names``, of a record's name, or
    of the literal names of formats.
    """
    known, found = constants(tree), []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], EQUAL):
            continue
        sides = [node.left, *node.comparators]
        for one, other in zip([*sides[:-1], *sides[1:]], [*sides[1:], *sides[:-1]]):
            if is_constant(other) and (is_format(one) or roots(other) & known):
                found.append(node.lineno)
                break
    return found


def is_format(node: ast.expr) -> bool:
    """True of an expression that is called a format."""
    if isinstance(node, ast.Name):
        return node.id in FORMAT_WORDS
    if not isinstance(node, ast.Attribute):
        return False
    if node.attr in FORMAT_WORDS:
        return True
    owner = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
    return owner in OWNERS.get(node.attr, ())


def is_constant(node: ast.expr) -> bool:
    """True of strings, of collections with some, and of what names in capitals have."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(is_constant, node.elts))
    return any(CONSTANT.fullmatch(name) for name in roots(node))


def roots(node: ast.expr) -> set[str]:
    """Names that an expression is an element or an attribute of, its own included."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute):
        of_element = isinstance(node.value, ast.Subscript)
        return {node.attr} | (set() if of_element else roots(node.value))
    if isinstance(node, ast.Subscript):
        return roots(node.value)
    return set()


def constants(tree: ast.Module) -> set[str]:
    """Names of a module that are bound to formats, whether made there or imported."""
    found = {"DEFAULT", "ROWS_OF_BYTES", "FORMAT"}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("formats"):
            found |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name for a in node.names if a.name == "FORMATS"}
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, int):
                found.discard(node.targets[0].id)  # a file's own ``FORMAT`` is a version number
                continue
            called = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "Names"
            of_format = ast.unparse(node.value).endswith(("FORMAT.name", "BF16.name", "F16.name"))
            literals = isinstance(node.value, ast.Tuple) and all(
                isinstance(x, ast.Constant) and x.value in FORMATS for x in node.value.elts
            )
            if called or of_format or literals or roots(node.value) & found:
                found.add(node.targets[0].id)
    return found


def listed(root: Path = ROOT) -> dict[str, list[str]]:
    """Both lists, of ``path:line``."""
    found: dict[str, list[str]] = {"names": [], "comparisons": []}
    for path, tree in sources(root):
        for kind in (names, comparisons):
            found[kind.__name__] += [f"{path}:{line}" for line in kind(tree)]
    return found


if __name__ == "__main__":
    for kind, places in listed().items():
        print(f"{kind}: {len(places)}", *places, sep="\n  ")
    sys.exit(any(listed().values()))
