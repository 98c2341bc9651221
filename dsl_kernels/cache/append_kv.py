"""append_kv: quantise new tokens and scatter them into the paged cache; a cache of 16-bit rows gets
them unquantised.

A spec with a ``rope_style`` is given tokens as a layer's projection leaves them: it turns their
RoPE channels by their positions' angles, with ``norm`` also normalises the content, and goes on as
the others do, from the same rounded values (``rope.py``).

Roles        one warp a token, WARPS warps a CTA, no barrier; a CTA is 128 threads so that a decode
             step's few hundred tokens already spread over the SMs, and 4096 tokens are one wave.
Memory       registers only: 9 (16-bit input) or 18 (fp32) words of the row a lane, 8 (16) of the
             norm's weight, 2 to 4 angles; no shared memory.
Timeline     wait for the previous grid | load slot, row | max, redux | scale, divide, pack | store
             wait | load position, slot, row, weight | load angles | norm | turn | max, redux | ...
             Warps without a token leave before the wait (of 16-bit rows behind it), the others
             have their sizes, strides and pointers read by then.  All loads of a row are in flight
             before the first is used; the slot is loaded with them and only decides where (and
             whether) to store.  The position is asked for first: its angles are the one load that
             waits for another.
             Of few tokens a warp's time is this chain's, some 0.4 us; what a profile shows beyond
             is launch and the wait, while the previous grid runs.
Bytes moved  per token 1152 read (16-bit input) + 644 written + the slot; + 256 (fp32) or 128 of
             angles and the position, and the weight's 1024 once (L1, L2).

bytes        (``append_bytes.py``, ``formats``) a scale for each group of channels, found by
             the lanes that have them, quotients without a branch; of formats with four fp32
             scales two lanes write them (one, of fp32 input).

16-bit rows  one warp a token and head, load row, slot | store; 1152 read + 1152 written; another
             dtype than the cache's is rounded once.

Slots outside [0, pages * P), such as -1, are skipped.  Offsets are 64-bit: pools may exceed 4 GiB.
Quantisation rule: see ``quant.py``.  This is the Fused-K-Append kernel of the SnapMLA paper
(section 3.3), with the scale floors this project adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ..blocks import compat, quant
from ..blocks import rope as rotary
from ..formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from . import append_bytes, byte_formats, stored

if TYPE_CHECKING:
    from ..formats.format import Format
    from ..spec import VariantSpec

WARPS = 4


@cute.jit
def append_kv(
    content: cute.Tensor,  # u8 (pages, P, 512)
    rope: cute.Tensor,  # bf16 (pages, P, 64)
    scale: cute.Tensor,  # f32 (pages, P)
    c_kv: cute.Tensor,  # in_dtype (n, 512)
    k_rope: cute.Tensor,  # in_dtype (n, 64)
    slot_mapping: cute.Tensor,  # i32|i64 (n,)
    stream: Any,
) -> None:
    """Host half for tokens as the cache keeps them."""
    cache = stored.Fp8Cache(content, rope, scale)
    _launch(cache, (c_kv, k_rope), slot_mapping, None, None, False, stream)


@cute.jit
def append_rows(
    kv: cute.Tensor,  # bf16|f16 (pages, P, h_kv, 576)
    c_kv: cute.Tensor,  # in_dtype (n * h_kv, 512)
    k_rope: cute.Tensor,  # in_dtype (n * h_kv, 64)
    slot_mapping: cute.Tensor,  # i32|i64 (n,)
    stream: Any,
) -> None:
    """Host half for a cache of 16-bit rows; heads of a token are rows side by side."""
    rows = cutlass.min(c_kv.shape[0], slot_mapping.shape[0] * kv.shape[2])
    by_page, by_head = compat.fast_divisor(kv.shape[1]), compat.fast_divisor(kv.shape[2])
    if rows > 0:  # an empty grid is a launch error
        _append_rows(kv, c_kv, k_rope, slot_mapping, rows, by_page, by_head).launch(
            grid=((rows + (WARPS - 1)) // WARPS, 1, 1),
            block=(WARPS * quant.WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )


class Rotated:
    """Host halves for tokens whose RoPE is still to be applied."""

    def __init__(self, neox: bool) -> None:
        self.neox = neox

    @cute.jit
    def rope(
        self,
        content: cute.Tensor,  # u8 (pages, P, 512)
        rope: cute.Tensor,  # bf16 (pages, P, 64)
        scale: cute.Tensor,  # f32 (pages, P)
        c_kv: cute.Tensor,  # in_dtype (n, 512)
        k_rope: cute.Tensor,  # in_dtype (n, 64)
        slot_mapping: cute.Tensor,  # i32|i64 (n,)
        positions: cute.Tensor,  # i32|i64 (n,)
        cos_sin: cute.Tensor,  # f32 or in_dtype (max_position, 64)
        stream: Any,
    ) -> None:
        """RoPE alone."""
        angles = rotary.Angles(positions, cos_sin)
        cache, tokens = stored.Fp8Cache(content, rope, scale), (c_kv, k_rope)
        _launch(cache, tokens, slot_mapping, angles, None, self.neox, stream)

    @cute.jit
    def norm_rope(
        self,
        content: cute.Tensor,  # u8 (pages, P, 512)
        rope: cute.Tensor,  # bf16 (pages, P, 64)
        scale: cute.Tensor,  # f32 (pages, P)
        c_kv: cute.Tensor,  # in_dtype (n, 512)
        k_rope: cute.Tensor,  # in_dtype (n, 64)
        slot_mapping: cute.Tensor,  # i32|i64 (n,)
        positions: cute.Tensor,  # i32|i64 (n,)
        cos_sin: cute.Tensor,  # f32 or in_dtype (max_position, 64)
        norm_weight: cute.Tensor,  # in_dtype (512,)
        norm_eps: Float32,
        stream: Any,
    ) -> None:
        """RMS norm and RoPE."""
        angles, norm = rotary.Angles(positions, cos_sin), rotary.Norm(norm_weight, norm_eps)
        cache, tokens = stored.Fp8Cache(content, rope, scale), (c_kv, k_rope)
        _launch(cache, tokens, slot_mapping, angles, norm, self.neox, stream)


class IntoBytes:
    """Host halves for a format of bytes.

    Attributes:
        target: class of its caches (``append_bytes.target_of``).
        neox: style of RoPE that is still to be applied.
    """

    def __init__(self, format: Format, neox: bool) -> None:
        self.target, self.neox = append_bytes.target_of(format), neox

    @cute.jit
    def applied(
        self,
        kv: cute.Tensor,  # u8 (pages, P, 1, bytes of a token)
        c_kv: cute.Tensor,  # in_dtype (n, content channels)
        k_rope: cute.Tensor,  # in_dtype (n, 64)
        slot_mapping: cute.Tensor,  # i32|i64 (n,)
        power_of_two: Int32,  # 0|1: fp32 scales are rounded up to powers of two
        stream: Any,
    ) -> None:
        """Tokens as the cache keeps them."""
        cache = self.target(kv, power_of_two)
        _launch(cache, (c_kv, k_rope), slot_mapping, None, None, False, stream)

    @cute.jit
    def content(
        self,
        kv: cute.Tensor,  # u8 (pages, P, 1, bytes of a token)
        c_kv: cute.Tensor,  # in_dtype (n, content channels)
        slot_mapping: cute.Tensor,  # i32|i64 (n,)
        power_of_two: Int32,  # 0|1: fp32 scales are rounded up to powers of two
        stream: Any,
    ) -> None:
        """The same of a format without a field for RoPE."""
        cache = self.target(kv, power_of_two)
        _launch(cache, (c_kv, None), slot_mapping, None, None, False, stream)

    @cute.jit
    def rope(
        self,
        kv: cute.Tensor,  # u8 (pages, P, 1, bytes of a token)
        c_kv: cute.Tensor,  # in_dtype (n, content channels)
        k_rope: cute.Tensor,  # in_dtype (n, 64)
        slot_mapping: cute.Tensor,  # i32|i64 (n,)
        positions: cute.Tensor,  # i32|i64 (n,)
        cos_sin: cute.Tensor,  # f32 or in_dtype (max_position, 64)
        power_of_two: Int32,
        stream: Any,
    ) -> None:
        """RoPE alone."""
        angles = rotary.Angles(positions, cos_sin)
        cache, tokens = self.target(kv, power_of_two), (c_kv, k_rope)
        _launch(cache, tokens, slot_mapping, angles, None, self.neox, stream)

    @cute.jit
    def norm_rope(
        self,
        kv: cute.Tensor,  # u8 (pages, P, 1, bytes of a token)
        c_kv: cute.Tensor,  # in_dtype (n, 512)
        k_rope: cute.Tensor,  # in_dtype (n, 64)
        slot_mapping: cute.Tensor,  # i32|i64 (n,)
        positions: cute.Tensor,  # i32|i64 (n,)
        cos_sin: cute.Tensor,  # f32 or in_dtype (max_position, 64)
        norm_weight: cute.Tensor,  # in_dtype (512,)
        norm_eps: Float32,
        power_of_two: Int32,
        stream: Any,
    ) -> None:
        """RMS norm of the content, and RoPE."""
        angles, norm = rotary.Angles(positions, cos_sin), rotary.Norm(norm_weight, norm_eps)
        cache, tokens = self.target(kv, power_of_two), (c_kv, k_rope)
        _launch(cache, tokens, slot_mapping, angles, norm, self.neox, stream)


@cute.jit
def _launch(
    cache: Any,
    tokens: Any,
    slot_mapping: Any,
    angles: Any,
    norm: Any,
    neox: cutlass.Constexpr,
    stream: Any,
) -> None:
    """One CTA for every WARPS tokens."""
    n = tokens[0].shape[0]
    by_page = compat.fast_divisor(cache.shape[1])
    if n > 0:  # an empty grid is a launch error
        _append_kv(cache, *tokens, slot_mapping, by_page, angles, norm, neox).launch(
            grid=((n + (WARPS - 1)) // WARPS, 1, 1),
            block=(WARPS * quant.WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )


def _slot(slot_mapping: cute.Tensor, token: Any) -> Any:
    """Loads where a token goes.

    A strong load: a plain one ptxas sinks to its use, behind everything else, where the warp would
    wait for memory a second time.
    """
    at, dt = slot_mapping.iterator + token, slot_mapping.element_type
    return Int64(dt(cute.arch.load(at, dt, **compat.STRONG)))


def _quantised(cache: Any, *token: Any) -> stored.Stores:
    """Calls the cache's method: called in a branch, it would make the cache a result of that."""
    return cache.quantised(*token)


@cute.kernel
def _append_kv(
    cache: Any,  # stored.Fp8Cache, append_bytes.Target
    c_kv: cute.Tensor,
    k_rope: Any,  # None of a format without
    slot_mapping: cute.Tensor,
    by_page: compat.FastDivisor,
    angles: Any,  # rope.Angles, None: RoPE is applied
    norm: Any,  # rope.Norm, None: the content is normalised
    neox: cutlass.Constexpr,
) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane = tidx % quant.WARP
    token = block * WARPS + tidx // quant.WARP
    if token < c_kv.shape[0]:
        append_token(
            cache, c_kv, k_rope, slot_mapping, by_page, angles, norm, neox, token, lane
        )  # fmt: skip


@cute.jit
def append_token(
    cache: Any,  # stored.Fp8Cache, append_bytes.Target, stored.Rows16
    c_kv: cute.Tensor,
    k_rope: Any,  # None of a format without
    slot_mapping: cute.Tensor,
    by_page: compat.FastDivisor,
    angles: Any,  # rope.Angles, None: RoPE is applied
    norm: Any,  # rope.Norm, None: the content is normalised
    neox: cutlass.Constexpr,
    token: Any,
    lane: Any,
) -> None:
    """Appends the warp's token, from the wait for the previous grid on."""
    # constants and addresses, while the previous grid is at work
    dt = c_kv.element_type
    content = c_kv.iterator + Int64(token) * c_kv.stride[0]
    rope = None if k_rope is None else k_rope.iterator + Int64(token) * k_rope.stride[0]
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    position = None if angles is None else angles.positions[token]
    slot = _slot(slot_mapping, token)
    chunks, rope_words = quant.load_row(content, rope, lane, dt, cache.channels[0])
    if cutlass.const_expr(norm is not None):
        weight = rotary.load_weight(norm, lane, dt)
    if cutlass.const_expr(angles is not None):
        rotary.loads_are_issued()
        turns = rotary.load_angles(angles, position, lane, neox)
    if cutlass.const_expr(norm is not None):
        chunks = rotary.normalise(chunks, weight, norm.eps, dt)
    if cutlass.const_expr(angles is not None):
        rope_words = rotary.rotate(rope_words, turns, lane, dt, neox)
    store, writes_scales, store_scales = _quantised(cache, chunks, rope_words, dt, slot, lane)
    page_size = cache.shape[1]
    if slot >= 0 and slot < Int64(cache.shape[0]) * page_size:
        # 2^31 tokens would be a pool of more than 1 TB: the quotient fits 32 bits
        page, offset = divmod(Int32(slot), by_page)
        at = (Int64(page), Int64(offset))
        store(at)
        if cutlass.const_expr(writes_scales is not None):  # noqa: SIM102 (decided at trace time)
            if writes_scales():
                store_scales(at)


@cute.kernel
def _append_rows(
    kv: cute.Tensor,
    c_kv: cute.Tensor,
    k_rope: cute.Tensor,
    slot_mapping: cute.Tensor,
    rows: Int32,
    by_page: compat.FastDivisor,
    by_head: compat.FastDivisor,
) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane = tidx % quant.WARP
    row = block * WARPS + tidx // quant.WARP
    dt = c_kv.element_type
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    if row < rows:
        token, head = divmod(row, by_head)
        words = quant.load_row(
            c_kv.iterator + Int64(row) * c_kv.stride[0],
            k_rope.iterator + Int64(row) * k_rope.stride[0],
            lane,
            dt,
        )
        slot = Int64(slot_mapping[token])
        if slot >= 0 and slot < Int64(kv.shape[0]) * kv.shape[1]:
            page, offset = divmod(Int32(slot), by_page)
            stored.Rows16(kv).store(words, dt, (Int64(page), Int64(offset), Int64(head)), lane)


def feasible(spec: VariantSpec) -> str | None:
    """Why this variant cannot be built, or None; see ``registry``."""
    format = spec.format
    if spec.norm != "given" and spec.rope_style == "applied":
        return "the norm comes with a rotary embedding, of style interleaved or neox"
    if format.rows and spec.rope_style != "applied":
        return "what rotates or normalises tokens writes FP8 caches"
    if format.rope is None and spec.rope_style != "applied":
        return f"format {format.name} has no RoPE of its own: rotate tokens before"
    if format.content.count != KV_LORA_RANK and spec.norm != "given":
        return f"the norm is of {KV_LORA_RANK} channels, content of {format.name} of fewer"
    return rotary.refusal(spec)


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    format, dt = spec.format, compat.dtype(spec.in_dtype)
    n = compat.sym(name="n")
    rows = compat.sym(name="n_times_h_kv") if format.rows else n
    fakes = {
        **(byte_formats.fakes(format) if format.named else stored.fakes(format)),
        "c_kv": compat.rows(dt, (rows, format.content.count)),
        "k_rope": compat.rows(dt, (rows, QK_ROPE_HEAD_DIM)),
        "slot_mapping": compat.vector(compat.dtype(spec.index_dtype), n),
    }
    if format.rope is None:
        del fakes["k_rope"]
    last = {"power_of_two": Int32(0)} if format.named else {}
    neox = spec.rope_style == "neox"
    into = IntoBytes(format, neox) if format.named else Rotated(neox)
    if spec.rope_style == "applied":
        if format.named:
            return into.applied if format.rope is not None else into.content, fakes | last
        return append_rows if format.rows else append_kv, fakes
    fakes |= rotary.angle_fakes(n, spec.cos_sin_dtype, spec.position_dtype)
    if spec.norm == "given":
        return into.rope, fakes | last
    weight = compat.vector(dt, KV_LORA_RANK, compat.VECTOR_BYTES)
    fakes |= {"norm_weight": weight, "norm_eps": Float32(1e-6)}
    return into.norm_rope, fakes | last
