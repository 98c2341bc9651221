"""Builds of sparse decode for bounds of its time: they do the half of the work that they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from codegen import artifacts
from dsl_kernels import registry
from dsl_kernels.spec import VariantSpec
from snapmla import runtime
from snapmla.testing import selfcheck
from snapmla.testing.record_job import RecordJob, RecordShape
from snapmla.testing.sparse_job import SparseJob, SparseShape
from softgpu import Options, using
from tests.support.needs import needs_compiler

RARELY = pytest.mark.whole_matrix  # the variants are built for nothing else
JOBS: dict[str, Any] = {"etap": (SparseJob, SparseShape), "mix16": (RecordJob, RecordShape)}
STAGES = 4  # of the ring, at most
POINTS = [("mix16", 16), ("mix16", 64), ("etap", 16), ("etap", 64)]


def built(pipeline: str, rows: int, only: str) -> tuple[VariantSpec, Any, artifacts.Record]:
    """Variant, its kernel on the software GPU, its record."""
    spec = VariantSpec(
        op="sparse_decode", pipeline=pipeline, row_tile=rows, out_dtype="bf16", only=only
    )
    directory = runtime.find_or_build(spec, need_library=False).directory
    record = artifacts.Record.read(directory / f"{spec.name}.json")
    assert record is not None
    return spec, selfcheck.load(spec, directory), record


def products(record: artifacts.Record) -> int:
    """WGMMAs of 16 and of 8 bits."""
    return record.sass.get("HGMMA", 0) + record.sass.get("QGMMA", 0)


def job_of(spec: VariantSpec, tiles: int) -> Any:
    """A query token of so many tiles in one part."""
    made, shape = JOBS[spec.pipeline]
    torch.manual_seed(0)
    return made(spec, shape(5, 64 * tiles, (64 * tiles,), 53, parts=1))


@needs_compiler
@RARELY
@pytest.mark.parametrize(("pipeline", "rows"), POINTS)
def test_math_alone(pipeline: str, rows: int) -> None:
    """What fits into the ring is copied, and its result is the kernel's; no more is copied, so the
    result of a longer list is that of other tokens.  As many WGMMAs, no spilled register."""
    spec, whole, record = built(pipeline, rows, "all")
    _, math, bound = built(pipeline, rows, "math")
    short, long = job_of(spec, 2), job_of(spec, STAGES + 2)
    with using(Options(hazards="raise", seed=5)):
        assert all(map(torch.equal, short.run(math), short.run(whole)))
        assert not torch.equal(long.run(math)[0], long.run(whole)[0])
    assert products(bound) == products(record) > 0
    assert bound.spill_stores == bound.spill_loads == bound.stack_frame == 0


@needs_compiler
@RARELY
@pytest.mark.parametrize(("pipeline", "rows"), POINTS)
def test_gather_alone(pipeline: str, rows: int) -> None:
    """All copies, no product; it comes to its end, and leaves results as they were."""
    spec, _, record = built(pipeline, rows, "all")
    _, gather, bound = built(pipeline, rows, "gather")
    job = job_of(spec, STAGES + 2)
    with using(Options(hazards="raise", seed=5)):
        assert all(x.isnan().all() for x in job.run(gather))
    assert bound.sass["LDGSTS"] == record.sass["LDGSTS"] > 0
    assert products(bound) == 0 and "LDSM" not in bound.sass
    assert bound.spill_stores == bound.spill_loads == bound.stack_frame == 0


@needs_compiler
@pytest.mark.parametrize("axes", [{"pipeline": "f16"}, {"cache_dtype": "fp8_v4"}])
def test_who_has_none(axes: dict[str, str]) -> None:
    """Other kernels refuse to be built by half."""
    values = {"pipeline": "mix16", "row_tile": 64, "out_dtype": "bf16", **axes}
    spec = VariantSpec(op="sparse_decode", only="gather", **values)  # type: ignore[arg-type]
    assert "no builds for bounds of time" in str(registry.feasible(spec))


@needs_compiler
@pytest.mark.parametrize(("rows", "refused"), [(16, False), (64, True)])
def test_which_results_v4_has(rows: int, refused: bool) -> None:
    """With 64 rows a lane stores 16 bytes of BF16; fp32 would need RoPE's channels elsewhere."""
    values = {"row_tile": rows, "out_dtype": "f32", "cache_dtype": "fp8_v4"}
    spec = VariantSpec(op="sparse_decode", pipeline="mix16", **values)  # type: ignore[arg-type]
    assert ("writes BF16" in str(registry.feasible(spec))) == refused
