"""Builds with stamps: the ordinary bits, and every event of every CTA in order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from codegen import compile as compiler
from codegen import matrix
from dsl_kernels import registry
from dsl_kernels.families import ARCHS
from dsl_kernels.formats.stamp import WORDS, Stamp
from dsl_kernels.spec import VariantSpec, decode_spec
from profiles.shapes import DecodeShape
from profiles.stamps import EVENTS, Step, event_times
from tests.support.needs import needs_compiler

ORDER = list(Stamp)[: Stamp.ROWS_WRITTEN + 1]


@needs_compiler
@pytest.mark.whole_matrix
def test_events_come_in_order() -> None:
    """Four CTAs, the third with a second item, the last with none; a slot of the plan's stays."""
    step = Step(DecodeShape(3, 70, 16), torch.device("cpu"))
    assert step.ctas == 4 and step.o_accum.shape[0] == step.plan.o_accum.shape[0] + 1
    step.call(step.spec, step.tables[0])
    want = step.out.clone(), step.lse.clone()
    assert not step.records.any()
    step.call(step.spec.replace(stamps=1), step.tables[0])
    assert torch.equal(step.out, want[0]) and torch.equal(step.lse, want[1])
    words = step.records
    begin = step.plan.part_begin
    busy = begin[1:] > begin[:-1]
    assert busy.sum() == 3
    assert (words[:, [Stamp.ENTRY, Stamp.WAITED]] > 0).all()
    assert (words[busy, : Stamp.ROWS_WRITTEN_TOO + 1] > 0).all()
    assert not words[~busy, Stamp.FIRST_TMA :].any() and len(Stamp) == WORDS
    events = words[busy][:, ORDER]
    assert (events[:, 1:] > events[:, :-1]).all()
    assert (words[busy, Stamp.ROWS_WRITTEN_TOO] > words[busy, Stamp.SOFTMAX_END]).all()
    times = event_times(words)
    assert list(times) == list(EVENTS)
    assert [len(t) for t in times.values()] == [4, 4, 3, 3, 3, 3, 3]


@needs_compiler
@pytest.mark.whole_matrix
def test_only_first_tiles_are_recorded() -> None:
    """The software GPU's clock counts readings: as many of one tile an item as of eight."""
    ends = []
    for tokens in (64, 512):
        step = Step(DecodeShape(4, tokens, 16), torch.device("cpu"))
        step.call(step.spec.replace(stamps=1), step.tables[0])
        ends.append(float(event_times(step.records)["rows written"].max()))
    assert ends[0] == ends[1]


def test_stamps_are_in_no_matrix() -> None:
    for arch in ARCHS:
        for spec in matrix.points(arch):
            assert not dict(spec.values).get("stamps", 0), spec.name
    name = "decode_etap_r64_p64_obf16_stamps1_sm90a"
    assert VariantSpec.from_name(name) == decode_spec("etap", 64, 64, "bf16").replace(stamps=1)


@needs_compiler
@pytest.mark.whole_matrix
def test_ordinary_builds_read_no_clock(variant_dir: Path) -> None:
    spec = decode_spec("etap", 16, 64, "bf16")
    for stamps in (0, 1):
        compiler.ensure(spec.replace(stamps=stamps), variant_dir, linked=False)
        ptx = variant_dir / f"{spec.replace(stamps=stamps).name}.ptx"
        assert ("globaltimer" in ptx.read_text()) == bool(stamps)


@needs_compiler
@pytest.mark.parametrize(("pipeline", "arch"), [("dual_wg", "sm_90a"), ("ws", "sm_100a")])
def test_pipelines_without_stamps_say_so(pipeline: str, arch: str) -> None:
    spec = decode_spec(pipeline, 64, 64, "bf16", arch).replace(stamps=1)
    assert "no stamps" in str(registry.feasible(spec))
