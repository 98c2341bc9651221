"""What a plugin relies on in an engine, read from an installation and compared with a record.

A name is ``module:path``; behind ``@`` stands what the function's text must mention.  What is read:
parameters of functions and methods, fields of dataclasses, True for what has none, False for what
is not there.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
from typing import Any

from snapmla.integrations import source

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
    if not callable(value):
        return True
    try:
        return list(inspect.signature(value).parameters)
    except (TypeError, ValueError):  # of an object that stands for something else
        return True


def read_source(name: str) -> list[str] | bool:
    """``described`` of what is written in a file of the engine's, which is not imported.

    A model's module may want libraries that are not here, or a GPU.
    """
    node = source.definition(name)
    if node is None:
        return False
    return source.parameters(node) if isinstance(node, source.Function) else True


def adds(got: list[str] | bool, wanted: list[str] | bool) -> bool:
    """True if parameters are those that are known and others behind them, or nothing was needed."""
    if isinstance(got, list) and isinstance(wanted, list):
        return got[: len(wanted)] == wanted
    return wanted is False


def text(value: list[str] | bool) -> str:
    """Words of it in a sentence."""
    if isinstance(value, list):
        return f"({', '.join(value)})"
    return "there" if value else "missing"
