"""setmaxnreg in the direction that its count asks for."""

from __future__ import annotations

import cutlass.cute as cute

from .budget import Budget


def claim_registers(budget: Budget, count: int) -> None:
    """A warpgroup's ``count`` registers a thread, from what the launch of ``budget`` grants.

    Raising a count to fewer, or lowering it to more, is an illegal instruction.
    """
    if count < budget.at_launch:
        cute.arch.setmaxregister_decrease(count)
    else:
        cute.arch.setmaxregister_increase(count)
