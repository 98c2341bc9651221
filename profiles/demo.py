"""``make demo``: a realistic decode job, end to end, checked and timed.

A ragged batch with a long-tailed length distribution decodes a few steps through a few layers:
append the new tokens, quantise the queries, plan once per step, decode.  Then come speculative
steps: every request verifies as many draft tokens as it has and accepts some of them, in one ragged
call; and steps of sparse attention, whose indexer chooses what each query token attends to
(``demo_sparse.py``).  The data has what makes MLA quantisation hard: RoPE channels with outliers to
+-1000, latent channels with a bias, token amplitudes that vary, an attention sink at token 0.
Results are compared with fp64 on the stored inputs (``snapmla.testing``); tolerances come from the
errors that a model of the rounding (FP8 P, the tensor core's accumulation of Q.K) makes itself.

On a CUDA device the sizes are real.  Without one, a small instance of the same job runs on the
software GPU: the same compiled kernels, interpreted.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import snapmla
from codegen import toolchain
from profiles import ceilings, roofline, timing
from profiles.demo_job import (
    DRAFTS,
    SPECULATIVE_STEPS,
    Batch,
    Checked,
    D,
    Job,
    Model,
    fill,
    gpu_job,
    make_batch,
    same_rows,
    small_job,
    stored,
)  # fmt: skip
from profiles.demo_sparse import sparse_steps
from snapmla import checks
from snapmla.cache import layouts
from snapmla.cache.paged import PagedKVCache
from snapmla.cache.quant import QuantizedQuery
from snapmla.dense import DecodePlan
from snapmla.errors import SnapMLAError, VariantError
from snapmla.runtime import variants
from snapmla.testing.comparison import decode_errors
from snapmla.testing.rounding import quantize_rows


def decode_steps(
    job: Job, batch: Batch, caches: list[PagedKVCache], models: list[Model], console: Console
) -> tuple[list[Checked], DecodePlan, list[QuantizedQuery]]:
    """The job itself: steps x layers of append, quantise, decode, each result checked."""
    plan: DecodePlan | None = None
    results: list[Checked] = []
    queries: list[QuantizedQuery] = []
    lengths = list(batch.lengths)
    for step in range(job.steps):
        started = time.perf_counter()
        grown = [n + job.s_q for n in lengths]
        slots = batch.slots(lengths, grown, job.page_size)
        batch.cache_seqlens.add_(job.s_q)
        if plan is None:
            plan = snapmla.plan_decode(
                batch.cache_seqlens,
                job.num_heads,
                job.s_q,
                page_size=job.page_size,
                max_pages=batch.block_table.shape[1],
            )
        else:
            plan.update_(batch.cache_seqlens)
        lengths = grown
        queries = []
        for layer, (cache, model) in enumerate(zip(caches, models, strict=True)):
            c_kv, k_rope = model.tokens(job.new_tokens)
            snapmla.append_kv(cache, c_kv, k_rope, slots)
            q_nope, q_rope = model.queries()
            q = snapmla.quantize_q(q_nope, q_rope)
            out, lse = snapmla.decode(
                q, cache, batch.block_table, batch.cache_seqlens,
                softmax_scale=job.softmax_scale, plan=plan,
            )  # fmt: skip
            queries.append(q)
            exact = same_rows(stored(cache, slots), quantize_rows(c_kv, k_rope, slots=slots))
            exact &= same_rows((q.nope, q.rope, q.scale), quantize_rows(q_nope, q_rope))
            results.append(check(job, batch, lengths, q, cache, out, lse, step, layer, exact))
        console.print(f"step {step}: {job.layers} layers, {time.perf_counter() - started:.1f} s")
    assert plan is not None
    return results, plan, queries


def speculative_steps(
    job: Job, batch: Batch, cache: PagedKVCache, model: Model, console: Console
) -> list[Checked]:
    """One layer: requests verify different numbers of tokens, and accept different numbers.

    Queries are packed, (total_q, h, ...), with room for the most that there may be; where each
    request's begin stays on the device.  One request has none this time (it waits for its pages).
    """
    plan: DecodePlan | None = None
    results: list[Checked] = []
    room = job.batch * (1 + max(DRAFTS))
    cu_seqlens_q = torch.zeros(job.batch + 1, dtype=torch.int32, device=job.device)
    lengths = batch.cache_seqlens.tolist()
    for step in range(job.steps, job.steps + SPECULATIVE_STEPS):
        tokens = [1 + DRAFTS[(i + step) % len(DRAFTS)] for i in range(job.batch)]
        tokens[step % job.batch] = 0
        grown = [n + new for n, new in zip(lengths, tokens, strict=True)]
        slots = batch.slots(lengths, grown, job.page_size)
        cu_seqlens_q[1:] = torch.tensor(tokens).cumsum(0)
        batch.cache_seqlens.copy_(torch.tensor(grown))
        if plan is None:
            plan = snapmla.plan_decode(
                batch.cache_seqlens, job.num_heads, cu_seqlens_q=cu_seqlens_q, total_q=room,
                page_size=job.page_size, max_pages=batch.block_table.shape[1],
            )  # fmt: skip
        else:
            plan.update_(batch.cache_seqlens, cu_seqlens_q)
        c_kv, k_rope = model.tokens(len(slots))
        snapmla.append_kv(cache, c_kv, k_rope, slots)
        q_nope, q_rope = model.queries(room)
        q = snapmla.quantize_q(q_nope, q_rope)
        out, lse = snapmla.decode(
            q, cache, batch.block_table, batch.cache_seqlens, softmax_scale=job.softmax_scale,
            plan=plan,
        )  # fmt: skip
        exact = same_rows(stored(cache, slots), quantize_rows(c_kv, k_rope, slots=slots))
        exact &= same_rows((q.nope, q.rope, q.scale), quantize_rows(q_nope, q_rope))
        results.append(check(job, batch, grown, q, cache, out, lse, step, 0, exact, cu_seqlens_q))
        # the target model's verdict: the first token always, of the drafts about half
        accepted = [min(new, 1 + new // 2) for new in tokens]
        lengths = [n + new for n, new in zip(lengths, accepted, strict=True)]
        console.print(f"speculative step {step}: {sum(tokens)} tokens of {job.batch} requests in "
                      f"one call, {sum(accepted)} accepted", highlight=False)  # fmt: skip
    return results


def check(
    job: Job,
    batch: Batch,
    lengths: list[int],
    q: QuantizedQuery,
    cache: PagedKVCache,
    out: torch.Tensor,
    lse: torch.Tensor,
    step: int,
    layer: int,
    exact_bits: bool,
    cu_seqlens_q: torch.Tensor | None = None,
) -> Checked:
    """Compares one call with fp64; on a GPU for a few sequences and heads, else for all."""
    picks, heads = list(range(job.batch)), list(range(job.num_heads))
    if job.device.type == "cuda":
        middle = sorted(picks, key=lambda i: lengths[i])[job.batch // 2]
        picks, heads = [0, middle, job.batch - 1], heads[:: max(1, job.num_heads // 8)]
    errors = decode_errors(
        out, lse, q, cache, batch.block_table, batch.cache_seqlens, job.softmax_scale,
        batches=picks, heads=heads, cu_seqlens_q=cu_seqlens_q,
    )  # fmt: skip
    return Checked(step, layer, len(picks), errors, exact_bits)


def show_checks(results: list[Checked], console: Console) -> None:
    table = Table(title="against fp64 on the stored inputs")
    columns = (
        "step",
        "layer",
        "sequences",
        "relative L2",
        "allowed",
        "LSE",
        "allowed",
        "quantised",
        "chosen",
    )
    for column in (*columns, ""):
        table.add_column(column, justify="right")
    for r in results:
        e = r.errors
        table.add_row(
            str(r.step), str(r.layer), str(r.sequences), f"{e.error:.2e}", f"{e.allowed:.2e}",
            f"{e.lse_error:.1e}", f"{e.lse_allowed:.1e}",
            "bit for bit" if r.exact_bits else Text("differs", "red"),
            "all" if r.best is None else "the best" if r.best else Text("others", "red"),
            Text("right", "green") if r.right else Text("wrong", "red"),
        )  # fmt: skip
    console.print(table)


def time_us(call: Callable[[int], object], calls: int = 12, repeats: int = 9) -> float:
    """Median microseconds per call, of CUDA-graph replays of ``calls`` calls in a row."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    samples = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(samples)


def show_times(
    job: Job,
    batch: Batch,
    caches: list[PagedKVCache],
    models: list[Model],
    plan: DecodePlan,
    queries: list[QuantizedQuery],
    console: Console,
) -> None:
    """Times each operation and sets it beside the card's roof, where that is known."""
    name = torch.cuda.get_device_name(job.device)
    tokens = int(batch.cache_seqlens.sum())
    inputs = [m.tokens(job.new_tokens) for m in models]
    raw = [m.queries() for m in models]
    slots = torch.full((job.new_tokens,), -1, dtype=torch.int32, device=job.device)
    slots[:] = torch.arange(job.new_tokens) % job.page_size  # any slots: timing only
    out = torch.empty(
        (job.batch, job.s_q, job.num_heads, D), dtype=torch.bfloat16, device=job.device
    )
    lse = torch.empty((job.batch, job.num_heads, job.s_q), device=job.device)
    n = job.layers

    def run_decode(i: int) -> None:
        snapmla.decode(
            queries[i % n], caches[i % n], batch.block_table, batch.cache_seqlens,
            softmax_scale=job.softmax_scale, plan=plan, out=out, lse=lse,
        )  # fmt: skip

    measured = {
        "decode + merge": time_us(run_decode),
        "quantize_q": time_us(lambda i: snapmla.quantize_q(*raw[i % n], out=queries[i % n])),
        "plan.update_": time_us(lambda i: plan.update_(batch.cache_seqlens)),
        "append_kv": time_us(lambda i: snapmla.append_kv(caches[i % n], *inputs[i % n], slots)),
    }
    show_roofs(job, name, tokens, measured, console)


def show_roofs(
    job: Job, name: str, tokens: int, measured: dict[str, float], console: Console
) -> None:
    """Prints measured microseconds, and rates beside the card's roof if the card is on file.

    Args:
        name: the card's.
        tokens: in the cache, over all sequences.
    """
    title = f"{name}, {tokens:,} tokens in {job.batch} sequences"
    try:
        card = roofline.card_by_name(name)
    except ValueError as error:  # not on file
        table = Table("operation", "µs", title=title)
        for operation, us in measured.items():
            table.add_row(operation, f"{us:.1f}")
        console.print(table)
        console.print(f"no roof to compare with: {error}", highlight=False)
        return
    probe, _, notes = ceilings.probe(timing.Nvml(), quick=True)
    limits, form = card.ceilings.raised_by(probe), roofline.FORMATS["snapmla"]
    rows = job.batch * job.s_q * job.num_heads
    decode_bytes = roofline.decode_bytes(form, tokens, job.batch, job.num_heads, job.s_q)
    work = {
        "decode + merge": (decode_bytes, roofline.decode_flops(tokens, job.num_heads, job.s_q)),
        "quantize_q": (roofline.quantize_q_bytes(rows, rows), 0.0),
        "append_kv": (roofline.append_bytes(job.new_tokens), 0.0),
    }
    table = Table(
        title=title,
        caption=f"roof: {limits.read_gbs:.0f} GB/s read, "
        f"{limits.effective_tflops(form):.0f} TFLOP/s effective ({limits.source})",
    )
    for column in ("operation", "µs", "GB/s", "TFLOP/s", "of the roof"):
        table.add_column(column, justify="right")
    for operation, us in measured.items():
        nbytes, flops = work.get(operation, (0.0, 0.0))
        roof = roofline.roof_us(nbytes, flops, limits, form)
        table.add_row(
            operation,
            f"{us:.1f}",
            f"{nbytes / us * 1e-3:.0f}" if nbytes else "-",
            f"{flops / us * 1e-6:.0f}" if flops else "-",
            f"{roof / us:.0%}" if nbytes else "-",
        )
    console.print(table)
    for note in notes:
        console.print(f"not measured: {note}", highlight=False)


def main(
    device: Annotated[str, typer.Option(help="cuda, cpu (software GPU), or auto")] = "auto",
    layout: Annotated[str, typer.Option(help="split, paged or row640; empty: the job's own")] = "",
) -> None:
    """Runs the demo; the exit status says whether every result was right."""
    console = Console(width=None if Console().is_terminal else 110, markup=False, emoji=False)
    try:
        job = make_job(device, layout)
    except ValueError as error:
        console.print(str(error), style="red", soft_wrap=True)
        raise typer.Exit(2) from None
    try:
        wrong, count = run(job, console)
    except SnapMLAError as error:  # a variant is not there, or another GPU
        console.print(str(error), style="red", soft_wrap=True)
        raise typer.Exit(1) from None
    if wrong:
        console.print(f"{wrong} of {count} results are wrong", style="red")
        raise typer.Exit(1)
    console.print(f"all {count} results are right", style="green")


def make_job(device: str, layout: str) -> Job:
    """The job for what the command line asks.  Raises ValueError that names the option."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    where = checks.device("device", kind)
    job = gpu_job(where) if where.type == "cuda" else small_job(where)
    if layout:
        checks.choice("layout", layout, layouts.LAYOUTS)
        job = dataclasses.replace(job, layout=layout)
    return job


def _sparse(job: Job, console: Console) -> list[Checked]:
    """The sparse steps, none where their kernels cannot be had."""
    if variants.arch_of(job.device) != "sm_90a":
        console.print("no sparse steps: the indexer's kernels are SM90's", soft_wrap=True)
        return []
    try:
        return sparse_steps(job, console)
    except VariantError as error:
        if toolchain.have_compiler():
            raise
        console.print(f"no sparse steps: {error}", soft_wrap=True)
        return []


def run(job: Job, console: Console) -> tuple[int, int]:
    """Decodes, checks and, on a GPU, times; (wrong results, results)."""
    if job.device.type == "cuda":
        console.print(f"running on {torch.cuda.get_device_name(job.device)}")
    else:
        torch.set_num_threads(1)
        console.print(
            "no CUDA device: a small instance of the job runs on the software GPU (the compiled "
            "kernels, interpreted on the CPU; times mean nothing here)",
            soft_wrap=True,
        )
    batch = make_batch(job)
    ordered = sorted(batch.lengths)
    console.print(
        f"{job.batch} sequences of {ordered[0]} to {ordered[-1]} tokens (median "
        f"{ordered[len(ordered) // 2]}), {job.num_heads} heads x {job.s_q} query tokens, pages of "
        f"{job.page_size}, layout {job.layout}, {job.layers} layers, {job.steps} steps",
        soft_wrap=True,
    )
    models = [Model(job, seed) for seed in range(job.layers)]
    caches = fill(job, batch, models)
    results, plan, queries = decode_steps(job, batch, caches, models, console)
    lengths = batch.cache_seqlens.clone()
    results += speculative_steps(job, batch, caches[0], models[0], console)
    batch.cache_seqlens.copy_(lengths)
    results += _sparse(job, console)
    show_checks(results, console)
    if job.device.type == "cuda":
        show_times(job, batch, caches, models, plan, queries, console)
    return sum(not r.right for r in results), len(results)


if __name__ == "__main__":
    typer.run(main)
