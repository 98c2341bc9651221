"""Commands of the engine study.

python -m profiles.engine bring                pack vLLM for a GPU machine: build/vllm
python -m profiles.engine accuracy|speed       run on a GPU, or go on; exit code 3: one failed
python -m profiles.engine chunk                a chunk of prefill over a cached prefix
python -m profiles.engine sparse               accuracy and speed of a DSA model of 4 layers
python -m profiles.engine sparse-deep          steps of 27 layers (--timing BxTOKENS: of one shape)
python -m profiles.engine sparse-old-new --old DIR   the same steps with an older packed checkout
python -m profiles.engine sparse-switch [--old DIR]  steps of 27 layers: names, backend, older one
python -m profiles.engine mtp                  accepted drafts of a model's own draft layer
python -m profiles.engine v4                   V4's attention class in a CUDA graph
python -m profiles.engine v4-call              what of that class differs from the names' own calls
python -m profiles.engine sparse-why           what of a request differs alone and in a batch
python -m profiles.engine gates                the acceptance, from the committed JSON
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from codegen.artifacts import ROOT, write_atomic
from profiles.engine import bring as bringing
from profiles.engine import chunk as chunks
from profiles.engine import gates, mtp, old_new, study, switch, v4, v4_call, why
from profiles.engine.bring import RELEASE
from profiles.engine.spec import SPARSE_TIMINGS

WORK = ROOT / "build" / "engine"
RESULTS = ROOT / "profiles" / "results" / "engine"
DEEP, OLD_NEW, MTP, V4 = "sparse-deep", "sparse-old-new", "mtp", "v4"
V4_CALL, SWITCHED = "v4-call", "sparse-switch"
OF_TIMINGS = tuple(f"{DEEP}-{timing}" for timing in SPARSE_TIMINGS)  # of calls with --timing

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
    cases = study.speed_cases(work)
    failed = study.run([cases], work, limit)
    finish("speed", study.speed(work, cases), failed, out)


@app.command()
def sparse(work: Work = WORK, out: Out = RESULTS, limit: Limit = 500.0) -> None:
    """Log-probabilities of DSA models, and times of their steps."""
    study.prepare_sparse(work, study.SHALLOW)
    begin, timed = time.monotonic(), study.sparse_timings(work, study.SHALLOW)
    failed = study.run(study.sparse_cases(work), work, limit)
    failed += study.run([timed], work, limit - (time.monotonic() - begin))
    base = (work / f"{study.SPARSE_BASE}.pt").exists()
    found = {"accuracy": study.sparse_accuracy(work) if base else {}}
    found["speed"] = study.speed(work, timed)
    finish("sparse", found if any(found.values()) else {}, failed, out)


@app.command()
def chunk(work: Work = WORK, out: Out = RESULTS, limit: Limit = 240.0) -> None:
    """A chunk of prefill over a cached prefix: log-probabilities, and the time of the step."""
    study.prepare(work)
    cases = chunks.cases(work)
    failed = study.run([cases], work, limit)
    results = study.speed(work, cases)
    finish("chunk", chunks.found(work, results, study.gpu()) if results else {}, failed, out)


@app.command("sparse-deep")
def sparse_deep(
    work: Work = WORK, out: Out = RESULTS, limit: Limit = 500.0,
    timing: Annotated[str, typer.Option(help="one of the shapes, BxTOKENS")] = "",
) -> None:  # fmt: skip
    """Times of steps of a DSA model as deep as a real one."""
    study.prepare_sparse(work, study.LAYERS)
    cases = study.sparse_timings(work, study.LAYERS)
    if timing:
        cases = [case for case in cases if case.timings == (timing,)]
    failed = study.run([cases], work, limit)
    times = study.speed(work, cases)
    part = f"{DEEP}-{timing}" if timing else DEEP
    finish(part, {"speed": times} if times else {}, failed, out)


@app.command("sparse-old-new")
def sparse_old_new(
    old: Annotated[Path, typer.Option(help="an older packed checkout")],
    work: Work = WORK, out: Out = RESULTS,
    limit: Annotated[float, typer.Option(help="seconds that one engine may take")] = 150.0,
) -> None:  # fmt: skip
    """Top-k and whole steps of a deep DSA model, an older checkout and this one in turn."""
    study.prepare_sparse(work, study.LAYERS)
    failed = old_new.run(work, old, limit)
    finish(OLD_NEW, study.speed(work, old_new.cases(work)), failed, out)


@app.command(SWITCHED)
def sparse_switch(
    old: Annotated[Path | None, typer.Option(help="an older packed checkout")] = None,
    work: Work = WORK, out: Out = RESULTS, limit: Limit = 200.0,
    timing: Annotated[str, typer.Option(help="BxTOKENS of a step")] = switch.TIMING,
) -> None:  # fmt: skip
    """Steps of a deep DSA model by FlashMLA's names, by our backend, by an older one, in turn."""
    study.prepare_sparse(work, study.LAYERS)
    failed = switch.run(work, old, limit, timing)
    finish(SWITCHED, study.speed(work, switch.cases(work, old is not None)), failed, out)


@app.command("mtp")
def drafted(work: Work = WORK, out: Out = RESULTS, limit: Limit = 200.0) -> None:
    """Accepted drafts of a model whose drafts are right, ours and vLLM's own."""
    mtp.prepare(work)
    cases = mtp.cases(work)
    failed = study.run([cases], work, limit)
    finish(MTP, study.speed(work, cases), failed, out)


@app.command("v4")
def of_v4(out: Out = RESULTS) -> None:
    """V4's attention class of vLLM in a CUDA graph, ours beside FlashMLA."""
    finish(V4, v4.measure(), [], out)


@app.command("v4-call")
def of_v4_call(out: Out = RESULTS) -> None:
    """Times the arguments by which V4's class differs from the names' own calls, one at a time."""
    finish(V4_CALL, v4_call.measure(), [], out)


@app.command("sparse-why")
def sparse_why(work: Work = WORK, out: Out = RESULTS, limit: Limit = 200.0) -> None:
    """Find a request's first tensor that differs alone and in a batch, in batch-invariant mode."""
    study.prepare_sparse(work, study.SHALLOW)
    case = study.why_case(work)
    failed = study.run([[case]], work, limit)
    results = study.speed(work, [case])
    finish("sparse-why", results.get(case.name, {}), failed, out)


def read(out: Path, part: str) -> dict[str, Any]:
    path = out / f"{part}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def headed(results: dict[str, dict[str, Any]]) -> list[str]:
    """Names the source of each part."""
    asked = {part: part.replace(f"{DEEP}-", f"{DEEP},--timing,") for part in results}
    return [
        f"- {part}: `{r['command']}:{asked[part]}`, commit {r['commit']}, {r['time']}, {r['gpu']}, "
        f"vLLM {r['vllm']}, torch {r['torch']}, Python {r['python']}"
        for part, r in results.items()
        if r
    ]


def report(out: Path) -> list[gates.Gate]:
    """Writes a page of each study that has results, and prints the gates."""
    found = []
    dense = {part: read(out, part) for part in ("accuracy", "speed")}
    if any(dense.values()):
        data = [r.get("data", {}) for r in dense.values()]
        write_atomic(out / "engine.md", gates.page(headed(dense), *data))
        found += gates.gates(*data)
    chosen = {part: read(out, part) for part in ("sparse", DEEP, *OF_TIMINGS)}
    if any(chosen.values()):
        one, *deep = (r.get("data", {}) for r in chosen.values())
        times = dict(one.get("speed", {}))
        for each in deep:
            times |= each.get("speed", {})
        written = (one.get("accuracy", {}), times, (study.SHALLOW, study.LAYERS))
        write_atomic(out / "engine-sparse.md", gates.sparse_page(headed(chosen), *written))
        found += gates.sparse_gates(*written)
    for part, pages in (
        ("chunk", chunks),
        ("sparse-why", why),
        (MTP, mtp),
        (V4, v4),
        (V4_CALL, v4_call),
    ):
        result = {part: read(out, part)}
        if result[part]:
            told = result[part]["data"]
            write_atomic(out / f"engine-{part}.md", pages.page(headed(result), told))
            found += pages.gates(told)
    if turned := read(out, OLD_NEW):
        page = old_new.page(headed({OLD_NEW: turned}), turned["data"])
        write_atomic(out / "engine-sparse-old-new.md", page)
    if side := read(out, SWITCHED):
        page = switch.page(headed({SWITCHED: side}), side["data"])
        write_atomic(out / f"engine-{SWITCHED}.md", page)
        found += switch.gates(side["data"])
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
