"""Helpers that the handlers of several families share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..decode import Handler
from ..errors import SoftGpuError
from ..warp import Wait


# ---- handlers ------------------------------------------------------------------------------------
def binary(function: Any, d: int, a: int, b: int) -> Handler:
    """d = function(a, b) for a numpy ufunc."""

    named = function in (np.minimum, np.maximum)  # numpy wants the name of their third argument

    def run(w: Any, m: Any) -> None:
        v = w.v
        if named or m is not True:
            function(v[a], v[b], out=v[d], where=m)
        else:
            function(v[a], v[b], v[d])  # quicker without names

    return run


def unary(function: Any, d: int, a: int) -> Handler:
    """d = function(a) for a numpy ufunc."""

    def run(w: Any, m: Any) -> None:
        v = w.v
        if m is True:
            function(v[a], v[d])
        else:
            function(v[a], out=v[d], where=m)

    return run


def write(d: int, compute: Callable[[Any], Any]) -> Handler:
    """d = compute(v), any function of the views."""

    def run(w: Any, m: Any) -> None:
        v = w.v
        if m is True:
            v[d][...] = compute(v)
        else:
            np.copyto(v[d], compute(v), where=m)

    return run


def put(view: Any, value: Any, m: Any) -> None:
    """Writes lanes ``m`` of a view."""
    if m is True:
        view[...] = value  # a third of what copyto takes
    else:
        np.copyto(view, value, where=m)


def nothing(w: Any, m: Any) -> None:
    """Does nothing: for hints, and for what has no meaning here."""


# ---- masks ---------------------------------------------------------------------------------------
def first_lane(m: Any) -> int:
    """The lowest lane of a mask."""
    return 0 if m is True else int(np.argmax(m))


def lanes_of(m: Any) -> Iterable[int]:
    """The lanes of a mask, in ascending order."""
    return range(32) if m is True else np.nonzero(m)[0]


def whole_warp(w: Any, m: Any, name: str) -> Wait | None:
    """Blocks until all 32 lanes are here; for ``m`` other than True.

    Raises:
        SoftGpuError: lanes that have exited are missing.
    """
    wait: Wait | None = w.join(m, -1, f"{name}.sync")
    if wait is None:
        raise SoftGpuError(f"{name} needs all 32 lanes of the warp")
    return wait
