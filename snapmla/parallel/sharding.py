"""Owners of a sequence's tokens: lengths, limits, slots and block tables, on the device.

The host never reads a length.  With ``out`` and ``scratch`` given nothing is allocated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from snapmla import checks

Tensor = torch.Tensor


class Sharding(NamedTuple):
    """Tokens dealt to ``size`` ranks in turns of ``interleave``; this is rank ``rank``."""

    rank: int
    size: int
    interleave: int

    @property
    def turn(self) -> int:
        """Tokens after which it is this rank's turn again."""
        return self.size * self.interleave

    def owned_(self, counts: Tensor, out: Tensor) -> Tensor:
        """Writes to ``out`` how many of the first ``counts`` tokens are this rank's.

        Args:
            counts: int32, any shape; what is negative counts as 0.  It is used up.
            out: int32, of the same shape, other memory.
        """
        counts.clamp_(min=0)
        torch.floor_divide(counts, self.turn, out=out)
        out.mul_(self.interleave)
        counts.remainder_(self.turn).sub_(self.rank * self.interleave).clamp_(0, self.interleave)
        return out.add_(counts)

    def lengths_(self, cache_seqlens: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
        """Writes to ``out`` this rank's lengths of sequences; all tensors are int32 (b,).

        Args:
            cache_seqlens: lengths of whole sequences.
            scratch: overwritten.
        """
        return self.owned_(scratch.copy_(cache_seqlens), out)

    def rows_(self, cache_seqlens: Tensor, behind: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
        """Number of this rank's tokens that a query token sees by the causal rule, int32 (b, s_q).

        Args:
            behind: int32 (s_q,), how many query tokens come after each.
        """
        torch.sub(cache_seqlens[:, None], behind, out=scratch)
        return self.owned_(scratch, out)

    def ragged_rows_(
        self, cache_seqlens: Tensor, cu_seqlens_q: Tensor, tokens: Tensor, out: Tensor,
        scratch: Tensor, sequence: Tensor,
    ) -> Tensor:  # fmt: skip
        """``rows_`` of packed query tokens, int32 (total_q,); behind the last one anything.

        Args:
            tokens: int32 (total_q,), 0, 1, 2 and so on.
            scratch, sequence: int32 (total_q,).
        """
        torch.searchsorted(cu_seqlens_q, tokens, right=True, out_int32=True, out=sequence)
        sequence.sub_(1).clamp_(0, cache_seqlens.shape[0] - 1)
        # token t of sequence i has cu_seqlens_q[i + 1] - 1 - t others behind it
        torch.index_select(cu_seqlens_q[1:], 0, sequence, out=out)
        torch.index_select(cache_seqlens, 0, sequence, out=scratch)
        scratch.sub_(out).add_(tokens).add_(1)
        return self.owned_(scratch, out)

    def slots(
        self, positions: Tensor, block_table: Tensor, sequences: Tensor | None, page_size: int
    ) -> Tensor:
        """Slots in this rank's cache, int64 (t,), -1 for what is not this rank's; checked."""
        at = positions.long()
        mine = (at >= 0) & (at // self.interleave % self.size == self.rank)
        local = at // self.turn * self.interleave + at % self.interleave
        column = local // page_size
        mine &= column < block_table.shape[1]
        column = column.clamp(0, block_table.shape[1] - 1)
        row = torch.arange(at.numel(), device=at.device) if sequences is None else sequences.long()
        rows = block_table.shape[0]
        if not rows:
            return torch.full_like(at, -1)
        mine &= (row >= 0) & (row < rows)
        page = block_table[row.clamp(0, rows - 1), column].long()
        return torch.where(mine, page * page_size + local % page_size, -1)

    def block_table(self, block_table: Tensor, page_size: int) -> Tensor:
        """Columns of this rank of a table with a column for each page of whole sequences."""
        if self.interleave % page_size:
            checks.value_error(
                "interleave", f"a multiple of page_size = {page_size}", self.interleave,
                "shorter turns put tokens of several turns into a page: then the block table lists "
                "the pages of the rank's own tokens from the start",
            )  # fmt: skip
        pages, width = self.interleave // page_size, block_table.shape[1]
        local = -(-width // (pages * self.size)) * pages
        column = torch.arange(local, device=block_table.device)
        whole = (column // pages * self.size + self.rank) * pages + column % pages
        return block_table.index_select(1, whole.clamp(max=width - 1))
