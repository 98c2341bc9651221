"""Sizes, barriers and ``Cta`` that the warp roles of every SM90 decode kernel share.

Roles of ``etap`` and ``split``: a producer warpgroup, one softmax warpgroup, two of P.V.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

from ..blocks.barriers import Ring
from ..load.work_list import Call

WARPGROUP = 128
ROWS_OF_CTA = 64
SWAP_AB_ROWS = 32  # and fewer: S^T = K Q^T
FEW_ROWS = 32  # and fewer, of kernels over bytes, whose S^T is always K Q^T
SOFTMAX_WARPS, PV_WARPS = 4, 8
Q_READERS = {"softmax": SOFTMAX_WARPS}
K_READERS = {"softmax": SOFTMAX_WARPS, "P.V": PV_WARPS}
# 1 / row sums of a work tile
INV_RING = Ring("inv", 1, {"softmax": SOFTMAX_WARPS}, {"P.V": PV_WARPS})


class Barrier(IntEnum):
    """Named barriers; each P.V warpgroup has one of its own, ``PV`` and the next."""

    SOFTMAX = 1
    PV = 2


class Layouts(NamedTuple):
    """Shared-memory layouts of Q and the KV ring, plane by plane, and of P."""

    q: tuple
    k: tuple
    p: Any


class Cta(NamedTuple):
    """State that every math role of a CTA works with; ``part``: the part whose work tiles it
    walks."""

    st: Any
    layouts: Layouts
    q_pipe: Any
    k_pipe: Any
    gmem: Any  # of the format's entry (entry/entries.py)
    call: Call
    part: Any
