"""Plans of sparse decode: units, kernels, parts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import snapmla
from snapmla import rank
from snapmla.dense import DecodePlan
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


def test_few_query_tokens_take_smaller_tiles_unless_bits_must_be_those_of_any_batch() -> None:
    few, many = rank.Size(1, 512), rank.Size(128, 512)
    for cache in ("fp8", "fp8_ds_mla", "fp8_v4"):
        options = SparseOptions(num_heads=128, format=cache)
        tiles = [options.kernel(CPU, 1, size).row_tile for size in (few, many)]
        assert tiles == [16, 64], cache
        fixed = dataclasses.replace(options, fixed_split_tokens=512)
        assert {fixed.kernel(CPU, 1, size).row_tile for size in (few, many)} == {64}
        asked = dataclasses.replace(options, row_tile=32)
        assert asked.kernel(CPU, 1, few).row_tile == 32


@pytest.mark.parametrize(
    ("load", "whole"),
    [
        ((132, 132, 32), True),
        ((128, 132, 32), True),  # a tile longer than equal parts, without a merge
        ((133, 132, 32), False),  # twice as long
        ((8, 132, 10), False),
        ((256, 132, 2), True),
    ],
)
def test_full_lists_stay_whole_where_a_merge_costs_more_than_balance(
    load: tuple[int, int, int], whole: bool
) -> None:
    card = rank.card_named("H200")
    assert card is not None
    for cache in ("fp8_ds_mla", "fp8_v4"):
        spec = rank.choose_sparse(card, 64, cache=cache, row_tile=64)
        assert rank.stays_whole(card, spec, rank.Load(*load)) == whole
    nobody_measured = spec.replace(pipeline="f16", cache_dtype="fp8")
    assert not rank.stays_whole(card, nobody_measured, rank.Load(*load))


@pytest.mark.parametrize("row_tile", [16, 32, 64])
def test_short_lists_are_never_cut(row_tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """V4's window of 128 tokens: whatever its lengths, no merge is launched behind decode."""
    card = rank.card_named("H200")
    assert card is not None
    spec = rank.choose_sparse(card, row_tile, cache="fp8_v4", row_tile=row_tile)
    assert [rank.is_never_cut(card, spec, n) for n in (1, 2, 3, 10)] == [
        True,
        True,
        False,
        False,
    ]
    assert not rank.is_never_cut(card, spec.replace(pipeline="f16", cache_dtype="fp8"), 1)
    monkeypatch.setattr(rank, "card_of", lambda device: card)
    monkeypatch.setattr(SparseOptions, "tile_times", lambda *_: (2000, 10))
    monkeypatch.setattr("snapmla.sparse.plan.sm_count", lambda device: 132)
    monkeypatch.setattr(DecodePlan, "update_", lambda self, *_: self)
    options = SparseOptions(num_heads=row_tile, format="fp8_v4")
    lengths = torch.tensor([128, 3, 0, 77], dtype=torch.int32)
    short, longer = (plan_sparse(options, topk, 1, lengths) for topk in (128, 129))
    assert (short.merges, short.split_tiles) == (0, 2)
    assert (longer.merges, longer.split_tiles) == (1, 0)
    asked = dataclasses.replace(options, num_parts=3)
    assert plan_sparse(asked, 128, 1, lengths).split_tiles == 0  # as the caller says


def test_full_lists_are_cut_where_the_costs_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token more than parts: whole lists would take twice as long, short ones, too."""
    card = rank.card_named("H200")
    monkeypatch.setattr(rank, "card_of", lambda device: card)
    monkeypatch.setattr(SparseOptions, "tile_times", lambda *_: (2000, 10))
    monkeypatch.setattr("snapmla.sparse.plan.sm_count", lambda device: 132)
    monkeypatch.setattr(DecodePlan, "update_", lambda self, *_: self)
    options = SparseOptions(num_heads=64, format="fp8_v4")
    lengths = torch.full((133,), 128, dtype=torch.int32)
    assert plan_sparse(options, 128, 1, lengths).split_tiles == 2  # full or not: nobody knows
    assert plan_sparse(options, 128, 1, lengths, full=True).split_tiles == 0
    assert plan_sparse(options, 128, 1, lengths[1:], full=True).split_tiles == 2


@pytest.mark.parametrize(
    ("heads", "tokens", "parts"),
    [(128, 1, 44), (128, 2, 44), (128, 3, 66), (64, 1, 132), (16, 4, 132), (65, 2, 44)],
)
def test_fewer_parts_for_few_tokens_of_two_row_blocks(
    heads: int, tokens: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So measured on 132 SMs; a token of one row block takes them all."""
    monkeypatch.setattr("snapmla.sparse.plan.sm_count", lambda device: 132)
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


def check_every_row_once(plan: SparsePlan, counts: list[int]) -> None:
    """Each query token's heads, and each tile of its list, are in one item; pieces have the slots
    of their unit in order, and every item is in one part."""
    begin = plan.part_begin.tolist()
    assert begin[0] == 0 and begin == sorted(begin) and len(begin) == plan.num_parts + 1
    heads, slots = plan.num_heads, plan.split_begin.tolist()
    pieces: dict[int, list[list[int]]] = {}
    for item in plan.work_items[: begin[-1]].tolist():
        first_row, left = item[4], item[4] % heads
        assert not left
        pieces.setdefault(first_row // heads if plan.s_q != 1 else item[0], []).append(item)
    assert sorted(pieces) == list(range(len(counts)))
    for token, count in enumerate(counts):
        tiles = -(-count // 64)
        mine = sorted(pieces[token], key=lambda item: item[1])
        ends = [item[2] for item in mine]
        assert [item[1] for item in mine] == [0, *ends[:-1]] and ends[-1] == tiles, mine
        whole = len(mine) == 1
        assert slots[token + 1] - slots[token] == (0 if whole else len(mine))
        want = [-1] if whole else list(range(slots[token], slots[token + 1]))
        assert [item[3] for item in mine] == want


@needs_kernels
@pytest.mark.parametrize(
    ("batch", "s_q", "split"), [(3000, 1, None), (1, 3000, None), (7, 300, 128), (2100, 1, 128)]
)
def test_thousands_of_query_tokens(batch: int, s_q: int, split: int | None) -> None:
    """Of as many sequences, or of one: no row is left out, none is taken twice."""
    torch.manual_seed(0)
    topk, heads = 300, 128
    own = torch.randint(0, topk + 1, (batch, s_q), dtype=torch.int32)
    lengths = torch.full((batch,), topk, dtype=torch.int32) if s_q > 1 else own[:, 0].contiguous()
    options = SparseOptions(num_heads=heads, num_parts=66, fixed_split_tokens=split)
    plan = plan_sparse(options, topk, s_q, lengths, row_lengths=own if s_q > 1 else None)
    assert plan.rows_shape == (batch, s_q, heads)
    check_every_row_once(plan, own.flatten().tolist())
    with pytest.raises(AssertionError):  # it can fail
        check_every_row_once(plan, [*own.flatten().tolist()[:-1], topk + 64])


@needs_kernels
def test_long_lists_of_high_accuracy_are_several_items() -> None:
    """Sums of 16-bit products of more than some 16384 tokens would show in results."""
    usual, high = (
        snapmla.plan_sparse_decode(
            16, 1, topk=40000, batch=1, device="cpu", num_parts=1, accuracy=accuracy
        )
        for accuracy in ("standard", "high")
    )
    assert (usual.pipeline, usual.longest_item, high.pipeline) == ("etap", 0, "f16")
    assert high.longest_item == 16384 // 64 and high.max_stretches == 3
    tiles = [plan.work_items[: int(plan.part_begin[-1]), 1:3].diff(dim=1) for plan in (usual, high)]
    assert tiles[0].flatten().tolist() == [625] and int(tiles[1].sum()) == 625
    assert int(tiles[1].max()) <= 1.1 * high.longest_item
