"""Index logits on one GPU, beside DeepGEMM where it can be imported.

    python -m profiles.index_cost --out profiles/results
    DEEP_GEMM=DIR python -m profiles.index_cost --out profiles/results

Both read the same pages, queries and weights.  Decode: DeepGEMM takes one or two query tokens of a
sequence; more are given to it as vLLM does on Hopper, a sequence each, whose table row is repeated.
Prompts: DeepGEMM reads keys that lie side by side, so the copy out of the pages, which vLLM makes
first, is timed beside it (by torch: an upper bound).  Calls are captured in CUDA graphs over
several block tables, whose pages exceed L2 where the pool does; graphs are replayed in an order
that changes each round.  Before that results are compared with one another.
"""

from __future__ import annotations

import datetime
import importlib
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

from codegen.artifacts import write_atomic
from dsl_kernels.index_cache import INDEX_DIM, PAGE, PAGE_BYTES, SCALES_AT
from profiles import timing
from profiles.bench import command_line, commit
from profiles.machine import machine
from snapmla.dsa.index_logits import index_logits, unit_choices
from snapmla.plan import sm_count
from snapmla.testing.index_reference import E4M3, quantize_keys

ROUNDS, CALLS = 9, 8
AGREE = 2e-5  # of the largest score: both sum fp32 products of the same tensor core
DECODES = [
    (b, tokens)
    for tokens in (8192, 32768, 131072)
    for b in (1, 8, 32, 64, 128, 256)
    if b * tokens <= 1 << 22
]
PROMPTS = ((2048, 32768), (4096, 65536), (2048, 131072), (8192, 8192))  # query tokens, tokens
Timed = dict[str, Callable[[int], Any]]  # name -> call with its n-th block table


def pool_of(pages: int, device: torch.device | str = "cuda") -> torch.Tensor:
    """Pages of random keys."""
    pool = torch.empty(pages, PAGE_BYTES, dtype=torch.uint8, device=device)
    for begin in range(0, pages, 4096):
        some = pool[begin : begin + 4096]
        keys, scales = quantize_keys(
            torch.randn(len(some) * PAGE, INDEX_DIM, device=device), power_of_two=False
        )
        some[:, :SCALES_AT] = keys.view(torch.uint8).view(len(some), -1)
        some[:, SCALES_AT:] = scales.view(torch.uint8).view(len(some), -1)
    return pool


def tables(pool: torch.Tensor, b: int, tokens: int, count: int = CALLS) -> list[torch.Tensor]:
    """Block tables over different pages, as far as the pool goes."""
    width = -(-tokens // PAGE)
    found = []
    for i in range(count):
        start = (i * b * width) % max(1, len(pool) - b * width + 1)
        found.append((torch.randperm(b * width, device=pool.device) + start).int().view(b, width))
    return found


def queries(
    rows: int, heads: int, device: torch.device | str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(rows, heads, INDEX_DIM, device=device).to(E4M3)
    return q, 0.1 * torch.randn(rows, heads, device=device)


def decode_calls(
    pool: torch.Tensor, heads: int, b: int, s_q: int, tokens: int, peer: Any
) -> tuple[Timed, float]:
    """The calls of a decode step, and the bytes that it cannot do without."""
    q, w = queries(b * s_q, heads)
    some = tables(pool, b, tokens)
    lengths = torch.full((b,), tokens, dtype=torch.int32, device="cuda")
    out = torch.empty(b * s_q, tokens, device="cuda")
    rows = (q.view(b, s_q, heads, INDEX_DIM), w.view(b, s_q, heads))
    calls: Timed = {}
    for unit in unit_choices(heads):
        if unit <= max(1, s_q) or unit == 1:
            calls[f"unit {unit}"] = lambda i, unit=unit: index_logits(
                *rows, pool, some[i], lengths, out=out, unit_rows=unit
            )
    if s_q == 3:
        calls["unit 4"] = lambda i: index_logits(
            *rows, pool, some[i], lengths, out=out, unit_rows=4
        )
    if peer is not None:
        each = s_q if s_q <= 2 else 1
        seen = lengths[:, None] - s_q + 1 + torch.arange(s_q, device="cuda", dtype=torch.int32)
        seen = seen.reshape(-1, each).contiguous()
        wide = [t.repeat_interleave(s_q // each, 0).contiguous() for t in some]
        planned = peer.get_paged_mqa_logits_metadata(seen, PAGE, sm_count(q.device))
        shaped = q.view(-1, each, heads, INDEX_DIM)
        cache = pool.view(-1, PAGE, 1, PAGE_BYTES // PAGE)
        score = getattr(peer, "fp8_fp4_paged_mqa_logits", None)
        first = (shaped, None) if score is not None else shaped
        score = score or peer.fp8_paged_mqa_logits
        calls["DeepGEMM"] = lambda i: score(
            first, cache, w, seen, wide[i], planned, tokens, clean_logits=False
        )
    return calls, b * tokens * (PAGE_BYTES / PAGE + 4.0 * s_q)


def prompt_calls(
    pool: torch.Tensor, heads: int, n: int, tokens: int, peer: Any
) -> tuple[Timed, float]:
    """The calls of a prompt's chunk, and its floating-point operations."""
    q, w = queries(n, heads)
    table = tables(pool, 1, tokens)[0]
    lengths = torch.full((1,), tokens, dtype=torch.int32, device="cuda")
    out = torch.empty(n, tokens, device="cuda")
    calls: Timed = {
        f"unit {unit}": lambda _, unit=unit: index_logits(
            q[None], w[None], pool, table, lengths, out=out, unit_rows=unit
        )
        for unit in unit_choices(heads)[1:]
    }
    if peer is not None:
        score, gather = prompt_peer(pool, table, q, w, tokens, peer)
        calls["DeepGEMM"] = lambda _: score()
        calls["gather"] = lambda _: gather()
    seen = n * tokens - n * (n - 1) / 2
    return calls, 2.0 * seen * heads * INDEX_DIM


def prompt_peer(
    pool: torch.Tensor, table: torch.Tensor, q: torch.Tensor, w: torch.Tensor, tokens: int,
    peer: Any,
) -> tuple[Callable[[], torch.Tensor], Callable[[], Any]]:  # fmt: skip
    """DeepGEMM's call for the last query tokens of one sequence, and the copy of its keys that the
    call needs."""
    pages, n = table[0].long(), len(q)

    def gathered() -> tuple[torch.Tensor, torch.Tensor]:
        own = pool[pages]
        keys = own[:, :SCALES_AT].contiguous().view(E4M3).view(-1, INDEX_DIM)
        return keys, own[:, SCALES_AT:].contiguous().view(torch.float32).view(-1)

    begin = torch.zeros(n, dtype=torch.int32, device="cuda")
    end = torch.arange(tokens - n + 1, tokens + 1, dtype=torch.int32, device="cuda")
    score = getattr(peer, "fp8_fp4_mqa_logits", None)
    first = (q, None) if score is not None else q
    score = score or peer.fp8_mqa_logits
    keys = gathered()
    return lambda: score(first, keys, w, begin, end, clean_logits=False), gathered


def agree(calls: Timed, s_q: int, tokens: int, step: int = 1) -> None:
    """All calls give the same scores where all rows see tokens.

    Raises:
        ValueError: a contender's are others.
    """
    seen = tokens - s_q + 1
    results = {name: call(0)[::step, :seen].clone() for name, call in calls.items()
               if name != "gather"}  # fmt: skip
    (name, first), *others = results.items()
    for other, found in others:
        exact = "unit" in other
        error = float((found - first).abs().max() / first.abs().max())
        if error > (0.0 if exact else AGREE):
            raise ValueError(f"{other} is {error:.1e} off {name}")


def in_turn(calls: Timed) -> dict[str, float]:
    """Median microseconds of a call, by graphs that take turns."""
    graphs = {}
    for name, call in calls.items():
        for i in range(CALLS):
            call(i)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for i in range(CALLS):
                call(i)
    found: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for _ in range(ROUNDS):
        random.shuffle(names)
        for name in names:
            graphs[name].replay()  # caches and clocks
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            found[name].append(1e3 * begin.elapsed_time(end) / CALLS)
    return {name: median(times) for name, times in found.items()}


def shown(shape: str, us: dict[str, float], work: float, unit: str) -> str:
    """A line of the table: the best of ours first."""
    ours = {name: time for name, time in us.items() if name.startswith("unit")}
    best = min(ours, key=ours.__getitem__)
    rate = 1e-6 * work / ours[best]
    theirs = us.get("DeepGEMM")
    ratio = "– | –" if theirs is None else f"{theirs:.1f} | {theirs / ours[best]:.2f}"
    rest = ", ".join(f"{name} {time:.1f}" for name, time in us.items() if name != best)
    return f"| {shape} | {ours[best]:.1f} ({best}) | {rate:.2f} {unit} | {ratio} | {rest} |"


def peer_of(folder: str) -> Any:
    """DeepGEMM, None where it cannot be imported."""
    if folder:
        sys.path.insert(0, folder)
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def main(
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    pages: Annotated[int, typer.Option(help="Of the pool.")] = 1 << 16,
    drafts: Annotated[str, typer.Option(help="Query tokens of a sequence, by commas.")] = "1,2,3,4",
    first: Annotated[int, typer.Option(help="Shapes to time, the first ones.")] = 99,
) -> None:
    """Times the shapes and writes ``index_cost.md``."""
    peer, facts = (
        peer_of(os.environ.get("DEEP_GEMM", "")),
        machine(torch.device("cuda"), timing.Nvml()),
    )
    named = ("gpu", "driver", "cuda", "torch")
    lines = [
        "# Index logits", "", f"`{command_line(sys.argv[1:], '-m profiles.index_cost')}`", "",
        f"- commit {commit()}, {datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S}Z",
        f"- {', '.join(f'{k} {facts[k]}' for k in named if facts.get(k) is not None)}",
        f"- DeepGEMM: {'not there' if peer is None else getattr(peer, '__version__', 'there')}",
        "- µs a call; the best of ours, then DeepGEMM, its time by ours, and the others", "",
        "| heads, rows × tokens | ours | rate | DeepGEMM | ratio | others |", "|---" * 6 + "|",
    ]  # fmt: skip
    torch.manual_seed(0)
    with torch.inference_mode():
        pool = pool_of(pages)
        lines += decodes(pool, peer, [int(n) for n in drafts.split(",")], first)
        for heads in (64, 32):
            for n, tokens in PROMPTS[:first]:
                calls, flops = prompt_calls(pool, heads, n, tokens, peer)
                agree(calls, n, tokens, step=max(1, n // 64))
                shape = f"{heads}, prompt {n} × {tokens}"
                lines.append(shown(shape, in_turn(calls), flops, "TF/s"))
                typer.echo(lines[-1])
    write_atomic(out / "index_cost.md", "\n".join(lines) + "\n")


def decodes(pool: torch.Tensor, peer: Any, drafts: Sequence[int], first: int) -> list[str]:
    """Lines of decode steps."""
    lines = []
    for heads in (64, 32):
        for s_q in drafts:
            for b, tokens in DECODES[:first]:
                if b * tokens > PAGE * len(pool):
                    continue
                calls, moved = decode_calls(pool, heads, b, s_q, tokens, peer)
                agree(calls, s_q, tokens)
                shape = f"{heads}, {b} × {s_q} × {tokens}"
                lines.append(shown(shape, in_turn(calls), moved, "TB/s"))
                typer.echo(lines[-1])
    return lines


if __name__ == "__main__":
    typer.run(main)
