"""Sparse decode over tokens of 528 bytes, V4.1's and NoPE's, beside our own over 656, on one GPU:
``python -m profiles.bench sparse_528_cost``.

No other kernel of SM90 reads V4.1's tokens.  All caches hold the same random channels, each as it
stores them, in pages of 64; V4.1's with two lists read a second list of the same cache, the others
one list as long as both.
"""

from __future__ import annotations

import dataclasses

import torch

from dsl_kernels.formats.registered import FORMATS
from profiles import table
from profiles.table import Run, Table
from profiles.tables import sparse_cost, sparse_v4_cost
from profiles.tables.sparse_cost import Caches, Lists, Problem, filled, planned, random_sets

TOKENS = 1 << 22  # of each cache
BASE, OTHERS = "fp8_ds_mla", ("fp8_nope", "fp8_v41_planar", "fp8_v41_rows")
SHAPES = (  # b, s_q, heads, entries, of them in a second list where the format has one
    (128, 2, 128, 2048, 0), (128, 1, 128, 2048, 0), (128, 2, 64, 2048, 0), (128, 1, 64, 2048, 0),
    (128, 1, 32, 2048, 0), (128, 2, 16, 2048, 0), (128, 1, 16, 2048, 0), (128, 1, 8, 2048, 0),
    (32, 1, 128, 2048, 0), (2, 1, 64, 2048, 0), (2, 1, 16, 2048, 0), (64, 1, 128, 16384, 0),
    (128, 1, 128, 512, 0), (128, 2, 128, 640, 512), (128, 2, 64, 640, 512),
    (128, 1, 16, 640, 512), (128, 2, 128, 1152, 1024), (128, 2, 64, 1152, 1024),
)  # fmt: skip


def caches_of(run: Run) -> Caches:
    """The same tokens in each format."""
    return {fmt: filled(fmt, TOKENS, run.device, mean=0.2) for fmt in (BASE, *OTHERS)}


def problem(caches: Caches, shape: tuple[int, ...]) -> Problem:
    """A contender a format, by FlashMLA's name where it reads two lists."""
    b, s_q, heads, entries, second = shape
    x = torch.randn(b, s_q, heads, 576, device=caches[BASE].device).bfloat16()
    sets = [Lists(each) for each in random_sets((b, s_q, entries), TOKENS, 528, x.device)]
    apart = [
        Lists(*(part.contiguous() for part in each.first.split((entries - second, second), -1)))
        for each in sets
    ]
    found = []
    for fmt, cache in caches.items():
        if second and FORMATS[fmt].two_lists:
            q = x[..., :512].contiguous()
            named = sparse_v4_cost.ours([cache, cache], q, apart, kv_format=fmt)
            found.append(dataclasses.replace(named, name=fmt, lists=apart[0]))
        else:
            found.append(planned(fmt, cache, x, sets))
    told = f"{entries - second} + {second}" if second else f"{entries}"
    return Problem({"shape": f"{b}, {s_q}, {heads}, {told}"}, found, x)


TABLES = (
    Table(
        "sparse_528_cost", "Sparse decode over tokens of 528 bytes beside 656", problem, SHAPES,
        (
            table.fact("b, s_q, heads, entries", "shape"), table.us(BASE), table.error(BASE),
            *(
                column
                for fmt in OTHERS
                for column in (table.us(fmt), table.ratio(BASE, fmt), table.error(fmt))
            ),
        ),
        sparse_cost.CONFIG,
        notes=(f"µs a call; ratio: time over {BASE} by time; errors: relative L2 to fp64",),
        setup=caches_of, gate=4e-3,
    ),
)  # fmt: skip
