"""``decode`` with a plan and given results: the quick way in, and what it must still refuse.

The quick way leaves most checks to the exported functions.  Every row here passes exactly one wrong
argument to a call that is otherwise complete, and wants the message of the full checks.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import snapmla
import softgpu
from codegen import toolchain
from snapmla import attention, env, flash_mla_fp8, launch, runtime, selfcheck
from snapmla.plan import PlanVariant

pytestmark = pytest.mark.skipif(not toolchain.have_compiler(), reason="needs nvidia-cutlass-dsl")
HEADS, WIDTH, SCALE = 16, 4, 192**-0.5
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


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("out", torch.zeros(2, 2, HEADS, 1024, dtype=BF16)[..., :512], ValueError, "out: .*contiguous"),
    ("out", torch.zeros(2, 4, HEADS, 512, dtype=BF16)[:, :2], ValueError, "out: .*contiguous"),
    ("out", torch.zeros(2, 2, HEADS, 512, dtype=torch.float16), TypeError, "out: .*float16"),
    ("out", torch.zeros(2, HEADS, 2, 512, dtype=BF16), ValueError, "out: expected shape"),
    ("out", torch.zeros(3, 2, HEADS, 512, dtype=BF16), ValueError, "out: expected shape"),
    ("out", torch.zeros(2 * 2 * HEADS * 512 + 1, dtype=BF16)[1:].view(2, 2, HEADS, 512),
     ValueError, "out: .*aligned"),
    ("out", [1], TypeError, "out: expected a torch.Tensor, got list"),
    ("lse", torch.zeros(2, 2, HEADS).transpose(1, 2), ValueError, "lse: .*contiguous"),
    ("lse", torch.zeros(2, 2, HEADS), ValueError, "lse: expected shape"),
    ("lse", torch.zeros(2, HEADS, 2, dtype=torch.float64), TypeError, "lse: .*float64"),
    ("block_table", torch.zeros(2, WIDTH, dtype=torch.int64), TypeError, "block_table: .*int64"),
    ("block_table", torch.zeros(2, WIDTH + 1, dtype=torch.int32), ValueError, "block_table: .*4"),
    ("block_table", torch.zeros(3, WIDTH, dtype=torch.int32), ValueError, "block_table: "),
    ("block_table", torch.zeros(2, 2 * WIDTH, dtype=torch.int32)[:, ::2], ValueError,
     "block_table: .*stride"),
    ("block_table", None, TypeError, "block_table: expected a torch.Tensor, got NoneType"),
    ("cache_seqlens", torch.zeros(4, dtype=torch.int32)[::2], ValueError,
     "cache_seqlens: .*contiguous"),
    ("cache_seqlens", torch.zeros(3, dtype=torch.int32), ValueError, "cache_seqlens: "),
    ("cache_seqlens", torch.zeros(2, dtype=torch.int64), TypeError, "cache_seqlens: .*int64"),
    ("cache_seqlens", None, TypeError, "cache_seqlens: expected a torch.Tensor"),
    ("cache", 3, TypeError, "cache: expected a snapmla.PagedKVCache, got int"),
    ("q", torch.zeros(2, 2, HEADS, 576), TypeError, "q: expected a snapmla.QuantizedQuery"),
    ("plan", "plan", TypeError, "plan: expected a snapmla.DecodePlan"),
    ("softmax_scale", 0.0, ValueError, "softmax_scale: "),
    ("softmax_scale", torch.tensor(0.1), TypeError, "softmax_scale: "),
    ("lse_base", "10", ValueError, "lse_base: "),
    ("empty_lse", "nan", ValueError, "empty_lse: "),
    ("out_dtype", torch.float32, TypeError, "out: expected dtype float32, got bfloat16"),
    ("pipeline", "dual_wg", ValueError, "pipeline: expected 'etap'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "error", "text"), WRONG, ids=[f"{w[0]}-{i}" for i, w in enumerate(WRONG)]
)
def test_one_wrong_argument(name: str, value: Any, error: type[Exception], text: str) -> None:
    call = complete_call()
    before = {k: call[k].clone() for k in ("out", "lse")}
    with pytest.raises(error, match=text):
        snapmla.decode(**{**call, name: value})
    for key, tensor in before.items():
        assert torch.equal(call[key], tensor), f"{key} was written"


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


def test_capture_is_asked_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two GPUs the second's stream is captured, and the first is current."""
    current = [0]

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == 1)
    monkeypatch.setattr(launch, "several_gpus", lambda: True)
    assert [launch.capturing(torch.device("cuda", i)) for i in (0, 1)] == [False, True]
    assert flash_mla_fp8._stream_of(torch.device("cpu")) == 0 and current == [0]
    assert flash_mla_fp8._stream_of(torch.device("cuda", 1)) is None
