"""The arguments of a compiled function by name.  Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def ordered(names: Iterable[str], values: Mapping[str, Any]) -> list[Any]:
    """Arguments of a call in order, from values by name.

    For whoever calls a compiled function off the hot path: the order is written down once, in the
    kernel, and comes here from a variant's record.

    Args:
        names: of the arguments, in ABI order (``name`` of what ``describe`` returned).
        values: one of each.

    Raises:
        TypeError: a value is missing, or of no argument.
    """
    wanted = list(names)
    if missing := [name for name in wanted if name not in values]:
        raise TypeError(f"arguments: expected {', '.join(wanted)}, got no {', '.join(missing)}")
    if unknown := [name for name in values if name not in wanted]:
        raise TypeError(f"arguments: expected {', '.join(wanted)}, got {', '.join(unknown)} too")
    return [values[name] for name in wanted]
