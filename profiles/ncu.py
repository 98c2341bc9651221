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
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer

from codegen import artifacts, matrix, render
from codegen.artifacts import Record
from dsl_kernels.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.families import FORMATS
from dsl_kernels.spec import VariantSpec
from profiles import bench
from profiles.device import require_cuda
from snapmla import runtime
from snapmla.decode_plan import partial_rows
from snapmla.merge import MAX_LIST
from snapmla.testing import partials
from snapmla.testing.reference_plan import NOTHING_HIDDEN

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
TOKEN_TILE = 64  # of a work list whose op walks none
USUAL = {  # of ops that have no such axis
    "row_tile": 64, "page_size": 64, "in_dtype": "bf16", "out_dtype": "bf16",
    "index_dtype": "i32", "mode": "", "cache_dtype": "fp8", "dtype": "bf16",
}  # fmt: skip
Maker = Callable[[], Any]
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
    driver = runtime.driver_version() or (0, 0)
    return (
        f"{torch.cuda.get_device_name()}, driver for CUDA {driver[0]}.{driver[1]}, ncu {number}, "
        f"torch {torch.__version__}, commit {bench.commit()}"
    )


# ---------------------------------------------------------------- the workload


def split_evenly(batch: int, rows: int, tiles: int, parts: int) -> tuple[Any, Any, Any, int]:
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
            items.append([b, first, last, -1, b * rows, (b + 1) * rows, NOTHING_HIDDEN, 0])
            at += last - first
        part_begin.append(len(items))
    for found in pieces:
        if len(found) > 1:
            for item, _ in found:
                items[item][3] = slots
                slots += 1
        split_begin.append(slots)
    return items, part_begin, split_begin, max(slots, 1)


class Values(dict[str, Any]):
    """Argument name -> value for a call of ``spec``; each is made when it is first asked for.

    Tensors are contiguous.  Raises ValueError for a name that no op has.

    Args:
        device: where tensors go; ``cpu`` runs on the software GPU.
        parts: CTAs (clusters) that the work list is for.
    """

    def __init__(self, spec: VariantSpec, sizes: Sizes, device: str, parts: int) -> None:
        super().__init__()
        self.spec, self.sizes, self.device = spec, sizes, device
        self.axes = axes = SimpleNamespace(**USUAL | dict(spec.values))
        self.heads = max(1, min(128, axes.row_tile // sizes.s_q))
        self.width = -(-sizes.tokens // axes.page_size)
        self.pages = sizes.batch * self.width
        walks = spec.family.token_tile is not None
        tiles = -(-sizes.tokens // (spec.token_tile if walks else TOKEN_TILE))
        self.split = split_evenly(sizes.batch, self.heads * sizes.s_q, tiles, parts)

    def __missing__(self, name: str) -> Any:
        for makers in (
            self._scalars, self._query, self._rotary, self._cache, self._plan, self._parts,
            self._results,
        ):  # fmt: skip
            if name in (known := makers()):
                self[name] = known[name]()
                return self[name]
        raise ValueError(f"argument {name}: no profiling value for it yet (profiles/ncu.py)")

    def _i32(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def _full(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, 0.01, device=self.device)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, device=self.device, dtype=dtype)

    def _e4m3(self, *shape: int) -> torch.Tensor:
        """Random e4m3 bytes without NaN; at most 2^20 different ones, repeated."""
        total = math.prod(shape)
        block = torch.randn(min(total, 1 << 20), device=self.device).mul_(50)
        block = block.to(torch.float8_e4m3fn).view(torch.uint8)
        return block.repeat(-(-total // block.numel()))[:total].view(shape)

    def _scalars(self) -> dict[str, Maker]:
        return {
            "softmax_scale": lambda: 192**-0.5,
            "causal": lambda: 1,
            "lse_factor": lambda: math.log(2),
            "empty_lse": lambda: -math.inf,
            "may_split": lambda: 0,  # the decode kernel alone
        }

    def _query(self) -> dict[str, Maker]:
        rows, given = (self.sizes.batch, self.sizes.s_q, self.heads), DTYPES[self.axes.in_dtype]
        if any(FORMATS[name].quantized_query for name in self.spec.family.formats):
            return {
                "q_nope": lambda: self._e4m3(*rows, KV_LORA_RANK),
                "q_rope": lambda: self._normal(*rows, QK_ROPE_HEAD_DIM),
                "q_scale": lambda: self._full(*rows),
            }
        return {
            "q": lambda: self._normal(*rows, HEAD_DIM_QK, dtype=DTYPES[self.axes.dtype]),
            "q_nope": lambda: self._normal(*rows, KV_LORA_RANK, dtype=given),
            "q_rope": lambda: self._normal(*rows, QK_ROPE_HEAD_DIM, dtype=given),
        }

    def _rotary(self) -> dict[str, Maker]:
        """Positions all over a table of as many."""
        each = self.sizes.s_q if self.spec.op == "quantize_q" else self.sizes.tokens
        n = self.sizes.batch * each
        return {
            "positions": lambda: torch.randperm(n, device=self.device).to(
                INDEX[self.axes.position_dtype]
            ),
            "cos_sin": lambda: self._normal(
                n, QK_ROPE_HEAD_DIM, dtype=DTYPES[self.axes.cos_sin_dtype]
            ),
            "norm_weight": lambda: self._normal(KV_LORA_RANK, dtype=DTYPES[self.axes.in_dtype]),
            "norm_eps": lambda: 1e-6,
        }

    def _cache(self) -> dict[str, Maker]:
        page, n = self.axes.page_size, self.sizes.batch * self.sizes.tokens
        given = DTYPES[self.axes.in_dtype]

        def scattered(count: int, total: int) -> torch.Tensor:
            return torch.randperm(total, device=self.device)[:count]

        def rows16(dtype: str) -> torch.Tensor:
            return self._normal(self.pages, page, 1, HEAD_DIM_QK, dtype=DTYPES[dtype])

        return {
            "kv": lambda: rows16(self.axes.cache_dtype),
            "cache": lambda: rows16(self.axes.dtype),
            "content": lambda: self._e4m3(self.pages, page, KV_LORA_RANK),
            "rope": lambda: self._normal(self.pages, page, QK_ROPE_HEAD_DIM),
            "scale": lambda: self._full(self.pages, page),
            "c_kv": lambda: self._normal(n, KV_LORA_RANK, dtype=given),
            "k_rope": lambda: self._normal(n, QK_ROPE_HEAD_DIM, dtype=given),
            "slot_mapping": lambda: scattered(n, self.pages * page).to(
                INDEX[self.axes.index_dtype]
            ),
            "indices": lambda: scattered(n, self.pages * page).to(INDEX[self.axes.index_dtype]),
            "block_table": lambda: scattered(self.pages, self.pages).int().view(-1, self.width),
            "cache_seqlens": lambda: self._i32([self.sizes.tokens] * self.sizes.batch),
            "cu_seqlens": lambda: self._i32(range(0, n + 1, self.sizes.tokens)),
            "seq_starts": lambda: self._i32([]),
        }

    def _plan(self) -> dict[str, Maker]:
        items, part_begin, split_begin, slots = self.split
        rows = self.heads * self.sizes.s_q
        rows_pad = -(-rows // self.axes.row_tile) * self.axes.row_tile
        parts = len(part_begin) - 1
        if self.spec.op == "records_to_plan":  # which writes as many as there may be
            items = [[0] * 8] * (parts + self.sizes.batch)
        return {
            "work_items": lambda: self._i32(items),
            "part_begin": lambda: self._i32(part_begin),
            "split_begin": lambda: self._i32(split_begin),
            "o_accum": lambda: self._partial_rows(slots, rows_pad),
            "lse_accum": lambda: self._zeros(slots, rows_pad),
            "units": lambda: self._i32([]).view(0, 2),  # a unit is a sequence
            "row_limits": lambda: self._i32([]),
            # FlashMLA's records: as many parts, which begin with some sequence's first tile
            "records": lambda: self._i32(
                [[p * self.sizes.batch // parts, *[0] * 7] for p in range(parts)]
            ),
            "num_splits": lambda: self._i32([0] * (self.sizes.batch + 1)),
            "tile_begin": lambda: self._i32([0] * (self.sizes.batch + 1)),
            "planned_seqlens": lambda: self._i32([0] * self.sizes.batch),
            "max_tokens": lambda: self.width * self.axes.page_size,
            "token_tile": lambda: TOKEN_TILE,
            "rows": lambda: rows,
            "num_kv_heads": lambda: 1,
        }

    def _partial_rows(self, slots: int, rows_pad: int) -> torch.Tensor:
        """As kernels over a cache of the spec's dtype keep them."""
        rows = self._normal(slots, rows_pad, KV_LORA_RANK, dtype=torch.float32)
        dtype, _ = partial_rows(self.axes.dtype)
        return rows if dtype is torch.float32 else partials.encode(rows)

    def _parts(self) -> dict[str, Maker]:
        """What merge_states reads; a sequence has as many parts as tensors are possible."""
        given = DTYPES[self.axes.in_dtype]
        rows = (self.sizes.batch, self.sizes.s_q, self.heads, KV_LORA_RANK)
        logs = (self.sizes.batch, self.heads, self.sizes.s_q)
        stacked = {
            "o": lambda: self._normal(MAX_LIST, *rows, dtype=given),
            "lses": lambda: self._normal(MAX_LIST, *logs, dtype=torch.float32),
            "parts": lambda: MAX_LIST,
        }
        singles: dict[str, Maker] = {}
        for i in range(MAX_LIST):
            singles[f"o_{i}"] = lambda: self._normal(*rows, dtype=given)
            singles[f"lse_{i}"] = lambda: self._normal(*logs, dtype=torch.float32)
        return {**stacked, **singles}

    def _results(self) -> dict[str, Maker]:
        batch, s_q, tokens = self.sizes.batch, self.sizes.s_q, self.sizes.tokens
        rows = (batch, s_q, self.heads)
        content, rope = torch.uint8, torch.bfloat16
        if self.spec.op == "fetch_dequant":
            rows = (batch, tokens) if self.axes.mode == "pages" else (batch * tokens,)
            content = rope = DTYPES[self.axes.in_dtype]
            if self.axes.cache_dtype != "fp8":
                rows = (*rows, 1)  # KV heads
        own = getattr(self.axes, self.spec.family.result_axis)
        scales = rows[:2] if self.axes.mode == "token" else rows
        return {
            "out": lambda: self._zeros(*rows, KV_LORA_RANK, dtype=DTYPES[own]),
            "lse": lambda: self._zeros(batch, self.heads, s_q),
            "out_nope": lambda: self._zeros(*rows, KV_LORA_RANK, dtype=content),
            "out_rope": lambda: self._zeros(*rows, QK_ROPE_HEAD_DIM, dtype=rope),
            "out_scale": lambda: self._zeros(*scales),
        }


def workload(spec: VariantSpec, sizes: Sizes) -> None:
    """Calls the variant a few times, once of them with the profiler on."""
    torch.manual_seed(0)
    if spec.op == "plan_decode":
        import snapmla

        lengths = torch.full((sizes.batch,), sizes.tokens, dtype=torch.int32, device="cuda")
        plan = snapmla.plan_decode(
            lengths, 64, sizes.s_q, page_size=64, max_pages=-(-sizes.tokens // 64)
        )
        call: Callable[[], Any] = lambda: plan.update_(lengths)
    else:
        record = Record.read(artifacts.paths(artifacts.default_dir(), spec)["json"])
        if record is None:
            raise ValueError(f"{spec.name} has no record in {artifacts.default_dir()}")
        sms = torch.cuda.get_device_properties("cuda").multi_processor_count
        known = Values(spec, sizes, "cuda", sms // dict(spec.values).get("cluster", 1))
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
