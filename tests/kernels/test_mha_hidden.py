"""V that is no number, of keys that rows do not see, on the software GPU, hazard check on."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import selfcheck
from snapmla.testing.mha_job import MhaJob
from snapmla.testing.mha_split_job import SplitJob, merged
from snapmla.testing.workloads.mha_fwd import wild_values
from softgpu import Options, mutate, using
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
CHECKED = Options(hazards="raise", seed=3)
MAIN = "mha_fwd_d192_dbf16_sm90a"
SPLIT = "mha_fwd_d192_dbf16_split_sm90a"
MORE = [MAIN, "mha_fwd_d128_df16_sm90a", "mha_fwd_d256_dbf16_sm90a", SPLIT,
        "mha_fwd_d256_dbf16_split_sm90a", "mha_fwd_d192_dbf16_turns_sm100a"]  # fmt: skip
Results = tuple[Tensor, Tensor]


def run(name: str, job: MhaJob, options: Options = CHECKED) -> Results:
    """(out, lse) of a call, partial rows merged."""
    spec = VariantSpec.from_name(name)
    call = selfcheck.load(spec, variants.find_or_build(spec, need_library=False).directory)
    given = job.arguments()
    with using(options):
        call(*(given[name] for name in call.names.arguments))
    out, lse = given["out"], given["lse"]
    if isinstance(job, SplitJob):
        out, lse = merged(job.lq, job.lk, out, lse, (given["partial_out"], given["partial_lse"]))
    return out, lse


def assert_kept_apart(job: MhaJob, got: Results, sound: Results) -> int:
    """Each row beside that of a call whose V is sound: the same bits but in channels where it sees
    a value that is no number; returns in how many rows there was one."""
    (out, lse), met, q0, k0 = got, 0, 0, 0
    for s_q, s_k in zip(job.lq, job.lk):
        wild = ~job.v[k0 : k0 + s_k, 0].isfinite()
        for row in range(s_q):
            bad = wild[: max(0, min(s_k, row + 1 + s_k - s_q))].any(0)
            here, there = out[q0 + row], sound[0][q0 + row]
            assert torch.equal(here[:, ~bad], there[:, ~bad]), (s_q, s_k, row)
            assert not here[:, bad].isfinite().any(), (s_q, s_k, row)
            met += bool(bad.any())
        q0, k0 = q0 + s_q, k0 + s_k
    assert torch.equal(lse[:, :q0], sound[1][:, :q0])
    return met


def test_reports() -> None:
    """An infinity in the last of 40 tokens; 8 queries over 5 keys, one of NaN; both of one work
    tile each, which the CTA takes again."""
    torch.manual_seed(1)
    job = MhaJob.draw(VariantSpec.from_name(MAIN), (40, 8), (40, 5), 1, 1, ctas=1)
    v = job.v.clone()
    v[39, 0, 5], v[40 + 3] = math.inf, math.nan
    bad = replace(job, v=v)
    got, sound = run(MAIN, bad), run(MAIN, job)
    assert assert_kept_apart(bad, got, sound) == 1 + 2
    assert torch.equal(got[0][:39], sound[0][:39]) and torch.equal(got[0][40:46], sound[0][40:46])
    assert not got[0][39, 0, 5].isfinite() and got[0][46:48].isnan().all()


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", MORE)
def test_every_head_size(name: str) -> None:
    """The workload's values, beside a sound V and beside the reference."""
    spec = VariantSpec.from_name(name)
    torch.manual_seed(2)
    made, lk = (SplitJob, (1960, 9)) if spec.keys == "split" else (MhaJob, (150, 9))
    job = made.draw(spec, (20, 9), lk, 1, 1, ctas=1)
    wild = wild_values(job)
    got = run(name, wild)
    assert assert_kept_apart(wild, got, run(name, job)) >= 2


@pytest.mark.whole_matrix
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", [*MORE[:3], MORE[-1]])
def test_anywhere(name: str, seed: int) -> None:
    """Random lengths and places, several CTAs and heads, random schedules, late landings."""
    torch.manual_seed(seed)
    bits, spec = random.Random(seed), VariantSpec.from_name(name)
    lq = [bits.choice([1, 5, 40, 130, 200]) for _ in range(bits.choice([1, 2, 3]))]
    lk = [max(1, n + bits.choice([-30, 0, 0, 1, 60, 128, 200])) for n in lq]
    job = MhaJob.draw(spec, lq, lk, bits.choice([1, 2]), 1, spread=bits.choice([1.0, 8.0]),
                      ctas=bits.choice([1, 2, 3]))  # fmt: skip
    v = job.v.clone()
    for _ in range(bits.choice([1, 2, 5])):
        key, value = bits.randrange(sum(lk)), bits.choice([math.nan, math.inf, -math.inf])
        if bits.random() < 0.5:
            v[key] = value
        else:
            v[key, 0, bits.randrange(spec.d_v)] = value
    wild = replace(job, v=v)
    got = run(name, wild, CHECKED if seed % 3 == 0 else mutate.schedule(seed))
    assert_kept_apart(wild, got, run(name, job, Options()))


@pytest.mark.whole_matrix
def test_a_token_that_is_nothing_but_nan() -> None:
    """In q, k and v, as of a cache that was not written: rows before it have their bits."""
    torch.manual_seed(4)
    job = MhaJob.draw(VariantSpec.from_name(MAIN), (70,), (90,), 2, 1)
    q, ks, v = job.q.clone(), tuple(k.clone() for k in job.ks), job.v.clone()
    for rows, at in ((q, 30), *((k, 50) for k in ks), (v, 50)):
        rows[at] = math.nan
    out, lse = run(MAIN, replace(job, q=q, ks=ks, v=v))
    sound, sound_lse = run(MAIN, job)
    assert torch.equal(out[:30], sound[:30]) and torch.equal(lse[:, :30], sound_lse[:, :30])
    assert out[30:70].isnan().all() and lse[:, 30:70].isnan().all()


def test_the_reference_keeps_apart_what_the_kernel_does() -> None:
    """The judge's own check: a row's hidden value does not reach the reference, a seen one does."""
    job = MhaJob.draw(VariantSpec.from_name(MAIN), (3,), (3,), 1, 1)
    v = job.v.clone()
    v[2, 0, 7] = math.inf
    want = torch.zeros(3, 1, 128, dtype=job.q.dtype), torch.zeros(1, 3)
    good, wild = job.errors(want), replace(job, v=v)
    poisoned = want[0].clone()
    poisoned[2, 0, 7] = math.nan
    outside = lambda out: wild.errors((out, want[1])).outside
    assert outside(want[0]) - outside(poisoned) == 1
    poisoned[1, 0, 7] = math.nan
    assert outside(poisoned) >= outside(want[0]) - 1 and good.cosine <= 1
