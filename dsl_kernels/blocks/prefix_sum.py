"""Prefix sums over the threads of a CTA, of two values at once."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from . import quant

WARPS = 16
THREADS = WARPS * quant.WARP  # of the CTAs that take them
SUMS = (WARPS, 2)  # shape of the table that ``scan`` is given


def warp_scan(value: Any, lane: Any, width: int = quant.WARP) -> Any:
    """Inclusive prefix sum over the first ``width`` lanes."""
    step = 1
    while step < width:
        before = cute.arch.shuffle_sync_up(value, step, mask_and_clamp=0)
        value = value + Int32(cutlass.select_(lane >= step, before, Int32(0)))
        step *= 2
    return value


@cute.jit
def scan(sums: cute.Tensor, a: Int32, b: Int32, settled: cutlass.Constexpr = False) -> Any:
    """Inclusive prefix sums over all threads of two values, and their totals.

    ``sums``: i32 ``SUMS`` in shared memory; ``settled``: no thread read it since the last barrier.
    Every thread must come here.
    """
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    a, b = warp_scan(a, lane), warp_scan(b, lane)
    if cutlass.const_expr(not settled):
        cute.arch.sync_threads()  # sums may still be read
    if lane == quant.WARP - 1:
        sums[warp, 0] = a
        sums[warp, 1] = b
    cute.arch.sync_threads()
    sum_a = warp_scan(sums[lane % WARPS, 0], lane, WARPS)
    sum_b = warp_scan(sums[lane % WARPS, 1], lane, WARPS)
    all_a = cute.arch.shuffle_sync(sum_a, WARPS - 1)
    all_b = cute.arch.shuffle_sync(sum_b, WARPS - 1)
    before_a = cute.arch.shuffle_sync(sum_a, cutlass.max(warp - 1, 0))
    before_b = cute.arch.shuffle_sync(sum_b, cutlass.max(warp - 1, 0))
    if warp > 0:
        a += before_a
        b += before_b
    return a, b, all_a, all_b


@cute.jit
def scan_max(sums: cute.Tensor, value: Int32) -> Any:
    """The greatest value so far, by thread, and of all; as ``scan``."""
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    value = _warp_max(value, quant.WARP)
    cute.arch.sync_threads()  # sums may still be read
    if lane == quant.WARP - 1:
        sums[warp, 0] = value
    cute.arch.sync_threads()
    greatest = _warp_max(sums[lane % WARPS, 0], WARPS)
    of_all = cute.arch.shuffle_sync(greatest, WARPS - 1)
    before = cute.arch.shuffle_sync(greatest, cutlass.max(warp - 1, 0))
    if warp > 0:
        value = cutlass.max(value, before)
    return value, of_all


def _warp_max(value: Any, width: int) -> Any:
    """The greatest value so far, over the first ``width`` lanes."""
    step = 1
    while step < width:  # a lane that reaches below the first one gets its own value
        value = cutlass.max(value, cute.arch.shuffle_sync_up(value, step, mask_and_clamp=0))
        step *= 2
    return value
