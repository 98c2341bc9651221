"""CuTe's layouts, evaluated: a shape and a stride of the same nesting, as CUTLASS's traits are.

A coordinate is taken apart leftmost mode first (colexicographically), each part is multiplied by
its stride, and the products are added.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Nested = int | tuple[Any, ...]


def size(shape: Nested) -> int:
    """Elements of a shape."""
    return shape if isinstance(shape, int) else int(np.prod([size(s) for s in shape]))


def at(shape: Nested, stride: Nested, index: Any) -> Any:
    """The offset of element ``index`` (an int or an array of them) of the layout shape:stride."""
    if isinstance(shape, int):
        return index * stride
    assert isinstance(stride, tuple) and len(shape) == len(stride)
    total = 0
    for s, d in zip(shape, stride, strict=True):
        total = total + at(s, d, index % size(s))
        index = index // size(s)
    return total


def at2(shape: tuple[Any, Any], stride: tuple[Any, Any], i: Any, j: Any) -> Any:
    """The offset of element (i, j) of a layout of two modes."""
    return at(shape[0], stride[0], i) + at(shape[1], stride[1], j)
