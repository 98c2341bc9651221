"""Commands of the engine study.

python -m profiles.engine bring                pack vLLM for a GPU machine: build/vllm
python -m profiles.engine accuracy|speed       run on a GPU, or go on; exit code 3: one failed
python -m profiles.engine gates                the acceptance, from the committed JSON
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from codegen.artifacts import ROOT, write_atomic
from profiles.engine import bring as bringing
from profiles.engine import gates, study
from profiles.engine.bring import RELEASE

WORK = ROOT / "build" / "engine"
RESULTS = ROOT / "profiles" / "results" / "engine"

app = typer.Typer(add_completion=False, help="vLLM with the plugin (docs/integration.md).",
                  no_args_is_help=True)  # fmt: skip
console = Console(
    width=None if Console().is_terminal else 140, highlight=False, markup=False, emoji=False
)

Work = Annotated[Path, typer.Option(help="models, logs, log-probabilities")]
Out = Annotated[Path, typer.Option(help="JSON and page")]
Limit = Annotated[float, typer.Option(help="seconds that engines may take")]


@app.command("bring")
def bring(to: Annotated[Path, typer.Option(help="folder")] = ROOT / "build" / "vllm") -> None:
    """Download vLLM, keep what an sm_90 GPU needs of it, and the wheels that it imports."""
    console.print(f"vLLM {RELEASE}")
    bringing.bring(to)


def finish(part: str, data: dict[str, Any], failed: list[str], out: Path) -> None:
    """Writes what was found, and says what failed."""
    if data:
        result = {"part": part, "data": data} | study.circumstances()
        write_atomic(out / f"{part}.json", json.dumps(result, separators=(",", ":")) + "\n")
        report(out)
    for each in failed:
        console.print(each)
    raise typer.Exit(3 if failed else 0)


@app.command()
def accuracy(work: Work = WORK, out: Out = RESULTS, limit: Limit = 400.0) -> None:
    """Log-probabilities of engines against the model in torch."""
    study.prepare(work)
    failed = study.run(study.accuracy_cases(work), work, limit)
    base = (work / f"{study.BASE}.pt").exists()
    finish("accuracy", study.accuracy(work) if base else {}, failed, out)


@app.command()
def speed(work: Work = WORK, out: Out = RESULTS, limit: Limit = 500.0) -> None:
    """Times of decode steps."""
    study.prepare(work)
    failed = study.run(study.speed_cases(work), work, limit)
    finish("speed", study.speed(work), failed, out)


def read(out: Path, part: str) -> dict[str, Any]:
    path = out / f"{part}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def report(out: Path) -> list[gates.Gate]:
    """Writes ``engine.md`` and prints the gates."""
    results = {part: read(out, part) for part in ("accuracy", "speed")}
    header = [
        f"- {part}: `{r['command']}:{part}`, commit {r['commit']}, {r['time']}, {r['gpu']}, "
        f"vLLM {r['vllm']}, torch {r['torch']}, Python {r['python']}"
        for part, r in results.items()
        if r
    ]
    data = [r.get("data", {}) for r in results.values()]
    write_atomic(out / "engine.md", gates.page(header, *data))
    found = gates.gates(*data)
    for gate in found:
        console.print(f"{gate.verdict:13} {gate.name}: {gate.claim}")
        for figure in gate.figures:
            console.print(f"              {figure}")
    return found


@app.command("gates")
def judge(out: Out = RESULTS) -> None:
    """The acceptance, from the JSON; exit code 1 if a gate fails."""
    raise typer.Exit(1 if any(gate.passed is False for gate in report(out)) else 0)


if __name__ == "__main__":
    app()
