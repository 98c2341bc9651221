"""``snapmla selfcheck``: the smallest problem of each op that has an installed variant."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from dsl_kernels.families import UNTESTED
from snapmla_cli.info import WARNING
from snapmla_cli.printing import console

if TYPE_CHECKING:
    from snapmla.tools.installed import Outcome

WIDTH = 140  # of the table in a file


def selfcheck_command(
    software: Annotated[
        bool, typer.Option("--software", help="on the software GPU, even if there is a GPU")
    ] = False,
) -> None:
    """Run the smallest problem of each op and compare the results with fp64.

    Takes seconds on a GPU, under a minute without one. Nothing is compiled: one installed variant
    of each op runs. Exit status 1 if a result is wrong, 2 if nothing could be run.
    """
    import torch

    from snapmla.errors import SnapMLAError
    from snapmla.runtime import variants
    from snapmla.tools import installed

    started = time.perf_counter()
    where = "cuda" if torch.cuda.is_available() and not software else "cpu"
    try:
        arch = variants.arch_of(torch.device(where))
    except (SnapMLAError, ValueError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    place = torch.cuda.get_device_name() if where == "cuda" else "the software GPU"
    count, outcomes = installed.check_all(arch, where)
    if not count:
        what = "library" if where == "cuda" else "PTX"
        print(
            f"no variant for {arch} with {what} is installed, so nothing was run on {place}: "
            "`snapmla info` says what is there and what is missing", file=sys.stderr,
        )  # fmt: skip
        raise typer.Exit(2)
    found: list[Outcome] = []
    with _progress() as bar:
        task = bar.add_task(place, total=count)
        for outcome in outcomes:
            found.append(outcome)
            bar.update(task, advance=1, description=f"{place}: {outcome.spec.op}")
    _show(found)
    wrong = sum(not outcome.result.passed for outcome in found)
    verdict = f"{count - wrong} of {count} ops are right on {place}, {arch}"
    verdict += f" ({WARNING})" if arch in UNTESTED and where == "cpu" else ""
    console.print(f"{verdict}; {time.perf_counter() - started:.0f} s")
    raise typer.Exit(1 if wrong else 0)


def _progress() -> Progress:
    """A bar on stderr, where that is a terminal; it goes when all is done."""
    shown = Console(stderr=True, markup=False, emoji=False)
    words = TextColumn("{task.description}", markup=False)
    return Progress(words, BarColumn(), MofNCompleteColumn(), console=shown, transient=True)


def _show(found: list[Outcome]) -> None:
    """The table, a line an op, then each failure whole."""
    table = Table(box=None, pad_edge=False)
    for name in ("op", "variant", "result"):
        table.add_column(name, no_wrap=True)
    table.add_column("figures", no_wrap=True, overflow="ellipsis")
    table.add_column("s", justify="right")
    for outcome in found:
        result = outcome.result
        figures = result.summary.partition("\n")[0]
        verdict = "right" if result.passed else "FAILED"
        seconds = f"{outcome.seconds:.1f}"
        table.add_row(outcome.spec.op, outcome.spec.name, verdict, figures, seconds)
    Console(width=None if console.is_terminal else WIDTH, markup=False, emoji=False).print(table)
    for outcome in found:
        if not outcome.result.passed:
            console.print(f"{outcome.spec.name} FAILED: {outcome.result.summary}")
