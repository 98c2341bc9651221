"""Arguments by which V4's class in vLLM changes the ratio of the names' own calls, one at a time.

The table ``sparse_v4_cost`` calls both names with as little as they need; vLLM's class
(``profiles.engine.v4``) gives them lengths, sinks and a schedule that is made in the graph.  Here
the table's call is captured as often as the class's, and each ``Way`` differs from it by one thing;
at the end stand all of them together, and the class itself.  All graphs of a shape are replayed in
random order, so ratios hold whatever the card's clock does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import snapmla
from profiles.engine import v4
from profiles.engine.v4 import Shape, Step
from profiles.tables import sparse_v4_cost
from profiles.tables.sparse_cost import Lists
from snapmla.cache.paged import PagedKVCache
from snapmla.compat import flash_mla
from snapmla.sparse.decode import sparse_decode
from snapmla.sparse.two_lists import Second

SHAPES = ((256, 64, 512, 128), (256, 64, 0, 1), (128, 16, 512, 128))
TITLE = "# V4's class and the names' own calls: one thing at a time"
TABLE, CLASS = "the table's call", "vLLM's class"
MANY = 200  # calls of a graph, about as many as the table's
PEER, OURS, WHOLE = "FlashMLA", "snapmla", "snapmla, uncut"
Calls = Callable[[], None]


class Way(NamedTuple):
    """A way to call both names; the defaults are the table's call.

    Attributes:
        lengths: none, ``full``: tensors that say that all entries count, ``drawn``: of the second
            list 0 to all, ``skewed``: all of every eighth, 0 of the others.
        sinks: a tensor of -inf.
        own_results: each call writes memory of its own.
        own_lse: ours allocates the LSE.
        inside: the schedule is made in the graph.
        calls: in a graph.
    """

    lengths: str = ""
    sinks: bool = False
    own_results: bool = False
    own_lse: bool = False
    inside: bool = False
    calls: int = v4.LAYERS


ALL = Way(lengths="full", sinks=True, own_lse=True, inside=True)
WAYS = {
    TABLE: Way(),
    f"{MANY} calls a graph": Way(calls=MANY),
    "lengths": Way(lengths="full"),
    "sinks": Way(sinks=True),
    "results of each call's own": Way(own_results=True),
    "LSE allocated": Way(own_lse=True),
    "schedule made inside": Way(inside=True),
    "all but own results": ALL,
    "all": ALL._replace(own_results=True),
    "lengths drawn": Way(lengths="drawn"),
    "lengths skewed": Way(lengths="skewed"),
}


class Drawn(NamedTuple):
    """Tensors of a shape's calls, the same for both names."""

    q: Tensor  # (b, 1, h, 512), padded for FlashMLA
    caches: Sequence[PagedKVCache]
    sets: Sequence[Lists]
    lengths: Mapping[str, tuple[Tensor, Tensor | None]]  # of both lists, by ``Way.lengths``


def draw(shape: Shape, caches: Sequence[PagedKVCache], heads: int) -> Drawn:
    """Queries of ``heads``, of which the shape's are not 0."""
    device = caches[0].device
    torch.manual_seed(1)
    sets = sparse_v4_cost.list_sets((shape.tokens, 1, shape.heads, shape.more), device)
    q = torch.zeros(shape.tokens, 1, heads, 512, dtype=torch.bfloat16, device=device)
    q[:, :, : shape.heads] = torch.randn(shape.tokens, 1, shape.heads, 512, device=device)
    full = lambda n: torch.full((shape.tokens,), n, dtype=torch.int32, device=device)
    some = torch.randint(0, shape.more + 1, (shape.tokens,), dtype=torch.int32, device=device)
    one = torch.arange(shape.tokens, device=device) % 8 == 0
    first, kinds = full(sparse_v4_cost.WINDOW), {
        "full": full(shape.more), "drawn": some, "skewed": full(shape.more) * one.int(),
    }  # fmt: skip
    lengths = {kind: (first, more if shape.more else None) for kind, more in kinds.items()}
    return Drawn(q, caches, sets, lengths)


def calls_of(way: Way, drawn: Drawn, name: Callable[..., Any], metadata: Callable[[], Any],
             ours: bool) -> Calls:  # fmt: skip
    """All calls of a graph.

    Args:
        name: ``flash_mla_with_kvcache``, whose schedules are ``metadata``'s.
    """
    q, (first, second) = drawn.q, drawn.caches
    b, _, heads, _ = q.shape
    outs = [torch.full_like(q, torch.nan) for _ in range(way.calls if way.own_results else 1)]
    given: dict[str, Any] = {}
    if ours and not way.own_lse:
        given["lse"] = torch.empty(b, heads, 1, device=q.device)
    if way.sinks:
        given["attn_sink"] = q.new_full((heads,), -torch.inf, dtype=torch.float32)
    length, more = drawn.lengths[way.lengths] if way.lengths else (None, None)

    def call(i: int, schedule: Any) -> None:
        lists = drawn.sets[i % len(drawn.sets)]
        extra: dict[str, Any] = {}
        if lists.second is not None:
            extra = {"extra_k_cache": second.kv, "extra_indices_in_kvcache": lists.second}
            extra["extra_topk_length"] = more
        name(
            q, first.kv, None, None, 512, schedule, softmax_scale=sparse_v4_cost.SCALE,
            is_fp8_kvcache=True, indices=lists.first, topk_length=length,
            out=outs[i % len(outs)], **extra, **given,
        )  # fmt: skip

    before = metadata()
    if not way.inside:
        call(0, before)

    def run() -> None:
        schedule = metadata() if way.inside else before
        for i in range(way.calls):
            call(i, schedule)

    return run


def uncut(way: Way, drawn: Drawn) -> Calls:
    """Ours with lengths and with a plan of full lists, which the host knows: nothing is cut, so no
    merge is launched."""
    q, (first, second) = drawn.q, drawn.caches
    b, _, heads, _ = q.shape
    one, width = drawn.sets[0], sparse_v4_cost.WINDOW
    width += 0 if one.second is None else one.second.shape[-1]
    plan = snapmla.plan_sparse_decode(
        heads, 1, topk=width, batch=b, device=q.device, cache_dtype=first.format
    )
    out, lse = torch.full_like(q, torch.nan), torch.empty(b, heads, 1, device=q.device)
    length, more = drawn.lengths[way.lengths]

    def run() -> None:
        for i in range(way.calls):
            lists = drawn.sets[i % len(drawn.sets)]
            extra = None if lists.second is None else Second(second, lists.second, more)
            sparse_decode(
                q, first, lists.first, softmax_scale=sparse_v4_cost.SCALE, topk_length=length,
                plan=plan, out=out, lse=lse, empty_lse="+inf", extra=extra,
            )  # fmt: skip

    return run


class Captured(NamedTuple):
    """A graph, and what keeps the memory that it reads and writes.

    Attributes:
        calls: in it.
    """

    calls: int
    graph: torch.cuda.CUDAGraph
    owner: Any


def captured(calls: int, run: Calls) -> Captured:
    """A graph of so many calls."""
    with v4.stream() as own:
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=own):
        run()
    return Captured(calls, graph, run)


def graphs_of(
    shape: Shape, caches: Sequence[PagedKVCache]
) -> Iterator[tuple[tuple[str, str], Captured]]:
    """(way, contender), graph."""
    from vllm.v1.attention.ops import flashmla as module

    theirs, padded = v4.flashmla_name().theirs, 64 if shape.heads <= 64 else 128
    own = flash_mla.flash_mla_with_kvcache
    sides: dict[str, Any] = {
        PEER: (theirs, lambda: module.get_mla_metadata()[0], draw(shape, caches, padded)),
        OURS: (own, lambda: flash_mla.get_mla_metadata()[0], draw(shape, caches, shape.heads)),
    }
    for label, way in WAYS.items():
        if way.lengths in ("drawn", "skewed") and not shape.more:
            continue
        for who, (name, metadata, drawn) in sides.items():
            run = calls_of(way, drawn, name, metadata, who == OURS)
            yield (label, who), captured(way.calls, run)
        if label.startswith("lengths"):
            yield (label, WHOLE), captured(way.calls, uncut(way, sides[OURS][2]))
    q = sides[OURS][2].q[:, 0]
    for who, heads, name in ((PEER, padded, theirs), (OURS, shape.heads, v4.flashmla_name())):
        torch.manual_seed(1)  # of the lists
        step = Step(shape, caches, q, heads)
        yield (CLASS, who), Captured(v4.LAYERS, v4.captured(step, name), step)


def measured(shape: Shape, caches: Sequence[PagedKVCache]) -> dict[str, dict[str, float]]:
    """Microseconds of a call by way and contender."""
    made = dict(graphs_of(shape, caches))
    times = v4.in_turn({key: each.graph for key, each in made.items()}, 1)
    found: dict[str, dict[str, float]] = {}
    for (way, who), us in times.items():
        found.setdefault(way, {})[who] = us / made[way, who].calls
    return found


def measure(shapes: Sequence[tuple[int, int, int, int]] = SHAPES) -> dict[str, Any]:
    """All shapes."""
    found: dict[str, Any] = {}
    for shape, caches in v4.each_shape(shapes):
        found[shape.label] = measured(shape, caches)
        print("\n".join(lines(shape.label, found[shape.label])), flush=True)
    return found


def lines(label: str, ways: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The table of a shape."""
    ratio = lambda us, who=OURS: us[PEER] / us[who]
    base = ratio(ways[TABLE])
    told = [
        f"{label}:", "", "| way | FlashMLA | snapmla | ratio | kept | snapmla, uncut | ratio |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for way, us in ways.items():
        whole = f"{us[WHOLE]:.1f} | {ratio(us, WHOLE):.3f}" if WHOLE in us else "– | –"
        told.append(
            f"| {way} | {us[PEER]:.1f} | {us[OURS]:.1f} | {ratio(us):.3f} | "
            f"{ratio(us) / base:.3f} | {whole} |"
        )
    return [*told, ""]


def gates(_: Mapping[str, Any]) -> list[Any]:
    """None: ``v4`` has them."""
    return []


def page(header: Sequence[str], results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Page of the ways, as Markdown."""
    told = [
        TITLE, "", *header, f"- µs a call; {v4.LAYERS} calls a graph; each way differs from the "
        "first by one thing; kept: its ratio by the first one's", "",
    ]  # fmt: skip
    for label, ways in results.items():
        told += lines(label, ways)
    return "\n".join(told)
