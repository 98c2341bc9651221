"""Old against new over several runs: ``python -m profiles.compare RUN.json RUN.json RUN.json``.

Each run timed both contenders in turn on the same data (``--backends snapmla,snapmla@DIR``).  A row
counts as slower if the median over the runs of new time / old time is above 1 + ``--allowed``.
Rows whose arguments the old contender refuses are no slower; the page names them.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from codegen.artifacts import write_atomic
from profiles.report import counts, geomean
from profiles.shapes import is_decode

Report = dict[str, Any]


def refused(reports: list[Report], old: str) -> list[str]:
    """The shapes that ``old`` takes in none of the runs: their arguments are refused."""

    def says_no(row: dict[str, Any]) -> bool:
        failed = row["backend"] == old and row.get("status") == "failed"
        return failed and row.get("note", "").startswith("ValueError: ")

    each = [[row["shape"] for row in report["rows"] if says_no(row)] for report in reports]
    return [shape for shape in each[0] if all(shape in other for other in each)]


def ratios(reports: list[Report], old: str, new: str) -> dict[str, list[float]]:
    """Shape -> new time / old time, one a run, of the rows that both ran and passed.

    Raises:
        ValueError: a run lacks a contender, or a row of it did not pass, but those that ``old``
            refuses.
    """
    left_out = refused(reports, old)
    found: dict[str, list[float]] = {}
    for number, report in enumerate(reports, 1):
        times: dict[str, dict[str, float]] = {}
        for row in report["rows"]:
            if row["backend"] not in (old, new) or not is_decode(row["op"]):
                continue
            if row["shape"] in left_out and row["backend"] == old:
                continue
            if not counts(row):
                what = f"{row['shape']}, {row['backend']}: {row.get('status')}"
                raise ValueError(f"run {number}: {what}: {row.get('note', '')}")
            times.setdefault(row["shape"], {})[row["backend"]] = row["us"]
        for shape in left_out:
            times.pop(shape, None)
        missing = [s for s, both in times.items() if len(both) < 2]
        if missing or not times:
            raise ValueError(f"run {number}: {old} and {new} not both in {missing or 'any row'}")
        for shape, both in times.items():
            found.setdefault(shape, []).append(both[new] / both[old])
    short = [s for s, values in found.items() if len(values) != len(reports)]
    if short:
        raise ValueError(f"not in every run: {', '.join(short)}")
    return found


def _head(report: Report, old: str, new: str) -> list[str]:
    kernels = {row["backend"]: row.get("kernel", "") for row in report["rows"]}
    machine = report["machine"]
    named = ("gpu", "driver", "power_limit_w", "cuda", "torch", "python")
    return [
        f"- {', '.join(f'{k} {machine[k]}' for k in named if machine.get(k) is not None)}",
        f"- new: `{new}`, commit {report['commit']}",
        f"- old: `{old}`, {kernels.get(old, '').rpartition(', ')[2]}",
    ]


def page(reports: list[Report], old: str, new: str, allowed: float) -> tuple[str, list[str]]:
    """(markdown, shapes that are slower)."""
    found = ratios(reports, old, new)
    medians = {shape: statistics.median(values) for shape, values in found.items()}
    slower = [shape for shape, ratio in medians.items() if ratio > 1 + allowed]
    lines = ["# Old against new", "", f"`{reports[0]['command']}`, {len(reports)} runs", ""]
    lines += _head(reports[0], old, new)
    runs = [f"run {i + 1}" for i in range(len(reports))]
    lines += ["", f"| new time / old time | {' | '.join(runs)} | median |"]
    lines += ["|---" * (len(runs) + 2) + "|"]
    for shape, values in found.items():
        cells = " | ".join(f"{v:.3f}" for v in values)
        mark = " slower" if shape in slower else ""
        lines.append(f"| {shape} | {cells} | {medians[shape]:.3f}{mark} |")
    verdict = f"{len(slower)} of {len(found)} rows slower by more than {allowed:.0%}"
    total = f"geometric mean of the medians {geomean(list(medians.values())):.3f}"
    lines += ["", f"{verdict}; {total}."]
    if left_out := refused(reports, old):
        lines += ["", f"Not taken by the old one: {', '.join(left_out)}."]
    return "\n".join([*lines, ""]), slower


def main(
    reports: Annotated[list[Path], typer.Argument(help="JSON of runs of profiles.bench.")],
    old: Annotated[str, typer.Option(help="Contender that was there before.")],
    new: Annotated[str, typer.Option(help="Contender that came.")] = "snapmla",
    allowed: Annotated[float, typer.Option(help="Slower by so much is no difference.")] = 0.02,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write.")] = None,
) -> None:
    """Prints the ratios of every row and run; exit code 1 if a row became slower."""
    try:
        text, slower = page([json.loads(p.read_text()) for p in reports], old, new, allowed)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(text)
    if out is not None:
        write_atomic(out, text)
    if slower:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
