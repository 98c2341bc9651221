"""A modelled timeline as Chrome trace JSON, which ui.perfetto.dev and chrome://tracing open.

The format: an object with ``traceEvents``; complete events (``ph`` X) have ``ts`` and ``dur`` in
microseconds, ``pid`` and ``tid``; metadata events (``ph`` M) name processes and threads.  A CTA is
a process, a role or a unit a thread.
"""

from __future__ import annotations

import json
from typing import Any

from . import rates
from .profile import Card, Profile
from .timeline import Slice, Timeline

MODELLED = "modelled, not measured"
PREDICTED = f"predicted, {MODELLED}"  # of an architecture that no counter has been compared with
UNITS = ("tensor", "copy")


def text(play: Timeline, p: Profile, card: Card, title: str) -> str:
    """The file's content."""
    return json.dumps(events(play, p, card, title), indent=1) + "\n"


def events(play: Timeline, p: Profile, card: Card, title: str) -> dict[str, Any]:
    """The trace as data: a track for the first warp of each role and for each unit."""
    made: list[dict[str, Any]] = []
    word = MODELLED if rates.of(p.architecture).measured else PREDICTED
    for rank in sorted({r for r, _ in play.warps}):
        _named(made, "process_name", rank, 0, f"CTA {rank} of {title}: time is {word}")
        track = 0
        for role in p.roles:
            found = play.warps.get((rank, role.warps[0]), [])
            if found:
                name = f"{role.name}, warp {role.warps[0]} ({word})"
                track = _track(made, rank, track, name, found, card.mhz)
        for unit in UNITS:
            found = play.units.get((rank, unit), [])
            if found:
                track = _track(made, rank, track, f"unit: {unit} ({word})", found, card.mhz)
    about = {"time": word, "card": card.name, "mhz": card.mhz, "kernel": title}
    return {"traceEvents": made, "displayTimeUnit": "ns", "otherData": about}


def _track(
    made: list[dict[str, Any]], pid: int, tid: int, name: str, slices: list[Slice], mhz: float
) -> int:
    """Adds a thread with its slices; the next thread's number."""
    _named(made, "thread_name", pid, tid, name)
    for s in slices:
        made.append({
            "name": s.name, "ph": "X", "pid": pid, "tid": tid, "ts": s.start / mhz,
            "dur": (s.end - s.start) / mhz, "cat": "wait" if s.name.startswith("wait") else "work",
            "args": {"cycles": round(s.end - s.start, 1), **s.about},
        })  # fmt: skip
    return tid + 1


def _named(made: list[dict[str, Any]], what: str, pid: int, tid: int, name: str) -> None:
    made.append({"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})
