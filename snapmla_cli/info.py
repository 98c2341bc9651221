"""``snapmla info``: the report of ``snapmla.tools.info`` as tables."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from snapmla_cli.printing import console

if TYPE_CHECKING:
    from snapmla.tools.info import Info

WARNING = "untested on hardware"


def info_command(
    as_json: Annotated[bool, typer.Option("--json", help="the same as JSON")] = False,
) -> None:
    """Card, driver, versions, variants, and what is missing.

    Exit status 1 if a GPU that is here cannot decode or, without a GPU, neither can the CPU.
    """
    from snapmla.tools import info

    try:
        found = info.collect()
    except ValueError as error:  # a variable without meaning
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    if as_json:
        print(json.dumps(dataclasses.asdict(found) | {"good": found.good}, indent=1))
    else:
        _show(found)
    raise typer.Exit(0 if found.good else 1)


def _show(found: Info) -> None:
    """The report as tables."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    package, versions = found.package, found.versions
    commit = f", commit {package['commit'][:12]}" if package["commit"] else ""
    table.add_row("snapmla", f"{package['version']}{commit}, {package['kind']}")
    table.add_row("", package["directory"])
    for name, version in versions.items():
        table.add_row(name, version or "not installed")
    table.add_row("driver", f"CUDA {found.driver}" if found.driver else "none")
    for card, decodes in zip(found.cards, found.decodes, strict=True):
        verdict = "decodes" if decodes else "CANNOT DECODE"
        verdict += f", {WARNING}" if card.arch in found.untested else ""
        table.add_row("GPU", f"{card.name}, {card.capability}: {verdict}")
    if not found.cards:
        runs = "runs CPU tensors" if found.software_gpu else "cannot run here"
        table.add_row("GPU", f"none; the software GPU {runs}")
    for name, value in found.settings.items():
        table.add_row(name, value)
    console.print(table)
    console.print("\nvariants, in the order of the search:")
    for folder in found.folders:
        total = sum(folder.variants.values())
        there = f"{total} variants" if folder.refused is None else "not used"
        console.print(f"  {folder.what}: {there}\n    {folder.path}")
        for name, count in sorted(folder.variants.items()):
            console.print(f"      {name:28} {count}")
    for arch in found.untested:
        console.print(f"\n{arch}: {WARNING}; its kernels ran on the software GPU only")
    if found.missing:
        console.print("\nmissing:")
    for text in found.missing:
        console.print(f"  {text}")
    if found.absent:
        console.print("\nnot built here, so that calls of them are refused:")
    for text in found.absent:
        console.print(f"  {text}")
    console.print(f"\nnext: {found.next}")
