"""What it costs on the device to ask whether a pair covers its sequences (``smxx/coverage.py``).

    python -m profiles.pair_cost --against DIR --out profiles/results

``flash_mla_fp8.flash_mla_ckv_fp8_per_token`` with results given, of this checkout and of one in
``DIR``, each captured in a CUDA graph of ``CALLS`` calls; the graphs are replayed in turn.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

import snapmla
from codegen.artifacts import write_atomic
from profiles import checkouts, page, timing
from profiles.machine import machine

PAGE, CALLS, ROUNDS = 64, 20, 45
SHAPES = (  # batch, tokens, heads
    (16, 1024, 16),
    (32, 16384, 16),
    (32, 4096, 128),
    (1, 131072, 16),
    (256, 1024, 16),
    (512, 256, 16),
    (2048, 64, 16),
)


def captured(package: Any, batch: int, tokens: int, heads: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of CALLS calls of one step, random, with pages in any order; and what it reads."""
    device = torch.device("cuda")
    names = importlib.import_module(f"{package.__name__}.flash_mla_fp8")
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    cache = package.PagedKVCache.allocate(batch * (tokens // PAGE), PAGE, device=device)
    for start in range(0, cache.num_slots, 1 << 18):
        slots = torch.arange(start, min(start + (1 << 18), cache.num_slots), device=device)
        x = torch.randn(len(slots), 576, device=device).bfloat16()
        package.append_kv(cache, x[:, :512], x[:, 512:], slots)
    pages = torch.randperm(cache.num_slots // PAGE, device=device)
    y = torch.randn(batch, 1, heads, 576, device=device).bfloat16()
    nope, scale, rope = names.quantize_ckv_per_token_head(y, 512)
    pair = names.get_mla_metadata(lengths, heads, 1)
    arguments = {
        "q_nope": nope, "q_rope": rope, "q_scale": scale,
        "k_cache_lora": cache.content.view(-1, PAGE, 1, 512),
        "k_cache_rope": cache.rope.view(-1, PAGE, 1, 64),
        "k_scale": cache.scale.view(-1, PAGE, 1, 1),
        "block_table": pages.int().view(batch, tokens // PAGE), "cache_seqlens": lengths,
        "head_dim_v": 512, "tile_scheduler_metadata": pair[0], "num_splits": pair[1],
        "softmax_scale": 0.07, "causal": True,
        "out": torch.empty(batch, 1, heads, 512, dtype=torch.bfloat16, device=device),
        "lse": torch.empty(batch, heads, 1, device=device),
    }  # fmt: skip
    names.flash_mla_ckv_fp8_per_token(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            names.flash_mla_ckv_fp8_per_token(**arguments)
    return graph, arguments


def row(shape: tuple[int, int, int], other: checkouts.Checkout) -> str:
    """One line of the table."""
    with other.active() as package:
        old = captured(package, *shape)
    graphs = old, captured(snapmla, *shape)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(ROUNDS):
        for which in (0, 1) if turn % 2 else (1, 0):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_000_000)
            begin.record()
            graphs[which][0].replay()
            end.record()
            end.synchronize()
            times[which].append(begin.elapsed_time(end) * 1e3 / CALLS)
    before, now = (median(each[4:]) for each in times)
    batch, tokens, heads = shape
    return f"| {batch} × {tokens}, {heads} | {before:.2f} | {now:.2f} | {now - before:+.1f} |"


def main(
    against: Annotated[Path, typer.Option(help="The other checkout, built.")],
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
) -> None:
    """Times the shapes and writes ``pair_cost.md``."""
    other = checkouts.Checkout(against)
    facts = machine(torch.device("cuda"), timing.Nvml())
    lines = [
        *page.head(
            "What it costs to ask whether a pair covers its sequences",
            "profiles.pair_cost",
            page.told(facts, ("gpu", "driver", "cuda", "torch")),
            f"µs a call, median; old: commit {other.commit}",
        ),
        "| batch × tokens, heads | old | new | new - old |",
        "|---|---|---|---|",
    ]
    with torch.inference_mode():
        for shape in SHAPES:
            lines.append(row(shape, other))
            typer.echo(lines[-1])
            torch.cuda.empty_cache()
    write_atomic(out / "pair_cost.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
