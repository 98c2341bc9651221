"""``python -m softgpu``: coverage of PTX forms.

Compiled variants are run, checked, mutated and costed by ``python -m snapmla.testing``, which has
their inputs and references.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .coverage import coverage as coverage_of

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)


@app.callback()
def _commands() -> None:
    """Makes ``coverage`` a word of the command line, though it is the only command."""


@app.command()
def coverage(
    ptx: Annotated[
        list[Path], typer.Argument(exists=True, help=".ptx files, or directories of them")
    ],
    every: Annotated[bool, typer.Option("--all", help="list modelled forms too")] = False,
) -> None:
    """List PTX opcode forms and those that no handler models."""
    files = [f for p in ptx for f in (sorted(p.glob("*.ptx")) if p.is_dir() else [p])]
    if not files:
        print(f"no .ptx file in {', '.join(map(str, ptx))}", file=sys.stderr)
        raise typer.Exit(2)
    result = coverage_of(files)
    for opcode, count in sorted(result.forms.items()):
        mark = "MISSING" if opcode in result.missing else ""
        if every or mark:
            print(f"{count:8d}  {opcode}  {mark}".rstrip())
    for places in result.missing.values():
        for place in places[:3]:
            print(f"  {place}")
    print(
        f"{len(files)} files, {sum(result.forms.values())} instructions, "
        f"{len(result.forms)} forms, {len(result.missing)} not modelled"
    )
    raise typer.Exit(1 if result.missing else 0)


def main(argv: list[str] | None = None) -> int:
    """The exit status of a command line."""
    try:
        app(argv, prog_name="softgpu")
    except SystemExit as leave:
        return int(leave.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
