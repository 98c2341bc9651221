"""The planner's mirror: every tile once, within capacity, balanced and optimal."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsl_kernels.dims import TOKEN_TILE
from snapmla.testing.reference_plan import plan_reference, tile_counts
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
        sum(e - s + overhead for _, s, e, _ in items[x:y])
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
        cost = sum(e - s + overhead for _, s, e, _ in plan.work_items[x:y])
        assert cost < plan.part_cost + split + overhead + 1


def test_overhead_has_one_default_only() -> None:
    """The plan's constant; a second one in the reference could differ."""
    with pytest.raises(TypeError, match="fixed_overhead"):
        plan_reference([64], 2, 64)  # type: ignore[call-arg]
