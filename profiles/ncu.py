"""``make profile VARIANT=...``: Nsight Compute on one variant, reduced to one table.

    python -m profiles.ncu decode_etap_r64_p64_obf16_sm90a [--batch 32] [--tokens 16384]

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from codegen import artifacts, render
from codegen.artifacts import Record
from dsl_kernels.spec import KV_LORA_RANK, QK_ROPE_HEAD_DIM, VariantSpec
from snapmla import runtime

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
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
INDEX = {"i32": torch.int32, "i64": torch.int64}
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
    for name, share in stalls(found)[:TOP_STALLS]:
        rows.append((f"stall: {name.replace('_', ' ')}", f"{100 * share:.1f} % of warp samples"))
    return rows


def markdown(name: str, sizes: Sizes, where: str, rows: list[tuple[str, str]]) -> str:
    """The table as a page."""
    head = (
        f"# {name}\n\nncu, one launch: batch {sizes.batch}, {sizes.tokens} tokens, s_q {sizes.s_q}"
    )
    body = "\n".join(f"| {label} | {text} |" for label, text in rows)
    return f"{head}; {where}.\n\n| | |\n|---|---|\n{body}\n"


# ---------------------------------------------------------------- the workload


def split_evenly(batch: int, tiles: int, parts: int) -> tuple[Any, Any, Any, int]:
    """(work_items, part_begin, split_begin, slots) that give each part the same number of tiles."""
    total, items, part_begin, split_begin = batch * tiles, [], [0], [0]
    slots = 0
    cuts = [total * p // parts for p in range(parts + 1)]
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(batch)]  # (item, part)
    for p in range(parts):
        at = cuts[p]
        while at < cuts[p + 1]:
            b, first = divmod(at, tiles)
            last = min(tiles, first + cuts[p + 1] - at)
            pieces[b].append((len(items), p))
            items.append([b, first, last, -1])
            at += last - first
        part_begin.append(len(items))
    for found in pieces:
        if len(found) > 1:
            for item, _ in found:
                items[item][3] = slots
                slots += 1
        split_begin.append(slots)
    return items, part_begin, split_begin, max(slots, 1)


def _i32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def _e4m3(*shape: int) -> torch.Tensor:
    """Random e4m3 bytes without NaN; a block of 2^20 values, repeated."""
    total = 1
    for extent in shape:
        total *= extent
    block = torch.randn(1 << 20, device="cuda").mul_(50).to(torch.float8_e4m3fn).view(torch.uint8)
    return block.repeat(-(-total // block.numel()))[:total].view(shape)


def values(spec: VariantSpec, sizes: Sizes) -> dict[str, Any]:
    """Argument name -> value for every argument of every op, contiguous, on the current device."""
    page, rows = spec.page_size, spec.row_tile
    heads = max(1, min(128, rows // sizes.s_q))
    b, s_q, d, r = sizes.batch, sizes.s_q, KV_LORA_RANK, QK_ROPE_HEAD_DIM
    width = -(-sizes.tokens // page)
    pages = b * width
    parts = torch.cuda.get_device_properties("cuda").multi_processor_count // spec.cluster
    tiles = -(-sizes.tokens // spec.token_tile)
    items, part_begin, split_begin, slots = split_evenly(b, tiles, parts)
    given, made = DTYPES[spec.in_dtype], DTYPES[spec.out_dtype]
    n = b * sizes.tokens

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, device="cuda", dtype=dtype)

    makers: dict[str, Callable[[], Any]] = {
        "q_nope": lambda: (
            _e4m3(b, s_q, heads, d)
            if spec.op == "decode"
            else normal(b, s_q, heads, d, dtype=given)
        ),
        "q_rope": lambda: normal(
            b, s_q, heads, r, dtype=torch.bfloat16 if spec.op == "decode" else given
        ),
        "q_scale": lambda: torch.full((b, s_q, heads), 0.01, device="cuda"),
        "content": lambda: _e4m3(pages, page, d),
        "rope": lambda: normal(pages, page, r),
        "scale": lambda: torch.full((pages, page), 0.01, device="cuda"),
        "block_table": lambda: torch.randperm(pages, device="cuda").int().view(b, width),
        "cache_seqlens": lambda: _i32([sizes.tokens] * b),
        "work_items": lambda: _i32(items),
        "part_begin": lambda: _i32(part_begin),
        "split_begin": lambda: _i32(split_begin),
        "out": lambda: empty(b, s_q, heads, d, dtype=made),
        "lse": lambda: empty(b, heads, s_q),
        "o_accum": lambda: torch.zeros(slots, -(-heads * s_q // rows) * rows, d, device="cuda"),
        "lse_accum": lambda: torch.zeros(slots, -(-heads * s_q // rows) * rows, device="cuda"),
        "softmax_scale": lambda: 192**-0.5,
        "causal": lambda: 1,
        "lse_factor": lambda: 0.6931472,
        "empty_lse": lambda: float("-inf"),
        "c_kv": lambda: normal(n, d, dtype=given),
        "k_rope": lambda: normal(n, r, dtype=given),
        "slot_mapping": lambda: torch.randperm(
            pages * page, device="cuda", dtype=INDEX[spec.index_dtype]
        )[:n],
        "indices": lambda: torch.randperm(pages * page, device="cuda")[:n].int(),
        "out_nope": lambda: _out_rows(spec, sizes, heads, d, torch.uint8),
        "out_rope": lambda: _out_rows(spec, sizes, heads, r, torch.bfloat16),
        "out_scale": lambda: empty(*((b, s_q) if spec.mode == "token" else (b, s_q, heads))),
    }
    return _Lazy(makers)


def _out_rows(
    spec: VariantSpec, sizes: Sizes, heads: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """out_nope or out_rope of quantize_q (``dtype``) or of fetch_dequant (the spec's dtype)."""
    shapes = {
        "pages": (sizes.batch, sizes.tokens, width),
        "indices": (sizes.batch * sizes.tokens, width),
    }
    if spec.op == "fetch_dequant":
        shape, dtype = shapes[str(spec.mode)], DTYPES[spec.in_dtype]
        return torch.empty(shape, device="cuda", dtype=dtype)
    return torch.empty((sizes.batch, sizes.s_q, heads, width), device="cuda", dtype=dtype)


class _Lazy(dict[str, Any]):
    """Makes a value when it is first asked for: no op needs them all."""

    def __init__(self, makers: dict[str, Callable[[], Any]]) -> None:
        super().__init__()
        self.makers = makers

    def __missing__(self, name: str) -> Any:
        if name not in self.makers:
            raise ValueError(f"argument {name}: no profiling value for it yet (profiles/ncu.py)")
        self[name] = self.makers[name]()
        return self[name]


def workload(spec: VariantSpec, sizes: Sizes) -> None:
    """Calls the variant a few times, once of them with the profiler on."""
    torch.manual_seed(0)
    if spec.op == "plan_decode":
        import snapmla

        lengths = _i32([sizes.tokens] * sizes.batch)
        plan = snapmla.plan_decode(
            lengths, 64, sizes.s_q, page_size=64, max_pages=-(-sizes.tokens // 64)
        )
        call: Callable[[], Any] = lambda: plan.update_(lengths)
    else:
        record = Record.read(artifacts.paths(artifacts.default_dir(), spec)["json"])
        if record is None:
            raise ValueError(f"{spec.name} has no record in {artifacts.default_dir()}")
        known = values(spec, sizes)
        arguments = [known[argument["name"]] for argument in record.arguments]
        kernel = runtime.kernel(spec, "cuda")
        call = lambda: kernel(*arguments)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


# ---------------------------------------------------------------- command


def profile(spec: VariantSpec, sizes: Sizes, folder: Path) -> dict[str, tuple[str, float | str]]:
    """Runs ncu through the generated script; returns its metrics.

    Raises:
        ValueError: ncu is missing, failed, or profiled nothing.
    """
    script, report = folder / f"{spec.name}.sh", folder / f"{spec.name}.csv"
    metrics = [*METRICS.values(), "regex:" + STALL.format(".*")]
    artifacts.write_atomic(script, render.ncu_script(spec.name, metrics, sizes.options()))
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
    name: str,
    batch: int = 32,
    tokens: int = 16384,
    s_q: int = 1,
    out: Annotated[Path | None, typer.Option(help="also write NAME.md and NAME.json here")] = None,
    inner: Annotated[bool, typer.Option("--workload", help="be the profiled process")] = False,
) -> None:
    """Profiles variant NAME and prints one table."""
    sizes = Sizes(batch, tokens, s_q)
    try:
        spec = VariantSpec.from_name(name)
        if not torch.cuda.is_available():
            raise ValueError("profiling needs a CUDA device")
        if inner:
            workload(spec, sizes)
            return
        with tempfile.TemporaryDirectory() as tmp:
            found = profile(spec, sizes, Path(tmp))
    except ValueError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    version = runtime.driver_version()
    where = (
        f"{torch.cuda.get_device_name()}, driver for CUDA {version[0]}.{version[1]}"
        if version
        else ""
    )
    page = markdown(name, sizes, where, table(found))
    print(page)
    if out is not None:
        kept = {k: v for k, v in found.items() if "__" in k and not k.startswith("device__")}
        artifacts.write_atomic(out / f"ncu-{name}.md", page)
        artifacts.write_atomic(out / f"ncu-{name}.json", json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    app()
