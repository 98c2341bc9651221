"""Reads what an engine's source has, without an import: a module may want what is not here."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef


def definition(name: str) -> ast.stmt | None:
    """The statement that binds ``module:path.of.names`` in the module's file; None if none does.

    Args:
        name: of a function, a class, a method, or of a name that the module imports.
    """
    module, _, path = name.partition(":")
    package, *folders = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0], *folders).with_suffix(".py")
    if not file.is_file():
        return None
    node: Any = ast.parse(file.read_text())
    for part in path.split("."):
        inside = (each for each in node.body if part in _binds(each))
        node = next(inside, None)
        if node is None:
            return None
    return node


def parameters(function: Function) -> list[str]:
    """Names of a function's parameters, in order; those with stars without them."""
    given = function.args
    first = [each.arg for each in (*given.posonlyargs, *given.args)]
    more = [each.arg for each in (given.vararg, *given.kwonlyargs, given.kwarg) if each]
    return first + more


def _binds(node: ast.stmt) -> set[str]:
    """The names that a function, a class, an import or an assignment gives."""
    if isinstance(node, ast.ImportFrom):
        return {each.asname or each.name for each in node.names}
    if isinstance(node, ast.AnnAssign | ast.Assign):
        targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
        return {each.id for each in targets if isinstance(each, ast.Name)}
    return {name} if (name := getattr(node, "name", None)) else set()
