"""Sparse decode over DeepSeek V4's two caches beside FlashMLA's, on one GPU:
``python -m profiles.bench sparse_v4_cost --peers DIR``.

Both read the same bytes: a sliding window of 128 tokens in pages of 256, and 512 or 1024 compressed
tokens in pages of 64, or the first list alone.  Queries and indices are as in
``profiles.tables.sparse_cost``.

``sparse_v4_sweep`` times short work cut in other ways: query heads of a CTA, and after how many
tokens a list is cut (0: as the planner would), FlashMLA beside them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import snapmla
from dsl_kernels.formats.dims import TOKEN_TILE
from profiles import table
from profiles.table import Run, Table
from profiles.tables import sparse_cost
from profiles.tables.sparse_cost import (
    PEER,
    Contender,
    Lists,
    Problem,
    filled,
    flashmla,
    random_sets,
    room,
    tiles,
)  # fmt: skip
from profiles.timing import Call
from snapmla.cache.paged import PagedKVCache
from snapmla.compat import flash_mla
from snapmla.sparse.decode import sparse_decode
from snapmla.sparse.two_lists import Second

SCALE, TOKENS = 512**-0.5, 1 << 20  # tokens of each cache
WINDOW, PAGES = 128, (256, 64)
SHAPES = (  # b, s_q, heads, second list
    (128, 2, 128, 512), (128, 2, 64, 512), (128, 2, 128, 1024), (128, 2, 64, 1024),
    (128, 1, 64, 512), (128, 1, 16, 512), (32, 2, 128, 512), (2, 2, 128, 512), (2, 2, 64, 1024),
    (256, 2, 64, 512), (128, 2, 128, 0), (128, 2, 64, 0), (148, 2, 128, 16384),
)  # fmt: skip
TAILS = (  # and how many entries of the second list are tokens, of short prompts; -1 behind
    (128, 2, 64, 512, 100), (128, 2, 128, 512, 100), (2, 2, 128, 512, 30),
)  # fmt: skip
ALONE = SHAPES[:3]
SWEPT = (  # short work, of SHAPES
    (2, 2, 128, 512), (2, 2, 64, 1024), (32, 2, 128, 512), (128, 2, 128, 0), (128, 2, 64, 0),
    (128, 1, 64, 512),
)  # fmt: skip
ROW_TILES, SHARES = (64, 32, 16), (1, 2, 3, 4, 5, 9)  # of a list, into how many pieces
Caches = Sequence[PagedKVCache]


def caches_of(run: Run) -> Caches:
    """One cache a page size; FlashMLA's library."""
    sparse_cost.load_flashmla(run)
    return [filled("fp8_v4", TOKENS, run.device, page, mean=0.0) for page in PAGES]


def list_sets(shape: Sequence[int], device: torch.device) -> list[Lists]:
    """Sets of random tokens in both lists, or in the first alone."""
    b, s_q, _, more, *tail = shape
    both = random_sets((b, s_q, WINDOW + more), TOKENS, 584, device)
    sets = []
    for entries in both:
        first, second = (x.contiguous() for x in entries.split((WINDOW, more), -1))
        for held in tail:
            second[..., held:] = -1
        sets.append(Lists(first, second if more else None))
    return sets


def ours(caches: Caches, x: Tensor, sets: list[Lists], kv_format: str | None = None) -> Contender:
    """FlashMLA's name here, a scheduling object, results given."""
    metadata, _ = flash_mla.get_mla_metadata()
    kv: list[Any] = [cache.kv for cache in caches]
    results = room(x)
    given: dict[str, Any] = {} if kv_format is None else {"kv_format": kv_format}
    scale = SCALE if kv_format is None else 576**-0.5

    def call(lists: Lists) -> Call:
        second: dict[str, Any] = {}
        if lists.second is not None:
            second = {"extra_k_cache": kv[1], "extra_indices_in_kvcache": lists.second}
        return lambda: flash_mla.flash_mla_with_kvcache(
            x, kv[0], None, None, 512, metadata, softmax_scale=scale, is_fp8_kvcache=True,
            indices=lists.first, **results, **second, **given,
        )  # fmt: skip

    return Contender("snapmla", list(map(call, sets)), x.double(), sets[0], caches, scale)


def cut(caches: Caches, x: Tensor, sets: list[Lists], row_tile: int, tokens: int) -> Contender:
    """Ours by a plan: heads of a CTA, and after how many tokens a list is cut (0: as it comes)."""
    b, s_q, heads, _ = x.shape
    width = sum(each.shape[-1] for each in sets[0] if each is not None)
    plan = snapmla.plan_sparse_decode(
        heads, s_q, topk=width, batch=b, device=x.device, row_tile=row_tile,
        fixed_split_tokens=tokens or None, cache_dtype="fp8_v4",
    )  # fmt: skip
    results = room(x)

    def call(lists: Lists) -> Call:
        extra = None if lists.second is None else Second(caches[1], lists.second, None)
        return lambda: sparse_decode(
            x, caches[0], lists.first, softmax_scale=SCALE, plan=plan, extra=extra, **results
        )

    name = f"{row_tile}, {tokens}"
    return Contender(name, list(map(call, sets)), x.double(), sets[0], caches, SCALE)


def problem(caches: Caches, shape: tuple[int, ...], cuts: bool = False) -> Problem:
    """A row of ``SHAPES``, or of ``TAILS``; by all cuts, too, if asked for."""
    b, s_q, heads, more, *tail = shape
    held, device = WINDOW + (tail[0] if tail else more), caches[0].device
    x = torch.randn(b, s_q, heads, 512, device=device).bfloat16()
    sets = list_sets(shape, device)
    label = f"{b}, {s_q}, {heads}, {WINDOW} + {more}" + (f" ({tail[0]} tokens)" if tail else "")
    facts = {
        "shape": label, "sizes": [b, s_q, heads, held], "units": tiles(b, s_q, heads, held)
    }  # fmt: skip
    found = [flashmla(caches, x, sets), ours(caches, x, sets)]
    if cuts:
        found += [cut(caches, x, sets, *way) for way in ways(heads, WINDOW + more)]
    return Problem(facts, found, x)


def ways(heads: int, entries: int) -> Iterator[tuple[int, int]]:
    """Heads of a CTA, tokens of a piece."""
    count = entries // TOKEN_TILE
    cuts = [0, *sorted({-(-count // n) * TOKEN_TILE for n in SHARES if n <= count})]
    if count > max(SHARES):
        cuts.insert(1, TOKEN_TILE)
    return itertools.product((tile for tile in ROW_TILES if tile <= heads), cuts)


COST = Table(
    "sparse_v4_cost", "Sparse decode over V4's caches beside FlashMLA", problem,
    (*ALONE, *TAILS, *SHAPES[len(ALONE) :]),
    (
        table.fact("b, s_q, heads, lists", "shape"), table.us(PEER), table.error(PEER),
        table.us("snapmla"), table.ratio(PEER, "snapmla"), *sparse_cost.rates("snapmla", 1024, 584),
        table.error("snapmla"),
    ),
    sparse_cost.CONFIG,
    notes=(
        f"µs a call, in turn; pages of {PAGES[0]} and {PAGES[1]}; errors: relative L2 to fp64",
        "(n tokens): so many entries of the second list are tokens, -1 stands behind them",
    ),
    setup=caches_of, gate=4e-3, alone=ALONE, peer=PEER, takes=("peers",),
)  # fmt: skip
SWEEP = replace(
    COST, name="sparse_v4_sweep", problem=functools.partial(problem, cuts=True), shapes=SWEPT,
    columns=(
        table.fact("b, s_q, heads, lists", "shape"),
        table.fact("heads of a CTA, tokens of a piece", "who"), table.us(head="µs"),
        table.ratio(PEER, head="FlashMLA / it"),
    ),
    each=True, unlisted=(PEER,), alone=(),
)  # fmt: skip
TABLES = (COST, SWEEP)
