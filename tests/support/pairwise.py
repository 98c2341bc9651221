"""Samples of a grid of axes in which every two values of every two axes meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Point = dict[str, Any]
Axes = Mapping[str, Sequence[Any]]


def pairs_of(axes: Axes, point: Point) -> set[tuple[str, Any, str, Any]]:
    """Every two values of it, by the order of ``axes``."""
    return {(a, point[a], b, point[b]) for a, b in itertools.combinations(axes, 2)}


def pairwise(axes: Axes) -> Iterator[Point]:
    """Points such that every two values of every two axes meet in one: the best of 20 drawn around
    a pair that has not met."""
    draw = random.Random(0)
    left = {
        (a, x, b, y)
        for a, b in itertools.combinations(axes, 2)
        for x, y in itertools.product(axes[a], axes[b])
    }
    order = sorted(left, key=str)
    while left:
        a, x, b, y = next(pair for pair in order if pair in left)
        drawn = [
            {name: draw.choice(values) for name, values in axes.items()} | {a: x, b: y}
            for _ in range(20)
        ]
        best = max(drawn, key=lambda point: len(pairs_of(axes, point) & left))
        left -= pairs_of(axes, best)
        yield best


def assert_all_meet(axes: Axes, points: Sequence[Point]) -> None:
    """Asserts that of every two axes every two values meet in a point."""
    for a, b in itertools.combinations(axes, 2):
        met = {(p[a], p[b]) for p in points}
        assert met == set(itertools.product(axes[a], axes[b])), (a, b)
