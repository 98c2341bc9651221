"""Calls that kernels see otherwise, on the software GPU: KV heads, also ragged, large pages."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import snapmla
from tests.support.bits import same_bits
from tests.support.dense_steps import SCALE, DenseStep, results
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
FEW: dict[str, Any] = {"page_size": 16, "dtype": torch.float16}  # what the test set has
SPLIT = {"num_parts": 3, "fixed_overhead": 0}


@pytest.mark.parametrize(("heads", "s_q", "kv_heads"), [(4, 1, 2), (6, 3, 3), (8, 1, 8)], ids=str)
def test_kv_heads(heads: int, s_q: int, kv_heads: int) -> None:
    """Results land where the caller has them: nothing else is written."""
    step = DenseStep.make((20, 0, 3), heads, s_q, kv_heads=kv_heads, **FEW)
    plan, given = step.plan(**SPLIT), results(step)
    step.decode(plan, **given)
    step.assert_right(**given)
    # other lengths, in place, and a stale plan
    step.cache_seqlens.copy_(torch.tensor([5, 0, 2]))
    with pytest.raises(ValueError, match=r"sequence 0 \(20 -> 5\), 2 \(3 -> 2\) \("):
        plan.check(step.cache_seqlens)
    plan.update_(step.cache_seqlens)
    plan.check(step.cache_seqlens)
    step.assert_right(*step.decode(plan))


def test_compiled_with_kv_heads() -> None:
    """In one graph: an update, what regroups rows, the operator; the bits of eager calls."""
    step = DenseStep.make((17, 3), 4, 2, kv_heads=2, **FEW)
    plan, other = step.plan(**SPLIT), step.cache_seqlens.flip(0).contiguous()

    def body(q: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        plan.update_(lengths)
        return snapmla.decode(
            q, step.cache, step.block_table, lengths, softmax_scale=SCALE, plan=plan
        )

    torch._dynamo.reset()
    compiled = torch.compile(body, fullgraph=True, backend="aot_eager")
    for lengths in (step.cache_seqlens, other):
        for a, b in zip(compiled(step.q, lengths), body(step.q, lengths), strict=True):
            assert same_bits(a, b)


def test_kv_heads_of_one_sequence() -> None:
    """Its tables, each row so many times, are no views of stride 0, nor is its query one."""
    step = DenseStep.make((17,), 8, 2, kv_heads=4, **FEW)
    step.assert_right(*step.decode(step.plan(**SPLIT)))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_ragged_queries(kv_heads: int) -> None:
    """Rows of no sequence stay as they are, before the first sequence too."""
    lengths, tokens = (17, 0, 5, 20), (2, 0, 1, 3)
    step = DenseStep.make(lengths, 2 * kv_heads, kv_heads=kv_heads, tokens=tokens, **FEW)
    plan = step.plan(row_tile=16, **SPLIT)
    for begins in (list(itertools.accumulate(tokens, initial=0)), [1, 2, 2, 5, 8]):
        assert step.begin is not None
        step.begin.copy_(torch.tensor(begins))
        plan.update_(step.cache_seqlens, step.begin)
        given = results(step)
        step.decode(plan, **given)
        step.assert_right(**given)
        for kept in (slice(0, begins[0]), slice(begins[-1], None)):
            assert (given["out"][kept] == 7).all() and (given["lse"][:, kept] == 7).all()


@pytest.mark.parametrize("ragged", [False, True])
def test_row_seqlens_of_kv_heads(ragged: bool) -> None:
    tokens = (2, 1) if ragged else None
    step = DenseStep.make((17, 20), 4, 2, kv_heads=2, tokens=tokens, **FEW)
    seen = torch.randint(0, 21, step.q.shape[:-2], dtype=torch.int32)
    out, lse = step.decode(step.plan(row_seqlens=seen, row_tile=16))
    step.assert_right(out, lse, row_seqlens=seen)


@pytest.mark.parametrize(("page_size", "kv_heads"), [(192, 2), (256, 1)])
def test_a_page_a_sequence(page_size: int, kv_heads: int) -> None:
    """(b, T, num_kv_heads, 576), T a multiple of 64, is read as pages of 64."""
    step = DenseStep.make((130, 3), 2, 1, page_size, torch.bfloat16, kv_heads)
    step.assert_right(*step.decode(step.plan(row_tile=64, **SPLIT)))
