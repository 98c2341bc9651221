"""A row of decode: the problem that all contenders are given, and what one makes of it.

``profiles.contenders`` lists the contenders, ``profiles.peer_libraries`` has those that are
libraries of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from profiles import check as checks
from profiles.pools import Pool, RowsPool
from profiles.roofline import HEAD_DIM_QK
from profiles.shapes import DecodeShape

SOFTMAX_SCALE = HEAD_DIM_QK**-0.5
CACHES: dict[str, Any] = {
    "fp8": "fp8",
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}  # ``dtype`` of a cache
DecodeCall = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class Problem:
    """Device tensors of one decode row, common to all contenders.

    Attributes:
        shape: the workload.
        query: (b, s_q, h, 576) bf16, or fp16 beside a pool of fp16; of a request with fewer
            tokens the last ones count.
        lengths: (b,) int32 on the device.
        tables: page size -> block tables, one (b, width) int32 per buffer.
    """

    shape: DecodeShape
    query: torch.Tensor
    lengths: torch.Tensor
    tables: dict[int, list[torch.Tensor]]


@dataclass
class Entry:
    """A contender set up for one problem.

    Attributes:
        calls: one decode per buffer; each returns (out, lse).
        query: (b, s_q, h, 576) float64, the query as this contender sees it.
        outputs: preallocated results, poisoned before a check.
        note: which kernel the dispatcher picked, if it says.
        packed: results are (total, h, 512) and (h, total), with the query tokens that count.
        mimic: (buffer, request) -> (s_q, h, 512) float64, the result with no error but that of the
            contender's e4m3 P; None if a constant gate judges it.
    """

    calls: Sequence[DecodeCall]
    query: torch.Tensor
    outputs: list[torch.Tensor] = field(default_factory=list)
    note: str = ""
    packed: bool = False
    mimic: Callable[[int, int], torch.Tensor] | None = None


class Contender:
    """One way to compute a decode."""

    name: str
    peer = True
    gate = checks.GATE_BF16  # for entries without a mimic
    strict_lse = False
    out_bytes = 2

    def unavailable(self) -> str | None:
        """Reason why this contender cannot run here, or None."""
        return None

    def refuses(self, shape: DecodeShape) -> str | None:
        """Reason why it cannot run ``shape``, or None."""
        return None

    def pool_key(self) -> tuple[Any, ...]:
        """Contenders with equal keys share a pool."""
        raise NotImplementedError

    def make_pool(self, tokens: int, device: torch.device) -> Pool:
        """Allocates this contender's cache."""
        return RowsPool(tokens, device)

    @property
    def page_size(self) -> int:
        """Tokens per page of its cache."""
        return 64

    def enter(self, problem: Problem, pool: Any) -> Entry:
        """Prepares everything that a serving engine would prepare outside the layer loop."""
        raise NotImplementedError
