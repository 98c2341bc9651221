"""Times sparse decode on one GPU: variants side by side, and FlashMLA's over its 656-byte records.

    python -m profiles.sparse_bench --out build/bench
    python -m profiles.sparse_bench --axes ,_ln1 --page 64 --flash-mla _flashmla_C.abi3.so
    python -m profiles.sparse_bench --parts 22,33,44,66,132 --shapes b2_h128,b2_h64,b8_h128

Lists are random tokens of spans of 32768, a span a sequence; calls rotate over lists.  Times are
of a call with its merge, in a CUDA graph; ``x`` is FlashMLA's time divided by ours (its heads are
padded to 64 or 128).  Before it is timed a variant is compared with fp64 for a few query tokens.
"""

from __future__ import annotations

import datetime
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer
from torch import Tensor

from codegen.artifacts import write_atomic
from dsl_kernels.dims import HEAD_DIM_QK, KV_LORA_RANK
from dsl_kernels.spec import VariantSpec
from profiles import timing
from profiles.bench import command_line, commit
from profiles.worker import machine
from snapmla import runtime
from snapmla.layouts import LAYOUTS
from snapmla.quant import QuantizedQuery
from snapmla.sparse_plan import SparseOptions, SparsePlan, plan_sparse
from snapmla.testing import metrics, rounding
from snapmla.testing.sparse_reference import sparse_decode_reference

SPAN = 32768  # tokens among which a query token chooses
SCALE = HEAD_DIM_QK**-0.5
LN2 = math.log(2.0)
RECORD = 656  # FlashMLA's bytes of a token
CHECKED = 4  # query tokens that are compared with fp64
RIGHT = 0.03  # relative L2: e4m3 P explains 0.01


class Shape(NamedTuple):
    """A row: b sequences of s_q query tokens with h heads, each over topk tokens."""

    b: int
    s_q: int
    h: int
    topk: int

    @property
    def label(self) -> str:
        """As ``--shapes`` has it."""
        return f"b{self.b}_q{self.s_q}_h{self.h}_k{self.topk}"


SHAPES = tuple(
    Shape(*x)
    for x in (
        (128, 2, 128, 2048), (128, 1, 128, 2048), (128, 1, 64, 2048), (128, 1, 32, 2048),
        (128, 1, 16, 2048), (128, 2, 16, 2048), (128, 1, 8, 2048), (32, 1, 128, 2048),
        (32, 1, 16, 2048), (8, 1, 128, 2048), (2, 1, 128, 2048), (2, 1, 64, 2048),
        (2, 1, 16, 2048), (2, 2, 128, 2048), (1, 4096, 128, 2048), (64, 1, 128, 16384),
        (128, 1, 128, 512),
    )
)  # fmt: skip


def shapes_of(wanted: str) -> Iterator[Shape]:
    """``SHAPES``, or those that are named: b, q (1), h, k (2048), in any order."""
    if not wanted:
        yield from SHAPES
        return
    for word in wanted.split(","):
        given = {k: int(n) for k, n in re.findall(r"([bqhk])(\d+)", word)}
        yield Shape(given["b"], given.get("q", 1), given["h"], given.get("k", 2048))


class Pool:
    """The same tokens in our cache and in FlashMLA's records."""

    def __init__(self, tokens: int, page: int, layout: str, device: torch.device, theirs: bool):
        self.tokens = tokens // (page * SPAN) * page * SPAN or tokens // page * page
        content, self.rope, self.scale = LAYOUTS[layout].allocate(self.tokens // page, page, device)
        self.content = content.view(torch.uint8)
        records = self.tokens if theirs else 0
        self.records = torch.empty(records, RECORD, dtype=torch.uint8, device=device)
        step = 1 << 16
        for first in range(0, self.tokens, step):
            at = torch.arange(first, min(first + step, self.tokens), device=device)
            x = torch.randn(len(at), HEAD_DIM_QK, device=device)
            x[:, :KV_LORA_RANK] += 0.5
            self._store(at, x[:, :KV_LORA_RANK], x[:, KV_LORA_RANK:], page)

    def _store(self, at: Tensor, c: Tensor, rope: Tensor, page: int) -> None:
        where = at // page, at % page
        content, k_rope, scale = rounding.quantize_rows(c, rope, slots=at)
        self.content[where] = content.view(torch.uint8)
        self.rope[where], self.scale[where] = k_rope, scale
        if len(self.records):
            groups = c.reshape(len(at), 4, 128)
            size = groups.abs().amax(-1, keepdim=True) / 448
            bytes_of = (groups / size).to(torch.float8_e4m3fn).view(torch.uint8)
            self.records[at, :512] = bytes_of.reshape(len(at), 512)
            self.records[at, 512:528] = size.reshape(len(at), 4).view(torch.uint8)
            self.records[at, 528:] = rope.bfloat16().view(torch.uint8)

    def lists(self, shape: Shape, first: int) -> Tensor:
        """(b, s_q, topk): of sequence i tokens of span (first + i) modulo their number."""
        spans, device = max(self.tokens // SPAN, 1), self.rope.device
        span = min(SPAN, self.tokens)
        out = torch.empty((*shape[:2], shape.topk), dtype=torch.int32, device=device)
        for i in range(shape.b):
            for j in range(0, shape.s_q, 256):
                rows = out[i, j : j + 256]
                order = torch.rand(len(rows), span, device=device).argsort(-1)
                rows.copy_(order[:, : shape.topk] + (first + i) % spans * SPAN)
        return out


class Ours:
    """One variant on one shape."""

    def __init__(self, pool: Pool, shape: Shape, axis: str, parts: int | None):
        device = pool.rope.device
        options = SparseOptions(num_heads=shape.h, num_parts=parts)
        self.lengths = torch.full((shape.b,), shape.topk, dtype=torch.int32, device=device)
        self.plan: SparsePlan = plan_sparse(options, shape.topk, shape.s_q, self.lengths)
        name = f"sparse_decode_etap_r{self.plan.row_tile}_obf16{axis}_sm90a"
        self.kernel = runtime.kernel(VariantSpec.from_name(name), device.type)
        self.cache = pool.content, pool.rope, pool.scale
        self.out = torch.empty(*shape[:3], KV_LORA_RANK, dtype=torch.bfloat16, device=device)
        self.lse = torch.empty(shape.b, shape.h, shape.s_q, device=device)
        self.sink = torch.empty(0, device=device)

    def __call__(self, q: QuantizedQuery, lists: Tensor) -> tuple[Tensor, Tensor]:
        *work, o_accum, lse_accum = self.plan.arguments
        self.kernel(
            *q.arguments, *self.cache, lists.view(-1, lists.shape[-1]), self.lengths, self.sink,
            *work, self.out, self.lse, o_accum, lse_accum, SCALE, LN2, -math.inf,
            self.plan.merges,
        )  # fmt: skip
        return self.out, self.lse

    def error(self, q: QuantizedQuery, lists: Tensor) -> float:
        """Relative L2 to fp64 over a few query tokens."""
        out, _ = self(q, lists)
        n = len(out.flatten(0, 1))
        pick = torch.linspace(0, n - 1, min(CHECKED, n)).long().tolist()
        content, rope, scale = self.cache
        nope, q_rope, q_scale = (x.flatten(0, 1)[pick] for x in (q.nope, q.rope, q.row_scale))
        want, _ = sparse_decode_reference(
            nope, q_rope, q_scale, content.view(torch.float8_e4m3fn), rope, scale,
            lists.flatten(0, 1)[pick], torch.full((n,), lists.shape[-1]), SCALE,
        )  # fmt: skip
        return metrics.relative_l2(out.flatten(0, 1)[pick], want)


def flashmla(pool: Pool, shape: Shape, x: Tensor, lists: list[Tensor]) -> list[Callable[[], Any]]:
    """Its calls, heads padded."""
    op, heads = torch.ops._flashmla_C.sparse_decode_fwd, 64 if shape.h <= 64 else 128
    q = x.new_zeros(*shape[:2], heads, HEAD_DIM_QK, dtype=torch.bfloat16)
    q[:, :, : shape.h] = x.bfloat16()
    cache, none = pool.records.view(-1, 64, 1, RECORD), (None, None, None)
    made = op(q, cache, lists[0], None, None, None, None, *none, KV_LORA_RANK, SCALE, None)
    planned = made[2], made[3]
    return [
        lambda i=i: op(q, cache, i, None, None, *planned, *none, KV_LORA_RANK, SCALE, None)  # type: ignore[misc]
        for i in lists
    ]


def row(pool: Pool, shape: Shape, axes: list[str], parts: list[int | None]) -> str:
    """One line of the table."""
    config = timing.TimingConfig(graph_ms=12.0, rounds=9, cold_iters=0, host_iters=0)
    n = timing.buffer_count(shape.b * shape.s_q * shape.topk * 644, config)
    lists = [pool.lists(shape, i * shape.b) for i in range(min(n, 8))]
    x = torch.randn(*shape[:3], HEAD_DIM_QK, device=pool.rope.device)
    q = QuantizedQuery(*rounding.quantize_rows(x[..., :KV_LORA_RANK], x[..., KV_LORA_RANK:]))
    loops, errors = [], []
    if len(pool.records):
        loops.append(timing.make_loop("FlashMLA", flashmla(pool, shape, x, lists), config, True))
    for axis in axes:
        for part in parts:
            mine = Ours(pool, shape, axis, part)
            errors.append(mine.error(q, lists[0]))
            label = f"{axis or 'default'} {mine.plan.num_parts} parts"
            calls = [lambda i=i, m=mine: m(q, i) for i in lists]  # type: ignore[misc]
            loops.append(timing.make_loop(label, calls, config, True))
    found = timing.interleave(loops, config)
    base = found.get("FlashMLA")
    cells = []
    for name, each in found.items():
        ratio = "" if base is None or each is base else f" ({base.us / each.us:.2f}x)"
        cells.append(f"{name} {each.us:.1f}{ratio}")
    wrong = "" if max(errors) < RIGHT else " WRONG"
    return f"| {shape.label} | {'; '.join(cells)} | {max(errors):.1e}{wrong} |"


def main(
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    shapes: Annotated[str, typer.Option(help="As b128_q2_h128_k2048, by comma.")] = "",
    axes: Annotated[str, typer.Option(help="Ends of names behind the dtype, by comma.")] = "",
    parts: Annotated[str, typer.Option(help="Numbers of parts, by comma.")] = "",
    page: Annotated[int, typer.Option(help="Tokens of a page.")] = 64,
    layout: Annotated[str, typer.Option(help="Of our cache.")] = "split",
    tokens: Annotated[int, typer.Option(help="Of the pool.")] = 128 * SPAN,
    flash_mla: Annotated[Path | None, typer.Option(help="FlashMLA's library.")] = None,
) -> None:
    """Times the shapes and writes ``sparse_bench.md``."""
    device = torch.device("cuda")
    if flash_mla is not None:
        torch.ops.load_library(str(flash_mla))
    facts = machine(device, timing.Nvml())
    named = ("gpu", "driver", "cuda", "torch", "max_sm_mhz", "power_limit_w")
    lines = [
        "# sparse_bench", "",
        f"`{command_line(sys.argv[1:], '-m profiles.sparse_bench')}`", "",
        f"- commit {commit()}, {datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S}Z",
        f"- {', '.join(f'{k} {facts[k]}' for k in named if facts.get(k) is not None)}",
        f"- pages of {page} tokens, layout {layout}, a pool of {tokens} tokens",
        "",
        "| shape | us a call | relative L2 |",
        "|---|---|---|",
    ]  # fmt: skip
    torch.manual_seed(0)
    counts: list[int | None] = [int(n) for n in parts.split(",") if n] or [None]
    with torch.inference_mode():
        pool = Pool(tokens, page, layout, device, flash_mla is not None)
        for shape in shapes_of(shapes):
            lines.append(row(pool, shape, axes.split(","), counts))
            typer.echo(lines[-1])
            torch.cuda.empty_cache()
    write_atomic(out / "sparse_bench.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
