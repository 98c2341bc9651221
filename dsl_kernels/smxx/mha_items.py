"""mha_items: the list of work of dense MHA prefill, from lengths that stay on the device.

``work`` names every row tile of every sequence once, those that see the most keys first, and says
how many there are (mha_list.py).  Persistent CTAs take from its front, so that what is left at the
end is short.

Roles        one CTA; a warp a sequence, a lane a row tile.
Memory       shared: ``BINS`` counts, which become places; sums of warps.
Timeline     wait for the previous grid | count tiles by keys seen | prefix sum, longest first |
             each tile takes the next place of its count
Bytes moved  8 a sequence read twice, 8 a row tile written.

A counting sort: tiles that see equally many tiles of keys, or with more than ``BINS`` tiles of keys
nearly so, come in any order, which no result depends on.  Lengths below 0 count as 0, and tiles
beyond the room of ``work`` are left out, so that no ``cu_seqlens`` makes it write elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.memory
from cutlass import Int32, cute

from .. import compat
from ..mha_list import HEADER, KEYS, ROWS, TILE_WORDS, TILES
from . import quant
from .prefix_sum import SUMS, THREADS, WARPS, scan

if TYPE_CHECKING:
    from ..spec import VariantSpec

BINS = 2 * THREADS  # a thread sums two


def key_tiles(s_q: Any, s_k: Any, tile: Any, causal: Any) -> Any:
    """Tiles of keys that some row of a row tile sees."""
    last = cutlass.select_(causal != 0, (tile + 1) * ROWS + s_k - s_q, s_k)
    seen = cutlass.max(cutlass.min(s_k, last), 0)
    return (seen + (KEYS - 1)) // KEYS


def length(cu_seqlens: Any, sequence: Any) -> Any:
    """Tokens of a sequence."""
    return cutlass.max(cu_seqlens[sequence + 1] - cu_seqlens[sequence], 0)


@cute.jit
def mha_items(
    cu_seqlens_q: cute.Tensor,  # i32 (b + 1,)
    cu_seqlens_k: cute.Tensor,  # i32 (b + 1,)
    work: cute.Tensor,  # i32 (words,)
    causal: Int32,  # 0 or 1
    max_seqlen_k: Int32,  # makes counts coarser where it is long; nothing else depends on it
    stream: Any,
) -> None:
    """Host half: one CTA."""
    _list(cu_seqlens_q, cu_seqlens_k, work, causal, max_seqlen_k).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
    )


@cute.kernel
def _list(
    cu_seqlens_q: cute.Tensor,
    cu_seqlens_k: cute.Tensor,
    work: cute.Tensor,
    causal: Int32,
    max_seqlen_k: Int32,
) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    sums = smem.allocate_tensor(Int32, cute.make_layout(SUMS), 16)
    places = smem.allocate_tensor(Int32, cute.make_layout(BINS), 16)
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    shift = Int32(0)
    while ((max_seqlen_k + (KEYS - 1)) // KEYS) >> shift >= BINS:
        shift += 1
    for x in cutlass.range_constexpr(BINS // THREADS):
        places[x * THREADS + tidx] = Int32(0)
    cute.arch.sync_threads()
    lengths = (cu_seqlens_q, cu_seqlens_k)
    _each_tile(lengths, work, places, causal, shift, False)
    cute.arch.sync_threads()
    first, second = places[2 * tidx], places[2 * tidx + 1]
    upto, _, total, _ = scan(sums, first + second, Int32(0))
    places[2 * tidx] = upto - first - second
    places[2 * tidx + 1] = upto - second
    if tidx == 0:
        room = (work.shape[0] - HEADER) // TILE_WORDS
        for word in cutlass.range_constexpr(HEADER):
            work[word] = Int32(0)
        work[TILES] = cutlass.min(total, room)
    cute.arch.sync_threads()
    _each_tile(lengths, work, places, causal, shift, True)


@cute.jit
def _each_tile(
    lengths: Any, work: cute.Tensor, places: cute.Tensor, causal: Int32, shift: Int32,
    write: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Counts the tiles by keys seen, or writes each to the next place of its count."""
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    cu_q, cu_k = lengths
    room = (work.shape[0] - HEADER) // TILE_WORDS
    for sequence in cutlass.range(warp, cu_q.shape[0] - 1, WARPS, unroll=1):
        s_q, s_k = length(cu_q, sequence), length(cu_k, sequence)
        for tile in cutlass.range(lane, (s_q + (ROWS - 1)) // ROWS, quant.WARP, unroll=1):
            count = key_tiles(s_q, s_k, tile, causal) >> shift
            place = places.iterator + (BINS - 1 - cutlass.min(count, BINS - 1))
            at = Int32(cute.arch.atomic_add(place, Int32(1)))
            if cutlass.const_expr(write):  # noqa: SIM102 (a compile-time condition and another)
                if at < room:
                    work[HEADER + TILE_WORDS * at] = sequence
                    work[HEADER + TILE_WORDS * at + 1] = tile


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    i32 = compat.DTYPES["i32"]
    sequences = compat.sym(name="b_plus_1")
    fakes = {
        "cu_seqlens_q": compat.vector(i32, sequences),
        "cu_seqlens_k": compat.vector(i32, sequences),
        "work": compat.vector(i32, compat.sym(name="words")),
        "causal": Int32(1),
        "max_seqlen_k": Int32(1),
    }
    return mha_items, fakes
