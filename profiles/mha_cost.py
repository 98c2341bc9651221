"""Dense prefill beside FlashAttention-3 and cuDNN, on one GPU; and a chunk with kv_b_proj.

    python -m profiles.mha_cost --peers DIR --out profiles/results
    python -m profiles.mha_cost --peers DIR --d-qk 256 --also mha_fwd_d256_dbf16_q4_sm90a

At these sizes a card sits at its power limit, whose memory is some 20 ms long: what stands behind a
slower contender reads too fast.  So every round takes the contenders in another order, each warms
up before it is timed, and only ratios of one table hold.  cuBLAS' rate of the same run stands
beside.  Of some shapes each contender is also timed alone (``profiles.alone``); ``--alone`` does
that and nothing else.  Results are compared with the peer's before anything is timed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer
from torch.nn.attention import SDPBackend, sdpa_kernel

from codegen.artifacts import write_atomic
from dsl_kernels.mha_list import VALUES, WIDTHS
from dsl_kernels.spec import VariantSpec
from profiles import alone, page, power, timing
from profiles.machine import machine
from profiles.peer_libraries import FlashAttention3
from snapmla import runtime
from snapmla.mha import mha_prefill, workspace_size
from snapmla.plan import sm_count
from snapmla.testing import metrics

Tensor = torch.Tensor
Call = Callable[[], Any]
ROUNDS, ROUND_MS = 15, 16.0
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
        """Of both products."""
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
class Problem:
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

    def build(self, name: str) -> Call:
        """Another build of the kernel, list of work included; Raises ValueError if it is of other
        heads."""
        spec = VariantSpec.from_name(name)
        if spec.d_qk != self.shape.d_qk or spec.keys != "whole":
            raise ValueError(f"--also {name}: not of {self.shape.d_qk} channels, keys whole")
        device = self.q.device
        items = runtime.kernel(VariantSpec(op="mha_items"), device.type)
        attend = runtime.kernel(spec, device.type)
        ks = self.k.split(WIDTHS[spec.d_qk], -1)
        tables, causal = (self.cu_q, self.cu_k), int(self.shape.causal)
        out, lse = torch.empty_like(self.out), torch.empty_like(self.lse)
        scale, longest = self.shape.d_qk**-0.5, max(self.shape.lk)

        def call() -> tuple[Tensor, Tensor]:
            items(*tables, self.workspace, causal, longest)
            attend(
                self.q, *ks, self.v, *tables, self.workspace, out, lse, scale, causal,
                sm_count(device),
            )  # fmt: skip
            return out, lse

        return call

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


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of a replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def in_turn(calls: dict[str, Call], seed: int = 0) -> dict[str, list[float]]:
    """Microseconds a call in each round; a replay before each that counts."""
    graphs, count = {}, {}
    for name, call in calls.items():
        one = max(replayed(graph_of(call, 2)) / 2, 1e-3)
        count[name] = max(2, min(400, int(ROUND_MS / one)))
        graphs[name] = graph_of(call, count[name])
    found: dict[str, list[float]] = {name: [] for name in calls}
    pick = random.Random(seed)
    for _ in range(ROUNDS):
        for name in pick.sample(list(graphs), len(graphs)):
            replayed(graphs[name])
            found[name].append(1e3 * replayed(graphs[name]) / count[name])
    return found


def spread(times: list[float]) -> str:
    """The median and the middle half, microseconds."""
    low, _, high = quantiles(times, n=4)
    return f"{median(times):.1f} ({low:.1f}–{high:.1f})"


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Of speeds: the median of the rounds' ratios, whose two see the same card."""
    return median(b / a for a, b in zip(ours, theirs))


def row(shape: Shape, device: torch.device, seed: int, also: tuple[str, ...] = ()) -> str:
    """One line of the first table; other builds of the kernel stand behind it in a row each."""
    problem = Problem.draw(shape, device)
    want, want_lse = problem.fa3()()[:2]
    problem.ours()()
    error = compare(problem.out, problem.lse, want, want_lse)
    calls = {"ours": problem.ours(), "fa3": problem.fa3()}
    cudnn = problem.cudnn()
    if cudnn is not None and taken(cudnn):
        calls["cudnn"] = cudnn
    errors = {}
    for name in also:
        calls[name] = problem.build(name)
        errors[name] = compare(*calls[name](), want, want_lse)
    found = in_turn(calls, seed)
    tflops = shape.flop / median(found["ours"]) * 1e-6
    to_fa3 = ratio(found["ours"], found["fa3"])
    to_cudnn = f"{ratio(found['ours'], found['cudnn']):.3f}" if "cudnn" in found else "–"
    verdict = "met" if to_fa3 >= 0.99 * shape.gate else "missed"
    heads = f"{shape.heads}/{shape.kv_heads or shape.heads}"
    kind = "causal" if shape.causal else "full"
    cudnn_text = spread(found["cudnn"]) if "cudnn" in found else "–"
    more = [
        f"\n| {name} | | | | {spread(found[name])} | {shape.flop / median(found[name]) * 1e-6:.0f} "
        f"| | {ratio(found[name], found['fa3']):.3f} | to ours "
        f"{ratio(found[name], found['ours']):.3f} | | | {errors[name]:.1e} |"
        for name in also
    ]
    return (
        f"| {shape.label} | {heads} | {shape.d_qk} | {kind} | {spread(found['ours'])} | "
        f"{tflops:.0f} | {spread(found['fa3'])} | {to_fa3:.3f} | {shape.gate} {verdict} | "
        f"{cudnn_text} | {to_cudnn} | {error:.1e} |"
    ) + "".join(more)


def alone_row(shape: Shape, device: torch.device, meter: power.Meter) -> dict[str, Any]:
    """Contenders of a shape in turn and each by itself, as ``profiles.alone`` tells them."""
    problem = Problem.draw(shape, device)
    problem.ours()()
    want, want_lse = problem.fa3()()[:2]
    compare(problem.out, problem.lse, want, want_lse)
    calls = {"FA3": problem.fa3(), "snapmla": problem.ours()}
    cudnn = problem.cudnn()
    if cudnn is not None and taken(cudnn):
        calls["cuDNN"] = cudnn
    kind = "causal" if shape.causal else "full"
    return {
        "shape": f"{shape.label}, {shape.heads}, {shape.d_qk}, {kind}",
        "units": shape.pairs * shape.heads / TILE,
        "us": {name: median(times) for name, times in in_turn(calls).items()},
        "alone": alone.measure({name: [call] for name, call in calls.items()}, meter),
    }  # fmt: skip


def alone_only(out: Path, device: torch.device) -> None:
    """Writes ``mha_alone.md`` and ``.json``."""
    nvml, rows = timing.Nvml(), []
    head = page.head(
        "Dense prefill, each contender alone", "profiles.mha_cost",
        page.told(machine(device, nvml), page.FACTS),
        "prompts, heads, channels of Q and K, mask; a tile is 64 queries x 64 keys of a head that "
        "are seen",
    )  # fmt: skip
    with torch.inference_mode(), alone.meter_of(nvml) as meter:
        for shape in ALONE:
            rows.append(alone_row(shape, device, meter))
            page.write_record(out / "mha_alone.json", head, rows, alone_body)
            torch.cuda.empty_cache()


def alone_body(rows: Sequence[Any]) -> list[str]:
    """The table of a record."""
    return alone.lines(rows, "FA3", "tile")


def taken(call: Call) -> bool:
    """Whether cuDNN has a kernel for a call."""
    try:
        call()
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        return False
    return True


def chunk(heads: int, gates: tuple[float, float], device: torch.device, seed: int) -> str:
    """A chunk of 2048 queries over 32768 fetched tokens: K and V out of kv_b_proj, RoPE apart."""
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
    found = in_turn(
        {
            "project": project, "concatenate": concatenate, "ideal": lambda: other.copy_(k),
            "fa3": fa3, "ours": ours, "theirs": lambda: (project(), concatenate(), fa3()),
            "good": lambda: (project(), other.copy_(k), fa3()),
            "whole": lambda: (project(), ours()),
        },
        seed,
    )  # fmt: skip
    names = ("project", "concatenate", "ideal", "fa3", "ours", "theirs", "good", "whole")
    cells = " | ".join(spread(found[name]) for name in names)
    first, second = (ratio(found["whole"], found[name]) for name in ("theirs", "good"))
    ratios = f"{first:.3f} ({gates[0]}) | {second:.3f} ({gates[1]})"
    return f"| {heads} | {cells} | {ratios} | {error:.1e} |"


def gemm(device: torch.device) -> str:
    """cuBLAS at 8192 x 8192 x 8192, TFLOP/s."""
    n = 8192
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    c = torch.empty_like(a)
    found = in_turn({"gemm": lambda: torch.mm(a, b.t(), out=c)})["gemm"]
    return f"cuBLAS, bfloat16, {n} cubed: {2.0 * n**3 / median(found) * 1e-6:.0f} TFLOP/s"


def table(
    shapes: Sequence[Shape], device: torch.device, seed: int, also: tuple[str, ...], chunks: bool
) -> Iterator[str]:
    """Prompts, beside other builds; and chunks with kv_b_proj."""
    yield (
        "| prompts | heads | d_qk | mask | snapmla µs | TFLOP/s | FA3 µs | ratio | gate | cuDNN µs "
        "| ratio | to FA3 |"
    )
    yield "|---" * 12 + "|"
    for shape in shapes:
        yield row(shape, device, seed, also)
    if not chunks:
        return
    yield ""
    yield (
        "A chunk of 2048 queries over 32768 fetched tokens, 192/128, full; µs. `ideal` is a "
        "contiguous copy of K's bytes, the best that a concatenation could be."
    )
    yield ""
    yield (
        "| heads | kv_b_proj | concatenation | ideal | FA3 | snapmla, RoPE apart | kv_b_proj + "
        "concatenation + FA3 | kv_b_proj + ideal + FA3 | kv_b_proj + snapmla | ratio (gate) "
        "| ratio to ideal (gate) | to FA3 |"
    )
    yield "|---" * 12 + "|"
    for heads, *gates in CHUNKS:
        yield chunk(int(heads), (gates[0], gates[1]), device, seed)


def main(
    peers: Annotated[Path, typer.Option(help="Folder of peers, with FlashAttention-3's library.")],
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    first: Annotated[int, typer.Option(help="Shapes to time, the first ones.")] = 99,
    seed: Annotated[int, typer.Option(help="Of the order of contenders.")] = 0,
    d_qk: Annotated[int, typer.Option(help="Shapes of such heads alone, and no chunk.")] = 0,
    also: Annotated[
        list[str] | None, typer.Option(help="Other builds of that kernel, in turn with it.")
    ] = None,
    solo: Annotated[
        bool, typer.Option("--alone", help="Each contender by itself: mha_alone.md.")
    ] = False,
) -> None:
    """Times the shapes and writes ``mha_cost.md``."""
    FlashAttention3("fa3", peers).load()
    device = torch.device("cuda")
    if solo:
        alone_only(out, device)
        return
    facts = machine(device, timing.Nvml())
    torch.manual_seed(0)
    lines, shapes = [], [shape for shape in SHAPES if d_qk in (0, shape.d_qk)]
    with torch.inference_mode():
        before = gemm(device)
        for line in table(shapes[:first], device, seed, tuple(also or ()), not d_qk):
            lines.append(line)
            typer.echo(line)
            torch.cuda.empty_cache()
        after = gemm(device)
    head = page.head(
        "Dense prefill beside FlashAttention-3 and cuDNN", "profiles.mha_cost",
        page.told(facts, page.FACTS), f"before: {before}; after: {after}",
        f"median (middle half) of {ROUNDS} rounds, contenders in random order in each; ratios of "
        "speed are the median of the rounds' own; a ratio within 1 % under its gate counts as met",
    )  # fmt: skip
    write_atomic(out / "mha_cost.md", "\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    typer.run(main)
