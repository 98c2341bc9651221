"""Contenders alone on the card: time and energy of a call, each by itself for half a second.

Contenders that take turns share one power limit: whose cycles cost little energy stands behind
whose cost more, and its clock is what that one left.  So tables that time in turn say too much of a
kernel that lowers the clock more than its peer, and a step, whose other kernels draw less than
either, lies between both figures.  Here each contender replays its own calls until the clock has
settled, then for ``SECONDS``, and energy is what NVML's counter of total energy says of that time:
the power that the driver averages over a second would still hold what ran before.  Without the
counter there is no energy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from profiles import power, timing

SECONDS = power.ROW_SECONDS  # measured
LEAD_S, PAUSE_S = 0.2, 0.05  # of the same load before; of the card at rest before that
CONFIG = timing.TimingConfig(graph_ms=6.0, host_iters=0)
UNKNOWN = "–"
Calls = Mapping[str, Sequence[Callable[[], Any]]]
Row = Mapping[str, Any]


@contextmanager
def meter_of(nvml: timing.Nvml) -> Iterator[power.Meter]:
    """The card's meter, which samples while somebody measures."""
    with power.open_meter(nvml).running() as meter:
        yield meter


def of_loop(
    loop: timing.Loop, meter: power.Meter, seconds: float = SECONDS, lead_s: float = LEAD_S
) -> dict[str, Any]:
    """A loop by itself: ``us`` and ``uj`` of a call, ``watts``, ``mhz``, ``source`` of the watts.

    ``uj`` is None unless the watts are the counter's.

    Raises:
        ValueError: nothing reads the card's power.
    """
    solo = power.alone(loop, meter, seconds, lead_s)
    counted = solo.source == power.COUNTER
    return {
        "us": solo.us, "uj": solo.us * solo.watts if counted else None, "watts": solo.watts,
        "mhz": solo.mhz, "source": solo.source,
    }  # fmt: skip


def measure(calls: Calls, meter: power.Meter) -> dict[str, dict[str, Any]]:
    """Each contender by itself, one behind the other; calls rotate over what each brings."""
    found = {}
    for name, each in calls.items():
        loop = timing.make_loop(name, each, CONFIG, cuda=True)
        torch.cuda.synchronize()
        time.sleep(PAUSE_S)
        found[name] = of_loop(loop, meter) | ({} if loop.mode == "graph" else {"mode": loop.mode})
    return found


def ratios(row: Row, peer: str, name: str) -> tuple[float, float]:
    """The peer's time by the contender's, in turn and alone."""
    alone = row["alone"]
    return row["us"][peer] / row["us"][name], alone[peer]["us"] / alone[name]["us"]


def lines(rows: Sequence[Row], peer: str, unit: str = "call") -> list[str]:
    """A section of the page: those of the rows that have times alone; nothing if none has.

    Args:
        rows: with ``shape`` (a text), ``us`` (in turn, by contender), ``units`` of a call, and
            where the contenders were also alone ``alone``, as of ``measure``.
        peer: the contender whose time the ratios are of.
        unit: what ``units`` counts.
    """
    have = [row for row in rows if row.get("alone")]
    if not have:
        return []
    columns = ("shape", "who", "µs in turn", "ratio", "µs alone", "ratio alone", f"µJ a {unit}",
               "W", "MHz")  # fmt: skip
    found = [
        "", "## Each alone", "",
        f"Every contender by itself for {SECONDS} s, behind {LEAD_S} s of the same load; ratio: "
        f"{peer}'s time by its own. Energy: NVML's counter.",
        "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|",
    ]  # fmt: skip
    for row in have:
        for name, solo in row["alone"].items():
            both = ["1", "1"] if name == peer else [UNKNOWN, UNKNOWN]
            if name != peer and peer in row["alone"] and name in row["us"]:
                both = [f"{x:.2f}" for x in ratios(row, peer, name)]
            cells = (
                row["shape"], name, _told(row["us"].get(name), ".1f"), both[0],
                _told(solo["us"], ".1f"), both[1],
                _told(solo["uj"] and solo["uj"] / row["units"], ".2f"),
                _told(solo["watts"], ".0f"), _told(solo["mhz"], ".0f"),
            )  # fmt: skip
            found.append(f"| {' | '.join(cells)} |")
    return found


def _told(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)
