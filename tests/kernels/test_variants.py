"""Every variant of the run, from its object, on the software GPU with the hazard check on.

Decodes run behind the planning kernel as a dependent launch and are merged by the merge kernel;
lengths are ragged with 0, pools and buffers are poisoned, sequences are split in two.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from codegen.precompile import Report
from dsl_kernels.spec import VariantSpec, decode_spec
from snapmla.runtime import variants
from snapmla.testing import selfcheck
from softgpu import Options, mutate, using
from tests.support.needs import needs_compiler

pytestmark = needs_compiler


def up_to_date(spec: VariantSpec) -> Path:
    """Folder of the variant, which is compiled first, with its planner, if need be."""
    variants.find_or_build(VariantSpec(op="plan_decode", arch=spec.arch), need_library=False)
    return variants.find_or_build(spec, need_library=False).directory


# Sparse decodes run so in test_sparse_tables.py, test_sparse_decode.py and test_sparse_records.py
# every day, SM100's decode with fp32 results in test_fp8_ws.py and test_fp8_pair.py.
HERE = "[!ds]*,d[!e]*,dense_*,decode_[!w]*,decode_ws_*_obf16_*,s[!p]*,sparse_p*"


@pytest.mark.variants("*", everyday=HERE)
def test_clean_and_right(spec: VariantSpec) -> None:
    """Out of order, with copies landing at random, every hazard an error."""
    workload = selfcheck.Workload(spec, up_to_date(spec))
    with using(mutate.schedule(0)):
        result = workload.run()
    assert result.passed, result.summary


@pytest.mark.whole_matrix
@pytest.mark.variants(
    "append_index_k_*_sm100a,index_rows_sm100a,fetch_index_k_*_sm100a,mha_items_sm100a,"
    "dsa_prologue_*_sm100a,merge_states_*_v128_sm100a,select_topk_*_e8_c1_sm100a",
    everyday="index_rows_sm100a",
)
def test_an_indexers_step_on_sm100_under_schedules(spec: VariantSpec) -> None:
    """SM90's sources; ``make prove`` goes on to a hundred schedules."""
    workload = selfcheck.Workload(spec, up_to_date(spec))
    for seed in range(12):
        with using(mutate.schedule(seed)):
            result = workload.run()
        assert result.passed, (seed, result.summary)


@pytest.mark.variants("merge_o*_sm90a")
def test_a_wrong_merge_is_noticed(spec: VariantSpec) -> None:
    """Without the hazard check: the comparison alone."""
    kernel = selfcheck.load(spec, up_to_date(spec))

    def one_row_is_off(*arguments: Any) -> None:
        kernel(*arguments)
        out = arguments[4]
        out[0, 0, 0] *= 1.1

    names = kernel.names.arguments
    assert selfcheck.check_kernel(spec, kernel).passed
    assert not selfcheck.check_kernel(spec, one_row_is_off, names).passed


@pytest.mark.variants("decode_*_sm90a", everyday="decode_etap_r[16][64]_p64_obf16_sm90a")
@pytest.mark.parametrize(
    "layout", [pytest.param("paged", marks=pytest.mark.whole_matrix), "row640"]
)
def test_layouts(spec: VariantSpec, layout: str) -> None:
    """The strided layouts (``split`` is above), copies as late as they may be."""
    kernel = selfcheck.load(spec, up_to_date(spec))
    torch.manual_seed(1)
    job = selfcheck.DecodeJob(spec, selfcheck.Workload.LENGTHS, layout=layout)
    with using(Options(asynchronous="late", hazards="raise", seed=1)):
        errors = job.errors(job.run(kernel))
    assert job.plan.split_begin[-1] >= 2, "the workload splits a sequence"
    assert errors.right, str(errors)


def test_a_decode_of_three_tiles_takes_seconds(variant_dir: Path, built: Report) -> None:
    """64 rows, 3 tiles, hazard check on: well under 5 seconds of the processor."""
    spec = decode_spec("etap", 64, 64, "bf16", "sm_90a")
    kernel = selfcheck.load(spec, variant_dir)
    job = selfcheck.DecodeJob(spec, (192,), 1)
    with using(Options(hazards="raise")):
        job.run(kernel)  # links and decodes
        started = time.process_time()
        result = job.run(kernel)
        took = time.process_time() - started
    assert job.errors(result).right
    assert took < 5.0
