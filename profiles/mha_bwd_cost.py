"""Backward of dense MHA on one GPU: right, equal bits, and time beside cuDNN's of torch.

    python -m profiles.mha_bwd_cost --out profiles/results [--parts small,large,bits,time]

small    ragged batches against fp64 autograd by the mimic's gates (snapmla.testing.mha_grad_job)
large    2 x 4096 and ragged, the forward by the library, against fp64 autograd
bits     five runs, fewer CTAs, and a sequence alone: three gradients equal
two      time of 2 x 4096 alone
time     all launches of a backward, lists among them, in turn with cuDNN's, and each of ours

cuDNN takes K as one tensor with a head's own RoPE channels; ours takes them apart, of one head that
all share (``together`` heads of a CTA's sum), or each head's own.  As in profiles.tables.mha_cost
only ratios of one table hold.  TF counts 2 (3 d_qk + 2 d_v) FLOP a pair that is seen and head.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from codegen.artifacts import write_atomic
from dsl_kernels.mha_grads import rope_groups, stats_blocks
from dsl_kernels.mha_list import most_tiles, workspace_words
from dsl_kernels.spec import VariantSpec
from profiles.tables import mha_cost
from profiles.tables.mha_cost import Shape
from snapmla import runtime
from snapmla.mha import mha_prefill
from snapmla.plan import sm_count
from snapmla.testing import metrics
from snapmla.testing.mha_grad_job import GradJob, variants
from snapmla.testing.mha_job import MhaJob, offsets

Call = Callable[[], Any]
ROUNDS, ROUND_MS = 5, 25.0
RUNS, TINY, REPEATS = 5, 2048, 10  # a graph of few tokens holds so many calls
DEVICE = "cuda"


names = functools.cache(runtime.argument_names)


def called(spec: VariantSpec) -> Callable[[str, Mapping[str, Any]], None]:
    """Calls kernels of a job by op and arguments."""

    def call(op: str, given: Mapping[str, Any]) -> None:
        of = variants(spec)[op]
        runtime.kernel(of, DEVICE)(*(given[name] for name in names(of)))

    return call


def spec_of(d_qk: int, dtype: str = "bf16") -> VariantSpec:
    return VariantSpec(op="mha_dq", d_qk=d_qk, dtype=dtype)


def forward_of(spec: VariantSpec, *lengths: Any, **options: Any) -> MhaJob:
    of = VariantSpec(op="mha_fwd", d_qk=spec.d_qk, dtype=spec.dtype)
    return MhaJob.draw(of, *lengths, ctas=sm_count(torch.device(DEVICE)), device=DEVICE, **options)


def small(say: Callable[[str], None]) -> None:
    """Ragged batches, GQA, rows and sequences without keys, large logits; NaN behind each end."""
    lq, lk = (0, 1, 127, 128, 129, 300), (5, 1, 300, 128, 64, 300)
    for d_qk in (192, 128):
        for dtype in ("bf16", "f16"):
            for causal, heads, spread in ((True, (4, 4), 1.0), (False, (4, 2), 3.0),
                                          (True, (8, 1), 30.0)):  # fmt: skip
                spec = spec_of(d_qk, dtype)
                torch.manual_seed(1)
                forward = forward_of(spec, lq, lk, *heads, causal=causal, spread=spread)
                job = GradJob.of(forward, lse_too=True, together=2)
                errors = job.errors(job.run(called(spec)).each)
                verdict = "right" if errors.right else "WRONG"
                say(f"small {d_qk} {dtype} causal {causal} {heads} {spread}: {verdict}; {errors}")


def by_library(job: GradJob) -> GradJob:
    """The job with out and LSE of the library's forward."""
    forward, device = job.forward, job.out.device
    out, lse = torch.empty_like(job.out), torch.empty_like(job.lse)
    mha_prefill(
        forward.q, forward.ks[0], forward.v, offsets(forward.lq).to(device),
        offsets(forward.lk).to(device), max(forward.lq), max(forward.lk), causal=forward.causal,
        softmax_scale=forward.scale, k_rope=forward.ks[1] if len(forward.ks) == 2 else None,
        out=out, lse=lse,
    )  # fmt: skip
    return replace(job, out=out, lse=lse)


def large(say: Callable[[str], None]) -> None:
    """Sizes of service, a few heads."""
    for d_qk in (192, 128):
        for lq, heads, causal in (((4096, 4096), (4, 4), True), ((4096, 4096), (4, 1), False),
                                  ((512, 3000, 1, 5000, 777), (4, 4), True)):  # fmt: skip
            spec = spec_of(d_qk)
            torch.manual_seed(2)
            forward = forward_of(spec, lq, lq, *heads, causal=causal, behind=0.0)
            job = by_library(GradJob.of(forward, together=min(4, heads[1])))
            errors = job.errors(job.run(called(spec)).each)
            verdict = "right" if errors.right else "WRONG"
            say(f"large {d_qk} {lq} {heads} causal {causal}: {verdict}; {errors}")
            torch.cuda.empty_cache()


def bits(say: Callable[[str], None]) -> None:
    """Runs, CTAs, batch: equal or not."""
    for d_qk, causal in ((192, True), (192, False), (128, True)):
        spec = spec_of(d_qk)
        torch.manual_seed(3)
        forward = forward_of(spec, (3000, 2048), (3000, 2500), 8, 4, causal=causal)
        job = by_library(GradJob.of(replace(forward, q=forward.q, ctas=132), together=2))
        found = [job.run(called(spec)).each for _ in range(RUNS)]
        few = replace(job, forward=replace(job.forward, ctas=50)).run(called(spec)).each
        alone = cut(job).run(called(spec)).each
        same = {
            name: (
                all(torch.equal(one[name].nan_to_num(7.0), x.nan_to_num(7.0)) for one in found),
                torch.equal(few[name].nan_to_num(7.0), x.nan_to_num(7.0)),
                torch.equal(alone[name], x[3000:][: len(alone[name])]),
            )
            for name, x in found[0].items()
        }
        say(f"bits {d_qk} causal {causal} (runs, CTAs, alone): {same}")


def cut(job: GradJob) -> GradJob:
    """The second of two sequences, alone."""
    at, to = job.forward, slice(job.forward.lq[0], sum(job.forward.lq))
    keys = slice(at.lk[0], sum(at.lk))
    forward = replace(
        at, q=at.q[to].clone(), ks=tuple(k[keys].clone() for k in at.ks), v=at.v[keys].clone(),
        lq=at.lq[1:], lk=at.lk[1:], ctas=20,
    )  # fmt: skip
    return replace(
        job,
        forward=forward,
        out=job.out[to].clone(),
        dout=job.dout[to].clone(),
        lse=job.lse[:, to].contiguous(),
    )


class Problem:
    """Tensors of a shape, calls on them."""

    def __init__(self, shape: Shape, rope_heads: int):
        torch.manual_seed(5)
        self.shape, self.rope_heads = shape, rope_heads
        t, t_k, h, h_k = sum(shape.lq), sum(shape.lk), shape.heads, shape.kv_heads or shape.heads

        def rows(*size: int) -> Tensor:
            return torch.randn(*size, device=DEVICE, dtype=torch.bfloat16)

        self.q, self.v, self.dout = rows(t, h, shape.d_qk), rows(t_k, h_k, 128), rows(t, h, 128)
        self.ks = [rows(t_k, h_k, 128)]
        if shape.d_qk == 192:
            self.ks.append(rows(t_k, rope_heads, 64))
        self.grads = [torch.empty_like(x) for x in (self.q, *self.ks, self.v)]
        self.cu_q, self.cu_k = offsets(shape.lq).to(DEVICE), offsets(shape.lk).to(DEVICE)
        self.out, self.lse = torch.empty_like(self.dout), torch.empty(h, t, device=DEVICE)
        rope = self.ks[1] if len(self.ks) == 2 else None
        mha_prefill(
            self.q, self.ks[0], self.v, self.cu_q, self.cu_k, max(shape.lq), max(shape.lk),
            causal=shape.causal, k_rope=rope, out=self.out, lse=self.lse,
        )  # fmt: skip
        self.stats = torch.empty(h, stats_blocks(t, len(shape.lq)), 192, 2, device=DEVICE)
        words = [workspace_words(n, len(shape.lq)) for n in (t, t_k)]
        self.work, self.key_work = (
            torch.empty(n, dtype=torch.int32, device=DEVICE) for n in words
        )  # fmt: skip

    def ours(self, together: int) -> dict[str, Call]:
        """Each launch by name."""
        shape, dtype = self.shape, {"dtype": "bf16"}
        t, t_k, h, h_k = len(self.q), len(self.v), shape.heads, self.v.shape[1]
        specs = {"items": VariantSpec(op="mha_items", lists="backward")}
        specs |= {op: VariantSpec(op=f"mha_{op}", **dtype) for op in ("delta", "rope_sum")}
        specs |= {op: VariantSpec(op=f"mha_{op}", d_qk=shape.d_qk, **dtype) for op in ("dq", "dkv")}
        at = {name: runtime.kernel(spec, DEVICE) for name, spec in specs.items()}
        causal, scale, sms = int(shape.causal), shape.d_qk**-0.5, sm_count(self.q.device)
        groups, batch = rope_groups(h_k, together), len(shape.lq)
        parts, how = [], [scale, causal]
        if shape.d_qk == 192:
            parts, how = [torch.empty(t_k, groups, 64, device=DEVICE)], [scale, causal, together]
        tables, (dq, *dks, dv) = (self.cu_q, self.cu_k), self.grads
        given = (self.q, *self.ks, self.v, self.dout, self.stats, *tables)
        rows, keys = most_tiles(t, batch), most_tiles(t_k, batch)
        none, work, key_work = self.lse[:0], self.work, self.key_work
        longest = max(shape.lq), max(shape.lk)
        calls: dict[str, Call] = {
            "items": lambda: at["items"](*tables, work, key_work, causal, *longest),
            "delta": lambda: at["delta"](
                self.out, self.dout, self.lse, none, self.cu_q, work, self.stats, rows
            ),
            "dq": lambda: at["dq"](*given, work, dq, scale, causal, min(sms, rows * h)),
            "dkv": lambda: at["dkv"](
                *given, key_work, dks[0], *parts, dv, *how, min(sms, keys * groups)
            ),
        }
        if parts:
            calls["rope_sum"] = lambda: at["rope_sum"](parts[0], dks[1])
        return calls

    def cudnn(self) -> Call | None:
        """Backward of torch's SDPA by cuDNN; None where it takes no such call."""
        shape = self.shape
        if len(set(shape.lq)) > 1 or shape.lq != shape.lk:
            return None
        k = torch.cat([x.expand(-1, self.v.shape[1], -1) for x in self.ks], -1)
        b = len(shape.lq)
        q, k, v, dout = (
            x.view(b, -1, *x.shape[1:]).transpose(1, 2) for x in (self.q, k, self.v, self.dout)
        )
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        try:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = torch.nn.functional.scaled_dot_product_attention(
                    *leaves, is_causal=shape.causal, enable_gqa=shape.group > 1
                )
        except RuntimeError as error:
            print("cuDNN:", str(error)[:200])
            return None
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def errors(self, theirs: tuple[Tensor, ...]) -> list[float]:
        """Relative L2 of dQ, dK's NoPE channels and dV to the peer's, and of dK's RoPE channels."""
        dq, dk, dv = (x.transpose(1, 2).flatten(0, 1).double() for x in theirs)
        pairs = [(self.grads[0], dq), (self.grads[1], dk[..., :128]), (self.grads[-1], dv)]
        if len(self.ks) == 2:
            rope = dk[..., 128:]
            pairs.append(
                (self.grads[2], rope if self.rope_heads > 1 else rope.sum(1, keepdim=True))
            )
        return [metrics.relative_l2(mine, want) for mine, want in pairs]


class Replay:
    """A graph of so many calls.

    It holds the call, too: a graph knows addresses alone, and capturing the next one gives unused
    memory back to the driver.
    """

    def __init__(self, call: Call, calls: int = 1):
        self.call, self.graph = call, mha_cost.graph_of(call, calls)

    def __call__(self) -> None:
        self.graph.replay()


def in_turn(calls: dict[str, Call], round_ms: float) -> dict[str, list[float]]:
    """Microseconds a call in each round, in random order; one call before each that counts."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    count = dict.fromkeys(calls, 1)
    for _ in range(ROUNDS + 1):
        for name in random.sample(list(calls), len(calls)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            calls[name]()
            begin.record()
            for _ in range(count[name]):
                calls[name]()
            end.record()
            end.synchronize()
            found[name].append(1e3 * begin.elapsed_time(end) / count[name])
            count[name] = max(2, min(500, int(1e3 * round_ms / found[name][-1])))
    return {name: times[1:] for name, times in found.items()}


def kinds_of(shape: Shape) -> list[tuple[str, int, int]]:
    """(label, RoPE heads, KV heads of a CTA's sum): RoPE channels apart, of 4, 1, 8 heads a sum;
    each head's own."""
    if shape.d_qk == 128:
        return [("one K", 1, 1)]
    shared = [(f"shared, {n}", 1, n) for n in (4, 1, 8)]
    return [*shared, ("own", shape.kv_heads or shape.heads, 1)]


def row(
    shape: Shape, say: Callable[[str], None], round_ms: float = ROUND_MS, most: int = 4
) -> None:
    """One shape: the first kinds of ours, and each launch of the first one."""
    flop = 2.0 * shape.heads * (3 * shape.d_qk + 256) * shape.pairs
    kinds = kinds_of(shape)[:most]
    calls: dict[str, Call] = {}
    problems = {rope: Problem(shape, rope) for rope in {rope for _, rope, _ in kinds}}
    said, repeats = [], REPEATS if sum(shape.lq) <= TINY else 1
    for label, rope, together in kinds:
        parts = problems[rope].ours(together)

        def whole(parts: dict[str, Call] = parts) -> None:
            for each in parts.values():
                each()

        whole()
        torch.cuda.synchronize()
        peer = problems[rope].cudnn()
        if peer is not None:
            said.append(f"{label} to cuDNN " + " ".join(
                f"{e:.1e}" for e in problems[rope].errors(peer())))  # fmt: skip
            calls["cuDNN"] = peer
        calls[f"ours ({label})"] = Replay(whole, repeats)
        if label == kinds[0][0]:
            for name, part in parts.items():
                if name in ("delta", "rope_sum"):
                    calls[name] = Replay(part, repeats)
                elif name != "items":  # whose counters only a list kernel resets
                    calls[f"items, {name}"] = Replay(
                        lambda p=part, i=parts["items"]: (i(), p()), repeats
                    )
    found = in_turn(calls, round_ms)
    for name, times in found.items():  # cuDNN's is called anew each time, by autograd
        found[name] = times if name == "cuDNN" else [x / repeats for x in times]
    peer_times = found.get("cuDNN")
    cells = []
    for name, times in found.items():
        text = f"{name} {median(times):.0f} us"
        if name.startswith(("ours", "cuDNN")):
            text += f" {flop / median(times) * 1e-6:.0f} TF"
        if peer_times and name.startswith("ours"):
            text += f" ratio {median(b / a for a, b in zip(times, peer_times)):.3f}"
        cells.append(text)
    kind = "causal" if shape.causal else "full"
    heads = f"{shape.heads}/{shape.kv_heads or shape.heads}"
    say(f"time {shape.label} h {heads} {shape.d_qk}/128 {kind}: " + " | ".join([*cells, *said]))


def shapes() -> list[Shape]:
    two, long, ragged = (4096,) * 2, (8192,), mha_cost.RAGGED
    of_192 = [
        Shape("2 x 4096", two, two, 128, 192, True, 1.03),
        Shape("2 x 4096", two, two, 128, 192, False, 1.02),
        Shape("1 x 8192", long, long, 16, 192, True, 1.0),
        Shape("1 x 8192", long, long, 16, 192, False, 1.0),
        Shape("ragged", ragged, ragged, 16, 192, True, 1.0),
        Shape("2 x 8192", (8192,) * 2, (8192,) * 2, 32, 192, True, 1.1, kv_heads=4),
        Shape("1 x 2048", (2048,), (2048,), 16, 192, True, 1.2),
        Shape("1 x 512", (512,), (512,), 16, 192, True, 0.75),
    ]
    of_128 = [Shape("2 x 4096", two, two, 128, 128, causal, 0.78) for causal in (True, False)]
    return of_192 + of_128


def two_shapes(say: Callable[[str], None]) -> None:
    """Of the first two alone, one kind."""
    for shape in shapes()[:2]:
        row(shape, say, most=1)
        torch.cuda.empty_cache()


def times(say: Callable[[str], None]) -> None:
    """Of the shapes."""
    for shape in shapes():
        row(shape, say)
        torch.cuda.empty_cache()


PARTS = {"small": small, "large": large, "bits": bits, "time": times, "two": two_shapes}


def main(
    out: Annotated[Path, typer.Option(help="directory of the table")] = Path("profiles/results"),
    parts: Annotated[str, typer.Option(help="by commas")] = "small,large,bits,time",
) -> None:
    """Prints each line, and writes ``mha_bwd.txt``."""
    lines: list[str] = [torch.cuda.get_device_name(), f"torch {torch.__version__}"]

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)
        write_atomic(out / "mha_bwd.txt", "\n".join([*lines, ""]))

    out.mkdir(parents=True, exist_ok=True)
    for part in parts.split(","):
        begin = time.monotonic()
        try:
            PARTS[part](say)
        except Exception as error:  # what the other parts tell is wanted all the same
            say(f"{part}: {type(error).__name__}: {error}")
        say(f"[{part}: {time.monotonic() - begin:.0f} s]")


if __name__ == "__main__":
    typer.run(main)
