"""Board power: rows alone on the card for half a second, and what a byte and a FLOP cost.

Under load the card sits at its power cap and lowers its clock until it fits, so that time follows
from energy.  ``alone`` replays one loop without neighbours, long enough for the clock to settle and
for the driver's meter to see nothing else; ``probe`` does that with a stream from memory, one from
the L2 cache and two matrix products, above the power of SMs that only wait
(``roofline.Energies`` says what follows).

Power comes from NVML (``nvidia-ml-py``) or, without it, from ``nvidia-smi``.  NVML's counter of
energy is preferred, then its instantaneous power, then the driver's average over a second, which
still holds what ran before; each reading says which it was.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from profiles import ceilings, timing
from profiles.roofline import Energies

SECONDS = 0.25  # of a probe, and of the same load before it
ROW_SECONDS = 0.5  # of a row
POLL_S = 0.003
SMI_PERIOD_MS = 20
READ_BYTES = 1 << 30
L2_BYTES = 16 << 20  # stays in any L2 cache of 25 MB or more
READ_TILING = (16384, 4096, 4)  # int32 elements a program, a load; warps
L2_CTAS_A_SM, L2_ROUNDS, WAIT_ROUNDS = 4, 64, 1000
COUNTER = "energy counter"
NO_METER = (
    "power: neither nvidia-ml-py (pip install nvidia-ml-py) nor nvidia-smi reads this card's power"
)


@dataclass(frozen=True)
class Sample:
    """One look at the meter; what it does not offer is None.

    Attributes:
        t: ``time.monotonic()``, seconds.
        watts: board power.
        mhz: SM clock.
        joules: energy since the driver was loaded; moves in ticks of some 20 to 100 ms.
    """

    t: float
    watts: float | None = None
    mhz: float | None = None
    joules: float | None = None


@dataclass(frozen=True)
class Reading:
    """Mean power and median SM clock of an interval, and where the power comes from."""

    watts: float
    mhz: float | None
    source: str


@dataclass(frozen=True)
class Solo:
    """A loop alone on the card: microseconds a call, board power, SM clock."""

    us: float
    watts: float
    mhz: float | None
    source: str


def reading(samples: Sequence[Sample], begin: float, end: float, source: str) -> Reading:
    """Reading of the samples in [begin, end]; ``source`` names their watts.

    Raises:
        ValueError: none of them has a power.
    """
    inside = [s for s in samples if begin <= s.t <= end]
    clocks = [s.mhz for s in inside if s.mhz is not None]
    mhz = statistics.median(clocks) if clocks else None
    energy = [(s.t, s.joules) for s in inside if s.joules is not None]
    # between two ticks the counter is exact, whatever the driver's window
    ticks = [now for before, now in itertools.pairwise(energy) if now[1] != before[1]]
    if len(ticks) > 1 and ticks[-1][0] - ticks[0][0] >= (end - begin) / 2:
        (t0, e0), (t1, e1) = ticks[0], ticks[-1]
        return Reading((e1 - e0) / (t1 - t0), mhz, COUNTER)
    watts = [s.watts for s in inside if s.watts is not None]
    if not watts:
        raise ValueError(f"no power reading in {end - begin:.2f} s ({len(inside)} samples)")
    return Reading(statistics.fmean(watts), mhz, source)


# --------------------------------------------------------------------------------------- meters


@dataclass
class Meter:
    """Samples in a thread of its own.

    Attributes:
        wanted: set while somebody measures; a meter that can rest does so until then, because its
            thread would stand in the way of the host's times.
        source: what the samples' ``watts`` are.
        cap_w: enforced power limit.
        look: takes one sample, None if there is none yet; may wait a few milliseconds.
        close: ends what ``look`` reads from.
    """

    source: str
    cap_w: float
    look: Callable[[], Sample | None]
    close: Callable[[], None] = lambda: None
    wanted: threading.Event = field(default_factory=threading.Event)
    samples: list[Sample] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[Meter]:
        """Samples until the block ends."""
        stop = threading.Event()

        def sample() -> None:
            while not stop.is_set():
                seen = self.look()
                if seen is not None:
                    self.samples.append(seen)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            self.close()
            thread.join(timeout=5)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Asks for samples until the block ends."""
        self.wanted.set()
        try:
            yield
        finally:
            self.wanted.clear()

    def reading(self, begin: float, end: float) -> Reading:
        """Reading of the samples in [begin, end]; drops all samples."""
        found = reading(list(self.samples), begin, end, self.source)
        self.samples.clear()
        return found


def open_meter(nvml: timing.Nvml) -> Meter:
    """The best meter that this machine has.

    Raises:
        ValueError: it has none.
    """
    cap = nvml.describe().get("power_limit_w")
    now, mean = nvml.instant_watts(), nvml.watts()
    if cap and (now or mean or nvml.joules()):
        watts, wanted = nvml.instant_watts if now else nvml.watts, threading.Event()

        def look() -> Sample | None:
            if not wanted.wait(timeout=0.1):
                return None
            seen = Sample(time.monotonic(), watts(), nvml.mhz(), nvml.joules())
            time.sleep(POLL_S)
            return seen

        source = "instantaneous power" if now else "power averaged over a second"
        return Meter(source, cap, look, wanted=wanted)
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return smi_meter("0" if uuid is None else f"GPU-{uuid}")


def smi_meter(card_id: str) -> Meter:
    """``nvidia-smi`` as a meter of the card that it knows as ``card_id``.

    Raises:
        ValueError: the program is not there, or the card does not tell it power and limit.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise ValueError(NO_METER)
    card = [program, f"--id={card_id}"]
    form = "--format=csv,noheader,nounits"
    for query in ("power.draw.instant", "power.draw"):
        done = subprocess.run(
            [*card, f"--query-gpu={query},clocks.sm,power.limit", form],
            capture_output=True, text=True, timeout=20,
        )  # fmt: skip
        cells = parse_smi(done.stdout)
        if len(cells) == 3 and cells[0] is not None and cells[2] is not None:
            cap = cells[2]
            break
    else:
        raise ValueError(NO_METER)
    child = subprocess.Popen(
        [*card, f"--query-gpu={query},clocks.sm", form, f"--loop-ms={SMI_PERIOD_MS}"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    lines = child.stdout
    assert lines is not None

    def look() -> Sample | None:
        cells = parse_smi(lines.readline())
        if len(cells) != 2:
            time.sleep(POLL_S)  # ended, or no figures
            return None
        return Sample(time.monotonic(), cells[0], cells[1])

    def close() -> None:
        child.kill()
        child.wait()

    return Meter(f"nvidia-smi {query}", cap, look, close)


def parse_smi(line: str) -> list[float | None]:
    """Cells of a line of ``nvidia-smi --format=csv,noheader,nounits``; None for ``[N/A]`` and the
    like, no cells for an empty line."""

    def cell(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:
            return None

    return [cell(text) for text in line.strip().split(",")] if line.strip() else []


# ------------------------------------------------------------------------------------ measuring


def alone(
    loop: timing.Loop, meter: Meter, seconds: float = SECONDS, lead_s: float | None = None
) -> Solo:
    """Replays ``loop`` by itself for ``seconds``, after a lead-in of the same load, as long or of
    ``lead_s``."""
    stream = torch.cuda.current_stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    loop.run()
    end.record(stream)
    end.synchronize()
    each = max(begin.elapsed_time(end), 1e-3)
    before, replays = (
        max(1, round(s * 1e3 / each)) for s in (seconds if lead_s is None else lead_s, seconds)
    )
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event, count in ((begin, before), (end, replays)):
        for _ in range(count):
            loop.run()
        event.record(stream)
    with meter.watching():
        while not begin.query():
            time.sleep(1e-3)
        started = time.monotonic()
        end.synchronize()
    seen = meter.reading(started, time.monotonic())
    us = begin.elapsed_time(end) * 1e3 / (replays * loop.count)
    return Solo(us, seen.watts, seen.mhz, seen.source)


def probe(meter: Meter) -> tuple[Energies | None, list[ceilings.Probe], list[str]]:
    """Energy of a byte and of a FLOP; returns (energies, every probe, what failed and why)."""
    found: dict[str, tuple[Solo, float]] = {}  # what -> measured, bytes or FLOP a call
    notes: list[str] = []
    for part in (_idle, _wait, _reads, _products):
        try:
            found.update(part(meter))
        except Exception as error:
            what = part.__name__.strip("_")
            notes.append(f"power, {what}: {type(error).__name__}: {error}"[:300])
        torch.cuda.empty_cache()
    probes = [
        ceilings.Probe(what, solo.us, *_rate(what, solo, work), solo.mhz, solo.watts)
        for what, (solo, work) in found.items()
    ]
    if not {"wait", "dram", "l2", "fp8", "bf16"} <= found.keys():
        return None, probes, notes
    floor = found["wait"][0].watts
    energy = {
        what: pj_each(solo.watts - floor, solo.us, work)
        for what, (solo, work) in found.items()
        if work
    }
    return Energies(meter.cap_w, floor, **{f"{k}_pj": v for k, v in energy.items()}), probes, notes


def pj_each(watts: float, us: float, work: float) -> float:
    """Picojoules of one of ``work`` bytes or FLOP that ``watts`` did in ``us`` microseconds."""
    return watts * us / work * 1e6


def _rate(what: str, solo: Solo, work: float) -> tuple[float, str]:
    if not work:
        return 0.0, ""
    scale, unit = (1e-3, "GB/s") if what in ("dram", "l2") else (1e-6, "TFLOP/s")
    return work / solo.us * scale, unit


def _loop(what: str, calls: list[timing.Call]) -> timing.Loop:
    return timing.make_loop(what, calls, timing.TimingConfig(host_iters=0), cuda=True)


def _idle(meter: Meter) -> dict[str, tuple[Solo, float]]:
    """The card with a context and nothing to do; nothing follows from it, the page shows it."""
    torch.cuda.synchronize()
    time.sleep(SECONDS)
    begin = time.monotonic()
    with meter.watching():
        time.sleep(SECONDS)
    seen = meter.reading(begin, time.monotonic())
    return {"idle": (Solo(SECONDS * 1e6, seen.watts, seen.mhz, seen.source), 0.0)}


def _wait(meter: Meter) -> dict[str, tuple[Solo, float]]:
    from profiles.read_kernel import wait

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    sink = torch.empty(sms, dtype=torch.int32, device="cuda")
    return {"wait": (alone(_loop("wait", [lambda: wait(sink, WAIT_ROUNDS)]), meter), 0.0)}


def _reads(meter: Meter) -> dict[str, tuple[Solo, float]]:
    """Random bytes: what a line costs depends on how many of its bits change."""
    from profiles.read_kernel import read_again, read_stream

    source = torch.randint(-(2**31), 2**31, (READ_BYTES // 4,), dtype=torch.int32, device="cuda")
    small = source[: L2_BYTES // 4]
    sums = torch.empty(1 << 20, dtype=torch.int32, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    programs = L2_CTAS_A_SM * sms
    dram = _loop("dram", [lambda: read_stream(source, sums, *READ_TILING)])
    l2 = _loop("l2", [lambda: read_again(small, sums, programs, L2_ROUNDS, *READ_TILING)])
    again = float(programs * L2_ROUNDS * READ_TILING[0] * 4)
    return {"dram": (alone(dram, meter), float(READ_BYTES)), "l2": (alone(l2, meter), again)}


def _products(meter: Meter) -> dict[str, tuple[Solo, float]]:
    flops = 2.0 * ceilings.MATRIX**3
    calls: dict[str, list[Any]] = ceilings.matmul_calls()
    return {kind: (alone(_loop(kind, both), meter), flops) for kind, both in calls.items()}
