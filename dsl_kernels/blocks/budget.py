"""Needs of a warp-specialised CTA on an SM, declared as data and checked before compiling.

A kernel module describes its CTA in a ``Budget``: warpgroups with their register counts, mbarriers
with their arrivals, shared memory, MMA shapes.  ``check`` returns in one sentence why such a CTA
cannot run, or None; codegen's audit then compares the same declaration with what was compiled
(setmaxnreg values, mbarrier counts, threads), so it cannot drift away from the code.

Standard library only: hosts without the compiler read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SMEM_MAX = 232448  # bytes of shared memory a CTA can opt in to, sm_90 and sm_100
REGISTERS = 65536  # 32-bit registers of an SM
THREADS_MAX = 1024
WARPS_IN_GROUP = 4
SETMAXNREG = range(24, 257, 8)  # values the instruction takes (PTX ISA, setmaxnreg)
MBARRIER_MAX = 2**20 - 1  # pending arrivals (PTX ISA, mbarrier)
MMA_M = 64  # the least of a full-rate instruction, sm_90 and sm_100
MMA_N = range(8, 257, 8)
MMA_K = {"e4m3": 32, "bf16": 16, "f16": 16}  # 32 bytes of the operand
MMA_OPCODE = {
    "sm_90a": {"e4m3": "QGMMA", "bf16": "HGMMA", "f16": "HGMMA"},
    "sm_100a": {"e4m3": "UTCQMMA", "bf16": "UTCHMMA", "f16": "UTCHMMA"},
}
TMEM_COLUMNS = (0, 32, 64, 128, 256, 512)  # what tcgen05.alloc grants; 0: none is asked for


@dataclass(frozen=True)
class WarpGroup:
    """128 threads with one role, or several single-warp roles.

    Attributes:
        name: of the role.
        registers: per thread after setmaxnreg; 0: as allotted at launch (no setmaxnreg).
        count: warpgroups of this kind.
    """

    name: str
    registers: int = 0
    count: int = 1


@dataclass(frozen=True)
class Barrier:
    """mbarriers of one purpose.

    Attributes:
        name: what the phase change means.
        count: arrivals that complete a phase, as given to mbarrier.init.
        arrivals: who arrives (role) and how often in a phase.
        copies: number of such barriers (stages).
    """

    name: str
    count: int
    arrivals: dict[str, int]
    copies: int = 1


@dataclass(frozen=True)
class Mma:
    """One MMA tile: M x N accumulator per instruction chain, K elements in all.

    ``under_softmax``: it is issued in pieces between the steps of the softmax of the block before.
    """

    name: str
    m: int
    n: int
    k: int
    dtype: str
    under_softmax: bool = False


@dataclass(frozen=True)
class Budget:
    """Needs of one CTA; ``smem`` is an upper bound in bytes, ``tmem_columns`` of tensor memory."""

    groups: tuple[WarpGroup, ...]
    smem: int
    barriers: tuple[Barrier, ...] = ()
    mmas: tuple[Mma, ...] = field(default=())
    tmem_columns: int = 0
    arch: str = "sm_90a"

    @property
    def threads(self) -> int:
        """Threads of the CTA."""
        return 32 * WARPS_IN_GROUP * sum(g.count for g in self.groups)

    @property
    def registers(self) -> int:
        """Registers that all warpgroups hold after their setmaxnreg."""
        return 32 * WARPS_IN_GROUP * sum(g.count * g.registers for g in self.groups)

    @property
    def at_launch(self) -> int:
        """Registers per thread that a launch can be granted: what setmaxnreg redistributes."""
        return REGISTERS // self.threads // 8 * 8

    def barrier_counts(self) -> dict[int, int]:
        """Arrival count of mbarrier.init -> number of barriers initialised with it."""
        counts: dict[int, int] = {}
        for barrier in self.barriers:
            counts[barrier.count] = counts.get(barrier.count, 0) + barrier.copies
        return dict(sorted(counts.items()))

    def opcodes(self) -> list[str]:
        """SASS opcodes that its MMAs must have become."""
        return sorted({MMA_OPCODE[self.arch][mma.dtype] for mma in self.mmas})

    def under_softmax(self) -> list[str]:
        """SASS opcodes of those among them that run under softmax."""
        return sorted({MMA_OPCODE[self.arch][m.dtype] for m in self.mmas if m.under_softmax})


def check(budget: Budget) -> str | None:
    """Return why no SM can run such a CTA, or why it would wait forever; None if neither holds."""
    checks = (_registers, _smem, _tmem, _barriers, _mmas)
    return next((reason for c in checks if (reason := c(budget)) is not None), None)


def _registers(budget: Budget) -> str | None:
    if budget.threads > THREADS_MAX:
        return f"{budget.threads} threads, a CTA has at most {THREADS_MAX}"
    given = [g for g in budget.groups if g.registers]
    for group in given:
        if group.registers not in SETMAXNREG:
            return (
                f"warpgroup {group.name}: setmaxnreg takes multiples of 8 from 24 to 256, got "
                f"{group.registers}"
            )
    if given and len(given) < len(budget.groups):
        missing = ", ".join(g.name for g in budget.groups if not g.registers)
        return f"warpgroup {missing}: no register count, the others have one"
    pool = budget.at_launch * budget.threads
    if budget.registers > pool:
        shares = " + ".join(f"{g.count} x {g.registers} ({g.name})" for g in budget.groups)
        return (
            f"setmaxnreg asks for {budget.registers} registers ({shares}, 128 threads each), the "
            f"CTA owns {pool}: it would wait forever"
        )
    return None


def _smem(budget: Budget) -> str | None:
    if budget.smem > SMEM_MAX:
        return f"{budget.smem} bytes of shared memory, an SM grants {SMEM_MAX}"
    return None


def _tmem(budget: Budget) -> str | None:
    if budget.tmem_columns not in TMEM_COLUMNS:
        known = ", ".join(map(str, TMEM_COLUMNS))
        return f"{budget.tmem_columns} columns of tensor memory, an allocation is one of {known}"
    if budget.tmem_columns and budget.arch == "sm_90a":
        return f"{budget.tmem_columns} columns of tensor memory: {budget.arch} has none"
    return None


def _barriers(budget: Budget) -> str | None:
    for barrier in budget.barriers:
        total = sum(barrier.arrivals.values())
        if total != barrier.count:
            who = ", ".join(f"{n} from {role}" for role, n in barrier.arrivals.items())
            return (
                f"barrier {barrier.name}: initialised with {barrier.count} arrivals, gets {total} "
                f"({who})"
            )
        if not 1 <= barrier.count <= MBARRIER_MAX:
            return f"barrier {barrier.name}: {barrier.count} arrivals, expected 1..{MBARRIER_MAX}"
    return None


def _mmas(budget: Budget) -> str | None:
    for mma in budget.mmas:
        step = MMA_K.get(mma.dtype)
        if step is None:
            return f"MMA {mma.name}: none of {mma.dtype}; there are {', '.join(MMA_K)}"
        if mma.m % MMA_M:
            return f"MMA {mma.name}: M = {mma.m} is no multiple of {MMA_M}"
        if mma.n not in MMA_N:
            return f"MMA {mma.name}: N = {mma.n}, expected a multiple of 8 up to 256"
        if mma.k % step:
            return f"MMA {mma.name}: K = {mma.k} is no multiple of {step} ({mma.dtype})"
    return None
