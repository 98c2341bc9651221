"""SM100's decode over a 16-bit cache, pipelines ``ws`` and ``pair``, on the software GPU, hazard
check on.

``make prove`` runs both over a sample of all their axes (tests/support/sample_dense.py).  Pools,
buffers and the tails of block tables are poisoned; results are held to 1.1 times the error of the
mimic, whose P has 16 bits, and to FlashMLA's gates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla.compat import flash_mla
from snapmla.testing import dense_job
from snapmla.testing.dense_job import SCALE, DenseJob
from softgpu import Options, exact, mutate, using
from softgpu.errors import Hazard
from softgpu.ops import tma
from tests.support import on_blackwell
from tests.support.dense_steps import DenseStep
from tests.support.needs import needs_compiler
from tests.support.pairwise import assert_all_meet
from tests.support.sample_dense import AXES, ROW_TILES, SAMPLE, kernel_of, spec_of

pytestmark = needs_compiler
DTYPES = tuple(dense_job.DTYPES)
CHECKED = Options(hazards="raise")
MMAS = {"ws": ("tcgen05.mma.ws", 36 + 8), "pair": ("tcgen05.mma.cta_group::2", 36 + 16)}
whole = pytest.mark.whole_matrix
# of each pipeline two variants, of each dtype one
KINDS = [(name, *kind) for name in ROW_TILES for kind in (("bf16", 64), ("f16", 16))]
each_kind = pytest.mark.parametrize(("pipeline", "dtype", "page"), KINDS)
each_pipeline = pytest.mark.parametrize("pipeline", ROW_TILES)


# ---------------------------------------------------------------- the sample


def test_every_two_values_meet() -> None:
    assert_all_meet(AXES, SAMPLE)
    assert len(SAMPLE) <= 120


@whole
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [("early", 0), ("late", 1), ("random", 2), ("random", 5)])
@each_pipeline
def test_schedules(pipeline: str, dtype: str, options: tuple[Any, int]) -> None:
    """When copies, MMAs and commits land changes no bit."""
    spec, (landing, seed) = spec_of(pipeline, dtype), options
    kernel, results = kernel_of(spec), []
    for given in (Options(), Options(asynchronous=landing, seed=seed, hazards="raise")):
        torch.manual_seed(7)
        job = DenseJob(spec, (0, 65, 130), parts=2, heads=20, s_q=4)
        with using(given):
            results.append(job.run(kernel))
    assert job.errors(results[1]).right
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------- maxima


class Swings(DenseJob):
    """Logits of channel 0 alone decide which tile counts: ``level(tile)`` nats, and V of a tile is
    larger, the lower its level is, so that what an m_ref's move leaves of it is seen."""

    level: Callable[[int], float]
    gain: float = 0.0  # log2 units of V a nat

    @staticmethod
    def of(
        spec: VariantSpec, level: Callable[[int], float], gain: float, tiles: int, s_q: int = 4
    ) -> Swings:
        made = type("Made", (Swings,), {"level": staticmethod(level), "gain": gain})
        torch.manual_seed(5)
        job = made(spec, (spec.token_tile * tiles,), parts=1, heads=16, s_q=s_q)
        q = job.q.float()
        q[..., 512:] = torch.randn(q[..., 512:].shape)
        q[..., :512] = 0
        q[..., 0] = 16.0
        job.q = q.to(dense_job.DTYPES[spec.dtype])
        return job

    def _sample(self, n: int, dtype: torch.dtype) -> Tensor:
        tokens, size = 0.1 * torch.randn(n, self.kv_heads, 576), self.spec.token_tile
        for tile in range(n // size):
            level, rows = type(self).level(tile), slice(size * tile, size * (tile + 1))
            tokens[rows, :, 1:512] += 0.5
            tokens[rows, :, 1:512] *= 2.0 ** (-self.gain * level)
            tokens[rows, :, 0] = level / (16.0 * SCALE)
        return tokens.to(dtype)


# Each tile 5.5 nats (7.9 log2 units) above the last one moves every m_ref: the first is 2^8 below
# its tile's maximum, and headroom is 2^15.
RISING = {"rising": (lambda t: 5.5 * t, 1.0)}
SWINGS: dict[str, tuple[Callable[[int], float], float]] = {
    **RISING,
    "far_up": (lambda t: 200.0 * t - 400.0, 0.0),
    "far_down": (lambda t: 400.0 - 200.0 * t, 0.0),
    "to_and_fro": (lambda t: (-200.0, 200.0)[t % 2] * (1 + t / 8), 0.0),
}
EVERYDAY = ("bf16", "rising")  # in little


@pytest.mark.parametrize(
    ("pipeline", "dtype", "page", "which"),
    [
        pytest.param(*kind, which, marks=() if (kind[1], which) == EVERYDAY else whole)
        for kind in KINDS
        for which in SWINGS
    ],
)
def test_every_maximum_moves_each_tile(pipeline: str, dtype: str, page: int, which: str) -> None:
    spec = spec_of(pipeline, dtype, page)
    small = (dtype, which) == EVERYDAY
    job = Swings.of(spec, *SWINGS[which], tiles=2 if small else 4, s_q=1 if small else 4)
    with using(CHECKED):
        errors = job.errors(job.run(kernel_of(spec)))
    assert errors.right, str(errors)


@whole
@pytest.mark.parametrize("opcode", ["tcgen05.st", "tcgen05.wait::st"])
@each_pipeline
def test_a_missing_correction_is_noticed(pipeline: str, opcode: str) -> None:
    """O that is not scaled where maxima move: the comparison, or the hazard check, sees it."""
    spec = spec_of(pipeline)
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
@pytest.mark.parametrize(
    ("pipeline", "which"),
    [*(("ws", n) for n in (0, 23, 24, 35, 36, 43)),
     *(("pair", n) for n in (0, 15, 16, 35, 36, 43, 44, 51))],
)  # fmt: skip
def test_a_missing_product_is_noticed(pipeline: str, which: int) -> None:
    """A step of Q.K from tensor memory, from shared memory, of either half of P.V left out."""
    spec, (opcode, count) = spec_of(pipeline), MMAS[pipeline]
    kernel = kernel_of(spec)
    found = mutate.matching(kernel.program(kernel.entry), opcode)
    assert len(found) == count
    job = DenseJob(spec, (128, 40), parts=1)
    with mutate.planted(kernel, kernel.entry, {found[which].pc: ""}):
        assert not job.errors(job.run(kernel)).right


@whole
@each_kind
def test_a_query_that_equals_a_key(pipeline: str, dtype: str, page: int) -> None:
    """Its logit stands far above the others', and the row is that token's V."""
    spec = spec_of(pipeline, dtype, page)
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
@each_kind
@pytest.mark.parametrize("lengths", [(70, 3), (0, 65)])
def test_kv_heads(pipeline: str, dtype: str, page: int, lengths: tuple[int, ...]) -> None:
    """Each (sequence, KV head) is a sequence of the plan and reads its own head of the cache."""
    spec = spec_of(pipeline, dtype, page)
    torch.manual_seed(2)
    job = DenseJob(spec, lengths, s_q=2, heads=5, kv_heads=2)
    with using(CHECKED):
        errors = job.errors(job.run(kernel_of(spec)))
    assert errors.right, str(errors)


@whole
@each_kind
@pytest.mark.parametrize("length", [70, 130])
def test_a_nan_is_its_readers_alone(pipeline: str, dtype: str, page: int, length: int) -> None:
    """NaN in the last token: the row that sees it is NaN, LSE included, and no other row is."""
    spec = spec_of(pipeline, dtype, page)
    torch.manual_seed(3)
    job = DenseJob(spec, (length,), parts=1, s_q=3, heads=2)
    place, offset = int(job.table[0, (length - 1) // page]), (length - 1) % page
    job.cache[place, offset, 0, 5] = math.nan
    with using(CHECKED):
        out, lse = job.run(kernel_of(spec))
    assert torch.isnan(out[0, 2]).all() and torch.isnan(lse[0, :, 2]).all()
    assert torch.isfinite(out[0, :2]).all() and torch.isfinite(lse[0, :, :2]).all()


@whole
@each_pipeline
def test_items_without_tiles_in_a_row(pipeline: str) -> None:
    """Sequences without a token between others, whose items load nothing, neither Q nor K: rings
    keep their parity (copies as late as they may be)."""
    spec = spec_of(pipeline)
    torch.manual_seed(6)
    job = DenseJob(spec, (0, 0, 1, 0, 130, 0, 0), parts=1, heads=16, s_q=1)
    with using(Options(hazards="raise", asynchronous="late", seed=1)):
        errors = job.errors(job.run(kernel_of(spec)))
    assert errors.right, str(errors)


@whole
@each_pipeline
def test_splits_cost_fp16_nothing(pipeline: str) -> None:
    """In pieces as near to the truth as whole: partial rows are fp32."""
    spec, errors = spec_of(pipeline, "f16", 16), []
    for parts in (4, 1):
        torch.manual_seed(4)
        job = DenseJob(spec, (512, 300), parts, s_q=1, heads=4)
        assert (job.plan.split_begin[-1] > 0) == (parts > 1)
        errors.append(job.errors(job.run(kernel_of(spec))))
    assert all(e.right for e in errors)
    assert errors[0].error <= 1.01 * errors[1].error, f"{errors[0]}, whole {errors[1]}"


@whole
@each_pipeline
def test_both_dtypes_are_ordered_alike(pipeline: str) -> None:
    """Synchronisation, MMAs and accesses to shared memory, in program order."""
    ordered = []
    for dtype in DTYPES:
        kernel = kernel_of(spec_of(pipeline, dtype))
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


# ---------------------------------------------------------------- the pair


@whole
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_a_pair_are_those_of_ws(dtype: str) -> None:
    """With exact sums, bit for bit: every row attends to one token of a whole tile, by so much that
    no other has weight, so its LSE is that token's logit and its output that token's V."""
    rows = torch.arange(128)
    token = rows * 37 % 127  # which the first query token sees, too
    channel = torch.eye(64)[token % 64] * torch.where(token < 64, 1.0, -1.0)[:, None]
    found, job = [], None
    for pipeline in ROW_TILES:
        torch.manual_seed(8)
        job = DenseJob(spec_of(pipeline, dtype), (128,), parts=1, heads=64, s_q=2)
        job.tokens[0][..., 512:] = 0
        job.tokens[0][token, 0, 512:] = (8 * channel).to(job.q.dtype)
        job.cache, job.table = job._paged((128,), job.q.dtype)
        job.q[..., 512:] = (100 * channel).to(job.q.dtype).view(2, 64, 64)
        with using(Options(accumulate=exact)):
            found.append(job.run(kernel_of(job.spec)))
    assert job is not None
    (out, lse), (pair_out, pair_lse) = found
    assert torch.equal(lse, pair_lse) and len(lse.unique()) > 100
    assert torch.equal(out, pair_out)
    assert torch.equal(out.view(128, 512), job.tokens[0][token, 0, :512])


@whole
@pytest.mark.parametrize("page", AXES["page"])
def test_bytes_cross_once_or_twice(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 channels twice, as K and as V, RoPE once; of no other page any."""
    spec = spec_of("pair", "bf16", page)
    torch.manual_seed(9)
    job, kernel = DenseJob(spec, (256, 128), 1, heads=16, s_q=1), kernel_of(spec)
    times: dict[int, int] = {}
    load = tma.load

    def counted(w: Any, t: Any, coords: list[int], targets: list[int]) -> None:
        rows, nbytes = tma._inside(t, coords)
        for row in rows.tolist():
            for chunk in range(0, nbytes, 16):
                times[row + chunk] = times.get(row + chunk, 0) + 1
        load(w, t, coords, targets)

    monkeypatch.setattr(tma, "load", counted)
    assert job.errors(job.run(kernel)).right
    used = {int(job.table[b, t // page]) for b, n in enumerate(job.lengths) for t in range(n)}
    for place in range(job.cache.shape[0]):
        for token in range(page):
            first = job.cache[place, token, 0].data_ptr()
            content, rope = (
                {times.get(first + at, 0) for at in span}
                for span in (range(0, 1024, 16), range(1024, 1152, 16))
            )
            assert (content, rope) == (({2}, {1}) if place in used else ({0}, {0})), (place, token)


# ---------------------------------------------------------------- the public API


@pytest.fixture
def blackwell() -> Iterator[None]:
    """CPU tensors run on a software B200."""
    with on_blackwell.blackwell():
        yield


@whole
@pytest.mark.parametrize(("dtype", "kv_heads"), [(torch.bfloat16, 1), (torch.float16, 2)])
@pytest.mark.parametrize(("heads", "pipeline"), [(8, "ws"), (64, "pair")])
def test_decode_and_flash_mla(
    blackwell: None, heads: int, pipeline: str, dtype: torch.dtype, kv_heads: int
) -> None:
    """``decode`` splits and merges; FlashMLA's names give the same results within their gates."""
    heads *= kv_heads if pipeline == "pair" else 1
    step = DenseStep.make((65, 0, 130), heads, 2, 64, dtype, kv_heads)
    plan = step.plan(num_parts=3, fixed_overhead=0)
    assert (plan.pipeline, plan.row_tile) == (pipeline, ROW_TILES[pipeline])
    assert pipeline == "pair" or int(plan.split_begin[-1]) > 0, "the case should exercise splits"
    step.assert_right(*step.decode(plan))
    metadata, splits = flash_mla.get_mla_metadata_tensors(
        step.cache_seqlens, 2 * heads // kv_heads, kv_heads
    )
    kv = step.cache.kv
    assert kv is not None
    out, lse = flash_mla.flash_mla_with_kvcache(
        step.q, kv, step.block_table, step.cache_seqlens, 512, metadata, splits, causal=True
    )
    assert (out[1] == 0).all()
    step.assert_right(out, torch.where(torch.isposinf(lse), -torch.inf, lse))
