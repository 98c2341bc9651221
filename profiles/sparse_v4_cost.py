"""Sparse decode over DeepSeek V4's two caches beside FlashMLA's, on one GPU.

    python -m profiles.sparse_v4_cost --peers DIR --out profiles/results

Both read the same bytes: a sliding window of 128 tokens in pages of 256, and 512 or 1024 compressed
tokens in pages of 64, or the first list alone.  FlashMLA takes 64 or 128 heads, so other queries
are padded as its callers pad them.  As in profiles.sparse_cost calls are captured in CUDA graphs
over several sets of random indices and replayed in turn; before that, results of some query tokens
are compared with fp64 on what the caches store.

    python -m profiles.sparse_v4_cost --peers DIR --sweep

times short work cut in other ways instead, ``sparse_v4_sweep.md``: query heads of a CTA, and after
how many tokens a list is cut (0: as the planner would), FlashMLA beside them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer
from torch import Tensor

import snapmla
from dsl_kernels.dims import TOKEN_TILE
from profiles import alone, page, power, timing
from profiles.machine import machine
from profiles.sparse_cost import Contender, Results, in_turn, tiles
from snapmla import flash_mla
from snapmla.cache import PagedKVCache
from snapmla.sparse.decode import sparse_decode
from snapmla.sparse.two_lists import Second
from snapmla.testing import metrics

SCALE, TOKENS = 512**-0.5, 1 << 20  # tokens of each cache
WINDOW, PAGES = 128, (256, 64)
GATE = 4e-3  # relative L2 to fp64
SHAPES = (  # b, s_q, heads, second list
    (128, 2, 128, 512), (128, 2, 64, 512), (128, 2, 128, 1024), (128, 2, 64, 1024),
    (128, 1, 64, 512), (128, 1, 16, 512), (32, 2, 128, 512), (2, 2, 128, 512), (2, 2, 64, 1024),
    (256, 2, 64, 512), (128, 2, 128, 0), (128, 2, 64, 0), (148, 2, 128, 16384),
)  # fmt: skip
TAILS = (  # and how many entries of the second list are tokens, of short prompts; -1 behind
    (128, 2, 64, 512, 100), (128, 2, 128, 512, 100), (2, 2, 128, 512, 30),
)  # fmt: skip
ALONE = SHAPES[:3]
PEER = "FlashMLA"
SWEPT = (  # short work, of SHAPES
    (2, 2, 128, 512), (2, 2, 64, 1024), (32, 2, 128, 512), (128, 2, 128, 0), (128, 2, 64, 0),
    (128, 1, 64, 512),
)  # fmt: skip
ROW_TILES, SHARES = (64, 32, 16), (1, 2, 3, 4, 5, 9)  # of a list, into how many pieces


class Lists(NamedTuple):
    """What the query tokens of a call see: entries of the first cache, of the second (None)."""

    first: Tensor
    second: Tensor | None


def filled(page_size: int, device: torch.device) -> PagedKVCache:
    """A cache of random tokens."""
    cache = PagedKVCache.allocate(TOKENS // page_size, page_size, device=device, dtype="fp8_v4")
    step = 1 << 16
    for begin in range(0, TOKENS, step):
        x = torch.randn(step, 512, device=device).bfloat16()
        slots = torch.arange(begin, begin + step, device=device)
        snapmla.append_kv(cache, x[:, :448], x[:, 448:], slots)
    return cache


def stored(cache: PagedKVCache, at: Tensor) -> Tensor:
    """(n, 512) float64."""
    where = (at // cache.page_size, at % cache.page_size)
    assert cache.scale is not None
    scale = cache.scale[where].float().double().repeat_interleave(64, -1)
    content = cache.content.view(torch.uint8)[where].view(torch.float8_e4m3fn).double()
    return torch.cat((content * scale, cache.rope[where].double()), -1)


def list_sets(shape: tuple[int, ...], device: torch.device) -> list[Lists]:
    """Sets of random tokens, 1 GB of them all together."""
    b, s_q, _, more, *tail = shape
    count = min(max(3, int(1.2e9) // (b * s_q * (WINDOW + more) * 584)), 8)

    def made(width: int) -> Tensor:
        return torch.randint(TOKENS, (b, s_q, width), dtype=torch.int32, device=device)

    def second() -> Tensor | None:
        if not more:
            return None
        entries = made(more)
        for held in tail:
            entries[..., held:] = -1
        return entries

    return [Lists(made(WINDOW), second()) for _ in range(count)]


def ours(caches: list[PagedKVCache], x: Tensor, sets: list[Lists]) -> Contender:
    """FlashMLA's name here, a scheduling object, results given."""
    b, s_q, heads, _ = x.shape
    out = torch.full((b, s_q, heads, 512), torch.nan, dtype=torch.bfloat16, device=x.device)
    lse = torch.full((b, heads, s_q), torch.nan, device=x.device)
    metadata, _ = flash_mla.get_mla_metadata()

    def call(lists: Lists) -> Callable[[], Results]:
        second: dict[str, Any] = {}
        if lists.second is not None:
            second = {
                "extra_k_cache": caches[1].kv, "extra_indices_in_kvcache": lists.second
            }  # fmt: skip
        kv = caches[0].kv
        assert kv is not None
        return lambda: flash_mla.flash_mla_with_kvcache(
            x, kv, None, None, 512, metadata, softmax_scale=SCALE, is_fp8_kvcache=True,
            indices=lists.first, out=out, lse=lse, **second,
        )  # fmt: skip

    return Contender("snapmla", list(map(call, sets)), x.double(), lambda at: at)


def cut(
    caches: list[PagedKVCache], x: Tensor, sets: list[Lists], row_tile: int, tokens: int
) -> Contender:
    """Ours by a plan: heads of a CTA, and after how many tokens a list is cut (0: as it comes)."""
    b, s_q, heads, _ = x.shape
    second = sets[0].second
    width = WINDOW + (0 if second is None else second.shape[-1])
    plan = snapmla.plan_sparse_decode(
        heads, s_q, topk=width, batch=b, device=x.device, row_tile=row_tile,
        fixed_split_tokens=tokens or None, cache_dtype="fp8_v4",
    )  # fmt: skip
    out = torch.full((b, s_q, heads, 512), torch.nan, dtype=torch.bfloat16, device=x.device)
    lse = torch.full((b, heads, s_q), torch.nan, device=x.device)

    def call(lists: Lists) -> Callable[[], Results]:
        extra = None if lists.second is None else Second(caches[1], lists.second, None)
        return lambda: sparse_decode(
            x, caches[0], lists.first, softmax_scale=SCALE, plan=plan, out=out, lse=lse,
            extra=extra,
        )  # fmt: skip

    return Contender(f"{row_tile}, {tokens}", list(map(call, sets)), x.double(), lambda at: at)


def theirs(caches: list[PagedKVCache], x: Tensor, sets: list[Lists]) -> Contender:
    """FlashMLA's kernel, with its schedule made before."""
    op, (b, s_q, heads, _) = torch.ops._flashmla_C.sparse_decode_fwd, x.shape
    padded = x.new_zeros(b, s_q, 64 if heads <= 64 else 128, 512)
    padded[:, :, :heads] = x

    def run(lists: Lists, *schedule: Any) -> Any:
        nothing = (None,) * 2
        second = (None,) * 3 if lists.second is None else (caches[1].kv, lists.second, None)
        return op(
            padded, caches[0].kv, lists.first, *nothing, *(schedule or nothing), *second, 512,
            SCALE, None,
        )  # fmt: skip

    schedule = run(sets[0])[2:4]

    def call(lists: Lists) -> Callable[[], Results]:
        return lambda: run(lists, *schedule)[:2]

    return Contender("FlashMLA", list(map(call, sets)), x.double(), lambda at: at)


def error(contender: Contender, caches: list[PagedKVCache], lists: Lists) -> float:
    """Largest relative L2 of a few query tokens; the LSE's error counts as infinite beyond 5e-3."""
    out, lse = contender.calls[0]()
    torch.cuda.synchronize()
    b, s_q, heads, _ = contender.query.shape
    worst, pick = 0.0, random.Random(b)
    for _ in range(3):
        i, s = pick.randrange(b), pick.randrange(s_q)
        kv = stored(caches[0], lists.first[i, s].long())
        if lists.second is not None:
            more = lists.second[i, s].long()
            kv = torch.cat((kv, stored(caches[1], more[more >= 0])))
        logits = contender.query[i, s] @ kv.T * SCALE
        top = torch.logsumexp(logits, -1)
        want = torch.exp(logits - top[:, None]) @ kv
        worst = metrics.largest(worst, metrics.relative_l2(out[i, s, :heads], want))
        if not float((lse[i, :heads, s] - top).abs().max()) <= 5e-3:  # nor NaN
            return float("inf")
    return worst


def row(
    caches: list[PagedKVCache], shape: tuple[int, ...], meter: power.Meter | None = None
) -> dict[str, Any]:
    """One row: times and errors by contender; each also alone if there is a meter.

    Args:
        shape: of ``SHAPES``, or of ``TAILS``.

    Raises:
        ValueError: results are wrong.
    """
    b, s_q, heads, more, *tail = shape
    held = tail[0] if tail else more
    device = caches[0].device
    x = torch.randn(b, s_q, heads, 512, device=device).bfloat16()
    sets = list_sets(shape, device)
    contenders = [theirs(caches, x, sets), ours(caches, x, sets)]
    errors = {c.name: error(c, caches, sets[0]) for c in contenders}
    wrong = {name: e for name, e in errors.items() if not e < GATE}
    if wrong:
        raise ValueError(f"{shape}: {wrong}")
    label = f"{b}, {s_q}, {heads}, {WINDOW} + {more}" + (f" ({held} tokens)" if tail else "")
    made: dict[str, Any] = {
        "shape": label, "sizes": [b, s_q, heads, WINDOW + held], "us": in_turn(contenders),
        "error": errors, "units": tiles(b, s_q, heads, WINDOW + held),
    }  # fmt: skip
    if meter is not None:
        made["alone"] = alone.measure({c.name: c.calls for c in contenders}, meter)
    return made


def body(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of a record, and that of times alone where there are some."""
    columns = ("b, s_q, heads, lists", PEER, "error", "snapmla", "ratio", "TF/s", "TB/s", "error")
    lines = []
    for each in rows:
        (b, s_q, heads, entries), us = each["sizes"], each["us"]
        time, count = us["snapmla"], b * s_q * entries
        tflops, tbs = 2e-6 * count * heads * 1024 / time, 1e-6 * count * 584 / time
        lines.append([
            each["shape"], f"{us[PEER]:.1f}", f"{each['error'][PEER]:.1e}", f"{time:.1f}",
            f"{us[PEER] / time:.2f}", f"{tflops:.0f}", f"{tbs:.2f}",
            f"{each['error']['snapmla']:.1e}",
        ])  # fmt: skip
    return [*page.table(columns, lines), *alone.lines(rows, PEER, "tile")]


def swept(caches: list[PagedKVCache], shape: tuple[int, int, int, int]) -> list[str]:
    """Lines of the other table.  Raises ValueError for results that are wrong."""
    b, s_q, heads, more = shape
    x = torch.randn(b, s_q, heads, 512, device=caches[0].device).bfloat16()
    sets, tiles = list_sets(shape, caches[0].device), (WINDOW + more) // TOKEN_TILE
    cuts = [0, *sorted({-(-tiles // n) * TOKEN_TILE for n in SHARES if n <= tiles})]
    if tiles > max(SHARES):
        cuts.insert(1, TOKEN_TILE)
    contenders = [theirs(caches, x, sets), ours(caches, x, sets)]
    contenders += [
        cut(caches, x, sets, rows, n) for rows in ROW_TILES if rows <= heads for n in cuts
    ]
    errors = {c.name: error(c, caches, sets[0]) for c in contenders}
    wrong = {name: e for name, e in errors.items() if not e < GATE}
    if wrong:
        raise ValueError(f"{shape}: {wrong}")
    us = in_turn(contenders)
    label, peer = f"{b}, {s_q}, {heads}, {WINDOW} + {more}", us.pop("FlashMLA")
    return [f"| {label} | {name} | {n:.1f} | {peer / n:.2f} |" for name, n in us.items()]


def main(
    peers: Annotated[
        Path | None, typer.Option(help="Folder of peers, with FlashMLA's library.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    some: Annotated[int, typer.Option("--first", help="Shapes to time, the first ones.")] = 99,
    sweep: Annotated[bool, typer.Option(help="Other cuts of short work instead.")] = False,
    again: Annotated[Path | None, typer.Option("--render", help="A record's page anew.")] = None,
) -> None:
    """Times the shapes; writes ``sparse_v4_cost.md`` and ``.json``, or ``sparse_v4_sweep.md``."""
    if again is not None:
        page.render(again, body)
        return
    if peers is None:
        raise typer.BadParameter("a folder with FlashMLA's library", param_hint="--peers")
    torch.ops.load_library(str(peers / "vllm_flashmla" / "_flashmla_C.abi3.so"))
    nvml, device = timing.Nvml(), torch.device("cuda")
    head = page.head(
        "Sparse decode over V4's caches beside FlashMLA", "profiles.sparse_v4_cost",
        page.told(machine(device, nvml), page.FACTS),
        f"µs a call, in turn; pages of {PAGES[0]} and {PAGES[1]}; errors: relative L2 to fp64",
        "(n tokens): so many entries of the second list are tokens, -1 stands behind them",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.inference_mode():
        caches = [filled(page_size, device) for page_size in PAGES]
        if sweep:
            columns = ("b, s_q, heads, lists", "heads of a CTA, tokens of a piece", "µs",
                       "FlashMLA / it")  # fmt: skip
            lines = (line for shape in SWEPT[:some] for line in swept(caches, shape))
            page.write_rows(out / "sparse_v4_sweep.md", head, columns, lines)
            return
        rows: list[dict[str, Any]] = []
        with alone.meter_of(nvml) as meter:
            for shape in (*ALONE, *TAILS, *SHAPES[len(ALONE) :])[:some]:
                rows.append(row(caches, shape, meter if shape in ALONE else None))
                typer.echo(body(rows[-1:])[2])
                page.write_record(out / "sparse_v4_cost.json", head, rows, body)


if __name__ == "__main__":
    typer.run(main)
