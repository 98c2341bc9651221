"""The benchmark: ``python -m profiles.bench h200-table --backends snapmla,flashmla_fp8``.

A name is that of a preset, or of a table of ``profiles.tables``, which has contenders, gates and
columns of its own (``profiles.table``): ``python -m profiles.bench sparse_cost --peers DIR``.  An
option that a table or a preset does not take is refused.

Every timed row is checked against float64 on the contender's own inputs; contenders of one row are
timed in turn in one process; ceilings are probed in the same run.  See
``profiles/results/README.md`` for what the figures mean, ``profiles.contenders`` for the names of
backends, ``profiles.shapes`` for shapes and presets.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from profiles import report as reports
from profiles import roofline, shapes, supervise, tables
from profiles.device import require_cuda
from profiles.page import command_line, commit
from profiles.roofline import FORMATS, Card, Ceilings, Energies
from profiles.shapes import DecodeShape, Shape
from profiles.supervise import RunConfig

DEFAULT_BACKENDS = "snapmla,flashmla_bf16,flashmla_fp8,torch"
CPU_TIMING: dict[str, float] = {
    "rounds": 1,
    "warmup_rounds": 0,
    "cold_iters": 0,
    "host_iters": 0,
    "rotate_bytes": 1,
}
OF_TABLES = ("first", "only", "option", "render")  # options that presets do not take
OF_ALL_TABLES = ("first", "only", "time_limit", "out", "render")  # beside what each declares
app = typer.Typer(add_completion=False, help=__doc__)


def select(presets: list[str], labels: list[str]) -> list[Shape]:
    """Shapes of the presets, then the single ones, without repeats.

    Raises:
        ValueError: an unknown preset or shape, or nothing asked for.
    """
    chosen = [s for p in presets for s in shapes.preset(p)] + [shapes.parse(s) for s in labels]
    if not chosen:
        raise ValueError("nothing to run: give a preset or --shape")
    return list(dict.fromkeys(chosen))


def plan_lines(chosen: list[Shape], card: Card) -> list[str]:
    """Lines of a dry run: the rows that a run would time, with bytes, FLOP and roofs."""
    fmt = FORMATS["snapmla"]
    peak = card.ceilings.effective_tflops(fmt)
    lines = [
        f"{card.name}: read {card.ceilings.read_gbs:.0f} GB/s, effective peak {peak:.0f} TFLOP/s "
        f"({card.ceilings.source}), Eq. 7 peak {card.eq7_tflops:.0f}, ridge at "
        f"{roofline.ridge_rows(card.ceilings, fmt):.0f} rows",
        *roofline.dequant_lines(card),
        f"{'shape':34s} {'MB':>9s} {'GFLOP':>9s} {'roof us':>9s}",
    ]
    for shape in chosen:
        if isinstance(shape, DecodeShape):
            size, flops = shape.bytes(fmt), shape.flops
            roof = roofline.roof_us(size, flops, card.ceilings, fmt)
        else:
            size, flops = shape.bytes, 0.0
            roof = roofline.helper_us(size, flops, card.ceilings)
        lines.append(f"{shape.label:34s} {size / 1e6:9.2f} {flops / 1e9:9.2f} {roof:9.2f}")
    return lines


def make_report(name: str, job: RunConfig, outcome: supervise.Outcome) -> dict[str, Any]:
    """The report of what has been measured so far."""
    machine = outcome.machine
    try:
        card: Card | None = roofline.card_by_name(str(machine.get("gpu", "")))
    except ValueError:
        card = None
    best = outcome.ceilings.get("best")
    probe = Ceilings(**best) if best else None
    used = card.ceilings.raised_by(probe) if card else probe
    costs = outcome.power.get("best")
    energies = Energies(**costs) if costs else None
    rows = [
        reports.enrich(row, label, card, used, energies)
        for label, job_rows in outcome.jobs.items()
        for row in job_rows
    ]
    rows = reports.with_copy_fractions(rows)
    left = [s for s in job.shapes if s not in outcome.jobs]
    notes = [*outcome.notes, *outcome.ceilings.get("notes", []), *outcome.power.get("notes", [])]
    return {
        "name": name,
        "command": command_line(sys.argv[1:]),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine,
        "ceilings": {
            "on_file": asdict(card.ceilings) if card else None,
            "probe": asdict(probe) if probe else None,
            "used": asdict(used) if used else None,
            "probes": outcome.ceilings.get("probes", []),
        },
        "power": {"energies": costs, "probes": outcome.power.get("probes", [])},
        "dequant_model": roofline.dequant_lines(card) if card else [],
        "config": {**asdict(job), "peers": job.peers is not None},
        "notes": notes + ([f"not finished: {', '.join(left)}"] if left else []),
        "rows": rows,
        "summary": reports.summarise(rows),
    }


def _announce(outcome: supervise.Outcome, label: str) -> None:
    cells = []
    for row in outcome.jobs[label]:
        us = f"{row['us']:.1f}" if row.get("us") else "-"
        mark = "" if row.get("status") == "ok" else f" {row.get('status')}: {row.get('note')}"
        cells.append(f"{row['backend']} {us}{mark}")
    typer.echo(f"{label:30s} " + " | ".join(cells))


def _check_backends(names: list[str], peers: Path | None) -> None:
    from profiles import contenders

    for name in names:
        contender = contenders.make(name, peers)
        reason = contender.unavailable()
        if reason:
            typer.echo(f"{name}: rows will be skipped: {reason}")


def _values(words: list[str]) -> dict[str, str]:
    """Values of ``--set NAME=VALUE``, by name."""
    for word in words:
        if "=" not in word:
            raise ValueError(f"--set: expected NAME=VALUE, got {word!r}")
    return dict(word.split("=", 1) for word in words)


def refuse_others(
    context: typer.Context, who: str, takes: Collection[str], names: Collection[str] = ()
) -> None:
    """Refuses what stands on the command line and is not taken; the environment may set more.

    Args:
        who: begins the sentence.
        takes: names of parameters.
        names: that ``--set`` takes.

    Raises:
        ValueError: an option that is not taken, with a sentence that names those that are.
    """
    flags = {str(p.name): p.opts[0] for p in context.command.params if p.opts[0].startswith("-")}
    sources = {name: context.get_parameter_source(name) for name in flags}
    given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    wrong = [flags[name] for name in given if name not in takes and name != "option"]
    values = _values(context.params["option"] or [])
    wrong += [f"--set {name}" for name in values if name not in names]
    if wrong:
        taken = [flag for name, flag in flags.items() if name in takes]
        taken += [f"--set {name}=..." for name in names]
        raise ValueError(f"{who} does not take {', '.join(wrong)}; it takes {', '.join(taken)}")


def run_table(
    context: typer.Context, name: str, out: Path, peers: Path | None, again: Path | None,
    **which: Any,
) -> None:  # fmt: skip
    """Runs a table, or renders a record of it again.

    Raises:
        ValueError: an option that the table does not take, no GPU, or a contender that is wrong.
    """
    import torch

    from profiles import page, table

    one = tables.of(name)
    if again is not None:
        refuse_others(context, "the page of a record", ("render",))
        page.render(again, lambda rows: table.body(one, rows))
        return
    names = [word for word in one.takes if word != "peers"]
    refuse_others(context, f"the table {name}", {*OF_ALL_TABLES, *one.takes}, names)
    require_cuda()
    given = table.Run(
        torch.device("cuda"), peers=peers if "peers" in one.takes else None,
        options=_values(context.params["option"] or []),
    )  # fmt: skip
    rows = table.run(one, given, out, **which)
    if one.ours == () and any(row["wrong"] for row in rows):
        raise typer.Exit(1)


@app.command()
def bench(
    context: typer.Context,
    preset: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Presets: {', '.join(shapes.PRESETS)}; or a table: {', '.join(tables.NAMES)}."
        ),
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="A shape, such as b32_L16384_h64_q1.")
    ] = None,
    backends: Annotated[str, typer.Option(help="Decode contenders, by comma.")] = DEFAULT_BACKENDS,
    peers: Annotated[
        Path | None, typer.Option(envvar="SNAPMLA_PEERS", help="Folder of the peers' libraries.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("build/bench"),
    name: Annotated[str, typer.Option(help="Name of the results; the presets' by default.")] = "",
    device: Annotated[str, typer.Option(help="cuda, or cpu for the software GPU.")] = "cuda",
    dry_run: Annotated[bool, typer.Option(help="Print rows and roofs; run nothing.")] = False,
    card: Annotated[str, typer.Option(help="The card of a dry run.")] = "H200",
    probe: Annotated[bool, typer.Option(help="Measure the ceilings first.")] = True,
    power: Annotated[
        bool, typer.Option(help="Also run each row alone for 1/2 s: watts, energy, power roof.")
    ] = False,
    quick: Annotated[bool, typer.Option(help="Fewer rounds, a smaller probe.")] = False,
    mean: Annotated[float, typer.Option(help="Mean of the latents' channels.")] = 0.0,
    amplitude: Annotated[float, typer.Option(help="Log-normal spread of tokens.")] = 0.0,
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 15,
    graph_ms: Annotated[float, typer.Option(help="Length of one replay, ms.")] = 8.0,
    rotate_mb: Annotated[float, typer.Option(help="Buffers rotate over so much.")] = 1000.0,
    quiet_limit: Annotated[float, typer.Option(help="Seconds of silence that are a hang.")] = 120.0,
    time_limit: Annotated[float, typer.Option(help="Seconds for the whole run.")] = 1800.0,
    first: Annotated[int, typer.Option(help="Shapes of a table, the first ones.")] = 999,
    only: Annotated[str, typer.Option(help="Shapes of a table whose text has this.")] = "",
    option: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE; each table says which names.")
    ] = None,
    render: Annotated[Path | None, typer.Option(help="A table's record: its page anew.")] = None,
) -> None:
    """Times shapes x backends, checks every row, writes JSON and markdown."""
    try:
        if preset and preset[0] in tables.NAMES:
            if preset[1:]:
                raise ValueError("a table is run by itself: give its name alone")
            which = {"first": first, "only": only, "limit": time_limit}
            run_table(context, preset[0], out, peers, render, **which)
            return
        taken = {str(p.name) for p in context.command.params} - set(OF_TABLES)
        refuse_others(context, "a preset", taken)
        chosen = select(preset or [], shape or [])
        names = [b.strip() for b in backends.split(",") if b.strip()]
        if dry_run:
            typer.echo("\n".join(plan_lines(chosen, roofline.card_by_name(card))))
            return
        if device == "cuda":
            require_cuda()
        if peers is not None and not peers.is_dir():
            typer.echo(f"peers: no folder {peers}; rows of those backends will be skipped")
            peers = None
        _check_backends(names, peers)
    except ValueError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from None
    timing: dict[str, float] = {
        "rounds": 5 if quick else rounds,
        "graph_ms": graph_ms,
        "rotate_bytes": rotate_mb * 1e6,
    }
    job = RunConfig(
        shapes=[s.label for s in chosen],
        backends=names,
        device=device,
        peers=str(peers.resolve()) if peers else None,
        probe=probe and device == "cuda",
        quick=quick,
        power=power and device == "cuda",
        latents={"mean": mean, "amplitude": amplitude},
        timing=dict(CPU_TIMING) if device == "cpu" else timing,
    )
    title = name or "+".join(preset or []) or chosen[0].label

    def progress(outcome: supervise.Outcome, label: str) -> None:
        _announce(outcome, label)
        reports.save(make_report(title, job, outcome), out)

    limits = supervise.Limits(quiet_limit, time_limit)
    log = out / f"{title}.log"
    outcome = supervise.run(job, limits, log, progress)
    report = make_report(title, job, outcome)
    paths = reports.save(report, out)
    typer.echo("\n".join(["", *reports.short_table(report), *report["notes"]]))
    typer.echo(f"wrote {paths[0]} and {paths[1]}; the worker's output is in {log}")
    bad = [r for r in report["rows"] if r.get("status") in ("wrong", "failed") and not r["peer"]]
    if bad or set(job.shapes) - set(outcome.jobs):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
