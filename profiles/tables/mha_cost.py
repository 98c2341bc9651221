"""Dense prefill beside FlashAttention-3 and cuDNN, on one GPU; and a chunk with kv_b_proj:
``python -m profiles.bench mha_cost --peers DIR``.

At these sizes a card sits at its power limit, whose memory is some 20 ms long: what stands behind a
slower contender reads too fast.  So every round takes the contenders in another order, each warms
up before it is timed, and only ratios of one table hold.  cuBLAS' rate of the same run stands
above.  ``mha_alone`` times contenders of some shapes alone.  Results are compared with the peer's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dsl_kernels.formats.mha_list import VALUES
from profiles import table
from profiles.peer_libraries import FlashAttention3
from profiles.table import Run, Table
from profiles.timing import Call, TimingConfig
from snapmla.mha import mha_prefill, workspace_size
from snapmla.testing import metrics

Tensor = torch.Tensor
CONFIG = TimingConfig(
    graph_ms=16.0, rounds=15, warmup_rounds=0, cold_iters=0, host_iters=0, shuffled=True, warm=True
)
OUT_GATE, LSE_GATE = 4e-3, 1e-4  # relative L2, absolute: two kernels that round P to 16 bits
TILE = 64 * 64  # pairs of a query and a key
RAGGED = (512, 8192, 1024, 3000, 5000, 700, 6000, 2048, 4096, 1500)


@dataclass(frozen=True)
class Shape:
    """A batch of prompts.

    Attributes:
        lq, lk: query tokens and keys of each sequence.
        heads, kv_heads, d_qk: of the model.
        gate: the speed ratio to FlashAttention-3 that is aimed at.
    """

    label: str
    lq: tuple[int, ...]
    lk: tuple[int, ...]
    heads: int
    d_qk: int
    causal: bool
    gate: float
    kv_heads: int = 0

    @property
    def group(self) -> int:
        return self.heads // (self.kv_heads or self.heads)

    @property
    def d_v(self) -> int:
        return VALUES[self.d_qk]

    @property
    def pairs(self) -> int:
        """(query, key) pairs that are seen, of one head."""
        total = 0
        for s_q, s_k in zip(self.lq, self.lk):
            first = max(0, s_q - s_k) if self.causal else 0  # rows before it see no key
            rows = s_q - first
            hidden = rows * (rows - 1) // 2 if self.causal else 0
            total += rows * s_k - hidden
        return total

    @property
    def flop(self) -> float:
        """FLOP of both products."""
        return 2.0 * self.pairs * self.heads * (self.d_qk + self.d_v)


def even(
    label: str, b: int, tokens: int, heads: int, d_qk: int, causal: bool, gate: float, **more: int
) -> Shape:
    """``b`` prompts of one length."""
    lengths = (tokens,) * b
    return Shape(label, lengths, lengths, heads, d_qk, causal, gate, **more)


SHAPES = (
    even("2 x 4096", 2, 4096, 128, 192, True, 1.02),
    even("2 x 8192", 2, 8192, 128, 192, True, 0.98),
    even("2 x 8192", 2, 8192, 128, 192, False, 0.97),
    even("1 x 16384", 1, 16384, 16, 192, True, 0.96),
    Shape("ragged 512..8192", RAGGED, RAGGED, 16, 192, True, 0.98),
    Shape("ragged 512..8192", RAGGED, RAGGED, 128, 192, True, 0.98),
    Shape("chunk 2048 of 32768", (2048,), (32768,), 16, 192, True, 0.97),
    even("2 x 8192", 2, 8192, 128, 128, True, 1.03),
    even("2 x 8192", 2, 8192, 128, 128, False, 1.0),
    even("2 x 8192", 2, 8192, 32, 192, True, 1.0, kv_heads=4),
    even("1 x 2048", 1, 2048, 16, 192, True, 1.1),
    even("1 x 512", 1, 512, 16, 192, True, 1.1),
    # heads of GLM-5 (64), of which 32 are what a rank of two has, and of GLM-4.7-Flash (20)
    even("2 x 8192", 2, 8192, 64, 256, True, 0.92),
    even("2 x 8192", 2, 8192, 64, 256, False, 0.92),
    even("2 x 8192", 2, 8192, 32, 256, True, 0.92),
    even("2 x 4096", 2, 4096, 64, 256, True, 0.92),
    Shape("ragged 512..8192", RAGGED, RAGGED, 64, 256, True, 0.92),
    Shape("chunk 2048 of 32768", (2048,), (32768,), 64, 256, True, 0.92),
    even("2 x 8192", 2, 8192, 32, 256, False, 0.92, kv_heads=4),
    even("1 x 2048", 1, 2048, 20, 256, True, 0.92),
)
ALONE = (SHAPES[1], SHAPES[0], SHAPES[2], SHAPES[12], SHAPES[10])  # also by themselves
CHUNKS = ((128, 1.10, 1.04), (16, 1.12, 1.05))  # heads; gates with torch's copies, with good ones


def offsets(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """cu_seqlens of lengths."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


@dataclass(frozen=True)
class Problem(table.Problem):
    """Tensors of a shape, results of ours, the workspace."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    cu_q: Tensor
    cu_k: Tensor
    out: Tensor
    lse: Tensor
    workspace: Tensor

    @classmethod
    def draw(cls, shape: Shape, device: torch.device) -> Problem:
        """Normal numbers, bfloat16; V 0.1 of it would change no time."""
        t_q, t_k = sum(shape.lq), sum(shape.lk)
        kv_heads = shape.kv_heads or shape.heads
        q, k, v, out = (
            torch.randn(n, h, width, device=device).bfloat16()
            for n, h, width in (
                (t_q, shape.heads, shape.d_qk), (t_k, kv_heads, shape.d_qk),
                (t_k, kv_heads, shape.d_v), (t_q, shape.heads, shape.d_v),
            )
        )  # fmt: skip
        words = workspace_size(t_q, len(shape.lq))
        return cls(
            shape, q, k, v, offsets(shape.lq, device), offsets(shape.lk, device), out,
            torch.empty(shape.heads, t_q, device=device),
            torch.empty(words, dtype=torch.int32, device=device),
        )  # fmt: skip

    def ours(self) -> Call:
        """The library's call, its list of work included."""
        return lambda: mha_prefill(
            self.q, self.k, self.v, self.cu_q, self.cu_k, max(self.shape.lq), max(self.shape.lk),
            causal=self.shape.causal, out=self.out, lse=self.lse, workspace=self.workspace,
        )  # fmt: skip

    def fa3(self) -> Call:
        """FlashAttention-3's varlen forward, as vLLM's library has it."""
        return fa3_call(self.q, self.k, self.v, self.cu_q, self.cu_k, self.shape)

    def cudnn(self) -> Call | None:
        """cuDNN by way of torch; None where it takes no such call: ragged, bottom right."""
        shape = self.shape
        square = shape.lq == shape.lk
        if len(set(shape.lq)) > 1 or len(set(shape.lk)) > 1 or (shape.causal and not square):
            return None
        b = len(shape.lq)
        q, k, v = (x.view(b, -1, *x.shape[1:]).transpose(1, 2) for x in (self.q, self.k, self.v))

        def call() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=shape.causal, enable_gqa=shape.group > 1
                )

        return call

    def contenders(self) -> dict[str, list[Call]]:
        """FlashAttention-3, ours, and cuDNN where it has a kernel."""
        cudnn = self.cudnn()
        found = {"FA3": [self.fa3()], "snapmla": [self.ours()]}
        return found | ({"cuDNN": [cudnn]} if cudnn is not None and taken(cudnn) else {})

    def check(self, name: str, calls: Sequence[Call]) -> float:
        """Relative L2 to FlashAttention-3, which raises ValueError where results are wrong."""
        want, want_lse = self.fa3()()[:2]
        out = calls[0]()
        if name == "cuDNN":  # (b, heads, tokens, channels), and no LSE
            return compare(out.transpose(1, 2).flatten(0, 1), want_lse, want, want_lse)
        mine, lse = (self.out, self.lse) if name == "snapmla" else out[:2]
        return compare(mine, lse, want, want_lse)

    def facts(self) -> dict[str, Any]:
        shape, kind = self.shape, "causal" if self.shape.causal else "full"
        return {
            "shape": f"{shape.label}, {shape.heads}, {shape.d_qk}, {kind}", "mask": kind,
            "prompts": shape.label, "heads": f"{shape.heads}/{shape.kv_heads or shape.heads}",
            "d_qk": shape.d_qk, "flop": shape.flop, "gate": shape.gate,
            "units": shape.pairs * shape.heads / TILE,
        }  # fmt: skip


def fa3_call(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, shape: Shape) -> Call:
    """A call of the peer's operator; positions are its own."""
    nothing = [None] * 9
    return lambda: torch.ops._vllm_fa3_C.fwd(
        q, k, v, None, None, None, None, cu_q, cu_k, None, None, None, max(shape.lq),
        max(shape.lk), *nothing, q.shape[-1] ** -0.5, shape.causal, -1, -1, 0.0, True, None, 1,
        None, 0, None, 1, 0, None,
    )  # fmt: skip


def compare(out: Tensor, lse: Tensor, want: Tensor, want_lse: Tensor) -> float:
    """Relative L2 of ours to the peer's.  Raises ValueError for results that are wrong."""
    error, off = metrics.relative_l2(out, want), metrics.lse_error(lse, want_lse)
    if not (error < OUT_GATE and off < LSE_GATE):
        raise ValueError(f"ours is not the peer's: out {error:.1e}, LSE {off:.1e}")
    return error


def graph_of(call: Call, calls: int) -> torch.cuda.CUDAGraph:
    """``calls`` of them, one behind the other."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


@functools.cache
def gemm(device: torch.device) -> str:
    """cuBLAS at 8192 x 8192 x 8192, TFLOP/s."""
    n = 8192
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    c = torch.empty_like(a)
    found = table.times_of({"gemm": [lambda: torch.mm(a, b.t(), out=c)]}, CONFIG, device)
    return f"cuBLAS, bfloat16, {n} cubed: {2.0 * n**3 / found['us']['gemm'] * 1e-6:.0f} TFLOP/s"


def taken(call: Call) -> bool:
    """Says if cuDNN has a kernel for a call."""
    try:
        call()
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        return False
    return True


def tflops(name: str) -> table.Column:
    """TFLOP/s of a contender."""
    return "TFLOP/s", lambda row: f"{row['flop'] / median(row['rounds'][name]) * 1e-6:.0f}"


# ---------------------------------------------------------------------------- a chunk


@dataclass
class Chunk(table.Problem):
    """A chunk of 2048 queries over 32768 fetched tokens: K and V out of kv_b_proj, RoPE apart."""

    heads: int
    gates: list[float]
    calls: table.Calls
    error: float

    def facts(self) -> dict[str, Any]:
        return {"shape": f"{self.heads} heads", "heads": self.heads, "gates": self.gates}

    def contenders(self) -> table.Calls:
        return self.calls

    def check(self, name: str, calls: Sequence[Call]) -> float:
        return self.error  # of ours; others are the peer's, and copies


def chunk(device: torch.device, given: tuple[int, float, float]) -> Chunk:
    """Drawn, and ours compared with FlashAttention-3 on its K."""
    heads, *gates = given
    shape = Shape("chunk", (2048,), (32768,), heads, 192, False, gates[0])
    s_k, dt = 32768, torch.bfloat16
    latent = torch.randn(s_k, 512, device=device, dtype=dt)
    weight = torch.randn(512, heads * 256, device=device, dtype=dt) * 0.04
    rope, q = (
        torch.randn(n, h, w, device=device, dtype=dt)
        for n, h, w in ((s_k, 1, 64), (2048, heads, 192))
    )
    kv = (latent @ weight).view(s_k, heads, 256)
    nope, v = kv[..., :128], kv[..., 128:]
    k, other = (torch.empty(s_k, heads, 192, device=device, dtype=dt) for _ in range(2))
    cu_q, cu_k = offsets((2048,), device), offsets((s_k,), device)
    out = torch.empty(2048, heads, 128, device=device, dtype=dt)
    lse = torch.empty(heads, 2048, device=device)
    work = torch.empty(workspace_size(2048, 1), dtype=torch.int32, device=device)

    def project() -> None:
        torch.mm(latent, weight, out=kv.view(s_k, heads * 256))

    def concatenate() -> None:
        k[..., :128] = nope
        k[..., 128:] = rope

    def ours() -> None:
        mha_prefill(
            q, nope, v, cu_q, cu_k, 2048, s_k, causal=False, k_rope=rope, out=out, lse=lse,
            workspace=work,
        )  # fmt: skip

    fa3 = fa3_call(q, k, v, cu_q, cu_k, shape)
    concatenate()
    want, want_lse = fa3()[:2]
    ours()
    error = compare(out, lse, want, want_lse)

    def ideal() -> None:
        other.copy_(k)

    ways: dict[str, tuple[Call, ...]] = {
        "project": (project,), "concatenate": (concatenate,), "ideal": (ideal,), "FA3": (fa3,),
        "snapmla": (ours,), "theirs": (project, concatenate, fa3), "good": (project, ideal, fa3),
        "whole": (project, ours),
    }  # fmt: skip
    calls = {name: [functools.partial(_all, way)] for name, way in ways.items()}
    return Chunk(heads, gates, calls, error)


def _all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def of_chunk(name: str, gate: int, head: str) -> table.Column:
    """The ratio of kv_b_proj and ours to another way, beside what is aimed at."""
    return head, lambda row: f"{table.by_rounds(row, name, 'whole'):.3f} ({row['gates'][gate]})"


def load(run: Run) -> torch.device:
    """Loads the peer's library."""
    FlashAttention3("fa3", run.peers).load()
    return run.device


CHUNK = Table(
    "", "", chunk, CHUNKS,
    (
        table.fact("heads", "heads"), table.spread("project", "kv_b_proj"),
        table.spread("concatenate", "concatenation"), table.spread("ideal", "ideal"),
        table.spread("FA3", "FA3"), table.spread("snapmla", "snapmla, RoPE apart"),
        table.spread("theirs", "kv_b_proj + concatenation + FA3"),
        table.spread("good", "kv_b_proj + ideal + FA3"),
        table.spread("whole", "kv_b_proj + snapmla"), of_chunk("theirs", 0, "ratio (gate)"),
        of_chunk("good", 1, "ratio to ideal (gate)"), table.error("snapmla", "to FA3"),
    ),
    CONFIG,
    intro=(
        "",
        "A chunk of 2048 queries over 32768 fetched tokens, 192/128, full; µs. `ideal` is a "
        "contiguous copy of K's bytes, the best that a concatenation could be.",
        "",
    ),
)  # fmt: skip
COST = Table(
    "mha_cost", "Dense prefill beside FlashAttention-3 and cuDNN",
    lambda device, shape: Problem.draw(shape, device), SHAPES,
    (
        table.fact("prompts", "prompts"), table.fact("heads", "heads"), table.fact("d_qk", "d_qk"),
        table.fact("mask", "mask"), table.spread("snapmla"), tflops("snapmla"),
        table.spread("FA3"), table.speed("FA3", "snapmla"), table.met("FA3", "snapmla", 0.01),
        table.spread("cuDNN"), table.speed("cuDNN", "snapmla"), table.error("snapmla", "to FA3"),
    ),
    CONFIG,
    notes=lambda run, _: (
        gemm(run.device),
        f"median (middle half) of {CONFIG.rounds} rounds, contenders in random order in each; "
        "ratios of speed are the median of the rounds' own; a ratio within 1 % under its gate "
        "counts as met",
    ),
    setup=load, more=(CHUNK,), takes=("peers",),
)  # fmt: skip
SOLO = replace(
    COST, name="mha_alone", title="Dense prefill, each contender alone",
    notes=(
        "prompts, heads, channels of Q and K, mask; a tile is 64 queries x 64 keys of a head that "
        "are seen",
    ),
    shapes=ALONE, columns=(), alone=ALONE, peer="FA3", more=(),
)  # fmt: skip
TABLES = (COST, SOLO)
