"""Orders of dense prefill's work, timed beside one another: ``profiles.mha_cost --designs``.

Which CTAs run at the same time, and so which K and V are read at the same time, follows from the
order of work.  Kernels with ``sections="listed"`` are told by the list how many heads are worked on
side by side; the lists here come from the host, and a copy of them stands where the library
launches ``mha_items``, whose own order is the contender ``library``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dsl_kernels.mha_list import BESIDE, HEADER, LAST, ROWS
from dsl_kernels.spec import VariantSpec
from snapmla import runtime
from snapmla.plan import sm_count
from snapmla.testing.mha_job import work_of

if TYPE_CHECKING:
    from profiles.mha_cost import Problem

WIDTHS = 192, 128  # of heads for which there are such kernels


class Order(NamedTuple):
    """An order of work.

    Attributes:
        by: ``tiles``, the longest row tiles of all sequences first; ``sequences``, the longest
            sequence first, its row tiles from the longest on.
        beside, last: heads of a section, of the last section.
    """

    by: str
    beside: int
    last: int

    @property
    def label(self) -> str:
        return f"{self.by} {self.beside}/{self.last}"


ORDERS = tuple(
    Order(by, beside, last)
    for by, beside, last in (
        ("tiles", 8, 8), ("tiles", 2, 8), ("sequences", 8, 8), ("sequences", 4, 4),
        ("sequences", 2, 8), ("sequences", 2, 4), ("sequences", 2, 2), ("sequences", 1, 8),
        ("sequences", 1, 4), ("sequences", 1, 1),
    )
)  # fmt: skip


def work_in(order: Order, problem: Problem) -> torch.Tensor:
    """The words of a list in that order, on the problem's device."""
    shape = problem.shape
    work = work_of(shape.lq, shape.lk, shape.causal)
    if order.by == "sequences":
        longest = sorted(range(len(shape.lq)), key=lambda i: -shape.lk[i])
        tiles = [(i, m) for i in longest for m in reversed(range(-(-shape.lq[i] // ROWS)))]
        work[HEADER : HEADER + 2 * len(tiles)] = torch.tensor(tiles).int().flatten()
    work[BESIDE], work[LAST] = order.beside, order.last
    return work.to(problem.q.device)


def contenders(problem: Problem) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(label, call) of each order; results are the problem's."""
    shape, q = problem.shape, problem.q
    spec = VariantSpec(
        op="mha_fwd", arch=runtime.arch_of(q.device), d_qk=shape.d_qk, dtype="bf16",
        sections="listed",
    )  # fmt: skip
    kernel = runtime.kernel(spec, "cuda")
    keys = (problem.k,)
    if shape.d_qk == 192:
        keys = (problem.k[..., :128], problem.k[..., 128:])
    for order in ORDERS:
        listed = work_in(order, problem)
        work = torch.empty_like(listed)

        def call(listed: torch.Tensor = listed, work: torch.Tensor = work) -> None:
            work.copy_(listed)
            kernel(
                q, *keys, problem.v, problem.cu_q, problem.cu_k, work, problem.out, problem.lse,
                shape.d_qk**-0.5, int(shape.causal), sm_count(q.device),
            )  # fmt: skip

        yield order.label, call
