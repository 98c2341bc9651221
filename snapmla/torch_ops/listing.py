"""Operators as people read them, from their schemas."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

import torch

WIDTH = 100


def listing(schemas: Iterable[str]) -> str:
    """A line an operator, by four spaces: ``name(x, written!, optional?, parts[]) -> (results)``.

    Results have no names in a schema: they are what the operator's ``_out`` writes behind its
    arguments.
    """
    known = {schema.split("(")[0]: torch._C.parse_schema(schema) for schema in schemas}
    lines = []
    for name, schema in known.items():
        text = f"{name}({', '.join(_arguments(schema))})"
        if schema.returns:
            written = [a.name for a in known[f"{name}_out"].arguments if _written(a)]
            text += f" -> ({', '.join(written[-len(schema.returns) :])})"
        lines.append(textwrap.fill(text, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8))
    return "\n".join(lines)


def _arguments(schema: Any) -> Iterable[str]:
    """Texts of a schema's arguments, as they stand between its brackets."""
    star = False
    for argument in schema.arguments:
        if argument.kwarg_only and not star:
            yield "*"
            star = True
        kind = str(argument.type)
        marks = ("?" if kind.startswith("Optional") else "") + "[]" * kind.startswith("List")
        default = f"={argument.default_value}" if argument.has_default_value() else ""
        yield f"{argument.name}{marks}{'!' if _written(argument) else ''}{default}"


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
