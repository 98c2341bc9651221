"""mha_delta: what the backward of dense MHA wants of each query row, before its two kernels.

``stats`` (mha_grads.py) gets LSE * log2 e and sum(O dO) - dLSE of a row and head, and what stands
for a row of which nothing may be used.

Roles        half a warp owns a row of one head; a CTA a row tile of ``mha_items``' list.
Memory       registers only: 16 bytes of O and of dO a lane.
Timeline     wait for the previous grid | (64 rows a round) all loads | products | four shuffles |
             stores
             | all of the CTA have stored: one release at GPU scope (mha_grads.py: DELTAS)
Bytes moved  512 read, 8 written a row and head.

A row's sum is of 16 lanes' sums of 8 products each, in one order whatever the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from ...blocks import compat, quant
from ...blocks.rounding import fma
from ...formats.mha_grads import DELTAS, PAD, READY, stats_row
from ...formats.mha_list import HEADER, ROWS, TILE_WORDS, TILES
from ...load.work_list import LOG2E
from ...schedule.mha_items import length

if TYPE_CHECKING:
    from ...spec import VariantSpec

THREADS, LANES, D_V = 256, 16, 128
TOGETHER = THREADS // LANES  # rows of a step
STEPS = 4  # of a round, whose loads are all under way before one is waited for


@cute.jit
def mha_delta(
    out: cute.Tensor,  # bf16 | f16 (total_q, h, 128)
    dout: cute.Tensor,  # bf16 | f16 (total_q, h, 128)
    lse: cute.Tensor,  # f32 (h, total_q), natural
    dlse: cute.Tensor,  # f32 (h or 0, total_q): gradient of lse; 0: there is none
    cu_seqlens_q: cute.Tensor,  # i32 (b + 1,)
    work: cute.Tensor,  # i32 (words,), as mha_items leaves it
    key_work: cute.Tensor,  # i32 (key_words,), as mha_items leaves it; word DELTAS is counted
    stats: cute.Tensor,  # f32 (h, blocks, PAD, 2)
    tiles: Int32,  # row tiles that the list has room for
    stream: Any,
) -> None:
    """Host half: a CTA for each row tile and head that there may be."""
    _delta((out, dout), (lse, dlse), cu_seqlens_q, (work, key_work), stats).launch(
        grid=(tiles, out.shape[1], 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
    )


@cute.kernel
def _delta(rows: Any, logs: Any, cu_seqlens_q: cute.Tensor, lists: Any, stats: cute.Tensor) -> None:
    work, key_work = lists
    tidx, _, _ = cute.arch.thread_idx()
    tile, head, _ = cute.arch.block_idx()
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    if tile < work[TILES]:
        at = HEADER + TILE_WORDS * tile
        sequence, m = work[at], work[at + 1]
        q0, s_q = cu_seqlens_q[sequence], length(cu_seqlens_q, sequence)
        padded = (s_q + (PAD - 1)) // PAD * PAD
        end = (m + 1) * ROWS
        if end >= s_q:  # the last row tile fills what is behind the sequence, too
            end = padded
        begin = stats.iterator + cute.crd2idx((head, 0, 0, 0), stats.layout)
        begin = begin + 2 * stats_row(q0, sequence)
        size = STEPS * TOGETHER
        for x in cutlass.range((end - m * ROWS + (size - 1)) // size, unroll=1):
            first = m * ROWS + x * size + tidx // LANES
            # of rows behind the sequence its last one is read, and nothing is taken
            held = [
                _loaded(rows, logs, q0 + cutlass.min(first + y * TOGETHER, s_q - 1), head)
                for y in range(STEPS)
            ]
            for y in cutlass.range_constexpr(STEPS):
                row = first + y * TOGETHER
                value, dot = _share(held[y][0])
                for off in cutlass.range_constexpr(4):
                    dot = dot + cute.arch.shuffle_sync_bfly(dot, 1 << off)
                    value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, 1 << off))
                value, dot = _of_row(held[y][1], value, dot)
                if row >= s_q:
                    value, dot = Float32.inf, Float32(0.0)
                if (tidx % LANES == 0) & (row < end):
                    compat.store_words(begin + 2 * row, [z.bitcast(Uint32) for z in (value, dot)])
    cute.arch.sync_threads()
    if tidx == 0:
        tiles, heads, _ = cute.arch.grid_dim()
        mine = cutlass.select_(tile + head == 0, READY + 1 - tiles * heads, Int32(1))
        # what this CTA has stored or waited for is seen by who acquires READY: mha_dkv.py
        cute.arch.atomic_add(key_work.iterator + DELTAS, Int32(mine), sem="release", scope="gpu")


@cute.jit
def _loaded(rows: Any, logs: Any, token: Int32, head: Int32) -> Any:
    """A lane's 8 channels of O and of dO, in 16 bits; LSE and its gradient."""
    tidx, _, _ = cute.arch.thread_idx()
    words = []
    for x in rows:
        at = x.iterator + cute.crd2idx((token, head, 8 * (tidx % LANES)), x.layout)
        words.append((compat.load_words(at.align(16), 4, **compat.STRONG), x.element_type))
    lse, dlse = logs
    given = Float32(0.0)
    if dlse.shape[0] > 0:
        given = dlse[head, token]
    return words, (lse[head, token], given)


def _share(words: Any) -> tuple[Float32, Float32]:
    """Reduce a lane's 8 channels of a row: (+inf if dO is not all finite, else 0; sum O dO)."""
    held = [quant.to_f32(each, dtype) for each, dtype in words]
    dot, look = Float32(0.0), Float32(0.0)
    for i in range(8):
        dot = fma(held[0][i], held[1][i], dot)
        look = fma(held[1][i], Float32(0.0), look)
    return Float32(cutlass.select_(look == look, Float32(0.0), Float32.inf)), dot


@cute.jit
def _of_row(logs: Any, wild: Float32, dot: Float32) -> Any:
    """The two words of a row, from its sums."""
    lse, dlse = logs
    value, dot = lse * LOG2E, dot - dlse
    if value == -Float32.inf:
        value = Float32.inf
    if wild > 0.0:
        value = Float32(float("nan"))
    return value, dot


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    names = ("h", "h_or_0", "total_q", "blocks", "b_plus_1", "words", "key_words")
    h, or_0, total, blocks, sequences, words, key_words = (compat.sym(name=name) for name in names)
    i32, f32, dt = compat.DTYPES["i32"], compat.DTYPES["f32"], compat.dtype(spec.dtype)
    return mha_delta, {
        "out": compat.rows(dt, (total, h, D_V)),
        "dout": compat.rows(dt, (total, h, D_V)),
        "lse": compat.strided(f32, (h, total), (compat.sym64(), compat.sym64()), 4),
        "dlse": compat.strided(f32, (or_0, total), (compat.sym64(), compat.sym64()), 4),
        "cu_seqlens_q": compat.vector(i32, sequences),
        "work": compat.vector(i32, words),
        "key_work": compat.vector(i32, key_words),
        "stats": stats_fake(h, blocks),
        "tiles": Int32(1),
    }


def stats_fake(heads: Any, blocks: Any) -> Any:
    """Fake of ``stats``."""
    f32 = compat.DTYPES["f32"]
    return compat.strided(f32, (heads, blocks, PAD, 2), (compat.sym64(4), 2 * PAD, 2, 1), 16)
