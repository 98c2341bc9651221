"""Puts a card's measured ceilings into ``snapmla/data/cards.json``, from a committed table of it.

    python -m profiles.card_data h100-table

Ceilings are the run's probes; ``load_mhz`` is the median SM clock of our decode rows.  The card
must be on file already, with what a datasheet says: SMs, boost clock, nominal rate.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from codegen.artifacts import write_atomic
from profiles.report import counts
from profiles.roofline import card_by_name
from profiles.shapes import is_decode

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "profiles" / "results"
CARDS = ROOT / "snapmla" / "data" / "cards.json"
LINES = (
    ("name", "match", "arch", "sms", "boost_mhz"),
    ("load_mhz", "nominal_bf16_tflops"),
    ("read_gbs", "bf16_tflops", "fp8_tflops", "source"),
)  # how an entry is broken into lines


def measured(report: dict[str, Any]) -> dict[str, Any]:
    """Figures of a card that a table measured, named as in ``cards.json``.

    Raises:
        ValueError: the run probed no ceilings, or timed no decode of ours.
    """
    probe = report["ceilings"]["probe"]
    clocks = [
        row["mhz"]
        for row in report["rows"]
        if is_decode(row["op"]) and not row["peer"] and counts(row) and row.get("mhz")
    ]
    if not probe or not clocks:
        raise ValueError(f"{report['name']}: no probed ceilings or no clocks of ours in it")
    rates = {k: float(round(probe[k])) for k in ("read_gbs", "bf16_tflops", "fp8_tflops")}
    return {"load_mhz": round(statistics.median(clocks)), **rates, "source": "measured"}


def updated(data: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """``cards.json``'s content with the report's card measured."""
    name = card_by_name(report["machine"]["gpu"]).name
    cards = [{**c, **measured(report)} if c["name"] == name else c for c in data["cards"]]
    return {**data, "cards": cards}


def as_text(data: dict[str, Any]) -> str:
    """The file: an entry is three lines, so that a diff shows what changed."""
    entries = []
    for card in data["cards"]:
        lines = [", ".join(f"{json.dumps(k)}: {json.dumps(card[k])}" for k in ks) for ks in LINES]
        entries.append("    {\n      " + ",\n      ".join(lines) + "\n    }")
    about = json.dumps(data["about"])
    return f'{{\n  "about": {about},\n  "cards": [\n' + ",\n".join(entries) + "\n  ]\n}\n"


def main(table: Annotated[str, typer.Argument(help="A table of profiles/results.")]) -> None:
    """Rewrites the card's entry."""
    try:
        report = json.loads((RESULTS / f"{table}.json").read_text())
        data = updated(json.loads(CARDS.read_text()), report)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    write_atomic(CARDS, as_text(data))
    typer.echo(f"{CARDS.name}: {report['machine']['gpu']} as {table} measured it")


if __name__ == "__main__":
    typer.run(main)
