"""append_index_k: quantise new index keys and scatter them into the paged index cache.

A spec with a ``rope_style`` is given keys as a layer's projection leaves them: it turns 64 of their
channels, the first or the last, by their positions' angles, with ``norm`` also normalises them, and
goes on as the others do, from the same rounded values (``index_rope.py``).

Roles        one warp a token, WARPS warps a CTA, no barrier
Memory       registers only: a lane has four channels side by side; no shared memory
Timeline     wait for the previous grid | load row, slot, position | norm | load angles, turn |
             Hadamard: two steps in a lane, five by shuffle | max, redux | scale, divide, pack |
             store
Bytes moved  per token 256 read (16-bit input) + the slot, 132 written

The rule, in fp32 with IEEE quotients (vLLM's; powers of two are rounded up to):

    scale = max(amax, 1e-4) / 448        key = e4m3(k / scale)

A key with a NaN or an infinity becomes NaN everywhere, its scale too.  With ``hadamard`` a key is
first multiplied by the Hadamard matrix of 128 in Sylvester's order and by 128^-0.5, and rounded to
the input's dtype, as the separate kernel of an engine rounds it; its sums are fp32, of channels
that differ in bit 0 first, then in bit 1, and so on.

Slots outside [0, 64 * pages), such as -1, are skipped.  Offsets are 64-bit: pools may exceed 4 GiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ..blocks import compat, quant
from ..blocks import rope as rotary
from ..formats.dims import E4M3_MAX
from ..formats.index_cache import INDEX_DIM, LEAST_AMAX, PAGE, SCALES_AT
from . import index_rope
from .index_rope import CHANNELS, ptx, rounded

if TYPE_CHECKING:
    from ..spec import VariantSpec

WARPS = 4
FRACTION = 0x7FFFFF  # bits of an fp32 number below its exponent


class AppendIndexK:
    """One variant; its host half is the method that takes what the variant takes."""

    def __init__(self, spec: VariantSpec) -> None:
        self.hadamard, self.neox = bool(spec.hadamard), spec.rope_style == "neox"
        self.last = spec.turned == "last"

    @cute.jit
    def plain(
        self,
        cache: cute.Tensor,  # u8 (pages, bytes)
        k: cute.Tensor,  # in_dtype (n, 128)
        slot_mapping: cute.Tensor,  # i32|i64 (n,)
        power_of_two: Int32,  # 0|1: scales are rounded up to powers of two
        stream: Any,
    ) -> None:
        """Keys as they are."""
        self._launch(cache, k, slot_mapping, power_of_two, None, None, stream)

    @cute.jit
    def rope(
        self,
        cache: cute.Tensor,  # u8 (pages, bytes)
        k: cute.Tensor,  # in_dtype (n, 128)
        slot_mapping: cute.Tensor,  # i32|i64 (n,)
        positions: cute.Tensor,  # i32|i64 (n,)
        cos_sin: cute.Tensor,  # f32 or in_dtype (max_position, 64)
        power_of_two: Int32,
        stream: Any,
    ) -> None:
        """RoPE alone."""
        angles = rotary.Angles(positions, cos_sin)
        self._launch(cache, k, slot_mapping, power_of_two, angles, None, stream)

    @cute.jit
    def norm_rope(
        self,
        cache: cute.Tensor,  # u8 (pages, bytes)
        k: cute.Tensor,  # in_dtype (n, 128)
        slot_mapping: cute.Tensor,  # i32|i64 (n,)
        positions: cute.Tensor,  # i32|i64 (n,)
        cos_sin: cute.Tensor,  # f32 or in_dtype (max_position, 64)
        norm_weight: cute.Tensor,  # f32 (128,)
        norm_bias: cute.Tensor,  # f32 (128,)
        norm_eps: Float32,
        power_of_two: Int32,
        stream: Any,
    ) -> None:
        """LayerNorm and RoPE."""
        angles = rotary.Angles(positions, cos_sin)
        norm = index_rope.Norm(norm_weight, norm_bias, norm_eps)
        self._launch(cache, k, slot_mapping, power_of_two, angles, norm, stream)

    @cute.jit
    def rms_rope(
        self,
        cache: cute.Tensor,  # u8 (pages, bytes)
        k: cute.Tensor,  # in_dtype (n, 128)
        slot_mapping: cute.Tensor,  # i32|i64 (n,)
        positions: cute.Tensor,  # i32|i64 (n,)
        cos_sin: cute.Tensor,  # f32 or in_dtype (max_position, 64)
        norm_weight: cute.Tensor,  # f32 (128,)
        norm_eps: Float32,
        power_of_two: Int32,
        stream: Any,
    ) -> None:
        """RMSNorm and RoPE."""
        angles = rotary.Angles(positions, cos_sin)
        norm = index_rope.Norm(norm_weight, None, norm_eps)
        self._launch(cache, k, slot_mapping, power_of_two, angles, norm, stream)

    @cute.jit
    def _launch(
        self, cache: Any, k: Any, slot_mapping: Any, power_of_two: Any, angles: Any, norm: Any,
        stream: Any,
    ) -> None:  # fmt: skip
        n = k.shape[0]
        if n > 0:  # an empty grid is a launch error
            self.kernel(cache, k, slot_mapping, power_of_two, angles, norm).launch(
                grid=((n + (WARPS - 1)) // WARPS, 1, 1),
                block=(WARPS * quant.WARP, 1, 1),
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def kernel(
        self,
        cache: cute.Tensor,
        k: cute.Tensor,
        slot_mapping: cute.Tensor,
        power_of_two: Int32,
        angles: Any,  # rope.Angles, None: RoPE is applied
        norm: Any,  # index_rope.Norm, None: keys are normalised
    ) -> None:
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = tidx % quant.WARP
        token = block * WARPS + tidx // quant.WARP
        compat.pdl_wait()
        compat.pdl_launch_dependents()
        if token < k.shape[0]:
            how = self.hadamard, self.neox, self.last
            append_key(cache, k, slot_mapping, power_of_two, angles, norm, how, token, lane)


@cute.jit
def append_key(
    cache: cute.Tensor,
    k: cute.Tensor,
    slot_mapping: cute.Tensor,
    power_of_two: Int32,
    angles: Any,  # rope.Angles, None: RoPE is applied
    norm: Any,  # index_rope.Norm, None: keys are normalised
    how: cutlass.Constexpr,  # (hadamard, neox, last): what the variant does
    token: Any,
    lane: Any,
) -> None:
    """Appends the warp's key, behind the wait for the previous grid."""
    hadamard, neox, last = how
    dt = k.element_type
    at = k.iterator + (Int64(token) * k.stride[0] + lane * CHANNELS)
    words = compat.load_words(at, CHANNELS * dt.width // 32)
    slot = Int64(slot_mapping[token])
    position = None if angles is None else angles.positions[token]
    values = quant.to_f32(words, dt)
    if cutlass.const_expr(norm is not None):
        values = index_rope.normalise(values, norm, lane, dt)
    if cutlass.const_expr(angles is not None):
        turns = index_rope.load_angles(angles, position, lane, neox)
        values = index_rope.rotate(values, turns, lane, dt, neox, last)
    quantised, scale = quantise(values, power_of_two, lane, dt, hadamard)
    if slot >= 0 and slot < Int64(cache.shape[0]) * PAGE:
        row = Int64(slot) & (PAGE - 1)
        page = cache.iterator + (Int64(slot) >> 6) * cache.stride[0]
        compat.store_words(page + (row * INDEX_DIM + lane * CHANNELS), quantised)
        if lane == 0:
            compat.store_words(page + (SCALES_AT + 4 * row), [scale.bitcast(Uint32)])


def quantise(
    values: list[Any], power_of_two: Any, lane: Any, dt: Any, hadamard: bool
) -> tuple[list[Any], Any]:
    """(a lane's words of e4m3, the scale) of the warp's key or query, which ``hadamard``
    multiplies before."""
    if hadamard:
        values = rounded(_hadamard(values, lane), dt)
    scale = _scale(values, power_of_two)
    return quant.pack_e4m3([ptx("div.rn.f32", v, scale) for v in values]), scale


def _hadamard(values: list[Any], lane: Any) -> list[Any]:
    """The key times the Hadamard matrix and 128^-0.5."""
    for step in (1, 2):
        low, high = values, values  # channel c with c ^ step
        values = [
            ptx("add.rn.f32", low[c], high[c ^ step])
            if not c & step
            else ptx("sub.rn.f32", low[c ^ step], high[c])
            for c in range(CHANNELS)
        ]
    for step in (1, 2, 4, 8, 16):
        upper = (lane & step) != 0
        turned = []
        for own in values:
            other = cute.arch.shuffle_sync_bfly(own, step)
            signed = Float32(cutlass.select_(upper, -own, own))
            turned.append(ptx("add.rn.f32", other, signed))
        values = turned
    return [ptx("mul.rn.f32", v, Float32(INDEX_DIM**-0.5)) for v in values]


def _scale(values: list[Any], power_of_two: Any) -> Any:
    """Scale of the warp's key or query; NaN if one of its channels is not finite."""
    top = values[0].bitcast(Uint32) & Uint32(0x7FFFFFFF)
    for v in values[1:]:
        top = cutlass.max(top, v.bitcast(Uint32) & Uint32(0x7FFFFFFF))
    top = quant.warp_max(top)
    least = Float32(LEAST_AMAX).bitcast(Uint32)
    amax = cutlass.max(top, least).bitcast(Float32)
    below = Uint32(power_of_two) * Uint32(FRACTION)
    bits = (ptx("div.rn.f32", amax, Float32(E4M3_MAX)).bitcast(Uint32) + below) & ~below
    bad = top >= Uint32(quant.INF_BITS)
    return Uint32(cutlass.select_(bad, Uint32(quant.NAN_BITS), bits)).bitcast(Float32)


def feasible(spec: VariantSpec) -> str | None:
    """Why this variant cannot be built, or None; see ``registry``."""
    if spec.norm != "given" and spec.rope_style == "applied":
        return "the norm comes with a rotary embedding, of style interleaved or neox"
    if spec.turned == "last" and spec.rope_style == "applied":
        return "channels are turned by a rotary embedding, of style interleaved or neox"
    return rotary.refusal(spec)


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    dt, n = compat.dtype(spec.in_dtype), compat.sym(name="n")
    shape = compat.sym(name="pages"), compat.sym(name="bytes")
    fakes = {
        "cache": compat.rows(compat.DTYPES["u8"], shape),
        "k": compat.rows(dt, (n, INDEX_DIM)),
        "slot_mapping": compat.vector(compat.dtype(spec.index_dtype), n),
    }
    variant, last = AppendIndexK(spec), {"power_of_two": Int32(0)}
    if spec.rope_style == "applied":
        return variant.plain, fakes | last
    fakes |= rotary.angle_fakes(n, spec.cos_sin_dtype, spec.position_dtype)
    if spec.norm == "given":
        return variant.rope, fakes | last
    rms = spec.norm == "rms"
    for name in ("norm_weight",) if rms else ("norm_weight", "norm_bias"):
        fakes[name] = compat.vector(Float32, INDEX_DIM, compat.VECTOR_BYTES)
    host_half = variant.rms_rope if rms else variant.norm_rope
    return host_half, fakes | {"norm_eps": Float32(1e-6)} | last
