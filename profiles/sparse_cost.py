"""Sparse decode beside FlashMLA's, on one GPU.

    python -m profiles.sparse_cost --peers DIR --out profiles/results

Both read the same tokens, FlashMLA as 656-byte rows whose scales are no powers of two, ours from
the FP8 cache.  FlashMLA takes 64 or 128 heads, so other queries are padded as its callers pad them.
Calls are captured in CUDA graphs, one call for each of several sets of random indices, and the
graphs are replayed in an order that changes each round; before that, results of some query tokens
are compared with fp64 on what each contender has stored, and with the query that it sees: ours over
the FP8 cache is held against the BF16 query, too.  Of some shapes each contender is also timed
alone (``profiles.alone``): times in turn flatter who lowers the card's clock more.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from dsl_kernels.spec import VariantSpec
from profiles import alone, page, power, timing
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
TAILS = (  # and how many entries are tokens, of prompts that are shorter than topk; -1 behind
    (128, 1, 128, 2048, 1000), (128, 1, 16, 2048, 1000), (32, 1, 128, 2048, 300),
    (128, 1, 64, 2048, 100),
)  # fmt: skip
ALONE = SHAPES[1], SHAPES[0], SHAPES[2], SHAPES[5], (32, 1, 128, 2048)
PEER, QUERY_GATE = "FlashMLA", 5e-2  # the FP8 query's part in the error to the BF16 query
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


def index_sets(
    pools: Pools, b: int, s_q: int, topk: int, held: int | None = None
) -> list[torch.Tensor]:
    """Sets of random distinct tokens of each query token's sequence, 1 GB of rows all together;
    the first ``held`` entries, -1 behind them."""
    device, held = pools.rows.device, topk if held is None else held
    count = min(max(3, int(1.2e9) // (b * s_q * held * 656)), 8)
    sequences, sets = len(pools.rows) // SPAN, []
    for number in range(count):
        made = torch.empty(b, s_q, topk, dtype=torch.int32, device=device)
        for i in range(b):
            picked = torch.rand(s_q, SPAN, device=device).argsort(-1)[:, :topk]
            made[i] = (picked + (number * b + i) % sequences * SPAN).int()
        made[..., held:] = -1
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


def error(
    contender: Contender, indices: torch.Tensor, seed: int, query: torch.Tensor | None = None,
    lse_gate: float = 5e-3,
) -> float:  # fmt: skip
    """Largest relative L2 of a few query tokens; infinite where the LSE is further off than its
    gate.

    Args:
        query: in place of the one that the contender sees.
    """
    out, lse = contender.calls[0]()
    torch.cuda.synchronize()
    seen = contender.query if query is None else query
    b, s_q, heads, _ = seen.shape
    worst, pick = 0.0, random.Random(seed)
    for _ in range(3):
        i, s = pick.randrange(b), pick.randrange(s_q)
        some = indices[i, s].long()
        kv = contender.stored(some[some >= 0])
        logits = seen[i, s].double() @ kv.T * SCALE
        top = torch.logsumexp(logits, -1)
        want = torch.exp(logits - top[:, None]) @ kv[:, :512]
        worst = metrics.largest(worst, metrics.relative_l2(out[i, s, :heads], want))
        if not float((lse[i, :heads, s] - top).abs().max()) <= lse_gate:  # nor NaN
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
    shape: tuple[int, ...],
    ours: list[Callable[..., Contender]],
    options: dict[str, Any] | None = None,
    meter: power.Meter | None = None,
) -> dict[str, Any]:
    """One row: times and errors by contender; each also alone if there is a meter.

    Args:
        shape: of ``SHAPES``, or of ``TAILS``.

    Raises:
        ValueError: results are wrong.
    """
    b, s_q, heads, topk, *tail = shape
    held = tail[0] if tail else topk
    x = torch.randn(b, s_q, heads, 576, device=pools.rows.device).bfloat16()
    sets = index_sets(pools, b, s_q, topk, held)
    contenders = [flashmla(pools, x, sets)]
    contenders += [make(pools, x, sets, options or {}) for make in ours]
    errors = {c.name: error(c, sets[0], topk) for c in contenders}
    wrong = {name: e for name, e in errors.items() if not e < GATES[name]}
    quantised = {
        c.name: error(c, sets[0], topk, x, math.inf) for c in contenders if c.name == "native"
    }
    wrong |= {name: e for name, e in quantised.items() if not e < QUERY_GATE}
    if wrong:
        raise ValueError(f"{shape}: {wrong}")
    made: dict[str, Any] = {
        "shape": label(shape), "sizes": [b, s_q, heads, held], "us": in_turn(contenders),
        "error": errors, "query_error": quantised, "units": tiles(b, s_q, heads, held),
    }  # fmt: skip
    if meter is not None:
        made["alone"] = alone.measure({c.name: c.calls for c in contenders}, meter)
    return made


def label(shape: tuple[int, ...]) -> str:
    """A shape as the table tells it."""
    *first, held = shape if len(shape) > 4 else (*shape, shape[3])
    return ", ".join(map(str, first)) + (f" ({held} tokens)" if held < first[3] else "")


def tiles(b: int, s_q: int, heads: int, tokens: int) -> int:
    """Tiles of 64 rows and 64 tokens; fewer rows count as one."""
    return b * s_q * -(-heads // 64) * -(-tokens // 64)


def body(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of a record, and that of times alone where there are some."""
    names = [name for name in rows[0]["us"] if name != PEER]
    columns = ["b, s_q, heads, topk", PEER, "error"]
    for name in names:
        columns += [name, "ratio", "TF/s", "TB/s", "error"]
    queries = any(row.get("query_error") for row in rows)
    columns += ["native's error to the BF16 query"] * queries
    return [*page.table(columns, [cells(row, names, queries) for row in rows]),
            *alone.lines(rows, PEER, "tile")]  # fmt: skip


def cells(row: Mapping[str, Any], names: Sequence[str], queries: bool) -> list[str]:
    """Of one line."""
    (b, s_q, heads, held), us, errors = row["sizes"], row["us"], row["error"]
    found = [row["shape"], f"{us[PEER]:.1f}", f"{errors[PEER]:.1e}"]
    for name in names:
        time = us[name]
        tflops = 2e-6 * b * s_q * heads * held * (576 + 512) / time
        tbs = 1e-6 * b * s_q * held * BYTES[name] / time
        found += [
            f"{time:.1f}", f"{us[PEER] / time:.2f}", f"{tflops:.0f}", f"{tbs:.2f}",
            f"{errors[name]:.1e}",
        ]  # fmt: skip
    if queries:
        off = row.get("query_error", {}).get("native")
        found.append("–" if off is None else f"{off:.1e}")
    return found


def build_with(axes: dict[str, int]) -> None:
    """Plans take variants of these values of unnamed axes from here on, where they are built."""
    usual = sparse_plan.sparse_spec

    def chosen(*args: Any, **options: Any) -> VariantSpec:
        spec = usual(*args, **options)
        asked = spec.replace(**axes)
        return spec if runtime.find(asked) is None else asked

    sparse_plan.sparse_spec = chosen


def swept(pools: Pools, ours: list[Callable[..., Contender]]) -> Iterator[dict[str, Any]]:
    """Rows of small batches by the number of parts."""
    for shape in ((2, 1, 128, 2048), (2, 1, 64, 2048), (2, 1, 16, 2048)):
        for parts in (8, 16, 22, 33, 44, 66, 132):
            if parts * -(-shape[2] // 64) <= 132:
                made = row(pools, shape, ours, {"num_parts": parts})
                yield {**made, "shape": f"{made['shape']}; {parts} parts"}


def main(
    peers: Annotated[
        Path | None, typer.Option(help="Folder of peers, with FlashMLA's library.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    layout: Annotated[str, typer.Option(help="Of our cache.")] = "split",
    names: Annotated[str, typer.Option("--ours", help="native, rows, by commas.")] = "native,rows",
    some: Annotated[int, typer.Option("--first", help="Shapes to time, the first ones.")] = 99,
    axes: Annotated[str, typer.Option(help="More of our kernels: stages=3, by commas or +.")] = "",
    sweep: Annotated[bool, typer.Option(help="Numbers of parts of small batches too.")] = False,
    again: Annotated[Path | None, typer.Option("--render", help="A record's page anew.")] = None,
) -> None:
    """Times the shapes; writes the page and its record."""
    if again is not None:
        page.render(again, body)
        return
    if peers is None:
        raise typer.BadParameter("a folder with FlashMLA's library", param_hint="--peers")
    torch.ops.load_library(str(peers / "vllm_flashmla" / "_flashmla_C.abi3.so"))
    nvml = timing.Nvml()
    head = page.head(
        "Sparse decode beside FlashMLA", "profiles.sparse_cost",
        page.told(machine(torch.device("cuda"), nvml), page.FACTS),
        f"µs a call, in turn; pages of {PAGE}, layout {layout}; errors: relative L2 to fp64",
        "(n tokens): so many entries of each list are tokens, -1 stands behind them",
    )  # fmt: skip
    if axes:
        words = (word.partition("=") for word in axes.replace("+", ",").split(","))
        build_with({axis: int(value) for axis, _, value in words})
    ours, rows = [CONTENDERS[name] for name in names.split(",")], []
    torch.manual_seed(0)
    with torch.inference_mode(), alone.meter_of(nvml) as meter:
        pools = Pools(128, layout, torch.device("cuda"))
        made = (
            row(pools, shape, ours, meter=meter if shape in ALONE else None)
            for shape in (*ALONE, *TAILS, *(s for s in SHAPES if s not in ALONE))[:some]
        )
        for each in itertools.chain(made, swept(pools, ours) if sweep else ()):
            rows.append(each)
            typer.echo(body(rows[-1:])[2])
            page.write_record(out / "sparse_cost.json", head, rows, body)


if __name__ == "__main__":
    typer.run(main)
