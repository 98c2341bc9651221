"""The model's counters beside an H200's, and the commands around them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from codegen import artifacts
from dsl_kernels.spec import VariantSpec
from profiles import ncu, record_cost
from snapmla import runtime
from snapmla.testing import cost
from snapmla.testing.__main__ import main
from softgpu.cost.profile import loads
from tests.softgpu.test_cost import check_trace
from tests.support.needs import needs_compiler

OLDER = record_cost.of_page((record_cost.RESULTS / "ncu-h200.md").read_text())
GATE = 0.05  # of issued instructions and of each memory counter that is modelled
BOUND = {"r16": "memory", "r32": "memory", "r64": "memory", "r128": "shared memory"}
EVERY_DAY = ("r16", "r64")
R16 = "decode_etap_r16_p64_obf16_sm90a"


def built(name: str) -> Path:
    """The folder of a variant, which is compiled if need be."""
    return runtime.find_or_build(VariantSpec.from_name(name), need_library=False).obj.parent


def test_the_older_page_as_counters() -> None:
    """Issue slots 25.8 % of 145,421 cycles of 4 schedulers of 132 SMs."""
    found = OLDER[R16]
    assert found["issued instructions"] == pytest.approx(0.258 * 145421 * 4 * 132)
    assert found["bank conflicts"] == 32802 and found["DRAM read"] == 337.7e6


@needs_compiler
@pytest.mark.parametrize(
    "rows",
    [pytest.param(r, marks=[] if r in EVERY_DAY else [pytest.mark.whole_matrix]) for r in BOUND],
)
def test_counters_of_an_h200(rows: str) -> None:
    """Within 5 %, tensor cycles within 1 %; and the unit that the card says is the busiest is."""
    spec = VariantSpec.from_name(f"decode_etap_{rows}_p64_obf16_sm90a")
    measured = cost.measure(spec, built(spec.name), tiles=(3, 7))
    card = OLDER[spec.name]
    found = {r.counter: r for r in record_cost.rows(card, record_cost.predicted(measured))}
    assert set(found) == {
        "issued instructions", "tensor cycles", "shared memory, LSU", "bank conflicts", "DRAM read"
    }  # fmt: skip
    for label, row in found.items():
        if label not in record_cost.APART:
            assert abs(row.difference) <= GATE, f"{label}: {row}"
    assert abs(found["tensor cycles"].difference) <= 0.01
    # what conflicts the model does not see are few
    missing = found["bank conflicts"].card - found["bank conflicts"].model
    assert 0 <= missing <= 0.015 * found["shared memory, LSU"].card
    assert loads(measured.profile.tile, 90, measured.card)[0].unit == BOUND[rows]


@needs_compiler
def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``cost``, with --compare, and ``trace``, of the smallest decode."""
    words = ["--dir", str(built(R16))]
    assert main(["cost", R16, "--tiles", "2", "4", "--card", "H100", *words]) == 0
    out = capsys.readouterr().out
    assert f"{R16}, 16 rows: a tile, from 2 and 4 tiles of one part" in out
    assert "H100 SXM at 1875 MHz" in out and "tensor cores" in out and "predicted" not in out
    assert "softmax_few, warps 4-7" in out and "fp8_etap, warps 8-15" in out
    assert main(["trace", R16, str(tmp_path / "t.json"), "--tiles", "3", *words]) == 0
    data = json.loads((tmp_path / "t.json").read_text())
    check_trace(data)
    tracks = [e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"]
    assert [t.split(" (")[0] for t in tracks][-4:] == [
        "softmax_few, warp 4", "fp8_etap, warp 8", "unit: tensor", "unit: copy"
    ]  # fmt: skip
    assert data["otherData"]["time"] == "modelled, not measured"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--card", "H1"], "card: expected one of"),
        (["--card", "B200"], "card: B200 runs sm_100a, the variant is for sm_90a"),
        (["--rows", "17"], "rows: expected 1 to 16 of"),
        (["--tiles", "4", "4"], "tiles: expected two rising numbers from 2, got (4, 4)"),
    ],
)
@needs_compiler
def test_wrong_arguments(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", R16, *words, "--dir", str(built(R16))]) == 2
    assert error in capsys.readouterr().err


def test_helpers_are_counted_by_cta() -> None:
    """No tiles: one record; what append_kv reads and writes of 384 tokens, in bytes."""
    name = "append_kv_xbf16_ii32_sm90a"
    found = cost.measure(VariantSpec.from_name(name), built(name)).profile
    assert found.tiles == (0, 0)
    ctas = 384 * (1152 + 4 + 644) / sum(found.tile.dram)
    assert ctas == pytest.approx(round(ctas), rel=0.02)


def test_a_record_is_read_back(tmp_path: Path) -> None:
    """As ``record`` writes it: ncu's raw metrics by variant."""
    metrics = enumerate(record_cost.COUNTERS.values())
    values: dict[str, tuple[str, float | str]] = {m: ("", 10.0 * i) for i, m in metrics}
    raw = json.loads(ncu.raw(values))
    path = tmp_path / "cost-h200.json"
    assert record_cost.records(path) == {}
    artifacts.write_atomic(path, json.dumps({"variants": {"v": raw}}))
    assert record_cost.records(path) == {
        "v": {label: 10.0 * i for i, label in enumerate(record_cost.COUNTERS)}
    }
    found = record_cost.rows({"MUFU": 100.0, "DRAM read": 50.0}, {"MUFU": 90.0, "DRAM read": 55.0})
    assert [r.difference for r in found] == [pytest.approx(0.1), pytest.approx(-0.1)]
    table = record_cost.table("v", found)
    assert table[-3] == "| DRAM read | 50 | 55 | +10.0 % |"
    assert table[-2] == "| MUFU (not modelled) | 100 | 90 | -10.0 % |"
