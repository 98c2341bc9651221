"""Every shipped variant, from its object, on the software GPU with the hazard check on.

Decodes run behind the planning kernel as a dependent launch and are merged by the merge kernel;
lengths are ragged with 0, pools and buffers are poisoned, sequences are split in two.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from codegen import matrix, toolchain
from codegen.precompile import Report
from dsl_kernels.spec import VariantSpec, decode_spec
from snapmla import selfcheck
from softgpu import Options, mutate, using

HAVE = toolchain.have_compiler()
SPECS = matrix.default_specs("sm_90a") if HAVE else []
pytestmark = pytest.mark.skipif(not HAVE, reason="needs nvidia-cutlass-dsl")


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_clean_and_right(spec: VariantSpec, variant_dir: Path, built: Report) -> None:
    """Out of order, with copies landing at random, every hazard an error."""
    workload = selfcheck.Workload(spec, variant_dir)
    with using(mutate.schedule(0)):
        result = workload.run()
    assert result.passed, result.summary


@pytest.mark.parametrize("layout", ["paged", "row640"])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    ("pipeline", "row_tile"),
    [("etap", 16), ("etap", 32), ("etap", 64), ("etap", 128), ("dual_wg", 64), ("dual_wg", 128)],
)
def test_layouts(
    pipeline: str, row_tile: int, page_size: int, layout: str, variant_dir: Path, built: Report
) -> None:
    """The strided layouts (``split`` is above), copies as late as they may be."""
    spec = decode_spec(pipeline, row_tile, page_size, "bf16", "sm_90a")
    kernel = selfcheck.load(spec, variant_dir)
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
