"""``format=`` of plans and plan caches, beside ``cache_dtype=``: one of the two, one meaning."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import snapmla
from snapmla import checks
from snapmla.parallel.group import ContextGroup
from tests.support.needs import needs_kernels

HEADS = 16
LENGTHS = torch.tensor([100, 30], dtype=torch.int32)
BOTH = r"^format: expected one of format and cache_dtype, got both \(they mean the same"


def dense(**kind: Any) -> Any:
    return snapmla.plan_decode(LENGTHS, HEADS, 1, page_size=64, max_pages=2, **kind)


def sparse(**kind: Any) -> Any:
    return snapmla.plan_sparse_decode(HEADS, 1, topk=64, batch=2, device="cpu", **kind)


def dense_of_cache(**kind: Any) -> Any:
    plans = snapmla.PlanCache(HEADS, page_size=64, device="cpu", **kind)
    return plans.get(LENGTHS, 1, max_pages=2)


def sparse_of_cache(**kind: Any) -> Any:
    plans = snapmla.SparsePlanCache(HEADS, device="cpu", **kind)
    return plans.get(None, 1, topk=64, batch=2)


MAKERS: dict[Callable[..., Any], tuple[Any, ...]] = {
    dense: ("fp8", "fp8_ds_mla", torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    dense_of_cache: ("fp8", torch.bfloat16),
    sparse: ("fp8", "fp8_ds_mla", "bf16", torch.bfloat16),
    sparse_of_cache: ("fp8", "fp8_ds_mla"),
}
CASES = [(make, kind) for make, kinds in MAKERS.items() for kind in kinds]


@needs_kernels
@pytest.mark.parametrize("make, kind", CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_both_names_mean_the_same(make: Callable[..., Any], kind: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new, old = make(format=kind), make(cache_dtype=kind)
    assert type(new) is type(old) and new.cache_dtype == old.cache_dtype
    assert new.row_tile == old.row_tile
    if kind == "fp8":
        without = make()
        assert without.cache_dtype == "fp8" and type(without.cache_dtype) is str


@needs_kernels
def test_a_format_of_16_bits_has_a_name() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        cache = snapmla.PagedKVCache.allocate(2, 64, device="cpu", dtype=dtype)
        for make in (dense, dense_of_cache):
            assert make(format=cache.format).cache_dtype == cache.format


@pytest.mark.parametrize("make", MAKERS, ids=lambda x: x.__name__)
@pytest.mark.parametrize("given", ["fp8", torch.bfloat16, "no such"])
def test_both_are_refused(make: Callable[..., Any], given: Any) -> None:
    for cache_dtype in (given, "fp8"):
        with pytest.raises(ValueError, match=BOTH):
            make(format=given, cache_dtype=cache_dtype)


@pytest.mark.parametrize("make", MAKERS, ids=lambda x: x.__name__)
def test_a_wrong_format_is_named_as_it_was_given(make: Callable[..., Any]) -> None:
    for name in ("format", "cache_dtype"):
        with pytest.raises(ValueError, match=f"^{name}: expected one of 'fp8'.*got 'fp9'"):
            make(**{name: "fp9"})


@pytest.mark.parametrize("topk", [None, 64])
def test_explain(topk: int | None) -> None:
    """It takes both names, refuses them together, and names a wrong one as it was given."""

    def told(**kind: Any) -> str:
        return str(snapmla.explain(HEADS, card="H200", topk=topk, **kind))

    for kind in ("fp8", "fp8_ds_mla") if topk else ("fp8", "fp8_ds_mla", torch.bfloat16):
        assert told(format=kind) == told(cache_dtype=kind)
    assert told() == told(format="fp8")
    if topk is None:
        assert told(format="bf16") == told(cache_dtype=torch.bfloat16) != told()
    with pytest.raises(ValueError, match=BOTH):
        told(format="fp8", cache_dtype="fp8")
    for name in ("format", "cache_dtype"):
        with pytest.raises(ValueError, match=f"^{name}: expected one of 'fp8'.*got 'fp9'"):
            told(**{name: "fp9"})


def test_a_group_takes_both_names() -> None:
    kind = ContextGroup._kind
    for given in ("fp8", torch.bfloat16):
        assert kind(None, given, checks.UNSAID) == kind(None, None, given)  # type: ignore[arg-type]
    assert kind(None, "bf16", checks.UNSAID) == "bf16"  # type: ignore[arg-type]
    assert kind(None, None, checks.UNSAID) == "fp8"  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=BOTH):
        kind(None, "fp8", "fp8")  # type: ignore[arg-type]
    for name, given in (("format", ("fp8_ds_mla", checks.UNSAID)), ("cache_dtype", (None, "fp9"))):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            kind(None, *given)  # type: ignore[arg-type]


def test_signatures_only_grew() -> None:
    for function in (
        snapmla.plan_decode, snapmla.plan_sparse_decode, snapmla.PlanCache, snapmla.SparsePlanCache,
    ):  # fmt: skip
        found = inspect.signature(function).parameters
        assert list(found)[-1] == "format"
        assert str(found["cache_dtype"]).endswith("= 'fp8'")


@needs_kernels
def test_a_copy_of_a_cache_makes_plans_of_the_same_format() -> None:
    plans = snapmla.PlanCache(HEADS, page_size=64, device="cpu", format="bf16")
    copied = copy.deepcopy(plans)
    assert copied.get(LENGTHS, 1, max_pages=2).cache_dtype == "bf16"


@needs_kernels
def test_under_dynamo() -> None:
    def step(lengths: torch.Tensor, **kind: Any) -> torch.Tensor:
        plan = snapmla.plan_decode(lengths, HEADS, 1, page_size=64, max_pages=2, **kind)
        sparse = snapmla.plan_sparse_decode(HEADS, 1, topk=64, batch=2, device="cpu", **kind)
        assert plan.cache_dtype == sparse.cache_dtype
        return lengths + len(plan.cache_dtype)

    compiled = torch.compile(step, backend="eager")
    for kind in ({}, {"format": "fp8_ds_mla"}, {"cache_dtype": "fp8_ds_mla"}):
        assert torch.equal(compiled(LENGTHS, **kind), step(LENGTHS, **kind)), kind


def test_identity_tells_what_was_left_out() -> None:
    assert checks.given_format(None, checks.UNSAID) == ("cache_dtype", "fp8")
    assert checks.given_format(None, "fp8") == ("cache_dtype", "fp8")
    assert checks.given_format("fp8", checks.UNSAID) == ("format", "fp8")
