"""mbarriers declared once: a ``Ring`` gives the storage field, the initialisation, waits, arrivals
and the budget's entries, so that code and declaration cannot differ.

A ring has ``stages`` slots that one side fills and, where ``empty`` is declared, the other frees:

    full[i]    arrives whoever has filled slot i; readers wait for it
    empty[i]   arrives whoever has read slot i; writers wait for it, a phase ahead

Counts are warps: one lane of a warp arrives, after ``sync_warp``, or a commit of its MMAs does.
Instructions carry the line of the caller, which is what a hazard report should name
(``dsl_user_op``).  Rings that TMA fills are ``cutlass.pipeline``'s (load/paged_tma.py); their
budget entries come from there.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64

from . import budget as bud
from . import compat
from .smem import array

Arrivals = dict[str, int]  # role -> warps that arrive in a phase


@dataclass(frozen=True)
class Ring:
    """Slots with a barrier each, or two.

    Attributes:
        name: of the storage field, ``<name>_bar``, and of the budget's entries.
        stages: slots.
        full: who fills a slot.
        empty: who frees it; None: nobody waits for a free slot.
    """

    name: str
    stages: int
    full: Arrivals
    empty: Arrivals | None = None

    @property
    def field(self) -> dict:
        """The ring's part of the storage."""
        return {f"{self.name}_bar": array(Int64, self.stages * (1 if self.empty is None else 2))}

    def budget(self) -> tuple[bud.Barrier, ...]:
        """Entries of the ring in a budget."""
        sides = [("full", self.full)] if self.empty is None else self._sides()
        return tuple(
            bud.Barrier(f"{self.name}_{side}", sum(who.values()), who, self.stages)
            for side, who in sides
        )

    def _sides(self) -> list[tuple[str, Arrivals]]:
        assert self.empty is not None
        return [("full", self.full), ("empty", self.empty)]

    def full_barrier(self, st, index):
        """Pointer to ``full[index]``, for what arrives by itself: TMA, a commit of MMAs."""
        return getattr(st, f"{self.name}_bar").data_ptr() + index

    def empty_barrier(self, st, index):
        """Pointer to ``empty[index]``."""
        return getattr(st, f"{self.name}_bar").data_ptr() + self.stages + index

    def init(self, st) -> None:
        """Initialise the ring's mbarriers with their arrivals; one thread calls this, before the
        fence that publishes all barriers."""
        for i in range(self.stages):
            cute.arch.mbarrier_init(self.full_barrier(st, i), sum(self.full.values()))
            if self.empty is not None:
                cute.arch.mbarrier_init(self.empty_barrier(st, i), sum(self.empty.values()))

    @compat.dsl_user_op
    def wait_full(self, st, index, phase, *, loc=None, ip=None) -> None:
        """Wait until slot ``index`` is filled.  ``phase``: parity of the fill that is waited for, 0
        for the first."""
        cute.arch.mbarrier_wait(self.full_barrier(st, index), phase, loc=loc, ip=ip)

    @compat.dsl_user_op
    def wait_empty(self, st, index, phase, *, loc=None, ip=None) -> None:
        """Wait until slot ``index`` is free.  ``phase``: a parity; a writer begins with 1, which is
        free at once."""
        cute.arch.mbarrier_wait(self.empty_barrier(st, index), phase, loc=loc, ip=ip)

    @compat.dsl_user_op
    def arrive_full(self, st, index, *, loc=None, ip=None) -> None:
        """Arrive at ``full[index]``; one lane of a warp calls this once the warp has filled its
        share of the slot."""
        cute.arch.mbarrier_arrive(self.full_barrier(st, index), loc=loc, ip=ip)

    @compat.dsl_user_op
    def arrive_full_if(self, st, index, chosen, *, loc=None, ip=None) -> None:
        """``arrive_full`` by the threads with ``chosen``, without a branch."""
        compat.inline_ptx(
            "{\n.reg .pred p;\nsetp.ne.s32 p, {$r0}, 0;\n"
            "@p mbarrier.arrive.shared::cta.b64 _, [{$r1}];\n}",
            read_only_args=[Int32(chosen), self.full_barrier(st, index).toint(loc=loc, ip=ip)],
            loc=loc, ip=ip,
        )  # fmt: skip

    @compat.dsl_user_op
    def arrive_empty(self, st, index, *, loc=None, ip=None) -> None:
        """Arrive at ``empty[index]``; one lane of a warp calls this once the warp has read what it
        needs of the slot."""
        cute.arch.mbarrier_arrive(self.empty_barrier(st, index), loc=loc, ip=ip)


@compat.dsl_user_op
def warps_meet(barrier: int, warps: int, *, loc=None, ip=None) -> None:
    """Wait at named barrier ``barrier`` until ``warps`` warps have come."""
    cute.arch.barrier(barrier_id=int(barrier), number_of_threads=32 * warps, loc=loc, ip=ip)
