"""Tables of times: a table is data, and here it is run and rendered.

``python -m profiles.bench NAME`` runs one of ``profiles.tables``.  Of each shape the problem is
drawn, every contender is held against the reference, and only who is right is timed: CUDA graphs of
its calls in turn with the others' (``profiles.timing``), and of some shapes also alone
(``profiles.alone``).  The record, JSON, is written anew behind every row, and beside it the page
that is made of nothing but the record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import typer

from profiles import alone, page, power, timing
from profiles.machine import machine

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]  # its head, and a row's cell
Calls = Mapping[str, Sequence[timing.Call]]  # by contender; each of a graph on other buffers
NONE = "–"


@dataclass(frozen=True)
class Run:
    """Options of a run.

    Attributes:
        peers: folder of the peers' libraries.
        options: values that ``--set`` gave, by name.
    """

    device: torch.device
    peers: Path | None = None
    options: Mapping[str, str] = field(default_factory=dict)


class Problem:
    """The base of a row's tensors."""

    def facts(self) -> dict[str, Any]:
        """Entries of the record beside times; ``shape``: the row's label, ``units``: of energy."""
        raise NotImplementedError

    def contenders(self) -> Calls:
        """The calls of each."""
        raise NotImplementedError

    def check(self, name: str, calls: Sequence[timing.Call]) -> Any:
        """A contender's error.

        Raises:
            ValueError: it is wrong.
        """
        raise NotImplementedError

    def extra(self, calls: Calls) -> dict[str, Any]:
        """More of the record, of the calls that are right."""
        return {}


@dataclass(frozen=True)
class Table:
    """One table of times.

    Attributes:
        name: of its page and record.
        title: of its page.
        problem: (what rows share, a shape) -> the row's tensors.
        shapes: of its rows, in this order.
        columns: of the page, or (rows) -> columns; none: no table but that of times alone.
        config: how contenders are timed.
        notes: lines above the table, or (run, what rows share) -> lines.
        setup: once a run, what all rows share: caches, libraries.
        gate: errors are below it, a number or one a contender; None: ``check`` judges.
        ours: contenders that must be right; another that is wrong or fails is said and not timed.
            None: all must.
        each: a line a contender, in ``who``, but for those that are ``unlisted``; not a line a row.
        alone: shapes of which contenders are timed alone, too.
        peer: contender whose time ratios of times alone are of; energy is told a tile.
        intro: lines between the page's head, or the table before, and this one.
        more: tables behind this one on the page, which share its setup.
        takes: options beside those of every table: ``peers``, or names that ``--set`` gives values.
    """

    name: str
    title: str
    problem: Callable[[Any, Any], Problem]
    shapes: Sequence[Any]
    columns: Sequence[Column] | Callable[[Sequence[Row]], Sequence[Column]]
    config: timing.TimingConfig
    notes: Sequence[str] | Callable[[Run, Any], Sequence[str]] = ()
    setup: Callable[[Run], Any] = lambda run: run.device
    gate: float | Mapping[str, float] | None = None
    ours: Sequence[str] | None = None
    each: bool = False
    unlisted: Sequence[str] = ()
    alone: Sequence[Any] = ()
    peer: str = ""
    intro: Sequence[str] = ()
    more: tuple[Table, ...] = ()
    takes: Sequence[str] = ()


# ---------------------------------------------------------------------------- one row


def error_of(table: Table, problem: Problem, name: str, calls: Sequence[timing.Call]) -> Any:
    """A contender's error, of its first call.

    Raises:
        ValueError: it is not below the gate, or ``check`` finds it wrong.
    """
    error = problem.check(name, calls)
    gate = table.gate.get(name) if isinstance(table.gate, Mapping) else table.gate
    if gate is not None and not error < gate:  # nor NaN
        raise ValueError(f"error {error:.1e} is not below {gate:.0e}")
    return error


def captured(
    name: str, calls: Sequence[timing.Call], config: timing.TimingConfig, device: torch.device
) -> timing.Loop:
    """A contender's calls as one loop.

    Raises:
        RuntimeError: they cannot be captured.
    """
    loop = timing.make_loop(name, calls, config, device.type == "cuda")
    if loop.mode not in ("graph", "cpu"):
        raise RuntimeError(loop.mode)
    return loop


def times_of(calls: Calls, config: timing.TimingConfig, device: torch.device) -> dict[str, Any]:
    """The same as ``in_turn``, of calls that are captured here.

    Raises:
        RuntimeError: a contender's calls cannot be captured.
    """
    return in_turn([captured(name, x, config, device) for name, x in calls.items()], config, device)


def in_turn(
    loops: Sequence[timing.Loop], config: timing.TimingConfig, device: torch.device
) -> dict[str, Any]:
    """Microseconds a call in turn: medians, each round's, and on a cold L2 if asked for."""
    cold = device.type == "cuda" and config.cold_iters > 0
    found = timing.interleave(loops, config, flush=timing.L2Flush(device) if cold else None)
    return {
        "us": {name: each.us for name, each in found.items()},
        "rounds": {loop.name: [round(us, 4) for us in loop.times_us] for loop in loops},
        "cold": {name: each.us_cold for name, each in found.items()},
    }


def measure(
    table: Table, shared: Any, shape: Any, device: torch.device, meter: power.Meter | None = None
) -> dict[str, Any]:
    """A row of the record; alone, too, if there is a meter.

    Raises:
        ValueError: a contender that must be right is wrong, or none is right.
    """
    problem = table.problem(shared, shape)
    row: dict[str, Any] = {**problem.facts(), "error": {}, "wrong": {}}
    right: dict[str, Sequence[timing.Call]] = {}
    loops: list[timing.Loop] = []
    for name, calls in problem.contenders().items():
        try:
            row["error"][name] = error_of(table, problem, name, calls)
            loops.append(captured(name, calls, table.config, device))
            right[name] = calls
        except (RuntimeError, TypeError, ValueError) as reason:
            if table.ours is None or name in table.ours:
                raise ValueError(f"{row['shape']}, {name}: {reason}") from reason
            row["wrong"][name] = f"{type(reason).__name__}: {reason}".splitlines()[0][:300]
    if not right:
        told = "; ".join(f"{name}: {why}" for name, why in row["wrong"].items())
        raise ValueError(f"{row['shape']}: no contender is right: {told or 'there is none'}")
    row |= in_turn(loops, table.config, device)
    row |= problem.extra(right)
    if meter is not None:
        row["alone"] = alone.measure(right, meter)
    return row


# ---------------------------------------------------------------------------- the page


def body(table: Table, rows: Sequence[Row]) -> list[str]:
    """Lines of the page behind its head, of a record's rows."""
    lines: list[str] = []
    for number, part in enumerate((table, *table.more)):
        mine = [row for row in rows if row.get("part", 0) == number]
        columns = part.columns(mine) if callable(part.columns) else part.columns
        if not mine or not columns:
            continue
        told = mine
        if part.each:
            told = [{**r, "who": n} for r in mine for n in r["us"] if n not in part.unlisted]
        cells = [[cell(row) for _, cell in columns] for row in told]
        lines += [*part.intro, *page.table([head for head, _ in columns], cells)]
    lines += alone.lines(rows, table.peer, "tile")
    said = [f"- {r['shape']}, {n}: {why}" for r in rows for n, why in r.get("wrong", {}).items()]
    return [*lines, "", "Left out:", "", *said] if said else lines


def run(
    table: Table, given: Run, out: Path, first: int = 999, only: str = "", limit: float = 1800.0
) -> Sequence[Row]:
    """Times the first shapes of a table, writes record and page; prints each line.

    Args:
        only: shapes whose text has this.
        limit: seconds after which no shape is begun.

    Raises:
        ValueError: a contender that must be right is wrong.
    """
    begin, nvml, rows = time.monotonic(), timing.Nvml(), list[dict[str, Any]]()
    torch.manual_seed(0)
    solo = any(part.alone for part in (table, *table.more))
    with torch.inference_mode(), alone.meter_of(nvml) if solo else nullcontext() as meter:
        shared = table.setup(given)
        notes = table.notes(given, shared) if callable(table.notes) else table.notes
        told = page.told(machine(given.device, nvml), page.FACTS)
        head = page.head(table.title, "profiles.bench", told, *notes)
        for number, part, shape in _wanted(table, first, only):
            if time.monotonic() - begin > limit:
                typer.echo(f"time is up before {shape}")
                break
            by_itself = meter if shape in part.alone else None
            rows.append(measure(part, shared, shape, given.device, by_itself) | {"part": number})
            typer.echo("\n".join(body(table, [rows[-1]])))
            page.write_record(out / f"{table.name}.json", head, rows, lambda r: body(table, r))
            if given.device.type == "cuda":
                torch.cuda.empty_cache()
    typer.echo(f"{len(rows)} rows in {time.monotonic() - begin:.0f} s")
    return rows


def _wanted(table: Table, first: int, only: str) -> Iterable[tuple[int, Table, Any]]:
    """The first shapes of each table of the page."""
    for number, part in enumerate((table, *table.more)):
        for shape in [shape for shape in part.shapes if only in str(shape)][:first]:
            yield number, part, shape


# ---------------------------------------------------------------------------- columns
# Of a contender, the line's own if none is named; a dash if the row has no such figure.


def told(value: Any, form: str) -> str:
    """A number or text, or a dash."""
    return NONE if value is None else format(value, form)


def fact(head: str, name: str, form: str = "") -> Column:
    """A fact of the row."""
    return head, lambda row: told(row.get(name), form)


def us(name: str = "", head: str = "", form: str = ".1f") -> Column:
    """The median; its head is the contender's name."""
    return head or name, lambda row: told(row["us"].get(name or row["who"]), form)


def least(head: str = "least", form: str = ".2f") -> Column:
    """The line's least round."""
    return head, lambda row: format(min(row["rounds"][row["who"]]), form)


def error(name: str = "", head: str = "error", form: str = ".1e") -> Column:
    """A contender's error."""
    return head, lambda row: told(row["error"].get(name or row["who"]), form)


def ratio(peer: str, name: str = "", head: str = "ratio") -> Column:
    """The peer's time over a contender's, of medians."""

    def cell(row: Row) -> str:
        theirs, ours = row["us"].get(peer), row["us"].get(name or row["who"])
        return told(theirs and ours and theirs / ours, ".2f")

    return head, cell


def by_rounds(row: Row, peer: str, name: str) -> float | None:
    """The peer's time over a contender's: the median of the rounds', where both see one card."""
    theirs, ours = row["rounds"].get(peer), row["rounds"].get(name)
    return theirs and ours and median(b / a for a, b in zip(ours, theirs, strict=True))


def speed(peer: str, name: str, head: str = "ratio") -> Column:
    """The ratio by rounds."""
    return head, lambda row: told(by_rounds(row, peer, name), ".3f")


def spread(name: str, head: str = "") -> Column:
    """Median and middle half of the rounds."""

    def cell(row: Row) -> str:
        low, _, high = quantiles(row["rounds"].get(name, (0, 0)), n=4)
        return f"{median(row['rounds'][name]):.1f} ({low:.1f}–{high:.1f})" if high else NONE

    return head or f"{name} µs", cell


def met(peer: str, name: str, slack: float = 0.02, aim: str = "gate") -> Column:
    """The ratio that is aimed at, a fact, and the verdict; less than ``slack`` below it is met."""

    def cell(row: Row) -> str:
        relative, gate = by_rounds(row, peer, name), row[aim]
        if relative is None or not gate:
            return NONE
        return f"{gate} {'met' if relative >= (1 - slack) * gate else 'missed'}"

    return "gate", cell
