"""Sparse decode beside FlashMLA's, on one GPU:
``python -m profiles.bench sparse_cost --peers DIR``.

Both read the same tokens, FlashMLA as 656-byte rows whose scales are no powers of two, ours from
the FP8 cache.  FlashMLA takes 64 or 128 heads, so other queries are padded as its callers pad them.
Each call of a graph has another set of random indices; results of some query tokens are compared
with fp64 on what each contender has stored, and with the query that it sees: ours over the FP8
cache is held against the BF16 query, too.  Times in turn flatter who lowers the card's clock more,
so some shapes are also timed alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import snapmla
from dsl_kernels.formats.registered import FORMATS
from profiles import table
from profiles.table import Row, Run, Table
from profiles.timing import Call, TimingConfig
from snapmla.cache.paged import PagedKVCache
from snapmla.testing import metrics
from snapmla.testing.byte_records import quantize_tokens

PAGE, SPAN, SEQUENCES = 64, 32768, 128  # tokens of a page, of a sequence; sequences
ROTATED = 1.2e9  # bytes that the sets of indices read, about
CONFIG = TimingConfig(
    graph_ms=12.0, rounds=9, warmup_rounds=0, cold_iters=0, host_iters=0, shuffled=True
)
PEER = "FlashMLA"
GATES = {PEER: 5e-3, "native": 2.5e-2, "rows": 3e-3}  # relative L2 to fp64, topk 2048
QUERY_GATE = 5e-2  # the FP8 query's part in the error to the BF16 query
CACHES = {"native": "fp8", "rows": "fp8_ds_mla"}
BYTES = {"native": 644, "rows": 656}  # of a token
SHAPES = (  # b, s_q, heads, topk
    (128, 2, 128, 2048), (128, 1, 128, 2048), (128, 1, 64, 2048), (128, 2, 64, 2048),
    (128, 1, 32, 2048), (128, 1, 16, 2048), (128, 2, 16, 2048), (128, 1, 8, 2048),
    (32, 1, 128, 2048), (32, 1, 16, 2048), (2, 1, 128, 2048), (2, 1, 64, 2048), (2, 1, 16, 2048),
    (2, 2, 128, 2048), (64, 1, 128, 16384), (128, 1, 128, 512), (512, 1, 64, 2048),
    # as many entries as V4's lists have (sparse_v4_cost)
    (128, 2, 128, 640), (128, 2, 64, 640), (32, 2, 128, 640), (2, 2, 128, 640), (2, 2, 64, 1152),
    (128, 2, 128, 128), (128, 2, 64, 128),
)  # fmt: skip
TAILS = (  # and how many entries are tokens, of prompts that are shorter than topk; -1 behind
    (128, 1, 128, 2048, 1000), (128, 1, 16, 2048, 1000), (32, 1, 128, 2048, 300),
    (128, 1, 64, 2048, 100),
)  # fmt: skip
ALONE = SHAPES[1], SHAPES[0], SHAPES[2], SHAPES[5], (32, 1, 128, 2048)
Results = tuple[Tensor, Tensor]
Caches = dict[str, PagedKVCache]


class Lists(NamedTuple):
    """Lists of a call's query tokens: entries of the first cache, of the second (None)."""

    first: Tensor
    second: Tensor | None = None


@dataclass
class Contender:
    """One way to compute a row, set up for it.

    Attributes:
        calls: one for each set of indices.
        query: (b, s_q, h, channels) float64, as this contender sees it.
        lists: of the first call.
        caches: that the first list is of, and the second.
        scale: of the softmax.
        plan: ours; None of others.
    """

    name: str
    calls: list[Call]
    query: Tensor
    lists: Lists
    caches: Sequence[PagedKVCache]
    scale: float = 576**-0.5
    plan: Any = None


@dataclass
class Problem(table.Problem):
    """A row: facts for its record, contenders, the BF16 query."""

    told: dict[str, Any]
    made: list[Contender]
    x: Tensor
    query_error: dict[str, float] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        return self.told

    def contenders(self) -> table.Calls:
        return {each.name: each.calls for each in self.made}

    def check(self, name: str, calls: Sequence[Call]) -> float:
        """A contender's error, to the query that it sees; of ours over the FP8 cache the BF16
        query's is below ``QUERY_GATE``, too."""
        one = next(each for each in self.made if each.name == name)
        if name == "native":
            off = self.query_error[name] = error(one, self.x, math.inf)
            if not off < QUERY_GATE:
                raise ValueError(f"error to the BF16 query {off:.1e}, not below {QUERY_GATE:.0e}")
        return error(one)

    def extra(self, calls: table.Calls) -> dict[str, Any]:
        return {"query_error": self.query_error} if self.query_error else {}


# ---------------------------------------------------------------------------- what is read


def filled(
    fmt: str, tokens: int, device: torch.device, page_size: int = PAGE, mean: float = 0.5
) -> PagedKVCache:
    """A cache of random tokens, the same in each format."""
    cache = PagedKVCache.allocate(tokens // page_size, page_size, device=device, dtype=fmt)
    torch.manual_seed(0)
    record = FORMATS[fmt]
    content = record.channels - record.rope_channels
    for slots in torch.arange(tokens, device=device).split(1 << 16):
        x = torch.randn(len(slots), 576, device=device)
        x[:, :512] += mean
        c_kv, k_rope = x[:, :content].bfloat16(), x[:, 512 : 512 + record.rope_channels].bfloat16()
        if not record.named:
            snapmla.append_kv(cache, c_kv, k_rope, slots)
            continue
        fields, at = quantize_tokens(record, c_kv, k_rope, False), _at(cache, slots)
        for place, value in zip((cache.content, cache.rope, cache.scale), fields, strict=True):
            assert place is not None
            if place.dtype.itemsize == 1:
                place, value = place.view(torch.uint8), value.view(torch.uint8)
            place[at] = value
    return cache


def _at(cache: PagedKVCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Pages of slots, and where in these."""
    return slots // cache.page_size, slots % cache.page_size


def stored(cache: PagedKVCache, at: Tensor) -> Tensor:
    """(n, channels of K) float64 of tokens of an FP8 cache, whatever its format."""
    assert cache.scale is not None and cache.rope is not None
    where = _at(cache, at)
    scale, rope = cache.scale[where].float().double(), cache.rope[where].double()
    content = cache.content.view(torch.uint8)[where].view(torch.float8_e4m3fn).double()
    if scale.dim() == 1:  # a token's, RoPE's too
        return torch.cat((content, rope), -1) * scale[:, None]
    group = content.shape[-1] // scale.shape[-1]
    return torch.cat((content * scale.repeat_interleave(group, -1), rope), -1)


def index_sets(
    device: torch.device, b: int, s_q: int, topk: int, held: int | None = None
) -> list[Lists]:
    """Sets of random distinct tokens of each query token's sequence, 1 GB of rows all together;
    the first ``held`` entries, -1 behind them."""
    held = topk if held is None else held
    count = min(max(3, int(ROTATED) // (b * s_q * held * 656)), 8)
    sets = []
    for number in range(count):
        made = torch.empty(b, s_q, topk, dtype=torch.int32, device=device)
        for i in range(b):
            picked = torch.rand(s_q, SPAN, device=device).argsort(-1)[:, :topk]
            made[i] = (picked + (number * b + i) % SEQUENCES * SPAN).int()
        made[..., held:] = -1
        sets.append(Lists(made))
    return sets


def random_sets(
    shape: Sequence[int], tokens: int, token_bytes: int, device: torch.device
) -> list[Tensor]:
    """Sets of random tokens, (b, s_q, entries), 1 GB of them all together."""
    count = min(max(3, int(ROTATED) // (math.prod(shape) * token_bytes)), 8)
    return [
        torch.randint(tokens, tuple(shape), dtype=torch.int32, device=device) for _ in range(count)
    ]


# ---------------------------------------------------------------------------- contenders


def room(x: Tensor) -> dict[str, Any]:
    """``out`` and ``lse`` of queries, NaN."""
    b, s_q, heads, _ = x.shape
    out = torch.full((b, s_q, heads, 512), torch.nan, dtype=torch.bfloat16, device=x.device)
    return {"out": out, "lse": torch.full((b, heads, s_q), torch.nan, device=x.device)}


def planned(
    name: str, cache: PagedKVCache, x: Tensor, sets: list[Lists], **options: Any
) -> Contender:
    """``snapmla.decode`` over one list, planned with these options, results given."""
    b, s_q, heads, _ = x.shape
    plan = snapmla.plan_sparse_decode(
        heads, s_q, topk=sets[0].first.shape[-1], batch=b, device=x.device,
        cache_dtype=cache.format, **options,
    )  # fmt: skip
    q: Any = x[..., : FORMATS[cache.format].channels].contiguous()
    seen = q.double()
    if cache.format == "fp8":
        q = snapmla.quantize_q(x[..., :512].contiguous(), x[..., 512:].contiguous())
        seen = torch.cat((q.nope.double(), q.rope.double()), -1) * q.row_scale.double()[..., None]
    scale, results = 576**-0.5, room(x)

    def call(lists: Lists) -> Call:
        return lambda: snapmla.decode(
            q, cache, indices=lists.first, softmax_scale=scale, plan=plan, **results
        )

    return Contender(name, list(map(call, sets)), seen, sets[0], [cache], plan=plan)


def flashmla(caches: Sequence[PagedKVCache], x: Tensor, sets: list[Lists]) -> Contender:
    """FlashMLA's kernel, with its schedule made before."""
    op, (b, s_q, heads, channels) = torch.ops._flashmla_C.sparse_decode_fwd, x.shape
    padded = x.new_zeros(b, s_q, 64 if heads <= 64 else 128, channels)
    padded[:, :, :heads] = x

    def run(lists: Lists, *schedule: Any) -> Any:
        nothing = (None,) * 2
        second = (None,) * 3 if lists.second is None else (caches[1].kv, lists.second, None)
        return op(
            padded, caches[0].kv, lists.first, *nothing, *(schedule or nothing), *second, 512,
            channels**-0.5, None,
        )  # fmt: skip

    schedule = run(sets[0])[2:4]

    def call(lists: Lists) -> Call:
        return lambda: run(lists, *schedule)[:2]

    return Contender(PEER, list(map(call, sets)), x.double(), sets[0], caches, channels**-0.5)


def error(contender: Contender, query: Tensor | None = None, lse_gate: float = 5e-3) -> float:
    """Largest relative L2 of a few query tokens of the first call; infinite where the LSE is
    further off than its gate.

    Args:
        query: in place of the one that the contender sees.
    """
    out, lse = contender.calls[0]()
    seen = contender.query if query is None else query
    b, s_q, heads, _ = seen.shape
    worst, pick = 0.0, random.Random(contender.lists.first.shape[-1])
    for _ in range(3):
        i, s = pick.randrange(b), pick.randrange(s_q)
        some = [each[i, s].long() for each in contender.lists if each is not None]
        pairs = zip(contender.caches, some, strict=False)
        kv = torch.cat([stored(cache, at[at >= 0]) for cache, at in pairs])
        logits = seen[i, s].double() @ kv.T * contender.scale
        top = torch.logsumexp(logits, -1)
        want = torch.exp(logits - top[:, None]) @ kv[:, :512]
        worst = metrics.largest(worst, metrics.relative_l2(out[i, s, :heads], want))
        if not float((lse[i, :heads, s] - top).abs().max()) <= lse_gate:  # nor NaN
            return float("inf")
    return worst


# ---------------------------------------------------------------------------- the table


def own_caches(run: Run) -> Caches:
    """The same tokens in both formats."""
    tokens = SEQUENCES * SPAN
    return {name: filled(fmt, tokens, run.device) for name, fmt in CACHES.items()}


def caches_of(run: Run) -> Caches:
    """The same, with FlashMLA's library."""
    load_flashmla(run)
    return own_caches(run)


def load_flashmla(run: Run) -> None:
    """Loads the peer's operators.

    Raises:
        ValueError: no folder of peers is given.
    """
    if run.peers is None:
        raise ValueError("--peers: expected a folder with FlashMLA's library")
    torch.ops.load_library(str(run.peers / "vllm_flashmla" / "_flashmla_C.abi3.so"))


def problem(caches: Caches, shape: tuple[int, ...]) -> Problem:
    """A row of ``SHAPES``, or of ``TAILS``."""
    b, s_q, heads, topk, *tail = shape
    held, device = tail[0] if tail else topk, caches["rows"].device
    x = torch.randn(b, s_q, heads, 576, device=device).bfloat16()
    sets = index_sets(device, b, s_q, topk, held)
    found = [flashmla([caches["rows"]], x, sets)]
    found += [planned(name, cache, x, sets) for name, cache in caches.items()]
    facts = {
        "shape": label(shape), "sizes": [b, s_q, heads, held], "units": tiles(b, s_q, heads, held)
    }  # fmt: skip
    return Problem(facts, found, x)


def label(shape: tuple[int, ...]) -> str:
    """A shape as the table tells it."""
    *first, held = shape if len(shape) > 4 else (*shape, shape[3])
    return ", ".join(map(str, first)) + (f" ({held} tokens)" if held < first[3] else "")


def tiles(b: int, s_q: int, heads: int, tokens: int) -> int:
    """Tiles of 64 rows and 64 tokens; fewer rows count as one."""
    return b * s_q * -(-heads // 64) * -(-tokens // 64)


def rates(name: str, width: int, token_bytes: int) -> list[table.Column]:
    """TFLOP/s and TB/s of a contender, ``width`` channels of K and V together."""

    def rate(row: Row, per_token: int) -> float:
        b, s_q, _, entries = row["sizes"]
        return float(1e-6 * b * s_q * entries * per_token / row["us"][name])

    return [("TF/s", lambda row: f"{rate(row, 2 * row['sizes'][2] * width):.0f}"),
            ("TB/s", lambda row: f"{rate(row, token_bytes):.2f}")]  # fmt: skip


def columns(rows: Sequence[Row]) -> list[table.Column]:
    """Columns of the contenders that the record has."""
    found = [table.fact("b, s_q, heads, topk", "shape"), table.us(PEER), table.error(PEER)]
    for name in (name for name in rows[0]["us"] if name != PEER):
        found += [table.us(name), table.ratio(PEER, name), *rates(name, 576 + 512, BYTES[name])]
        found.append(table.error(name))
    if any(row.get("query_error") for row in rows):
        found.append(("native's error to the BF16 query", _query_error))
    return found


def _query_error(row: Row) -> str:
    return table.told(row.get("query_error", {}).get("native"), ".1e")


TABLES = (
    Table(
        "sparse_cost", "Sparse decode beside FlashMLA", problem,
        (*ALONE, *TAILS, *(shape for shape in SHAPES if shape not in ALONE)), columns, CONFIG,
        notes=(
            f"µs a call, in turn; pages of {PAGE}; errors: relative L2 to fp64",
            "(n tokens): so many entries of each list are tokens, -1 stands behind them",
        ),
        setup=caches_of, gate=GATES, alone=ALONE, peer=PEER, takes=("peers",),
    ),
)  # fmt: skip
