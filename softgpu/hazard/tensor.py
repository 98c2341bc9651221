"""The rules for tensor memory: what the handlers of tcgen05 tell the hazard checker.

Nothing is checked here yet: the methods are the seam between ``softgpu.ops`` and the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..cluster import MBarrier
    from ..tensor_memory import Cells
    from ..tensor_queue import TensorOp
    from .warp import WarpHazards


class WarpTensor:
    """What one warp does with tensor memory; ``WarpHazards.tensor``."""

    def __init__(self, owner: WarpHazards) -> None:
        self.owner = owner

    def allocated(self, rank: int, first: int, columns: int) -> None:
        """The warp has been given columns of CTA ``rank``."""

    def freed(self, rank: int, first: int, columns: int) -> None:
        """The warp has given columns of CTA ``rank`` back."""

    def permit_given_up(self) -> None:
        """The warp has given up its CTA's right to allocate."""

    def load(self, cells: Sequence[Cells]) -> None:
        """tcgen05.ld of the whole warp: it reads ``cells`` until ``wait_load``."""

    def store(self, cells: Sequence[Cells]) -> None:
        """tcgen05.st of the whole warp: it writes ``cells`` until ``wait_store``."""

    def wait_load(self) -> None:
        """tcgen05.wait::ld."""

    def wait_store(self) -> None:
        """tcgen05.wait::st."""

    def issue(self, op: TensorOp, lane: int) -> None:
        """``lane`` issues an mma or a cp, before it is performed."""

    def commit(self, lane: int, group: int, barriers: Sequence[MBarrier]) -> None:
        """``lane`` asks for one arrival at each barrier when what it issued is complete."""

    def fence(self, before: bool, m: Any) -> None:
        """tcgen05.fence::before_thread_sync (``before``) or ::after_thread_sync of lanes ``m``."""
