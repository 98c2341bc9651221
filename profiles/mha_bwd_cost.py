"""Backward of dense MHA on one GPU: right, equal bits, and time beside cuDNN and FlashAttention-4.

    python -m profiles.mha_bwd_cost --out profiles/results [--peers DIR] [--parts small,bits,time]

small    ragged batches against fp64 autograd by the mimic's gates (snapmla.testing.mha_grad_job)
large    2 x 4096 and ragged, the forward by the library, against fp64 autograd
bits     five runs, fewer CTAs, and a sequence alone: three gradients equal
two      time of 2 x 4096 alone
time     all launches of a backward, lists among them, in turn with the peers', and each of ours
layer    forward and backward from kv_b_proj's output on, beside a concatenated K and a peer

Peers take K as one tensor with a head's own RoPE channels; ours takes them apart, of one head that
all share (``together`` heads of a CTA's sum), or each head's own.  As in profiles.tables.mha_cost
only ratios of one table hold.  TF counts 2 (3 d_qk + 2 d_v) FLOP a pair that is seen and head.  A
gate is a ratio to the faster one of the peers; one missed by less than 2 % counts as met.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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

from codegen.artifacts import write_atomic
from dsl_kernels.formats.mha_grads import rope_groups, stats_blocks
from dsl_kernels.formats.mha_list import most_tiles, workspace_words
from dsl_kernels.spec import VariantSpec
from profiles.mha_bwd_peers import FlashAttention4, Given
from profiles.tables import mha_cost
from profiles.tables.mha_cost import Shape
from snapmla.mha import mha_prefill
from snapmla.runtime import variants as runtime
from snapmla.runtime.launch import sm_count
from snapmla.testing import metrics
from snapmla.testing.mha_grad_job import GradJob, variants
from snapmla.testing.mha_job import MhaJob, offsets

Call = Callable[[], Any]
ROUNDS, ROUND_MS = 5, 50.0
RUNS, TINY, REPEATS = 5, 2048, 10  # a graph of few tokens holds so many calls
MANY_HEADS = 64
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
        self.attend()
        self.stats = torch.empty(h, stats_blocks(t, len(shape.lq)), 192, 2, device=DEVICE)
        words = [workspace_words(n, len(shape.lq)) for n in (t, t_k)]
        self.work, self.key_work = (
            torch.empty(n, dtype=torch.int32, device=DEVICE) for n in words
        )  # fmt: skip

    def attend(self) -> None:
        """The forward, by the library."""
        shape, rope = self.shape, self.ks[1] if len(self.ks) == 2 else None
        mha_prefill(
            self.q, self.ks[0], self.v, self.cu_q, self.cu_k, max(shape.lq), max(shape.lk),
            causal=shape.causal, k_rope=rope, out=self.out, lse=self.lse,
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

        def dkv(behind_dq: int) -> Call:
            most = min(sms, keys * groups)
            return lambda: at["dkv"](
                *given, key_work, dks[0], *parts, dv, *how, behind_dq, most
            )  # fmt: skip

        calls: dict[str, Call] = {
            "items": lambda: at["items"](*tables, work, key_work, causal, *longest),
            "delta": lambda: at["delta"](
                self.out, self.dout, self.lse, none, self.cu_q, work, key_work, self.stats, rows
            ),
            "dq": lambda: at["dq"](*given, work, dq, scale, causal, min(sms, rows * h)),
            "dkv": dkv(1),
        }
        self.dkv_alone = dkv(0)
        if parts:
            calls["rope_sum"] = lambda: at["rope_sum"](parts[0], dks[1])
        return calls

    def given(self) -> Given:
        """Tensors that peers are given."""
        k = torch.cat([x.expand(-1, self.v.shape[1], -1) for x in self.ks], -1)
        return Given(
            self.shape, self.q, k, self.v, self.out, self.dout, self.lse, self.cu_q, self.cu_k
        )

    def errors(self, theirs: Sequence[Tensor]) -> list[float]:
        """Relative L2 of dQ, dK's NoPE channels and dV to a peer's, and of dK's RoPE channels."""
        dq, dk, dv = (x.double() for x in theirs)
        pairs = [(self.grads[0], dq), (self.grads[1], dk[..., :128]), (self.grads[-1], dv)]
        if len(self.ks) == 2:
            rope = dk[..., 128:]
            pairs.append(
                (self.grads[2], rope if self.rope_heads > 1 else rope.sum(1, keepdim=True))
            )
        return [metrics.relative_l2(mine, want) for mine, want in pairs]

    def workspace(self, together: int) -> str:
        """Bytes a query row and head of lists and statistics, a token and head of RoPE's sums."""
        rows, h_k = len(self.q) * self.shape.heads, self.v.shape[1]
        own = 4 * (self.stats.numel() + self.work.numel() + self.key_work.numel()) / rows
        sums = 256 * rope_groups(h_k, together) / h_k if len(self.ks) == 2 else 0.0
        return f"workspace {own:.1f} B a row and head, {sums:.0f} B a token and KV head"


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


def kinds_of(shape: Shape, every: bool = False) -> list[tuple[str, int, int]]:
    """(label, RoPE heads, KV heads of a CTA's sum): RoPE channels apart, of 4 heads a sum where
    there are heads enough for all CTAs; each head's own; ``every``: also of other sums."""
    if shape.d_qk == 128:
        return [("one K", 1, 1)]
    heads = shape.kv_heads or shape.heads
    few = 4 if heads >= MANY_HEADS else 1
    shared = [(f"shared, {n}", 1, n) for n in ((few, 5 - few, 8) if every else (few,))]
    return [*shared, ("own", heads, 1)]


def gates_of(shape: Shape) -> dict[str, tuple[tuple[str, ...], float]]:
    """Label -> (peers, of which the faster one counts; ratio of speeds that is aimed at)."""
    peers = ("cuDNN",) if shape.group > 1 else ("FA4",) if shape.d_qk == 128 else ("cuDNN", "FA4")
    gates: dict[str, tuple[tuple[str, ...], float]] = {"peers": (peers, shape.gate)}
    if shape.d_qk == 192 and sum(shape.lq) >= TINY:
        gates["deterministic"] = (("FA4 det",), 1.4 if shape.causal else 1.1)
    elif shape.causal:
        gates["deterministic"] = (("FA4 det",), 0.92 if shape.d_qk == 128 else 0.0)
    return gates


def verdicts(shape: Shape, ours: str, found: Mapping[str, list[float]]) -> str:
    """Medians of the rounds' ratios, whose contenders see the same card."""
    texts = []
    for label, (names, gate) in gates_of(shape).items():
        there = [found[name] for name in names if name in found]
        if there:
            ratio = median(min(each) / mine for mine, *each in zip(found[ours], *there))
            verdict = "met" if ratio >= 0.98 * gate else "MISSED"
            texts.append(f"to {label} {ratio:.3f} (gate {gate} {verdict})")
    return ", ".join(texts)


def chained(*calls: Call) -> Call:
    """One behind the other."""

    def call() -> None:
        for each in calls:
            each()

    return call


def peers_of(given: Given, peers: FlashAttention4) -> dict[str, Call]:
    """Calls by name, those that there are."""
    made = {
        "cuDNN": given.cudnn(), "FA4": peers.backward(given),
        "FA4 det": peers.backward(given, deterministic=True),
    }  # fmt: skip
    return {name: call for name, call in made.items() if call is not None}


def replays(calls: Mapping[str, Call], given: Given, repeats: int) -> dict[str, Call]:
    """Graphs of calls; cuDNN's large ones are called anew each time, by autograd."""
    made: dict[str, Call] = {}
    for name, call in calls.items():
        if name != "cuDNN":
            made[name] = Replay(call, repeats)
        elif repeats == 1:
            made[name] = call
        else:
            replay = given.cudnn_replay(repeats)
            made[name if replay else "cuDNN by autograd"] = replay or call
    return made


def row(
    shape: Shape,
    say: Callable[[str], None],
    peers: FlashAttention4,
    round_ms: float = ROUND_MS,
    every: bool = False,
) -> None:
    """One shape: kinds of ours, peers, and each launch of the first kind."""
    flop = 2.0 * shape.heads * (3 * shape.d_qk + 256) * shape.pairs
    kinds = kinds_of(shape, every)
    calls: dict[str, Call] = {}
    problems = {rope: Problem(shape, rope) for rope in {rope for _, rope, _ in kinds}}
    repeats = REPEATS if sum(shape.lq) <= TINY else 1
    said = [problems[1].workspace(kinds[0][2])]
    for label, rope, together in kinds:
        parts = problems[rope].ours(together)

        whole = chained(*parts.values())
        whole()
        torch.cuda.synchronize()
        given = problems[rope].given()
        theirs = peers_of(given, peers)
        for name, call in theirs.items():
            said.append(f"{label} to {name} " + " ".join(
                f"{e:.1e}" for e in problems[rope].errors(call())))  # fmt: skip
        calls[f"ours ({label})"] = Replay(whole, repeats)
        if label == kinds[0][0]:
            calls |= replays(theirs, given, repeats)
            for name, part in parts.items():
                if name in ("delta", "rope_sum"):
                    calls[name] = Replay(part, repeats)
                elif name != "items":  # whose counters only a list kernel resets
                    part = problems[rope].dkv_alone if name == "dkv" else part
                    calls[f"items, {name}"] = Replay(chained(parts["items"], part), repeats)
    found = in_turn(calls, round_ms)
    for name, times in found.items():
        if name != "cuDNN by autograd":
            found[name] = [x / repeats for x in times]
    cells = []
    for name, times in found.items():
        text = f"{name} {median(times):.0f} us"
        if name.startswith(("ours", "cuDNN", "FA4")):
            text += f" {flop / median(times) * 1e-6:.0f} TF"
        if name.startswith("ours"):
            text += " " + verdicts(shape, name, found)
        cells.append(text)
    kind = "causal" if shape.causal else "full"
    heads = f"{shape.heads}/{shape.kv_heads or shape.heads}"
    say(f"time {shape.label} h {heads} {shape.d_qk}/128 {kind}: " + " | ".join([*cells, *said]))


def even(label: str, b: int, tokens: int, heads: int, causal: bool, gate: float, d_qk: int = 192,
         **more: int) -> Shape:  # fmt: skip
    return mha_cost.even(label, b, tokens, heads, d_qk, causal, gate, **more)


def shapes() -> list[Shape]:
    ragged = mha_cost.RAGGED
    of_192 = [
        even("2 x 4096", 2, 4096, 128, True, 1.03),
        even("2 x 8192", 2, 8192, 128, True, 1.0),
        even("1 x 16384", 1, 16384, 16, True, 0.99),
        even("1 x 16384", 1, 16384, 128, True, 0.96),
        Shape("ragged", ragged, ragged, 16, 192, True, 1.02),
        Shape("ragged", ragged, ragged, 128, 192, True, 1.0),
        even("2 x 8192", 2, 8192, 32, True, 1.1, kv_heads=4),
        even("2 x 4096", 2, 4096, 128, False, 1.02),
        even("2 x 8192", 2, 8192, 128, False, 0.97),
        even("1 x 16384", 1, 16384, 16, False, 0.95),
        even("1 x 2048", 1, 2048, 16, True, 1.2),
        even("1 x 512", 1, 512, 16, True, 0.75),
    ]
    of_128 = [
        even("2 x 4096", 2, 4096, 128, True, 0.78, 128),
        even("2 x 8192", 2, 8192, 128, True, 0.78, 128),
        even("2 x 4096", 2, 4096, 128, False, 0.78, 128),
    ]
    return of_192 + of_128


def two_shapes(say: Callable[[str], None], peers: FlashAttention4) -> None:
    """Times 2 x 4096 tokens alone."""
    for shape in (shapes()[0], shapes()[7]):
        row(shape, say, peers)
        torch.cuda.empty_cache()


def gemm(say: Callable[[str], None]) -> None:
    """cuBLAS' rate: two kernels make 1.385 times the products of one that is fused."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    found = in_turn({"cuBLAS": lambda: torch.mm(a, b.t(), out=out)}, ROUND_MS)["cuBLAS"]
    rate = 2.0 * 8192**3 / median(found) * 1e-6
    say(f"cuBLAS 8192^3 {rate:.0f} TF: of ours 192/128 at most {rate / 1.385:.0f} TF")


def times(say: Callable[[str], None], peers: FlashAttention4, only: Sequence[int] = ()) -> None:
    """Times the shapes, the one that most decides first."""
    gemm(say)
    for at, shape in enumerate(shapes()):
        if at in only or not only:
            row(shape, say, peers, every=at == 0 and not only)
            torch.cuda.empty_cache()


def layer_calls(shape: Shape, peers: FlashAttention4) -> dict[str, Call]:
    """Forward and backward from what kv_b_proj gives, (tokens, heads, 256), and a RoPE key."""
    problem = Problem(shape, 1)
    kv = torch.cat([problem.ks[0], problem.v], -1)
    dkv = torch.empty_like(kv)
    problem.ks[0], problem.v = kv[..., :128], kv[..., 128:]
    problem.grads[1], problem.grads[-1] = dkv[..., :128], dkv[..., 128:]
    ours = chained(problem.attend, *problem.ours(4).values())

    def joined() -> Given:
        return problem.given()  # K is concatenated here

    def back(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        _, dk, dv = grads
        return torch.cat([dk[..., :128], dv], -1), dk[..., 128:].sum(1, keepdim=True)

    def cudnn() -> Any:
        made = joined()
        found = made.cudnn()
        return found and back(found())

    def fa4() -> Any:
        made = joined()
        before, after = peers.forward(made), peers.backward(made)
        if before is None or after is None:
            return None
        before()
        return back(after())

    calls: dict[str, Call] = {"ours": Replay(ours), "concatenated, cuDNN": cudnn}
    if fa4() is not None:
        calls["concatenated, FA4"] = fa4
    return calls


def layers(say: Callable[[str], None], peers: FlashAttention4) -> None:
    """Times a layer of two shapes."""
    for shape in (shapes()[0], shapes()[2]):
        found = in_turn(layer_calls(shape, peers), ROUND_MS)
        best = [min(each) for each in zip(*(t for name, t in found.items() if name != "ours"))]
        ratio = median(b / a for a, b in zip(found["ours"], best))
        cells = " | ".join(f"{name} {median(t):.0f} us" for name, t in found.items())
        say(f"layer {shape.label} h {shape.heads} 192/128 causal, forward and backward: {cells} | "
            f"to the faster {ratio:.3f}")  # fmt: skip
        torch.cuda.empty_cache()


RIGHT = {"small": small, "large": large, "bits": bits}
TIMES = {"two": two_shapes, "layer": layers}


def main(
    out: Annotated[Path, typer.Option(help="directory of the table")] = Path("profiles/results"),
    parts: Annotated[str, typer.Option(help="by commas")] = "small,large,bits,time,layer",
    peers: Annotated[Path | None, typer.Option(help="FlashAttention-4's libraries")] = None,
    only: Annotated[str, typer.Option(help="rows of the times, by number and commas")] = "",
) -> None:
    """Prints each line, and writes ``mha_bwd.txt``."""
    lines: list[str] = [torch.cuda.get_device_name(), f"torch {torch.__version__}"]

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)
        write_atomic(out / "mha_bwd.txt", "\n".join([*lines, ""]))

    out.mkdir(parents=True, exist_ok=True)
    fa4 = FlashAttention4(peers)
    for part in parts.split(","):
        begin = time.monotonic()
        try:
            if part in RIGHT:
                RIGHT[part](say)
            elif part == "time":
                times(say, fa4, [int(x) for x in only.split(",") if x])
            else:
                TIMES[part](say, fa4)
        except Exception as error:  # what the other parts tell is wanted all the same
            say(f"{part}: {type(error).__name__}: {error}")
        say(f"[{part}: {time.monotonic() - begin:.0f} s]")


if __name__ == "__main__":
    typer.run(main)
