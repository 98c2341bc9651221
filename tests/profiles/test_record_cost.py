"""The model's counters beside an H200's, and the commands around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from codegen import artifacts
from dsl_kernels.spec import VariantSpec
from profiles import ncu, record_cost
from snapmla.runtime import variants
from snapmla.testing import cost
from snapmla.testing.__main__ import main
from tests.softgpu.test_cost import check_trace
from tests.support.needs import needs_compiler

CARDS = record_cost.on_file()  # what is recorded joins the test by itself
GATE = 0.05  # of issued instructions and of each memory counter that is modelled
BOUND = {"r16": "memory", "r32": "memory", "r64": "memory", "r128": "shared memory"}
EVERY_DAY = ("etap_r16_", "etap_r64_")
R16 = "decode_etap_r16_p64_obf16_sm90a"


def built(name: str) -> Path:
    """The folder of a variant, which is compiled if need be."""
    return variants.find_or_build(VariantSpec.from_name(name), need_library=False).obj.parent


def test_the_older_page_as_counters() -> None:
    """Issue slots 25.8 % of 145,421 cycles of 4 schedulers of 132 SMs; memory is the busiest."""
    found = record_cost.of_page((record_cost.RESULTS / "ncu-h200.md").read_text())
    card = found[R16]
    assert card.counters["issued instructions"] == pytest.approx(0.258 * 145421 * 4 * 132)
    assert card.counters["bank conflicts"] == 32802 and card.counters["DRAM read"] == 337.7e6
    for rows, unit in BOUND.items():
        assert found[f"decode_etap_{rows}_p64_obf16_sm90a"].busiest == unit


def test_one_memory_counter_is_not_modelled() -> None:
    assert len(record_cost.MEMORY) == 3
    assert [x for x in record_cost.MEMORY if x in record_cost.APART] == ["bank conflicts"]


@needs_compiler
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[] if any(x in name for x in EVERY_DAY) else [pytest.mark.whole_matrix]
        )
        for name in CARDS
    ],
)
def test_counters_of_an_h200(name: str) -> None:
    """Within 5 %, tensor cycles within 1 %; and the unit that the card says is the busiest is."""
    measured = cost.measure(VariantSpec.from_name(name), built(name), tiles=(3, 7))
    card = CARDS[name]
    rows = record_cost.rows(card.counters, record_cost.predicted(measured))
    found = {r.counter: r for r in rows}
    assert set(found) == set(card.counters) >= {
        "issued instructions", "tensor cycles", "shared memory, LSU", "bank conflicts", "DRAM read"
    }  # fmt: skip
    for label, row in found.items():
        if label not in record_cost.APART:
            assert abs(row.difference) <= GATE, f"{label}: {row}"
    assert abs(found["tensor cycles"].difference) <= 0.01
    # what conflicts the model does not see are few
    missing = found["bank conflicts"].card - found["bank conflicts"].model
    assert 0 <= missing <= 0.015 * found["shared memory, LSU"].card
    assert record_cost.bound(measured) == card.busiest


@needs_compiler
def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``cost``, with --compare, and ``trace``, of the smallest decode."""
    words = ["--dir", str(built(R16))]
    assert main(["cost", R16, "--tiles", "2", "4", "--card", "H100", *words]) == 0
    out = capsys.readouterr().out
    assert f"{R16}, 16 rows: a tile, from 2 and 4 tiles of one part" in out
    assert "H100 SXM at 1875 MHz" in out and "tensor cores" in out and "predicted" not in out
    assert "swap_ab, warps 4-7" in out and "transposed, warps 8-15" in out
    assert main(["trace", R16, str(tmp_path / "t.json"), "--tiles", "3", *words]) == 0
    data = json.loads((tmp_path / "t.json").read_text())
    check_trace(data)
    tracks = [e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"]
    assert [t.split(" (")[0] for t in tracks][-4:] == [
        "swap_ab, warp 4", "transposed, warp 8", "unit: tensor", "unit: copy"
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
    shares = [ncu.METRICS[row] for row in record_cost.UNITS.values()]
    metrics = enumerate([*record_cost.COUNTERS.values(), *shares])
    values: dict[str, tuple[str, float | str]] = {m: ("", 10.0 * i) for i, m in metrics}
    raw = json.loads(ncu.raw(values))
    path = tmp_path / "cost-h200.json"
    assert record_cost.records(path) == {}
    artifacts.write_atomic(path, json.dumps({"variants": {"v": raw}}))
    card = record_cost.records(path)["v"]
    wanted = {label: 10.0 * i for i, label in enumerate(record_cost.COUNTERS)}
    assert card.counters == wanted | {"tensor cycles": wanted["tensor cycles"] / 4}  # of four cores
    assert list(card.shares) == list(record_cost.UNITS) and card.busiest == "issue"
    found = record_cost.rows({"MUFU": 100.0, "DRAM read": 50.0}, {"MUFU": 90.0, "DRAM read": 55.0})
    assert [r.difference for r in found] == [pytest.approx(0.1), pytest.approx(-0.1)]
    table = record_cost.table("v", found, ("memory", "issue"))
    assert table[-5] == "| DRAM read | 50 | 55 | +10.0 % |"
    assert table[-4] == "| MUFU (not modelled) | 100 | 90 | -10.0 % |"
    assert table[-2] == "Busiest unit: memory by the card, issue by the model."
    assert record_cost.table("v", found)[-2] == table[-4]


def test_a_record_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ncu that does not know a metric is asked again for fewer; a variant that fails costs the
    others nothing."""
    asked: list[tuple[str, int]] = []

    def profile(spec: VariantSpec, _sizes: object, _folder: Path, metrics: list[str]) -> Any:
        asked.append((spec.name, len(metrics)))
        if spec.name == record_cost.VARIANTS[1] or len(metrics) > 12:
            raise ValueError("no such metric")
        return {m: ("", 1.0) for m in metrics}

    monkeypatch.setattr(ncu, "profile", profile)
    monkeypatch.setattr(ncu, "versions", lambda: "a card")
    monkeypatch.setattr(record_cost, "require_cuda", lambda: None)
    with pytest.raises(SystemExit) as left:
        record_cost.app(["record", "--out", str(tmp_path)])
    assert left.value.code == 1
    kept = record_cost.records(tmp_path / "cost-h200.json")
    assert list(kept) == [n for n in record_cost.VARIANTS if n != record_cost.VARIANTS[1]]
    assert all(set(card.counters) == set(record_cost.COUNTERS) for card in kept.values())
    assert len(asked) == 2 * len(record_cost.VARIANTS)
