"""``make profile VARIANT=...``: Nsight Compute on one variant, reduced to one table.

    python -m profiles.ncu decode_etap_r64_p64_obf16_sm90a [VARIANT ...] [--tokens 16384]

Writes the script that runs ncu (``codegen/templates/ncu.sh.j2``), runs it, and prints duration,
shares of the peaks, registers, shared memory and the five largest stall reasons.  The profiled
process is this module again with ``--workload``: it builds a realistic call of that very variant,
warms up, and opens the profiler for one launch.  Needs a GPU, ncu, permission to read counters.
"""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from codegen import artifacts, matrix, render
from codegen.artifacts import Record
from dsl_kernels.spec import VariantSpec
from profiles import bench
from profiles.device import require_cuda
from snapmla.runtime import variants
from snapmla.testing import workloads
from snapmla.testing.workloads import call

PEAK = "pct_of_peak_sustained_elapsed"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
METRICS: dict[str, str] = {  # label -> ncu metric
    "duration": "gpu__time_duration.sum",
    "cycles": "sm__cycles_elapsed.max",
    "tensor pipe": f"sm__pipe_tensor_cycles_active.avg.{PEAK}",
    "DRAM": f"dram__throughput.avg.{PEAK}",
    "DRAM read": "dram__bytes_read.sum",
    "DRAM written": "dram__bytes_write.sum",
    "L2 hits": "lts__t_sector_hit_rate.pct",
    "issue slots": f"smsp__issue_active.avg.{PEAK}",
    "shared memory by LSU": f"l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.{PEAK}",
    "bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "registers": "launch__registers_per_thread",
    "static shared memory": "launch__shared_mem_per_block_static",
    "dynamic shared memory": "launch__shared_mem_per_block_dynamic",
    "grid": "launch__grid_size",
    "block": "launch__block_size",
}
TOP_STALLS = 5
ROWS = 64  # query rows of a sequence, of an op without row tiles
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Sizes:
    """Extents of the profiled call."""

    batch: int
    tokens: int
    s_q: int

    def options(self) -> list[str]:
        """Command-line options that give these sizes."""
        return [
            f"--{name} {getattr(self, name)}".replace("_", "-") for name in self.__annotations__
        ]


# ---------------------------------------------------------------- the table


def parse(report: str) -> dict[str, tuple[str, float | str]]:
    """Metric -> (unit, value) of the one kernel in an ncu ``--csv --page raw`` report.

    Raises:
        ValueError: ncu's own words, if the report holds no kernel.
    """
    lines = report.splitlines()
    rows = list(csv.reader(io.StringIO("\n".join(x for x in lines if x.startswith('"')))))
    if len(rows) < 3:
        said = [x for x in lines if x.startswith("==") and "PROF" not in x]
        raise ValueError("report: no kernel was profiled: " + (" ".join(said) or "ncu is silent"))
    names, units, values = rows[:3]
    return {n: (u, _number(v)) for n, u, v in zip(names, units, values, strict=True)}


def _number(text: str) -> float | str:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text


def _value(found: dict[str, tuple[str, float | str]], metric: str) -> float | None:
    value = found.get(metric, ("", ""))[1]
    return value if isinstance(value, float) else None


def stalls(found: dict[str, tuple[str, float | str]]) -> list[tuple[str, float]]:
    """Stall reasons by share of all warp samples, largest first, issuing (``selected``) apart."""
    before, after = STALL.split("{}")
    reasons = {
        name[len(before) : -len(after)]: value
        for name, (_, value) in found.items()
        if name.startswith(before) and name.endswith(after) and isinstance(value, float)
    }
    total = sum(reasons.values())
    shares = {name: value / total for name, value in reasons.items() if total}
    shares.pop("selected", None)
    return sorted(shares.items(), key=lambda item: -item[1])


def table(found: dict[str, tuple[str, float | str]]) -> list[tuple[str, str]]:
    """(label, text) rows of the printed table; a metric ncu did not give is left out."""
    get = {label: _value(found, metric) for label, metric in METRICS.items()}
    rows: list[tuple[str, str]] = []
    nanoseconds, cycles = get["duration"], get["cycles"]
    if nanoseconds:
        text = f"{nanoseconds / 1000:.1f} us"
        rows.append(("duration", text + (f", {cycles:,.0f} cycles" if cycles else "")))
        if cycles:
            rows.append(("SM clock", f"{cycles / nanoseconds * 1000:.0f} MHz"))
    for label in ("tensor pipe", "DRAM", "issue slots", "shared memory by LSU"):
        if (share := get[label]) is not None:
            rows.append((label, f"{share:.1f} % of peak"))
    for label in ("DRAM read", "DRAM written"):
        if (size := get[label]) is not None:
            rate = f", {size / nanoseconds / 1000:.2f} TB/s" if nanoseconds else ""
            rows.append((label, f"{size / 1e6:.1f} MB{rate}"))
    if get["L2 hits"] is not None:
        rows.append(("L2 hits", f"{get['L2 hits']:.1f} %"))
    for label in ("bank conflicts", "grid", "block", "registers"):
        if (count := get[label]) is not None:
            rows.append((label, f"{count:,.0f}"))
    memory = [get["static shared memory"], get["dynamic shared memory"]]
    if all(size is not None for size in memory):
        rows.append(("shared memory", f"{memory[0]:,.0f} static + {memory[1]:,.0f} dynamic B"))
    top = [f"{name.replace('_', ' ')} {100 * s:.1f}" for name, s in stalls(found)[:TOP_STALLS]]
    if top:
        rows.append(("stalls, % of warp samples", ", ".join(top)))
    return rows


def markdown(columns: dict[str, list[tuple[str, str]]], sizes: Sizes, where: str) -> str:
    """The tables of several variants side by side, as a page."""
    labels: dict[str, None] = {}
    for rows in columns.values():
        labels.update(dict.fromkeys(label for label, _ in rows))
    cells = {name: dict(rows) for name, rows in columns.items()}
    lines = [
        "# Nsight Compute, one launch of each variant",
        "",
        f"{where}.",
        f"Batch {sizes.batch}, {sizes.tokens} tokens, s_q {sizes.s_q}; clocks as they are.",
        f"Again: `python -m profiles.ncu {' '.join(sizes.options())} {' '.join(columns)}`",
        "",
        f"| | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for label in labels:
        texts = [cells[name].get(label, "") for name in columns]
        lines.append(f"| {label} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def versions() -> str:
    """Card, driver, ncu, PyTorch and commit of this run."""
    command = [os.environ.get("NCU", "ncu"), "--version"]
    said = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    number = next((x.split()[1] for x in said if x.startswith("Version")), "unknown")
    driver = variants.driver_version() or (0, 0)
    return (
        f"{torch.cuda.get_device_name()}, driver for CUDA {driver[0]}.{driver[1]}, ncu {number}, "
        f"torch {torch.__version__}, commit {bench.commit()}"
    )


# ---------------------------------------------------------------- the workload


def arguments(spec: VariantSpec, sizes: Sizes, device: str, parts: int) -> dict[str, Any]:
    """Argument name -> value for a call of ``spec``, by its op's workload.

    Args:
        device: where tensors go; ``cpu`` runs on the software GPU.
        parts: CTAs (clusters) that a work list is for.
    """
    rows = dict(spec.values).get("row_tile", ROWS)
    heads = max(1, min(128, rows // sizes.s_q))
    extents = call.Sizes(sizes.batch, sizes.tokens, sizes.s_q, heads, parts)
    return workloads.of(spec.op).sized(spec, extents, device, 0)


def workload(spec: VariantSpec, sizes: Sizes) -> None:
    """Calls the variant a few times, once of them with the profiler on."""
    record = Record.read(artifacts.paths(artifacts.default_dir(), spec)["json"])
    if record is None:
        raise ValueError(f"{spec.name} has no record in {artifacts.default_dir()}")
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    known = arguments(spec, sizes, "cuda", sms // dict(spec.values).get("cluster", 1))
    given = [known[argument["name"]] for argument in record.arguments]
    kernel = variants.kernel(spec, "cuda")
    for _ in range(3):
        kernel(*given)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    kernel(*given)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


# ---------------------------------------------------------------- command


def profile(
    spec: VariantSpec, sizes: Sizes, folder: Path, metrics: Sequence[str] = ()
) -> dict[str, tuple[str, float | str]]:
    """Runs ncu through the generated script; returns its metrics.

    Args:
        metrics: names of what to collect, or ``regex:`` and a pattern; none: what ``table`` shows.

    Raises:
        ValueError: ncu is missing, failed, or profiled nothing.
    """
    script, report = folder / f"{spec.name}.sh", folder / f"{spec.name}.csv"
    asked = metrics or [*METRICS.values(), "regex:" + STALL.format(".*")]
    artifacts.write_atomic(script, render.ncu_script(spec.name, asked, sizes.options()))
    done = subprocess.run(
        ["bash", str(script), str(report)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": os.environ.get("PYTHON", sys.executable)},
    )
    text = report.read_text() if report.is_file() else ""
    if done.returncode and '"ID"' not in text:
        said = (done.stdout + done.stderr + text).strip().splitlines()[-5:]
        raise ValueError(f"ncu failed ({done.returncode}): " + "\n".join(said))
    return parse(text)


@app.command()
def main(
    names: list[str],
    batch: int = 32,
    tokens: int = 16384,
    s_q: int = 1,
    out: Annotated[Path | None, typer.Option(help="also write ncu.md and raw metrics here")] = None,
    inner: Annotated[bool, typer.Option("--workload", help="be the profiled process")] = False,
) -> None:
    """Profiles variants NAMES and prints one table."""
    sizes = Sizes(batch, tokens, s_q)
    columns: dict[str, list[tuple[str, str]]] = {}
    try:
        specs = [matrix.named(name) for name in names]
        require_cuda()
        if inner:
            workload(specs[0], sizes)
            return
        with tempfile.TemporaryDirectory() as tmp:
            for spec in specs:
                found = profile(spec, sizes, Path(tmp))
                columns[spec.name] = table(found)
                if out is not None:
                    artifacts.write_atomic(out / f"{spec.name}.json", raw(found))
    except ValueError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    page = markdown(columns, sizes, versions())
    print(page)
    if out is not None:
        artifacts.write_atomic(out / "ncu.md", page)


def raw(found: dict[str, tuple[str, float | str]]) -> str:
    """The kernel's metrics as JSON, without those of the device."""
    kept = {k: v for k, v in found.items() if "__" in k and not k.startswith("device__")}
    return json.dumps(kept, indent=1) + "\n"


if __name__ == "__main__":
    app()
