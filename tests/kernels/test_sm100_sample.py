"""The samples that ``make prove`` runs of SM100's decode: dealt out whole, and they can fail."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from dsl_kernels.spec import VariantSpec
from profiles import prove
from snapmla.testing import selfcheck
from snapmla.testing.selfcheck import DecodeErrors
from softgpu import SoftGpuError
from tests.support import sm100_sample
from tests.support.pairwise import Point

RIGHT = DecodeErrors(1e-3, 1.1e-3, 0.0, 1e-5, 0.0, 1e-3)


@pytest.mark.parametrize("name", prove.SAMPLES)
def test_parts_are_the_sample(name: str) -> None:
    op, n = prove.SAMPLES[name]
    parts = [sm100_sample.points(name, f"{k + 1}/{n}") for k in range(n)]
    whole = sm100_sample.SAMPLES[name].SAMPLE
    assert [parts[i % n][i // n] for i in range(len(whole))] == whole
    assert sum(map(len, parts)) == len(whole) and op in ("decode", "dense_decode")


@pytest.mark.parametrize("fault", ["error", "lse", "hazard"])
def test_a_wrong_point_fails_its_part(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *_ = sm100_sample.points("fp8", "2/12")

    def run(point: Point) -> DecodeErrors:
        if point != first:
            return RIGHT
        if fault == "hazard":
            raise SoftGpuError("a race")
        return replace(RIGHT, error=2e-3) if fault == "error" else replace(RIGHT, lse_error=1.0)

    monkeypatch.setattr(sm100_sample.SAMPLES["fp8"], "run", run)
    assert sm100_sample.main("fp8", "1/12") == 0
    assert sm100_sample.main("fp8", "2/12") == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == 1 and f"heads {first['heads']} " in wrong[0]


@pytest.mark.parametrize(("name", "stages"), [("ws_r64", 5), ("pair_r128", 3)])
def test_mutants_have_the_work_that_they_need(name: str, stages: int) -> None:
    """A split sequence; more items without a tile in a row than the KV ring has stages, and a tile
    behind them; an item of more tiles than stages, and another behind it."""
    spec = VariantSpec.from_name(f"decode_{name}_p64_obf16_sm100a")
    plan = selfcheck.DecodeJob(spec, selfcheck.Workload.BY_ARCH[spec.arch]).plan
    counts = [item[2] - item[1] for item in plan.work_items]
    parts = [counts[a:b] for a, b in itertools.pairwise(plan.part_begin)]
    assert plan.split_begin[-1] >= 2
    assert any(part[: stages + 1] == [0] * (stages + 1) and any(part) for part in parts)
    assert any(count > stages for part in parts for count in part[:-1])
