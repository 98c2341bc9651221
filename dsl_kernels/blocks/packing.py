"""fp32 values as the words that are stored of them."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Uint32


def pack(values: list[Any], dt: Any) -> list[Any]:
    """fp32 values to ``dt`` (round to nearest even; e4m3 saturates) as Uint32 words."""
    if dt.width == 32:
        return [v.bitcast(Uint32) for v in values]
    wide = cute.make_rmem_tensor((len(values),), Float32)
    for i, v in enumerate(values):
        wide[i] = v
    narrow = cute.make_rmem_tensor((len(values),), dt)
    narrow.store(wide.load().to(dt))
    words = cute.recast_tensor(narrow, Uint32)
    return [words[i] for i in range(cute.size(words))]
