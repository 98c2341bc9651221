"""``snapmla repro``: a dumped call once more."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snapmla_cli.printing import console

if TYPE_CHECKING:
    from snapmla.tools.repro import Outcome


def repro_command(
    file: Annotated[Path, typer.Argument(help="what SNAPMLA_DUMP wrote")],
    software: Annotated[
        bool, typer.Option("--software", help="on the software GPU, even if there is a GPU")
    ] = False,
    reference: Annotated[bool, typer.Option(help="compare a decode with fp64")] = True,
    save: Annotated[Path | None, typer.Option(help="write the results there (torch.save)")] = None,
) -> None:
    """Run a dumped call again and say what is wrong with it.

    Exit status 1 if it fails, if the hazard check of the software GPU finds anything, or if results
    differ from those in the file or from the reference; 2 if it cannot be run.
    """
    import torch

    from snapmla.errors import SnapMLAError
    from snapmla.runtime import dump
    from snapmla.tools import repro

    where = "cuda" if torch.cuda.is_available() and not software else "cpu"
    try:
        call, outcome = repro.repeat(file, where, reference=reference)
    except (dump.DumpError, SnapMLAError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    console.print(f"{call.variant}, {', '.join(f'{k} {v}' for k, v in call.facts.items())}")
    for text in call.notes:
        console.print(text)
    if call.error:
        console.print(f"then: {call.error.strip().splitlines()[-1]}")
    place = "the GPU" if where == "cuda" else "the software GPU"
    console.print(f"now, on {place}: {_verdict(outcome)}")
    for text in (*outcome.hazards, *outcome.differs):
        console.print(text)
    if outcome.compared and not outcome.differs:
        console.print("results: the bits in the file")
    if outcome.reference is not None:
        verdict = "right" if outcome.right else "WRONG"
        console.print(f"against the reference: {verdict}, {outcome.reference}")
    if save is not None:
        torch.save({name: value.cpu() for name, value in outcome.results.items()}, save)
    raise typer.Exit(0 if outcome.good else 1)


def _verdict(outcome: Outcome) -> str:
    """Verdict on the call's end, with the number of NaN among results."""
    if outcome.error is not None:
        return f"{type(outcome.error).__name__}: {outcome.error}"
    floats = {k: v for k, v in outcome.results.items() if v.is_floating_point()}
    nans = {name: int(value.isnan().sum()) for name, value in floats.items()}
    bad = [f"{count} NaN in {name}" for name, count in nans.items() if count]
    return f"returned{', ' + ', '.join(bad) if bad else ''}, {len(outcome.hazards)} hazards"
