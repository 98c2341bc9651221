"""What a plugin relies on in an engine, read from an installation and compared with a record.

A name is ``module:path``; behind ``@`` stands what the function's text must mention.  What is read:
parameters of functions and methods, fields of dataclasses, True for what has none, False for what
is not there.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

Surface = dict[str, list[str] | bool]


def described(name: str) -> list[str] | bool:
    """What is there by a name, which is imported."""
    module, _, path = name.partition(":")
    path, _, mentioned = path.partition("@")
    try:
        value: Any = importlib.import_module(module)
        *owners, last = path.split(".")
        for owner in owners:
            value = getattr(value, owner)
        if last in getattr(value, "__dataclass_fields__", ()):
            return True  # a field, of a default or not
        value = getattr(value, last)
    except (ImportError, AttributeError):
        return False
    if mentioned:
        return mentioned in value.__code__.co_names
    if isinstance(value, enum.Enum) and value.name != last:
        return [f"another name of {value.name}"]
    if isinstance(value, type):
        if dataclasses.is_dataclass(value):
            return [field.name for field in dataclasses.fields(value)]
        return True
    return list(inspect.signature(value).parameters) if callable(value) else True


def read_source(name: str) -> list[str] | bool:
    """``described`` of what is written in a file of the engine's, which is not imported.

    A model's module may want libraries that are not here, or a GPU.
    """
    module, _, path = name.partition(":")
    package, *folders = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return False
    file = Path(spec.submodule_search_locations[0], *folders).with_suffix(".py")
    if not file.is_file():
        return False
    node: Any = ast.parse(file.read_text())
    for part in path.split("."):
        inside = (each for each in node.body if part in _binds(each))
        node = next(inside, None)
        if node is None:
            return False
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return True
    given = node.args
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


def adds(got: list[str] | bool, wanted: list[str] | bool) -> bool:
    """Whether parameters are those that are known and others behind them, or nothing was needed."""
    if isinstance(got, list) and isinstance(wanted, list):
        return got[: len(wanted)] == wanted
    return wanted is False


def text(value: list[str] | bool) -> str:
    """As a sentence has it."""
    if isinstance(value, list):
        return f"({', '.join(value)})"
    return "there" if value else "missing"
