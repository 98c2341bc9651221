"""Dense decode of caches of bytes beside that of our own cache, by each row tile, on one GPU.

    python -m profiles.records_cost --out profiles/results

A format's cache holds the tokens of the 644-byte cache, as each stores them.  Contenders take
turns, as in ``profiles.mha_cost``, and only ratios of one table hold.  The first sequence's results
are compared with fp64 on what its cache holds before anything is timed.  ``GB/s`` are bytes of
tokens alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer
from torch import Tensor

import snapmla
from codegen.artifacts import write_atomic
from dsl_kernels.families import FAMILIES
from dsl_kernels.families.formats import FORMATS
from dsl_kernels.families.sparse_decode import ROW_TILES
from profiles import page, timing
from profiles.machine import machine
from profiles.mha_cost import in_turn, ratio, spread
from profiles.shapes import DecodeShape
from snapmla.testing import metrics, selfcheck
from snapmla.testing.dense_reference import dense_decode_reference
from snapmla.testing.record_reference import fields_of

PAGE, SCALE = 64, 192**-0.5
DENSE = FAMILIES["record_decode"].formats
SHAPES = (
    DecodeShape(32, 16384, 16), DecodeShape(32, 16384, 16, s_q=2), DecodeShape(32, 16384, 64),
    DecodeShape(32, 16384, 128), DecodeShape(64, 4096, 128), DecodeShape(16, 1024, 16),
    DecodeShape(1, 131072, 16),
)  # fmt: skip
# Relative L2 of out, and error of the LSE, to fp64 on the stored numbers: results are BF16.
OUT_ALLOWED, LSE_ALLOWED = 4e-3, 1e-3


def tokens_to(cache: snapmla.PagedKVCache, seed: int) -> None:
    """Random tokens to all slots: the same ones whatever the format."""
    generator = torch.Generator(cache.device).manual_seed(seed)
    record = FORMATS[cache.format]
    split = record.content.count
    for slots in torch.arange(cache.num_slots, device=cache.device).split(1 << 17):
        shape = (len(slots), record.channels)
        x = torch.randn(shape, generator=generator, device=cache.device).bfloat16()
        snapmla.append_kv(cache, x[:, :split], x[:, split:] if record.rope else None, slots)


def problem(shape: DecodeShape, fmt: str, device: torch.device) -> tuple[Any, ...]:
    """(query in BF16, cache, block_table, lengths)."""
    lengths = torch.tensor(shape.lengths(), dtype=torch.int32, device=device)
    width = -(-shape.seqlen // PAGE)
    cache = snapmla.PagedKVCache.allocate(shape.batch * width, PAGE, device=device, dtype=fmt)
    tokens_to(cache, 1)
    generator = torch.Generator(device).manual_seed(2)
    pages = torch.randperm(shape.batch * width, generator=generator, device=device).int()
    rows = (shape.batch, shape.s_q, shape.num_heads, FORMATS[fmt].channels)
    query = torch.randn(rows, generator=generator, device=device).bfloat16()
    return query, cache, pages.view(shape.batch, width), lengths


def check(what: str, found: tuple[Tensor, Tensor], given: tuple[Any, ...]) -> float:
    """Relative L2 of the first sequence; SystemExit where a result is wrong."""
    query, cache, table, lengths = given
    n, record = int(lengths[0]), FORMATS[cache.format]
    content, scales, rope = fields_of(cache.kv[table[0].long(), :, 0], record)
    kv = torch.cat((content * scales.repeat_interleave(record.group, -1), rope), -1)
    kv, one = kv[:n, None, None], torch.arange(n, device=table.device)[None]
    truth = dense_decode_reference(query[:1].double(), kv, one, lengths[:1], SCALE)
    error = metrics.relative_l2(found[0][:1], truth[0])
    lse_error = metrics.lse_error(found[1][:1], truth[1])
    if not (error <= OUT_ALLOWED and lse_error <= LSE_ALLOWED):
        raise SystemExit(f"{what}: relative L2 {error:.1e}, LSE {lse_error:.1e}")
    return error


def calls_of(shape: DecodeShape, device: torch.device) -> dict[str, Callable[[], Any]]:
    """What is timed by name, each compared with fp64 once."""
    calls: dict[str, Callable[[], Any]] = {}
    wishes: list[tuple[str, int | None]] = [("fp8", None)]
    wishes += [(fmt, tile) for fmt in DENSE for tile in ROW_TILES["mix16"]]
    given: dict[str, tuple[Any, ...]] = {}
    for fmt, tile in wishes:
        own = given.setdefault(fmt, problem(shape, fmt, device))
        q, cache, table, lengths = own
        if fmt == "fp8":
            q = snapmla.quantize_q(q[..., :512], q[..., 512:])
        plan = snapmla.plan_decode(
            lengths, shape.num_heads, shape.s_q, page_size=PAGE, max_pages=table.shape[1],
            cache_dtype=fmt, row_tile=tile,
        )  # fmt: skip
        out = torch.empty(*plan.out_shape, dtype=torch.bfloat16, device=device)
        lse = torch.empty(*plan.lse_shape, device=device)

        def call(
            q: Any = q, own: tuple[Any, ...] = own, plan: Any = plan, out: Tensor = out,
            lse: Tensor = lse,
        ) -> None:  # fmt: skip
            snapmla.decode(q, *own[1:], softmax_scale=SCALE, plan=plan, out=out, lse=lse)

        call()
        name = f"{fmt} r{plan.row_tile}"
        if fmt == "fp8":
            errors = selfcheck.decode_errors(
                out, lse, q, cache, table, lengths, SCALE, plan=plan, batches=[0]
            )
            if not errors.right:
                raise SystemExit(f"{shape.label}, {name}: {errors}")
        else:
            check(f"{shape.label}, {name}", (out, lse), own)
        calls[name] = call
    return calls


def rows_of(shape: DecodeShape, device: torch.device, seed: int) -> list[str]:
    """Lines of the table."""
    times = in_turn(calls_of(shape, device), seed)
    ours = next(iter(times))
    lines = []
    for name, each in times.items():
        tokens = shape.batch * shape.seqlen * FORMATS[name.split()[0]].token_bytes
        rate = tokens / sorted(each)[len(each) // 2] * 1e-3
        slower = ratio(times[ours], each)
        lines.append(f"| {shape.label} | {name} | {spread(each)} | {rate:.0f} | {slower:.2f} |")
    return lines


def main(
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    seed: Annotated[int, typer.Option(help="Of the order of contenders.")] = 0,
) -> None:
    """Times the shapes and writes ``records_cost.md``."""
    device = torch.device("cuda")
    lines = ["| shape | cache, row tile | µs | GB/s | time beside fp8's |", "|---" * 5 + "|"]
    with torch.inference_mode():
        for shape in SHAPES:
            lines += (found := rows_of(shape, device, seed))
            typer.echo("\n".join(found))
            torch.cuda.empty_cache()
    named = ("gpu", "driver", "cuda", "torch", "max_sm_mhz", "power_limit_w")
    head = page.head(
        "Dense decode of caches of bytes", "profiles.records_cost",
        page.told(machine(device, timing.Nvml()), named),
        "the median (middle half) of rounds in random order; a ratio is the median of a round's",
    )  # fmt: skip
    write_atomic(out / "records_cost.md", "\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    typer.run(main)
