"""Barriers that SM100's decode pipelines share, and rings of a pair of CTAs.

In a pair one thread of CTA 0, the *leader*, issues all MMAs: what it waits for, both CTAs announce
at the leader's barriers; what its MMAs complete, commits announce at both.

A commit speaks for its thread's MMAs and copies, not for loads: words of shared memory that lanes
of the issuing warp have read (scales, limits, a list's entries) are free when one of its lanes
arrives behind a ``sync_warp``, not when ``tcgen05.commit`` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ..blocks import compat
from ..blocks.barriers import Ring

LEADER = 0  # rank in the cluster


class Rings(NamedTuple):
    """Barriers that the roles hand over by (fp8/ws.py says which is which).

    Attributes:
        s, p, x, inv: scores; P with its factors; block products; 1 / row sums.
    """

    s: Any
    p: Any
    x: Any
    inv: Any


@dataclass(frozen=True)
class ToLeader(Ring):
    """A ring whose slots warps of both CTAs fill and free at the leader's barriers."""

    @compat.dsl_user_op
    def arrive_full(self, st, index, *, loc=None, ip=None) -> None:
        """Arrive at the leader's ``full[index]``; one lane of a warp of either CTA calls this."""
        _arrive_at_leader(self.full_barrier(st, index), loc=loc, ip=ip)

    @compat.dsl_user_op
    def arrive_empty(self, st, index, *, loc=None, ip=None) -> None:
        """Arrive at the leader's ``empty[index]``; one lane of a warp of either CTA calls this."""
        _arrive_at_leader(self.empty_barrier(st, index), loc=loc, ip=ip)


@dataclass(frozen=True)
class AlsoToLeader(Ring):
    """A ring of the CTA's own whose filled slots are announced at the leader's ``leader``, too."""

    leader: ToLeader | None = None

    @compat.dsl_user_op
    def arrive_full(self, st, index, *, loc=None, ip=None) -> None:
        """Arrive at this CTA's ``full[index]`` and at that of ``leader``, if there is one; one lane
        of a warp calls this once the warp has filled its share of the slot."""
        cute.arch.mbarrier_arrive(self.full_barrier(st, index), loc=loc, ip=ip)
        if self.leader is not None:
            self.leader.arrive_full(st, index, loc=loc, ip=ip)


def part_of_cta():
    """Part whose work tiles this CTA walks.  Every role reads it for itself: one value for all
    would live, and be spilled, through the role that needs most registers."""
    return cute.arch.block_idx()[1]


def _arrive_at_leader(barrier, *, loc=None, ip=None) -> None:
    rank = Int32(LEADER)
    cute.arch.mbarrier_arrive(barrier, peer_cta_rank_in_cluster=rank, loc=loc, ip=ip)
