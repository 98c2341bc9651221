"""Softmax of one 64-token block when query rows lie on M (S = Q K^T), shared by the pipelines.

A thread of the m64n64 fragment holds 2 rows x 16 tokens (fragments.RowsOnM).  Logits are in log2
units throughout.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from ..blocks.compat import dsl_user_op, inline_ptx
from ..blocks.types import F8, U16, U32
from ..combine.online_softmax import NEVER, P_LOG2_MAX
from ..formats.dims import TOKEN_TILE as TILE
from .fragments import RowsOnM, mask

ROWS_ON_M = RowsOnM()


@cute.jit
def logits(
    acc_S, t, sigma, tile, factor, limit, ragged_from, pending: cutlass.Constexpr = False
):  # fmt: skip
    """t = S sigma_k f + log2 sigma_k, masked; returns 1/sigma_k of this thread's tokens.

    ``acc_S``: the two partial sums of Q.K (qk.py).  ``sigma`` (16, 3): this thread's tokens' sigma,
    log2 sigma, 1/sigma in shared memory, fetched in three turns: registers are what is short.
    ``pending``: Q.K is in flight and is waited for behind the first fetch.
    """
    tidx, _, _ = cute.arch.thread_idx()
    row, token = ROWS_ON_M.row, ROWS_ON_M.token
    col = cute.make_rmem_tensor((16,), Float32)
    cute.autovec_copy(sigma[None, 0], col)
    if const_expr(pending):
        warpgroup.wait_group(0)
    for v in cutlass.range_constexpr(32):
        t[v] = (acc_S[0][v] + acc_S[1][v]) * col[token(v)]
    cute.autovec_copy(sigma[None, 1], col)
    for v in cutlass.range_constexpr(32):
        t[v] = t[v] * factor[row(v)] + col[token(v)]
    if (tile + 1) * TILE > ragged_from:
        # rows on M: of a thread's place only the quad lane, tidx % 4, says which tokens it holds
        mask(t, ROWS_ON_M, tile * TILE, limit, 0, tidx)
    inv = cute.make_rmem_tensor((16,), Float32)
    cute.autovec_copy(sigma[None, 2], inv)
    return inv


@cute.jit
def maxima(t):
    """Maxima of the thread's two rows over the block, at least ``NEVER``."""
    m4 = [t[v] for v in range(8)]  # four chains a row
    for v in cutlass.range_constexpr(8, 32):
        m4[v % 8] = cute.arch.fmax(m4[v % 8], t[v])
    m = [None] * 2
    for i in cutlass.range_constexpr(2):
        m[i] = cute.arch.fmax(
            cute.arch.fmax(m4[2 * i], m4[2 * i + 1]), cute.arch.fmax(m4[2 * i + 4], m4[2 * i + 5])
        )
    for off in cutlass.range_constexpr(2):  # both rows' shuffles side by side
        for i in cutlass.range_constexpr(2):
            m[i] = cute.arch.fmax(m[i], cute.arch.shuffle_sync_bfly(m[i], 1 << off))
    for i in cutlass.range_constexpr(2):
        m[i] = cute.arch.fmax(m[i], Float32(NEVER))
    return m


@cute.jit
def exp2_half(t, inv, shift, part, half: cutlass.Constexpr):
    """P' = exp2(t + shift) of 32 of the block's tokens, in place; ``part``, one or two sums a row,
    gains their P'/sigma."""
    row, token = ROWS_ON_M.row, ROWS_ON_M.token
    for v in cutlass.range_constexpr(16 * half, 16 * half + 16):
        t[v] = cute.math.exp2(t[v] + shift[row(v)], fastmath=True)
        c = 2 * row(v) + v % 2 if len(part) == 4 else row(v)
        part[c] = part[c] + t[v] * inv[token(v)]
    return part


def pack_half(t, half: int):
    """P8 of 32 tokens as the four words that stmatrix takes.

    Tokens are renamed as transpose.ROWS_ON_M, which makes this pure reindexing: no byte shuffles.
    """
    view = cute.make_tensor(
        t.iterator + 16 * half, cute.make_layout((2, 2, 2, 2), stride=(1, 4, 2, 8))
    )
    ordered = cute.make_rmem_tensor((2, 2, 2, 2), Float32)
    ordered.store(view.load())
    p8 = cute.make_rmem_tensor((16,), F8)
    cute.make_tensor(p8.iterator, ordered.layout).store(ordered.load().to(F8))
    words = cute.recast_tensor(p8, U32)
    return [words[i] for i in range(4)]


@dsl_user_op
def store_words_of_p(words, address, *, transposed: bool = False, loc=None, ip=None):
    """Four words of 16-bit values to the row that this lane names; ``address``: in shared memory.

    ``transposed``: a matrix' columns become rows there.
    """
    opcode = f"stmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16"
    inline_ptx(
        opcode + " [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words], loc=loc, ip=ip,
    )  # fmt: skip


@cute.jit
def block_p(acc_S, t, sigma, tile, factor, limit, ragged_from):
    """All of a block: finishes S and turns it into P' = exp2(t - m' + 8).

    Returns (m'_0, m'_1, l_0, l_1) of the two rows; l sums unquantised P'/sigma over this thread's
    tokens.  Waits for the Q.K WGMMAs itself, so that the first fetch hides under them.
    """
    inv = logits(acc_S, t, sigma, tile, factor, limit, ragged_from, pending=True)
    m = maxima(t)
    shift = [P_LOG2_MAX - m[0], P_LOG2_MAX - m[1]]
    part = [Float32(0.0) for _ in range(4)]
    for half in cutlass.range_constexpr(2):
        part = exp2_half(t, inv, shift, part, half)
    return m[0], m[1], part[0] + part[1], part[2] + part[3]


def store_p(t, p16, wwarp, lane):
    """P8 into shared memory ``p16`` ((64, 32) 16-bit view) as [row][token].

    Tokens are renamed as transpose.ROWS_ON_M, which makes this pure reindexing: no byte shuffles.
    """
    stsm = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), U16)
    view = cute.make_tensor(t.iterator, cute.make_layout((2, 2, 2, 2, 2), stride=(1, 4, 2, 8, 16)))
    ordered = cute.make_rmem_tensor((2, 2, 2, 2, 2), Float32)
    ordered.store(view.load())
    p8 = cute.make_rmem_tensor((16, 2), F8)
    cute.make_tensor(p8.iterator, ordered.layout).store(ordered.load().to(F8))
    words = cute.recast_tensor(p8, U16)
    mat, row8 = lane // 8, lane % 8
    for kb in range(2):
        row, chunk = wwarp * 16 + 8 * (mat % 2) + row8, kb * 2 + mat // 2
        dst = cute.local_tile(p16, (1, 8), (row, chunk))
        cute.copy(stsm, words[None, kb], dst[0, None])
