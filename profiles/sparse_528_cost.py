"""Sparse decode over tokens of 528 bytes, V4.1's and NoPE's, beside our own over 656, on one GPU.

    python -m profiles.sparse_528_cost --out profiles/results

No other kernel of SM90 reads V4.1's tokens.  All caches hold the same random channels, each as it
stores them, in pages of 64; V4.1's with two lists read a second list of the same cache, the others
one list as long as both.  As in profiles.sparse_cost calls are captured in CUDA graphs over several
sets of random indices and replayed in turn; before that, results of some query tokens are compared
with fp64 on what the caches store.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer
from torch import Tensor

import snapmla
from codegen.artifacts import write_atomic
from dsl_kernels.families.formats import FORMATS
from profiles import timing
from profiles.bench import command_line, commit
from profiles.machine import machine
from profiles.sparse_cost import SCALE, Contender, Results, error, in_turn
from snapmla import flash_mla
from snapmla.cache import PagedKVCache
from snapmla.testing.byte_records import quantize_tokens

PAGE, TOKENS = 64, 1 << 22  # tokens of a page, of each cache
BASE, OTHERS = "fp8_ds_mla", ("fp8_nope", "fp8_v41_planar", "fp8_v41_rows")
GATE = 4e-3  # relative L2 to fp64
SHAPES = (  # b, s_q, heads, entries, of them in a second list where the format has one
    (128, 2, 128, 2048, 0), (128, 1, 128, 2048, 0), (128, 2, 64, 2048, 0), (128, 1, 64, 2048, 0),
    (128, 1, 32, 2048, 0), (128, 2, 16, 2048, 0), (128, 1, 16, 2048, 0), (128, 1, 8, 2048, 0),
    (32, 1, 128, 2048, 0), (2, 1, 64, 2048, 0), (2, 1, 16, 2048, 0), (64, 1, 128, 16384, 0),
    (128, 1, 128, 512, 0), (128, 2, 128, 640, 512), (128, 2, 64, 640, 512),
    (128, 1, 16, 640, 512), (128, 2, 128, 1152, 1024), (128, 2, 64, 1152, 1024),
)  # fmt: skip
Shape = tuple[int, int, int, int, int]


def filled(fmt: str, device: torch.device) -> PagedKVCache:
    """A cache of the same tokens for each format."""
    record = FORMATS[fmt]
    cache = PagedKVCache.allocate(TOKENS // PAGE, PAGE, device=device, dtype=fmt)
    torch.manual_seed(0)
    step = 1 << 16
    for begin in range(0, TOKENS // PAGE, step // PAGE):
        x = torch.randn(step, 576, device=device) + 0.2
        values = quantize_tokens(record, x[:, :512], x[:, 512 : 512 + record.rope_channels], False)
        fields = (cache.content, cache.rope, cache.scale)
        for field, value in zip(fields, values, strict=True):
            assert field is not None
            here = field[begin : begin + step // PAGE]
            if here.numel():
                here.view(torch.uint8).copy_(
                    value.view(torch.uint8).view_as(here.view(torch.uint8))
                )
    return cache


def stored(cache: PagedKVCache) -> Callable[[Tensor], Tensor]:
    """(tokens) -> (n, channels of K) float64."""
    record = FORMATS[cache.format]

    def rows(at: Tensor) -> Tensor:
        where = (at // PAGE, at % PAGE)
        assert cache.scale is not None and cache.rope is not None
        scale = cache.scale[where].float().double().repeat_interleave(record.group, -1)
        content = cache.content.view(torch.uint8)[where].view(torch.float8_e4m3fn).double()
        return torch.cat((content * scale, cache.rope[where].double()), -1)

    return rows


def contender(cache: PagedKVCache, x: Tensor, sets: list[Tensor], second: int) -> Contender:
    """``snapmla.decode``, or FlashMLA's name with a second list; planned, results given."""
    b, s_q, heads, _ = x.shape
    record, topk = FORMATS[cache.format], sets[0].shape[-1]
    q = x[..., : record.channels].contiguous()
    out = torch.full((b, s_q, heads, 512), torch.nan, dtype=torch.bfloat16, device=x.device)
    lse = torch.full((b, heads, s_q), torch.nan, device=x.device)
    if second and record.two_lists:
        metadata, _ = flash_mla.get_mla_metadata()
        kv = cache.kv
        assert kv is not None

        def call(indices: Tensor) -> Callable[[], Results]:
            first, more = (y.contiguous() for y in indices.split((topk - second, second), -1))
            return lambda: flash_mla.flash_mla_with_kvcache(
                q, kv, None, None, 512, metadata, softmax_scale=SCALE, is_fp8_kvcache=True,
                indices=first, extra_k_cache=kv, extra_indices_in_kvcache=more, out=out, lse=lse,
                kv_format=cache.format,
            )  # fmt: skip

    else:
        plan = snapmla.plan_sparse_decode(
            heads, s_q, topk=topk, batch=b, device=x.device, cache_dtype=cache.format
        )

        def call(indices: Tensor) -> Callable[[], Results]:
            return lambda: snapmla.decode(
                q, cache, indices=indices, softmax_scale=SCALE, plan=plan, out=out, lse=lse
            )

    return Contender(cache.format, list(map(call, sets)), q.double(), stored(cache))


def row(caches: list[PagedKVCache], shape: Shape) -> str:
    """One line of the table.  Raises ValueError for results that are wrong."""
    b, s_q, heads, topk, second = shape
    device = caches[0].device
    x = torch.randn(b, s_q, heads, 576, device=device).bfloat16()
    count = min(max(3, int(1.2e9) // (b * s_q * topk * 528)), 8)
    sets = [
        torch.randint(TOKENS, (b, s_q, topk), dtype=torch.int32, device=device)
        for _ in range(count)
    ]
    contenders = [contender(cache, x, sets, second) for cache in caches]
    errors = {c.name: error(c, sets[0], topk) for c in contenders}
    wrong = {name: e for name, e in errors.items() if not e < GATE}
    if wrong:
        raise ValueError(f"{shape}: {wrong}")
    us = in_turn(contenders)
    entries = f"{topk - second} + {second}" if second else f"{topk}"
    figures = "".join(
        f" {us[name]:.1f} | {us[BASE] / us[name]:.2f} | {errors[name]:.1e} |" for name in OTHERS
    )
    return f"| {b}, {s_q}, {heads}, {entries} | {us[BASE]:.1f} | {errors[BASE]:.1e} |{figures}"


def main(
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    some: Annotated[int, typer.Option("--first", help="Shapes to time, the first ones.")] = 99,
) -> None:
    """Times the shapes and writes ``sparse_528_cost.md``."""
    facts = machine(torch.device("cuda"), timing.Nvml())
    named = ("gpu", "driver", "cuda", "torch")
    each = "".join(f" {name} | ratio | error |" for name in OTHERS)
    lines = [
        "# Sparse decode over tokens of 528 bytes beside 656", "",
        f"`{command_line(sys.argv[1:], '-m profiles.sparse_528_cost')}`", "",
        f"- commit {commit()}, {datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S}Z",
        f"- {', '.join(f'{k} {facts[k]}' for k in named if facts.get(k) is not None)}",
        f"- µs a call; ratio: time over {BASE} by time; errors: relative L2 to fp64",
        "", f"| b, s_q, heads, entries | {BASE} | error |{each}", "|---" * 12 + "|",
    ]  # fmt: skip
    with torch.inference_mode():
        caches = [filled(fmt, torch.device("cuda")) for fmt in (BASE, *OTHERS)]
        for shape in SHAPES[:some]:
            lines.append(row(caches, shape))
            typer.echo(lines[-1])
    write_atomic(out / "sparse_528_cost.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
