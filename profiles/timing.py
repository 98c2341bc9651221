"""Timing of whole operations on one GPU, several contenders in turn.

How a figure comes about:

* A *loop* is a CUDA graph of many back-to-back calls, which rotate over buffers of about a
  gigabyte, so that nothing a call reads was left in the L2 cache by the call before it.
* The loops of all contenders are replayed in turn, a few milliseconds each, in an order that
  shifts from round to round.  Under load the card sits at its power cap and its clock drifts by a
  third; contenders measured in the same rounds see the same card, so their ratios hold.
* A short spin kernel precedes each replay: the host has queued graph and events before they start,
  and launch gaps stay outside the interval.
* A figure is the median over the rounds, per call.
* ``us_cold`` is a single call after the L2 cache was filled with other data; it includes the two
  events around it (2 to 3 us).  ``host_us`` is the host's time for an eager call.

Without CUDA (``device="cpu"``) calls are simply repeated and timed by the wall clock, which says
nothing about a GPU but runs the same code path.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], Any]

MIN_ROTATION_BYTES = 200e6
SPIN_CYCLES = 300_000  # about 0.2 ms: longer than the host needs to queue one graph
MAX_CALLS_PER_GRAPH = 1000


@dataclass(frozen=True)
class TimingConfig:
    """Knobs of one measurement.

    Attributes:
        graph_ms: length of one replay; a graph holds at least one call per buffer.
        rounds: replays of each contender that count.
        warmup_rounds: replays before them that do not.
        cold_iters: single calls on a cold L2; 0 leaves ``us_cold`` out.
        host_iters: eager calls for ``host_us``; 0 leaves it out.
        rotate_bytes: bytes over which a loop's buffers rotate.
        shuffled: contenders take a random order in each round, not one that shifts: behind the same
            neighbour in all rounds a contender is flattered, or wronged, by that one's power.
        warm: a replay of the same loop stands before each that counts.
    """

    graph_ms: float = 8.0
    rounds: int = 15
    warmup_rounds: int = 2
    cold_iters: int = 15
    host_iters: int = 30
    rotate_bytes: float = 1e9
    shuffled: bool = False
    warm: bool = False


@dataclass
class Timing:
    """Result for one contender; times in microseconds per call."""

    us: float
    us_min: float
    us_max: float
    rounds: int
    calls: int
    buffers: int
    mode: str
    us_cold: float | None = None
    host_us: float | None = None
    mhz: float | None = None
    watts: float | None = None


def buffer_count(bytes_per_call: float, config: TimingConfig) -> int:
    """Number of buffers that a loop rotates over: ``rotate_bytes`` in all, never under 200 MB."""
    if bytes_per_call <= 0:
        raise ValueError(f"bytes_per_call: expected a positive size, got {bytes_per_call}")
    wanted = max(2, -int(-config.rotate_bytes // bytes_per_call))
    needed = max(2, -int(-min(MIN_ROTATION_BYTES, config.rotate_bytes) // bytes_per_call))
    return max(needed, min(wanted, 256))


class Nvml:
    """SM clock and board power of a CUDA device; reads None where NVML cannot be had."""

    def __init__(self, device_index: int = 0) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = _nvml_handle(pynvml, device_index)
            self._nvml = pynvml
        except Exception:  # missing module, driver or permission: clocks stay unknown
            self._nvml = None

    def mhz(self) -> float | None:
        """SM clock now."""
        return self._read(lambda n, h: float(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM)))

    def watts(self) -> float | None:
        """Board power; the driver averages it over a window longer than one replay."""
        return self._read(lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1000.0)

    def instant_watts(self) -> float | None:
        """Board power now, where the driver offers it (Hopper does)."""

        def reader(n: Any, h: Any) -> float:
            (found,) = n.nvmlDeviceGetFieldValues(h, [n.NVML_FI_DEV_POWER_INSTANT])
            if found.nvmlReturn != n.NVML_SUCCESS:
                raise ValueError(found.nvmlReturn)
            return found.value.uiVal / 1000.0

        return self._read(reader)

    def joules(self) -> float | None:
        """The board's energy since the driver was loaded."""
        return self._read(lambda n, h: n.nvmlDeviceGetTotalEnergyConsumption(h) / 1000.0)

    def describe(self) -> dict[str, Any]:
        """Facts for the head of a report."""
        facts: dict[str, Any] = {}
        readers: dict[str, Callable[[Any, Any], Any]] = {
            "driver": lambda n, h: _text(n.nvmlSystemGetDriverVersion()),
            "max_sm_mhz": lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM),
            "max_mem_mhz": lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_MEM),
            "power_limit_w": lambda n, h: n.nvmlDeviceGetEnforcedPowerLimit(h) / 1000.0,
            "temperature_c": lambda n, h: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
        }
        for key, reader in readers.items():
            facts[key] = self._read(reader)
        return facts

    def _read(self, reader: Callable[[Any, Any], Any]) -> Any:
        if self._nvml is None:
            return None
        try:
            return reader(self._nvml, self._handle)
        except Exception:  # a reading this card does not offer
            return None


def _nvml_handle(pynvml: Any, device_index: int) -> Any:
    """NVML counts all cards, torch the visible ones: go by UUID where torch tells it."""
    uuid = getattr(torch.cuda.get_device_properties(device_index), "uuid", None)
    if uuid is not None:
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except Exception:  # older bindings want bytes
            pass
    return pynvml.nvmlDeviceGetHandleByIndex(device_index)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@dataclass
class Loop:
    """A contender's calls, ready to be replayed.

    Attributes:
        name: label.
        calls: one call per buffer.
        run: replays ``count`` calls.
        mode: ``graph``, or ``eager`` with the reason.
    """

    name: str
    calls: Sequence[Call]
    run: Call
    count: int
    mode: str
    single: Call
    times_us: list[float] = field(default_factory=list)
    cold_us: list[float] = field(default_factory=list)
    mhz: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    host_us: float | None = None

    def result(self) -> Timing:
        """Medians of what was collected."""
        return Timing(
            us=statistics.median(self.times_us),
            us_min=min(self.times_us),
            us_max=max(self.times_us),
            rounds=len(self.times_us),
            calls=self.count,
            buffers=len(self.calls),
            mode=self.mode,
            us_cold=statistics.median(self.cold_us) if self.cold_us else None,
            host_us=self.host_us,
            mhz=statistics.median(self.mhz) if self.mhz else None,
            watts=statistics.fmean(self.watts) if self.watts else None,
        )


def make_loop(name: str, calls: Sequence[Call], config: TimingConfig, cuda: bool) -> Loop:
    """Warms up, estimates the time of a call, and captures the graphs.

    Raises:
        ValueError: ``calls`` is empty.
        Exception: whatever the calls themselves raise when run eagerly.
    """
    if not calls:
        raise ValueError(f"calls: expected at least one call for {name!r}, got none")
    if not cuda:
        return Loop(name, calls, _runner(calls, len(calls)), len(calls), "cpu", calls[0])
    for call in list(calls)[:3]:
        call()
    torch.cuda.synchronize()
    host_us = _host_time(calls, config.host_iters)
    estimate_ms = _estimate_ms(calls)
    count = max(len(calls), 2, min(int(config.graph_ms / estimate_ms) + 1, MAX_CALLS_PER_GRAPH))
    mode = "graph"
    try:
        run = _capture(calls, count)
        single = _capture(calls[-1:], 1)
    except Exception as error:  # a contender that cannot be captured is timed eagerly, and says so
        torch.cuda.synchronize()
        mode = f"eager ({str(error).splitlines()[0][:80] if str(error) else type(error).__name__})"
        run, single = _runner(calls, count), calls[-1]
    loop = Loop(name, calls, run, count, mode, single, host_us=host_us)
    run()
    torch.cuda.synchronize()
    return loop


def _runner(calls: Sequence[Call], count: int) -> Call:
    def run() -> None:
        for i in range(count):
            calls[i % len(calls)]()

    return run


def _capture(calls: Sequence[Call], count: int) -> Call:
    """A graph, captured on a stream on which a call ran before: what is made once for a stream,
    such as the schedule behind FlashMLA's names, is in no graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        _runner(calls, count)()
    return graph.replay


def _events() -> tuple[Any, Any]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _estimate_ms(calls: Sequence[Call]) -> float:
    begin, end = _events()
    torch.cuda._sleep(SPIN_CYCLES)
    begin.record()
    for i in range(4):
        calls[i % len(calls)]()
    end.record()
    end.synchronize()
    return max(begin.elapsed_time(end) / 4, 2e-3)


def _host_time(calls: Sequence[Call], iters: int) -> float | None:
    if iters <= 0:
        return None
    times = []
    for i in range(iters):
        call = calls[i % len(calls)]
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
        if i % 8 == 7:  # a full launch queue would make the host wait for the device
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return statistics.median(times)


class L2Flush:
    """Fills the L2 cache with clean lines of no interest, by reading a buffer of 256 MB."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.ones(64 << 20, dtype=torch.float32, device=device)
        self._out = torch.empty((), dtype=torch.float32, device=device)

    def __call__(self) -> None:
        torch.sum(self._buffer, dim=0, out=self._out)


def interleave(
    loops: Sequence[Loop],
    config: TimingConfig,
    nvml: Nvml | None = None,
    flush: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """Replays all loops in turn, ``rounds`` times, and returns the medians by name."""
    if not loops:
        return {}
    if loops[0].mode == "cpu":
        return _wall_clock(loops, config)
    pick = random.Random(0)
    for number in range(config.warmup_rounds + config.rounds):
        shift = number % len(loops)
        order = [*loops[shift:], *loops[:shift]]
        for loop in pick.sample(order, len(order)) if config.shuffled else order:
            _timed_replay(loop, nvml, number >= config.warmup_rounds, config.warm)
    if flush is not None:
        for _ in range(config.cold_iters):
            for loop in loops:
                loop.cold_us.append(_cold_call(loop, flush))
    return {loop.name: loop.result() for loop in loops}


def _timed_replay(loop: Loop, nvml: Nvml | None, keep: bool, warm: bool = False) -> None:
    begin, end = _events()
    torch.cuda._sleep(SPIN_CYCLES)
    if warm:
        loop.run()
    begin.record()
    loop.run()
    end.record()
    # The device is in the middle of the replay now: read its clock before waiting.
    mhz, watts = (nvml.mhz(), nvml.watts()) if nvml is not None else (None, None)
    end.synchronize()
    if not keep:
        return
    loop.times_us.append(begin.elapsed_time(end) * 1e3 / loop.count)
    if mhz is not None:
        loop.mhz.append(mhz)
    if watts is not None:
        loop.watts.append(watts)


def _cold_call(loop: Loop, flush: Callable[[], None]) -> float:
    begin, end = _events()
    flush()
    torch.cuda._sleep(SPIN_CYCLES)
    begin.record()
    loop.single()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end) * 1e3)


def _wall_clock(loops: Sequence[Loop], config: TimingConfig) -> dict[str, Timing]:
    for _ in range(config.rounds):
        for loop in loops:
            begin = time.perf_counter()
            loop.run()
            loop.times_us.append((time.perf_counter() - begin) * 1e6 / loop.count)
    return {loop.name: loop.result() for loop in loops}
