"""What the merge launch costs: decode with and without it, and the merge alone.

    python -m profiles.merge_cost --out profiles/results

``bound`` is the least that a last-arriving CTA (one SM) would need to read its sequence's partial
results, at ``SM_GBS``; it would stand at the end of the decode kernel instead of the launch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

import snapmla
from dsl_kernels.dims import PARTIAL_ROW
from dsl_kernels.spec import VariantSpec
from profiles import page, timing
from profiles.machine import machine
from profiles.shapes import DecodeShape
from snapmla import attention, runtime

PAGE = 64
SM_GBS = 100.0  # one SM's read rate out of L2: about 64 bytes a cycle at 1.6 GHz
SHAPES = (
    DecodeShape(132, 2048, 16),  # a sequence a part: nothing is split
    DecodeShape(32, 2048, 16),
    DecodeShape(32, 8192, 64),
    DecodeShape(32, 8192, 128),
    DecodeShape(32, 131072, 64, skewed=True),
    DecodeShape(1, 131072, 16),
    DecodeShape(1, 131072, 128),
)
COLUMNS = (
    "shape", "slots", "most of one sequence", "decode + merge", "decode", "difference",
    "merge alone", "one SM reading one sequence's partials, at least",
)  # fmt: skip


def graph_us(call: Callable[[], Any], calls: int = 50, rounds: int = 7) -> float:
    """Median microseconds of a call in a graph of ``calls``."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[rounds // 2]


def problem(shape: DecodeShape, device: torch.device) -> tuple[Any, ...]:
    """(q, cache, block_table, lengths, plan) of a decode step, random."""
    lengths = torch.tensor(shape.lengths(), dtype=torch.int32, device=device)
    width = -(-shape.seqlen // PAGE)
    used = [-(-n // PAGE) for n in shape.lengths()]
    cache = snapmla.PagedKVCache.allocate(sum(used), PAGE, device=device)
    x = torch.randn(cache.num_slots, 576, device=device).bfloat16()
    snapmla.append_kv(cache, x[:, :512], x[:, 512:], torch.arange(cache.num_slots, device=device))
    table = torch.zeros(shape.batch, width, dtype=torch.int32, device=device)
    for i, pages in enumerate(used):
        table[i, :pages] = torch.arange(pages, device=device) + sum(used[:i])
    y = torch.randn(shape.batch, 1, shape.num_heads, 576, device=device).bfloat16()
    q = snapmla.quantize_q(y[..., :512], y[..., 512:])
    plan = snapmla.plan_decode(lengths, shape.num_heads, 1, page_size=PAGE, max_pages=width)
    return q, cache, table, lengths, plan


def row(shape: DecodeShape, device: torch.device) -> str:
    """One line of the table."""
    torch.cuda.empty_cache()  # what the row before it had
    q, cache, table, lengths, plan = problem(shape, device)
    b, h = shape.batch, shape.num_heads
    out = torch.empty(b, 1, h, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(b, h, 1, device=device)

    def decode(split: bool) -> Callable[[], Any]:
        query = (q.nope_u8, q.rope, q.row_scale)
        return lambda: attention.launch_decode(
            query, cache.arguments, table, lengths, plan.variant, plan.arguments, int(split),
            (out, lse), (0.04, 1, 0.69, 0.0),
        )  # fmt: skip

    merge = runtime.kernel(VariantSpec(op="merge", arch=runtime.arch_of(device)), device.type)
    _, _, split_begin, units, _, *accum = plan.arguments
    times = [
        graph_us(decode(True)),
        graph_us(decode(False)),
        graph_us(lambda: merge(*accum, split_begin, units, out, lse, 0.69, 0.0)),
    ]
    begin = plan.split_begin.tolist()
    most = max(y - x for x, y in zip(begin, begin[1:]))  # noqa: RUF007
    bound = most * min(h, 64) * PARTIAL_ROW * 2 / SM_GBS * 1e-3
    cells = [f"{t:.1f}" for t in (times[0], times[1], times[0] - times[1], times[2], bound)]
    return f"| {shape.label} | {begin[-1]} | {most} | {' | '.join(cells)} |"


def main(out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench")) -> None:
    """Times the shapes and writes ``merge_cost.md``."""
    device = torch.device("cuda")
    head = page.head(
        "merge_cost", "profiles.merge_cost",
        page.told(machine(device, timing.Nvml()), page.FACTS),
        "µs a call in a CUDA graph; the same cache every call, so the short ones run out of L2",
    )  # fmt: skip
    with torch.inference_mode():
        rows = (row(shape, device) for shape in SHAPES)
        page.write_rows(out / "merge_cost.md", head, COLUMNS, rows)


if __name__ == "__main__":
    typer.run(main)
