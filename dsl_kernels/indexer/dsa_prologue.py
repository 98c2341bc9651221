"""dsa_prologue: what a layer of sparse attention does to its projections before it scores tokens.

Roles        a CTA has one job, which its index tells, and WARPS warps that work by themselves:

             latents   a warp a token: RMS norm, RoPE, quantise, append (``append_kv.append_token``)
             keys      a warp a token: LayerNorm, RoPE, quantise, append of the index key
                       (``append_index_k.append_key``)
             queries   a warp HEADS neighbouring heads of an index query's token: RoPE, quantise,
                       the scale times the head's weight
             ropes     a warp ROPE_HEADS heads of a query's token: RoPE of its last 64 channels;
                       of none where attention's queries are somebody else's

             Latents come first: their chain of loads, sums and shuffles is the longest.
Memory       registers only, as those of the two appends; no shared memory
Timeline     wait for the previous grid | the job's own, as in its file | queries: load position,
             HEADS rows, weights | load angles | turn | max, redux | divide, pack | store
Bytes moved  a token: 1152 + 256 read of latent and key, 132 and its cache's bytes written; of each
             index head 256 + a weight read, 132 written; of each query's RoPE 128 and 128

The index queries' rule is the keys' (``append_index_k.py``), and

    w = fp32(fp32(weight * scale) * weight_scale)

A query with a NaN or an infinity, or without angles, is NaN, its weight too; no other row is.

Tensors of all jobs are of one dtype but the norm of keys, angles and weights, which may be fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ..blocks import compat, quant
from ..blocks import rope as rotary
from ..cache import append_bytes, byte_formats, stored
from ..cache.append_kv import append_token
from ..formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from ..formats.index_cache import INDEX_DIM
from . import index_rope
from .append_index_k import append_key, quantise
from .index_rope import CHANNELS, ptx

if TYPE_CHECKING:
    from ..spec import VariantSpec

WARPS = 4
HEADS = 4  # of index queries, in flight in one warp; divides their number
ROPE_HEADS = 8  # of attention's queries
ROPE_PER_LANE = QK_ROPE_HEAD_DIM // quant.WARP


class Latents(NamedTuple):
    """Content and RoPE to append to the KV cache, their slots, and the content's RMS norm."""

    c_kv: cute.Tensor  # in_dtype (n, 512)
    k_rope: cute.Tensor  # in_dtype (n, 64)
    slot_mapping: cute.Tensor  # i32|i64 (n,)
    norm: rotary.Norm


class Keys(NamedTuple):
    """Index keys to append, their cache and slots, and their LayerNorm."""

    cache: cute.Tensor  # u8 (pages, bytes)
    k: cute.Tensor  # in_dtype (n, 128)
    slot_mapping: cute.Tensor  # i32|i64 (n,)
    norm: index_rope.Norm


class Queries(NamedTuple):
    """The indexer's queries and what becomes of them."""

    q: cute.Tensor  # in_dtype (n, h, 128)
    weights: cute.Tensor  # f32 or in_dtype (n, h)
    out: cute.Tensor  # u8 (n, h, 128)
    out_weights: cute.Tensor  # f32 (n, h)
    weight_scale: Float32


class Ropes(NamedTuple):
    """RoPE channels of attention's queries."""

    rope: cute.Tensor  # in_dtype (n, num_heads, 64)
    out: cute.Tensor  # in_dtype (n, num_heads, 64)


class Styles(NamedTuple):
    """Compile-time options of a variant: the Hadamard transform, and styles of RoPE."""

    hadamard: bool
    neox: bool  # of latents and of attention's queries
    index_neox: bool


class DsaPrologue:
    """One variant; its host half is the method that takes its cache."""

    def __init__(self, spec: VariantSpec) -> None:
        self.styles = Styles(
            bool(spec.hadamard), spec.rope_style == "neox", spec.index_style == "neox"
        )
        if spec.format.named:
            self.target = append_bytes.target_of(spec.format)

    @cute.jit
    def planes(
        self,
        content: cute.Tensor, rope: cute.Tensor, scale: cute.Tensor,
        c_kv: cute.Tensor, k_rope: cute.Tensor, slot_mapping: cute.Tensor,
        index_cache: cute.Tensor, index_k: cute.Tensor, index_slot_mapping: cute.Tensor,
        index_q: cute.Tensor, index_weights: cute.Tensor, q_rope: cute.Tensor,
        positions: cute.Tensor, cos_sin: cute.Tensor,
        kv_norm_weight: cute.Tensor, index_norm_weight: cute.Tensor, index_norm_bias: cute.Tensor,
        out_q: cute.Tensor, out_weights: cute.Tensor, out_rope: cute.Tensor,
        kv_norm_eps: Float32, index_norm_eps: Float32, weight_scale: Float32, power_of_two: Int32,
        stream: Any,
    ) -> None:  # fmt: skip
        """Into planes of FP8 and a scale a token."""
        norm = rotary.Norm(kv_norm_weight, kv_norm_eps)
        self._launch(
            stored.Fp8Cache(content, rope, scale), Latents(c_kv, k_rope, slot_mapping, norm),
            Keys(
                index_cache, index_k, index_slot_mapping,
                index_rope.Norm(index_norm_weight, index_norm_bias, index_norm_eps),
            ),
            Queries(index_q, index_weights, out_q, out_weights, weight_scale),
            Ropes(q_rope, out_rope), rotary.Angles(positions, cos_sin), power_of_two, stream,
        )  # fmt: skip

    @cute.jit
    def as_bytes(
        self,
        kv: cute.Tensor,
        c_kv: cute.Tensor, k_rope: cute.Tensor, slot_mapping: cute.Tensor,
        index_cache: cute.Tensor, index_k: cute.Tensor, index_slot_mapping: cute.Tensor,
        index_q: cute.Tensor, index_weights: cute.Tensor, q_rope: cute.Tensor,
        positions: cute.Tensor, cos_sin: cute.Tensor,
        kv_norm_weight: cute.Tensor, index_norm_weight: cute.Tensor, index_norm_bias: cute.Tensor,
        out_q: cute.Tensor, out_weights: cute.Tensor, out_rope: cute.Tensor,
        kv_norm_eps: Float32, index_norm_eps: Float32, weight_scale: Float32, power_of_two: Int32,
        kv_power_of_two: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """Into a format of bytes; ``kv_power_of_two``: as ``append_kv``'s flag."""
        norm = rotary.Norm(kv_norm_weight, kv_norm_eps)
        self._launch(
            self.target(kv, kv_power_of_two), Latents(c_kv, k_rope, slot_mapping, norm),
            Keys(
                index_cache, index_k, index_slot_mapping,
                index_rope.Norm(index_norm_weight, index_norm_bias, index_norm_eps),
            ),
            Queries(index_q, index_weights, out_q, out_weights, weight_scale),
            Ropes(q_rope, out_rope), rotary.Angles(positions, cos_sin), power_of_two, stream,
        )  # fmt: skip

    @cute.jit
    def rows(
        self,
        kv: cute.Tensor,
        c_kv: cute.Tensor, k_rope: cute.Tensor, slot_mapping: cute.Tensor,
        index_cache: cute.Tensor, index_k: cute.Tensor, index_slot_mapping: cute.Tensor,
        index_q: cute.Tensor, index_weights: cute.Tensor, q_rope: cute.Tensor,
        positions: cute.Tensor, cos_sin: cute.Tensor,
        kv_norm_weight: cute.Tensor, index_norm_weight: cute.Tensor, index_norm_bias: cute.Tensor,
        out_q: cute.Tensor, out_weights: cute.Tensor, out_rope: cute.Tensor,
        kv_norm_eps: Float32, index_norm_eps: Float32, weight_scale: Float32, power_of_two: Int32,
        stream: Any,
    ) -> None:  # fmt: skip
        """Into rows of 16 bits of one head."""
        norm = rotary.Norm(kv_norm_weight, kv_norm_eps)
        self._launch(
            stored.Rows16(kv), Latents(c_kv, k_rope, slot_mapping, norm),
            Keys(
                index_cache, index_k, index_slot_mapping,
                index_rope.Norm(index_norm_weight, index_norm_bias, index_norm_eps),
            ),
            Queries(index_q, index_weights, out_q, out_weights, weight_scale),
            Ropes(q_rope, out_rope), rotary.Angles(positions, cos_sin), power_of_two, stream,
        )  # fmt: skip

    @cute.jit
    def _launch(
        self, cache: Any, latents: Any, keys: Any, queries: Any, ropes: Any, angles: Any,
        power_of_two: Any, stream: Any,
    ) -> None:  # fmt: skip
        n, heads, _ = queries.q.shape
        parts = heads // HEADS  # warps of an index query's token
        rope_parts = (ropes.rope.shape[1] + (ROPE_HEADS - 1)) // ROPE_HEADS
        if n > 0:  # an empty grid is a launch error
            warps = (n, n, n * parts, n * rope_parts)
            ctas = [(each + (WARPS - 1)) // WARPS for each in warps]
            begins = (ctas[0], 2 * ctas[0], 2 * ctas[0] + ctas[2])  # of jobs but the first
            by = (
                compat.fast_divisor(cache.shape[1]),
                compat.fast_divisor(cutlass.max(parts, 1)),
                compat.fast_divisor(cutlass.max(rope_parts, 1)),
            )
            self.kernel(
                cache, latents, keys, queries, ropes, angles, power_of_two, begins, by
            ).launch(
                grid=(begins[2] + ctas[3], 1, 1),
                block=(WARPS * quant.WARP, 1, 1),
                stream=stream,
                use_pdl=True,
            )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        cache: Any,  # stored.Fp8Cache, append_bytes.Target, stored.Rows16
        latents: Latents,
        keys: Keys,
        queries: Queries,
        ropes: Ropes,
        angles: rotary.Angles,
        power_of_two: Int32,
        begins: tuple[Int32, Int32, Int32],  # first CTA of keys, queries, ropes
        by: tuple[compat.FastDivisor, compat.FastDivisor, compat.FastDivisor],
    ) -> None:
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, warp = tidx % quant.WARP, tidx // quant.WARP
        hadamard, neox, index_neox = self.styles
        how = hadamard, index_neox, False
        n = latents.c_kv.shape[0]
        if block < begins[0]:
            token = block * WARPS + warp
            if token < n:
                append_token(
                    cache, latents.c_kv, latents.k_rope, latents.slot_mapping, by[0], angles,
                    latents.norm, neox, token, lane,
                )  # fmt: skip
        elif block < begins[1]:
            token = (block - begins[0]) * WARPS + warp
            if token < n:
                compat.pdl_wait()
                compat.pdl_launch_dependents()
                append_key(
                    keys.cache, keys.k, keys.slot_mapping, power_of_two, angles, keys.norm, how,
                    token, lane,
                )  # fmt: skip
        elif block < begins[2]:
            token, part = divmod((block - begins[1]) * WARPS + warp, by[1])
            if token < n:
                _quantise_query(queries, angles, power_of_two, how, token, part * HEADS, lane)
        else:
            token, part = divmod((block - begins[2]) * WARPS + warp, by[2])
            if token < n:
                _turn_rope(ropes, angles, neox, token, part * ROPE_HEADS, lane)


@cute.jit
def _quantise_query(
    queries: Queries,
    angles: rotary.Angles,
    power_of_two: Int32,
    how: cutlass.Constexpr,  # as ``append_key``'s
    token: Int32,
    first: Int32,  # head of HEADS
    lane: Int32,
) -> None:
    """Quantises HEADS heads of an index query's token."""
    q, weights, out, out_weights, weight_scale = queries
    hadamard, neox, last = how
    dt, wide = q.element_type, CHANNELS * q.element_type.width // 32
    row = q.iterator + (Int64(token) * q.stride[0] + Int64(first) * q.stride[1] + lane * CHANNELS)
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    position = angles.positions[token]
    loaded = [compat.load_words(row + i * Int64(q.stride[1]), wide) for i in range(HEADS)]
    weight = weights[token, first + lane % HEADS].to(Float32)
    rotary.loads_are_issued()
    turns = index_rope.load_angles(angles, position, lane, neox)
    scales = []
    to = out.iterator + (Int64(token) * out.stride[0] + first * INDEX_DIM + lane * CHANNELS)
    for i in cutlass.range_constexpr(HEADS):
        values = quant.to_f32(loaded[i], dt)
        values = index_rope.rotate(values, turns, lane, dt, neox, last)
        quantised, scale = quantise(values, power_of_two, lane, dt, hadamard)
        compat.store_words(to + i * INDEX_DIM, quantised)
        scales.append(scale)
    own = scales[0]
    for i in cutlass.range_constexpr(1, HEADS):
        own = Float32(cutlass.select_(lane == i, scales[i], own))
    scaled = ptx("mul.rn.f32", ptx("mul.rn.f32", weight, own), weight_scale)
    if lane < HEADS:
        at = out_weights.iterator + (Int64(token) * out_weights.stride[0] + first + lane)
        compat.store_words(at, [scaled.bitcast(Uint32)])


@cute.jit
def _turn_rope(
    ropes: Ropes,
    angles: rotary.Angles,
    neox: cutlass.Constexpr,
    token: Int32,
    first: Int32,  # head of ROPE_HEADS, of which the last token's may be fewer
    lane: Int32,
) -> None:
    """Turns the RoPE channels of up to ROPE_HEADS heads of a query's token."""
    rope, out = ropes
    dt, heads = rope.element_type, rope.shape[1]
    wide = ROPE_PER_LANE * dt.width // 32
    row = rope.iterator + (Int64(token) * rope.stride[0] + lane * ROPE_PER_LANE)
    to = out.iterator + (Int64(token) * out.stride[0] + lane * ROPE_PER_LANE)
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    position = angles.positions[token]
    loaded = []
    for i in cutlass.range_constexpr(ROPE_HEADS):
        head = cutlass.min(first + i, heads - 1)
        loaded.append(compat.load_words(row + Int64(head) * rope.stride[1], wide))
    rotary.loads_are_issued()
    turns = rotary.load_angles(angles, position, lane, neox)
    for i in cutlass.range_constexpr(ROPE_HEADS):
        turned = rotary.rotate(loaded[i], turns, lane, dt, neox)
        at = to + Int64(first + i) * out.stride[1]
        byte_formats.store_where(first + i < heads, at, turned)


def feasible(spec: VariantSpec) -> str | None:
    """Why this variant cannot be built, or None; see ``registry``."""
    format = spec.format
    if format.rope is None or format.content.count != KV_LORA_RANK:
        return f"the norm and RoPE are of {KV_LORA_RANK} + {QK_ROPE_HEAD_DIM} channels"
    if spec.weights_dtype not in ("f32", spec.in_dtype):
        return f"weights are f32 or as the input, {spec.in_dtype}, not {spec.weights_dtype}"
    return rotary.refusal(spec)


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    format, dt, rows = spec.format, compat.dtype(spec.in_dtype), compat.rows
    n, heads, num_heads = (compat.sym(name=name) for name in ("n", "h", "num_heads"))
    u8, slot = compat.DTYPES["u8"], compat.dtype(spec.index_dtype)
    cache = byte_formats.fakes(format) if format.named else stored.fakes(format)
    fakes = {
        **cache,
        "c_kv": rows(dt, (n, KV_LORA_RANK)),
        "k_rope": rows(dt, (n, QK_ROPE_HEAD_DIM)),
        "slot_mapping": compat.vector(slot, n),
        "index_cache": rows(u8, (compat.sym(name="index_pages"), compat.sym(name="bytes"))),
        "index_k": rows(dt, (n, INDEX_DIM)),
        "index_slot_mapping": compat.vector(slot, n),
        "index_q": rows(dt, (n, heads, INDEX_DIM)),
        "index_weights": rows(compat.dtype(spec.weights_dtype), (n, heads)),
        "q_rope": rows(dt, (n, num_heads, QK_ROPE_HEAD_DIM)),
        **rotary.angle_fakes(n, spec.cos_sin_dtype, spec.position_dtype),
        "kv_norm_weight": compat.vector(dt, KV_LORA_RANK, compat.VECTOR_BYTES),
        "index_norm_weight": compat.vector(Float32, INDEX_DIM, compat.VECTOR_BYTES),
        "index_norm_bias": compat.vector(Float32, INDEX_DIM, compat.VECTOR_BYTES),
        "out_q": compat.contiguous(u8, (n, heads, INDEX_DIM)),
        "out_weights": compat.contiguous(Float32, (n, heads), align=4),
        "out_rope": rows(dt, (n, num_heads, QK_ROPE_HEAD_DIM)),
        "kv_norm_eps": Float32(1e-6),
        "index_norm_eps": Float32(1e-6),
        "weight_scale": Float32(1.0),
        "power_of_two": Int32(0),
    }
    variant = DsaPrologue(spec)
    if format.named:
        return variant.as_bytes, fakes | {"kv_power_of_two": Int32(0)}
    return (variant.rows if format.rows else variant.planes), fakes
