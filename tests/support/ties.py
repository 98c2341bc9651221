"""A decode one of whose P's lies at a tie of its rounding to e4m3."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from snapmla.cache.paged import PagedKVCache
from snapmla.cache.quant import QuantizedQuery
from snapmla.testing import attend, reference, selfcheck
from snapmla.testing.reference import Move
from snapmla.testing.rounding import MIMIC_HW_FULL, QuantConfig

SCALE = 192**-0.5
LENGTHS, HEADS, S_Q = (200, 40), 4, 2
MIDDLE = 124.0  # of P', between 120 and 128: a step of 2^-4 of a large weight


@dataclass
class Tied:
    """A decode whose second sequence, of 40 tokens, has the P.

    Attributes:
        page: the sequence's, in the cache.
        token: the P's.
        out, lse: (2, s_q, h, 512), (2, h, s_q) of the mimic.
        move: what that P does to the mimic, rounded the other way.
    """

    cache: PagedKVCache
    q: QuantizedQuery
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    page: int
    token: int = 0
    out: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    lse: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    move: Move = field(default_factory=lambda: Move((), torch.empty(0)))

    @property
    def scales(self) -> torch.Tensor:
        """(64,) fp32 of the sequence's tokens, in place."""
        return self.cache.named_tensors["scale"][self.page]

    def mimic(
        self, moves: list[Move] | None = None, config: QuantConfig = MIMIC_HW_FULL
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of the inputs as they are now."""
        q, cache = self.q, self.cache
        return reference.mla_decode_reference(
            q.nope, q.rope, q.scale, cache.content, cache.rope, cache.named_tensors["scale"],
            self.block_table, self.cache_seqlens, SCALE, config=config, moves=moves,
        )  # fmt: skip

    def errors(self, out: torch.Tensor, lse: torch.Tensor) -> selfcheck.DecodeErrors:
        """Errors of a kernel that gave these results."""
        return selfcheck.decode_errors(
            out, lse, self.q, self.cache, self.block_table, self.cache_seqlens, SCALE
        )

    def p(self, factor: float = 1.0) -> torch.Tensor:
        """P' (s_q * h, 40) of the second sequence in the mimic, before it is rounded.

        Args:
            factor: of every P' when it is rounded; ``out`` becomes that mimic's.
        """
        seen: list[torch.Tensor] = []
        rounded = attend._quantised_p

        def spy(p: torch.Tensor, config: QuantConfig) -> list[torch.Tensor]:
            seen.append(p)
            return rounded(p * factor, config)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attend, "_quantised_p", spy)
            self.out, self.lse = self.mimic()
        return seen[-1][:, 0, : LENGTHS[1]]

    def second(self) -> Tied:
        """Its second sequence alone, of the same cache: a sixth of the mimic's work."""
        q = QuantizedQuery(*(x[1:] for x in (self.q.nope, self.q.rope, self.q.scale)))
        return Tied(self.cache, q, self.block_table[1:], self.cache_seqlens[1:], self.page)

    @staticmethod
    def make() -> Tied:
        """The scale of a token is moved until its P' is in the middle of two values."""
        torch.manual_seed(0)
        cache, table, lengths = selfcheck.filled_cache(LENGTHS, 64)
        q = selfcheck.sample_query(len(LENGTHS), S_Q, HEADS)
        made = Tied(cache, q, table, lengths, int(table[1, 0]))
        second = made.second()
        p = second.p()
        row, token = divmod(int((p - 0.9 * MIDDLE).abs().argmin()), LENGTHS[1])
        made.token = token
        below = above = made.scales[token].clone()
        while float(second.p()[row, token]) < MIDDLE:
            above = made.scales[token].clone()
            made.scales[token] *= 1.05
        below, above = above, made.scales[token].clone()
        while float(above) > float(torch.nextafter(below, above)):
            made.scales[token] = (below + above) / 2
            if float(second.p()[row, token]) < MIDDLE:
                below = made.scales[token].clone()
            else:
                above = made.scales[token].clone()
        moves: list[Move] = []
        made.out, made.lse = made.mimic(moves)
        place = (1, row // HEADS, row % HEADS)
        (made.move,) = (m for m in moves if m.row == place)
        return made
