"""State that the layers of a cache share: slots and positions of tokens, and the plans of a step.

Two ways to count the tokens of a sequence meet here.  transformers counts *positions*, pads
included: position j of a batch is column j of its ``attention_mask``.  The cache holds tokens
without pads, so that decode sees a plain prefix.  ``slot_of`` leads from a position to the slot of
its token, or to -1 where there is a pad or nothing yet.

All tensors keep their addresses, and no method waits for the device unless it says so, so a step
may be part of a CUDA graph: ``fixed`` makes extents those of the whole cache then, and positions
come from the device.
"""

from __future__ import annotations

from typing import Any

import torch

import snapmla
from snapmla import checks

Tensor = torch.Tensor
MOST = 8  # query tokens of a sequence that go through decode; more of them are a prompt
UNFINISHED = "the last forward over this cache stopped half way: call reset(), or make a new cache"


class Pool:
    """Positions, slots and plans of one batch of sequences.

    Pages of a sequence lie one behind the other, ``width`` of them, so that a token's slot follows
    from its number; the block table never changes.

    Args:
        batch: sequences.
        max_tokens: positions of each, pads included.
        num_heads: query heads.
        page_size: tokens of a page.
        device: of all tensors.
        accuracy: of plans, as in ``plan_decode``.

    Attributes:
        block_table: int32 (b, width).
        lengths: int32 (b,), cached tokens, the step's own included.
        before: int32 (b,), those before the step.
        slot_of: int32 (b, max_tokens), position -> slot, -1 where no token is cached.
        slots: int32 (b * n,), slots of the step's tokens, -1 of pads.
        seen: positions, the step's own included, as the host counts them; ``position`` is the
            same on the device, int64 ().
        new: query tokens of the step, 0 between steps.
        fixed: extents are those of the whole cache, whatever is seen.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    def __init__(
        self,
        batch: int,
        max_tokens: int,
        num_heads: int,
        page_size: int,
        device: torch.device,
        accuracy: str = "standard",
    ) -> None:
        self.batch = checks.integer("batch_size", batch, 1)
        self.max_tokens = checks.integer("max_tokens", max_tokens, 1)
        self.page_size, self.device = page_size, device
        self.width = -(-max_tokens // page_size)
        numbers = torch.arange(batch * self.width, dtype=torch.int32, device=device)
        self.block_table = numbers.view(batch, self.width)
        self._base = self.block_table[:, :1] * page_size
        self._ones = torch.ones(batch, max_tokens, dtype=torch.bool, device=device)
        self._columns = torch.arange(max_tokens, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.before = torch.zeros_like(self.lengths)
        self.slot_of = torch.full((batch, max_tokens), -1, dtype=torch.int32, device=device)
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        self._plans = snapmla.PlanCache(
            num_heads, page_size=page_size, device=device, accuracy=accuracy
        )
        self._sparse = snapmla.SparsePlanCache(num_heads, device=device, accuracy=accuracy)
        self.seen, self.new, self.fixed, self.failed = 0, 0, False, False
        self._forget_step()

    def _forget_step(self) -> None:
        self.slots: Tensor = self.lengths[:0]
        self._rows: Tensor | None = None
        self._valid: Tensor | None = None
        self._plan: Any = None
        self._packed: tuple[Tensor | None, Tensor] | None = None
        self._pads: bool | None = None

    # ---------------------------------------------------------------------------------- steps

    def begin(self, new: int, attention_mask: Tensor | None) -> None:
        """Makes room for the next ``new`` positions of each sequence: once a forward.

        Args:
            new: query tokens of each sequence.
            attention_mask: (b, positions seen + new), 0 where there is a pad; None: no pads.  Only
                its last ``new`` columns are looked at.

        Raises:
            ValueError: they have no room, or the mask is of another shape; nothing is changed.
        """
        self.check_room(new)
        valid = self._ones[:, :new]
        if attention_mask is not None:
            wanted_shape = (self.batch, self.seen + new)
            if tuple(attention_mask.shape) != wanted_shape:
                hint = "columns for what is cached and what is new, a row for each sequence"
                got = tuple(attention_mask.shape)
                checks.value_error("attention_mask", f"shape {wanted_shape}", got, hint)
            valid = attention_mask[:, -new:].to(self.device, torch.bool)
        self._forget_step()
        self.failed = True  # until ``end``
        self.new, self._valid = new, None if attention_mask is None else valid
        self.before.copy_(self.lengths)
        count = valid.cumsum(-1, dtype=torch.int32) + self.before[:, None]  # tokens up to each
        slots = torch.where(valid, count - 1 + self._base, -1)
        self.slot_of.index_copy_(1, self._columns[:new] + self.position, slots)
        self.lengths.copy_(count[:, -1])
        self.position += new
        self.slots, self._rows = slots.flatten(), count
        self.seen += new

    def check_room(self, new: int) -> None:
        """Raises ValueError where ``new`` more positions have no room, or a step was broken off."""
        if self.failed:
            raise ValueError(f"snapmla: {UNFINISHED}")
        if self.seen + new > self.max_tokens:
            hint = "make a SnapMLACache with a larger max_tokens"
            wanted = f"at most {self.max_tokens} positions, pads included"
            checks.value_error("max_tokens", wanted, f"{self.seen} + {new}", hint)

    def end(self) -> None:
        """All layers have had the step."""
        self.new, self.failed = 0, False

    def reset(self) -> None:
        """Forgets all tokens."""
        for each in (self.lengths, self.before, self.position):
            each.zero_()
        self.slot_of.fill_(-1)
        self.seen, self.new, self.failed = 0, 0, False
        self._forget_step()

    def crop(self, positions: int) -> None:
        """Forgets the last ``positions``.

        Raises:
            ValueError: there are fewer.
        """
        positions = checks.integer("tokens_to_remove", positions, 0, self.seen)
        gone = self._columns[:positions] + (self.position - positions)
        were = self.slot_of.index_select(1, gone) >= 0
        self.lengths -= were.sum(-1, dtype=torch.int32)
        self.slot_of.index_fill_(1, gone, -1)
        self.position -= positions
        self.seen -= positions

    # ------------------------------------------------------------------------- what layers ask

    @property
    def extent(self) -> int:
        """Positions that masks, index keys and ``indices`` of the step have."""
        return self.max_tokens if self.fixed else self.seen

    def plan(self) -> Any:
        """The plan of dense decode for this step, made by its first layer."""
        if self._plan is None:
            self._plan = self._plans.get(
                self.lengths, self.new, max_pages=self.width, row_seqlens=self.limits()
            )
        return self._plan

    def limits(self) -> Tensor | None:
        """int32 (b, new): how many cached tokens each query token sees; None of one a sequence."""
        return self._rows if self.new > 1 else None

    def sparse_plan(self, topk: int) -> Any:
        """The plan of sparse decode, which depends on shapes alone."""
        return self._sparse.get(None, self.new, topk=topk, batch=self.batch)

    def query_positions(self) -> Tensor:
        """int64 (new,): the position of each query token."""
        return self._columns[: self.new] + (self.position - self.new)

    def chosen_slots(self, indices: Tensor) -> Tensor:
        """int32 (b, new, topk): slots of an indexer's positions, -1 of what a query must not see.

        Where a query token sees fewer than topk positions, an indexer fills up with others: pads,
        and positions behind its own.
        """
        b, n, topk = indices.shape
        flat = indices.reshape(b, n * topk).long()
        slots = self.slot_of.gather(1, flat).view(b, n, topk)
        return torch.where(indices <= self.query_positions()[:, None], slots, -1)

    def allowed(self) -> Tensor:
        """bool (b, new, extent): which positions each query token may see."""
        behind = self._columns[: self.extent] > self.query_positions()[:, None]
        return (self.slot_of[:, None, : self.extent] >= 0) & ~behind

    def packed(self) -> tuple[Tensor | None, Tensor]:
        """The step's tokens without pads: (rows of the (b * new) tokens, or None if that is all of
        them; int32 (b + 1,) where each sequence's begin).  Waits for the device if there is a mask.
        """
        if self._packed is None:
            counts = (self.lengths - self.before).cumsum(0, dtype=torch.int32)
            begin = torch.nn.functional.pad(counts, (1, 0))
            rows = None
            if self._valid is not None and not bool(self._valid.all()):
                rows = self._valid.flatten().nonzero().flatten()
            self._packed = rows, begin
        return self._packed

    def has_pads(self) -> bool:
        """True if any position seen is a pad.  Waits for the device, once a step."""
        if self._pads is None:
            self._pads = not bool((self.slot_of[:, : self.seen] >= 0).all())
        return self._pads
