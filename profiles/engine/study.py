"""Which engines are compared, how they are run, and what is read from them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from codegen.artifacts import write_atomic
from profiles.bench import commit
from profiles.engine import spec, truth
from profiles.engine.spec import Case

CASE = (sys.executable, "-m", "profiles.engine.case")
# Attention backend and cache dtype by name; vLLM 0.26 knows plugins' backends as CUSTOM.
ENGINES = {
    "flashmla_bf16": ("FLASHMLA", "auto"),
    "flashmla_fp8": ("FLASHMLA", "fp8"),
    "snapmla": ("CUSTOM", "fp8_ds_mla"),
}
BASE = "flashmla_bf16-eager"  # whose tokens the others follow
LAYERS, WIDE = 27, 128  # of the timed models: DeepSeek-V2-Lite's depth; heads of the wide one
FEW = 16


def accuracy_cases(folder: Path) -> list[list[Case]]:
    """Engines over a small model with weights, in groups: the second follows the first's tokens."""
    model, prompts = str(folder / "model"), str(folder / "prompts.json")
    longest = spec.LONG_TOKENS + 61 * spec.LONG + 2 * spec.NEW_TOKENS

    def case(engine: str, how: str, **options: Any) -> Case:
        backend, cache = ENGINES[engine]
        return Case(
            name=f"{engine}-{how}", model=model, backend=backend, cache_dtype=cache,
            prompts=prompts, longest=longest, graphs=how != "eager", **options,
        )  # fmt: skip

    force = str(folder / f"{BASE}.pt")
    return [
        [case("flashmla_bf16", "eager")],
        [
            case("snapmla", "eager", force=force),
            case("snapmla", "graphs", force=force),
            case("snapmla", "invariant", force=force, batch_invariant=True),
            case("flashmla_fp8", "graphs", force=force),
        ],
    ]


def speed_cases(folder: Path) -> list[list[Case]]:
    """Engines over models of the depth of a real one, with vLLM's random weights."""
    timed, shared, wide = [], [], []
    for engine, (backend, cache) in ENGINES.items():
        shape: dict[str, Any] = {"backend": backend, "cache_dtype": cache, "cache_gib": 60.0}
        few, many = str(folder / f"heads{FEW}"), str(folder / f"heads{WIDE}")
        timed.append(
            Case(name=f"{engine}-{FEW}", model=few, own_process=True, longest=66_000,
                 timings=("32x16384", "32x32768", "8x65536"), **shape)
        )  # fmt: skip
        wide.append(
            Case(name=f"{engine}-{WIDE}", model=many, own_process=True, longest=17_000,
                 timings=("32x16384",), **shape)
        )  # fmt: skip
        shared.append(
            Case(name=f"{engine}-share", model=few, profile=True, longest=66_000,
                 timings=("32x16384", "8x65536"), **shape)
        )  # fmt: skip
    return [[*timed, *wide, *shared]]


def start(case: Case, folder: Path) -> subprocess.Popen[bytes]:
    """The process of a case; its log is ``NAME.log``."""
    case.write(folder / f"{case.name}.case.json")
    with (folder / f"{case.name}.log").open("wb") as log:
        return subprocess.Popen(
            [*CASE, str(folder / f"{case.name}.case.json"), str(folder)],
            stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip


def run(groups: Sequence[Sequence[Case]], folder: Path, limit: float) -> list[str]:
    """Runs what has no result yet, a group side by side; returns what failed, and why.

    A group needs the results of those before it.
    """
    end, failed = time.monotonic() + limit, []
    for group in groups:
        if failed:
            break
        todo = [case for case in group if not (folder / f"{case.name}.json").exists()]
        running = {case.name: start(case, folder) for case in todo}
        for name, process in running.items():
            try:
                code = process.wait(max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                failed.append(f"{name}: no time was left")
                continue
            if code or not (folder / f"{name}.json").exists():
                tail = (folder / f"{name}.log").read_text(errors="replace").splitlines()[-25:]
                failed.append("\n".join([f"{name}: exit code {code}", *tail]))
    return failed


def prepare(folder: Path) -> None:
    """Models and prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "prompts.json").exists():
        spec.write_model(folder / "model", spec.random_model(layers=4, heads=FEW))
        for heads in (FEW, WIDE):
            spec.write_config(folder / f"heads{heads}", spec.config(LAYERS, heads))
        write_atomic(folder / "prompts.json", json.dumps(spec.prompts()))


def circumstances() -> dict[str, Any]:
    import vllm

    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "vllm": vllm.__version__,
        "python": platform.python_version(), "commit": commit(), "time": time.strftime("%Y-%m-%d"),
        "command": "bash profiles/gpu_run.sh engine",
    }  # fmt: skip


def accuracy(folder: Path) -> dict[str, Any]:
    """What the engines' log-probabilities are worth, from their files."""
    prompts = json.loads((folder / "prompts.json").read_text())
    results = {path.stem: torch.load(path) for path in sorted(folder.glob("*-*.pt"))}
    base = results[BASE]
    model = spec.random_model(layers=4, heads=FEW)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logs = truth.references(model, prompts, base["ids"], device)
    exact = logs["fp32"]
    logs |= {name: kept.get("forced", kept["logs"]) for name, kept in results.items()}
    found: dict[str, Any] = {}
    for name, values in logs.items():
        row: dict[str, Any] = {
            "long": truth.divergence(values[: spec.LONG], exact[: spec.LONG]),
            "short": truth.divergence(values[spec.LONG :], exact[spec.LONG :]),
        }
        if name in results:
            row |= json.loads((folder / f"{name}.json").read_text())
            row["greedy_until"] = truth.equal_until(results[name]["ids"], base["ids"])
        found[name] = row
    return found


def speed(folder: Path) -> dict[str, Any]:
    """Times of the engines, from their files."""
    names = [case.name for group in speed_cases(folder) for case in group]
    files = {name: folder / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}
