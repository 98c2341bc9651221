"""Requests in one cache; any of them can be decoded with any others."""

from __future__ import annotations

import torch

import snapmla
from snapmla.testing import selfcheck
from tests.support.steps import SCALE


class Pool:
    """Five requests in one cache; any of them can be decoded with any others."""

    LENGTHS = (300, 64, 0, 190, 129)
    HEADS = 8

    def __init__(self) -> None:
        self.cache, self.table, self.lengths = selfcheck.filled_cache(self.LENGTHS, 64)
        self.q = selfcheck.sample_query(len(self.LENGTHS), 1, self.HEADS)

    def decode(
        self, requests: list[int], *, out_dtype: torch.dtype | None = None, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of these requests as one batch."""
        at = torch.tensor(requests)
        q = snapmla.QuantizedQuery(self.q.nope[at], self.q.rope[at], self.q.scale[at])
        table, lengths = self.table[at], self.lengths[at]
        plan = snapmla.plan_decode(
            lengths, self.HEADS, 1, page_size=64, max_pages=table.shape[1], **options,  # type: ignore[arg-type]
        )  # fmt: skip
        return snapmla.decode(
            q, self.cache, table, lengths, softmax_scale=SCALE, plan=plan, out_dtype=out_dtype
        )
