"""Commands of the accuracy study.

python -m profiles.studies.fidelity rehearse            two small layers on the CPU, every part, ~2 minutes
python -m profiles.studies.fidelity all --limit 540     train three models and evaluate them; call again
                                                until it says that nothing is left
python -m profiles.studies.fidelity high                accuracy="high": layers and drift of one small model
python -m profiles.studies.fidelity gates               the acceptance, from the committed JSON
python -m profiles.studies.fidelity figures             docs/fidelity/*.svg, from the committed JSON
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from codegen.artifacts import ROOT, write_atomic
from profiles.device import require_cuda
from profiles.studies.fidelity import checkpoint, figures, gates, high
from profiles.studies.fidelity.config import RECIPES
from profiles.studies.fidelity.data import Corpus
from profiles.studies.fidelity.evaluate import EXPECTED, PARTS, evaluate
from profiles.studies.fidelity.study import SCOPES, Study, peers_folder
from profiles.studies.fidelity.train import Trainer

WORK = ROOT / "build" / "fidelity"
RESULTS = ROOT / "profiles" / "results" / "fidelity"
DRAWN = ROOT / "docs" / "fidelity"
# name: (size, seed); the first is the one that pages show
MODELS = {"full": ("full", 1), "small-2": ("small", 2), "small-3": ("small", 3)}
REHEARSAL = {"rehearsal": ("rehearsal", 1)}
LEAST = 30.0  # seconds that training is begun with

app = typer.Typer(
    add_completion=False, help="The accuracy study (docs/fidelity.md).", no_args_is_help=True
)
console = Console(
    width=None if Console().is_terminal else 140, highlight=False, markup=False, emoji=False
)

Work = Annotated[Path, typer.Option(help="corpus, training states, checkpoints")]
Out = Annotated[Path, typer.Option(help="JSON of the parts")]
Limit = Annotated[float, typer.Option(help="seconds after which nothing new begins")]
Compile = Annotated[bool, typer.Option("--compile", help="torch.compile the training")]


def corpus_of(size: str, work: Path) -> Corpus:
    """The corpus of a size; sizes with the same text and vocabulary share it."""
    recipe = RECIPES[size]
    folder = work / f"corpus-{recipe.corpus_bytes}-{recipe.model.vocab_size}"
    begin = time.monotonic()
    corpus = Corpus.build(folder, recipe.corpus_bytes, recipe.model.vocab_size)
    held = [row["name"] for row in corpus.listing["packages"] if row["held_out"]]
    tokens = corpus.listing["tokens"]
    console.print(
        f"corpus: {tokens['train'] / 1e6:.1f} M tokens ({corpus.tokenizer.kind}), held out "
        f"{tokens['held'] / 1e6:.2f} M of {', '.join(held)}; {time.monotonic() - begin:.0f} s"
    )
    return corpus


def device_of(size: str) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and size != "rehearsal" else "cpu")


def trained(
    name: str, size: str, seed: int, work: Path, out: Path, limit: float, compiled: bool = False
) -> bool:
    """Trains a model unless it is there; False if the time was too short."""
    begin = time.monotonic()
    if not (work / f"{name}.json").exists():
        corpus = corpus_of(size, work)
        device = device_of(size)
        trainer = Trainer(name, RECIPES[size], corpus, seed, work, device, compiled)
        if not trainer.run(limit - (time.monotonic() - begin), console):
            console.print(f"{name}: stopped at step {trainer.step}, call again")
            return False
    facts = json.loads((work / f"{name}.json").read_text())
    record = {"model": name, "kind": size, "part": "training", "data": {}} | facts
    write_result(out, record)
    return True


def write_result(out: Path, result: dict[str, Any]) -> None:
    path = out / f"{result['model']}-{result['part']}.json"
    write_atomic(path, json.dumps(result, separators=(",", ":")) + "\n")


def read_results(out: Path) -> list[gates.Result]:
    """Of all models and parts in a folder."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("*-*.json"))]


def study_of(name: str, size: str, work: Path) -> Study:
    device = device_of(size)
    model, facts = checkpoint.load(work, name, device=str(device))
    study = Study(
        name, size, model, facts, corpus_of(size, work), device, peers_folder(), SCOPES[size]
    )
    study.check_peers()
    for skipped, reason in study.skipped.items():
        console.print(f"{name}: without {skipped}: {reason}")
    return study


def run_all(
    models: dict[str, tuple[str, int]],
    parts: Iterable[str],
    work: Path,
    out: Path,
    limit: float,
    compiled: bool = False,
) -> bool:
    """Trains and evaluates what is not in ``out``; False if the time was too short."""
    begin = time.monotonic()

    def left() -> float:
        return limit - (time.monotonic() - begin)

    for name, (size, seed) in models.items():
        if left() < LEAST or not trained(name, size, seed, work, out, left(), compiled):
            return False
    for name, (size, _) in models.items():
        missing = [part for part in parts if not (out / f"{name}-{part}.json").exists()]
        study = None
        for part in missing:
            if left() < EXPECTED[part]:
                console.print(f"{name}: {part} and what follows wait for the next call")
                return False
            study = study or study_of(name, size, work)
            result = evaluate(study, part)
            write_result(out, result)
            console.print(f"{name}: {part} in {result['seconds']} s")
    return True


def report(out: Path) -> list[gates.Gate]:
    """Prints the gates, and writes them beside the JSON."""
    found = gates.gates(read_results(out))
    write_atomic(out / "gates.md", "# The study's acceptance\n\n" + gates.page(found))
    for gate in found:
        console.print(f"{gate.verdict:13} {gate.name}: {gate.claim}")
    return found


@app.command("all")
def everything(
    work: Work = WORK, out: Out = RESULTS, limit: Limit = 540.0, compile_: Compile = False
) -> None:
    """Train the three models and evaluate them, or go on with it; exit code 3 if not done."""
    require_cuda()
    done = run_all(MODELS, PARTS, work, out, limit, compile_)
    report(out)
    console.print("nothing is left to run" if done else "call again: there is more to run")
    raise typer.Exit(0 if done else 3)


@app.command("train")
def train_one(
    name: str, work: Work = WORK, out: Out = RESULTS, limit: Limit = 1e9, compile_: Compile = False
) -> None:
    """Train one of the three models (full, small-2, small-3), or go on with it."""
    size, seed = known(name)
    require_cuda()
    raise typer.Exit(0 if trained(name, size, seed, work, out, limit, compile_) else 3)


@app.command("evaluate")
def evaluate_one(
    name: str, part: Annotated[list[str], typer.Option(help="parts; all if none")] = [],  # noqa: B006
    work: Work = WORK, out: Out = RESULTS,
) -> None:  # fmt: skip
    """Evaluate parts of one model anew."""
    size, _ = known(name)
    require_cuda()
    for each in part or list(PARTS):
        if each not in PARTS:
            raise typer.BadParameter(f"part: expected one of {', '.join(PARTS)}; got {each!r}")
    study = study_of(name, size, work)
    for each in part or list(PARTS):
        write_result(out, evaluate(study, each))


@app.command("high")
def high_accuracy(
    size: Annotated[str, typer.Option(help="small, or rehearsal, on a CPU")] = "small",
    work: Work = WORK,
    out: Annotated[Path, typer.Option(help="folder of the page")] = ROOT / "build" / "bench",
    limit: Limit = 540.0,
) -> None:
    """Layers and drift of one model with accuracy="high" beside the default, as a page; trains the
    model first; exit code 3 if not done."""
    name, seed = {"small": ("small-2", 2), "rehearsal": ("rehearsal", 1)}[size]
    if size == "rehearsal":
        torch.set_num_threads(1)
        work = work / "rehearsal"
    else:
        require_cuda()
    if not trained(name, size, seed, work, work / "results", limit):
        raise typer.Exit(3)
    study = study_of(name, size, work)
    study.scope = high.scope_of(study.scope)
    found = [evaluate(study, part) for part in high.PARTS]
    for result in found:
        write_result(out, {**result, "model": f"high-{name}"})
    text = high.page(*found)
    write_atomic(out / f"{high.NAME}-{size}.md", text)
    console.print(text)


def known(name: str) -> tuple[str, int]:
    if name not in MODELS:
        raise typer.BadParameter(f"name: expected one of {', '.join(MODELS)}; got {name!r}")
    return MODELS[name]


@app.command("gates")
def judge(out: Out = RESULTS) -> None:
    """The acceptance, from the JSON; exit code 1 if a gate fails."""
    raise typer.Exit(1 if any(gate.passed is False for gate in report(out)) else 0)


@app.command("figures")
def draw(out: Out = RESULTS, to: Annotated[Path, typer.Option(help="folder")] = DRAWN) -> None:
    """Draw every figure whose part was measured."""
    for path in figures.draw(read_results(out), to):
        console.print(f"{path}, {path.stat().st_size} bytes")


@app.command()
def rehearse(work: Work = WORK / "rehearsal") -> None:
    """Every step with two layers on the CPU, from the start; exit code 1 if something is off."""
    torch.set_num_threads(1)
    shutil.rmtree(work, ignore_errors=True)
    out = work / "results"
    run_all(REHEARSAL, PARTS, work, out, 1e9)
    report(out)
    wrong = off(gates.Results(read_results(out)))
    for line in wrong:
        console.print(f"off: {line}")
    if not wrong:
        console.print(in_short(gates.Results(read_results(out))))
    raise typer.Exit(1 if wrong else 0)


def off(results: gates.Results) -> list[str]:
    """What a rehearsal may not show, whatever its toy model has learned."""
    wrong = []
    training = results.of("training")["rehearsal"]
    first, last = training["losses"][0][1], training["losses"][-1][1]
    if not last < 0.6 * first:
        wrong.append(f"the loss fell from {first} to {last} only")
    layers = results.data("layers")["rehearsal"]
    natural = gates.by_layer(layers["natural"]["errors"], "ours")
    for dial, entry in layers.items():
        if entry["kind"] in ("rope", "gain"):
            found = gates.by_layer(entry["errors"], "ours")
            if any(abs(a / b - 1) > 1e-3 for a, b in zip(found, natural, strict=True)):
                wrong.append(f"{dial}: ours errs {found}, naturally {natural}")
    if not gates.extreme_gains(results).passed:
        wrong.append("B is not worse at extreme gains")
    kernel = gates.kernels_like_fake(results)
    if kernel.passed is False:
        wrong.append(f"the kernel is not like its twin: {'; '.join(kernel.figures)}")
    return wrong


def in_short(results: gates.Results) -> str:
    """What a rehearsal found, in a line that `make prove` keeps."""
    training = results.of("training")["rehearsal"]
    kernel = [line for line in gates.kernels_like_fake(results).figures if "KL kernel " in line]
    return f"held-out loss {training['held_out_loss']} nats; {'; '.join(kernel) or 'no kernel'}"


if __name__ == "__main__":
    app()
