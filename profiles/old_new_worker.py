"""The process of ``profiles.old_new`` that touches the GPU: two sides of a row in turn.

Sides are ``snapmla@DIR``, the package and the variants of the checkout in DIR
(``profiles.checkouts``), ``snapmla``, this one's, and ``snapmla:witness``, this one's with the
arguments that let ``decode`` see a stale plan.  Both read the very same tensors.  Each side's calls
stand in a CUDA graph of as many calls as the other's; the graphs are replayed one after the other,
in the other order each round, so that a clock that drifts is the same for both.

Started and watched by ``profiles.supervise``: a row that hangs or takes the context down is left
out by the next process.  Events are as ``profiles.worker`` says.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

import snapmla
from profiles import checkouts, old_new_rows, timing
from profiles.machine import machine
from profiles.old_new_rows import FULL, TINY, Side, Table
from profiles.supervise import RunConfig
from profiles.worker import timing_config
from snapmla.testing import metrics

WITNESS = "snapmla:witness"
# Results of two builds: the same bits, or, where a plan cuts elsewhere, what FP8's P costs twice
GATE = 5e-2  # relative L2
UNWRITTEN = -(2**31)  # of integers
MAX_CALLS = 1000


def table_of(config: RunConfig, name: str) -> Table:
    """The table that a label names before its first colon."""
    return (old_new_rows.WITNESSED if WITNESS in config.backends else old_new_rows.TABLES)[name]


@contextlib.contextmanager
def package_of(name: str) -> Iterator[Any]:
    """The imported ``snapmla`` of a side."""
    folder = name.partition("@")[2]
    if not folder:
        yield snapmla
        return
    checkout = checkouts.checkout(folder)
    if reason := checkout.unavailable():
        raise ValueError(reason)
    with checkout.active() as package:
        yield package


def captured(side: Side, count: int) -> Any:
    """A replay of ``count`` calls.  The first call runs before, on the stream that is captured, so
    that what FlashMLA's names plan for a stream is in no graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        side.calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            side.calls[i % len(side.calls)]()
    return graph.replay


def milliseconds(replay: Any) -> float:
    """Milliseconds that a replay takes, after one that does not count."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    begin.record()
    replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def loop_of(name: str, side: Side, graph_ms: float, count: int) -> timing.Loop:
    """A side's calls as a loop of ``count``; of 0 as many as take ``graph_ms``, each at least
    once."""
    if side.results[0].device.type == "cpu":
        each = len(side.calls)
        return timing.Loop(name, side.calls, lambda: [c() for c in side.calls], each, "cpu", print)
    if not count:
        count = len(side.calls)
        one = milliseconds(captured(side, count)) / count
        count = max(count, min(int(graph_ms / max(one, 1e-3)), MAX_CALLS))
    replay = captured(side, count)
    replay()
    torch.cuda.synchronize()
    return timing.Loop(name, side.calls, replay, count, "graph", replay)


def poison(side: Side) -> None:
    """Makes results that nobody writes be seen."""
    for tensor in side.results:
        tensor.fill_(torch.nan if tensor.is_floating_point() else UNWRITTEN)


def difference(old: Side, new: Side) -> float:
    """0 of the same bits; largest relative L2 of results, infinite where one is not written, or
    where integers differ."""
    worst = 0.0
    for mine, other in zip(new.results, old.results, strict=True):
        if mine.is_floating_point():
            error = metrics.relative_l2(mine, other) if not torch.equal(mine, other) else 0.0
            worst = max(worst, error if error == error else float("inf"))
        elif not torch.equal(mine, other) or bool((mine == UNWRITTEN).any()):
            return float("inf")
    return worst


class Worker:
    """Times the rows of a config; every result goes out as an event at once."""

    def __init__(self, config: RunConfig, sink: TextIO) -> None:
        self.config, self.sink = config, sink
        self.device = torch.device(config.device)
        self.cuda = self.device.type == "cuda"
        self.timing = timing_config(config.timing)

    def emit(self, kind: str, **fields: Any) -> None:
        """Writes one event line."""
        self.sink.write(json.dumps({"kind": kind, **fields}) + "\n")
        self.sink.flush()

    def run(self) -> None:
        """All rows, in order."""
        self.emit("machine", **machine(self.device, timing.Nvml() if self.cuda else None))
        for label in self.config.shapes:
            self.emit("job", job=label, rows=self.row(label))
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()
        self.emit("end")

    def row(self, label: str) -> list[dict[str, Any]]:
        """Both sides of a row: times by rounds, or why there are none."""
        rows: list[dict[str, Any]] = [{"backend": name} for name in self.config.backends]
        try:
            sides, loops = self._prepared(label)
            off = difference(sides[0], sides[1])
            self.emit("start", job=label, backend="", stage="time")
            timing.interleave(loops, self.timing)
        except Exception as error:
            if self.cuda:
                torch.cuda.synchronize()  # raises where the context is lost: a new process goes on
            note = f"{type(error).__name__}: {str(error)[:300]}"
            return [{**row, "status": "failed", "note": note} for row in rows]
        for row, side, loop in zip(rows, sides, loops, strict=True):
            times = [round(us, 4) for us in loop.times_us]
            row.update(status="ok" if off <= GATE else "wrong", times=times, kernel=side.note)
            row.update(calls=loop.count, difference=off if off < float("inf") else None)
        return rows

    def _prepared(self, label: str) -> tuple[list[Side], list[timing.Loop]]:
        name, _, shape_name = label.partition(":")
        table, sizes = table_of(self.config, name), FULL if self.cuda else TINY
        shape = (table.shapes if self.cuda else table.tiny)[shape_name]
        self.emit("start", job=label, backend="", stage="draw")
        problem = table.draw(shape, sizes, self.device)
        sides: list[Side] = []
        loops: list[timing.Loop] = []
        for backend in self.config.backends:
            self.emit("start", job=label, backend=backend, stage="prepare")
            if reason := self.config.ban_reason(label, backend):
                raise RuntimeError(f"{backend}: {reason}")
            try:
                with package_of(backend) as package:
                    side = problem.side(package, backend == WITNESS)
                    count = loops[0].count if loops else 0
                    loops.append(loop_of(backend, side, self.timing.graph_ms, count))
                    poison(side)
                    side.calls[0]()
                if self.cuda:
                    torch.cuda.synchronize()
            except Exception as error:
                raise RuntimeError(f"{backend}: {type(error).__name__}: {error}") from error
            sides.append(side)
        return sides, loops


def main(config_path: str, events_path: str) -> None:
    """Entry point of the child process."""
    config = RunConfig(**json.loads(Path(config_path).read_text()))
    with open(events_path, "a", encoding="utf-8") as sink, torch.inference_mode():
        Worker(config, sink).run()


if __name__ == "__main__":
    main(*sys.argv[1:3])
