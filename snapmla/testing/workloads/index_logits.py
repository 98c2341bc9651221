"""``index_logits``: scores of cached tokens for query tokens; one token of each sequence, drafts,
ragged prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsl_kernels.formats.index_cache import INDEX_DIM, PAGE, PAGE_BYTES, SCALES_AT
from dsl_kernels.spec import VariantSpec
from snapmla.dsa import index_logits
from snapmla.testing import index_reference as reference
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import Call, Result, Sizes, Workload
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.samples import Random

SLACK = 1e-6  # of sum_h |w| |relu| scale: roundings of a sum over 64 heads
UNTOUCHED = -7.5
POISON = 0x7F  # NaN as e4m3; four of them are NaN as fp32


def poisoned_pages(pages: int, gap: int = 0) -> Tensor:
    """Pages (pages, bytes) of NaN, ``gap`` bytes apart."""
    pool = torch.full((pages, PAGE_BYTES + gap), POISON, dtype=torch.uint8)
    return pool[:, :PAGE_BYTES]


def sample_call(
    heads: int,
    lengths: Sequence[int],
    tokens: Sequence[int] | int,
    *,
    gap: int = 0,
    ctas: int = 2,
    columns: int = 0,
    power_of_two: bool = False,
) -> dict[str, Any]:
    """Arguments over pages in random order, of which only what lengths cover is no poison.

    Args:
        tokens: query tokens of each sequence, or of all alike.
        gap: bytes between pages. columns: of ``out``; 0: what the longest sequence needs, 3 more.
    """
    wanted = [-(-max(n, 0) // PAGE) for n in lengths]
    width, pages = max(1, *wanted) + 1, sum(wanted) + 2
    cache, order = poisoned_pages(pages, gap), torch.randperm(pages - 1) + 1
    keys, scales = reference.pages_of(cache)
    table = torch.full((len(lengths), width), 2**31 - 1, dtype=torch.int32)
    at = 0
    for i, n in enumerate(lengths):
        own = order[at : at + wanted[i]]
        at += wanted[i]
        table[i, : wanted[i]] = own
        values = torch.randn(max(n, 0), INDEX_DIM)
        stored, scale = reference.quantize_keys(values, power_of_two=power_of_two)
        for j, page in enumerate(own.tolist()):
            part = slice(PAGE * j, PAGE * (j + 1))
            count = len(scale[part])
            keys[page].view(torch.uint8)[:count] = stored[part].view(torch.uint8)
            scales[page, :count] = scale[part]
    reference.fill_pages(cache, keys, scales)
    even = isinstance(tokens, int)
    each = [tokens] * len(lengths) if isinstance(tokens, int) else list(tokens)
    rows, starts = sum(each), np.cumsum([0, *each]).tolist()
    q = torch.randn(rows, heads, INDEX_DIM).to(torch.float8_e4m3fn)
    columns = columns or max(1, *lengths) + 3
    return {
        "q": q.view(torch.uint8), "w": torch.randn(rows, heads), "cache": cache,
        "block_table": table, "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([] if even else starts, dtype=torch.int32),
        "out": torch.full((rows, columns), UNTOUCHED), "s_q": each[0] if even else 0, "ctas": ctas,
    }  # fmt: skip


class Held(NamedTuple):
    """Figures that bound the errors of each element of ``out``.

    Attributes:
        sizes: sum_h |w| |relu| scale; 0 where nothing is written.
        exact: fp64 scores on Blackwell, whose tensor core keeps fp32: errors against them are
            bounded, too.  None on Hopper, whose tensor core cuts more off.
    """

    sizes: Tensor
    exact: Tensor | None


def truth(spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """``out`` with the scores by the tensor core's sums, in fp64; the rest as before."""
    return {"out": _filled(given, reference.scores(given, reference.PRODUCTS_OF[spec.arch]))[0]}


def _filled(given: Mapping[str, Any], found: Sequence[reference.Scores]) -> tuple[Tensor, Tensor]:
    """(``out`` with scores of its rows, their sizes)."""
    out = given["out"].double()
    sizes = torch.zeros_like(out)
    for r, scores in enumerate(found):
        out[r, : len(scores.values)] = scores.values
        sizes[r, : len(scores.size)] = scores.size
    return out, sizes


def made(spec: VariantSpec, given: dict[str, Any], note: str) -> Call:
    """A call with its truth."""
    products = reference.PRODUCTS_OF[spec.arch]
    out, sizes = _filled(given, reference.scores(given, products))
    exact = None
    if products == "blackwell":
        exact, _ = _filled(given, reference.scores(given, reference.EXACT))
    return Call(given, {note: "out"}, {"out": out}, Held(sizes, exact), note)


def small(spec: VariantSpec) -> Iterator[Call]:
    """Decode, drafts and a ragged prompt, each with lengths of 0, 1, a page, more; pages apart and
    not; more CTAs than tiles; more pages than a CTA's ring holds."""
    u = spec.unit_rows
    lengths = (130, 0, 64, 1)
    yield made(spec, sample_call(spec.heads, lengths, u, gap=64, ctas=3), "units of one sequence")
    ragged = sample_call(spec.heads, (70, 9, 0, 200), (u + 1, 0, 1, 2 * u + 1), ctas=2)
    yield made(spec, ragged, "ragged queries")
    few = sample_call(spec.heads, (3, 65), 1, ctas=5, columns=64, power_of_two=True)
    yield made(spec, few, "few columns")
    long = sample_call(spec.heads, (64 * 27 + 5,), 1, ctas=1)
    yield made(spec, long, "a ring of pages that comes round")


def judge(_spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """Within rounding of the model, and of fp64 (see ``Held``); elements that no row sees as they
    were."""
    worst: dict[str, float] = {}
    wrong = []
    for call in calls:
        ((name, (got, want)),) = call.pairs.items()
        sizes, exact = call.job
        seen = sizes > 0
        kept = got.double()[~seen] == want[~seen]
        if not bool(kept.all()):
            wrong.append(f"{name}: {int((~kept).sum())} elements written that are not to be")
        for beside, of in (("", want), (", to fp64", exact)):
            if of is not None:
                error = ((got.double() - of).abs()[seen] / sizes[seen]).nan_to_num(torch.inf)
                most = float(error.max()) if len(error) else 0.0
                worst[beside] = max(worst.get(beside, 0.0), most)
    figures = "".join(f"{beside} {most:.1e}" for beside, most in worst.items())
    text = f"worst error{figures} of sum |w| relu scale (allowed {SLACK:.0e})"
    return Result(
        max(worst.values(), default=0.0) <= SLACK and not wrong, "; ".join([*wrong, text])
    )


def recorded(case: Case, run: Runner) -> Recorded:
    """Five sequences in pages a multiple of 16 bytes apart; queries equal to a key among them."""
    spec, bits = case.spec, case.bits()
    lengths = np.array([0, 1, 64, 300, 777], np.int32)
    each = (1, spec.unit_rows, 5)[case.index % 3]
    pages, width, rows = 40, 13, 5 * each
    raw = np.zeros((pages, PAGE_BYTES + 16 * (case.index % 2)), np.uint8)
    raw[:, :SCALES_AT] = exact.e4m3(bits, (pages, SCALES_AT), 0)
    raw[:, SCALES_AT:PAGE_BYTES] = exact.scales(bits, (pages, PAGE), -5).view(np.uint8)
    q = exact.e4m3(bits, (rows, spec.heads, INDEX_DIM), 0)
    q[:, ::7] = raw[3, :INDEX_DIM]
    w = exact.bell(bits, (rows, spec.heads), 0)
    table = np.asarray(bits.below(pages, (5, width)), np.int32)
    table[3, 1] = 3
    seen: list[exact.Array] = [raw, q, w, table]
    out = run.full((rows, width * PAGE), UNTOUCHED)
    run.call(
        case.variant, q=run.there(q), w=run.there(w), cache=run.there(raw)[:, :PAGE_BYTES],
        block_table=run.there(table), cache_seqlens=run.there(lengths),
        cu_seqlens_q=run.full((0,), 0, torch.int32), out=out, s_q=each, ctas=7,
    )  # fmt: skip
    return Recorded(exact.digest(seen), {"out": exact.bits_of(out)})


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Full pages in random order."""
    source, rows = Random(device, seed), sizes.batch * sizes.s_q
    width = -(-sizes.tokens // PAGE)
    pages = sizes.batch * width
    cache = torch.empty(pages, PAGE_BYTES, dtype=torch.uint8, device=device)
    keys = source.normal(pages, SCALES_AT).to(torch.float8_e4m3fn)
    cache[:, :SCALES_AT] = keys.view(torch.uint8)
    scale = source.normal(pages, PAGE, dtype=torch.float32).abs() + 0.5
    cache[:, SCALES_AT:] = scale.view(torch.uint8)
    q = source.normal(rows, spec.heads, INDEX_DIM).to(torch.float8_e4m3fn)
    full = lambda n: torch.full((sizes.batch,), n, dtype=torch.int32, device=device)
    return {
        "q": q.view(torch.uint8), "cache": cache,
        "w": source.normal(rows, spec.heads, dtype=torch.float32),
        "block_table": source.order(pages).view(sizes.batch, width).int(),
        "cache_seqlens": full(sizes.tokens),
        "cu_seqlens_q": torch.empty(0, dtype=torch.int32, device=device),
        "out": torch.empty(rows, width * PAGE, device=device), "s_q": sizes.s_q,
        "ctas": sizes.parts,
    }  # fmt: skip


def public(spec: VariantSpec, given: Mapping[str, Any]) -> Callable[[], Any]:
    """``snapmla.indexer.index_logits``."""
    shape = (len(given["cache_seqlens"]), given["s_q"], spec.heads)
    q = given["q"].view(torch.float8_e4m3fn).view(*shape, INDEX_DIM)
    rest = given["cache"], given["block_table"], given["cache_seqlens"]
    w, out, unit = given["w"].view(shape), given["out"], spec.unit_rows
    return lambda: index_logits(q, w, *rest, out=out, unit_rows=unit)


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads each page once a unit, writes a score a row and token."""
    rows = sizes.batch * sizes.s_q
    units = sizes.batch * -(-sizes.s_q // spec.unit_rows)
    queries = rows * spec.heads * (INDEX_DIM + 4)
    tokens = float(units) * sizes.tokens
    return tokens * PAGE_BYTES / PAGE + 4.0 * rows * sizes.tokens + queries


def tiles(_spec: VariantSpec, call: Call) -> int:
    """Pages that some row of a call sees: errors are held to nothing where none does."""
    return int(sum(-(-int((row > 0).sum()) // PAGE) for row in call.job.sizes))


def steady(spec: VariantSpec, tiles: int) -> Sizes:
    """A unit of one sequence; a tile is two pages, which SM100 takes at once."""
    return Sizes(1, 2 * PAGE * tiles, spec.unit_rows)


WORKLOAD = Workload(small, judge, recorded, sized, truth, public, moved, tiles=tiles, steady=steady)
