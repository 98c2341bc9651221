"""What context-parallel decode costs over NCCL: decode, exchange and merge, on several GPUs.

    python -m profiles.parallel_cost --out profiles/results    # for each of 2, 4, 8 GPUs
    torchrun --nproc-per-node 2 -m profiles.parallel_cost --out DIR
    python -m profiles.parallel_cost --device cpu              # rehearsal: gloo, tiny shapes

A line a shape, turn and way of exchange, times of rank 0 in µs.  ``decode`` is a rank's own, with
all heads over its tokens; ``exchange`` the collectives and copies, of queries and of results;
``merge`` the merge of what was exchanged.  ``step`` is all of a layer, one after the other, in
eager calls and in a CUDA graph.  Beside it, measured on the same GPUs: ``one GPU`` has all tokens
and heads; ``replicated TP`` has all tokens on every GPU, and each GPU its own heads, so it needs no
exchange in attention and as many times the memory.

Every rank decodes the same random pages in every shape; before the times of a shape are taken,
ways of exchange are compared with each other, and with one GPU over the same tokens.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import time

import torch
import typer
from torch import Tensor, distributed

import snapmla
from codegen.artifacts import write_atomic
from profiles import page, timing
from profiles.machine import machine
from snapmla.parallel import ContextGroup, ContextPlan
from snapmla.testing import metrics

PAGE, HEADS, SCALE = 64, 128, 192**-0.5
SHAPES = (  # requests, tokens of each
    (1, 131072), (4, 131072), (32, 131072), (1, 524288), (8, 524288), (1, 1048576), (4, 1048576),
    (32, 1048576),
)  # fmt: skip
TINY = ((2, 90),)
TURNS = (1, 64)
WAYS = (
    ("all_to_all", torch.bfloat16), ("all_to_all", torch.float32),
    ("reduce_scatter", torch.bfloat16), ("reduce_scatter", torch.float32),
)  # fmt: skip
CALLS, ROUNDS = 10, 7
LIMIT = 240  # seconds that a collective may take
APART = 6e-3  # relative L2 of ways of exchange to each other: two roundings to bfloat16 and more
COLUMNS = (
    "requests x tokens", "turns", "exchange by", "decode", "exchange", "merge", "step, graph",
    "step, eager", "one GPU", "replicated TP", "step to one GPU", "step to TP",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A rank, its group and its device."""

    rank: int
    ranks: int
    device: torch.device

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


class Pool:
    """Random pages that all shapes share, sequence after sequence."""

    def __init__(self, tokens: int, place: Place) -> None:
        pages = -(-tokens // PAGE)
        self.cache = snapmla.PagedKVCache.allocate(pages, PAGE, device=place.device)
        torch.manual_seed(1)
        step = min(1 << 17, pages * PAGE)
        for begin in range(0, pages * PAGE, step):
            end = min(begin + step, pages * PAGE)
            x = torch.randn(end - begin, 576, device=place.device)
            x[:, :512] += 0.5
            slots = torch.arange(begin, end, device=place.device)
            snapmla.append_kv(self.cache, x[:, :512].bfloat16(), x[:, 512:].bfloat16(), slots)

    def table(self, b: int, tokens: int) -> Tensor:
        """Pages of b sequences of so many tokens."""
        width, device = -(-tokens // PAGE), self.cache.device
        return torch.arange(b * width, dtype=torch.int32, device=device).view(b, width)


def of_rank(table: Tensor, tokens: int, group: ContextGroup) -> Tensor:
    """Pages of a rank's tokens: of whole pages a turn the very pages of whole sequences, so that
    one GPU reads the same; else as many pages, of other tokens."""
    if group.interleave % PAGE == 0:
        return group.local_block_table(table, page_size=PAGE).contiguous()
    most = -(-(-(-tokens // group.size) + group.interleave) // PAGE)
    return table[:, :most].contiguous()


def graph_of(call: Callable[[], Any], place: Place, calls: int) -> torch.cuda.CUDAGraph:
    """A graph of so many calls, which were made once before."""
    call()
    torch.cuda.synchronize()
    distributed.barrier()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return graph


def timed(run: Callable[[], Any], place: Place, calls: int) -> float:
    """Median µs of a call, where ``run`` makes so many; ranks begin together in each round."""
    times = []
    for _ in range(ROUNDS if place.cuda else 1):
        distributed.barrier()
        if not place.cuda:
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e6 / calls)
            continue
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # until the host has queued it all
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return median(times)


def measured(call: Callable[[], Any], place: Place, *, graph: bool = True) -> float | str:
    """µs of a call, in a graph or eager; the error's first line where it cannot be captured."""
    calls = CALLS if place.cuda else 1

    def eager() -> None:
        for _ in range(calls):
            call()

    if not graph or not place.cuda:
        call()
        return timed(eager, place, calls)
    try:
        captured = graph_of(call, place, calls)
    except RuntimeError as error:
        torch.cuda.synchronize()
        return f"not captured: {str(error).splitlines()[0][:60]}"
    return timed(captured.replay, place, calls)


@dataclass
class Layer:
    """One layer's calls by one way of exchange, over buffers of their own."""

    group: ContextGroup
    plan: ContextPlan
    cache: snapmla.PagedKVCache
    table: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor

    def step(self) -> None:
        self.group.decode(
            self.q[..., :512], self.q[..., 512:], self.cache, self.table, self.plan,
            softmax_scale=SCALE, out=self.out, lse=self.lse,
        )  # fmt: skip

    def decode(self) -> None:
        """The rank's own decode, of queries that are there."""
        buffers = self.plan._buffers
        snapmla.decode(
            buffers.quantized, self.cache, self.table, self.plan.cache_seqlens,
            softmax_scale=SCALE, plan=self.plan.plan, out=buffers.part, lse=buffers.part_lse,
        )  # fmt: skip

    def exchange(self) -> None:
        """All of a step but the decode."""
        buffers = self.plan._buffers
        self.group._query(self.q[..., :512], self.q[..., 512:], buffers)
        buffers.exchange(buffers.part, buffers.part_lse, self.out, self.lse)


def merge_call(group: ContextGroup, b: int, device: torch.device) -> Callable[[], Any]:
    """The merge of what an all-to-all brings; of a reduce-scatter, which sums, there is none."""
    own = group.own_heads
    parts = torch.zeros(group.size, b, 1, own, 512, dtype=group.transport, device=device)
    lses = torch.zeros(group.size, b, own, 1, device=device)
    out = torch.empty(b, 1, own, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(b, own, 1, device=device)
    return lambda: snapmla.merge_states(parts, lses, out=out, lse=lse)


def alone(pool: Pool, b: int, tokens: int, q: Tensor) -> tuple[Callable[[], Any], Tensor]:
    """Decode of all tokens on one GPU, with these heads; and its ``out``."""
    device, table = q.device, pool.table(b, tokens)
    lengths = torch.full((b,), tokens, dtype=torch.int32, device=device)
    query = snapmla.quantize_q(q[..., :512], q[..., 512:])
    plan = snapmla.plan_decode(
        lengths, q.shape[2], 1, page_size=PAGE, max_pages=table.shape[1]
    )  # fmt: skip
    out = torch.empty(*q.shape[:-1], 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(b, q.shape[2], 1, device=device)
    return lambda: snapmla.decode(
        query, pool.cache, table, lengths, softmax_scale=SCALE, plan=plan, out=out, lse=lse
    ), out  # fmt: skip


def layer(
    pool: Pool, b: int, tokens: int, turn: int, way: tuple[str, torch.dtype], q: Tensor
) -> Layer:
    """A layer by one way, planned."""
    group = ContextGroup(num_heads=q.shape[2], interleave=turn, method=way[0], transport=way[1])
    lengths = torch.full((b,), tokens, dtype=torch.int32, device=q.device)
    table = of_rank(pool.table(b, tokens), tokens, group)
    plan = group.plan_decode(lengths, 1, page_size=PAGE, max_pages=table.shape[1])
    own = group.own_heads
    mine = q[:, :, group.rank * own : (group.rank + 1) * own].contiguous()
    out = torch.empty(b, 1, own, 512, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(b, own, 1, device=q.device)
    return Layer(group, plan, pool.cache, table, mine, out, lse)


def cell(value: float | str) -> str:
    return f"{value:.1f}" if isinstance(value, float) else value


def ratio(value: float | str, to: float | str) -> str:
    known = isinstance(value, float) and isinstance(to, float)
    return f"{to / value:.2f}" if known else "-"  # type: ignore[operator]


def rows(pool: Pool, place: Place, b: int, tokens: int) -> list[str]:
    """Lines of a shape; ValueError where results differ."""
    torch.manual_seed(b)
    heads = HEADS if place.cuda else 2 * place.ranks
    q = torch.randn(b, 1, heads, 576, device=place.device).bfloat16()
    whole, truth = alone(pool, b, tokens, q)
    whole()
    own = heads // place.ranks
    mine = slice(place.rank * own, (place.rank + 1) * own)
    one = measured(whole, place)
    tensor_parallel = measured(alone(pool, b, tokens, q[:, :, mine].contiguous())[0], place)
    lines = []
    for turn in TURNS:
        first: Tensor | None = None
        for way in WAYS:
            made = layer(pool, b, tokens, turn, way, q)
            made.step()
            if place.cuda:
                made.group.synchronize(place.device, LIMIT)
            same = truth[:, :, mine] if turn % PAGE == 0 else first
            limit = APART if turn % PAGE else 4e-2  # P's roundings are others on one GPU
            if same is not None and not metrics.relative_l2(made.out, same) <= limit:
                raise ValueError(f"{b} x {tokens}, turns of {turn}, {way}: wrong results")
            first = made.out if first is None else first
            merge: float | str = "-"
            if way[0] == "all_to_all":
                merge = measured(merge_call(made.group, b, place.device), place)
            decode, exchange = measured(made.decode, place), measured(made.exchange, place)
            if isinstance(exchange, float) and isinstance(merge, float):
                exchange -= merge
            step, eager = measured(made.step, place), measured(made.step, place, graph=False)
            best = step if isinstance(step, float) else eager
            name = f"{way[0]} {str(way[1]).removeprefix('torch.')}"
            cells = [cell(x) for x in (decode, exchange, merge, step, eager, one, tensor_parallel)]
            cells += [ratio(best, one), ratio(best, tensor_parallel)]
            lines.append(f"| {b} x {tokens} | {turn} | {name} | {' | '.join(cells)} |")
            if place.rank == 0:
                typer.echo(lines[-1])
    return lines


def run_rank(
    local: int, ranks: int, store: str, device: str, shapes: int, out: str, seconds: float
) -> None:
    """One rank; rank 0 writes the table, after every shape."""
    began = time.monotonic()
    by_torchrun = not store
    rank = int(os.environ["RANK"]) if by_torchrun else local
    cuda = device == "cuda"
    place = Place(rank, ranks, torch.device("cuda", local) if cuda else torch.device("cpu"))
    if cuda:
        torch.cuda.set_device(place.device)
    meeting = {} if by_torchrun else {"init_method": f"file://{store}", "rank": rank}
    distributed.init_process_group(
        "nccl" if cuda else "gloo", world_size=ranks, timeout=timedelta(seconds=LIMIT),
        device_id=place.device if cuda else None, **meeting,
    )  # fmt: skip
    try:
        with torch.inference_mode():
            table(place, (SHAPES if cuda else TINY)[:shapes], Path(out), began + seconds)
    finally:
        distributed.destroy_process_group()


def table(place: Place, shapes: tuple[tuple[int, int], ...], out: Path, until: float) -> None:
    """Times the shapes that fit the GPU and the time."""
    nvml = timing.Nvml(place.device.index) if place.cuda else None
    facts = machine(place.device, nvml)
    named = ("gpu", "driver", "cuda", "torch")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if place.cuda else "none (gloo)"
    lines = [
        *page.head(
            f"Context-parallel decode, {place.ranks} ranks", "profiles.parallel_cost",
            f"{place.ranks} x {page.told(facts, named)}, NCCL {nccl}",
            f"µs a layer on rank 0, {HEADS if place.cuda else 2 * place.ranks} heads, one query "
            f"token, pages of {PAGE}; ratios above 1: the step is faster",
        ),
        f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|",
    ]  # fmt: skip
    room = 0.7 * torch.cuda.mem_get_info()[0] / 644 if place.cuda else 1e9
    fitting = [shape for shape in shapes if (shape[0] * shape[1]) < room]
    pool = Pool(max(b * tokens for b, tokens in fitting), place)
    for b, tokens in fitting:
        # ranks stop together: rank 0's clock counts
        late = torch.tensor([float(time.monotonic() > until)], device=place.device)
        distributed.broadcast(late, 0)
        if late.item():
            lines.append(f"\nNot run, the time was over: {b} x {tokens} and what follows.")
            break
        lines += rows(pool, place, b, tokens)
        if place.rank == 0:
            write_atomic(out / f"parallel_cost-x{place.ranks}.md", "\n".join(lines) + "\n")
    if place.rank == 0:
        write_atomic(out / f"parallel_cost-x{place.ranks}.md", "\n".join(lines) + "\n")


def main(
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    device: Annotated[str, typer.Option(help="cuda; cpu rehearses with gloo.")] = "cuda",
    ranks: Annotated[str, typer.Option(help="Numbers of GPUs, by commas; empty: 2,4,8.")] = "",
    shapes: Annotated[int, typer.Option("--first", help="Shapes to time, the first ones.")] = 99,
    seconds: Annotated[float, typer.Option(help="No shape begins after so many.")] = 400,
) -> None:
    """Times context-parallel decode and writes ``parallel_cost-x2.md`` and so on."""
    out = out.resolve()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # torchrun has made the ranks
        world, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0"))
        run_rank(local, world, "", device, shapes, str(out), seconds)
        return
    there = torch.cuda.device_count() if device == "cuda" else 2
    wanted = [int(n) for n in ranks.split(",")] if ranks else [n for n in (2, 4, 8) if n <= there]
    if not wanted or max(wanted) > max(there, 2 if device == "cpu" else 0):
        raise typer.BadParameter(f"needs two GPUs or more, and not more than there are: {there}")
    for n in wanted:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (n, f"{folder}/store", device, shapes, str(out), seconds / len(wanted))
            torch.multiprocessing.spawn(run_rank, arguments, nprocs=n)


if __name__ == "__main__":
    typer.run(main)
