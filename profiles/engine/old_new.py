"""Steps of a DSA model in vLLM with an older packed checkout of this package and with this one.

Both in turn on one card: what top-k and a whole step take.  The older checkout brings package,
kernel sources and built variants (``gpu_run.sh pack NAME=DIR``); the study itself is this one's.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from codegen.artifacts import ROOT
from profiles.engine import study
from profiles.engine.gates import parts_table, speed_table
from profiles.engine.spec import Case
from snapmla.runtime import env

TIMING = "32x32768"
SIDES, HOWS = ("old", "new"), ("share", "step")
TOPK, STEPS = 0.57, 1.10  # the most of old's top-k that new's may take, and the least of old's step
TITLE = "# vLLM with sparse attention: an older build and this one"


def cases(folder: Path) -> list[Case]:
    """Shares of a step's kernels, then whole steps, of each the older one first."""
    shared: dict[str, Any] = study.SPARSE
    return [
        Case(name=f"{side}-{how}", model=str(folder / f"sparse{study.LAYERS}"), sparse=True,
             own_process=how == "step", profile=how == "share", rounds=3 if how == "step" else 1,
             timings=(TIMING,), longest=study.SPARSE_LONGEST, cache_gib=study.LAYERS * 0.9 + 2,
             **shared)
        for how in HOWS for side in SIDES
    ]  # fmt: skip


def run(folder: Path, old: Path, limit: float) -> list[str]:
    """Runs what has no result yet, one by one; returns what failed."""
    failed = []
    for case in cases(folder):
        file = folder / f"{case.name}.case.json"
        if (folder / f"{case.name}.json").exists():
            continue
        case.write(file)
        there, settings = ROOT, dict(os.environ)
        if case.name.startswith("old"):
            there = old.resolve()
            path = (str(there), str(ROOT), settings.get("PYTHONPATH", ""))
            settings["PYTHONPATH"] = os.pathsep.join(filter(None, path))
            settings[env.VARIANT_DIR.name] = str(there / "build" / "variants")
        with (folder / f"{case.name}.log").open("wb") as log:
            command = [*study.CASE, str(file.resolve()), str(folder.resolve())]
            code = subprocess.run(
                command, cwd=there, env=settings, stdout=log, stderr=log, timeout=limit, check=False
            ).returncode
        if code:
            failed.append(f"{case.name}: exit code {code}")
    return failed


def topk_us(row: Mapping[str, Any]) -> float:
    """Microseconds of top-k's kernel a layer."""
    share = row["times"][TIMING]["share"]
    return sum(us for name, us in share.items() if "select_topk" in name) / study.LAYERS


def page(header: Sequence[str], speed: Mapping[str, Mapping[str, Any]]) -> str:
    """What was found, as Markdown."""
    lines = [TITLE, "", *header, ""]
    old, new = (speed.get(f"{side}-share") for side in SIDES)
    if old and new:
        a, b = topk_us(old), topk_us(new)
        whole = [each["times"][TIMING]["share"]["all_us"] for each in (old, new)]
        ratio = whole[0] / whole[1]
        lines += [
            f"- top-k: {a:.1f} us a layer before, {b:.1f} now, {b / a:.3f} of it (gate: {TOPK})",
            f"- kernels of a step: {whole[0]:.0f} us before, {whole[1]:.0f} now, {ratio:.3f} times "
            f"as fast (gate: {STEPS})",
        ]
    steps = [speed.get(f"{side}-step") for side in SIDES]
    if all(steps):
        a, b = (median(each["times"][TIMING]["ms"]) for each in steps if each)
        lines.append(f"- a step in vLLM's own process: {a:.2f} ms before, {b:.2f} now, {a / b:.3f}")
    else:
        lines.append("- a step in vLLM's own process: not measured of both, so no ratio is told")
    told = dict(speed)
    lines += ["", "## Steps", "", *speed_table(told)]
    lines += ["", "## Microseconds of a step's kernels", "", *parts_table(told)]
    return "\n".join(lines) + "\n"
