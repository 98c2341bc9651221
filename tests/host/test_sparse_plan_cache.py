"""``SparsePlanCache``: what makes another plan, what is updated, over which memory.

What it shares with ``PlanCache`` (pins, threads, capture's rules) is tested there; on the software
GPU nothing is captured.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import snapmla
from snapmla.dense import TENSORS, DecodePlan
from snapmla.sparse.plan import SparseOptions, plan_sparse
from tests.support.needs import needs_kernels

HEADS, TOPK = 3, 300


def cache(**options: Any) -> snapmla.SparsePlanCache:
    return snapmla.SparsePlanCache(HEADS, device="cpu", num_parts=3, **options)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def same(plan: snapmla.SparsePlan, other: DecodePlan) -> None:
    """The same tables: what ``plan_sparse_decode`` makes."""
    used = {"work_items": int(other.part_begin[-1])}
    if other.s_q is None:
        used["units"] = int(other.unit_begin[-1])
    for name in TENSORS:
        if name.endswith("accum"):
            assert getattr(plan, name).shape == getattr(other, name).shape
        else:
            a, b = getattr(plan, name), getattr(other, name)
            a, b = (x[: used.get(name)] for x in (a, b))
            assert torch.equal(a, b), name


@needs_kernels
def test_a_held_plan_is_updated_for_its_lengths() -> None:
    plans = cache()
    plan = plans.get(ints(300, 10), 1, topk=TOPK)
    assert isinstance(plan, snapmla.SparsePlan) and plan.topk == TOPK
    assert plans.get(ints(5, 250), 1, topk=TOPK) is plan
    want = snapmla.plan_sparse_decode(HEADS, 1, topk=TOPK, topk_length=ints(5, 250), num_parts=3)
    same(plan, want)
    assert plan.planned_seqlens.tolist() == [5, 250]


@needs_kernels
def test_a_plan_without_lengths_is_not_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is none for a step that has some: a decode reads the plan's own lengths."""
    plans = cache()
    plan = plans.get(None, 2, topk=TOPK, batch=2)
    assert plan.planned_seqlens.tolist() == [TOPK, TOPK]
    with_lengths = plans.get(ints(1, 2), 2, topk=TOPK)
    assert with_lengths is not plan and plan.planned_seqlens.tolist() == [TOPK, TOPK]
    same(plan, snapmla.plan_sparse_decode(HEADS, 2, topk=TOPK, batch=2, device="cpu", num_parts=3))
    monkeypatch.setattr(DecodePlan, "update_", None)
    assert plans.get(None, 2, topk=TOPK, batch=2) is plan


@needs_kernels
def test_ragged_queries_without_lengths_are_planned_anew() -> None:
    """All entries count, whatever sequences the query tokens are of."""
    plans, options = cache(), {"topk": TOPK, "total_q": 4, "num_parts": 3}
    for begins in ([0, 1, 4], [0, 2, 2]):
        plan = plans.get(None, topk=TOPK, batch=2, cu_seqlens_q=ints(*begins), total_q=4)
        want = snapmla.plan_sparse_decode(
            HEADS, batch=2, device="cpu", cu_seqlens_q=ints(*begins), **options
        )  # type: ignore[arg-type]
        same(plan, want)
    assert plans.stats().plans == 1
    with pytest.raises(TypeError, match="^cu_seqlens_q: expected a torch.Tensor, got NoneType"):
        plans.get(None, topk=TOPK, batch=2, total_q=4)


@needs_kernels
def test_lengths_of_each_query_token() -> None:
    plans, own = cache(), ints(300, 1, 64, 65).view(2, 2)
    plan = plans.get(ints(300, 300), 2, topk=TOPK, row_lengths=own)
    same(plan, plan_sparse(
        SparseOptions(num_heads=HEADS, num_parts=3), TOPK, 2, ints(300, 300), row_lengths=own
    ))  # fmt: skip
    assert plans.get(ints(300, 300), 2, topk=TOPK) is not plan
    assert plans.get(None, 2, topk=TOPK, batch=2, row_lengths=own) is not plan
    assert plans.stats().plans == 3


@needs_kernels
def test_one_workspace_and_pins() -> None:
    """Plans without pin go, with the lengths that stand for theirs; what is pinned never moves."""
    plans = cache(capacity=1)
    plan = plans.get(None, 4, topk=TOPK, batch=4, pin=True)
    at = [getattr(plan, name).data_ptr() for name in TENSORS]
    small = plans.get(None, 1, topk=TOPK, batch=2)
    assert small.o_accum.data_ptr() == plan.o_accum.data_ptr()
    for batch in range(5, 9):
        plans.get(None, 1, topk=TOPK, batch=batch)
    assert plans.stats()[:2] == (2, 1)
    assert set(plans._whole) == {(4, TOPK), (8, TOPK)}
    assert plans.get(None, 4, topk=TOPK, batch=4) is plan
    assert [getattr(plan, name).data_ptr() for name in TENSORS] == at
    plans.release(plan)
    with pytest.raises(ValueError, match="^plan: expected a plan that is pinned here"):
        plans.release(plan)
    with pytest.raises(TypeError, match="^plan: expected a snapmla.SparsePlan or None, got str"):
        plans.release("all")  # type: ignore[arg-type]


@needs_kernels
def test_copies_are_their_own() -> None:
    plans = cache()
    plan = plans.get(None, 1, topk=TOPK, batch=2, pin=True)
    other = copy.deepcopy(plans)
    mine = other.get(None, 1, topk=TOPK, batch=2)
    assert mine is not plan and mine.o_accum.data_ptr() != plan.o_accum.data_ptr()
    with pytest.raises(TypeError, match="^SparsePlanCache: expected copy.deepcopy, or another Sp"):
        pickle.dumps(plans)
    assert repr(plans).startswith("SparsePlanCache(3 heads, sparse, fp8 cache, cpu: 1 plans, 1 pin")


@needs_kernels
def test_a_new_shape_under_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by ``PlanCache``; what is there is handed out and stays."""
    plans = cache()
    plan = plans.get(ints(1, 2), 1, topk=TOPK)
    monkeypatch.setattr(plans, "_capturing", lambda: True)
    assert plans.get(ints(2, 3), 1, topk=TOPK) is plan and plans.stats().pinned == 1
    words = "got b = 2, s_q = 1, topk = 9, topk_length .call get for it before"
    with pytest.raises(ValueError, match=f"^SparsePlanCache.get: expected a shape .*{words}"):
        plans.get(ints(2, 3), 1, topk=9)
    with pytest.raises(ValueError, match="got b = 2, s_q = 1, topk = 300 .call"):
        plans.get(None, 1, topk=TOPK, batch=2)


@needs_kernels
def test_wrong_arguments_of_a_held_shape() -> None:
    plans = cache()
    plans.get(None, 1, topk=1, batch=1)
    plans.get(ints(1), 1, topk=1)
    for given, words in (
        ({"topk_length": ints(1), "topk": True}, "topk: expected an int"),
        ({"topk_length": ints(1), "topk": 0}, "topk: expected"),
        ({"topk_length": ints(1), "topk": 1, "batch": 2}, "batch: expected 1, as topk_length"),
        ({"topk_length": None, "topk": 1}, "batch: expected an int, got None"),
        ({"topk_length": None, "topk": 1, "batch": True}, "batch: expected an int"),
        ({"topk_length": None, "topk": 1, "batch": 1, "pin": "yes"}, "pin: expected"),
        ({"topk_length": ints(1).long(), "topk": 1}, "topk_length: expected dtype int32"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{words}"):
            plans.get(**{"s_q": 1, **given})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^cache_dtype: expected one of 'fp8', 'fp8_ds_mla'"):
        cache(cache_dtype="bf16")
    with pytest.raises(ValueError, match="^pipeline: expected 'etap' on sm_90a"):
        cache(pipeline="mix16")
