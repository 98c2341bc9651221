"""``accuracy="high"`` on a real GPU: the bounds of logits, LSE and results; what it costs.

    python -m pytest -s tests/gpu/test_accuracy_high.py -m gpu

prints errors as shares of their bounds, and times.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable

import pytest
import torch

import snapmla
from dsl_kernels.spec import VariantSpec
from snapmla import metrics
from snapmla.reference import FP64, mla_decode_reference
from snapmla.runtime import variants
from snapmla.testing import aligned, selfcheck
from snapmla.testing.rounding import MIMIC_F16
from tests.gpu.test_p_terms import CALLS, ROUNDS, replayed
from tests.gpu.test_sparse_decode import JOBS, assert_right_twice
from tests.support import cases
from tests.support import exact_logits as exact

pytestmark = pytest.mark.gpu
SEEDS = 16
MOST = {16: 1.25, 64: 1.55, 128: 1.55}  # times the default's time, by heads


def planned(step: aligned.Aligned) -> snapmla.DecodePlan:
    """As in service: the dispatcher's row tile, as many parts as the card has SMs."""
    return snapmla.plan_decode(
        step.cache_seqlens, step.q.nope.shape[2], 1, page_size=aligned.PAGE,
        max_pages=step.block_table.shape[1], accuracy="high",
    )  # fmt: skip


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("length", exact.LENGTHS)
def test_queries_that_equal_keys(length: int, heads: int) -> None:
    """Every kind of key, 16 seeds; FP8's logits are outside of what is allowed."""
    for kind in exact.KINDS:
        worst_lse = worst = 0.0
        for seed in range(SEEDS):
            step = exact.equal_to_keys(kind, heads, length, seed, "cuda")
            found = exact.found(step, *step.decoded(planned(step), torch.float32))
            assert found.right, f"{kind}, seed {seed}: {found}"
            worst_lse, worst = max(worst_lse, found.lse), max(worst, found.error)
        usual = step.plan(pipeline="etap")
        fp8 = exact.found(step, *step.decoded(usual, torch.float32))
        assert fp8.lse > 10
        print(f"\n{length} tokens, {heads} heads, {kind}: LSE {worst_lse:.3f} of its bound, "
              f"relative L2 {worst:.1e} (FP8: {fp8.lse:.0f}, {fp8.error:.1e})")  # fmt: skip


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_tokens_of_one_logit(heads: int, dtype: torch.dtype) -> None:
    """Results within ``FP32_ERROR`` beside what ``dtype`` rounds off the truth, 2.12e-3 of BF16."""
    for logit in exact.PAIR_LOGITS:
        step = aligned.two_of_one_logit(logit, heads, "cuda")
        truth, _ = step.truth()
        most = math.hypot(exact.FP32_ERROR, metrics.relative_l2(truth.to(dtype), truth))
        found = exact.found(step, *step.decoded(planned(step), dtype))
        assert found.error <= most and found.lse <= 1, f"{logit}: {found}"


@pytest.mark.parametrize("heads", [16, 50])
def test_lists_of_tokens(heads: int) -> None:
    rows = 16 if heads == 16 else 64
    spec = VariantSpec(op="sparse_decode", pipeline="f16", row_tile=rows, out_dtype="f32")
    kernel = variants.kernel(spec, "cuda")
    for kind in exact.KINDS:
        for length, seed in ((1, 0), (64, 1), (4097, 2), (4097, 3)):
            step = exact.equal_to_keys(kind, heads, length, seed)
            found = exact.found(step, *exact.ListedStep(spec, step, "cuda").run(kernel))
            assert found.right, f"{kind}, {length} tokens: {found}"


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_lists_by_a_plan(heads: int) -> None:
    """As in service, over several parts; tokens in any order, places that name none."""
    for kind in exact.KINDS:
        for length, seed in ((1, 0), (64, 1), (4097, 2), (4097, 3)):
            step = exact.equal_to_keys(kind, heads, length, seed, "cuda")
            named = aligned.PAGE + torch.randperm(length, device="cuda")
            indices = torch.cat([named, named.new_full((5,), -1)]).int()[None, None]
            plan = snapmla.plan_sparse_decode(
                heads, 1, topk=length + 5, batch=1, device="cuda", accuracy="high"
            )
            assert plan.pipeline == "f16"
            result = snapmla.decode(
                step.q, step.cache, indices=indices, softmax_scale=aligned.SCALE, plan=plan,
                out_dtype=torch.float32,
            )  # fmt: skip
            found = exact.found(step, *result)
            assert found.right, f"{kind}, {length} tokens: {found}"


@pytest.mark.parametrize("out_dtype", ["bf16", "f32"])
@pytest.mark.parametrize("name", JOBS)
def test_lists_of_every_kind(name: str, out_dtype: str) -> None:
    """Splits, sinks, ragged queries, odd pages, logits that swing; the same bits every time."""
    assert_right_twice("f16", name, out_dtype)


class Job:
    """A decode step on the GPU, ragged where ``lengths`` are; what lies past an end is NaN."""

    def __init__(self, lengths: tuple[int, ...], heads: int, s_q: int = 1, *, poison: bool = True):
        case = cases.DecodeCase(
            lengths=lengths, heads=heads, s_q=s_q, logit_std=1.0, poison=poison
        )  # fmt: skip
        self.inputs = made = cases.build(case, "cuda")
        self.q = snapmla.QuantizedQuery(made.q8, made.q_rope_scaled, made.q_scale)
        self.cache = snapmla.PagedKVCache.from_tensors(made.content, made.rope, made.scale)

    def plan(self, pipeline: str | None) -> snapmla.DecodePlan:
        case = self.inputs.case
        return snapmla.plan_decode(
            self.inputs.cache_seqlens, case.heads, case.s_q, page_size=case.page_size,
            max_pages=self.inputs.block_table.shape[1], pipeline=pipeline,
        )  # fmt: skip

    def call(self, pipeline: str | None, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """A call into results of its own, planned; ``lse`` is an attribute."""
        case, plan = self.inputs.case, self.plan(pipeline)
        out = torch.full((case.b, case.s_q, case.heads, 512), torch.nan, dtype=dtype, device="cuda")
        self.lse = lse = torch.full((case.b, case.heads, case.s_q), torch.nan, device="cuda")

        def run() -> torch.Tensor:
            snapmla.decode(
                self.q, self.cache, self.inputs.block_table, self.inputs.cache_seqlens,
                softmax_scale=self.inputs.softmax_scale, plan=plan, out=out, lse=lse,
            )  # fmt: skip
            return out

        return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "heads", "s_q"),
    [
        ((1024, 0, 65, 4000), 16, 1), ((300, 64, 1), 16, 4), ((700, 5, 129), 32, 1),
        ((900, 63), 64, 3), ((2000, 130), 128, 1), ((40000,), 16, 1), ((100000,), 128, 1),
    ],
)  # fmt: skip
def test_batches(lengths: tuple[int, ...], heads: int, s_q: int, dtype: torch.dtype) -> None:
    """Splits, causal rows, empty sequences, several row blocks; the same bits every time."""
    job = Job(lengths, heads, s_q)
    call = job.call("f16", dtype)
    out = call().clone()
    errors = selfcheck.decode_errors(
        out, job.lse, job.q, job.cache, job.inputs.block_table, job.inputs.cache_seqlens,
        job.inputs.softmax_scale, config=MIMIC_F16,
    )  # fmt: skip
    assert errors.right, str(errors)
    assert torch.equal(call(), out), "not the same bits"


@pytest.mark.parametrize("heads", [16, 128])
def test_error_over_length(heads: int) -> None:
    """Sums of P.V grow in the tensor core: items of a bounded length keep what they lose small."""
    for lengths in ((1024,) * 2, (131072,) * 2):
        job = Job(lengths, heads, poison=False)
        out = job.call("f16", torch.float32)()
        truth, _ = mla_decode_reference(
            *job.inputs.stored, job.inputs.softmax_scale, config=FP64, batches=[1]
        )
        error = metrics.relative_l2(out[1:], truth)
        print(f"\n{lengths[0]} tokens, {heads} heads: {error:.2e}")
        assert error <= exact.FP32_ERROR


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="a time: run it without -n")
@pytest.mark.parametrize(("heads", "most"), MOST.items())
def test_time_beside_the_default(heads: int, most: float) -> None:
    """32 x 16K tokens, 338 MB of cache: from memory in every call.  Rounds alternate."""
    job = Job((16384,) * 32, heads, poison=False)
    replays = [replayed(job.call(pipeline, torch.bfloat16)) for pipeline in (None, "f16")]
    times = [[replay() for replay in replays] for _ in range(ROUNDS)]
    usual, exactly = (statistics.median(column) for column in zip(*times))
    ratio = statistics.median(b / a for a, b in times)
    print(f"\n32 x 16384 tokens, {heads} heads: {usual:.1f} us, f16 {exactly:.1f} us: {ratio:.3f}x "
          f"({CALLS} calls a graph)")  # fmt: skip
    assert ratio <= 1.02 * most, "a gate missed by less than 2 % counts as met"
