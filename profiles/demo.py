"""``make demo``: a realistic decode job, end to end, checked and timed.

A ragged batch with a long-tailed length distribution decodes a few steps through a few layers:
append the new tokens, quantise the queries, plan once per step, decode.  Then come speculative
steps: every request verifies as many draft tokens as it has and accepts some of them, in one ragged
call; and steps of sparse attention, whose indexer chooses what each query token attends to
(``demo_sparse.py``).  The data has what makes
MLA quantisation hard: RoPE channels with outliers to +-1000, latent channels with a bias, token
amplitudes that vary, an attention sink at token 0.  Results are compared with fp64 on the stored
inputs (``snapmla.testing``); tolerances come from the errors that a model of the rounding (FP8 P,
the tensor core's accumulation of Q.K) makes itself.

On a CUDA device the sizes are real.  Without one, a small instance of the same job runs on the
software GPU: the same compiled kernels, interpreted.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import snapmla
from profiles import ceilings, roofline, timing
from snapmla import checks, layouts
from snapmla.cache import PagedKVCache
from snapmla.decode_plan import DecodePlan
from snapmla.errors import SnapMLAError
from snapmla.quant import QuantizedQuery
from snapmla.testing.comparison import DecodeErrors, decode_errors
from snapmla.testing.rounding import quantize_rows

D, R = 512, 64
DRAFTS = (3, 0, 1, 2)  # tokens that requests verify beside the next one, by request and step
SPECULATIVE_STEPS = 2
ROPE_OUTLIERS = 4  # channels that reach +-1000
SINK_LOGIT = 6.0


@dataclass(frozen=True)
class Job:
    """Sizes of one run."""

    device: torch.device
    batch: int
    num_heads: int
    s_q: int
    layers: int
    steps: int
    page_size: int
    layout: str
    median_length: int
    max_length: int
    softmax_scale: float = 192**-0.5  # DeepSeek: head dim 128 + 64 before absorption

    @property
    def new_tokens(self) -> int:
        """Tokens appended per step and layer."""
        return self.batch * self.s_q


def gpu_job(device: torch.device) -> Job:
    """A decode server's step: 32 requests around 8K tokens, 64 heads, one speculative token."""
    return Job(device, 32, 64, 2, 4, 3, 64, "split", 8192, 65536)


def small_job(device: torch.device) -> Job:
    """The same job, small enough to interpret."""
    return Job(device, 3, 16, 2, 2, 2, 16, "paged", 60, 160)


@dataclass(frozen=True)
class Checked:
    """One decode call against fp64, and the two quantisations before it, bit for bit."""

    step: int
    layer: int
    sequences: int
    errors: DecodeErrors
    exact_bits: bool
    best: bool | None = None  # whether the tokens that were chosen are; None: all tokens were taken

    @property
    def right(self) -> bool:
        return self.errors.right and self.exact_bits and self.best is not False


class Model:
    """Synthetic latents and queries of one layer, with the statistics of the module's docstring."""

    def __init__(self, job: Job, seed: int):
        self.job = job
        self.random = torch.Generator(job.device).manual_seed(seed)
        self.bias = torch.zeros(D, device=job.device)
        self.bias[:: D // 32] = 2.0
        self.direction = self._normal(D)
        self.direction /= self.direction.norm()

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, device=self.job.device)

    def tokens(
        self, n: int, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(c_kv (n, 512), k_rope (n, 64)) bfloat16; ``sinks`` are the rows that are token 0."""
        c_kv = torch.exp(0.3 * self._normal(n, 1)) * (self._normal(n, D) + self.bias)
        k_rope = self._normal(n, R)
        k_rope[:, :ROPE_OUTLIERS] = (333.0 * k_rope[:, :ROPE_OUTLIERS]).clamp(-1e3, 1e3)
        if sinks is not None:
            c_kv[sinks] += SINK_LOGIT / (4.0 * self.job.softmax_scale) * self.direction
        return c_kv.bfloat16(), k_rope.bfloat16()

    def queries(self, *tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(q_nope, q_rope) bfloat16 (b, s_q, h, 512 | 64), slices of one joint tensor.

        Args:
            tokens: extents in place of (b, s_q).
        """
        job = self.job
        q = self._normal(*(tokens or (job.batch, job.s_q)), job.num_heads, D + R)
        q[..., :D] = 0.4 * q[..., :D] + 4.0 * self.direction
        q[..., D : D + ROPE_OUTLIERS] *= 2e-3  # outlier channels of K meet small ones of Q
        joint = q.bfloat16()
        return joint[..., :D], joint[..., D:]


@dataclass(frozen=True)
class Batch:
    """Where the sequences live: table and lengths on the device, and their host copy."""

    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    lengths: list[int]
    num_pages: int

    def slots(self, first: list[int], end: list[int], page_size: int) -> torch.Tensor:
        """Flat slots (int32) of tokens [first[i], end[i]) of every sequence i, in order."""
        table = self.block_table.cpu().long()
        rows = []
        for i, (a, b) in enumerate(zip(first, end, strict=True)):
            t = torch.arange(a, b)
            rows.append(table[i, t // page_size] * page_size + t % page_size)
        return torch.cat(rows).int().to(self.block_table.device)


def make_batch(job: Job, seed: int = 0) -> Batch:
    """Log-normal lengths (a long tail; one sequence is at the cap, one almost empty)."""
    random = torch.Generator().manual_seed(seed)
    spread = torch.exp(torch.randn(job.batch, generator=random))
    lengths = (job.median_length * spread).long().clamp(1, job.max_length).tolist()
    lengths[0], lengths[-1] = job.max_length, 1
    most = job.steps * job.s_q + SPECULATIVE_STEPS * (1 + max(DRAFTS))
    grown = [n + most for n in lengths]
    counts = [-(-n // job.page_size) for n in grown]
    order = torch.randperm(sum(counts) + 1, generator=random)
    table = torch.full((job.batch, max(counts)), -1, dtype=torch.int32)
    used = 0
    for i, count in enumerate(counts):
        table[i, :count] = order[used : used + count].int()
        used += count
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=job.device)
    return Batch(table.to(job.device), seqlens, lengths, len(order))


def fill(job: Job, batch: Batch, models: list[Model]) -> list[PagedKVCache]:
    """Allocates each layer's cache and appends every sequence's prompt."""
    starts = [0, *torch.tensor(batch.lengths).cumsum(0).tolist()][:-1]
    slots = batch.slots([0] * job.batch, batch.lengths, job.page_size)
    sinks = torch.tensor(starts, device=job.device)
    caches = []
    for model in models:
        cache = PagedKVCache.allocate(batch.num_pages, job.page_size, job.layout, job.device)
        cache.content_u8.fill_(0x7F)  # what torch.empty may hold: unused slots are NaN
        cache.rope.fill_(math.nan)
        cache.named_tensors["scale"].fill_(math.nan)
        snapmla.append_kv(cache, *model.tokens(len(slots), sinks), slots)
        caches.append(cache)
    return caches


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


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def stored(cache: PagedKVCache, slots: torch.Tensor) -> Rows:
    """(content, rope, scale) rows of the cache at flat slots."""
    page, offset = slots.long() // cache.page_size, slots.long() % cache.page_size
    content = cache.content_u8[page, offset].view(cache.content.dtype)
    scale = cache.named_tensors["scale"]
    return content, cache.rope[page, offset], scale[page, offset]


def same_rows(got: Rows, want: Rows) -> bool:
    """Whether quantised rows agree bit for bit."""
    return all(bool((a.float() == b.float()).all()) for a, b in zip(got, want, strict=True))


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


def run(job: Job, console: Console) -> tuple[int, int]:
    """Decodes, checks and, on a GPU, times; (wrong results, results)."""
    from profiles.demo_sparse import sparse_steps  # here: it is made of what is above

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
    results += sparse_steps(job, console)
    show_checks(results, console)
    if job.device.type == "cuda":
        show_times(job, batch, caches, models, plan, queries, console)
    return sum(not r.right for r in results), len(results)


if __name__ == "__main__":
    typer.run(main)
