"""``decode`` on the software GPU: the whole pipeline, the quick way of a planned call, failures.

Lengths include 0 and 1; truth, poison and layouts of single variants: tests/kernels.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import snapmla
import softgpu
from snapmla import PagedKVCache, attention, env, metrics, runtime
from snapmla.plan import PlanVariant
from snapmla.testing import selfcheck
from tests.support.needs import needs_compiler
from tests.support.steps import SCALE, assert_right, make_step, plan_for

pytestmark = needs_compiler
PIPELINE_CASES = [
    # pipeline, heads, s_q, page size, layout, out dtype, granularity
    ("etap", 5, 3, 64, "split", torch.float32, "token_head"),
    ("etap", 10, 3, 64, "paged", torch.bfloat16, "token_head"),
    ("etap", 48, 1, 64, "row640", torch.bfloat16, "token"),
    ("dual_wg", 16, 2, 64, "paged", torch.bfloat16, "token_head"),
]
WHOLE_MATRIX_CASES = [
    ("dual_wg", 128, 1, 64, "split", torch.bfloat16, "token"),
    ("etap", 65, 2, 64, "split", torch.bfloat16, "token"),  # three row blocks of 64
    ("etap", 8, 1, 16, "paged", torch.bfloat16, "token_head"),
    ("etap", 10, 3, 16, "paged", torch.float32, "token_head"),
    ("etap", 48, 1, 32, "row640", torch.bfloat16, "token"),
    ("etap", 32, 4, 128, "split", torch.float32, "token_head"),
    ("dual_wg", 64, 1, 64, "row640", torch.float32, "token_head"),
]


@pytest.mark.parametrize(
    ("pipeline", "heads", "s_q", "page_size", "layout", "dtype", "granularity"),
    [
        *PIPELINE_CASES,
        *(pytest.param(*c, marks=pytest.mark.whole_matrix) for c in WHOLE_MATRIX_CASES),
    ],
    ids=[f"{c[0]}-h{c[1]}-q{c[2]}-p{c[3]}-{c[4]}" for c in PIPELINE_CASES + WHOLE_MATRIX_CASES],
)
def test_pipeline(
    pipeline: str,
    heads: int,
    s_q: int,
    page_size: int,
    layout: str,
    dtype: torch.dtype,
    granularity: str,
) -> None:
    step = make_step((200, 0, 64, 1, 65), heads, s_q, page_size, layout, granularity)
    plan = plan_for(step, pipeline=pipeline, num_parts=3, fixed_overhead=0)
    assert int(plan.split_begin[-1]) > 0, "the case should exercise splits"
    out, lse = snapmla.decode(
        step.q, step.cache, step.block_table, step.cache_seqlens,
        softmax_scale=SCALE, plan=plan, out_dtype=dtype,
    )  # fmt: skip
    assert out.dtype == dtype and tuple(lse.shape) == (5, heads, s_q)
    assert (out[1] == 0).all() and torch.isneginf(lse[1]).all()
    assert_right(step, out, lse)


def test_without_a_plan_and_not_causal() -> None:
    step = make_step((70, 3), 4, 4)
    out, lse = snapmla.decode(
        step.q, step.cache, step.block_table, step.cache_seqlens, softmax_scale=SCALE, causal=False
    )
    assert_right(step, out, lse, causal=False)
    causal, _ = snapmla.decode(
        step.q, step.cache, step.block_table, step.cache_seqlens, softmax_scale=SCALE
    )
    assert torch.equal(causal[:, 3], out[:, 3]) and not torch.equal(causal[:, 0], out[:, 0])


def test_lse_base_and_empty_rows() -> None:
    step = make_step((2, 0), 4, 4)  # causal: the first two query tokens of sequence 0 see nothing
    run = {"softmax_scale": SCALE, "plan": plan_for(step)}
    arguments = (step.q, step.cache, step.block_table, step.cache_seqlens)
    out, natural = snapmla.decode(*arguments, **run)  # type: ignore[arg-type]
    _, base2 = snapmla.decode(*arguments, **run, lse_base="2", empty_lse="+inf")  # type: ignore[arg-type]
    empty = torch.isneginf(natural)
    assert empty[0, :, :2].all() and not empty[0, :, 2:].any() and empty[1].all()
    assert torch.isposinf(base2[empty]).all()
    torch.testing.assert_close(base2[~empty] * math.log(2.0), natural[~empty])
    assert (out.transpose(1, 2)[empty] == 0).all()


def test_unsplit_and_split_agree() -> None:
    step = make_step((300, 40), 8, 1)
    results = []
    for parts in (1, 4):
        plan = plan_for(step, num_parts=parts, fixed_overhead=0)
        assert plan.may_split == (parts > 1)
        results.append(
            snapmla.decode(
                step.q, step.cache, step.block_table, step.cache_seqlens,
                softmax_scale=SCALE, plan=plan, out_dtype=torch.float32,
            )
        )  # fmt: skip
    # Pieces are fp16, whole sequences are not: half a step is at most 2^-11 of a value, spread
    # evenly 2^-11 / sqrt(3) in the mean.  LSEs are fp32 sums of up to four pieces in another order.
    assert metrics.relative_l2(results[1][0], results[0][0]) < 2**-11 / math.sqrt(3)
    assert metrics.lse_error(results[1][1], results[0][1]) < 1e-5


def test_empty_calls_return_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: object) -> None:
        raise AssertionError("an empty call reached a kernel")

    monkeypatch.setattr("snapmla.runtime.kernel", reached)
    snapmla.runtime.forget()
    cache = PagedKVCache.allocate(2, 16, device="cpu")
    empty = torch.zeros(0, dtype=torch.int32)
    snapmla.append_kv(cache, torch.zeros(0, 512), torch.zeros(0, 64), empty)
    q = snapmla.quantize_q(torch.zeros(0, 1, 4, 512), torch.zeros(0, 1, 4, 64))
    table = torch.zeros((0, 3), dtype=torch.int32)
    plan = snapmla.plan_decode(empty, 4, 1, page_size=16, max_pages=3)
    for given in (plan, None):
        out, lse = snapmla.decode(q, cache, table, empty, softmax_scale=SCALE, plan=given)
        assert tuple(out.shape) == (0, 1, 4, 512) and tuple(lse.shape) == (0, 4, 1)
    fetched = snapmla.fetch_dequant(cache, empty)
    assert tuple(fetched[0].shape) == (0, 512)


HEADS, WIDTH = 16, 4
BF16 = torch.bfloat16


def complete_call() -> dict[str, Any]:
    """Arguments of a call that is right; page 64, b 2, s_q 2."""
    cache, table, lengths = selfcheck.filled_cache((130, 70), 64)
    q = selfcheck.sample_query(2, 2, HEADS)
    return {
        "q": q,
        "cache": cache,
        "block_table": table,
        "cache_seqlens": lengths,
        "softmax_scale": SCALE,
        "plan": snapmla.plan_decode(lengths, HEADS, 2, page_size=64, max_pages=WIDTH),
        "out": torch.zeros(2, 2, HEADS, 512, dtype=BF16),
        "lse": torch.zeros(2, HEADS, 2),
    }


def test_gaps_that_the_exported_function_does_not_see() -> None:
    """s_q 1: the stride over heads is 1 as it should be, that over sequences is not."""
    cache, table, lengths = selfcheck.filled_cache((130, 70), 64)
    q = selfcheck.sample_query(2, 1, HEADS)
    plan = snapmla.plan_decode(lengths, HEADS, 1, page_size=64, max_pages=table.shape[1])
    lse = torch.zeros(HEADS, 2, 1).transpose(0, 1)
    with pytest.raises(ValueError, match="lse: .*contiguous"):
        snapmla.decode(
            q, cache, table, lengths, softmax_scale=SCALE, plan=plan, lse=lse,
            out=torch.zeros(2, 1, HEADS, 512, dtype=BF16),
        )  # fmt: skip


def test_objects_of_another_shape() -> None:
    call = complete_call()
    lengths = call["cache_seqlens"]
    other = snapmla.plan_decode(lengths, HEADS, 1, page_size=64, max_pages=WIDTH)
    with pytest.raises(ValueError, match=r"plan: .*\(2, 2, 16, 64\), got \(2, 1, 16, 64\)"):
        snapmla.decode(**{**call, "plan": other})
    small = snapmla.PagedKVCache.allocate(4, 32, device="cpu")
    with pytest.raises(ValueError, match="plan: "):
        snapmla.decode(**{**call, "cache": small})


def test_complete_call_takes_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    call = complete_call()

    def reached(*_: object) -> None:
        raise AssertionError("the full checks ran")

    monkeypatch.setattr(attention, "checked", reached)
    out, lse = snapmla.decode(**call)
    assert out is call["out"] and lse is call["lse"] and out.abs().sum() > 0
    fresh, _ = snapmla.decode(**{**call, "out": None, "lse": None, "out_dtype": torch.float32})
    assert fresh.dtype == torch.float32
    assert torch.equal(fresh.bfloat16(), out), "the same fp32 values, rounded at the very end"


@pytest.mark.parametrize("width", [WIDTH - 1, WIDTH + 1])
def test_the_table_is_as_wide_as_planned(width: int) -> None:
    """Kernels clamp lengths by the table's own width, plans by the one they were told."""
    call = complete_call()
    table = torch.zeros(2, width, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^block_table: expected a width of {WIDTH}, .*{width}"):
        snapmla.decode(**{**call, "block_table": table})
    assert not call["out"].any()


def test_strided_block_table_is_fine() -> None:
    call = complete_call()
    out, _ = snapmla.decode(**{**call, "out": None, "lse": None})
    wide = torch.full((2, 2 * WIDTH), -1, dtype=torch.int32)
    wide[:, :WIDTH] = call["block_table"]
    snapmla.decode(**{**call, "block_table": wide[:, :WIDTH]})
    assert torch.equal(out, call["out"])


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA error 700"), ValueError("Mismatched"), TypeError("no"), KeyError(1)],
)
def test_a_failing_kernel_is_called_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """And reported as it failed, also by words that otherwise tell of a wrong argument."""
    call, calls = complete_call(), []

    def failing(*_: object) -> None:
        calls.append(1)
        raise error

    PlanVariant.forget()  # the kernels that were loaded
    monkeypatch.setattr(attention, "_kernel", lambda *_: failing)
    for changes in ({}, {"out": None, "lse": None}, {"pipeline": call["plan"].pipeline}):
        calls.clear()
        with pytest.raises(type(error)) as caught:
            snapmla.decode(**{**call, **changes})
        assert caught.value is error and calls == [1]
        assert error.__cause__ is None and error.__context__ is None


def test_a_fault_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The software GPU stops in the first decode grid; no other grid is started."""
    call, grids = complete_call(), []
    run = softgpu.machine.Machine.run
    monkeypatch.setattr(
        softgpu.machine.Machine, "run", lambda machine: grids.append(1) or run(machine)
    )
    with (
        softgpu.using(softgpu.Options(max_instructions=500)),
        pytest.raises(softgpu.SoftGpuError, match="^stopped after"),
    ):
        snapmla.decode(**call)
    assert grids == [1]


def test_a_kernel_that_does_not_compile_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call, asked = complete_call(), []
    monkeypatch.setattr(env, "variant_dirs", lambda: [tmp_path])

    def broken(spec: object) -> None:
        asked.append(spec)
        raise snapmla.errors.VariantError("it did not compile")

    monkeypatch.setattr(runtime, "compile_variant", broken)
    monkeypatch.setattr(runtime, "_jit_refusal", lambda: None)
    runtime.forget()
    with pytest.raises(snapmla.errors.VariantError, match="^it did not compile"):
        snapmla.decode(**call)
    runtime.forget()
    assert len(asked) == 1


def test_a_stale_plan_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    call, compared = complete_call(), []
    call["plan"] = dataclasses.replace(call["plan"], check_stale=True)
    check = snapmla.DecodePlan.check
    monkeypatch.setattr(
        snapmla.DecodePlan,
        "check",
        lambda plan, lengths: compared.append(1) or check(plan, lengths),
    )
    call["cache_seqlens"] = call["cache_seqlens"] - 1
    with pytest.raises(ValueError, match=r"^plan: expected the lengths it was last updated for"):
        snapmla.decode(**call)
    assert compared == [1]


def test_a_failure_beside_a_wrong_argument_stays_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the exported function refuses is told in our words alone; a failure is the cause."""
    call = {**complete_call(), "lse": torch.zeros(2, HEADS, 3)}

    def failing(*_: object) -> None:
        raise RuntimeError("CUDA error 700")

    with pytest.raises(ValueError, match="^lse: expected shape") as caught:
        snapmla.decode(**call)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    PlanVariant.forget()  # the kernels that were loaded
    monkeypatch.setattr(attention, "_kernel", lambda *_: failing)
    with pytest.raises(ValueError, match="^lse: expected shape") as caught:
        snapmla.decode(**call)
    assert str(caught.value.__cause__) == "CUDA error 700"


def test_several_gpus_take_the_quick_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are compared then; a tensor elsewhere goes to the full checks."""
    call = complete_call()
    monkeypatch.setattr(attention.launch, "several_gpus", lambda: True)
    checked = []
    full = attention.checked
    monkeypatch.setattr(attention, "checked", lambda *a: checked.append(1) or full(*a))
    snapmla.decode(**call)
    assert not checked and call["out"].abs().sum() > 0
    with pytest.raises(ValueError, match="lse: expected a tensor on cpu, got meta"):
        snapmla.decode(**{**call, "lse": call["lse"].to("meta")})
    assert checked
