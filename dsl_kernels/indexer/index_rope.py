"""Norm and rotary embedding of an index key, as DeepSeek's indexer applies them before the key is
quantised; the norm is LayerNorm (V3.2) or RMSNorm (V4).

A warp owns a key of 128 channels, a lane four side by side; values are Float32 that hold numbers of
the input's dtype, before and after, as separate kernels round between two launches.

    norm    d = x - sum(x) / 128      s = 1 / sqrt(sum(d^2) / 128 + eps)      y = dt(d s w + b)
    RMS     s = 1 / sqrt(sum(x^2) / 128 + eps)                                y = dt(x s w)
    RoPE    a' = dt(a cos - b sin)    b' = dt(b cos + a sin)      of the first 64 or the last 64

fp32 throughout, each operation rounded: no FMA.  A lane adds its channels in order, then lanes l
and l ^ 16, l ^ 8, ... l ^ 1 (``snapmla.testing.index_reference`` has it in torch).  A pair (a, b)
is (i, i + 32) of style ``neox``, which lanes l and l ^ 8 share, or (2 i, 2 i + 1) of
``interleaved``.  A position without a row makes cos NaN, and so the key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int64, cute

from ..blocks import compat, quant
from ..blocks.packing import pack
from ..blocks.rope import PAIRS, Angles
from ..formats.dims import QK_ROPE_HEAD_DIM
from ..formats.index_cache import INDEX_DIM

CHANNELS = INDEX_DIM // quant.WARP  # of a lane
TURNED = QK_ROPE_HEAD_DIM // CHANNELS  # lanes whose channels are turned, first or last ones
PARTNER = TURNED // 2  # of a lane of style neox, by xor


class Norm(NamedTuple):
    """Operands of the norm besides the key.  If ``bias`` is None it is RMSNorm, else LayerNorm."""

    weight: cute.Tensor  # f32 (128,)
    bias: Any  # f32 (128,), or None
    eps: Float32


def ptx(name: str, *values: Any) -> Any:
    """An fp32 instruction whose rounding is written down: ptxas makes no FMA of it."""
    places = ", ".join(f"{{$r{i}}}" for i in range(len(values)))
    return compat.inline_ptx(
        f"{name} {{$w0}}, {places};", write_only_types=[Float32], read_only_args=list(values)
    )


def rounded(values: list[Any], dt: Any) -> list[Any]:
    """Values as numbers of ``dt``."""
    return quant.to_f32(pack(values, dt), dt)


def normalise(values: list[Any], norm: Norm, lane: Any, dt: Any) -> list[Any]:
    """A lane's channels after the norm over the warp's key."""
    at = lane * CHANNELS
    weight, bias = (
        None if t is None else quant.to_f32(compat.load_words(t.iterator + at, CHANNELS), Float32)
        for t in (norm.weight, norm.bias)
    )
    if bias is not None:
        mean = ptx("mul.rn.f32", _sum(values), Float32(1.0 / INDEX_DIM))
        values = [ptx("sub.rn.f32", v, mean) for v in values]
    squares = _sum([ptx("mul.rn.f32", v, v) for v in values])
    variance = ptx("mul.rn.f32", squares, Float32(1.0 / INDEX_DIM))
    inverse = ptx(
        "div.rn.f32", Float32(1.0), ptx("sqrt.rn.f32", ptx("add.rn.f32", variance, norm.eps))
    )
    scaled = [ptx("mul.rn.f32", ptx("mul.rn.f32", v, inverse), w) for v, w in zip(values, weight)]
    if bias is not None:
        scaled = [ptx("add.rn.f32", v, b) for v, b in zip(scaled, bias)]
    return rounded(scaled, dt)


def _sum(values: list[Any]) -> Any:
    """Sum of the values of all lanes, the same in each of them."""
    total = values[0]
    for v in values[1:]:
        total = ptx("add.rn.f32", total, v)
    for bit in (16, 8, 4, 2, 1):
        total = ptx("add.rn.f32", total, cute.arch.shuffle_sync_bfly(total, bit))
    return total


def rotate(
    values: list[Any],
    angles: tuple[list[Any], list[Any]],
    lane: Any,
    dt: Any,
    neox: bool,
    last: bool,
) -> list[Any]:
    """A lane's channels, the first 64 of the key turned, or the ``last``; ``angles``: what
    ``load_angles`` gave."""
    cos, sin = angles
    if neox:
        lower = (lane & PARTNER) == 0  # lanes that hold a
        others = [cute.arch.shuffle_sync_bfly(v, PARTNER) for v in values]
        signs = [Float32(cutlass.select_(lower, -s, s)) for s in sin]
    else:
        others = [values[c ^ 1] for c in range(CHANNELS)]
        cos = [c for c in cos for _ in range(2)]
        signs = [s for value in sin for s in (-value, value)]
    turned = rounded(
        [
            ptx("add.rn.f32", ptx("mul.rn.f32", own, c), ptx("mul.rn.f32", other, s))
            for own, other, c, s in zip(values, others, cos, signs, strict=True)
        ],
        dt,
    )
    own = lane >= quant.WARP - TURNED if last else lane < TURNED
    return [Float32(cutlass.select_(own, t, v)) for t, v in zip(turned, values)]


def load_angles(
    angles: Angles, position: Any, lane: Any, neox: bool
) -> tuple[list[Any], list[Any]]:
    """Loads (cos, sin) of a lane's pairs: four of style ``neox``, or two."""
    table = angles.cos_sin
    dt, rows = table.element_type, table.shape[0]
    known = (position >= 0) & (position < rows)
    row = Int64(cutlass.select_(known, Int64(position), Int64(0)))
    count, lanes = (CHANNELS, PARTNER) if neox else (CHANNELS // 2, TURNED)
    at = table.iterator + (row * table.stride[0] + lane % lanes * count)
    words = count * dt.width // 32
    cos = quant.to_f32(compat.load_words(at, words), dt)
    sin = quant.to_f32(compat.load_words(at + PAIRS, words), dt)
    nothing = Float32(float("nan"))
    return [Float32(cutlass.select_(known, c, nothing)) for c in cos], sin
