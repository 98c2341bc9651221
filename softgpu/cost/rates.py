"""Rates of an SM a cycle, by architecture, and tensor cycles of MMAs.

Rates are those of one multiprocessor.  The tensor core's follow from the vendor's nominal FLOP/s
at the boost clock; shared memory moves 128 bytes a cycle, reads and writes together.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..tensor_queue import TensorOp

STEP_BYTES = 32  # of K that one MMA instruction multiplies


@dataclass(frozen=True)
class Rates:
    """Units of one SM.

    Attributes:
        issue: warp instructions a cycle, all four schedulers.
        port: bytes of shared memory a cycle.
        mufu: special functions (lanes) a cycle.
        measured: an H200's counters have been compared with the model.
    """

    issue: int = 4
    port: int = 128
    mufu: int = 16
    measured: bool = True


HOPPER, BLACKWELL = Rates(), Rates(measured=False)


def of(architecture: int) -> Rates:
    """The rates of ``.target sm_90a`` (90) or ``sm_100a`` (100)."""
    return BLACKWELL if architecture >= 100 else HOPPER


def wgmma_cycles(n: int) -> float:
    """Cycles of an SM's tensor cores for m64 x N x 32 bytes of K: 4096 FMA of one byte a cycle."""
    return 64 * n * STEP_BYTES / 4096


def tcgen05_cycles(op: TensorOp) -> float:
    """Cycles of one SM for a tcgen05.mma: 8192 FMA of one byte a cycle, half if M = 64.

    0 for a copy.  A pair's M counts the rows of both CTAs, each of which does its share.
    """
    if op.kind != "mma":
        return 0.0
    m, n = op.shape[0], op.shape[1]  # type: ignore[index]
    rows, rate = m // op.group, 8192
    if rows < 128 and op.group == 1 and not op.shape[2]:  # type: ignore[index]
        rate = 4096  # half of the lanes
    return rows * n * STEP_BYTES / rate
