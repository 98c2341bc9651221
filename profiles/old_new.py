"""An older checkout beside this one, table by table, in turn on one card:

    python -m profiles.old_new --old build/checkouts/base --out profiles/results
    python -m profiles.old_new --old build/checkouts/base --rows dense,topk --repeats 61
    python -m profiles.old_new --witness

The first two write ``old-new-<card>.md``: of each shape of the tables of dense and sparse decode,
prefill and top-k the old time over the new one (above 1: the new build is faster), the median over
rounds in which both are replayed one after the other.  Either side is what a user gets by default:
its own plans, host code and kernels, ``snapmla@DIR`` (``profiles.checkouts``) in the same process,
over the very same tensors; so a card whose clock or power drifts is the same for both.  Results are
compared before anything is timed.

``--witness`` writes ``witness-<card>.md``: ragged decode with and without the arguments by which a
call sees that its plan is of other queries, of this checkout alone.

A row that fails, hangs or takes the device down costs that row; exit code 1 if any did, or if a
gate is missed.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import typer

from codegen.artifacts import write_atomic
from profiles import page, supervise
from profiles.report import geomean

NEW, WITNESS = "snapmla", "snapmla:witness"
MEAN_GATE, LEAST_GATE, TOLD = 0.995, 0.98, 0.99  # of old / new
LONG_US, SHARE_GATE, SHORT_GATE_US = 50.0, 1.005, 0.2  # of with / without, from where on
WORKER = (sys.executable, "-m", "profiles.old_new_worker")
TIMING: dict[str, float] = {"graph_ms": 8.0, "warmup_rounds": 2, "cold_iters": 0, "host_iters": 0}


@dataclass(frozen=True)
class Row:
    """One shape, timed on both sides.

    Attributes:
        first, second: microseconds a call, medians: old and new, or without and with a witness.
        ratio: median of the rounds' first / second.
        low, high: quartiles of these.
        same: whether both gave the same bits.
        kernels: what either planned.
    """

    label: str
    first: float
    second: float
    ratio: float
    low: float
    high: float
    same: bool
    kernels: tuple[str, str]


def row_of(label: str, found: Sequence[Mapping[str, Any]]) -> Row:
    """A row out of a worker's two.

    Raises:
        ValueError: there are no times, or results differ.
    """
    for side in found:
        if side.get("status") != "ok":
            off = side.get("difference", "no number")
            note = side.get("note") or f"results differ: relative L2 {off}"
            raise ValueError(f"{side.get('status')}: {note}")
    first, second = (side["times"] for side in found)
    each = [a / b for a, b in zip(first, second, strict=True)]
    low, _, high = quantiles(each, n=4) if len(each) > 1 else each * 3
    return Row(
        label, median(first), median(second), median(each), low, high,
        found[1]["difference"] == 0, (found[0]["kernel"], found[1]["kernel"]),
    )  # fmt: skip


@dataclass
class Tables:
    """Rows by table, and what went wrong.

    Attributes:
        failed: (label, reason).
        missing: labels that the run did not come to.
    """

    rows: dict[str, list[Row]]
    failed: list[tuple[str, str]]
    missing: list[str]

    @classmethod
    def of(cls, jobs: Mapping[str, Sequence[Mapping[str, Any]]], asked: Sequence[str]) -> Tables:
        """Of a run's jobs, whose labels are ``table:shape``."""
        found = cls({}, [], [label for label in asked if label not in jobs])
        for label, sides in jobs.items():
            table, _, shape = label.partition(":")
            try:
                row = row_of(shape, sides)
                found.rows.setdefault(table, []).append(row)
            except ValueError as error:
                found.failed.append((label, str(error)))
        return found


def verdict(rows: Sequence[Row]) -> tuple[float, Row, bool]:
    """(geometric mean, least row, whether both gates are met) of a table."""
    mean, least = geomean([row.ratio for row in rows]), min(rows, key=lambda row: row.ratio)
    return mean, least, mean >= MEAN_GATE and least.ratio >= LEAST_GATE


def summary(found: Tables, titles: Mapping[str, str]) -> list[str]:
    """A line a table: how it stands against the gates, and each shape below ``TOLD``."""
    lines = [
        f"| table | rows | geometric mean old / new | least | below {TOLD} | gates |",
        "|---" * 6 + "|",
    ]
    for name, rows in found.rows.items():
        mean, least, met = verdict(rows)
        slow = ", ".join(f"{row.label} {row.ratio:.3f}" for row in rows if row.ratio < TOLD)
        lines.append(
            f"| {titles[name]} | {len(rows)} | {mean:.4f} | {least.label} {least.ratio:.3f} | "
            f"{slow or 'none'} | {'met' if met else 'missed'} |"
        )
    return lines


def kernels_of(row: Row) -> str:
    """What was planned: once, if both sides planned alike."""
    first, second = row.kernels
    return second if first == second else f"{first} → {second}"


def table(rows: Sequence[Row]) -> list[str]:
    """All shapes of a table."""
    lines = [
        "| shape | old µs | new µs | old / new | middle half | bits | plan |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        cells = (
            row.label, f"{row.first:.2f}", f"{row.second:.2f}", f"{row.ratio:.3f}",
            f"{row.low:.3f}–{row.high:.3f}", "same" if row.same else "others", kernels_of(row),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def within(row: Row) -> bool:
    """True if a witness costs no more than it may."""
    if row.first >= LONG_US:
        return 1 / row.ratio <= SHARE_GATE
    return row.second - row.first <= SHORT_GATE_US


def witness_table(rows: Sequence[Row]) -> list[str]:
    """Ragged decode without a witness and with one."""
    lines = [
        "| shape | without µs | with µs | with / without | with - without µs | bits | gate |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        cells = (
            row.label, f"{row.first:.2f}", f"{row.second:.2f}", f"{1 / row.ratio:.4f}",
            f"{row.second - row.first:+.2f}", "same" if row.same else "others",
            "met" if within(row) else "missed",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def short(found: Tables, titles: Mapping[str, str], witness: bool) -> list[str]:
    """What is printed of tables that are done."""
    if not witness:
        return summary(found, titles)[2:]
    return [line for rows in found.rows.values() for line in witness_table(rows)[2:]]


def trouble(found: Tables) -> list[str]:
    """Rows without a figure."""
    lines = [f"- {label}: {reason}" for label, reason in found.failed]
    if found.missing:
        lines.append(f"- not run: {', '.join(found.missing)}")
    return ["No figure:", "", *lines] if lines else []


def written(found: Tables, titles: Mapping[str, str], witness: bool) -> list[str]:
    """A page behind its head."""
    lines: list[str] = []
    if witness:
        for name, rows in found.rows.items():
            lines += [f"## {titles[name]}", "", *witness_table(rows), ""]
    else:
        lines += [*summary(found, titles), ""]
        for name, rows in found.rows.items():
            lines += [f"## {titles[name]}", "", *table(rows), ""]
    return lines + trouble(found)


def good(found: Tables, witness: bool) -> bool:
    """True if every row has a figure and every gate is met."""
    if found.failed or found.missing or not found.rows:
        return False
    if witness:
        return all(within(row) for rows in found.rows.values() for row in rows)
    return all(verdict(rows)[2] for rows in found.rows.values())


def card(facts: Mapping[str, Any]) -> str:
    """``h100`` of an NVIDIA H100 80GB HBM3; ``none`` without a card."""
    found = re.search(r"[A-Z]+\d+\w*", str(facts.get("gpu", "")))
    return found[0].lower() if found else "none"


def asked_for(rows: str, tables: Mapping[str, Any], tiny: bool) -> list[str]:
    """Labels ``table:shape`` of the tables and single rows that are named.

    Args:
        rows: names of tables or ``table:shape``, by commas or +; empty: all.
        tiny: shapes for the software GPU.

    Raises:
        ValueError: a name that is none.
    """
    labels: list[str] = []
    for word in filter(None, re.split(r"[,+]", rows)) if rows else tables:
        name, _, shape = word.partition(":")
        if name not in tables:
            raise ValueError(f"--rows: expected some of {', '.join(tables)}; got {name!r}")
        shapes = tables[name].tiny if tiny else tables[name].shapes
        if shape and shape not in shapes:
            raise ValueError(f"--rows: {name} has {', '.join(shapes)}; got {shape!r}")
        labels += [f"{name}:{each}" for each in ([shape] if shape else shapes)]
    return list(dict.fromkeys(labels))


def head(sides: Sequence[str], facts: Mapping[str, Any], repeats: int) -> list[str]:
    """The head of the page; old and new by their commits."""
    from profiles import checkouts

    witness = sides[1] == WITNESS
    notes = []
    if not witness:
        folder = sides[0].partition("@")[2]
        notes.append(f"old: `{sides[0]}`, commit {checkouts.checkout(folder).commit}; new: this")
    notes.append(
        f"µs a call, median of {repeats} rounds of about {TIMING['graph_ms']:.0f} ms a side in "
        "CUDA graphs, in turn; ratios: the median of the rounds' own, and their middle half"
    )
    if witness:
        notes.append(
            f"gates: from {LONG_US:.0f} µs on at most {SHARE_GATE - 1:.1%} longer, below it "
            f"{SHORT_GATE_US} µs"
        )
    else:
        notes.append(
            f"gates: geometric mean at least {MEAN_GATE}, no row below {LEAST_GATE}; bits: whether "
            "both sides give the same"
        )
    title = "Ragged decode with and without a witness" if witness else "Old and new in turn"
    return page.head(title, "profiles.old_new", page.told(facts, page.FACTS), *notes)


def main(
    old: Annotated[Path | None, typer.Option(help="The older checkout, built.")] = None,
    rows: Annotated[str, typer.Option(help="Tables, or table:shape, by commas or +.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of a row.")] = 31,
    limit: Annotated[float, typer.Option(help="Seconds of all rows together.")] = 540.0,
    witness: Annotated[bool, typer.Option(help="What a witness costs, instead.")] = False,
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    device: Annotated[str, typer.Option(help="cpu: tiny shapes on the software GPU.")] = "cuda",
) -> None:
    """Times the rows and writes the page."""
    from profiles import old_new_rows

    if (old is None) != witness:
        raise typer.BadParameter("expected --old DIR, or --witness, which has no old side")
    tables = old_new_rows.WITNESSED if witness else old_new_rows.TABLES
    try:
        labels = asked_for(rows, tables, tiny=device == "cpu")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    sides = [NEW, WITNESS] if witness else [f"snapmla@{old}", NEW]
    titles = {name: each.title for name, each in tables.items()}
    timing = {**TIMING, "rounds": repeats} | ({"warmup_rounds": 0} if device == "cpu" else {})
    config = supervise.RunConfig(shapes=labels, backends=sides, device=device, timing=timing)
    told: set[str] = set()

    def progress(outcome: supervise.Outcome, label: str) -> None:
        found = Tables.of(outcome.jobs, labels)
        name = f"{'witness' if witness else 'old-new'}-{card(outcome.machine)}"
        lines = [*head(sides, outcome.machine, repeats), *written(found, titles, witness)]
        write_atomic(out / f"{name}.md", "\n".join(lines) + "\n")
        done = label.partition(":")[0]
        if done not in told and not any(m.startswith(f"{done}:") for m in found.missing):
            told.add(done)
            one = dataclasses.replace(
                found, rows={k: v for k, v in found.rows.items() if k == done}
            )
            typer.echo("\n".join(short(one, titles, witness)))

    limits = supervise.Limits(quiet=90.0 if device == "cuda" else limit, total=limit)
    outcome = supervise.run(config, limits, out / "old-new.log", progress, WORKER)
    raw = out / "old-new" / ("witness.json" if witness else "old-new.json")
    raw.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(raw, json.dumps(dataclasses.asdict(outcome)))
    found = Tables.of(outcome.jobs, labels)
    typer.echo("\n".join([*trouble(found), *outcome.notes]))
    if not good(found, witness):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
