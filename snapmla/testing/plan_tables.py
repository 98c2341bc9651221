"""A plan's tables below the public API: made, filled by the kernel, compared with the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch

from dsl_kernels.formats.dims import ITEM_WORDS
from snapmla.runtime import variants
from snapmla.testing.reference_plan import BALANCE, Cuts, PlanReference, Queries


@dataclass(frozen=True)
class PlanTables:
    """A plan's tables as kernels take them (``snapmla.DecodePlan`` has their shapes)."""

    work_items: torch.Tensor
    part_begin: torch.Tensor
    split_begin: torch.Tensor
    planned_seqlens: torch.Tensor
    units: torch.Tensor
    unit_begin: torch.Tensor
    row_limits: torch.Tensor

    @staticmethod
    def empty(
        batch: int,
        parts: int,
        queries: Queries,
        pieces: int = 0,
        value: int = 0,
        device: torch.device | str = "cpu",
        stretches: int = 1,
    ) -> PlanTables:
        """Tables full of ``value`` with room for any plan; ``pieces``: of a unit, fixed splits;
        ``stretches``: of a part, at most."""
        count, ragged = queries.capacity(batch), queries.begins is not None
        alone = not ragged and count == batch
        tokens = queries.s_q * (1 if ragged else batch)
        shapes = (
            (count * pieces if pieces else parts * stretches + count, ITEM_WORDS), (parts + 1,),
            (count + 1,), (batch,), (0 if alone else count, 2), (batch + 1 if ragged else 0,),
            (0 if queries.row_seqlens is None else tokens,),
        )  # fmt: skip
        return PlanTables(*(torch.full(x, value, dtype=torch.int32, device=device) for x in shapes))

    @staticmethod
    def of(plan: PlanReference) -> PlanTables:
        """The tables of a plan; the work list has no room beyond its items."""
        made: tuple[tuple[list[Any], tuple[int, ...]], ...] = (
            (plan.work_items, (-1, ITEM_WORDS)), (plan.part_begin, (-1,)),
            (plan.split_begin, (-1,)), ([], (-1,)), (plan.units, (-1, 2)),
            (plan.unit_begin, (-1,)), (plan.row_limits, (-1,)),
        )  # fmt: skip
        return PlanTables(*(torch.tensor(x, dtype=torch.int32).view(shape) for x, shape in made))

    def arguments(self) -> dict[str, torch.Tensor]:
        """Plan arguments of decode, by name."""
        names = ("work_items", "part_begin", "split_begin", "units", "row_limits")
        given = {name: getattr(self, name) for name in names}
        return {**given, "cu_seqlens_q": self.units.new_zeros(0)}  # no witness

    def fill(
        self,
        kernel: variants.Kernel,
        cache_seqlens: torch.Tensor,
        queries: Queries,
        numbers: tuple[int, int, int, int],
        cuts: Cuts = BALANCE,
    ) -> None:
        """Plans; numbers = (max_tokens, token_tile, fixed_overhead, split_tiles)."""
        given = (
            torch.tensor(list(x or ()), dtype=torch.int32)
            for x in (queries.begins, queries.row_seqlens)
        )
        own = (queries.num_heads, queries.s_q, queries.unit_rows, int(queries.causal))
        tables = (getattr(self, field.name) for field in fields(self))
        device = cache_seqlens.device
        given = (x.to(device) for x in given)
        kernel(cache_seqlens, *given, *tables, *numbers, *astuple(cuts), *own)

    def differs(self, plan: PlanReference, lengths: Sequence[int]) -> list[str]:
        """Names of tables that are not the reference's, as far as it goes."""
        want: dict[str, list[Any]] = {
            "work_items": plan.work_items, "part_begin": plan.part_begin,
            "split_begin": plan.split_begin, "planned_seqlens": list(lengths),
            "units": plan.units, "unit_begin": plan.unit_begin, "row_limits": plan.row_limits,
        }  # fmt: skip
        bad = []
        for name, values in want.items():
            rows = getattr(self, name)[: len(values)].tolist()
            found = [tuple(row) if isinstance(row, list) else row for row in rows]
            if found != values:
                bad.append(name)
        return bad
