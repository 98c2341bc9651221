"""RMS norm of the content and rotary embedding: an engine's steps before a row is quantised.

A row lies in a warp as ``quant.load_row`` leaves it, and stays so: each step takes words of the
input's dtype and gives words of it, rounded as the separate kernels of an engine round between two
launches.  All functions are plain Python: they unroll at trace time.

    norm    s = 1 / sqrt(sum x^2 / 512 + eps)      y = dt(dt(x * s) * weight)
    RoPE    a' = dt(a * cos - b * sin)             b' = dt(b * cos + a * sin)

fp32 throughout; ``dt`` rounds to the input's dtype.  Each product of RoPE is rounded before the
difference: no FMA.  Square root and reciprocal are IEEE's.  The order of the sum of squares is part
of the definition (``snapmla.testing.rope`` has it in torch): a lane adds its channels of one
16-byte load in memory order, then its loads, then lanes l and l ^ 16, l ^ 8, ... l ^ 1.

A pair (a, b) of RoPE channels is (2 i, 2 i + 1) of style ``interleaved``, which is one lane's, or
(i, i + 32) of style ``neox``, which lanes l and l ^ 16 share.  cos and sin of pair i are columns i
and 32 + i of the position's row.  A position without a row makes cos NaN, and so the row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int64, Uint32, cute

from ..formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from . import compat, quant
from .rounding import fma

PAIRS = QK_ROPE_HEAD_DIM // 2
MEAN = 1.0 / KV_LORA_RANK  # a power of two: exact
PARTNER = quant.WARP // 2  # of a lane of style neox, by xor


class Angles(NamedTuple):
    """Positions of the rows, and the table of cosines and sines that positions index."""

    positions: cute.Tensor  # i32|i64 (tokens,)
    cos_sin: cute.Tensor  # f32 or in_dtype (max_position, 64): 32 cos, 32 sin


class Norm(NamedTuple):
    """Operands of RMS norm besides the row."""

    weight: cute.Tensor  # in_dtype (512,)
    eps: Float32


def angle_fakes(tokens: Any, cos_sin_dtype: str, position_dtype: str) -> dict[str, Any]:
    """Fakes of ``Angles``, by argument name."""
    table = (compat.sym(name="max_position"), QK_ROPE_HEAD_DIM)
    return {
        "positions": compat.vector(compat.dtype(position_dtype), tokens),
        "cos_sin": compat.rows(compat.dtype(cos_sin_dtype), table),
    }


def refusal(spec: Any) -> str | None:
    """Why the rotation of a variant cannot be built, or None."""
    if spec.rope_style != "applied" and spec.cos_sin_dtype not in ("f32", spec.in_dtype):
        return f"cos and sin are f32 or as the input, {spec.in_dtype}, not {spec.cos_sin_dtype}"
    return None


def load_angles(angles: Angles, position: Any, lane: Any, neox: bool) -> list[tuple[Any, Any]]:
    """Loads (cos, sin) of the pairs that a lane turns: one, or two of style ``neox``."""
    table = angles.cos_sin
    dt, rows = table.element_type, table.shape[0]
    known = (position >= 0) & (position < rows)
    row = Int64(cutlass.select_(known, Int64(position), Int64(0)))
    width = 2 if neox or dt.width == 16 else 1  # at least a word
    first = lane % PARTNER * 2 if neox else lane // width * width
    at = table.iterator + (row * table.stride[0] + first)
    words = width * dt.width // 32
    cos = quant.to_f32(compat.load_words(at, words), dt)
    sin = quant.to_f32(compat.load_words(at + PAIRS, words), dt)
    if not neox and width == 2:
        odd = lane % 2 == 1
        cos, sin = ([Float32(cutlass.select_(odd, two[1], two[0]))] for two in (cos, sin))
    nothing = Float32(float("nan"))
    return [(Float32(cutlass.select_(known, c, nothing)), s) for c, s in zip(cos, sin)]


def loads_are_issued() -> None:
    """Keep the loads issued before this call in front of the loads behind it.

    Angles wait for their position.  ptxas would have other loads wait with them: it sinks a load
    whose value is used later.  It moves no memory access past a barrier of the warp, and this
    barrier costs no instruction.
    """
    cute.arch.sync_warp()


def rotate(
    words: list[Any], angles: list[tuple[Any, Any]], lane: Any, dt: Any, neox: bool
) -> list[Any]:
    """A lane's RoPE words, turned."""
    own = quant.to_f32(words, dt)
    if not neox:
        (a, b), (cos, sin) = own, angles[0]
        first = _rn("sub", _rn("mul", a, cos), _rn("mul", b, sin))
        second = _rn("add", _rn("mul", b, cos), _rn("mul", a, sin))
        return quant.pack([first, second], dt)
    other = quant.to_f32([cute.arch.shuffle_sync_bfly(w, PARTNER) for w in words], dt)
    turned = []
    for x, y, (cos, sin) in zip(own, other, angles):
        # lanes below 16 hold a, the others b: a product's sign is that of its factor
        signed = Float32(cutlass.select_(lane < PARTNER, -sin, sin))
        turned.append(_rn("add", _rn("mul", x, cos), _rn("mul", y, signed)))
    return quant.pack(turned, dt)


def load_weight(norm: Norm, lane: Any, dt: Any) -> list[list[Any]]:
    """A lane's words of the norm's weight, by chunk as those of a row."""
    vec = quant.lane_channels(dt)
    at = norm.weight.iterator + lane * vec
    chunks = range(quant.content_chunks(dt))
    return [compat.load_words(at + j * quant.WARP * vec, 4) for j in chunks]


def normalise(
    chunks: list[list[Any]], weight: list[list[Any]], eps: Any, dt: Any
) -> list[list[Any]]:
    """A lane's content words after RMS norm over the warp's row."""
    values = [quant.to_f32(words, dt) for words in chunks]
    total = _sum_of_squares(values[0], dt)
    for more in values[1:]:
        total = _rn("add", total, _sum_of_squares(more, dt))
    for bit in (16, 8, 4, 2, 1):
        total = _rn("add", total, cute.arch.shuffle_sync_bfly(total, bit))
    mean = _rn("add", _rn("mul", total, Float32(MEAN)), eps)
    inv = Float32(1.0) / _sqrt(mean)
    scaled = [quant.pack([_rn("mul", x, inv) for x in row], dt) for row in values]
    return [_times(row, by, dt) for row, by in zip(scaled, weight)]


def _sum_of_squares(values: list[Any], dt: Any) -> Any:
    total = _rn("mul", values[0], values[0])
    for x in values[1:]:
        if dt.width == 16:  # the square is exact, so FMA rounds as a product and a sum do
            total = fma(x, x, total)
        else:
            total = _rn("add", total, _rn("mul", x, x))
    return total


def _times(words: list[Any], weight: list[Any], dt: Any) -> list[Any]:
    """Products of packed values, rounded once; those of 16 bits are exact in fp32."""
    if dt.width == 32:
        return [
            _rn("mul", x.bitcast(Float32), w.bitcast(Float32)).bitcast(Uint32)
            for x, w in zip(words, weight)
        ]
    kind = "bf16x2" if dt is cutlass.BFloat16 else "f16x2"
    return [
        compat.inline_ptx(
            f"mul.rn.{kind} {{$w0}}, {{$r0}}, {{$r1}};",
            write_only_types=[Uint32],
            read_only_args=[x, w],
        )
        for x, w in zip(words, weight)
    ]


def _rn(name: str, x: Any, y: Any) -> Any:
    """add, sub or mul of fp32 whose rounding is written down: ptxas makes no FMA of it."""
    return compat.inline_ptx(
        f"{name}.rn.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Float32],
        read_only_args=[x, y],
    )


def _sqrt(x: Any) -> Any:
    return compat.inline_ptx(
        "sqrt.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )
