"""Sparse decode at the edges of its lists, its numbers and its arguments, at the ABI."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen import abi
from dsl_kernels.spec import VariantSpec, decode_spec
from snapmla.runtime import variants
from snapmla.testing import selfcheck, sparse_job
from snapmla.testing.plan_tables import PlanTables
from snapmla.testing.reference_plan import Queries, plan_reference
from snapmla.testing.sparse_job import INT_MAX, SparseJob, SparseShape
from snapmla.testing.workloads import sparse_decode as work
from snapmla.testing.workloads.call import NATURAL
from softgpu import Hazard, Options, mutate, using
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
CHECKED = Options(hazards="raise", seed=5)
FEW = "sparse_decode_etap_r16_obf16_sm90a"
BLACKWELL = "sparse_decode_ws_r64_obf16_sm100a"  # one problem every day: test_sparse_blackwell.py
GATHER4 = "sparse_decode_ws_r64_obf16_gather4_sm100a"
OTHERS = [
    pytest.param(name, marks=pytest.mark.whole_matrix)
    for name in (
        "sparse_decode_etap_r32_obf16_sm90a", "sparse_decode_etap_r64_obf16_sm90a",
        "sparse_decode_etap_r64_of32_sm90a", "sparse_decode_etap_r16_obf16_pt2_sm90a",
        "sparse_decode_etap_r16_obf16_ln0_sm90a", "sparse_decode_etap_r64_obf16_ln0_sm90a",
        "sparse_decode_f16_r16_obf16_sm90a", "sparse_decode_f16_r32_of32_sm90a",
        "sparse_decode_f16_r64_obf16_sm90a", BLACKWELL, "sparse_decode_ws_r64_of32_sm100a",
        GATHER4,
    )
]  # fmt: skip
EVERY = [FEW, *OTHERS]
# a kernel of each architecture, of SM100 behind both loaders
BOTH = [FEW, *(pytest.param(name, marks=pytest.mark.whole_matrix) for name in (BLACKWELL, GATHER4))]


def kernel_of(spec: VariantSpec | str) -> tuple[VariantSpec, Any]:
    spec = VariantSpec.from_name(spec) if isinstance(spec, str) else spec
    directory: Path = variants.find_or_build(spec, need_library=False).directory
    return spec, selfcheck.load(spec, directory)


@pytest.mark.parametrize("name", EVERY)
def test_clean_and_right(name: str) -> None:
    """Every path under the hazard check: splits, sinks, ragged queries, idle rows, odd pages."""
    spec, kernel = kernel_of(name)
    assert tuple(kernel.names.arguments) == sparse_job.ARGUMENTS
    for shape in work.shapes(spec):
        with using(CHECKED):
            errors = (job := SparseJob(spec, shape)).errors(job.run(kernel))
        assert errors.right, f"{shape}: {errors}"


@pytest.mark.whole_matrix
@pytest.mark.parametrize("kind", ["etap", BLACKWELL, GATHER4])
@pytest.mark.parametrize("heads", [1, 8, 16, 64, 128])
def test_right_everywhere(heads: int, kind: str) -> None:
    """All lengths of lists and pages, over layouts and styles in turn."""
    tile = next((t for t in (16, 32, 64) if t >= heads), 64)
    name = f"sparse_decode_etap_r{tile}_obf16_sm90a" if kind == "etap" else kind
    spec, kernel = kernel_of(name)
    turns = itertools.product(sparse_job.LAYOUTS, sparse_job.STYLES)
    for (topk, page), (layout, style) in zip(
        itertools.product((1, 17, 64, 100, 128, 512), (1, 2, 53, 64)), itertools.cycle(turns)
    ):
        shape = SparseShape(
            heads, topk, (topk, topk // 2), page, layout=layout, style=style, sink=page == 53
        )
        with using(CHECKED):
            errors = (job := SparseJob(spec, shape)).errors(job.run(kernel))
        assert errors.right, f"{shape}: {errors}"


@pytest.mark.parametrize("name", EVERY)
def test_maxima_that_move(name: str) -> None:
    """Logits that swing by 200 nats from tile to tile, and queries that equal a token."""
    spec, kernel = kernel_of(name)
    for style, heads in (("swings", 5), ("equal", spec.row_tile)):
        shape = SparseShape(heads, 384, (384,), 53, layout="packed", style=style, parts=1)
        errors = (job := SparseJob(spec, shape)).errors(job.run(kernel))
        assert errors.right, f"{shape}: {errors}"


@pytest.mark.parametrize("name", [*BOTH, OTHERS[1]])
def test_same_bits_as_dense(name: str) -> None:
    """Lists that name a sequence's tokens in their order, none split: decode's bits."""
    spec, kernel = kernel_of(name)
    _, dense = kernel_of(decode_spec(spec.pipeline, spec.row_tile, 64, "bf16", spec.arch))
    lengths, heads = (200, 64, 0, 1), spec.row_tile - 3
    shape = SparseShape(heads, 256, lengths, 64, layout="paged", parts=1, dense=True)
    job = SparseJob(spec, shape)
    table = torch.randperm(9)[:8].reshape(2, 4).int()[[0, 1, 0, 1]]
    named = table[:, :, None] * 64 + torch.arange(64, dtype=torch.int32)
    job.planes = sparse_job.poisoned_planes(9, 64, "paged")
    for target, values in zip(job.planes, job_rows(9 * 64), strict=True):
        target.copy_(values.view(target.shape))
    got = job.run(kernel, indices=named.flatten(1).contiguous(), **planes_of(job))
    plan = plan_reference(
        lengths, 1, 64, 1, 256, queries=Queries(heads, 1, spec.row_tile, causal=True)
    )
    assert not plan.split_begin[-1] and not job.plan.split_begin[-1], "nothing is split"
    given = {
        **job.arguments(), **PlanTables.of(plan).arguments(), "block_table": table,
        "cache_seqlens": job.lengths, "causal": 1,
        "o_accum": torch.zeros(8, spec.row_tile, 528).half(),
        "lse_accum": torch.zeros(8, spec.row_tile),
    }  # fmt: skip
    dense(*abi.ordered(dense.names.arguments, {n: given[n] for n in dense.names.arguments}))
    assert torch.isfinite(got[0]).all()
    assert torch.equal(got[0], given["out"]) and torch.equal(got[1], given["lse"])


def job_rows(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """content u8, RoPE, scale of ``n`` stored tokens."""
    content, rope, scale = sparse_job.rounding.quantize_rows(
        *sparse_job.sample_tokens(n), slots=torch.arange(n)
    )
    return content.view(torch.uint8), rope, scale


def planes_of(job: SparseJob) -> dict[str, Tensor]:
    return dict(zip(("content", "rope", "scale"), job.planes, strict=True))


@pytest.mark.parametrize("name", [*BOTH, OTHERS[1]])
def test_fixed_splits_are_the_batch_independent(name: str) -> None:
    """Pieces of so many tiles: a query token's bits alone and among others."""
    spec, kernel = kernel_of(name)
    shape = SparseShape(9, 300, (300, 130, 64, 211), 2, split_tiles=2, parts=3, sink=True)
    job = SparseJob(spec, shape)
    whole = job.run(kernel)
    assert job.plan.split_begin[-1] > 0
    for i in (0, 3):
        alone = SparseJob(spec, replace(shape, lengths=shape.lengths[i : i + 1], parts=7))
        q = {n: job.arguments()[n][i : i + 1] for n in ("q_nope", "q_rope", "q_scale")}
        same = {"indices": job.indices[i : i + 1], "attn_sink": job.sink}
        out, lse = alone.run(kernel, **q, **same, **planes_of(job))
        assert torch.equal(out[0], whole[0][i]) and torch.equal(lse[0], whole[1][i])


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("parts", [1, 5])
def test_sinks_leave_lse_alone(parts: int, name: str) -> None:
    """Whole and split: out shrinks by 1 / (1 + exp(sink - lse)), to 0 or by nothing at infinity."""
    spec, kernel = kernel_of(name)
    shape = SparseShape(6, 200, (200, 0), 53, parts=parts, fixed_overhead=0, sink=True)
    job = SparseJob(spec, shape)
    assert (job.plan.split_begin[-1] > 0) == (parts > 1)
    job.sink = torch.tensor([math.inf, -math.inf, 0.0, 2.5, 4.0, -3.0])
    out, lse = job.run(kernel)
    plain, same = job.run(kernel, attn_sink=torch.empty(0))
    assert torch.equal(lse, same)
    kept = torch.sigmoid(lse[0, :, 0].double() - job.sink.double())
    want = plain[0, 0].double() * kept[:, None]
    assert not out[0, 0, 0].any() and torch.equal(out[0, 0, 1], plain[0, 0, 1])
    assert float((out[0, 0].double() - want).norm()) < 4e-3 * float(want.norm())
    assert not out[1].any() and torch.isneginf(lse[1]).all(), "a row without tokens"


def test_tiles_need_the_announcers_fence() -> None:
    """The copies are the generic proxy's, the MMAs read through the async one."""
    _, kernel = kernel_of(FEW)
    places = mutate.sites(kernel.program(kernel.entry))
    fence = next(x for x in places if x.family == "fence" and x.source.startswith("gather.py"))
    job = SparseJob(kernel_of(FEW)[0], SparseShape(4, 64, (64,), 1, parts=1))
    with mutate.mutant(kernel, kernel.entry, fence.pc), using(CHECKED), pytest.raises(Hazard) as e:
        job.run(kernel)
    assert e.value.kind == "missing-proxy-fence"


@pytest.mark.parametrize("name", BOTH)
def test_bases_and_empty_rows(name: str) -> None:
    """LSE to base 2; +inf of rows that see nothing: no length, no entry that is a token."""
    spec, kernel = kernel_of(name)
    shape = SparseShape(3, 70, (70, 0, 70), 1, parts=1)
    job = SparseJob(spec, shape)
    job.indices[2] = torch.tensor([-1, INT_MAX, -(2**31)]).int().repeat(24)[:70]
    out, lse = job.run(kernel)
    assert torch.isneginf(lse[1:]).all()
    _, base_2 = job.run(kernel, lse_factor=1.0, empty_lse=math.inf)
    assert (base_2[1:] == math.inf).all() and not out[1:].any()
    torch.testing.assert_close(base_2[0] * NATURAL["lse_factor"], lse[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", BOTH)
def test_a_token_counts_as_often_as_it_is_named(name: str) -> None:
    """One token in all places: its value, and an LSE that is log(places) above that of one."""
    spec, kernel = kernel_of(name)
    job = SparseJob(spec, SparseShape(4, 96, (96,), 2, parts=1))
    job.indices[:] = job.indices[0][(job.indices[0] >= 0) & (job.indices[0] < INT_MAX)][0]
    first = job.run(kernel, topk_length=torch.ones(1, dtype=torch.int32))
    every = job.run(kernel)
    assert torch.equal(first[0], every[0])
    torch.testing.assert_close(every[1] - first[1], torch.full_like(first[1], math.log(96)))
