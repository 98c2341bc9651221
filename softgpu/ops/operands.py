"""Matrix operands in shared memory, as the descriptors of wgmma and tcgen05 name them.

Canonical layouts: PTX ISA 9.7.15.5.1 (wgmma), 9.7.18.3.3 (tcgen05); offsets in bytes.  A swizzle
permutes 16-byte chunks by absolute address bits, so a start inside an atom is allowed.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .. import floats

CHUNK = 16  # bytes
STEP = 32  # bytes of K that one instruction multiplies
ATOM = 1024  # the largest swizzle pattern repeats after so many bytes


@lru_cache(maxsize=4096)
def chunk_index(
    rows: int, depth: int, element: int, start: int, lbo: int, sbo: int, span: int, mn_major: bool
) -> NDArray[np.int64]:
    """16-byte chunk indices of an operand of ``rows`` (M or N) and ``depth`` (K) elements.

    Args:
        element: bytes of an element.
        start: offset of the operand's first byte from a multiple of 1024.
        lbo, sbo: the descriptor's leading and stride byte offsets.
        span: bytes of a swizzled row: 128, 64, 32; 0 without swizzle.

    Returns:
        K-major: (rows, depth * element / 16).  MN-major: (depth, rows * element / 16), for each k
        the chunks of consecutive rows.
    """
    outer, inner = (depth, rows) if mn_major else (rows, depth)
    r, c = np.arange(outer)[:, None], np.arange(inner * element // CHUNK)[None, :]
    if span == 0:
        across, along = (lbo, sbo) if mn_major else (sbo, lbo)
        offset = r % 8 * CHUNK + r // 8 * across + c * along
    else:
        per = span // CHUNK if mn_major else c.shape[1]
        offset = r % 8 * span + r // 8 * sbo + c % per * CHUNK + c // per * lbo
    at = start + offset
    if span:
        at = at ^ ((at >> 7 & span // CHUNK - 1) << 4)
    out: NDArray[np.int64] = (at >> 4).astype(np.int64)
    return out


def read(
    shared: NDArray[np.uint64], index: NDArray[np.int64], element: int, mn_major: bool
) -> NDArray[np.uint8]:
    """The operand that ``chunk_index`` found: (rows, bytes of K), K contiguous in each row.

    Args:
        shared: (chunks, 2) view of shared memory.
    """
    data: NDArray[np.uint8] = shared[index].view(np.uint8)
    if not mn_major:
        return data.reshape(len(index), -1)
    depth = len(index)
    elements = data.reshape(depth, -1, element).transpose(1, 0, 2)
    return np.ascontiguousarray(elements).reshape(-1, depth * element)


def decode(raw: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    """(rows, bytes) of "e4m3", "e5m2", "bf16" or "f16" -> (rows, K) float32."""
    if kind == "e4m3":
        return floats.E4M3[raw]
    if kind == "e5m2":
        return floats.E5M2[raw]
    half = raw.view(np.uint16)
    if kind == "bf16":
        return floats.bf16_to_f32(half)
    return half.view(np.float16).astype(np.float32)
