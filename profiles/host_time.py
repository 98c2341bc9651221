"""Host time of eager calls: what a layer costs before the GPU has anything to do.

    python -m profiles.host_time --out profiles/results

Medians over many calls, each timed alone.  Kinds of calls take turns, because the host's clock and
caches settle for a while.  The device is drained between groups of calls, outside the timed spans,
so that a full launch queue never makes the host wait.
"""

from __future__ import annotations

import datetime
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

import snapmla
from codegen.artifacts import write_atomic
from profiles import timing
from profiles.bench import command_line, commit
from profiles.worker import machine
from snapmla import attention, flash_mla_fp8

ROUNDS = 10  # turns of every kind of call, after one that is not counted
BATCH, HEADS, LENGTH, PAGE = 32, 16, 1024, 64
GROUP = 8  # calls between two drains
Call = Callable[[], object]


def timed(call: Call, calls: int) -> list[float]:
    """The host's time in each of ``calls`` calls, in microseconds."""
    times = []
    for i in range(calls):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
        if i % GROUP == GROUP - 1:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return times


def cpu_name() -> str:
    """The host processor, as the kernel of the operating system names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


def calls_to_time(device: torch.device) -> dict[str, Call]:
    """Name -> call; every one runs on the same small problem."""
    pages = LENGTH // PAGE
    cache = snapmla.PagedKVCache.allocate(BATCH * pages, PAGE, device=device)
    rows = torch.randn(BATCH * LENGTH, 576, device=device).bfloat16()
    slots = torch.arange(BATCH * LENGTH, device=device)
    snapmla.append_kv(cache, rows[:, :512], rows[:, 512:], slots)
    table = torch.arange(BATCH * pages, dtype=torch.int32, device=device).view(BATCH, pages)
    lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32, device=device)
    x = torch.randn(BATCH, 1, HEADS, 576, device=device).bfloat16()
    nope, rope = x[..., :512], x[..., 512:]
    q = snapmla.quantize_q(nope, rope)
    plan = snapmla.plan_decode(lengths, HEADS, 1, page_size=PAGE, max_pages=pages)
    whole = snapmla.plan_decode(lengths, HEADS, 1, page_size=PAGE, max_pages=pages, num_parts=1)
    out = torch.empty(BATCH, 1, HEADS, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(BATCH, HEADS, 1, device=device)
    new_c, new_r, new_slots = rows[:BATCH, :512], rows[:BATCH, 512:], slots[:BATCH]

    def decode(**given: Any) -> Call:
        arguments = {"softmax_scale": 0.07, "plan": plan, "out": out, "lse": lse, **given}
        return lambda: snapmla.decode(q, cache, table, lengths, **arguments)

    def bare(split: bool) -> Call:
        query = (q.nope_u8, q.rope, q.row_scale)
        return lambda: attention.launch_decode(
            query, cache.arguments, table, lengths, plan.variant, plan.arguments, split,
            (out, lse), (0.07, 1, 0.69, 0.0),
        )  # fmt: skip

    metadata = flash_mla_fp8.get_mla_metadata(lengths, HEADS, 1)
    pool = (cache.content.unsqueeze(2), cache.rope.unsqueeze(2))
    scales = q.scale.unsqueeze(3), cache.scale.view(-1, PAGE, 1, 1)

    def snapmla_name() -> object:
        return flash_mla_fp8.flash_mla_ckv_fp8_per_token(
            q.nope, q.rope, *pool, *scales, table, lengths, 512, *metadata, 0.07, out=out, lse=lse
        )

    return {
        "decode, plan and results given (2 launches)": decode(),
        "the same, of a plan that cannot split (1 launch)": decode(plan=whole),
        "the same, results allocated": decode(out=None, lse=None),
        "only the exported function (2 launches)": bare(True),
        "only the exported function (1 launch)": bare(False),
        "SnapMLA's name of decode, results given (2 launches)": snapmla_name,
        "plan.update_": lambda: plan.update_(lengths),
        "quantize_q into given tensors": lambda: snapmla.quantize_q(nope, rope, out=q),
        "quantize_q": lambda: snapmla.quantize_q(nope, rope),
        "append_kv": lambda: snapmla.append_kv(cache, new_c, new_r, new_slots),
        "torch: empty kernel launch (out.zero_())": lambda: lse.zero_(),
    }


def main(
    out: Annotated[Path, typer.Option(help="Folder of the table.")] = Path("build/bench"),
    calls: Annotated[int, typer.Option(help="Calls timed of each kind.")] = 2000,
) -> None:
    """Times the calls and writes ``host_time.md``."""
    device = torch.device("cuda")
    facts = machine(device, timing.Nvml())
    named = ("gpu", "driver", "cuda", "torch", "tvm_ffi", "python")
    lines = [
        "# host_time", "",
        f"`{command_line(sys.argv[1:], '-m profiles.host_time')}`", "",
        f"- commit {commit()}, {datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S}Z",
        f"- {', '.join(f'{k} {facts[k]}' for k in named if facts.get(k) is not None)}, "
        f"{cpu_name()}",
        f"- b {BATCH}, {HEADS} heads, {LENGTH} tokens; {calls} calls of each kind, one by one", "",
        "| eager call | host µs, median | 90th percentile |", "|---|---|---|",
    ]  # fmt: skip
    with torch.inference_mode():
        kinds = calls_to_time(device)
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for turn in range(ROUNDS + 1):
            for name, call in kinds.items():
                new = timed(call, calls // ROUNDS)
                times[name] += new if turn else []
    for name, values in times.items():
        late = sorted(values)[len(values) * 9 // 10]
        lines.append(f"| {name} | {statistics.median(values):.2f} | {late:.2f} |")
        typer.echo(lines[-1])
    write_atomic(out / "host_time.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
