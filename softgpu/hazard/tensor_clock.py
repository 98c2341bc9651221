"""Agents that work on tensor memory, as columns of the vector clocks: PTX ISA 9.7.18.6.

tcgen05.ld, tcgen05.st and tcgen05.alloc are agents of their warp; each thread that issues
tcgen05.mma or tcgen05.cp has an agent of its own, because tcgen05.commit speaks for the thread that
executes it.
Every agent has two columns in a lane's row: what the lane knows to be complete, and, its *twin*,
what it knows to be complete and to have been followed by ``tcgen05.fence::before_thread_sync``.
Releases and acquires move both as they move everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import TensorMemoryError

ISSUERS = 16  # threads of a CTA that may issue mma or cp


@dataclass
class Issuer:
    """A thread that issues mma or cp.

    Attributes:
        agent: its column, relative to the first.
        warp, lane: who it is; ``warp`` counts in the cluster.
        issued, committed: how many operations it has issued, and the newest one that a commit
            covers.
        event: the newest operation.
        commits: (newest operation covered, components of the mbarriers), the latest ones.
    """

    agent: int
    warp: int
    lane: int
    issued: int = 0
    committed: int = 0
    event: int = 0
    commits: list[tuple[int, list[int]]] = field(default_factory=list)


class TensorColumns:
    """Agents 0 to ``agents`` - 1, then ``nobody``, then the twins; column ``first`` is agent 0.

    Attributes:
        end: the first column behind.
        nobody: agent of cells that were never written; nobody ever knows its work.
        issuers: those that exist, by (warp of the cluster, lane).
    """

    OF_WARP = ("tcgen05.ld", "tcgen05.st", "tcgen05.alloc")
    KINDS = (*OF_WARP, "tcgen05")

    def __init__(self, first: int, ctas: int, warps: int) -> None:
        self.first, self.warps = first, warps
        self._issuers_from = len(self.OF_WARP) * warps
        self.agents = self.nobody = self._issuers_from + ISSUERS * ctas
        self.end = first + 2 * self.agents + 1
        self.issuers: dict[tuple[int, int], Issuer] = {}
        self._by_agent: dict[int, Issuer] = {}
        self._per_cta = warps // ctas
        self._room = [ISSUERS] * ctas

    def of_warp(self, kind: str, warp: int) -> int:
        """The agent of a warp's instructions, one of ``OF_WARP``."""
        return self.OF_WARP.index(kind) * self.warps + warp

    def twin(self, agent: int) -> int:
        """The column, counted from ``first``, of what fences have passed on."""
        return self.agents + 1 + agent

    def issuer(self, warp: int, lane: int) -> Issuer:
        """The thread as an issuer.

        Raises:
            TensorMemoryError: more than ``ISSUERS`` threads of the CTA issue.
        """
        found = self.issuers.get((warp, lane))
        if found is not None:
            return found
        cta = warp // self._per_cta
        if not self._room[cta]:
            raise TensorMemoryError(
                f"more than {ISSUERS} threads of a CTA issue tcgen05.mma or .cp: does one thread "
                "of the warp (elect.sync) issue for all?"
            )
        self._room[cta] -= 1
        agent = self._issuers_from + cta * ISSUERS + self._room[cta]
        found = self.issuers[warp, lane] = self._by_agent[agent] = Issuer(agent, warp, lane)
        return found

    def issuer_of(self, agent: int) -> Issuer | None:
        """The issuer behind an agent, None for what is of a warp."""
        return self._by_agent.get(agent)

    def name(self, agent: int) -> tuple[str, int]:
        """(one of ``KINDS``, warp of the cluster)."""
        if agent < self._issuers_from:
            kind, warp = divmod(agent, self.warps)
            return self.OF_WARP[kind], warp
        issuer = self._by_agent.get(agent)
        return "tcgen05", -1 if issuer is None else issuer.warp
