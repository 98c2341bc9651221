"""SM100's decode, pipeline ``ws``, through the public API on the software GPU, hazard check on.

``make test`` takes one point, the whole matrix the grid: heads x query tokens x inputs.  Lengths
are ragged, sequences are split and merged, pools and the tails of block tables are poisoned.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dsl_kernels.families.fp8_decode import PAGE_SIZES
from dsl_kernels.spec import decode_spec
from snapmla.reference import FP64, MIMIC_BLACKWELL, MIMIC_HW_FULL, mla_decode_reference
from snapmla.testing import metrics, selfcheck
from softgpu import Options, mutate, using
from tests.kernels.test_variants import up_to_date
from tests.support import cases, on_blackwell
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
LENGTHS = (0, 1, 63, 64, 65, 321)
INPUTS: dict[str, dict[str, Any]] = {
    "biased": {"latent_mean": 0.5},
    "sink": {"sink": True, "latent_mean": 0.5},
    "rope": {"rope_outlier": 1e3},
    "token": {"granularity": "token", "logit_std": 3.0},
    "full": {"causal": False, "latent_mean": 2.0},
}
EVERYDAY = (16, 4, "sink")  # one block of rows, full
GRID = [
    pytest.param(h, s_q, x, marks=() if (h, s_q, x) == EVERYDAY else pytest.mark.whole_matrix)
    for h in (1, 16, 20, 64, 128)
    for s_q in (1, 4)
    for x in INPUTS
]


@pytest.mark.parametrize(("heads", "s_q", "inputs"), GRID)
def test_decode_is_right_and_clean(heads: int, s_q: int, inputs: str) -> None:
    case = cases.DecodeCase(lengths=LENGTHS, heads=heads, s_q=s_q, seed=heads, **INPUTS[inputs])
    x = cases.build(case)
    with on_blackwell.blackwell(), using(Options(hazards="raise")):
        made, out, lse = on_blackwell.decode(x, "ws", parts=3)
        errors = on_blackwell.errors(x, "ws", out, lse)
    assert (made.pipeline, made.row_tile) == ("ws", 64)
    assert made.split_begin[-1] >= 2, "a sequence is split"
    assert errors.right, str(errors)
    # nothing but P's at ties rounds otherwise than in the mimic
    assert errors.apart < 1e-3


@pytest.mark.whole_matrix
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", ["split", "paged", "row640"])
@pytest.mark.parametrize("out", ["bf16", "f32"])
def test_layouts(page_size: int, layout: str, out: str) -> None:
    """Pages and strided layouts, copies and MMAs as late as they may be."""
    spec = decode_spec("ws", 64, page_size, out, "sm_100a")
    kernel = selfcheck.load(spec, up_to_date(spec))
    job = selfcheck.DecodeJob(spec, selfcheck.Workload.LENGTHS, layout=layout)
    with using(Options(asynchronous="late", hazards="raise", seed=1)):
        errors = job.errors(job.run(kernel))
    assert errors.right, str(errors)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("which", [3, 18, 21, 23])
def test_a_missing_product_is_noticed(which: int) -> None:
    """A K step of the content, of RoPE, of either half of P.V left out: the comparison sees it."""
    spec = decode_spec("ws", 64, 64, "f32", "sm_100a")
    kernel = selfcheck.load(spec, up_to_date(spec))
    found = mutate.matching(kernel.program(kernel.entry), "tcgen05.mma.ws")
    assert len(found) == 16 + 4 + 2 * 2
    job = selfcheck.DecodeJob(spec, (64, 40))
    with mutate.planted(kernel, kernel.entry, {found[which].pc: ""}):
        assert not job.errors(job.run(kernel)).right


@pytest.mark.parametrize(
    ("inputs", "largest"), [({"logit_std": 20.0}, 100.0), ({"sink": True}, 8.0), ({}, 5.0)]
)
def test_one_chain_keeps_the_lse(inputs: dict[str, Any], largest: float) -> None:
    """512 + 64 channels in one accumulator: to fp32's own rounding, where Hopper's needs two."""
    x = cases.build(cases.DecodeCase(lengths=(321,), heads=4, seed=3, **inputs))
    lse = {}
    for name, config in {
        "truth": FP64, "blackwell": MIMIC_BLACKWELL,
        "hopper": replace(MIMIC_HW_FULL, qk_promote_channels=512),
    }.items():  # fmt: skip
        lse[name] = mla_decode_reference(*x.stored, x.softmax_scale, config=config)[1]
    error = {name: metrics.lse_error(value, lse["truth"]) for name, value in lse.items()}
    assert error["blackwell"] < 1e-6 * largest < 0.1 * error["hopper"]
    assert math.isfinite(error["hopper"])
