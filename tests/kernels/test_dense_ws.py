"""SM100's decode over a 16-bit cache, pipeline ``ws``, on the software GPU, hazard check on.

``make test`` takes few points, the whole matrix the grid.  Lengths are ragged, sequences are split
and merged, pools, buffers and the tails of block tables are poisoned; results are held to 1.1 times
the error of the mimic, whose P has 16 bits, and to FlashMLA's gates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla import dispatch, flash_mla, runtime
from snapmla.decode_plan import launching
from snapmla.testing import dense_job, selfcheck
from snapmla.testing.dense_job import DenseJob
from softgpu import Options, mutate, using
from softgpu.errors import Hazard
from tests.kernels.test_variants import up_to_date
from tests.support.dense_steps import DenseStep
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
LENGTHS = (0, 1, 63, 64, 65, 321)
HEADS, TOKENS, PAGES = (1, 7, 16, 20, 48, 64, 128), (1, 2, 4), (16, 32, 64, 128)
DTYPES = tuple(dense_job.DTYPES)
# heads x pages, and with them every pair of values of two axes
GRID = [
    (heads, TOKENS[(i + j) % 3], page, DTYPES[(i + j // 2) % 2])
    for i, heads in enumerate(HEADS)
    for j, page in enumerate(PAGES)
]
CHECKED = Options(hazards="raise")
QK_MMAS, PV_MMAS = 36, 8
# Everyday variants, which the test set builds: one of each dtype.
BF16, F16 = ("bf16", 64), ("f16", 16)
whole = pytest.mark.whole_matrix


def spec_of(dtype: str, page: int) -> VariantSpec:
    return VariantSpec(
        op="dense_decode", arch="sm_100a", pipeline="ws", row_tile=64, page_size=page, dtype=dtype
    )


def kernel_of(spec: VariantSpec) -> runtime.Kernel:
    return selfcheck.load(spec, up_to_date(spec))


def test_the_grid_has_every_pair() -> None:
    for a, b in itertools.combinations(range(4), 2):
        values = {x[a] for x in GRID}, {x[b] for x in GRID}
        assert {(x[a], x[b]) for x in GRID} == set(itertools.product(*values))


@whole
@pytest.mark.parametrize(("heads", "s_q", "page", "dtype"), GRID)
def test_right_and_clean(heads: int, s_q: int, page: int, dtype: str) -> None:
    spec = spec_of(dtype, page)
    torch.manual_seed(heads)
    job = DenseJob(spec, LENGTHS, parts=3, heads=heads, s_q=s_q)
    assert int(job.plan.split_begin[-1]) >= 2, "a sequence is split"
    with using(CHECKED):
        errors = job.errors(job.run(kernel_of(spec)))
    assert errors.right, str(errors)


@whole
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [("early", 0), ("late", 1), ("random", 2), ("random", 5)])
def test_schedules(dtype: str, options: tuple[str, int]) -> None:
    """When copies, MMAs and commits land changes no bit."""
    spec, (landing, seed) = spec_of(dtype, 64), options
    kernel, results = kernel_of(spec), []
    for given in (Options(), Options(asynchronous=landing, seed=seed, hazards="raise")):  # type: ignore[arg-type]
        torch.manual_seed(7)
        job = DenseJob(spec, (0, 65, 130), parts=2, heads=20, s_q=4)
        with using(given):
            results.append(job.run(kernel))
    assert job.errors(results[1]).right
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------- frames


class Swings(DenseJob):
    """Logits of channel 0 alone decide which tile counts: ``level(tile)`` nats, and V of a tile is
    larger, the lower its level is, so that what a frame's move leaves of it is seen."""

    level: Callable[[int], float]
    gain: float = 0.0  # log2 units of V a nat

    @staticmethod
    def of(
        spec: VariantSpec, level: Callable[[int], float], gain: float, tiles: int, s_q: int = 4
    ) -> Swings:
        made = type("Made", (Swings,), {"level": staticmethod(level), "gain": gain})
        torch.manual_seed(5)
        job = made(spec, (64 * tiles,), parts=1, heads=16, s_q=s_q)
        q = job.q.float()
        q[..., 512:] = torch.randn(q[..., 512:].shape)
        q[..., :512] = 0
        q[..., 0] = 16.0
        job.q = q.to(dense_job.DTYPES[spec.dtype])
        return job

    def _sample(self, n: int, dtype: torch.dtype) -> Tensor:
        tokens = 0.1 * torch.randn(n, self.kv_heads, 576)
        for tile in range(n // 64):
            level, rows = type(self).level(tile), slice(64 * tile, 64 * tile + 64)
            tokens[rows, :, 1:512] += 0.5
            tokens[rows, :, 1:512] *= 2.0 ** (-self.gain * level)
            tokens[rows, :, 0] = level / (16.0 * dense_job.SCALE)
        return tokens.to(dtype)


# Each tile 5.5 nats (7.9 log2 units) above the last one moves every frame: the first is 2^8 below
# its tile's maximum, and headroom is 2^15.
RISING = {"rising": (lambda t: 5.5 * t, 1.0)}
SWINGS: dict[str, tuple[Callable[[int], float], float]] = {
    **RISING,
    "far_up": (lambda t: 200.0 * t - 400.0, 0.0),
    "far_down": (lambda t: 400.0 - 200.0 * t, 0.0),
    "to_and_fro": (lambda t: (-200.0, 200.0)[t % 2] * (1 + t / 8), 0.0),
}


EVERYDAY = (*F16, "rising")  # in little


@pytest.mark.parametrize(
    ("dtype", "page", "which"),
    [
        pytest.param(*kind, which, marks=() if (*kind, which) == EVERYDAY else whole)
        for kind in (BF16, F16)
        for which in SWINGS
    ],
)
def test_every_frame_moves_each_tile(dtype: str, page: int, which: str) -> None:
    spec = spec_of(dtype, page)
    small = (dtype, page, which) == EVERYDAY
    job = Swings.of(spec, *SWINGS[which], tiles=2 if small else 4, s_q=1 if small else 4)
    with using(CHECKED):
        errors = job.errors(job.run(kernel_of(spec)))
    assert errors.right, str(errors)


@whole
@pytest.mark.parametrize("opcode", ["tcgen05.st", "tcgen05.wait::st"])
def test_a_missing_correction_is_noticed(opcode: str) -> None:
    """O that is not scaled where frames move: the comparison, or the hazard check, sees it."""
    spec = spec_of(*BF16)
    kernel = kernel_of(spec)
    job = Swings.of(spec, *RISING["rising"], tiles=3)
    code = kernel.program(kernel.entry).kernel.code
    stores = [ins for ins in code if ins.opcode.startswith(opcode)]
    assert stores
    wrong = 0
    for ins in stores:
        with mutate.planted(kernel, kernel.entry, {ins.pc: ""}), using(CHECKED):
            try:
                wrong += not job.errors(job.run(kernel)).right
            except Hazard:
                wrong += 1
    assert wrong == len(stores)


# ---------------------------------------------------------------- products, rows


@whole
@pytest.mark.parametrize("which", [0, 23, 24, 35, 36, 43])
def test_a_missing_product_is_noticed(which: int) -> None:
    """A step of Q.K from tensor memory, from shared memory, of either half of P.V left out."""
    spec = spec_of(*BF16)
    kernel = kernel_of(spec)
    found = mutate.matching(kernel.program(kernel.entry), "tcgen05.mma.ws")
    assert len(found) == QK_MMAS + PV_MMAS
    job = DenseJob(spec, (64, 40), parts=1)
    with mutate.planted(kernel, kernel.entry, {found[which].pc: ""}):
        assert not job.errors(job.run(kernel)).right


@whole
@pytest.mark.parametrize(("dtype", "page"), [BF16, F16])
def test_a_query_that_equals_a_key(dtype: str, page: int) -> None:
    """Its logit stands far above the others', and the row is that token's V."""
    spec = spec_of(dtype, page)
    torch.manual_seed(11)
    job = DenseJob(spec, (130,), parts=1, heads=16, s_q=1)
    job.tokens[0][70] *= 40
    job.cache, job.table = job._paged((130,), dense_job.DTYPES[dtype])
    job.q[0, 0, 3] = job.tokens[0][70, 0]
    with using(CHECKED):
        out, lse = job.run(kernel_of(spec))
    errors = job.errors((out, lse))
    assert errors.right, str(errors)
    assert torch.equal(out[0, 0, 3], job.tokens[0][70, 0, :512])


@whole
@pytest.mark.parametrize(("dtype", "page"), [BF16, F16])
@pytest.mark.parametrize("lengths", [(70, 3), (0, 65)])
def test_kv_heads(dtype: str, page: int, lengths: tuple[int, ...]) -> None:
    """Each (sequence, KV head) is a sequence of the plan and reads its own head of the cache."""
    spec = spec_of(dtype, page)
    torch.manual_seed(2)
    job = DenseJob(spec, lengths, s_q=2, heads=5, kv_heads=2)
    with using(CHECKED):
        errors = job.errors(job.run(kernel_of(spec)))
    assert errors.right, str(errors)


@whole
@pytest.mark.parametrize(("dtype", "page"), [BF16, F16])
def test_a_nan_is_its_readers_alone(dtype: str, page: int) -> None:
    """NaN in the last token: the row that sees it is NaN, LSE included, and no other row is."""
    spec = spec_of(dtype, page)
    torch.manual_seed(3)
    job = DenseJob(spec, (70,), parts=1, s_q=3, heads=2)
    place, offset = int(job.table[0, 69 // page]), 69 % page
    job.cache[place, offset, 0, 5] = math.nan
    with using(CHECKED):
        out, lse = job.run(kernel_of(spec))
    assert torch.isnan(out[0, 2]).all() and torch.isnan(lse[0, :, 2]).all()
    assert torch.isfinite(out[0, :2]).all() and torch.isfinite(lse[0, :, :2]).all()


@whole
def test_splits_cost_fp16_nothing() -> None:
    """In pieces as near to the truth as whole: partial rows are fp32."""
    spec, errors = spec_of(*F16), []
    for parts in (4, 1):
        torch.manual_seed(4)
        job = DenseJob(spec, (512, 300), parts, s_q=1, heads=4)
        assert (job.plan.split_begin[-1] > 0) == (parts > 1)
        errors.append(job.errors(job.run(kernel_of(spec))))
    assert all(e.right for e in errors)
    assert errors[0].error <= 1.01 * errors[1].error, f"{errors[0]}, whole {errors[1]}"


@whole
def test_both_dtypes_are_ordered_alike() -> None:
    """Synchronisation, MMAs and accesses to shared memory, in program order."""
    ordered = []
    for dtype in DTYPES:
        kernel = kernel_of(spec_of(dtype, 64))
        program = kernel.program(kernel.entry)
        waits = {site.pc for site in mutate.sites(program)}
        ordered.append(
            [
                (ins.opcode.replace("bf16", "f16"), program.kernel.source_of(ins))
                for ins in program.kernel.code
                if ins.pc in waits or ".shared" in ins.opcode or ins.opcode.startswith("tcgen05")
            ]
        )
    assert ordered[0] == ordered[1] and len(ordered[0]) > 100


# ---------------------------------------------------------------- the public API


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors run on a software B200."""
    kept = (runtime.arch_of, dispatch.card_of, launching._plan_kernel)
    monkeypatch.setenv("SNAPMLA_SOFTGPU_ARCH", "sm_100a")
    for cached in kept:
        cached.cache_clear()
    yield
    for cached in kept:
        cached.cache_clear()


@whole
@pytest.mark.parametrize(("dtype", "kv_heads"), [(torch.bfloat16, 1), (torch.float16, 2)])
def test_decode_and_flash_mla(blackwell: None, dtype: torch.dtype, kv_heads: int) -> None:
    """``decode`` splits and merges; FlashMLA's names give the same results within their gates."""
    step = DenseStep.make((65, 0, 130), 8, 2, 64, dtype, kv_heads)
    plan = step.plan(num_parts=3, fixed_overhead=0)
    assert (plan.pipeline, plan.row_tile) == ("ws", 64)
    assert int(plan.split_begin[-1]) > 0, "the case should exercise splits"
    step.assert_right(*step.decode(plan))
    metadata, splits = flash_mla.get_mla_metadata(step.cache_seqlens, 16 // kv_heads, kv_heads)
    kv = step.cache.kv
    assert kv is not None
    out, lse = flash_mla.flash_mla_with_kvcache(
        step.q, kv, step.block_table, step.cache_seqlens, 512, metadata, splits, causal=True
    )
    assert (out[1] == 0).all()
    step.assert_right(out, torch.where(torch.isposinf(lse), -torch.inf, lse))
