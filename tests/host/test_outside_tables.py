"""Pairs that do not fit their call: a row is right or NaN, never another's, never unwritten.

Results start as 7, which is neither; the workspace holds what other steps left in it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from snapmla.compat import flash_mla_fp8 as names
from snapmla.compat import metadata_pair
from softgpu import Options, using
from tests.support.families import with_family
from tests.support.needs import needs_compiler
from tests.support.pairs import Step

pytestmark = needs_compiler
LENGTHS = (300, 40, 130)
SPLIT = (300, 100, 40)  # with cheap cuts the first one is split
CLOSE = 5e-3  # relative L2 of two orders of the same sums


class Watching(TorchDispatchMode):
    """Watches, so that calls become operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


EVERY = [(h, s_q) for h in (8, 16, 64, 128) for s_q in (1, 2)]
FEW = {((16, 2), (16, 1))}
HAZARDS = Options(hazards="raise")
whole = pytest.mark.whole_matrix


@pytest.fixture(autouse=True)
def _cheap_cuts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with_family(monkeypatch, "decode", item_overhead=1)
    metadata_pair._plans.clear()
    yield
    metadata_pair._plans.clear()


@functools.cache
def prepared(lengths: tuple[int, ...], heads: int, s_q: int) -> tuple[Step, names.Pair]:
    """A step, which nobody changes, and its right results."""
    step = Step(lengths, heads, s_q)
    return step, step.primary()


def decode(step: Step, pair: names.Pair) -> names.Pair:
    b, s_q, heads, _ = step.q.shape
    out = torch.full((b, s_q, heads, 512), 7.0).bfloat16()
    return step.decode(pair, out=out, lse=torch.full((b, heads, s_q), 7.0))


def verdict(step: Step, made: names.Pair, want: names.Pair) -> list[bool]:
    """Which sequences are right; the others must be NaN, all of out and lse."""
    found = []
    for out, lse, right_out, right_lse in zip(*made, *want):
        nan = bool(out.isnan().all() and lse.isnan().all())
        if not nan:
            error = (out.float() - right_out.float()).norm() / right_out.float().norm()
            assert error <= CLOSE and torch.allclose(lse, right_lse, atol=1e-3), float(error)
        found.append(not nan)
    return found


@pytest.mark.parametrize(
    ("called", "planned"),
    [
        pytest.param(*x, marks=() if x in FEW else pytest.mark.whole_matrix)
        for x in itertools.product(EVERY, EVERY)
        if x[0] != x[1]
    ],
)
def test_a_pair_for_other_rows(called: tuple[int, int], planned: tuple[int, int]) -> None:
    """Rows come from the call: the pair decides about balance alone."""
    step, want = prepared(LENGTHS, *called)
    pair = names.get_mla_metadata(step.lengths, planned[0] * planned[1], 1)
    hazards = nullcontext() if (called, planned) in FEW else using(HAZARDS)
    with hazards:
        made = decode(step, pair)
    assert verdict(step, made, want) == [True] * 3


Edit = Callable[[Step, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def other_lengths(*lengths: int) -> Edit:
    return lambda step, *_: names.get_mla_metadata(torch.tensor(lengths).int(), 8, 1)


def smaller_batch(step: Step, *_: torch.Tensor) -> names.Pair:
    metadata, splits = names.get_mla_metadata(step.lengths[:2].clone(), 8, 1)
    return metadata, torch.cat([splits, splits[-1:]])


def larger_batch(step: Step, *_: torch.Tensor) -> names.Pair:
    metadata, splits = names.get_mla_metadata(torch.tensor([*SPLIT, 500]).int(), 8, 1)
    return metadata, splits[:4]


def other_halves(step: Step, metadata: torch.Tensor, splits: torch.Tensor) -> names.Pair:
    """Slots of another step: they are the first sequence's here, the second one's there."""
    return metadata, names.get_mla_metadata(torch.tensor([40, 300, 100]).int(), 8, 1)[1]


def changed(place: tuple[int, int], value: int) -> Edit:
    def edit(step: Step, metadata: torch.Tensor, splits: torch.Tensor) -> names.Pair:
        metadata.view(-1)[8 * place[0] + place[1]] = value
        return metadata, splits

    return edit


@pytest.mark.parametrize(
    ("edit", "right", "hazards"),
    [
        pytest.param(lambda step, *pair: pair, [True] * 3, True, marks=whole),
        (smaller_batch, [True, True, False], True),
        pytest.param(larger_batch, None, True, marks=whole),
        (other_halves, None, False),
        (other_lengths(300, 64, 40), [True, False, True], False),  # the second has grown since
        pytest.param(
            other_lengths(300, 100, 90), [True] * 3, True, marks=whole
        ),  # the third shrank
        (lambda step, meta, splits: (meta, splits + 1), [False] * 3, False),
        pytest.param(
            lambda step, meta, splits: (meta, torch.roll(splits, 1)), [False] * 3, True, marks=whole
        ),
        pytest.param(
            lambda step, meta, splits: (meta, torch.zeros_like(splits)),
            [False, True, True],
            True,
            marks=whole,
        ),
        pytest.param(
            lambda step, meta, splits: (meta[:2].contiguous(), splits), None, True, marks=whole
        ),
        pytest.param(
            lambda step, meta, splits: (torch.zeros_like(meta), splits),
            [False] * 3,
            True,
            marks=whole,
        ),
        # the first item names another sequence, begins a tile later, ends early, writes to another
        # slot or to none: items that write to one slot race, and nobody reads what they leave
        (changed((0, 0), 1), [False, False, True], False),
        pytest.param(changed((0, 1), 1), [False, True, True], False, marks=whole),
        pytest.param(changed((0, 2), 1), [False, True, True], False, marks=whole),
        pytest.param(changed((0, 3), 1), [False, True, True], False, marks=whole),
        pytest.param(changed((0, 3), -1), [False, True, True], False, marks=whole),
    ],
)
def test_a_pair_that_does_not_fit(edit: Edit, right: list[bool] | None, hazards: bool) -> None:
    """What ``covered`` says, and never anything else than right or NaN."""
    step, want = prepared(SPLIT, 8, 1)
    pair = step.metadata()
    assert int(pair[1][-1]) >= 2
    metadata, splits = edit(step, *pair)
    with using(HAZARDS) if hazards else nullcontext():
        made = decode(step, (metadata, splits))
    found = verdict(step, made, want)
    assert right is None or found == right
    tables = metadata_pair.tables_of(metadata, 3)
    tiles = [-(-n // 64) for n in SPLIT]
    listed = tables.work_items.tolist(), tables.part_begin.tolist(), splits.tolist()
    assert found == metadata_pair.covered(*listed, tiles, 2 * len(metadata))


@whole
def test_random_words() -> None:
    """In the work list, where parts begin and in the splits."""
    step, want = prepared(SPLIT, 8, 1)
    metadata, splits = step.metadata()
    generator, parts = torch.Generator().manual_seed(0), len(metadata)
    for case in range(60):
        broken, slots = metadata.clone(), splits.clone()
        flat = broken.view(-1)
        table = (flat[: 8 * (parts + 3)], flat[-(parts + 1) :], slots)[case % 3]
        at = torch.randint(0, len(table), (1 + case % 4,), generator=generator)
        low, high = (-2, 8) if case % 2 else (-(2**31), 2**31 - 1)
        table[at] = torch.randint(low, high, at.shape, generator=generator).int()
        found = verdict(step, decode(step, (broken, slots)), want)
        listed = metadata_pair.tables_of(broken, 3)
        tables = listed.work_items.tolist(), listed.part_begin.tolist(), slots.tolist()
        assert found == metadata_pair.covered(*tables, [-(-n // 64) for n in SPLIT], 2 * parts)


def test_the_operator_asks_too() -> None:
    """Where calls are watched they are operators: ``check_tables``."""
    step, want = prepared(SPLIT, 8, 1)
    metadata, splits = step.metadata()
    with Watching():
        made = step.decode((metadata, splits + 1))
    assert verdict(step, made, want) == [False] * 3


def test_a_pair_without_splits_is_asked_too() -> None:
    """One part: no merge is needed, and rows without an item become NaN all the same."""
    step, want = prepared((40, 130), 8, 1)
    metadata, splits = names.get_mla_metadata(
        step.lengths[:1].clone(), 8, 1,
        out=(torch.zeros(1, 200, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)),
    )  # fmt: skip
    pair = (metadata, torch.cat([splits, splits[-1:]]))
    assert verdict(step, decode(step, pair), want) == [True, False]


@whole
def test_results_in_fp32_become_nan_too() -> None:
    step = Step((40, 130), 8, 1)
    metadata, splits = step.metadata()
    out, lse = step.decode((metadata, splits + 1), out=torch.full((2, 1, 8, 512), 7.0))
    assert out.isnan().all() and lse.isnan().all()


def test_halves_of_two_pairs_are_refused_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPMLA_CHECK_PLAN", "1")
    step, _ = prepared(SPLIT, 8, 1)
    pair = other_halves(step, *step.metadata())
    wanted = "^tile_scheduler_metadata, num_splits: expected both of one pair.* sequence 0, 1"
    with pytest.raises(ValueError, match=wanted):
        step.decode(pair)
