"""``accuracy="high"``, pipeline ``f16``: logits, LSE and results where the FP8 tensor core's sums
show most."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import snapmla
from dsl_kernels.spec import VariantSpec
from snapmla import metrics
from snapmla.runtime import variants
from snapmla.testing import aligned, selfcheck, sparse_job
from snapmla.testing.aligned import PAGE, Aligned
from snapmla.testing.attend import Chunk, Rows, attend
from snapmla.testing.rounding import MIMIC_F16, MIMIC_HW_FULL
from softgpu import Options, using
from tests.support import exact_logits as exact
from tests.support.needs import needs_compiler, needs_kernels

CHECKED = Options(hazards="raise", seed=3)
RARELY = pytest.mark.whole_matrix  # of the variants the test set has one
ROWS = (16, 32, 64, 128)
MOST = 64  # rows of a CTA


def decoded(step: Aligned, op: str, rows: int) -> tuple[Tensor, Tensor]:
    """(out fp32, lse) of pages, or of lists at the level of the ABI, hazards checked."""
    tile = min(rows, MOST)
    with using(CHECKED):
        if op == "decode":
            return step.decoded(step.plan(accuracy="high", row_tile=tile), torch.float32)
        spec = VariantSpec(op=op, pipeline="f16", row_tile=tile, out_dtype="f32")
        kernel = selfcheck.load(spec, variants.find_or_build(spec, need_library=False).directory)
        return exact.ListedStep(spec, step).run(kernel)


@needs_kernels
def test_high_accuracy_where_fp8_is_far_off() -> None:
    """Half of the kinds below, one seed, in the row tile of 16; by a plan of high accuracy."""
    for kind in exact.KINDS[1::2]:
        step = exact.equal_to_keys(kind, 16, 64, 1)
        found = exact.found(step, *decoded(step, "decode", 16))
        assert found.right, f"{kind}: {found}"
    step = aligned.two_of_one_logit(exact.PAIR_LOGITS[-1], 16)
    found = exact.found(step, *decoded(step, "decode", 16))
    assert found.right and found.error < exact.FP32_ERROR / 2, found
    usual = exact.found(step, *step.decoded(step.plan(), torch.float32))
    assert usual.lse > 20 and usual.error > 30 * exact.FP32_ERROR


@needs_compiler
@RARELY
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("op", ["decode", "sparse_decode"])
@pytest.mark.parametrize("kind", exact.KINDS)
def test_queries_that_equal_keys(kind: str, op: str, rows: int) -> None:
    """LSE within its bound and fp32 results within theirs; FP8's logits are 20 times outside."""
    for length in (1, 64, 130):
        for seed in range(2):
            step = exact.equal_to_keys(kind, rows - seed, length, seed)
            found = exact.found(step, *decoded(step, op, rows))
            assert found.right, f"{length} tokens, seed {seed}: {found}"
    assert step.cache_seqlens[0] == 130 and seed == 1
    usual = exact.found(step, *step.decoded(step.plan(pipeline="etap"), torch.float32))
    assert usual.lse > 20, usual


@needs_compiler
@RARELY
@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize("kind", exact.KINDS)
def test_sixteen_seeds(kind: str, rows: int) -> None:
    """Seeds that the test above has not: 64 tokens, one tile, or one token for two of the seeds."""
    for seed in range(2, 16):
        step = exact.equal_to_keys(kind, rows, 1 if seed in (6, 11) else 64, seed)
        found = exact.found(step, *decoded(step, "decode", rows))
        assert found.right, f"seed {seed}: {found}"


@needs_compiler
@RARELY
@pytest.mark.parametrize(
    ("op", "rows", "kinds"),
    [("decode", 16, exact.KINDS), ("decode", 64, exact.KINDS),
     ("sparse_decode", 64, exact.KINDS[-2:]), ("decode", 128, exact.KINDS[1::4])],
)  # fmt: skip
def test_long_sequences(op: str, rows: int, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        step = exact.equal_to_keys(kind, rows, 4097, 1)
        found = exact.found(step, *decoded(step, op, rows))
        assert found.right, f"{kind}: {found}"


@needs_compiler
@RARELY
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("op", ["decode", "sparse_decode"])
def test_two_tokens_of_one_logit(op: str, rows: int) -> None:
    """Half the weight each, whatever the logit is, which FP8's sums tell apart."""
    for logit in exact.PAIR_LOGITS:
        step = aligned.two_of_one_logit(logit, rows)
        found = exact.found(step, *decoded(step, op, rows))
        assert found.right, f"logit {logit}: {found}"


@needs_compiler
@RARELY
@pytest.mark.parametrize("rows", ROWS[:3])
def test_zeros_keep_their_weight(rows: int) -> None:
    """Tokens of zeros, whose scale is 2^-80, before and behind others: LSE knows them all."""
    keys = torch.randn(192, 576)
    keys[:64], keys[128:] = 0, 0
    step = Aligned.of(keys.bfloat16().float(), torch.randn(rows, 576))
    found = exact.found(step, *decoded(step, "decode", rows))
    assert found.right, found


def model(kind: str, config: Any, seed: int) -> tuple[float, float]:
    """(error of LSE as a share of its bound, relative L2) of a rounding, without a kernel."""
    step = exact.equal_to_keys(kind, 4, 64, seed)
    content, rope, scale = step.tokens
    q = step.q
    rows = Rows(q.nope[0, 0], q.rope[0, 0], q.scale[0, 0], torch.full((4,), 64))
    chunks = iter([Chunk(0, content, rope, scale)])
    out, lse = attend(rows, chunks, aligned.SCALE, float(scale.max()), config)
    truth, truth_lse = step.truth()
    off = (lse * torch.tensor(2.0).log().double() - truth_lse[0, :, 0]).abs()
    allowed = exact.LSE_ERROR + exact.LSE_SHARE * exact.content_logits(step)
    return float((off / allowed).max()), metrics.relative_l2(out, truth[0, 0])


@pytest.mark.parametrize("kind", exact.KINDS)
def test_the_rounding_keeps_the_bounds(kind: str) -> None:
    """Rounding by the tensor core's model: e4m3 operands in f16 keep them, e4m3 products do not."""
    lse, error = model(kind, MIMIC_F16, 1)
    assert lse <= 0.5 and error <= exact.FP32_ERROR
    assert model(kind, MIMIC_HW_FULL, 1)[0] > 20


def test_every_e4m3_is_an_f16() -> None:
    """Conversion of K and Q to f16 is exact for all 256 bytes; NaN stays NaN."""
    bits = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(bits.half().double().nan_to_num(7e7), bits.double().nan_to_num(7e7))


@needs_compiler
@RARELY
@pytest.mark.parametrize("rows", [16, 64])
def test_same_bits_over_lists_as_over_pages(rows: int) -> None:
    """The same tokens in the same order: loaders differ, the arithmetic does not."""
    step = exact.equal_to_keys("normal", rows, 200, 0)
    want = decoded(step, "decode", rows)
    spec = VariantSpec(op="sparse_decode", pipeline="f16", row_tile=rows, out_dtype="f32")
    kernel = selfcheck.load(spec, variants.find_or_build(spec, need_library=False).directory)
    job = exact.ListedStep(spec, step)
    job.indices = torch.cat([PAGE + torch.arange(200), torch.full((5,), sparse_job.INT_MAX)])
    job.indices = job.indices.int()[None]
    got = job.run(kernel)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


class Watched(TorchDispatchMode):
    """Notes the pipelines that ``torch.ops.snapmla`` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.pipelines: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if str(func).startswith("snapmla.sparse_decode"):
            self.pipelines += [each for each in args if isinstance(each, str)]
        return func(*args, **kwargs or {})


@needs_compiler
@RARELY
@pytest.mark.parametrize("heads", [5, 40])
def test_lists_by_a_plan_of_high_accuracy(heads: int) -> None:
    """Through the public call, and as the operator that tracers see: the same bits."""
    step = exact.equal_to_keys("heavy tails", heads, 150, 1)
    indices = (PAGE + torch.arange(150, dtype=torch.int32))[None, None]
    plan = snapmla.plan_sparse_decode(
        heads, 1, topk=150, batch=1, device="cpu", accuracy="high", num_parts=2, fixed_overhead=0
    )
    assert (plan.pipeline, plan.p_terms) == ("f16", 1) and int(plan.split_begin[-1]) == 2

    def call() -> tuple[Tensor, Tensor]:
        return snapmla.decode(
            step.q, step.cache, indices=indices, softmax_scale=aligned.SCALE, plan=plan,
            out_dtype=torch.float32,
        )  # fmt: skip

    with using(CHECKED):
        out, lse = call()
        found = exact.found(step, out, lse)
        assert found.right, found
        with Watched() as seen:
            again = call()
    assert seen.pipelines == ["f16"]
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)
