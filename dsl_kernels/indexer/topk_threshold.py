"""Shared memory of ``select_topk``, and the search for the bin in which the k-th key lies."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.memory
from cutlass import Boolean, Int32, Uint32, cute

from ..blocks import compat, quant
from .topk_keys import BINS, Row, Shape, address, words_shift

PASSES = 3
GROUP = quant.WARP  # bins whose sum is kept
GROUPS = BINS // GROUP
# in ``sums``: bin, keys above; sum of the CTA; whether the bin's keys are one; sums of warps
FOUND, TOTAL, ONE_KEY, WARPS_AT = 0, 3, 5, 8
INSIDE = (2, 6, 7)  # in ``sums``: keys in the bin, of each pass, which the next one reads


class Smem(NamedTuple):
    """Shared memory of a CTA; other CTAs read histograms, groups and one of the sums."""

    hist: cute.Tensor  # u32 (PASSES * BINS,)
    group: cute.Tensor  # i32 (PASSES * GROUPS,)
    list: cute.Tensor  # u32 (entries, 2): key, column of the CTA's run; then selected positions
    bits: cute.Tensor  # u32 (2 * words * threads,): columns above the threshold; at it
    sums: cute.Tensor  # i32 (40,): FOUND, INSIDE, TOTAL, LISTED, ONE_KEY, warps from WARPS_AT on


def allocate(shape: Shape) -> Smem:
    """The shared memory of a variant."""
    smem = cutlass.memory.SmemAllocator()
    rows = cute.make_layout((shape.listed, 2), stride=(2, 1))
    return Smem(
        smem.allocate_tensor(Uint32, cute.make_layout(PASSES * BINS), 16),
        smem.allocate_tensor(Int32, cute.make_layout(PASSES * GROUPS), 16),
        smem.allocate_tensor(Uint32, rows, 16),
        smem.allocate_tensor(Uint32, cute.make_layout(2 * shape.words * shape.threads), 16),
        smem.allocate_tensor(Int32, cute.make_layout(WARPS_AT + quant.WARP), 16),
    )


@cute.jit
def clear(shape: cutlass.Constexpr, sm: Smem, row: Row) -> None:
    """Zeroes what is added to."""
    tidx, _, _ = cute.arch.thread_idx()
    for i in cutlass.range(tidx, PASSES * BINS, shape.threads, unroll=1):
        sm.hist[i] = Uint32(0)
    if cutlass.const_expr(shape.words == 1):
        for w in cutlass.range_constexpr(2):
            sm.bits[tidx + w * shape.threads] = Uint32(0)
    else:
        end = shape.threads << words_shift(shape, row)
        for i in cutlass.range(tidx, end, shape.threads, unroll=1):
            sm.bits[i] = Uint32(0)
            sm.bits[shape.words * shape.threads + i] = Uint32(0)
    if tidx < WARPS_AT:  # FOUND to LISTED are loaded as a vector
        sm.sums[tidx] = Int32(0)


@cute.jit
def cluster_sync(shape: cutlass.Constexpr) -> None:
    """A barrier of all CTAs of a row."""
    if cutlass.const_expr(shape.cluster == 1):
        cute.arch.sync_threads()
    else:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@compat.dsl_user_op
def _load_remote(at: Any, rank: Any, words: int, *, loc: Any = None, ip: Any = None) -> Any:
    """A word of another CTA's shared memory, or two as a pair."""
    vector, target = (".v2", "{{$w0}, {$w1}}") if words == 2 else ("", "{$w0}")
    return compat.inline_ptx(
        "{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, {$r0}, {$r1};\n"
        f"ld.shared::cluster{vector}.b32 {target}, [a];\n}}",
        write_only_types=[Int32] * words, read_only_args=[at, rank], loc=loc, ip=ip,
    )  # fmt: skip


@cute.jit
def of_rank(shape: cutlass.Constexpr, tensor: cute.Tensor, index: Any, rank: Any) -> Int32:
    """A word of the CTA ``rank`` of the cluster, or of this one where it is alone."""
    if cutlass.const_expr(shape.cluster == 1):
        return Int32(tensor[index])
    return _load_remote(address(tensor, index), rank, 1)


@cute.jit
def _of_all(shape: cutlass.Constexpr, tensor: cute.Tensor, index: Int32) -> Int32:
    """Sum of a word over the cluster."""
    total = Int32(0)
    for first in cutlass.range(0, shape.cluster, shape.ranks_at_once, unroll=1):
        for i in cutlass.range_constexpr(shape.ranks_at_once):
            total += of_rank(shape, tensor, index, first + i)
    return total


@cute.jit
def _pair_of_all(
    shape: cutlass.Constexpr, tensor: cute.Tensor, index: Int32
) -> tuple[Int32, Int32]:
    """Sums of a word at an even index and of the next."""
    low, high = Int32(0), Int32(0)
    if cutlass.const_expr(shape.cluster == 1):
        low, high = Int32(tensor[index]), Int32(tensor[index + 1])
    else:
        for first in cutlass.range(0, shape.cluster, shape.ranks_at_once, unroll=1):
            for i in cutlass.range_constexpr(shape.ranks_at_once):
                more = _load_remote(address(tensor, index), first + i, 2)
                low, high = low + more[0], high + more[1]
    return low, high


def _suffix(value: Any, lane: Any) -> Any:
    """Sum over this lane and those behind it."""
    step = 1
    while step < quant.WARP:
        behind = cute.arch.shuffle_sync_down(value, step)
        value = value + Int32(cutlass.select_(lane + step < quant.WARP, behind, Int32(0)))
        step *= 2
    return value


def _last(reached: Any) -> Any:
    """The highest lane for which ``reached`` holds, 0 if there is none."""
    ballot = Uint32(cute.arch.vote_ballot_sync(Boolean(reached)))
    return 31 - Int32(cute.arch.clz(ballot | 1))


@cute.jit
def find(
    shape: cutlass.Constexpr, sm: Smem, number: cutlass.Constexpr, wanted: Int32
) -> tuple[Uint32, Int32, Int32, Int32]:
    """(bin of the ``wanted``-th key from above, keys in bins above it, keys in it, whether they are
    known to be the lowest key of the bin and no other).

    Called when a CTA's threads have counted what is theirs in histogram ``number``.  The bins of a
    later pass share out the keys of the bin that the pass before found; those that were not counted
    are the lowest of all.
    """
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(GROUPS // shape.warps):
        group = warp + i * shape.warps
        bins = Int32(sm.hist[number * BINS + group * GROUP + lane])
        total = cute.arch.warp_redux_sync(bins, "add")
        if lane == 0:
            sm.group[number * GROUPS + group] = total
    cluster_sync(shape)
    if warp == 0:
        first = number * GROUPS + 2 * lane
        low, high = _pair_of_all(shape, sm.group, first)
        upto = _suffix(low + high, lane)
        rest = Int32(0)  # of bin 0
        if cutlass.const_expr(number > 0):
            rest = sm.sums[INSIDE[number - 1]] - cute.arch.shuffle_sync(upto, 0)
            upto += Int32(cutlass.select_(lane == 0, rest, Int32(0)))
            low += Int32(cutlass.select_(lane == 0, rest, Int32(0)))
        pair = _last(upto >= wanted)
        above = cute.arch.shuffle_sync(upto - low - high, pair)
        in_high = cute.arch.shuffle_sync(high, pair)
        group = 2 * pair + 1
        if above + in_high < wanted:
            above += in_high
            group -= 1
        here = _of_all(shape, sm.hist, number * BINS + group * GROUP + lane)
        if (group == 0) & (lane == 0):
            sm.sums[ONE_KEY] = Int32(here == 0)
            here += rest
        over = _suffix(here, lane) + above
        at = _last(over >= wanted)
        if lane == at:
            sm.sums[FOUND] = group * GROUP + at
            sm.sums[FOUND + 1] = over - here
            sm.sums[INSIDE[number]] = here
    cute.arch.sync_threads()
    at_bin = Uint32(sm.sums[FOUND])
    one_key = Int32(at_bin == 0) & sm.sums[ONE_KEY]
    return at_bin, sm.sums[FOUND + 1], sm.sums[INSIDE[number]], one_key
