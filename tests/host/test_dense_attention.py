"""``decode`` over a 16-bit cache on the software GPU: queries as they are, and the grid.

Results by FlashMLA's gates to fp64.  Every pool is NaN where no token is, tables end in absurd ids.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import snapmla
from snapmla.dense import decode
from tests.support.bits import same_bits
from tests.support.dense_steps import SCALE, DenseStep, results
from tests.support.families import with_format
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
BF16, F16 = torch.bfloat16, torch.float16
# what the test set has: rows on N and on M
FEW: dict[str, Any] = {"page_size": 16, "dtype": F16}
MANY: dict[str, Any] = {"page_size": 64, "dtype": BF16}
SPLIT = {"num_parts": 3, "fixed_overhead": 0}


@pytest.mark.parametrize(
    ("heads", "s_q", "lengths", "kind", "row_tile"),
    [(2, 3, (65, 0, 1), FEW, 16), (2, 2, (65, 0), MANY, 64)],
    ids=["few", "many"],
)
def test_a_planned_call(
    monkeypatch: pytest.MonkeyPatch, heads: int, s_q: int, lengths: tuple[int, ...],
    kind: dict[str, Any], row_tile: int,
) -> None:  # fmt: skip
    """Splits, an empty sequence; a repeated call has the same bits and skips the full checks."""
    step = DenseStep.make(lengths, heads, s_q, **kind)
    plan = step.plan(row_tile=row_tile, **SPLIT)
    assert (plan.pipeline, plan.row_tile) == ("split", row_tile)
    assert int(plan.split_begin[-1]) > 0, "the case should exercise splits"
    out, lse = step.decode(plan)
    assert out.dtype == step.q.dtype and out.shape == plan.out_shape
    assert (out[1] == 0).all() and torch.isneginf(lse[1]).all()
    step.assert_right(out, lse)
    step.decode(plan, **results(step), out_dtype=step.q.dtype)  # the first of its kind is checked

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the full checks were made")

    monkeypatch.setattr(decode, "checked", refuse)
    given = results(step)
    again = step.decode(plan, **given, out_dtype=step.q.dtype)
    assert again[0] is given["out"] and again[1] is given["lse"]
    assert same_bits(given["out"], out) and same_bits(given["lse"], lse)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_items_of_fp16_in_stretches(monkeypatch: pytest.MonkeyPatch, kv_heads: int) -> None:
    """Parts that walk several pieces of one sequence, and a piece across two parts."""
    with_format(monkeypatch, "f16", longest_item=128)
    step = DenseStep.make((700, 0, 65, 130), 4, kv_heads=kv_heads, **FEW)
    plan = step.plan(num_parts=2, fixed_overhead=0)
    assert plan.longest_item == 2 and plan.max_stretches == 4
    cut = int(plan.part_begin[1])
    pieces = plan.work_items[:cut, 0].tolist()
    assert pieces.count(0) > 1 and pieces[-1] == int(plan.work_items[cut, 0])
    step.assert_right(*step.decode(plan))


def test_stretches_of_one_part_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part of several stretches splits a sequence, though nobody shares it."""
    with_format(monkeypatch, "f16", longest_item=128)
    step = DenseStep.make((300, 70), 4, dtype=torch.float16, page_size=16)
    plan = step.plan(num_parts=1, fixed_overhead=0)
    assert plan.max_stretches == 4 and plan.may_split and int(plan.split_begin[-1]) > 0
    step.assert_right(*step.decode(plan))
    short = DenseStep.make((60,), 4, dtype=torch.float16, page_size=16)
    assert not short.plan(num_parts=1, fixed_overhead=0).may_split


def test_without_a_plan_and_not_causal() -> None:
    step = DenseStep.make((20, 0), 4, 2, **FEW)
    out, lse = step.decode(None, causal=False, lse_base="2", empty_lse="+inf")
    assert torch.isposinf(lse[1]).all()
    lse = torch.where(torch.isposinf(lse), -math.inf, lse * math.log(2))
    step.assert_right(out, lse, causal=False)


def test_fixed_splits_are_each_requests_own() -> None:
    """The same bits alone and in a batch."""
    step = DenseStep.make((20, 100), 4, 1, **FEW)
    plan = step.plan(fixed_split_tokens=64)
    out, lse = step.decode(plan)
    step.assert_right(out, lse)
    one = DenseStep(step.cache, step.q[1:].clone(), step.block_table[1:], step.cache_seqlens[1:])
    alone = one.decode(one.plan(fixed_split_tokens=64))
    assert same_bits(alone[0], out[1:]) and same_bits(alone[1], lse[1:])


def test_a_plan_cache_of_kv_heads() -> None:
    step = DenseStep.make((20, 3), 4, 1, kv_heads=2, **FEW)
    plans = snapmla.PlanCache(
        4, page_size=16, device="cpu", cache_dtype=F16, num_kv_heads=2, num_parts=3
    )
    width = step.block_table.shape[1]
    plan = plans.get(step.cache_seqlens.flip(0).contiguous(), 1, max_pages=width)
    assert plans.get(step.cache_seqlens, 1, max_pages=width) is plan
    step.assert_right(*step.decode(plan))


def test_no_query_and_no_sequence() -> None:
    """An empty batch and no ragged token: nothing is launched."""
    step = DenseStep.make((5,), 4, 1, kv_heads=2, **FEW)
    none = step.cache_seqlens[:0]
    plan = snapmla.plan_decode(
        none, 4, 1, page_size=16, max_pages=3, cache_dtype=F16, num_kv_heads=2
    )
    out, lse = snapmla.decode(
        step.q[:0], step.cache, step.block_table[:0], none, softmax_scale=SCALE, plan=plan
    )
    assert out.shape == (0, 1, 4, 512) and lse.shape == (0, 4, 1)


# ---------------------------------------------------------------------------- the grid

HEADS, TOKENS = (1, 3, 8, 16, 20, 40, 96, 128), (1, 2, 4, 7, 33)
PAGES = (16, 32, 64, 128, 192)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("s_q", TOKENS)
@pytest.mark.parametrize("heads", HEADS)
def test_grid(heads: int, s_q: int) -> None:
    """Pages, dtypes and KV heads rotate; long sequences where there are few rows."""
    index = HEADS.index(heads) * len(TOKENS) + TOKENS.index(s_q)
    kv_heads = [n for n in (1, 2, 3, 8) if heads % n == 0]
    lengths = (200, 0, 65) if heads * s_q <= 64 else (70, 0) if heads * s_q <= 256 else (9,)
    step = DenseStep.make(
        lengths, heads, s_q, PAGES[index % 5], (BF16, F16)[index % 2],
        kv_heads[index % len(kv_heads)], seed=index,
    )  # fmt: skip
    causal = index % 4 != 3
    plan = step.plan(num_parts=5, fixed_overhead=0, causal=causal)
    given = results(step, math.nan)
    step.decode(plan, causal=causal, **given)
    step.assert_right(**given, causal=causal)


@pytest.mark.whole_matrix
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (20, 2), (96, 3), (128, 1)])
@pytest.mark.parametrize("fixed", [None, 64])
def test_ragged_grid(heads: int, kv_heads: int, fixed: int | None) -> None:
    step = DenseStep.make(
        (130, 0, 7), heads, kv_heads=kv_heads, tokens=(2, 1, 4), page_size=32, seed=heads
    )
    seen = torch.randint(-3, 140, step.q.shape[:1], dtype=torch.int32)
    for rule in ({}, {"row_seqlens": seen}):
        plan = step.plan(num_parts=4, fixed_overhead=1, fixed_split_tokens=fixed, **rule)
        step.assert_right(*step.decode(plan), **rule)
