"""A decode step of DeepSeek-V3.2's attention as a user pays for it, on one GPU: 61 layers.

    DEEP_GEMM=DIR python -m profiles.v32_step_cost --peers DIR --old build/checkouts/base

A layer is all that stands between its products: norms, RoPE and quantisation, both appends, index
logits over columns as wide as the longest context (163840), top-k, sparse decode over rows of 656
bytes with 128 heads, merge.  No products, no experts.  All layers stand in one CUDA graph:

    today      ``dsa.prologue``, ``dsa.index_topk``, ``decode`` of queries in two tensors
    single     the same of today's package in single calls, as before there was a prologue:
               ``rope_append_kv``, ``append_index_k``, ``decode`` of queries in one tensor; what the
               library had no call for (RoPE and quantisation of queries) by vLLM's operators, or by
               torch where these are not there; ``torch.cat``
    before     ``single`` of an older checkout, by its package and its kernels
    vLLM       the operators that vLLM calls (``profiles.v32_vllm``); left out, and said so, unless
               all three libraries are there

Before anything is timed each contender's first layer is held against float64 on the tokens that it
chose, and these against today's.  Graphs are replayed in an order that changes each round.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

import snapmla
from profiles import checkouts, page, timing, v32_layers, v32_vllm
from profiles.machine import machine
from profiles.tables.sparse_cost import stored
from profiles.v32_layers import HEADS, LAYERS, LONGEST, SCALE, Layer, Made, Memory, Step
from snapmla.testing import metrics, rope

SHAPES = tuple((b, tokens) for b in (1, 8, 32, 128) for tokens in (4096, 16384, 65536))
POOL = 1 << 24  # tokens
CONFIG = timing.TimingConfig(
    graph_ms=20.0, rounds=7, warmup_rounds=0, cold_iters=0, host_iters=0, shuffled=True
)
# Relative L2 to float64.  Of the tokens that today's layer chose: queries that round otherwise
# before they are quantised choose others at the threshold, at most a few in a hundred.
GATE, SHARED = 5e-3, 0.95
TODAY, SINGLE, BEFORE, VLLM = "today", "single", "before", "vLLM"
Row = Mapping[str, Any]


class TorchQueries:
    """RoPE and quantisation of the indexer's queries, and their weights, by torch."""

    def __init__(self, step: Step) -> None:
        self.step = step
        shape = step.index_q.shape
        self.made = step.q.new_empty(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
        self.w = step.q.new_empty(shape[:2], dtype=torch.float32)

    def __call__(self, _: object) -> None:
        step, q = self.step, self.step.index_q
        first = rope.rotate_rows(q[..., :64], step.positions, step.cos_sin, True)
        x = torch.cat((first, q[..., 64:]), -1).float()
        scale = x.abs().amax(-1).clamp(min=1e-4) / 448.0
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
        self.made.copy_(x / scale[..., None])
        torch.mul(step.index_weights, scale, out=self.w)
        self.w.mul_(step.weight_scale)


def helpers(step: Step, ops: Any) -> tuple[Any, Callable[[torch.Tensor], None]]:
    """What ``v32_layers.single`` has no call of ours for: vLLM's operators, else torch's."""
    if ops is not None:
        queries = v32_vllm.IndexQueries(step, ops)
        return queries, lambda q: v32_vllm.turned(step, ops, q, None, False)

    def turn(q: torch.Tensor) -> None:
        q.copy_(rope.rotate_rows(q, step.positions, step.cos_sin))

    return TorchQueries(step), turn


@contextmanager
def package_of(folder: str) -> Iterator[Any]:
    """The imported ``snapmla`` of a checkout, active."""
    checkout = checkouts.checkout(folder)
    if reason := checkout.unavailable():
        raise ValueError(reason)
    with checkout.active() as package:
        yield package


def error(step: Step, made: Made, seed: int = 0) -> float:
    """Largest relative L2 of some sequences to float64 on the tokens that the layer chose."""
    worst, pick = 0.0, random.Random(seed)
    cache = snapmla.PagedKVCache.from_tensors(
        step.kv.view(-1, v32_layers.PAGE, 1, 656), format="fp8_ds_mla"
    )
    for i in {0, step.batch - 1, pick.randrange(step.batch)}:
        kv = stored(cache, made.slots[i].long())
        q = torch.cat((step.q_nope[i], made.q_rope[i]), -1).double()
        weights = torch.softmax(q @ kv.T * SCALE, -1)
        worst = metrics.largest(worst, metrics.relative_l2(made.out[i, 0], weights @ kv[:, :512]))
    return worst


def shared(made: torch.Tensor, today: torch.Tensor) -> float:
    """The least share of a row's tokens that both chose."""
    pairs = zip(made.tolist(), today.tolist(), strict=True)
    return min(len(set(a) & set(b)) / len(set(b)) for a, b in pairs)


def check(step: Step, name: str, layer: Layer, chosen: torch.Tensor | None) -> dict[str, float]:
    """Of a contender's first layer: its error, and the share of tokens that it and today's choose.

    Raises:
        ValueError: it is wrong.
    """
    made = layer(0)
    off = error(step, made)
    both = 1.0 if chosen is None else shared(made.slots, chosen)
    if not (off < GATE and both >= SHARED):
        raise ValueError(f"{name}, {step.batch} x {step.tokens}: {off:.1e}, {both:.4f} shared")
    return {"error": off, "shared": both}


def row(
    memory: Memory, shape: tuple[int, int], old: str, peers: v32_vllm.Peers, without: Sequence[str]
) -> dict[str, Any]:
    """A line of the table: milliseconds of a step by contender, what was checked before, and who
    of the older checkout and the peers is left out, and why."""
    step = Step(memory, *shape)
    count, checks, left_out = len(step.tables), {}, {}
    loops: list[timing.Loop] = []
    chosen = None

    def enter(name: str, layer: Layer) -> None:
        checks[name] = check(step, name, layer, chosen)

        def whole() -> None:
            for i in range(count):
                layer(i)

        loop = timing.make_loop(name, [whole], CONFIG, cuda=True)
        if loop.mode != "graph":
            raise RuntimeError(loop.mode)
        loops.append(loop)

    def try_out(name: str, make: Callable[[], Layer]) -> None:
        try:
            enter(name, make())
        except (RuntimeError, TypeError, ValueError) as reason:
            left_out[name] = f"{type(reason).__name__}: {reason}"[:300]
            typer.echo(f"{name}: {left_out[name]}")
            torch.cuda.synchronize()  # raises where the context is lost

    today = v32_layers.today(step)
    enter(TODAY, today)
    chosen = today(0).slots.clone()
    enter(SINGLE, v32_layers.single(step, snapmla, *helpers(step, peers.ops)))
    if old and BEFORE not in without:
        with package_of(old) as package:
            made = helpers(step, peers.ops)
            try_out(BEFORE, lambda: v32_layers.single(step, package, *made))
    if not peers.missing and VLLM not in without:
        try_out(VLLM, lambda: v32_vllm.layer(step, peers))
    ms = {name: each.us / 1e3 for name, each in timing.interleave(loops, CONFIG).items()}
    return {
        "batch": shape[0], "tokens": shape[1], "ms": ms, "checks": checks,
        "left_out": left_out,
    }  # fmt: skip


def body(rows: Sequence[Row]) -> list[str]:
    """The table; columns of contenders that were there."""
    there = [n for n in (BEFORE, SINGLE, VLLM) if any(n in r["ms"] for r in rows)]
    columns = ["sequences × tokens", "today ms", "µs a layer"]
    for name in there:
        columns += [f"{name} ms", f"{name} / today"]
    columns.append("error (tokens shared with today's)")

    def cells(each: Row) -> Iterator[str]:
        ms = each["ms"]
        yield f"{each['batch']} × {each['tokens']}"
        yield f"{ms[TODAY]:.2f}"
        yield f"{1e3 * ms[TODAY] / LAYERS:.1f}"
        for name in there:
            have = name in ms
            yield f"{ms[name]:.2f}" if have else "–"
            yield f"{ms[name] / ms[TODAY]:.2f}" if have else "–"
        yield ", ".join(
            f"{name} {c['error']:.1e} ({c['shared']:.4f})" for name, c in each["checks"].items()
        )

    said = [
        f"- {each['batch']} × {each['tokens']}, {name}: {reason}"
        for each in rows
        for name, reason in each.get("left_out", {}).items()
    ]
    found = page.table(columns, [list(cells(each)) for each in rows])
    return [*found, "", "Left out:", "", *said] if said else found


def beginning(old: str, peers: v32_vllm.Peers) -> list[str]:
    """Lines up to the table."""
    facts = machine(torch.device("cuda"), timing.Nvml())
    by = "torch" if peers.ops is None else "vLLM's operators"
    notes = [
        f"ms of a step of {LAYERS} layers in one CUDA graph, contenders in turn; {HEADS} heads, "
        f"logits of {LONGEST} columns; no products, no experts",
        f"single calls: RoPE and quantisation of queries by {by}, `torch.cat`",
        "error: relative L2 of a layer to float64 on the tokens that it chose",
    ]
    if old:
        notes.append(f"before: the single calls of commit {checkouts.checkout(old).commit}")
    if peers.missing:
        notes.append(f"no step by vLLM's operators: without {peers.missing}")
    else:
        notes.append(
            "vLLM: 0.24's rms_norm, rotary_embedding (in place), per_token_group_fp8_quant, "
            "indexer_k_quant_and_cache, concat_and_cache_mla, concat_mla_q, cooperative_topk (to "
            "32 rows) or persistent_topk; DeepGEMM's paged logits, FlashMLA's sparse decode; "
            "LayerNorm and weights by torch, positions to slots by a Triton kernel of ours like "
            "vLLM's; its compiled mode, which fuses some of these, is not rebuilt"
        )
    told = page.told(facts, page.FACTS)
    return page.head("A step of DeepSeek-V3.2's attention", "profiles.v32_step_cost", told, *notes)


def main(
    peers: Annotated[Path | None, typer.Option(help="Folder of peers' libraries.")] = None,
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    old: Annotated[str, typer.Option(help="Another checkout, with its variants.")] = "",
    limit: Annotated[float, typer.Option(help="Seconds after which no shape is begun.")] = 100,
    warm: Annotated[int, typer.Option(help="Sequences of a call that only compiles peers.")] = 0,
    without: Annotated[str, typer.Option(help="before, vLLM, by commas: left out.")] = "",
    again: Annotated[Path | None, typer.Option("--render", help="A record's page anew.")] = None,
) -> None:
    """Times the shapes; writes the page and its record."""
    if again is not None:
        page.render(again, body)
        return
    begin, device = time.monotonic(), torch.device("cuda")
    found = v32_vllm.Peers(peers)
    torch.manual_seed(0)
    if warm:
        with torch.inference_mode():
            step = Step(Memory(1 << 17, device), warm, 1024, layers=1)
            if not found.missing:
                v32_vllm.layer(step, found)(0)
            torch.cuda.synchronize()
        return
    head, rows = beginning(old, found), []
    with torch.inference_mode():
        memory = Memory(POOL, device)
        for shape in SHAPES:
            if time.monotonic() - begin > limit:
                typer.echo(f"time is up before {shape}")
                break
            rows.append(row(memory, shape, old, found, without.split(",")))
            typer.echo("\n".join(body(rows[-1:])[2:]))
            page.write_record(out / "v32_step_cost.json", head, rows, body)
            torch.cuda.empty_cache()
    typer.echo(f"{len(rows)} shapes in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    typer.run(main)
