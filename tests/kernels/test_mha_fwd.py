"""Dense prefill on the software GPU, hazard check on: truth, maxima that move, neighbours, bits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsl_kernels.formats.mha_list import KEY_TILE
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import selfcheck
from snapmla.testing.mha_job import MhaJob, mha_reference, offsets
from softgpu import Options, mutate, using
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
CHECKED = Options(hazards="raise", seed=3)
MAIN = "mha_fwd_d192_dbf16_sm90a"


def some(values: Iterable[Any], everyday: Any) -> list[Any]:
    """Parameters, all but one of them of the whole matrix."""
    whole = pytest.mark.whole_matrix
    return [v if v == everyday else pytest.param(v, marks=whole) for v in values]


NAMES = [f"mha_fwd_d{d}_d{t}_sm90a" for d in (192, 128, 256) for t in ("bf16", "f16")]
NAMES += [f"mha_fwd_{name}_turns_sm100a" for name in ("d192_dbf16", "d128_df16")]
EVERY = some(NAMES, MAIN)


def kernel_of(name: str) -> tuple[VariantSpec, Any]:
    spec = VariantSpec.from_name(name)
    directory: Path = variants.find_or_build(spec, need_library=False).directory
    return spec, selfcheck.load(spec, directory)


def run(kernel: Any, job: MhaJob, **changed: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of one call."""
    given = {**job.arguments(), **changed}
    kernel(*(given[name] for name in kernel.names.arguments))
    assert not given["work"][2:4].any()
    return given["out"], given["lse"]


@pytest.mark.whole_matrix
@pytest.mark.parametrize("heads", [8, 12, 14])
def test_sections_of_heads(heads: int) -> None:
    """None before the last section; one of four; one, and a last section of ten."""
    spec, kernel = kernel_of(MAIN.replace("192", "128"))
    torch.manual_seed(4)
    job = MhaJob.draw(spec, (3, 2), (3, 5), heads, 1, ctas=3)
    with using(CHECKED):
        errors = job.errors(run(kernel, job))
    assert errors.right, str(errors)


@pytest.mark.whole_matrix  # the main one runs in test_variants.py
@pytest.mark.parametrize("name", EVERY)
def test_clean_and_right(name: str) -> None:
    """The workload: ragged ends beside NaN and 1e30, rows without keys, moving maxima."""
    workload = selfcheck.Workload(*where(name))
    with using(mutate.schedule(0)):
        result = workload.run()
    assert result.passed, result.summary


def where(name: str) -> tuple[VariantSpec, Path]:
    spec = VariantSpec.from_name(name)
    return spec, variants.find_or_build(spec, need_library=False).directory


@pytest.mark.whole_matrix
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (8, 1)])
@pytest.mark.parametrize("name", EVERY)
def test_flashmla_inputs(name: str, heads: tuple[int, int], causal: bool) -> None:
    """Inputs like FlashMLA's tests': N/10, scale (d + 100)^-0.5, no more queries than keys."""
    spec, kernel = kernel_of(name)
    torch.manual_seed(7)
    job = MhaJob.draw(spec, (150, 1, 257), (300, 129, 257), *heads, causal=causal, spread=0.1)
    job = replace(job, ks=tuple(k * 0.1 for k in job.ks), scale=(spec.d_qk + 100) ** -0.5)
    with using(CHECKED):
        errors = job.errors(run(kernel, job))
    assert errors.right, str(errors)


def swings(job: MhaJob) -> MhaJob:
    """Logits of every row about 200, -200, 200, ... by tiles of keys."""
    q, k = job.q.clone(), job.ks[0].clone()
    sign = torch.where(torch.arange(len(k)) // KEY_TILE[q.shape[-1]] % 2 == 0, 1.0, -1.0)
    q[..., 0], k[..., 0] = 40.0, (sign * 200 / 40 / job.scale)[:, None].to(k.dtype)
    return replace(job, q=q, ks=(k, *job.ks[1:]))


def equals(job: MhaJob) -> MhaJob:
    """Every 50th query is a key that it sees, 30 times as long: all of P on one token."""
    q, k = job.q.clone(), job.k
    begin, key = 0, 0
    for s_q, s_k in zip(job.lq, job.lk):
        for i in range(0, s_q, 50):
            if s_k - s_q + i >= 0:
                q[begin + i] = k[key + s_k - s_q + i] * 30
        begin, key = begin + s_q, key + s_k
    return replace(job, q=q)


@pytest.mark.parametrize("style", some(["3", "30", "swings", "equal"], "swings"))
@pytest.mark.parametrize("name", EVERY)
def test_numbers_that_move_maxima(name: str, style: str) -> None:
    spec, kernel = kernel_of(name)
    torch.manual_seed(5)
    spread = float(style) if style.isdigit() else 1.0
    job = MhaJob.draw(spec, (129,), (520,), 1, 1, causal=style != "swings", spread=spread)
    job = {"swings": swings, "equal": equals}.get(style, lambda x: x)(job)
    with using(CHECKED):
        errors = job.errors(run(kernel, job))
    assert errors.right, str(errors)


def cut(job: MhaJob, which: int) -> MhaJob:
    """One sequence of a job, alone."""
    q0, k0 = sum(job.lq[:which]), sum(job.lk[:which])
    s_q, s_k = job.lq[which], job.lk[which]
    return replace(
        job, q=job.q[q0 : q0 + s_q].clone(), v=job.v[k0 : k0 + s_k].clone(),
        ks=tuple(k[k0 : k0 + s_k].clone() for k in job.ks), lq=(s_q,), lk=(s_k,), ctas=1,
    )  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_bits_do_not_depend_on_the_batch(name: str) -> None:
    """A sequence in a batch, whose neighbours' rows are huge, and alone; on more and fewer CTAs."""
    spec, kernel = kernel_of(name)
    torch.manual_seed(2)
    job = MhaJob.draw(spec, (3, 70, 60), (90, 200, 44), 1, 1, spread=4.0, ctas=3, behind=1e30)
    for rows in (*job.ks, job.v):
        rows[:90], rows[290:] = 1e4, math.nan
    job.q[73:] = 1e4
    out, lse = run(kernel, job)
    alone, alone_lse = run(kernel, cut(job, 1))
    assert torch.equal(out[3:73], alone) and torch.equal(lse[:, 3:73], alone_lse)
    assert alone.isfinite().all() and alone_lse.isfinite().all()


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", EVERY)
def test_schedules(name: str) -> None:
    """More work tiles than CTAs, every role ahead of and behind the others; the same bits."""
    spec, kernel = kernel_of(name)
    torch.manual_seed(3)
    job = MhaJob.draw(spec, (140, 0, 30), (300, 5, 129), 3, 1, spread=6.0, ctas=2)
    found = []
    for seed in range(12):
        with using(mutate.schedule(seed)):
            found.append(run(kernel, job))
    errors = job.errors(found[0])
    assert errors.right, str(errors)
    for out, lse in found[1:]:
        assert torch.equal(out.nan_to_num(7.0), found[0][0].nan_to_num(7.0))
        assert torch.equal(lse.nan_to_num(7.0), found[0][1].nan_to_num(7.0))


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", [MAIN, "mha_fwd_d256_dbf16_sm90a"])
def test_many_heads_in_sections(name: str) -> None:
    """11 heads are a section of 8 and one of 3; RoPE channels of every KV head."""
    spec, kernel = kernel_of(name)
    job = MhaJob.draw(spec, (5, 130), (20, 150), 11, 11, rope_heads=11, ctas=3)
    errors = job.errors(run(kernel, job))
    assert errors.right, str(errors)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("causal", [True, False])
def test_every_end_of_a_tile_of_80_keys(causal: bool) -> None:
    """Row tiles and tiles of keys are no multiples of one another: ends before, at and behind the
    edge of either, NaN behind each sequence."""
    spec, kernel = kernel_of("mha_fwd_d256_dbf16_sm90a")
    torch.manual_seed(6)
    lk = (79, 80, 81, 128, 159, 160, 161, 207, 208, 241)
    job = MhaJob.draw(spec, (1, 79, 80, 81, 128, 129, 7, 207, 80, 130), lk, 1, 1, causal=causal)
    with using(CHECKED):
        errors = job.errors(run(kernel, job))
    assert errors.right, str(errors)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", EVERY)
def test_a_nan_of_its_own_reaches_the_rows_that_see_it(name: str) -> None:
    """And no row before it where another tile of queries is."""
    spec, kernel = kernel_of(name)
    job = MhaJob.draw(spec, (256,), (256,), 1, 1)
    job.ks[0][200] = math.nan
    out, lse = run(kernel, job)
    assert out[200:256].isnan().all() and lse[:, 200:256].isnan().all()
    assert out[:200].isfinite().all() and lse[:, :200].isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
def test_the_reference_is_torchs(causal: bool) -> None:
    """The references' own check: torch's attention, sequence by sequence."""
    spec = VariantSpec.from_name(MAIN)
    job = MhaJob.draw(spec, (40, 7), (60, 7), 4, 2, causal=causal, spread=2.0)
    out, lse = mha_reference(
        job.q, job.k, job.v, offsets(job.lq), offsets(job.lk), job.scale, causal
    )
    mimic, mimic_lse = mha_reference(
        job.q, job.k, job.v, offsets(job.lq), offsets(job.lk), job.scale, causal,
        p_dtype=torch.float64,
    )  # fmt: skip
    q, k, v = (x.double().transpose(0, 1) for x in (job.q, job.k, job.v))
    for rows, keys in ((slice(0, 40), slice(0, 60)), (slice(40, 47), slice(60, 67))):
        s_q, s_k = rows.stop - rows.start, keys.stop - keys.start
        mask = torch.ones(s_q, s_k, dtype=torch.bool)
        mask = mask.tril(s_k - s_q) if causal else mask
        want = torch.nn.functional.scaled_dot_product_attention(
            q[:, rows], k[:, keys].repeat_interleave(2, 0), v[:, keys].repeat_interleave(2, 0),
            mask, scale=job.scale,
        )  # fmt: skip
        for got in (out, mimic):
            assert (got[rows] - want.transpose(0, 1)).abs().max() < 1e-12
    assert (lse - mimic_lse)[:, :47].abs().max() < 1e-12
