"""Sparse prefill on the software GPU, hazard check on: FlashMLA's gates, entries of no row, poison,
maxima that move, sinks, padded heads, schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.sparse.rows_kernel import row_tile_of
from snapmla.testing import selfcheck
from snapmla.testing.prefill_job import INT_MAX, PrefillJob, Results
from softgpu import Hazard, Options, mutate, using
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
CHECKED = Options(hazards="raise", seed=3)
MAIN, FEW = "sparse_prefill_r64_d576_sm90a", "sparse_prefill_r16_d576_sm90a"
INF = math.inf


def some(values: Iterable[Any], *everyday: Any) -> list[Any]:
    """Parameters, all but some of them of the whole matrix."""
    whole = pytest.mark.whole_matrix
    return [v if v in everyday else pytest.param(v, marks=whole) for v in values]


NAMES = [f"sparse_prefill_r{r}_d{d}_sm90a" for r in (64, 32, 16) for d in (576, 512)]
EVERY_FEW = some(NAMES, FEW)


def where(name: str) -> tuple[VariantSpec, Path]:
    spec = VariantSpec.from_name(name)
    return spec, variants.find_or_build(spec, need_library=False).directory


def kernel_of(name: str) -> tuple[VariantSpec, Any]:
    spec, directory = where(name)
    return spec, selfcheck.load(spec, directory)


def run(kernel: Any, job: PrefillJob, **changed: Any) -> Results:
    """(out, max_logits, lse) of one call."""
    given = {**job.arguments(), **changed}
    kernel(*(given[name] for name in kernel.names.arguments))
    return given["out"], given["max_logits"], given["lse"]


def expect_right(kernel: Any, job: PrefillJob) -> Results:
    with using(CHECKED):
        found = run(kernel, job)
    errors = job.errors(found)
    assert errors.right, str(errors)
    return found


@pytest.mark.whole_matrix  # some run in test_variants.py
@pytest.mark.parametrize("name", NAMES)
def test_clean_and_right(name: str) -> None:
    """The workload, copies landing at random."""
    with using(mutate.schedule(0)):
        result = selfcheck.Workload(*where(name)).run()
    assert result.passed, result.summary


SHAPES = [(h, k) for h in (1, 8, 16, 20, 40, 64, 96, 128) for k in (1, 17, 100, 128, 512)]
SAMPLED = [(1, 100), (8, 17), (96, 1)]


@pytest.mark.parametrize("shape", some(SHAPES, *SAMPLED), ids=str)
@pytest.mark.parametrize("d_qk", some([576, 512], 576))
def test_heads_and_lists(d_qk: int, shape: tuple[int, int]) -> None:
    """Entries of no row among them, more work tiles than CTAs, sinks with every second size; by the
    kernel that the library takes."""
    heads, topk = shape
    spec, kernel = kernel_of(f"sparse_prefill_r{row_tile_of(heads)}_d{d_qk}_sm90a")
    torch.manual_seed(heads + topk)
    sink = SHAPES.index(shape) % 2 == 0
    expect_right(kernel, PrefillJob.draw(spec, 2, heads, 150, topk, sink=sink, ctas=2))


@pytest.mark.parametrize("style", some(["3", "30", "swings", "equal"], "equal"))
@pytest.mark.parametrize("name", EVERY_FEW)
def test_numbers_that_move_maxima(name: str, style: str) -> None:
    spec, kernel = kernel_of(name)
    torch.manual_seed(5)
    spread = float(style) if style.isdigit() else 1.0
    kind = "plain" if style.isdigit() else style
    job = PrefillJob.draw(spec, 1, 12, 200, 330, style=kind, spread=spread, ctas=1)
    expect_right(kernel, job)


@pytest.mark.parametrize("name", EVERY_FEW)
def test_lists_of_every_kind(name: str) -> None:
    """A row named many times, nothing at all, nothing in a whole tile, INT_MAX behind the length,
    lengths out of range; NaN is in every row that is not named."""
    spec, kernel = kernel_of(name)
    torch.manual_seed(1)
    topk = 140
    lengths = (topk, topk, topk, 70, -5, 2 * topk)
    job = PrefillJob.draw(spec, 6, 9, 60, topk, lengths=lengths, idle=0.0, ctas=2)
    indices = job.indices.clone()
    indices[0] = 7
    indices[1] = -1
    indices[2, :, 64:128] = torch.tensor([-1, 60, INT_MAX, -(2**31)], dtype=torch.int32).repeat(16)
    indices[3, :, 70:] = INT_MAX
    whole = torch.zeros(60, 1, spec.d_qk + 8).bfloat16()
    whole[..., : spec.d_qk] = torch.randn(60, 1, spec.d_qk) * 0.1
    job = replace(job, indices=indices, kv=whole[..., : spec.d_qk])
    job._poison(whole)
    out, most, lse = expect_right(kernel, job)
    for i in (1, 4):
        assert not out[i].any() and (most[i] == -INF).all() and (lse[i] == INF).all()


@pytest.mark.parametrize("name", EVERY_FEW)
def test_sinks_of_both_infinities(name: str) -> None:
    """-inf takes nothing, +inf everything; LSE and the largest logit are as without."""
    spec, kernel = kernel_of(name)
    torch.manual_seed(4)
    job = PrefillJob.draw(spec, 1, 4, 40, 50, sink=(-INF, INF, 0.0, 200.0))
    out, *figures = expect_right(kernel, job)
    without, *others = run(kernel, replace(job, sink=None))
    assert torch.equal(out[:, 0], without[:, 0]) and not out[:, 1].any()
    assert all(torch.equal(a, b) for a, b in zip(figures, others, strict=True))


@pytest.mark.parametrize("name", EVERY_FEW)
def test_padded_heads_of_nan(name: str) -> None:
    """Heads that a caller pads with whatever memory held: the real ones' bits are the same."""
    spec, kernel = kernel_of(name)
    torch.manual_seed(6)
    heads = spec.row_tile - 5
    job = PrefillJob.draw(spec, 2, heads, 90, 70, spread=4.0)
    padded = torch.full((2, spec.row_tile, spec.d_qk), math.nan).bfloat16()
    padded[:, :heads] = job.q
    found, beside = run(kernel, job), run(kernel, replace(job, q=padded))
    for a, b in zip(found, beside, strict=True):
        assert torch.equal(a, b[:, :heads]) and a.isfinite().all()
    assert beside[0][:, heads:].isnan().all() and beside[2][:, heads:].isnan().all()


@pytest.mark.parametrize("name", EVERY_FEW)
def test_a_nan_that_is_named_reaches_its_query_token(name: str) -> None:
    """In a channel of V, and in the last one, which with 576 is RoPE's; and no other token."""
    spec, kernel = kernel_of(name)
    torch.manual_seed(8)
    job = PrefillJob.draw(spec, 3, 5, 80, 70, idle=0.0)
    indices = job.indices.clamp(min=2)
    indices[0, 0, 66], indices[1, 0, 3] = 0, 1
    kv = torch.randn(80, 1, spec.d_qk).bfloat16()
    kv[0, 0, 17], kv[1, 0, -6] = math.nan, math.nan
    out, most, lse = run(kernel, replace(job, indices=indices, kv=kv))
    for i in (0, 1):
        assert out[i].isnan().all() and most[i].isnan().all() and lse[i].isnan().all()
    assert all(x[2].isfinite().all() for x in (out, most, lse))


@pytest.mark.parametrize("name", EVERY_FEW)
def test_bits_do_not_depend_on_the_call(name: str) -> None:
    """A query token among others, and alone; on more and fewer CTAs; strided results."""
    spec, kernel = kernel_of(name)
    torch.manual_seed(2)
    heads = spec.row_tile + 2
    job = PrefillJob.draw(spec, 3, heads, 100, 130, spread=3.0, ctas=4)
    found = run(kernel, job)
    one = replace(job, q=job.q[1:2], indices=job.indices[1:2], ctas=1)
    wide = torch.full((1, heads + 4, 520), 5.0).bfloat16()
    figures = torch.full((2, heads + 4, 1), 5.0)
    most, lse = (x[:heads].T for x in figures)
    alone = run(kernel, one, out=wide[:, :heads, :512], max_logits=most, lse=lse)
    for a, b in zip(found, alone, strict=True):
        assert torch.equal(a[1:2], b)
    assert (
        (wide[:, 66:] == 5).all() and (wide[..., 512:] == 5).all() and (figures[:, 66:] == 5).all()
    )


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("style", ["swings", "plain"])
def test_lse_of_what_the_indexer_chose(name: str, style: str) -> None:
    """Lists that end before, at and behind it, are empty, and have no row in its part; out,
    max_logits and LSE have the bits of a call without it."""
    spec, kernel = kernel_of(name.replace("_sm90a", "_indexer_sm90a"))
    assert spec.figures == "indexer"
    torch.manual_seed(9)
    heads, lengths = spec.row_tile + 3, (200, 128, 127, 1, 0, 129, 200)
    job = PrefillJob.draw(
        spec, 7, heads, 150, 200, lengths=lengths, sink=True, style=style, ctas=3
    )  # fmt: skip
    job.indices[6, 0, :128] = -1
    for chosen in (64, 128, 256):
        with using(CHECKED):
            given = replace(job, indexer_topk=chosen).arguments()
            kernel(*(given[x] for x in kernel.names.arguments))
        found = tuple(given[x] for x in ("out", "max_logits", "lse", "lse_indexer"))
        errors = replace(job, indexer_topk=chosen).errors(found)
        assert errors.right, str(errors)
        assert (found[3][4] == INF).all() and bool((found[3][6] == INF).all()) == (chosen < 256)
        if chosen == 256:
            assert torch.equal(found[3], found[2])
    plain = kernel_of(name)[1]
    for a, b in zip(run(plain, replace(job, indexer_topk=None)), found, strict=False):
        assert torch.equal(a, b)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", EVERY_FEW)
def test_schedules(name: str) -> None:
    """Every role ahead of and behind the others, lists of all lengths; the same bits."""
    spec, kernel = kernel_of(name)
    torch.manual_seed(3)
    lengths = (200, 0, 65, 64, 1, 129)
    job = PrefillJob.draw(
        spec, 6, spec.row_tile + 6, 150, 200, lengths=lengths, sink=True, style="swings", ctas=3
    )
    found = []
    for seed in range(12):
        with using(mutate.schedule(seed)):
            found.append(run(kernel, job))
    errors = job.errors(found[0])
    assert errors.right, str(errors)
    for results in found[1:]:
        for a, b in zip(results, found[0], strict=True):
            assert torch.equal(a, b)


def test_the_reference_is_torchs() -> None:
    """The reference's own check: torch's attention over the named rows; the mimic's error is that
    of a P in BF16."""
    spec = VariantSpec.from_name(MAIN)
    torch.manual_seed(0)
    job = PrefillJob.draw(spec, 2, 3, 50, 90, lengths=(90, 70), spread=2.0)
    for i, count in enumerate(job.counts):
        entries = job.indices[i, 0, :count].long()
        kv = job.kv[entries[(entries >= 0) & (entries < 50)], 0].double()
        q = job.q[i].double()[:, None]
        want = torch.nn.functional.scaled_dot_product_attention(
            q, kv.expand(3, -1, -1), kv[:, :512].expand(3, -1, -1), scale=job.scale
        )[:, 0]
        out, most, lse, _ = job.reference(i)
        logits = (q[:, 0] @ kv.T) * job.scale
        assert (out - want).abs().max() < 1e-12
        assert (most - logits.amax(-1)).abs().max() == 0
        assert (lse - logits.logsumexp(-1)).abs().max() < 1e-12
        off = (job.reference(i, rounded=True)[0] - want).norm() / want.norm()
        assert 1e-4 < off < 4e-3


@pytest.mark.whole_matrix
@pytest.mark.parametrize("shape", [(2, 64, 130, 64), (1, 96, 200, 128), (1, 3, 70, 64)], ids=str)
@pytest.mark.parametrize("row_tile", [64, 16])
def test_a_partial_row_is_a_row_of_its_piece(
    row_tile: int, shape: tuple[int, int, int, int]
) -> None:
    """Query tokens, heads, entries, entries of a piece: partial rows, rounded, have the bits of the
    rows of one query token a piece whose list is the piece; nothing is written behind them."""
    s_q, heads, topk, width = shape
    pieces = -(-topk // width)
    spec, split = kernel_of(f"sparse_prefill_r{row_tile}_d576_split_sm90a")
    whole_spec, whole = kernel_of(f"sparse_prefill_r{row_tile}_d576_sm90a")
    torch.manual_seed(1)
    given = PrefillJob.draw(spec, s_q, heads, 300, topk, spread=3.0).arguments()
    given |= split_arguments(s_q, heads, topk, width)
    rows = torch.full((s_q * pieces + 1, heads, 512), math.nan)
    given["o_accum"] = rows[:-1]
    with using(CHECKED):
        split(*(given[x] for x in split.names.arguments))
    assert rows[-1].isnan().all()

    alone = PrefillJob.draw(whole_spec, s_q * pieces, heads, 300, width).arguments()
    padded = torch.full((s_q, pieces * width), -1, dtype=torch.int32)
    padded[:, :topk] = given["indices"].view(s_q, topk)
    lengths = given["topk_length"]
    if len(lengths):
        inside = torch.arange(pieces * width) < lengths[:, None]
        padded[~inside] = -1
    alone |= {
        "q": given["q"].repeat_interleave(pieces, 0), "kv": given["kv"],
        "indices": padded.view_as(alone["indices"]),
        "topk_length": torch.zeros(0, dtype=torch.int32),
        "attn_sink": torch.zeros(0), "softmax_scale": given["softmax_scale"],
    }  # fmt: skip
    with using(CHECKED):
        whole(*(alone[x] for x in whole.names.arguments))
    assert rows[:-1].isfinite().all()
    assert torch.equal(rows[:-1].bfloat16(), alone["out"])


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", [f"sparse_prefill_r{r}_d576_split_sm90a" for r in (64, 16)])
def test_the_grid_before_is_waited_for_first(name: str) -> None:
    """Nothing touches global memory in front of the wait for the grid before; without the wait
    copies of KV that this grid makes are found by name, which ``mutate``'s launches do not have."""
    spec, kernel = kernel_of(name)
    code = kernel.program(kernel.entry).kernel.code
    (wait,) = (ins.pc for ins in code if ins.opcode == "griddepcontrol.wait")
    touching = ("ld.global", "st.global", "red.", "atom.", "cp.async.c", "cp.async.bulk.")
    touch = [ins.pc for ins in code if ins.opcode.startswith(touching)]
    copies = [ins for ins in code if ins.opcode.startswith("cp.async.c")]
    assert copies and min(touch) > wait

    torch.manual_seed(0)
    job = PrefillJob.draw(spec, 2, spec.row_tile, spec.row_tile, 70)
    before, behind = job.arguments(), job.arguments()
    behind["kv"] = before["out"].view(-1, 1, 1024)[..., :576]

    def both() -> None:
        for given in (before, behind):
            kernel(*(given[x] for x in kernel.names.arguments))

    with using(CHECKED):
        both()
    with mutate.mutant(kernel, kernel.entry, wait), using(CHECKED), pytest.raises(Hazard) as error:
        both()
    assert error.value.kind == "early-dependent-access"
    assert error.value.events[-1].text.startswith("cp.async.c"), str(error.value)


def split_arguments(s_q: int, heads: int, topk: int, width: int) -> dict[str, Any]:
    """Arguments that split lists alone are given; results and partial rows are NaN."""
    pieces = -(-topk // width)
    return {
        "split_begin": torch.arange(s_q + 1, dtype=torch.int32) * pieces,
        "units": torch.zeros(0, 2, dtype=torch.int32),
        "out": torch.full((s_q, 1, heads, 512), math.nan).bfloat16(),
        "lse": torch.full((s_q, heads, 1), math.nan),
        "o_accum": torch.full((s_q * pieces, heads, 512), math.nan),
        "lse_accum": torch.full((s_q * pieces, heads), math.nan),
        "lse_factor": math.log(2), "empty_lse": -math.inf, "width": width, "ctas": 2,
    }  # fmt: skip
