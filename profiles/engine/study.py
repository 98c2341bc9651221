"""Engines that are compared, how they are run, and what is read from them."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from codegen.artifacts import write_atomic
from profiles.engine import spec, truth, v32
from profiles.engine.spec import Case
from profiles.page import commit

CASE = (sys.executable, "-m", "profiles.engine.case")
# Attention backend and cache dtype by name; vLLM 0.26 knows plugins' backends as CUSTOM.
ENGINES = {
    "flashmla_bf16": ("FLASHMLA", "auto"),
    "flash_attn_mla": ("FLASH_ATTN_MLA", "auto"),  # vLLM's own choice of 16 bits on Hopper
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


def speed_cases(folder: Path) -> list[Case]:
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
    return [*timed, *wide, *shared]


# DSA models: both by the name of vLLM's own backend, and whether it is given to ours.
SPARSE_ENGINES = {"flashmla_sparse": False, "snapmla_sparse": True}
SPARSE_BASE = "flashmla_sparse-eager"
SPARSE: dict[str, Any] = {
    "backend": "FLASHMLA_SPARSE",
    "cache_dtype": "fp8_ds_mla",
    "indexer": True,
}
SHALLOW = 4  # layers of the model with weights of its own, timed too
SPARSE_LONGEST = 131_072 + 512


def sparse_cases(folder: Path) -> list[list[Case]]:
    """Engines over ``SHALLOW`` layers of a DSA model, in groups, for what they write."""
    longest = spec.LONG_TOKENS + 61 * spec.LONG + 2 * spec.NEW_TOKENS
    model = str(folder / f"sparse{SHALLOW}")

    def case(engine: str, how: str, **options: Any) -> Case:
        settings = SPARSE | {"prompts": str(folder / "prompts.json"), "longest": longest} | options
        return Case(name=f"{engine}-{how}", model=model, sparse=SPARSE_ENGINES[engine],
                    graphs=how != "eager", **settings)  # fmt: skip

    force = str(folder / f"{SPARSE_BASE}.pt")
    return [
        [case("flashmla_sparse", "eager")],
        [
            case("snapmla_sparse", "eager", force=force),
            case("snapmla_sparse", "graphs", force=force),
            case("snapmla_sparse", "invariant", force=force, batch_invariant=True),
            case("flashmla_sparse", "graphs", force=force),
        ],
    ]


def why_case(folder: Path) -> Case:
    """Ours in batch-invariant mode, eager, whose tensors are looked at."""
    (case,) = (c for group in sparse_cases(folder) for c in group if c.batch_invariant)
    return replace(case, name="snapmla_sparse-why", study="why", graphs=False, force="")


def sparse_timings(folder: Path, layers: int) -> list[Case]:
    """A case each engine and timing, since a prompt of so many tokens takes its time; in a process
    of its own, and once more within this one to tell the parts of a step."""
    model = str(folder / f"sparse{layers}")
    return [
        Case(name=f"{engine}-{layers}-{how}-{timing}", model=model, sparse=ours,
             own_process=how == "step", profile=how == "share", rounds=3 if how == "step" else 1,
             timings=(timing,), longest=SPARSE_LONGEST, cache_gib=layers * 0.9 + 2, **SPARSE)
        for how in ("step", "share")
        for timing in spec.SPARSE_TIMINGS
        for engine, ours in SPARSE_ENGINES.items()
    ]  # fmt: skip


def start(case: Case, folder: Path) -> subprocess.Popen[bytes]:
    """The process of a case, in a group of its own; its log is ``NAME.log``."""
    case.write(folder / f"{case.name}.case.json")
    with (folder / f"{case.name}.log").open("wb") as log:
        return subprocess.Popen(
            [*CASE, str(folder / f"{case.name}.case.json"), str(folder)],
            stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
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
                os.killpg(process.pid, signal.SIGKILL)  # its engine's process holds GPU memory
                failed.append(f"{name}: no time was left")
                continue
            if code or not (folder / f"{name}.json").exists():
                tail = (folder / f"{name}.log").read_text(errors="replace").splitlines()[-25:]
                failed.append("\n".join([f"{name}: exit code {code}", *tail]))
    return failed


def prepare_sparse(folder: Path, layers: int) -> None:
    """A DSA model and prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"sparse{layers}"
    if not (made / "model.safetensors").exists():
        spec.write_model(made, spec.sparse_model(layers, FEW))
    write_atomic(folder / "prompts.json", json.dumps(spec.prompts()))


def prepare(folder: Path) -> None:
    """Models and prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model" / "model.safetensors").exists():
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
    results = written(folder, accuracy_cases(folder))
    model = spec.random_model(layers=4, heads=FEW)
    logs = truth.references(model, prompts, results[BASE]["ids"], gpu())
    return judged(folder, results, logs, BASE)


def sparse_accuracy(folder: Path) -> dict[str, Any]:
    """The same of DSA models."""
    prompts = json.loads((folder / "prompts.json").read_text())
    results = written(folder, sparse_cases(folder))
    model, device = spec.sparse_model(SHALLOW, FEW), gpu()
    ids = results[SPARSE_BASE]["ids"]
    torch.backends.cuda.matmul.allow_tf32 = False
    logs = {"fp32": v32.log_probabilities(model.float().to(device), prompts, ids)}
    logs["bf16"] = v32.log_probabilities(model.bfloat16(), prompts, ids)
    return judged(folder, results, logs, SPARSE_BASE)


def gpu() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def written(folder: Path, groups: Sequence[Sequence[Case]]) -> dict[str, Any]:
    """What those of the cases that have run wrote: tokens and log-probabilities by name."""
    paths = [folder / f"{case.name}.pt" for group in groups for case in group]
    return {path.stem: torch.load(path) for path in paths if path.exists()}


def judged(
    folder: Path, results: dict[str, Any], logs: dict[str, torch.Tensor], base: str
) -> dict[str, Any]:
    """Distance of each from ``logs["fp32"]``, and what the engines said of themselves."""
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
            row["greedy_until"] = truth.equal_until(results[name]["ids"], results[base]["ids"])
        found[name] = row
    return found


def speed(folder: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """Times of the engines, from their files."""
    files = {case.name: folder / f"{case.name}.json" for case in cases}
    return {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}
