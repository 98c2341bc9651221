"""What exact logits cost: decode of an FP8 cache with ``accuracy="high"``, pipeline ``f16``, beside
the default, dense and sparse, on one GPU.

    python -m profiles.logits_cost --out profiles/results

Contenders take turns, as in ``profiles.mha_cost``, and only ratios of one table hold.  The last
sequence's results are compared with fp64 before anything is timed.  A cache of 32 x 16K tokens is
338 MB, which comes from memory in every call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

import snapmla
from profiles import page, timing
from profiles.machine import machine
from profiles.mha_cost import in_turn, ratio, spread
from profiles.shapes import DecodeShape
from snapmla.sparse.plan import sparse_spec
from snapmla.testing import comparison, selfcheck
from snapmla.testing.sparse_reference import sparse_decode_reference

PAGE, SCALE = 64, 192**-0.5
SHAPES = (
    DecodeShape(32, 16384, 16), DecodeShape(32, 16384, 32), DecodeShape(32, 16384, 64),
    DecodeShape(32, 16384, 128), DecodeShape(16, 1024, 16), DecodeShape(16, 65536, 16),
    DecodeShape(1, 131072, 16), DecodeShape(32, 16384, 64, s_q=2), DecodeShape(64, 4096, 128),
    DecodeShape(64, 256, 16), DecodeShape(32, 256, 64), DecodeShape(24, 256, 128),
)  # fmt: skip
COLUMNS = (
    "shape", "default: rows", "µs", "rel. L2", "LSE error", "f16: rows", "µs", "rel. L2",
    "LSE error", "time ratio",
)  # fmt: skip
TOPK, POOL = 2048, 4096  # entries of a list; pages that lists name tokens of
LISTS = ((128, 16), (128, 32), (128, 64), (128, 128), (2, 128))  # query tokens, heads
CONTENDERS = {"default": "standard", "f16": "high"}


def filled(pages: int, device: torch.device) -> snapmla.PagedKVCache:
    """A cache of random tokens."""
    cache = snapmla.PagedKVCache.allocate(pages, PAGE, device=device)
    for slots in torch.arange(cache.num_slots, device=device).split(1 << 17):
        x = torch.randn(len(slots), 576, device=device).bfloat16()
        snapmla.append_kv(cache, x[:, :512], x[:, 512:], slots)
    return cache


def problem(shape: DecodeShape, device: torch.device) -> tuple[Any, ...]:
    """(query, cache, block_table, lengths), random."""
    lengths = torch.tensor(shape.lengths(), dtype=torch.int32, device=device)
    width = -(-shape.seqlen // PAGE)
    cache = filled(shape.batch * width, device)
    pages = torch.randperm(shape.batch * width, device=device).int()
    y = torch.randn(shape.batch, shape.s_q, shape.num_heads, 576, device=device).bfloat16()
    query = snapmla.quantize_q(y[..., :512], y[..., 512:])
    return query, cache, pages.view(shape.batch, width), lengths


def row(shape: DecodeShape, device: torch.device, seed: int) -> str:
    """One line of the table."""
    torch.cuda.empty_cache()  # what the row before it had
    query, cache, table, lengths = problem(shape, device)
    calls: dict[str, Callable[[], Any]] = {}
    tiles, errors = {}, {}
    for name, accuracy in CONTENDERS.items():
        plan = snapmla.plan_decode(
            lengths, shape.num_heads, shape.s_q, page_size=PAGE, max_pages=table.shape[1],
            accuracy=accuracy,
        )  # fmt: skip
        rows = (shape.batch, shape.s_q, shape.num_heads)
        out = torch.empty(*rows, 512, dtype=torch.bfloat16, device=device)
        lse = torch.empty(rows[0], rows[2], rows[1], device=device)

        def call(plan: Any = plan, out: torch.Tensor = out, lse: torch.Tensor = lse) -> None:
            snapmla.decode(
                query, cache, table, lengths, softmax_scale=SCALE, plan=plan, out=out, lse=lse
            )

        call()
        found = selfcheck.decode_errors(
            out, lse, query, cache, table, lengths, SCALE, plan=plan, batches=[shape.batch - 1]
        )
        if not found.right:
            raise SystemExit(f"{shape.label}, {name}: {found}")
        calls[name], tiles[name], errors[name] = call, plan.row_tile, found
    return _line(shape.label, calls, tiles, errors, seed)


def sparse_row(
    tokens: int, heads: int, cache: snapmla.PagedKVCache, device: torch.device, seed: int
) -> str:
    """The same of lists: each query token names ``TOPK`` tokens of the pool."""
    y = torch.randn(tokens, 1, heads, 576, device=device).bfloat16()
    query = snapmla.quantize_q(y[..., :512], y[..., 512:])
    named = torch.randint(cache.num_slots, (tokens, 1, TOPK), device=device, dtype=torch.int32)
    run = functools.partial(
        sparse_decode_reference, query.nope[-1], query.rope[-1], query.scale[-1], cache.content,
        cache.rope, cache.named_tensors["scale"], named[-1], torch.tensor([TOPK]), SCALE,
    )  # fmt: skip
    calls: dict[str, Callable[[], Any]] = {}
    tiles, errors, label = {}, {}, f"sparse_t{tokens}_k{TOPK}_h{heads}"
    for name, accuracy in CONTENDERS.items():
        plan = snapmla.plan_sparse_decode(
            heads, 1, topk=TOPK, batch=tokens, device=device, accuracy=accuracy
        )
        out = torch.full_like(y[..., :512], torch.nan)
        lse = torch.full((tokens, heads, 1), torch.nan, device=device)

        def call(plan: Any = plan, out: torch.Tensor = out, lse: torch.Tensor = lse) -> None:
            snapmla.decode(
                query, cache, indices=named, softmax_scale=SCALE, plan=plan, out=out, lse=lse
            )

        call()
        spec = sparse_spec("sm_90a", plan.row_tile, "bf16", pipeline=plan.pipeline)
        found = comparison.errors_of(run, out[-1], lse[-1], comparison.mimic_of(spec))
        if not found.right:
            raise SystemExit(f"{label}, {name}: {found}")
        calls[name], tiles[name], errors[name] = call, plan.row_tile, found
    return _line(label, calls, tiles, errors, seed)


def _line(
    label: str,
    calls: dict[str, Callable[[], Any]],
    tiles: dict[str, int],
    errors: dict[str, selfcheck.DecodeErrors],
    seed: int,
) -> str:
    """Times the calls in turn."""
    times = in_turn(calls, seed)
    cells = [
        f"{tiles[name]} | {spread(times[name])} | {errors[name].error:.1e} | "
        f"{errors[name].lse_error:.1e}"
        for name in calls
    ]
    slower = ratio(times["default"], times["f16"])
    return f"| {label} | {' | '.join(cells)} | {slower:.2f} |"


def rows(device: torch.device, seed: int) -> Iterator[str]:
    """Lines of the table: dense decode, then sparse."""
    for shape in SHAPES:
        yield row(shape, device, seed)
    pool = filled(POOL, device)
    for tokens, heads in LISTS:
        yield sparse_row(tokens, heads, pool, device, seed)


def main(
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    seed: Annotated[int, typer.Option(help="Of the order of contenders.")] = 0,
) -> None:
    """Times the shapes and writes ``logits_cost.md``."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    head = page.head(
        "Decode with exact logits", "profiles.logits_cost",
        page.told(machine(device, timing.Nvml()), page.FACTS),
        "the median (middle half) of rounds in random order; a ratio is the median of a round's",
    )  # fmt: skip
    with torch.inference_mode():
        page.write_rows(out / "logits_cost.md", head, COLUMNS, rows(device, seed))


if __name__ == "__main__":
    typer.run(main)
