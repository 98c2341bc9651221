"""Sparse decode beside FlashMLA's, on one GPU.

    python -m profiles.sparse_cost --peers DIR --out profiles/results

Both read the same tokens, FlashMLA as 656-byte rows whose scales are no powers of two, ours from
the FP8 cache.  FlashMLA takes 64 or 128 heads, so other queries are padded as its callers pad them.
Calls are captured in CUDA graphs, one call for each of several sets of random indices, and the
graphs are replayed in an order that changes each round; before that, results of some query tokens
are compared with fp64 on what each contender has stored.
"""

from __future__ import annotations

import datetime
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
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
from dsl_kernels.spec import VariantSpec
from profiles import timing
from profiles.bench import command_line, commit
from profiles.machine import machine
from snapmla import runtime
from snapmla.sparse import plan as sparse_plan
from snapmla.testing import metrics

PAGE, SPAN = 64, 32768  # tokens of a page, of a sequence
SCALE = 576**-0.5
ROUNDS, ROUND_MS = 9, 12.0
GATES = {"FlashMLA": 5e-3, "native": 2.5e-2, "rows": 3e-3}  # relative L2 to fp64, topk 2048
BYTES = {"native": 644, "rows": 656}  # of a token
SHAPES = (  # b, s_q, heads, topk
    (128, 2, 128, 2048), (128, 1, 128, 2048), (128, 1, 64, 2048), (128, 2, 64, 2048),
    (128, 1, 32, 2048), (128, 1, 16, 2048), (128, 2, 16, 2048), (128, 1, 8, 2048),
    (32, 1, 128, 2048), (32, 1, 16, 2048), (2, 1, 128, 2048), (2, 1, 64, 2048), (2, 1, 16, 2048),
    (2, 2, 128, 2048), (64, 1, 128, 16384), (128, 1, 128, 512), (512, 1, 64, 2048),
    # as many entries as V4's lists have (sparse_v4_cost)
    (128, 2, 128, 640), (128, 2, 64, 640), (32, 2, 128, 640), (2, 2, 128, 640), (2, 2, 64, 1152),
    (128, 2, 128, 128), (128, 2, 64, 128),
)  # fmt: skip
Results = tuple[torch.Tensor, torch.Tensor]


def filled_rows(tokens: int, device: torch.device, cache: Any = None) -> torch.Tensor:
    """(tokens, 656) random rows of FlashMLA's format; appended to ``cache``, too, if given."""
    rows = torch.empty(tokens, 656, dtype=torch.uint8, device=device)
    step = 1 << 17
    for begin in range(0, tokens, step):
        here = rows[begin : begin + step]
        x = torch.randn(len(here), 576, device=device)
        x[:, :512] += 0.5
        groups = x[:, :512].view(-1, 4, 128)
        scale = groups.abs().amax(-1) / 448
        content = (groups / scale[..., None]).to(torch.float8_e4m3fn)
        here[:, :512] = content.view(-1, 512).view(torch.uint8)
        here[:, 512:528] = scale.view(torch.uint8)
        here[:, 528:] = x[:, 512:].bfloat16().view(torch.uint8)
        if cache is not None:
            slots = torch.arange(begin, begin + len(here), device=device)
            snapmla.append_kv(cache, x[:, :512].bfloat16(), x[:, 512:].bfloat16(), slots)
    return rows


def meant(rows: torch.Tensor) -> torch.Tensor:
    """(n, 576) float64 of FlashMLA's rows."""
    content = rows[:, :512].contiguous().view(torch.float8_e4m3fn).double().view(-1, 4, 128)
    scale = rows[:, 512:528].contiguous().view(torch.float32).double()
    rope = rows[:, 528:].contiguous().view(torch.bfloat16).double()
    return torch.cat(((content * scale[..., None]).flatten(1), rope), 1)


class Pools:
    """The same random tokens as FlashMLA's rows and as our cache."""

    def __init__(self, sequences: int, layout: str, device: torch.device) -> None:
        tokens = sequences * SPAN
        self.cache = snapmla.PagedKVCache.allocate(tokens // PAGE, PAGE, layout, device)
        self.rows = filled_rows(tokens, device, self.cache)

    def stored_rows(self, at: torch.Tensor) -> torch.Tensor:
        """(n, 576) float64 of FlashMLA's rows."""
        return meant(self.rows[at])

    def stored_planes(self, at: torch.Tensor) -> torch.Tensor:
        """(n, 576) float64 of our cache."""
        where, cache = (at // PAGE, at % PAGE), self.cache
        assert cache.scale is not None
        content = cache.content.view(torch.uint8)[where].view(torch.float8_e4m3fn).double()
        both = torch.cat((content, cache.rope[where].double()), 1)
        return both * cache.scale[where].double()[:, None]


@dataclass
class Contender:
    """One way to compute a row, set up for it.

    Attributes:
        calls: one for each set of indices.
        query: (b, s_q, h, 576) float64, as this contender sees it.
        stored: (tokens) -> (n, 576) float64.
        plan: ours; None of others.
    """

    name: str
    calls: list[Callable[[], Results]]
    query: torch.Tensor
    stored: Callable[[torch.Tensor], torch.Tensor]
    plan: Any = None


def index_sets(pools: Pools, b: int, s_q: int, topk: int) -> list[torch.Tensor]:
    """Sets of random distinct tokens of each query token's sequence, 1 GB of rows all together."""
    device = pools.rows.device
    count = min(max(3, int(1.2e9) // (b * s_q * topk * 656)), 8)
    sequences, sets = len(pools.rows) // SPAN, []
    for number in range(count):
        made = torch.empty(b, s_q, topk, dtype=torch.int32, device=device)
        for i in range(b):
            picked = torch.rand(s_q, SPAN, device=device).argsort(-1)[:, :topk]
            made[i] = (picked + (number * b + i) % sequences * SPAN).int()
        sets.append(made)
    return sets


def native(
    pools: Pools, x: torch.Tensor, sets: list[torch.Tensor], options: dict[str, Any]
) -> Contender:
    """``snapmla.decode`` over the FP8 cache, planned with these options, results given."""
    b, s_q, heads, _ = x.shape
    q = snapmla.quantize_q(x[..., :512].contiguous(), x[..., 512:].contiguous())
    plan = snapmla.plan_sparse_decode(
        heads, s_q, topk=sets[0].shape[-1], batch=b, device=x.device, **options
    )
    out = torch.full((b, s_q, heads, 512), torch.nan, dtype=torch.bfloat16, device=x.device)
    lse = torch.full((b, heads, s_q), torch.nan, device=x.device)

    def call(indices: torch.Tensor) -> Callable[[], Results]:
        return lambda: snapmla.decode(
            q, pools.cache, indices=indices, softmax_scale=SCALE, plan=plan, out=out, lse=lse
        )

    seen = torch.cat((q.nope.double(), q.rope.double()), -1) * q.row_scale.double()[..., None]
    return Contender("native", list(map(call, sets)), seen, pools.stored_planes, plan)


def over_rows(
    pools: Pools, x: torch.Tensor, sets: list[torch.Tensor], options: dict[str, Any]
) -> Contender:
    """The same over FlashMLA's rows."""
    b, s_q, heads, _ = x.shape
    rows = pools.rows.view(-1, PAGE, 1, 656)
    cache = snapmla.PagedKVCache.from_tensors(rows, format="fp8_ds_mla")
    plan = snapmla.plan_sparse_decode(
        heads, s_q, topk=sets[0].shape[-1], batch=b, device=x.device, cache_dtype="fp8_ds_mla",
        **options,
    )  # fmt: skip
    out = torch.full((b, s_q, heads, 512), torch.nan, dtype=torch.bfloat16, device=x.device)
    lse = torch.full((b, heads, s_q), torch.nan, device=x.device)

    def call(indices: torch.Tensor) -> Callable[[], Results]:
        return lambda: snapmla.decode(
            x, cache, indices=indices, softmax_scale=SCALE, plan=plan, out=out, lse=lse
        )

    return Contender("rows", list(map(call, sets)), x.double(), pools.stored_rows, plan)


def flashmla(pools: Pools, x: torch.Tensor, sets: list[torch.Tensor]) -> Contender:
    """FlashMLA's kernel, with its schedule made before."""
    op, (b, s_q, heads, _) = torch.ops._flashmla_C.sparse_decode_fwd, x.shape
    padded = x.new_zeros(b, s_q, 64 if heads <= 64 else 128, 576)
    padded[:, :, :heads] = x
    rows = pools.rows.view(-1, PAGE, 1, 656)

    def run(indices: torch.Tensor, *schedule: Any) -> Any:
        nothing = (None,) * 2
        given = schedule or nothing
        return op(padded, rows, indices, *nothing, *given, None, None, None, 512, SCALE, None)

    schedule = run(sets[0])[2:4]

    def call(indices: torch.Tensor) -> Callable[[], Results]:
        return lambda: run(indices, *schedule)[:2]

    return Contender("FlashMLA", list(map(call, sets)), x.double(), pools.stored_rows)


CONTENDERS = {"native": native, "rows": over_rows}


def error(contender: Contender, indices: torch.Tensor, seed: int) -> float:
    """Largest relative L2 of a few query tokens; the LSE's error counts as infinite beyond 5e-3."""
    out, lse = contender.calls[0]()
    torch.cuda.synchronize()
    b, s_q, heads, _ = contender.query.shape
    worst, pick = 0.0, random.Random(seed)
    for _ in range(3):
        i, s = pick.randrange(b), pick.randrange(s_q)
        kv = contender.stored(indices[i, s].long())
        logits = contender.query[i, s] @ kv.T * SCALE
        top = torch.logsumexp(logits, -1)
        want = torch.exp(logits - top[:, None]) @ kv[:, :512]
        worst = metrics.largest(worst, metrics.relative_l2(out[i, s, :heads], want))
        if not float((lse[i, :heads, s] - top).abs().max()) <= 5e-3:  # nor NaN
            return float("inf")
    return worst


def graph_of(calls: list[Callable[[], Results]]) -> torch.cuda.CUDAGraph:
    """All calls.  The first one runs before, on the stream that is captured, so that the schedule
    which FlashMLA's names make for a stream is in no graph, as FlashMLA's is in none."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def timed(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Milliseconds of a replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / replays


def in_turn(contenders: list[Contender]) -> dict[str, float]:
    """Microseconds a call, the median of the rounds."""
    graphs = {c.name: graph_of(c.calls) for c in contenders}
    replays = {name: max(1, int(ROUND_MS / timed(graph, 2))) for name, graph in graphs.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    pick = random.Random(0)
    for _ in range(ROUNDS):
        for name in pick.sample(list(graphs), len(graphs)):
            times[name].append(timed(graphs[name], replays[name]))
    calls = {c.name: len(c.calls) for c in contenders}
    return {name: 1e3 * median(ms) / calls[name] for name, ms in times.items()}


def row(
    pools: Pools,
    shape: tuple[int, int, int, int],
    ours: list[Callable[..., Contender]],
    options: dict[str, Any] | None = None,
) -> str:
    """One line of the table.  Raises ValueError for results that are wrong."""
    b, s_q, heads, topk = shape
    x = torch.randn(b, s_q, heads, 576, device=pools.rows.device).bfloat16()
    sets = index_sets(pools, b, s_q, topk)
    contenders = [flashmla(pools, x, sets)]
    contenders += [make(pools, x, sets, options or {}) for make in ours]
    errors = {c.name: error(c, sets[0], topk) for c in contenders}
    wrong = {name: e for name, e in errors.items() if not e < GATES[name]}
    if wrong:
        raise ValueError(f"{shape}: {wrong}")
    us = in_turn(contenders)
    theirs, figures = us.pop("FlashMLA"), []
    for name, time in us.items():
        tflops = 2e-6 * b * s_q * heads * topk * (576 + 512) / time
        tbs = 1e-6 * b * s_q * topk * BYTES[name] / time
        ratio, relative = theirs / time, errors[name]
        figures.append(f" {time:.1f} | {ratio:.2f} | {tflops:.0f} | {tbs:.2f} | {relative:.1e} |")
    first = f"| {b}, {s_q}, {heads}, {topk} | {theirs:.1f} | {errors['FlashMLA']:.1e} |"
    return first + "".join(figures)


def build_with(axes: dict[str, int]) -> None:
    """Plans take variants of these values of unnamed axes from here on, where they are built."""
    usual = sparse_plan.sparse_spec

    def chosen(*args: Any, **options: Any) -> VariantSpec:
        spec = usual(*args, **options)
        asked = spec.replace(**axes)
        return spec if runtime.find(asked) is None else asked

    sparse_plan.sparse_spec = chosen


def main(
    peers: Annotated[Path, typer.Option(help="Folder of peers, with FlashMLA's library.")],
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    layout: Annotated[str, typer.Option(help="Of our cache.")] = "split",
    names: Annotated[str, typer.Option("--ours", help="native, rows, by commas.")] = "native,rows",
    some: Annotated[int, typer.Option("--first", help="Shapes to time, the first ones.")] = 99,
    axes: Annotated[str, typer.Option(help="More of our kernels: stages=3, by commas or +.")] = "",
    sweep: Annotated[bool, typer.Option(help="Numbers of parts of small batches too.")] = False,
) -> None:
    """Times the shapes and writes ``sparse_cost.md``."""
    torch.ops.load_library(str(peers / "vllm_flashmla" / "_flashmla_C.abi3.so"))
    facts = machine(torch.device("cuda"), timing.Nvml())
    named = ("gpu", "driver", "cuda", "torch")
    ours = [CONTENDERS[name] for name in names.split(",")]
    each = "".join(f" {name} | ratio | TF/s | TB/s | error |" for name in names.split(","))
    head = f"| b, s_q, heads, topk | FlashMLA | error |{each}"
    lines = [
        "# Sparse decode beside FlashMLA", "",
        f"`{command_line(sys.argv[1:], '-m profiles.sparse_cost')}`", "",
        f"- commit {commit()}, {datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S}Z",
        f"- {', '.join(f'{k} {facts[k]}' for k in named if facts.get(k) is not None)}",
        f"- µs a call; pages of {PAGE}, layout {layout}; errors: relative L2 to fp64",
        "", head, "|---" * (3 + 5 * len(ours)) + "|",
    ]  # fmt: skip
    if axes:
        words = (word.partition("=") for word in axes.replace("+", ",").split(","))
        build_with({axis: int(value) for axis, _, value in words})
    torch.manual_seed(0)
    with torch.inference_mode():
        pools = Pools(128, layout, torch.device("cuda"))
        for shape in SHAPES[:some]:
            lines.append(row(pools, shape, ours))
            typer.echo(lines[-1])
        for shape in ((2, 1, 128, 2048), (2, 1, 64, 2048), (2, 1, 16, 2048)) if sweep else ():
            for parts in (8, 16, 22, 33, 44, 66, 132):
                if parts * -(-shape[2] // 64) <= 132:
                    line = row(pools, shape, ours, {"num_parts": parts})
                    lines.append(f"{line} {parts} parts |")
                    typer.echo(lines[-1])
    write_atomic(out / "sparse_cost.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
