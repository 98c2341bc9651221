"""Registers of WGMMAs: PTX ISA 9.7.15.7.1 (wgmma.fence), 9.7.15.7.3 (wait_group).

Accumulators and A registers must not be touched from a WGMMA's issue until a ``wait_group`` covers
it; registers that other instructions touched must not enter one before a ``wgmma.fence``.
WGMMAs of one shape that accumulate into the same registers may follow each other without.
Sets of registers are bit sets over the kernel's 32-bit slots (``Program.registers``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .warp import WarpHazards


@dataclass(frozen=True)
class _Mma:
    """Registers of a WGMMA in flight."""

    acc: int
    a: int
    shape: str

    def continues(self, other: _Mma) -> bool:
        """Same accumulators, same shape: the tensor core keeps such a chain in order."""
        return self.acc == other.acc and self.shape == other.shape


class _Issue(NamedTuple):
    """Issue of a WGMMA: its group, its event, how many wgmma.fence before it."""

    group: int
    event: int
    epoch: int


class WgmmaRegisters:
    """The registers of one warp.

    Attributes:
        touched: accessed by other instructions since the last wgmma.fence.
        busy: accumulators and A registers of WGMMAs in flight.
        group: number of the group that is open.
    """

    def __init__(self, owner: WarpHazards) -> None:
        self.owner = owner
        self.touched = 0
        self.busy = 0
        self.group = 1
        self._flight: dict[_Mma, _Issue] = {}
        self._epoch = 0  # counts wgmma.fence
        self._fenced = False

    def access(self, bits: int) -> None:
        """Registers ``bits`` are accessed although a WGMMA in flight uses some of them."""
        first = next(f for mma, f in self._flight.items() if (mma.acc | mma.a) & bits)
        hit = self.busy & bits
        self.busy &= ~bits  # each register is reported once
        self.owner.report.register_in_flight(self.owner, hit, first.group, first.event)

    def issue(self, acc: int, a: int, shape: str) -> None:
        """A wgmma.mma_async with these accumulators and A registers, of this shape and type."""
        used = acc | a
        if not self._fenced or self.touched & used:
            self.owner.report.unfenced_registers(self.owner, self.touched & used, used)
            self._fenced, self.touched = True, 0
        mine = _Mma(acc, a, shape)
        self._compare(mine)
        self._flight[mine] = _Issue(self.group, self.owner.event, self._epoch)
        self.busy |= used

    def _compare(self, mine: _Mma) -> None:
        """Looks for a WGMMA in flight that this one must not overlap with."""
        for other, issued in self._flight.items():
            if other == mine:
                continue
            if other.acc & mine.a or other.a & mine.acc:
                self.access(mine.acc | mine.a)
                return
            shared = other.acc & mine.acc
            if shared and not mine.continues(other) and issued.epoch == self._epoch:
                self.owner.report.shapes_share_registers(self.owner, shared, issued.event)
                return

    def fence(self) -> None:
        """wgmma.fence"""
        self._fenced, self.touched = True, 0
        self._epoch += 1

    def commit(self) -> None:
        """wgmma.commit_group"""
        self.group += 1

    def wait(self, keep: int) -> int:
        """wgmma.wait_group: all but the last ``keep`` groups are complete; number of the last."""
        done = self.group - 1 - keep
        self._flight = {m: f for m, f in self._flight.items() if f.group > done}
        self.busy = 0
        for m in self._flight:
            self.busy |= m.acc | m.a
        return done
