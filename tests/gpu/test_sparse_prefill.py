"""Sparse prefill on a real GPU: FlashMLA's shapes and gates, maxima that move, poison, many query
tokens, the same bits always, graphs, allocations.

Variants may come from elsewhere, no compiler is needed; those that are not there are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla.compat.flash_mla.sparse_prefill import flash_mla_sparse_fwd
from snapmla.runtime import variants
from snapmla.sparse.prefill import sparse_prefill
from snapmla.sparse.rows_kernel import row_tile_of
from snapmla.testing.prefill_job import PrefillJob, Results
from snapmla.testing.workloads.exact import Case, Runner
from snapmla.testing.workloads.sparse_prefill import WORKLOAD

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
INF, RUNS = math.inf, 5
WIDTHS = (576, 512)


def spec_of(d_qk: int, heads: int) -> VariantSpec:
    """The variant, if there is one or it can be built here."""
    spec = VariantSpec(op="sparse_prefill", row_tile=row_tile_of(heads), d_qk=d_qk)
    if variants.jit_refusal() and variants.find(spec) is None:
        pytest.skip(f"{spec.name} is not built, and nothing compiles here")
    return spec


def draw(spec: VariantSpec, *extents: int, **options: Any) -> PrefillJob:
    """A job whose tensors are drawn where the kernel runs."""
    return PrefillJob.draw(spec, *extents, device=DEVICE, **options)


def call(job: PrefillJob, **given: Any) -> Results:
    """The library's call; results full of NaN before it."""
    made = job.arguments()
    results = {name: made[name] for name in ("out", "max_logits", "lse")}
    return sparse_prefill(
        job.q, job.kv, job.indices, job.scale, attn_sink=job.sink, topk_length=job.lengths,
        **{**results, **given},
    )  # fmt: skip


def judge(job: PrefillJob, tokens: Sequence[int] | None = None) -> Results:
    """The call, right beside fp64 at these query tokens or all."""
    found = call(job)
    errors = job.errors(found, tokens)
    assert errors.right, str(errors)
    return found


@pytest.mark.parametrize("topk", [1, 17, 100, 128, 512, 1024, 2048])
@pytest.mark.parametrize("heads", [1, 8, 16, 20, 40, 64, 96, 128])
@pytest.mark.parametrize("d_qk", WIDTHS)
def test_heads_and_lists(d_qk: int, heads: int, topk: int) -> None:
    torch.manual_seed(heads * topk)
    lengths = None
    if topk % 2 == 0:
        lengths = torch.randint(-2, topk + 3, (62,)).tolist()
    judge(draw(spec_of(d_qk, heads), 62, heads, 4096, topk, lengths=lengths, sink=heads % 16 == 0))


@pytest.mark.parametrize(("s_kv", "topk"), [(128, 128), (2000, 256), (8192, 2048), (131072, 2048)])
@pytest.mark.parametrize("heads", [64, 128])
def test_flashmla_inputs(heads: int, s_kv: int, topk: int) -> None:
    """As FlashMLA's tests draw them: N/10 both, half of the lists with entries of no row."""
    torch.manual_seed(7)
    job = draw(spec_of(576, heads), 213, heads, s_kv, topk, spread=0.1 * 0.1, sink=True, idle=0.3)
    judge(job)


@pytest.mark.parametrize("s_q", [1, 62, 4096, 70000])
@pytest.mark.parametrize("heads", [16, 128])
def test_many_query_tokens(heads: int, s_q: int) -> None:
    """Results beyond 2^31 elements; the last token's, too."""
    torch.manual_seed(s_q)
    job = draw(spec_of(576, heads), s_q, heads, 512, 128)
    judge(job, sorted({0, s_q // 2, s_q - 1, min(s_q - 1, 32768)}))


@pytest.mark.parametrize("style", ["3", "30", "swings", "equal"])
@pytest.mark.parametrize("heads", [16, 20, 128])
@pytest.mark.parametrize("d_qk", WIDTHS)
def test_numbers_that_move_maxima(d_qk: int, heads: int, style: str) -> None:
    torch.manual_seed(5)
    spread = float(style) if style.isdigit() else 1.0
    kind = "plain" if style.isdigit() else style
    judge(draw(spec_of(d_qk, heads), 40, heads, 3000, 1500, style=kind, spread=spread))


def test_nothing_to_see() -> None:
    """Lists of no row, of length 0, an empty kv; sinks of both infinities."""
    job = draw(spec_of(576, 128), 30, 128, 64, 200, sink=[-INF, INF] * 64)
    job.indices[:10] = -1
    job.indices[10:20] = 64
    out, most, lse = judge(job)
    assert not out[:20].any() and (most[:20] == -INF).all() and (lse[:20] == INF).all()
    assert not out[20:, 1::2].any() and out[20:, ::2].any()
    out, most, lse = call(replace(job, kv=job.kv[:0]))
    assert not out.any() and (most == -INF).all() and (lse == INF).all()


def test_padded_heads_of_nan() -> None:
    job = draw(spec_of(576, 70), 300, 70, 2000, 512, spread=4.0)
    padded = torch.full((300, 128, 576), math.nan, device=DEVICE).bfloat16()
    padded[:, :70] = job.q
    for a, b in zip(call(job), call(replace(job, q=padded)), strict=True):
        assert torch.equal(a, b[:, :70]) and bool(a.isfinite().all())


@pytest.mark.parametrize("heads", [16, 128])
def test_the_same_bits(heads: int) -> None:
    """Again and again, alone, among others."""
    job = draw(spec_of(576, heads), 700, heads, 9000, 2048, spread=3.0, sink=True)
    first = [x.clone() for x in judge(job, [0, 699])]
    for _ in range(RUNS):
        assert all(torch.equal(a, b) for a, b in zip(call(job), first, strict=True))
    for i in (0, 131, 132, 699):
        one = replace(job, q=job.q[i : i + 1], indices=job.indices[i : i + 1])
        assert all(torch.equal(a[0], b[i]) for a, b in zip(call(one), first, strict=True))


def test_a_graph_follows_indices_and_lengths() -> None:
    job = draw(spec_of(576, 64), 200, 64, 3000, 512, lengths=[512] * 200)
    whole = replace(job, kv=torch.randn(3000, 1, 576, device=DEVICE).bfloat16())
    results = call(whole)
    given = dict(zip(("out", "max_logits", "lse"), results, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(whole, **given)
    assert whole.lengths is not None
    for seed in range(3):
        torch.manual_seed(seed)
        whole.indices.copy_(torch.randint(-50, 3050, (200, 1, 512)))
        whole.lengths.copy_(torch.randint(0, 513, (200,)))
        graph.replay()
        found = [x.clone() for x in results]
        assert all(torch.equal(a, b) for a, b in zip(found, call(whole), strict=True))


def test_nothing_but_results_is_allocated() -> None:
    job = draw(spec_of(576, 128), 512, 128, 4096, 256)
    results = call(job)
    given = dict(zip(("out", "max_logits", "lse"), results, strict=True))

    def allocated() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    before = allocated()
    sparse_prefill(job.q, job.kv, job.indices, job.scale, **given)
    assert allocated() == before
    sparse_prefill(job.q, job.kv, job.indices, job.scale)
    assert allocated() == before + 3


def test_flashmla_names() -> None:
    """vLLM's call: topk rounded up to 128 with entries of -1, lengths, ``out=``."""
    job = draw(spec_of(576, 64), 50, 64, 1000, 300, lengths=[300] * 50)
    padded = torch.full((50, 1, 384), -1, dtype=torch.int32, device=DEVICE)
    padded[..., :300] = job.indices
    out = torch.empty(50, 64, 512, dtype=torch.bfloat16, device=DEVICE)
    found = flash_mla_sparse_fwd(
        job.q, job.kv, padded, sm_scale=job.scale, topk_length=job.lengths, out=out
    )
    assert found[0] is out
    assert all(torch.equal(a, b) for a, b in zip(found, call(job), strict=True))


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("d_qk", WIDTHS)
def test_recorded_cases(d_qk: int, heads: int, index: int) -> None:
    """A case of the software GPU's record runs, and gives the same bits twice."""
    spec = spec_of(d_qk, heads)
    kernel = variants.kernel(spec, DEVICE)

    def run(_name: str, **given: Any) -> None:
        kernel(*given.values())

    found = [WORKLOAD.recorded(Case(spec.name, index), Runner(DEVICE, run)) for _ in range(2)]
    for name, rows in found[0].rows.items():
        assert (rows == found[1].rows[name]).all()


def free(x: Tensor) -> bool:
    """Whether nothing of a tensor is NaN."""
    return not bool(x.isnan().any())


def test_strided_rows() -> None:
    """Rows of a wider cache, heads of a wider projection, indices with a gap."""
    job = draw(spec_of(576, 40), 100, 40, 2000, 300)
    wide = torch.full((100, 40, 640), math.nan, device=DEVICE).bfloat16()
    wide[..., :576] = job.q
    found = call(replace(job, q=wide[..., :576]))
    assert all(torch.equal(a, b) for a, b in zip(found, call(job), strict=True))
    assert all(map(free, found))
