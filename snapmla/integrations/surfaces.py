"""Parts of an engine on which a plugin relies: read from an installation, compared with a record.

A name is ``module:path``.  If it ends in ``@word``, the function's text must mention the word.
A name's value is the list of parameters of a function or method, or of a dataclass's fields.  It is
True if there is nothing to list, and False if the name does not exist.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snapmla.integrations import source

Value = list[str] | bool
Surface = dict[str, Value]


def described(name: str) -> Value:
    """The value (``Value``) of a name, which is imported."""
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


def read_source(name: str) -> Value:
    """``described`` of what is written in a file of the engine's, which is not imported.

    A model's module may want libraries that are not here, or a GPU.
    """
    node = source.definition(name)
    if node is None:
        return False
    return source.parameters(node) if isinstance(node, source.Function) else True


def adds(got: Value, wanted: Value) -> bool:
    """True if parameters are those that are known and others behind them, or nothing was needed."""
    if isinstance(got, list) and isinstance(wanted, list):
        return got[: len(wanted)] == wanted
    return wanted is False


def differences(
    found: Surface, known: Surface, may_do: Callable[[str, Value, Value], bool]
) -> list[tuple[bool | None, str]]:
    """Differences of ``found`` from ``known``: (None if it may do, else False; a sentence).

    Args:
        may_do: of a name, what is found and what is known, whether it may do nevertheless.
    """
    said: list[tuple[bool | None, str]] = []
    for name, wanted in known.items():
        got = found.get(name, False)
        if got == wanted or adds(got, wanted):
            continue
        fine = None if may_do(name, got, wanted) else False
        said.append((fine, f"{name}: {text(wanted)} is {text(got)} here"))
    return said


def keep(record: Path, release: str, found: Surface) -> None:
    """Writes what a release has into the record of an engine's releases, which may be new."""
    records = json.loads(record.read_text()) if record.exists() else {}
    records[release] = found
    record.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")


def text(value: Value) -> str:
    """Words of it in a sentence."""
    if isinstance(value, list):
        return f"({', '.join(value)})"
    return "there" if value else "missing"
