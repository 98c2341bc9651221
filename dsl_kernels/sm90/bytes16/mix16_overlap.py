"""The softmax warpgroup of ``mix16`` whose P.V runs under the next tile's softmax: lists of rows of
656 bytes or of V4's, 64 query heads a CTA.

As mix16_softmax.py, which hands P over in another way:

    P is announced late     P of tile i when Q.K of tile i + 1 has been issued.  So Q.K has the
                            tensor core to itself, and P.V runs while softmax has the exponentials
                            of tile i + 1, when the tensor core would idle
    nobody waits for votes  a warp computes P as if no m_ref moved while the votes are on their way,
                            by an mbarrier.  Where an m_ref does move, P is computed again, from the
                            same logits: bit for bit what mix16_softmax.py has

Timeline of tile i
    softmax       | Q.K i | RoPE i issued: P i-1 announced | vote, exp2 of i, P i | votes heard |
    P.V           | V^T of i-1 | wait P i-1                | 8 x (2 WGMMAs, convert) of i-1 | free

A work tile's last P is announced as soon as it is there.  Its first tile with a token moves m_refs
anyway: warps meet for that, and P is computed once; of the votes they see that they are there.

    votes   softmax's warps -> the same   (a vote of each, in the buffer of the tile's P)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...blocks.barriers import Ring
from ...blocks.rounding import fma
from ...formats.dims import TOKEN_TILE as TILE
from ..fp8.softmax_role import P_RING, P_STAGES, flags_of
from ..roles import SOFTMAX_WARPS, WARPGROUP
from .mix16_softmax import MixSoftmax

if TYPE_CHECKING:
    from ...blocks import budget as bud
    from ...spec import VariantSpec

VOTES = Ring("votes", P_STAGES, {"softmax": SOFTMAX_WARPS})


def overlaps(spec: VariantSpec) -> bool:
    """True if P.V overlaps the next tile's softmax: sparse decode, 64 rows, ``format.overlaps``."""
    return spec.op == "sparse_decode" and spec.row_tile == 64 and spec.format.overlaps


def votes_of(spec: VariantSpec) -> tuple[bud.Barrier, ...]:
    """Barriers of the role's own, in a budget."""
    return VOTES.budget() if overlaps(spec) else ()


def softmax_of(spec: VariantSpec, plain: type[MixSoftmax]) -> type[MixSoftmax]:
    """The role of a format, whose class is ``plain`` without overlap."""
    if not overlaps(spec):
        return plain
    return type(f"Overlapped{plain.__name__}", (Overlaps, plain), {})


class Overlaps(MixSoftmax):
    """Mixin that lets P.V overlap softmax; among the bases it precedes a format's class.

    Attributes:
        pending: of the tile before the one that is being compiled, (buffer of its P, whether there
            is one).
    """

    pending: Any = None

    def fields(self) -> dict:
        return dict(**super().fields(), **VOTES.field)

    def init(self, st) -> None:
        VOTES.init(st)

    # ---------------------------------------------------------------- P of the tile before

    def tile_begins(self, blocks, follows) -> None:
        self.pending = (blocks & 1) ^ 1, follows

    def scores_issued(self, st) -> None:
        self._announce(st)

    def tiles_end(self, st, blocks, some) -> None:
        self.pending = (blocks & 1) ^ 1, some
        self._announce(st)

    def _announce(self, st) -> None:
        """P to P.V, if there is one, without a branch."""
        tidx, _, _ = cute.arch.thread_idx()
        buf, some = self.pending
        chosen = cutlass.select_((tidx % 32 == 0) & some, Int32(1), Int32(0))
        P_RING.arrive_full_if(st, buf, chosen)

    # ---------------------------------------------------------------- P^T

    @cute.jit
    def give(self, st, t, wanted, inverse, first, at, l_run):
        """P^T of ``t``, the values relative to their rows' m_ref, to P.V, which hears of it
        later."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, wwarp = tidx % 32, cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        blocks, buf = at
        self.send_vote(st, wanted, buf, wwarp, lane)
        P_RING.wait_empty(st, buf, (blocks >> 1 & 1) ^ 1)
        sums, moves = cute.make_rmem_tensor((self.fragment.rows,), Float32), Int32(first)
        if first != 0:
            self.move_m_refs(st, t, buf, first, l_run, wwarp, lane)
            VOTES.wait_full(st, buf, blocks >> 1 & 1)  # warps have met: no phase ends unread
        self.write_p(st, t, inverse, sums, buf, wwarp, lane)
        if first == 0:
            moves = self.votes_heard(st, buf, blocks >> 1 & 1)
            if moves != 0:  # by code of its own: what every tile needs is fetched once
                self.move_m_refs(st, t, buf, first, l_run, wwarp, lane)
                self.write_p(st, t, inverse, sums, buf, wwarp, lane)
        for x in cutlass.range_constexpr(self.fragment.rows):
            l_run[x] = l_run[x] + sums[x]
        if lane == 0:
            flags_of(st)[wwarp, buf] = cutlass.Uint8(1) if moves != 0 else cutlass.Uint8(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()  # one lane announces for all, later

    @cute.jit
    def send_vote(self, st, wanted, buf, wwarp, lane):
        """The warp's vote for that m_refs move."""
        mine = cute.arch.vote_any_sync(wanted)
        if lane == 0:
            votes = st.votes.get_tensor(cute.make_layout((SOFTMAX_WARPS, P_STAGES)))
            votes[wwarp, buf] = cutlass.Uint8(1) if mine else cutlass.Uint8(0)
            VOTES.arrive_full(st, buf)

    def votes_heard(self, st, buf, phase):
        """All warps' votes as a word, when they are there."""
        VOTES.wait_full(st, buf, phase)
        words = cute.recast_ptr(st.votes.data_ptr().align(4), dtype=Int32)
        return cute.arch.make_warp_uniform(cute.make_tensor(words, cute.make_layout(P_STAGES))[buf])

    @cute.jit
    def write_p(self, st, t, inverse, sums, buf, wwarp, lane):
        """P^T of ``t``, which stays as it is, to shared memory, and what it adds to row sums."""
        p = cute.make_rmem_tensor((self.fragment.values,), Float32)
        for x in cutlass.range_constexpr(self.fragment.rows):
            v = 4 * (x // 2) + x % 2
            p[v] = cute.math.exp2(t[v], fastmath=True)
            p[v + 2] = cute.math.exp2(t[v + 2], fastmath=True)
            # rounded as mix16_softmax.py's, and the same wherever this is compiled to
            sums[x] = fma(p[v], inverse[0], p[v + 2] * inverse[1])
        base = st.p.data_ptr().toint() + buf * (self.rows_cta * TILE * 2)
        self.store_p(base, p, wwarp, lane)
        self.store_more(st, p, inverse, buf, wwarp, lane)
