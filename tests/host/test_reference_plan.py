"""The planner's mirror: every tile once, within capacity, balanced and optimal."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsl_kernels.formats.dims import TOKEN_TILE
from snapmla.testing.reference_plan import (
    NOTHING_HIDDEN,
    PlanReference,
    Queries,
    plan_reference,
    tile_counts,
)
from tests.support.lengths import many_lengths

few_lengths = st.lists(
    st.one_of(st.integers(-5, 200), st.integers(0, 20000), st.sampled_from([0, 63, 64, 65])),
    min_size=1,
    max_size=24,
)


@settings(max_examples=300, deadline=None)
@given(
    lengths=few_lengths,
    parts=st.integers(1, 40),
    overhead=st.sampled_from([0, 1, 5, 20]),
    token_tile=st.sampled_from([16, 64, 128]),
    max_tokens=st.sampled_from([0, 100, 8192, 2**31 - 1]),
)
def test_plan_reference(
    lengths: list[int], parts: int, overhead: int, token_tile: int, max_tokens: int
) -> None:
    plan = plan_reference(lengths, parts, token_tile, overhead, max_tokens)
    tiles = tile_counts(lengths, token_tile, max_tokens)
    items, b = plan.work_items, len(lengths)
    # every tile once and in order; an empty sequence is one item
    assert [i[0] for i in items] == sorted(i[0] for i in items)
    for batch, count in enumerate(tiles):
        own = [i for i in items if i[0] == batch]
        assert own[0][1] == 0 and own[-1][2] == count
        assert all(x[2] == y[1] for x, y in itertools.pairwise(own))
        assert all(i[1] < i[2] for i in own) or (count == 0 and len(own) == 1)
        begin, end = plan.split_begin[batch : batch + 2]
        assert [i[3] for i in own] == ([-1] if len(own) == 1 else list(range(begin, end)))
        assert end - begin == (0 if len(own) == 1 else len(own))
    # capacity
    assert len(items) <= b + parts - 1 and plan.split_begin[-1] <= 2 * (parts - 1)
    assert plan.part_begin[0] == 0 and plan.part_begin[-1] == len(items)
    assert len(plan.part_begin) == parts + 1 and plan.part_begin == sorted(plan.part_begin)
    # balance: no part above T, and no in-order cut with a smaller T
    costs = [
        sum(i[2] - i[1] + overhead for i in items[x:y])
        for x, y in itertools.pairwise(plan.part_begin)
    ]
    assert max(costs) <= plan.part_cost
    assert plan.part_cost <= max(-(-sum(costs) // parts), overhead + 1) + 2 * overhead + 1


@settings(max_examples=60, deadline=None)
@given(
    tiles=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    parts=st.integers(1, 4),
    overhead=st.integers(0, 3),
)
@example(tiles=[1, 0], parts=1, overhead=0)  # an empty sequence fits into a full part
def test_plan_is_optimal(tiles: list[int], parts: int, overhead: int) -> None:
    """Against all in-order cuts, by dynamic programming over (sequence, tile) positions."""
    positions = [(b, t) for b, n in enumerate(tiles) for t in range(max(n, 1))]
    positions.append((len(tiles), 0))

    def cost(x: int, y: int) -> int:
        touched = {b for b, _ in positions[x:y]}
        return sum(tiles[b] > 0 for b, _ in positions[x:y]) + overhead * len(touched)

    last = len(positions) - 1
    best = {0: 0}
    for _ in range(parts):
        best = {y: min(max(best[x], cost(x, y)) for x in best if x <= y) for y in range(last + 1)}
    optimum = max(best[last], overhead + 1)
    assert plan_reference([64 * n for n in tiles], parts, 64, overhead).part_cost == optimum


@settings(max_examples=200, deadline=None)
@given(
    lengths=many_lengths,
    parts=st.integers(1, 140),
    overhead=st.sampled_from([0, 1, 4, 17]),
    split=st.integers(1, 300),
)
def test_fixed_splits_by_their_rule(
    lengths: list[int], parts: int, overhead: int, split: int
) -> None:
    cap = 20000
    plan = plan_reference(lengths, parts, TOKEN_TILE, overhead, cap, split)
    tiles = tile_counts(lengths, TOKEN_TILE, cap)
    # the pieces of a sequence depend on nothing but itself
    for batch, count in enumerate(tiles):
        alone = plan_reference([lengths[batch]], 1, TOKEN_TILE, 0, cap, split).work_items
        own = [i for i in plan.work_items if i[0] == batch]
        assert [i[1:3] for i in own] == [i[1:3] for i in alone]
        assert [i[2] - i[1] for i in own[:-1]] == [split] * (len(own) - 1)
        begin, end = plan.split_begin[batch : batch + 2]
        assert [i[3] for i in own] == ([-1] if len(own) == 1 else list(range(begin, end)))
        assert own[-1][2] == count
    # capacity, and parts that exceed their share by less than an item
    tiles_cap = -(-cap // TOKEN_TILE)
    pieces = -(-tiles_cap // split)
    assert len(plan.work_items) <= len(lengths) * pieces
    assert plan.split_begin[-1] <= len(lengths) * pieces
    assert plan.part_begin[0] == 0 and plan.part_begin[-1] == len(plan.work_items)
    assert len(plan.part_begin) == parts + 1 and plan.part_begin == sorted(plan.part_begin)
    for x, y in itertools.pairwise(plan.part_begin):
        cost = sum(i[2] - i[1] + overhead for i in plan.work_items[x:y])
        assert cost < plan.part_cost + split + overhead + 1


HEADS, TILE = 3, 16  # few rows a token, few tokens a tile: units and tiles begin everywhere


def visible(
    queries: Queries, lengths: list[int], most: int
) -> tuple[dict[tuple[int, int], int], list[tuple[int, int]]]:
    """(cached tokens that each sequence's query tokens see, its tokens), told token by token."""
    sees, tokens = {}, []
    for i, length in enumerate(lengths):
        first, end = i * queries.s_q, (i + 1) * queries.s_q
        if queries.begins is not None:
            first, end = (min(max(x, 0), queries.s_q) for x in queries.begins[i : i + 2])
        tokens.append((first, max(first, end)))
        for t in range(first, end):
            sees[i, t] = seqlen = min(max(length, 0), most)
            if queries.row_seqlens is not None:
                sees[i, t] = min(max(queries.row_seqlens[t], 0), seqlen)
            elif queries.causal:
                sees[i, t] = max(0, seqlen - (end - 1 - t))
    return sees, tokens


def check_units(plan: PlanReference, queries: Queries, lengths: list[int], most: int) -> None:
    """Every row of every sequence is one unit's, and every tile that it sees one item's."""
    sees, tokens = visible(queries, lengths, most)
    size = queries.unit_rows
    want = [
        (i, row, end * HEADS)
        for i, (first, end) in enumerate(tokens)
        for row in range(first * HEADS, end * HEADS, size)
    ]
    begins = [sum(x[0] < i for x in want) for i in range(len(lengths) + 1)]
    del want[queries.capacity(len(lengths)) :]  # of query tokens that overlap there may be more
    found = {}
    for sequence, begin, end, slot, *where in plan.work_items:
        found.setdefault((sequence, *where[:2]), []).append((begin, end, slot, *where[2:]))
    assert list(found) == want  # sequence by sequence, units ascending
    for at, (unit, own) in enumerate(found.items()):
        limits = [
            sees[unit[0], row // HEADS] for row in range(unit[1], min(unit[1] + size, unit[2]))
        ]
        assert own[0][0] == 0 and own[-1][1] == -(-max(limits) // TILE)
        assert all(x[1] == y[0] for x, y in itertools.pairwise(own))
        assert all(x[0] < x[1] for x in own) or len(own) == 1
        hidden = NOTHING_HIDDEN if queries.row_seqlens is None else min(limits)
        assert {x[3:] for x in own} == {(hidden, max(limits))}
        first, end = plan.split_begin[at : at + 2]
        assert [x[2] for x in own] == ([-1] if len(own) == 1 else list(range(first, end)))
    # what lies behind the live ones is empty
    assert queries.capacity(len(lengths)) == len(plan.split_begin) - 1
    if queries.begins is None or list(queries.begins) == sorted(queries.begins):
        assert begins[-1] == len(want), "the capacity holds them all"
    assert set(plan.split_begin[len(want) :]) == {plan.split_begin[-1]}
    alone = queries.begins is None and size >= queries.s_q * HEADS
    assert plan.units == ([] if alone else [x[1:] for x in want])
    assert plan.unit_begin == ([] if queries.begins is None else begins)
    assert plan.row_limits == list(queries.row_seqlens or [])


@settings(max_examples=300, deadline=None)
@given(data=st.data(), parts=st.integers(1, 12), split=st.sampled_from([0, 0, 1, 3]))
def test_units_by_their_rule(data: st.DataObject, parts: int, split: int) -> None:
    lengths = data.draw(st.lists(st.integers(-2, 140), min_size=1, max_size=6))
    ragged, limited = data.draw(st.booleans()), data.draw(st.booleans())
    s_q = data.draw(st.integers(1, 20))
    tokens = s_q if ragged else s_q * len(lengths)
    begins = st.lists(
        st.integers(-1, s_q + 1), min_size=len(lengths) + 1, max_size=len(lengths) + 1
    )
    rows = st.lists(st.integers(-3, 150), min_size=tokens, max_size=tokens)
    anyhow = data.draw(st.booleans())
    queries = Queries(
        HEADS, s_q, data.draw(st.sampled_from([2, 6, 7, 60])), data.draw(st.booleans()),
        data.draw(begins.map(lambda x: x if anyhow else sorted(x))) if ragged else None,
        data.draw(rows) if limited else None,
    )  # fmt: skip
    overhead, most = data.draw(st.sampled_from([0, 2])), 128
    plan = plan_reference(lengths, parts, TILE, overhead, most, split, queries)
    check_units(plan, queries, lengths, most)
    units = len(plan.split_begin) - 1
    items, slots = units + parts - 1, 2 * (parts - 1)
    if split:
        items = slots = units * -(-most // TILE // split)
    assert len(plan.work_items) <= items and plan.split_begin[-1] <= slots
    costs = [
        sum(i[2] - i[1] + overhead for i in plan.work_items[x:y])
        for x, y in itertools.pairwise(plan.part_begin)
    ]
    assert split or max(costs) <= plan.part_cost


def test_a_unit_reads_what_its_last_token_sees() -> None:
    """Three tokens of 20, 21 and 22 visible tokens in tiles of 7, two tokens a unit."""
    queries = Queries(num_heads=2, s_q=3, unit_rows=4, causal=True)
    plan = plan_reference([22], 1, 7, 0, queries=queries)
    assert plan.work_items == [
        (0, 0, 3, -1, 0, 6, NOTHING_HIDDEN, 21), (0, 0, 4, -1, 4, 6, NOTHING_HIDDEN, 22)
    ]  # fmt: skip
    assert plan.units == [(0, 6), (4, 6)] and plan.split_begin == [0, 0, 0]


def test_ragged_queries_leave_out_who_asks_nothing() -> None:
    queries = Queries(num_heads=2, s_q=4, unit_rows=2, begins=[0, 1, 1, 3])
    plan = plan_reference([10, 500, 30], 1, 16, 1, queries=queries)
    assert [item[0] for item in plan.work_items] == [0, 2, 2]
    assert plan.units == [(0, 2), (2, 6), (4, 6)] and plan.unit_begin == [0, 1, 1, 3]
    assert plan.split_begin == [0] * (3 + 4 + 1)
    nothing = plan_reference([10], 2, 16, 1, queries=Queries(2, 4, 2, begins=[0, 0]))
    assert nothing.work_items == [] and nothing.part_begin == [0, 0, 0]


@pytest.mark.parametrize("field", ["num_heads", "s_q", "unit_rows"])
def test_queries_out_of_range(field: str) -> None:
    with pytest.raises(ValueError, match=f"^queries.{field}: expected at least"):
        plan_reference([64], 2, 64, 1, queries=Queries(**{field: -1}))


def test_overhead_has_one_default_only() -> None:
    """The plan's constant; a second one in the reference could differ."""
    with pytest.raises(TypeError, match="fixed_overhead"):
        plan_reference([64], 2, 64)  # type: ignore[call-arg]
