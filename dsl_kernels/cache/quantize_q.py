"""quantize_q: quantise query rows and divide their RoPE part by the same scale.

Roles        mode ``token_head``: one warp owns ROWS neighbouring query rows, no barrier.
             mode ``token``: one CTA owns a query token; its warps stride over the heads twice, once
             for the maximum over all heads and once, from L1/L2, to quantise.
             With a ``rope_style`` a row's RoPE channels are first turned by the angles of its
             token's position (``rope.py``), in mode ``token`` both times.
Memory       ``token_head``: registers only, ROWS * 9 (16-bit input) or ROWS * 18 (fp32) words a
             lane, and up to ROWS * 4 angles.  ``token``: 4 bytes of shared memory a warp for the
             maximum, up to 4 angles a lane.
Timeline     token_head: wait for the previous grid | load ROWS rows | max, redux | scale, store
             wait | load ROWS positions, rows | load angles | turn | max, redux | scale, store
             token: wait | (position, angles) | load, max over my heads | exchange | reload, scale,
             store
Bytes moved  per row 1152 read (16-bit input) + 644 written; ``token`` reads twice (L2 at worst)
             and writes one scale a token.  A token's position and angles (264 bytes at most) are
             read once, from L1 for all but its first head.

Inputs may be any strided view whose channels are contiguous and whose rows are 16-byte aligned
(for example the two slices of one (..., 576) tensor); outputs are contiguous.
Quantisation rule: see ``quant.py``.  This is the Fused-Q-Quant kernel of the SnapMLA paper
(section 3.3); ``token`` is the scale granularity that Modular's SM100 kernel uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.memory
from cutlass import Int32, Int64, Uint32, cute

from ..blocks import compat, quant
from ..blocks import rope as rotary
from ..formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM

if TYPE_CHECKING:
    from ..spec import VariantSpec

WARPS = 4  # token_head
ROWS = 2  # query rows in flight in one warp, token_head
TOKEN_WARPS = 16  # token


@cute.jit
def quantize_token_head(
    q_nope: cute.Tensor,  # in_dtype (b, s_q, h, 512)
    q_rope: cute.Tensor,  # in_dtype (b, s_q, h, 64)
    out_nope: cute.Tensor,  # u8 (b, s_q, h, 512)
    out_rope: cute.Tensor,  # bf16 (b, s_q, h, 64)
    out_scale: cute.Tensor,  # f32 (b, s_q, h)
    stream: Any,
) -> None:
    """Host half of mode ``token_head`` for queries whose RoPE is applied."""
    _launch_token_head((q_nope, q_rope), (out_nope, out_rope, out_scale), None, False, stream)


@cute.jit
def quantize_token(
    q_nope: cute.Tensor,  # in_dtype (b, s_q, h, 512)
    q_rope: cute.Tensor,  # in_dtype (b, s_q, h, 64)
    out_nope: cute.Tensor,  # u8 (b, s_q, h, 512)
    out_rope: cute.Tensor,  # bf16 (b, s_q, h, 64)
    out_scale: cute.Tensor,  # f32 (b, s_q)
    stream: Any,
) -> None:
    """Host half of mode ``token`` for queries whose RoPE is applied."""
    _launch_token((q_nope, q_rope), (out_nope, out_rope, out_scale), None, False, stream)


class Rotated:
    """Host halves for queries whose RoPE is still to be applied; ``positions`` is b * s_q long."""

    def __init__(self, neox: bool) -> None:
        self.neox = neox

    @cute.jit
    def token_head(
        self,
        q_nope: cute.Tensor,  # in_dtype (b, s_q, h, 512)
        q_rope: cute.Tensor,  # in_dtype (b, s_q, h, 64)
        positions: cute.Tensor,  # i32|i64 (b * s_q,)
        cos_sin: cute.Tensor,  # f32 or in_dtype (max_position, 64)
        out_nope: cute.Tensor,  # u8 (b, s_q, h, 512)
        out_rope: cute.Tensor,  # bf16 (b, s_q, h, 64)
        out_scale: cute.Tensor,  # f32 (b, s_q, h)
        stream: Any,
    ) -> None:
        """Mode ``token_head``."""
        q, out = (q_nope, q_rope), (out_nope, out_rope, out_scale)
        _launch_token_head(q, out, rotary.Angles(positions, cos_sin), self.neox, stream)

    @cute.jit
    def token(
        self,
        q_nope: cute.Tensor,  # in_dtype (b, s_q, h, 512)
        q_rope: cute.Tensor,  # in_dtype (b, s_q, h, 64)
        positions: cute.Tensor,  # i32|i64 (b * s_q,)
        cos_sin: cute.Tensor,  # f32 or in_dtype (max_position, 64)
        out_nope: cute.Tensor,  # u8 (b, s_q, h, 512)
        out_rope: cute.Tensor,  # bf16 (b, s_q, h, 64)
        out_scale: cute.Tensor,  # f32 (b, s_q)
        stream: Any,
    ) -> None:
        """Mode ``token``."""
        q, out = (q_nope, q_rope), (out_nope, out_rope, out_scale)
        _launch_token(q, out, rotary.Angles(positions, cos_sin), self.neox, stream)


@cute.jit
def _launch_token_head(q: Any, out: Any, angles: Any, neox: cutlass.Constexpr, stream: Any) -> None:
    """One CTA for every WARPS * ROWS query rows."""
    b, s_q, h, _ = q[0].shape
    by = (compat.fast_divisor(h), compat.fast_divisor(s_q))
    rows = b * s_q * h
    if rows > 0:  # an empty grid is a launch error
        _token_head(*q, *out, *by, angles, neox).launch(
            grid=((rows + (WARPS * ROWS - 1)) // (WARPS * ROWS), 1, 1),
            block=(WARPS * quant.WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )


@cute.jit
def _launch_token(q: Any, out: Any, angles: Any, neox: cutlass.Constexpr, stream: Any) -> None:
    """One CTA a query token."""
    b, s_q, h, _ = q[0].shape
    if b * s_q * h > 0:
        _token(*q, *out, angles, neox).launch(
            grid=(b * s_q, 1, 1),
            block=(TOKEN_WARPS * quant.WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )


def _offset(t: Any, coord: tuple[Any, Any, Any]) -> Any:
    """64-bit element offset of a (batch, s, head) row in a strided tensor."""
    batch, s, head = coord
    return Int64(batch) * t.stride[0] + Int64(s) * t.stride[1] + Int64(head) * t.stride[2]


def _quantise(
    words: tuple[list[list[Any]], list[Any]],
    dt: Any,
    inv: Any,
    lane: Any,
    row: Any,
    out_nope: Any,
    out_rope: Any,
) -> None:
    quant.store_row(
        *words,
        dt,
        inv,
        lane,
        out_nope.iterator + Int64(row) * KV_LORA_RANK,
        out_rope.iterator + Int64(row) * QK_ROPE_HEAD_DIM,
    )


def _turned(
    words: tuple[list[list[Any]], list[Any]], turn: Any, lane: Any, dt: Any, neox: bool
) -> tuple[list[list[Any]], list[Any]]:
    """A row with its RoPE words turned by ``turn``, its angles; as it is for None."""
    chunks, rope_words = words
    return chunks, rope_words if turn is None else rotary.rotate(rope_words, turn, lane, dt, neox)


@cute.kernel
def _token_head(
    q_nope: cute.Tensor,
    q_rope: cute.Tensor,
    out_nope: cute.Tensor,
    out_rope: cute.Tensor,
    out_scale: cute.Tensor,
    by_h: compat.FastDivisor,
    by_s_q: compat.FastDivisor,
    angles: Any,  # rope.Angles, None: RoPE is applied
    neox: cutlass.Constexpr,
) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane = tidx % quant.WARP
    first = (block * WARPS + tidx // quant.WARP) * ROWS
    b, s_q, h, _ = q_nope.shape
    rows = b * s_q * h
    dt = q_nope.element_type
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    if first < rows:
        loaded, positions = [], []
        for i in cutlass.range_constexpr(ROWS):
            # the last warp may have fewer rows: it reads its last one again and stores it once
            row = cutlass.min(first + i, rows - 1)
            token, head = divmod(row, by_h)
            positions.append(None if angles is None else angles.positions[token])
            coord = (*divmod(token, by_s_q), head)
            loaded.append(
                quant.load_row(
                    q_nope.iterator + _offset(q_nope, coord),
                    q_rope.iterator + _offset(q_rope, coord),
                    lane,
                    dt,
                )
            )
        if cutlass.const_expr(angles is not None):
            rotary.loads_are_issued()
            turns = [rotary.load_angles(angles, at, lane, neox) for at in positions]
            loaded = [_turned(row, turn, lane, dt, neox) for row, turn in zip(loaded, turns)]
        bits = [quant.warp_max(quant.scale_bits(*words, dt)) for words in loaded]
        for i in cutlass.range_constexpr(ROWS):
            row = first + i
            sigma, inv = quant.finish_scale(bits[i])
            if row < rows:
                _quantise(loaded[i], dt, inv, lane, row, out_nope, out_rope)
                if lane == 0:
                    compat.store_words(out_scale.iterator + row, [sigma.bitcast(Uint32)])


@cute.kernel
def _token(
    q_nope: cute.Tensor,
    q_rope: cute.Tensor,
    out_nope: cute.Tensor,
    out_rope: cute.Tensor,
    out_scale: cute.Tensor,
    angles: Any,  # rope.Angles, None: RoPE is applied
    neox: cutlass.Constexpr,
) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    _, s_q, h, _ = q_nope.shape
    coord = (token // s_q, token % s_q, Int32(0))
    nope = q_nope.iterator + _offset(q_nope, coord)
    rope = q_rope.iterator + _offset(q_rope, coord)
    dt = q_nope.element_type
    smem = cutlass.memory.SmemAllocator()
    top = smem.allocate_tensor(Uint32, cute.make_layout(TOKEN_WARPS), byte_alignment=16)
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    turn = None
    if cutlass.const_expr(angles is not None):
        turn = rotary.load_angles(angles, angles.positions[token], lane, neox)
    bits = Uint32(0)
    for head in cutlass.range(warp, h, TOKEN_WARPS, unroll=4):
        at = (nope + Int64(head) * q_nope.stride[2], rope + Int64(head) * q_rope.stride[2])
        words = _turned(quant.load_row(*at, lane, dt), turn, lane, dt, neox)
        bits = cutlass.max(bits, quant.scale_bits(*words, dt))
    bits = quant.warp_max(bits)
    if lane == 0:
        top[warp] = bits
    cute.arch.sync_threads()
    sigma, inv = quant.finish_scale(quant.warp_max(top[lane % TOKEN_WARPS]))
    if tidx == 0:
        compat.store_words(out_scale.iterator + token, [sigma.bitcast(Uint32)])
    for head in cutlass.range(warp, h, TOKEN_WARPS, unroll=2):
        at = (nope + Int64(head) * q_nope.stride[2], rope + Int64(head) * q_rope.stride[2])
        words = _turned(quant.load_row(*at, lane, dt), turn, lane, dt, neox)
        _quantise(words, dt, inv, lane, Int64(token) * h + head, out_nope, out_rope)


def feasible(spec: VariantSpec) -> str | None:
    """Why this variant cannot be built, or None; see ``registry``."""
    return rotary.refusal(spec)


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    dt = compat.dtype(spec.in_dtype)
    b, s_q, h = compat.sym(name="b"), compat.sym(name="s_q"), compat.sym(name="h")
    per_token = spec.mode == "token"
    scales = (b, s_q) if per_token else (b, s_q, h)
    q = {
        "q_nope": compat.rows(dt, (b, s_q, h, KV_LORA_RANK)),
        "q_rope": compat.rows(dt, (b, s_q, h, QK_ROPE_HEAD_DIM)),
    }
    out = {
        "out_nope": compat.contiguous(compat.DTYPES["u8"], (b, s_q, h, KV_LORA_RANK)),
        "out_rope": compat.contiguous(compat.DTYPES["bf16"], (b, s_q, h, QK_ROPE_HEAD_DIM)),
        "out_scale": compat.contiguous(compat.DTYPES["f32"], scales, align=4),
    }
    if spec.rope_style == "applied":
        return (quantize_token if per_token else quantize_token_head), {**q, **out}
    entry = Rotated(spec.rope_style == "neox")
    tokens = compat.sym(name="tokens")
    angles = rotary.angle_fakes(tokens, spec.cos_sin_dtype, spec.position_dtype)
    return (entry.token if per_token else entry.token_head), {**q, **angles, **out}
