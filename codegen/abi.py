"""Arguments that a caller of an exported function must pass, read off the fakes of its build.

The result is plain data (it is stored in the variant's record): the C header and the tables of
``codegen.render`` are made from it on machines without the compiler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dsl_kernels.arguments import ordered as ordered  # hosts without codegen take it from there


def describe(function: Callable[..., Any], fakes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One dict per argument of the exported function, the stream left out.

    Tensors: ``name``, ``dtype``, ``shape``, ``strides`` (in elements), ``align`` (bytes).  A static
    extent is an int; a symbolic one is its name (equal names must be equal), a symbolic stride is
    ``*16`` for any multiple of 16.  Scalars have ``name`` and ``dtype`` only.

    Args:
        function: the ``@cute.jit`` callable that ``registry.build`` returned.
        fakes: its fake arguments by name, the stream not among them.

    Raises:
        ValueError: the function's parameters are not the fakes', in this order.
    """
    names = [name for name in inspect.signature(function).parameters if name != "stream"]
    if names != list(fakes):
        raise ValueError(f"fakes: expected those of {', '.join(names)}, got {', '.join(fakes)}")
    return [_argument(name, fake) for name, fake in fakes.items()]


def _argument(name: str, fake: Any) -> dict[str, Any]:
    if not hasattr(fake, "shape"):
        return {"name": name, "dtype": type(fake).__name__.lower()}
    return {
        "name": name,
        "dtype": fake.element_type.__name__.lower(),
        "shape": [_extent(n) for n in fake.shape],
        "strides": [_stride(n) for n in fake.stride],
        "align": fake._assumed_align,
    }


def _extent(value: Any) -> int | str:
    return value if isinstance(value, int) else str(getattr(value, "symbol", None) or "n")


def _stride(value: Any) -> int | str:
    if isinstance(value, int):
        return value
    step = int(getattr(value, "divisibility", 1))
    return f"*{step}" if step > 1 else "*"


def call_text(symbol: str, arguments: list[dict[str, Any]]) -> str:
    """``symbol(name: dtype[shape], ...)`` in one line."""
    parts = []
    for argument in arguments:
        shape = argument.get("shape")
        extents = "" if shape is None else f"[{', '.join(map(str, shape))}]"
        parts.append(f"{argument['name']}: {argument['dtype']}{extents}")
    return f"{symbol}({', '.join(parts)})"
