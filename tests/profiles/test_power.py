"""Power: what readings, energies and tiles work out to, and the meter of ``nvidia-smi``; no GPU."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path

import pytest

from profiles import bench, power, report, roofline, supervise, timing
from profiles.power import Sample
from profiles.roofline import FORMATS, Energies
from profiles.shapes import DecodeShape, parse

SNAP = FORMATS["snapmla"]
H200 = roofline.card_by_name("NVIDIA H200")
ENERGIES = Energies(
    cap_w=700.0, floor_w=200.0, dram_pj=80.0, l2_pj=30.0, bf16_pj=1.0, fp8_pj=0.5
)  # fmt: skip
LABEL = "b132_L8192_h64_q1"


# ------------------------------------------------------------------------------------- readings


def test_energy_counts_between_its_ticks() -> None:
    """500 W, told every 20 ms; the watts beside it are an old average and do not count."""
    samples = [
        Sample(t=i * 0.005, watts=100.0, mhz=1500.0 + i % 3, joules=500 * 0.02 * (i // 4))
        for i in range(100)
    ]
    found = power.reading(samples, 0.1, 0.4, "average")
    assert found.watts == pytest.approx(500.0) and found.mhz == 1501.0
    assert found.source == "energy counter"


def test_watts_serve_where_the_counter_does_not() -> None:
    flat = [Sample(i * 0.01, watts=300.0 + i, mhz=None, joules=7.0) for i in range(50)]
    found = power.reading(flat, 0.1, 0.2, "instantaneous power")
    assert found.watts == pytest.approx(315.0) and found.mhz is None
    assert found.source == "instantaneous power"
    # two ticks close together say little about the interval
    ticks = [Sample(s.t, s.watts, None, 7.0 + (i > 11) + (i > 12)) for i, s in enumerate(flat)]
    assert power.reading(ticks, 0.1, 0.2, "x").source == "x"
    with pytest.raises(ValueError, match=r"no power reading in 0\.10 s \(11 samples\)"):
        power.reading([Sample(s.t, None, 1500.0) for s in flat], 0.1, 0.2, "x")


@pytest.mark.parametrize(
    ("line", "cells"),
    [
        ("693.42, 1575\n", [693.42, 1575.0]),
        ("[N/A], 1980", [None, 1980.0]),
        ("[Unknown Error], [N/A], 700.00", [None, None, 700.0]),
        ("\n", []),
        ("", []),
    ],
)
def test_lines_of_nvidia_smi(line: str, cells: list[float | None]) -> None:
    assert power.parse_smi(line) == cells


SMI = """#!/bin/sh
case "$*" in
    *GPU-1*power.draw.instant*) echo "{instant}, 1500, 700.00"; [ "{instant}" = "[N/A]" ] && exit ;;
    *GPU-1*power.draw,*) echo "650.00, 1500, 700.00" ;;
    *) echo "No devices were found"; exit 6 ;;
esac
case "$*" in *--loop-ms=20*) ;; *) exit ;; esac
for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo "600.00, 1600"; sleep 0.01; done
exec sleep 60
"""


def _fake_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, instant: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(SMI.replace("{instant}", instant))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(("instant", "query"), [("680.0", ".instant"), ("[N/A]", "")])
def test_nvidia_smi_as_a_meter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant: str, query: str
) -> None:
    _fake_smi(tmp_path, monkeypatch, instant)
    meter = power.smi_meter("GPU-1")
    assert meter.cap_w == 700.0 and meter.source == f"nvidia-smi power.draw{query}"
    begin = time.monotonic()
    with meter.running():
        time.sleep(0.15)
        found = meter.reading(begin, time.monotonic())
    assert (found.watts, found.mhz) == (600.0, 1600.0)
    with pytest.raises(ValueError, match="no power reading"):  # what was read is gone
        meter.reading(begin, begin + 0.1)


def test_no_meter_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_smi(tmp_path, monkeypatch, "1.0")
    with pytest.raises(ValueError, match="nvidia-ml-py"):
        power.smi_meter("GPU-2")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="nvidia-ml-py"):
        power.smi_meter("GPU-1")


class FakeNvml(timing.Nvml):
    """A card that offers what it is told to."""

    def __init__(self, instant: float | None, average: float | None, cap: float | None) -> None:
        self.instant, self.average, self.cap = instant, average, cap

    def describe(self) -> dict:
        return {"power_limit_w": self.cap}

    def instant_watts(self) -> float | None:
        return self.instant

    def watts(self) -> float | None:
        return self.average

    def mhz(self) -> float | None:
        return 1400.0

    def joules(self) -> float | None:
        return None


@pytest.mark.parametrize(
    ("instant", "watts", "source"),
    [(650.0, 650.0, "instantaneous power"), (None, 300.0, "power averaged over a second")],
)
def test_nvml_as_a_meter(instant: float | None, watts: float, source: str) -> None:
    """It samples only while somebody measures."""
    meter = power.open_meter(FakeNvml(instant, 300.0, 700.0))
    begin = time.monotonic()
    with meter.running():
        time.sleep(0.05)
        assert not meter.samples
        with meter.watching():
            time.sleep(0.05)
        found = meter.reading(begin, time.monotonic())
    assert found == power.Reading(watts, 1400.0, source) and meter.cap_w == 700.0


def test_without_nvml_nvidia_smi_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power.torch.cuda, "get_device_properties", lambda index: None)
    monkeypatch.setattr(power, "smi_meter", lambda card_id: card_id)
    for instant, cap in ((None, 700.0), (650.0, None)):
        assert power.open_meter(FakeNvml(instant, None, cap)) == "0"


class FakeEvent:
    """An event of a device that is never ahead of its host."""

    def __init__(self, enable_timing: bool) -> None:
        self.t = math.inf

    def record(self, stream: object = None) -> None:
        self.t = time.monotonic()

    def query(self) -> bool:
        return time.monotonic() >= self.t

    def synchronize(self) -> None:
        time.sleep(0.05)  # what was asked of the device goes on that long

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.t - self.t) * 1e3


def test_a_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long a lead-in as the measurement; calls are counted, power is read meanwhile."""
    monkeypatch.setattr(power.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(power.torch.cuda, "current_stream", lambda: None)
    runs = []

    def run() -> None:
        runs.append(time.monotonic())
        time.sleep(0.005)

    loop = timing.Loop("x", [run], run, 50, "graph", run)
    with power.open_meter(FakeNvml(640.0, None, 700.0)).running() as meter:
        solo = power.alone(loop, meter, seconds=0.1)
    assert 9 <= (len(runs) - 1) // 2 <= 20 and len(runs) % 2 == 1
    assert solo.us == pytest.approx(100.0, rel=0.5)  # 5 ms for 50 calls
    assert (solo.watts, solo.mhz, solo.source) == (640.0, 1400.0, "instantaneous power")


def test_energies_follow_from_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = power.Meter("x", 700.0, lambda: None)
    solo = lambda us, watts: power.Solo(us, watts, 1500.0, "x")
    parts = {
        "_idle": {"idle": (solo(1.0, 80.0), 0.0)},
        "_wait": {"wait": (solo(1.0, 200.0), 0.0)},
        "_reads": {"dram": (solo(1e3, 500.0), 4.7e9), "l2": (solo(1e3, 400.0), 8e9)},
        "_products": {"bf16": (solo(1e3, 700.0), 6.7e11), "fp8": (solo(1e3, 700.0), 1.25e12)},
    }
    for name, found in parts.items():
        monkeypatch.setattr(power, name, lambda meter, found=found: found)
    energies, probes, notes = power.probe(meter)
    assert energies is not None and not notes
    assert (energies.cap_w, energies.floor_w) == (700.0, 200.0)
    assert energies.dram_pj == pytest.approx(300 / 4.7)  # W over TB/s
    assert energies.l2_pj == pytest.approx(200 / 8)
    assert energies.bf16_pj == pytest.approx(500 / 670) and energies.fp8_pj == pytest.approx(0.4)
    rates = {p.what: (round(p.rate), p.unit) for p in probes}
    assert rates["dram"] == (4700, "GB/s") and rates["fp8"] == (1250, "TFLOP/s")
    assert rates["idle"] == (0, "")

    def broken(meter: power.Meter) -> dict:
        raise RuntimeError("no Triton")

    for lost, left in (("_products", ["idle", "wait", "dram", "l2"]), ("_reads", ["idle", "wait"])):
        broken.__name__ = lost
        monkeypatch.setattr(power, lost, broken)
        energies, probes, notes = power.probe(meter)
        assert energies is None and [p.what for p in probes] == left
        assert "RuntimeError: no Triton" in notes[0]


# --------------------------------------------------------------------------------- energy, roof


def test_a_probe_alone_meets_its_own_roof() -> None:
    """Rates and energies are of the same probes: at the cap, the power roof is the probe's time."""
    size = float(1 << 30)
    us = size / 4700e3  # at 4700 GB/s
    dram = power.pj_each(700.0 - 200.0, us, size)
    assert dram == pytest.approx(500 / 4.7, rel=1e-6)  # W over TB/s are pJ a byte
    energies = Energies(700.0, 200.0, dram, 0.0, 1.0, 0.5)
    assert energies.row_us(size, 0.0, SNAP) == pytest.approx(us)
    flops = 1e12
    fp8 = power.pj_each(500.0, flops / 1280e6, flops)
    energies = Energies(700.0, 200.0, 80.0, 30.0, 1.0, fp8)
    assert energies.row_us(0.0, flops, FORMATS["fp8_tensor"]) == pytest.approx(flops / 1280e6)


def test_energy_of_a_row() -> None:
    """By hand, 64 rows: products and what memory costs more than L2; 16 rows: the bytes alone."""
    tokens = 64.0
    size = tokens * 644
    flops = roofline.decode_flops(64, 64, 1)
    each = (16 * 0.5 + 1 * 1.0) / 17
    want = (flops * each + size * 50.0) * 1e-6
    assert ENERGIES.row_uj(size, flops, SNAP) == pytest.approx(want)
    assert ENERGIES.row_us(size, flops, SNAP) == pytest.approx(want / 500.0)
    few = roofline.decode_flops(64, 1, 1)
    assert few * each < size * 30.0
    assert ENERGIES.row_uj(size, few, SNAP) == pytest.approx(size * 80e-6)
    fp8 = FORMATS["fp8_tensor"]
    assert ENERGIES.row_uj(0.0, 1e6, fp8) == pytest.approx(0.5)


def test_the_power_roof_is_the_highest_of_three() -> None:
    shape = DecodeShape(132, 8192, 64)
    size, flops = shape.bytes(SNAP), shape.flops
    plain = roofline.roof_us(size, flops, H200.ceilings, SNAP)
    roofs = [
        roofline.power_roof_us(size, flops, H200.ceilings, Energies(cap, 200.0, 80.0, 30.0, 1.0, 0.5), SNAP)  # noqa: E501
        for cap in (700.0, 5000.0)
    ]  # fmt: skip
    assert roofs[0] == ENERGIES.row_us(size, flops, SNAP) > plain
    assert roofs[1] == plain


@pytest.mark.parametrize(
    ("label", "count"),
    [
        ("b132_L8192_h64_q1", 132 * 128),
        ("b66_L8192_h128_q1", 66 * 128 * 2),
        ("b2_L65_h16_q1", 4),
        ("b1_L64_h65_q2", 3),
        ("b3_L2048_h16_q1_skewed", 32 + 2 * 16),
    ],
)
def test_tiles(label: str, count: int) -> None:
    shape = parse(label)
    assert isinstance(shape, DecodeShape) and report.tiles(shape) == count


def _raw(**more: object) -> dict:
    row = {"backend": "snapmla", "peer": False, "us": 210.0, "status": "ok", "check_ok": True}
    return {**row, "error": 1e-2, "format": "snapmla", "out_bytes": 2, "mhz": 1700.0, **more}


ALONE = {"alone_us": 234.8, "alone_watts": 693.0, "alone_mhz": 1575.0, "alone_source": "x"}


def test_rows_alone() -> None:
    """The time alone, not the one in turn, stands beside the watts."""
    row = report.enrich(_raw(**ALONE), LABEL, H200, H200.ceilings, ENERGIES)
    tiles = 132 * 128
    assert row["uj_tile"] == pytest.approx(693 * 234.8 / tiles)
    assert row["cycles_tile"] == pytest.approx(234.8 * 1575 * 132 / tiles)
    assert row["power_roof_fraction"] == pytest.approx(row["power_roof_us"] / 234.8)
    assert row["roof_fraction"] == pytest.approx(row["roof_us"] / 210.0)
    bare = report.enrich(_raw(), LABEL, H200, H200.ceilings, ENERGIES)
    assert not {"uj_tile", "power_roof_us"} & bare.keys()
    assert bare["roof_fraction"] == row["roof_fraction"]
    unknown = {**ALONE, "alone_mhz": None}
    row = report.enrich(_raw(**unknown), LABEL, H200, H200.ceilings, None)
    assert "uj_tile" in row and not {"cycles_tile", "power_roof_us"} & row.keys()


def test_the_report_has_a_power_section_of_its_own(tmp_path: Path) -> None:
    job = supervise.RunConfig(shapes=[LABEL], backends=["snapmla"], power=True)
    outcome = supervise.Outcome(machine={"gpu": "NVIDIA H200"})
    outcome.jobs[LABEL] = [_raw(**ALONE), _raw(backend="torch")]
    plain = bench.make_report("some", job, outcome)
    outcome.power = {
        "best": vars(ENERGIES),
        "probes": [
            {"what": "idle", "us": 1.0, "rate": 0.0, "unit": "", "mhz": 345.0, "watts": 75.4}
        ],
        "notes": ["power: energy counter"],
    }
    made = bench.make_report("some", job, outcome)
    assert made["notes"] == ["power: energy counter"]
    lines = report.power_lines(made)
    table = [line for line in lines if line.startswith(f"| {LABEL}")]
    assert len(table) == 1 and "| 693 | 1575 |" in table[0] and " % |" in table[0]
    assert "| idle | 1.0 | – | 345 | 75 |" in lines
    assert any("cap 700 W, 200 W while all SMs wait" in line for line in lines)
    assert not any("of power roof" in cells[0] for cells in report.DECODE_COLUMNS)
    assert "–" in report.power_lines(plain)[-1]  # no energies, no roof; the watts are there
    json.dumps(made, allow_nan=False)
    assert report.power_lines({**made, "rows": [], "power": {}}) == []
    report.save(made, tmp_path)


def test_a_power_event_reaches_the_outcome(tmp_path: Path) -> None:
    script = tmp_path / "fake.py"
    script.write_text(
        "import json, sys\n"
        "sink = open(sys.argv[2], 'a')\n"
        "config = json.load(open(sys.argv[1]))\n"
        "for kind, more in (('power', {'best': config['power']}),\n"
        "                   ('job', {'job': 's', 'rows': []}), ('end', {})):\n"
        "    sink.write(json.dumps({'kind': kind, **more}) + chr(10))\n"
    )
    config = supervise.RunConfig(shapes=["s"], backends=[], power=True)
    limits = supervise.Limits(quiet=5.0, total=30.0)
    worker = (sys.executable, str(script))
    outcome = supervise.run(config, limits, tmp_path / "log", worker=worker)
    assert outcome.power == {"best": True}


@pytest.mark.gpu
def test_a_product_alone_draws_power() -> None:
    import torch

    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    loop = timing.make_loop("mm", [lambda: x @ x], timing.TimingConfig(host_iters=0), cuda=True)
    with power.open_meter(timing.Nvml()).running() as meter:
        solo = power.alone(loop, meter)
    assert 2 * 4096**3 / solo.us * 1e-6 > 50  # TFLOP/s
    # About units and intervals: errors of those are factors of 2 and more.  The power limit is no
    # bound of half a second: an H100 of 700 W read 779 and 784 W here.
    assert 100 < solo.watts <= 1.25 * meter.cap_w and solo.mhz and solo.mhz > 500
