"""Checks an installation of snapmla, names a model's kernels, repeats a dumped call."""

from __future__ import annotations

import typer

from snapmla_cli import info, needs, repro, selfcheck

# A package of its own, which imports torch and snapmla only when a command runs: ``--help`` takes
# half a second, and ``import torch`` takes three.
app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)
app.command("info")(info.info_command)
app.command("selfcheck")(selfcheck.selfcheck_command)
app.command("needs")(needs.needs_command)
app.command("repro")(repro.repro_command)
