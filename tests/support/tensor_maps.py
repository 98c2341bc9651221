"""Tensor maps as the driver packs them."""

from __future__ import annotations

import numpy as np


def encode_map(
    array: np.ndarray, extent: tuple[int, ...], stride: tuple[int, ...], box: tuple[int, ...],
    swizzle: int,
) -> bytes:  # fmt: skip
    """The 128 bytes of a tiled map, innermost dimension first; strides in bytes."""
    kind = {1: 0, 2: 1, 4: 2, 8: 4}[array.dtype.itemsize]
    flags = 2 | (len(extent) - 1) << 4 | kind << 7 | swizzle << 13 | 1 << 18
    e = [x - 1 for x in extent] + [0] * (5 - len(extent))
    s = [x // 16 for x in stride] + [0] * (4 - len(stride))
    b = [x - 1 for x in box] + [0] * (5 - len(box))
    words = [
        array.ctypes.data, flags | s[0] << 32, s[1] | s[2] << 32, s[3], e[0] | e[1] << 32,
        e[2] | e[3] << 32, e[4] | b[0] << 56, b[1] | b[2] << 8 | b[3] << 16 | b[4] << 24,
    ]  # fmt: skip
    return np.array(words + [0] * 8, np.uint64).tobytes()


def swizzled(offset: int, swizzle: int) -> int:
    """CuTe's Swizzle<B,4,3> on byte addresses."""
    bits = {0: 0, 1: 1, 2: 2, 3: 3}[swizzle]
    return offset ^ (((offset >> 7) & ((1 << bits) - 1)) << 4)
