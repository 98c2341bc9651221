"""Plans of sparse decode: units, kernels, parts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from snapmla import plan as plans
from snapmla.sparse.plan import SparseOptions, SparsePlan, plan_sparse
from snapmla.testing.plan_tables import PlanTables
from snapmla.testing.reference_plan import Queries, plan_reference
from tests.support.needs import needs_kernels

CPU = torch.device("cpu")
TABLES = [field.name for field in dataclasses.fields(PlanTables)]


@pytest.mark.parametrize(
    ("heads", "tile"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (128, 64)]
)
def test_the_smallest_tile_that_takes_all_heads(heads: int, tile: int) -> None:
    spec = SparseOptions(num_heads=heads).kernel(CPU, 1)
    assert (spec.op, spec.row_tile, spec.p_terms) == ("sparse_decode", tile, 1)
    asked = SparseOptions(num_heads=heads, row_tile=32).kernel(CPU, 1)
    assert asked.row_tile == 32
    with pytest.raises(ValueError, match="row_tile: expected one of 16, 32, 64, got 128"):
        SparseOptions(num_heads=heads, row_tile=128).kernel(CPU, 1)


@pytest.mark.parametrize(
    ("heads", "tokens", "parts"),
    [(128, 1, 44), (128, 2, 44), (128, 3, 66), (64, 1, 132), (16, 4, 132), (65, 2, 44)],
)
def test_fewer_parts_for_few_tokens_of_two_row_blocks(
    heads: int, tokens: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So measured on 132 SMs; a token of one row block takes them all."""
    monkeypatch.setattr(plans, "sm_count", lambda device: 132)
    options = SparseOptions(num_heads=heads)
    assert options.parts(CPU, heads, tokens, options.kernel(CPU, 1)) == parts


@needs_kernels
@pytest.mark.parametrize("heads", [3, 50])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_unit_is_a_query_token(heads: int, ragged: bool) -> None:
    """Tables as the reference has them, of (b,) lengths, ragged queries and lengths a token."""
    lengths, own = [300, 0, 400], [7, 300, 0, 65, 2, 64]
    begins = [0, 1, 1, 5] if ragged else None
    cu = torch.tensor(begins, dtype=torch.int32) if begins else None
    options = SparseOptions(num_heads=heads, num_parts=3, fixed_overhead=1)
    row_lengths = torch.tensor(own, dtype=torch.int32)
    plan = plan_sparse(
        options, 300, None if ragged else 2, torch.tensor(lengths, dtype=torch.int32),
        cu_seqlens_q=cu, total_q=6 if ragged else None,
        row_lengths=row_lengths if ragged else row_lengths.view(3, 2),
    )  # fmt: skip
    assert isinstance(plan, SparsePlan) and plan.unit_rows == heads and plan.topk == 300
    assert not plan.regroups and not plan.trims and plan.may_split
    assert plan.lse_accum.shape[1] == heads and plan.o_accum.shape[1] == heads
    queries = Queries(heads, 6 if ragged else 2, heads, begins=begins, row_seqlens=own)
    want = plan_reference(lengths, 3, 64, 1, 300, queries=queries)
    made = PlanTables(*(getattr(plan, name) for name in TABLES))
    assert made.differs(want, lengths) == []


@needs_kernels
def test_one_plan_of_a_constant() -> None:
    """Where all entries count the lengths are the plan's own, as are those of a call without."""
    plan = plan_sparse(SparseOptions(num_heads=16), 100, 1, torch.full((4,), 100).int())
    assert plan.planned_seqlens.tolist() == [100] * 4
    assert plan.units.shape == (0, 2) and plan.n_units == 4
