"""``fetch_index_k``: index keys back from the index cache, as stored or multiplied out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.index_cache import INDEX_DIM, PAGE, PAGE_BYTES
from dsl_kernels.spec import VariantSpec
from snapmla.indexer.fetch_index_k import fetch_index_k
from snapmla.testing import index_tables
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import DTYPES, INDEX, Sizes, bit_for_bit
from snapmla.testing.workloads.draw import Draw
from snapmla.testing.workloads.exact import Exact
from snapmla.testing.workloads.problem import Problem, workload

UNTOUCHED = 7


def truth(spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Rows of the slots that the arguments mean; those of no sequence stay as they are."""
    keys, scales = given["keys"].cpu().clone(), given["scales"].cpu().clone()
    slots = slots_of(spec, given)
    written = slots != index_tables.UNTOUCHED
    found, factors = index_tables.keys_at(given["cache"], slots)
    if spec.key_dtype == "fp8":
        keys[written] = found.view(torch.uint8)[written]
        scales[written] = factors[written]
    else:
        keys[written] = index_tables.dequantised(found, factors, keys.dtype)[written]
    return {"keys": keys.to(given["keys"].device), "scales": scales.to(given["keys"].device)}


def slots_of(spec: VariantSpec, given: Mapping[str, Any]) -> Tensor:
    """The slot of each row of a result."""
    if spec.mode == "indices":
        index = given["indices"].cpu().long()
        real = (index >= 0) & (index < PAGE * len(given["cache"]))
        return torch.where(real, index, index_tables.NO_TOKEN)
    starts = given["seq_starts"].cpu()
    return index_tables.packed_slots(
        given["block_table"].cpu(), given["cu_seqlens"].cpu(), starts if len(starts) else None,
        len(given["cache"]), len(given["keys"]),
    )  # fmt: skip


def results(spec: VariantSpec, rows: int, device: str, gap: int = 0) -> dict[str, Tensor]:
    """Tensors to fetch into; ``gap``: elements between rows of keys."""
    stored = spec.key_dtype == "fp8"
    dtype = torch.uint8 if stored else DTYPES[spec.key_dtype]
    keys = torch.full((rows, INDEX_DIM + gap), UNTOUCHED, dtype=dtype, device=device)
    scales = torch.full((rows if stored else 0,), float(UNTOUCHED), device=device)
    return {"keys": keys[:, :INDEX_DIM], "scales": scales}


Told = tuple[dict[str, Tensor], int]  # arguments that say which keys, rows of the result


@dataclass(frozen=True, kw_only=True)
class Stored(Problem):
    """Keys of an index cache.

    Attributes:
        pages: of the cache.
        told: (spec, draw) -> which keys are fetched, drawn once.
        page_gap, gap: bytes behind pages, elements behind rows of the result.
        from_start: packed chunks begin with their sequences.
    """

    pages: int
    told: Callable[[VariantSpec, Any], Told]
    page_gap: int = 0
    gap: int = 0
    from_start: bool = False


def arguments(spec: VariantSpec, problem: Stored, draw: Draw) -> dict[str, Any]:
    """Arguments by name; problems of one draw fetch the same keys."""
    pages = draw.once("pages", lambda: draw.key_pages(problem.pages, problem.page_gap))
    told, rows = draw.once("told", lambda: problem.told(spec, draw))
    draw.identify_by(pages, *told.values())
    given = {"cache": draw.there(pages)[:, :PAGE_BYTES], **told}
    if problem.from_start:
        given["seq_starts"] = told["seq_starts"][:0]
    return given | results(spec, rows, draw.device, problem.gap)


def _chunks(draw: Draw, table: Any, begins: Any, starts: Any) -> dict[str, Tensor]:
    """Packed chunks."""
    named = {"block_table": table, "cu_seqlens": begins, "seq_starts": starts}
    return {name: draw.i32(values) for name, values in named.items()}


def _few(spec: VariantSpec, draw: Draw) -> Told:
    """Slots of the pool and what is no token; chunks from mid-page, of no page, of no row."""
    if spec.mode == "ragged":
        table = [[4, 2], [-1, 9], [0, 1], [3, 3]]
        return _chunks(draw, table, [0, 70, 73, 73, 90], [3, 63, 0, 120]), 95
    slots = draw.slots(21, PAGES * PAGE, torch.int64, outside=(4, 9))
    slots[13] = PAGE + 3
    if spec.index_dtype == "i64":
        slots[11] = slots[0] + 2**32
    return {"indices": slots.to(INDEX[spec.index_dtype])}, 21


def _any(spec: VariantSpec, draw: Exact) -> Told:
    """Slots and pages, of which some are not in the pool."""
    bits, pages = draw.bits(), PAGES + 1
    if spec.mode == "indices":
        index = torch.from_numpy(bits.below(pages * PAGE + 20, (99,)) - 10)
        return {"indices": draw.there(index, INDEX[spec.index_dtype])}, 99
    table = bits.below(pages + 2, (7, 3)) - 1
    begins = [0, *bits.below(40, (7,)).cumsum().tolist()]
    return _chunks(draw, table, begins, bits.below(180, (7,))), begins[-1] + 5


def _all(spec: VariantSpec, draw: Draw, *, sizes: Sizes) -> Told:
    """All tokens of the batch, from pages in random order."""
    n, width = sizes.batch * sizes.tokens, -(-sizes.tokens // PAGE)
    if spec.mode == "indices":
        slots = draw.slots(n, sizes.batch * width * PAGE, INDEX[spec.index_dtype])
        return {"indices": slots}, n
    table = draw.page_ids(sizes.batch, width)
    begins = draw.i32(range(0, n + 1, sizes.tokens))
    return {"block_table": table, "cu_seqlens": begins, "seq_starts": draw.i32([])}, n


PAGES = 5  # of small calls
SMALL = (
    Stored(note="gaps of 0", pages=PAGES, told=_few, page_gap=48),
    Stored(note="gaps of 16", pages=PAGES, told=_few, page_gap=48, gap=16, from_start=True),
)


def small(spec: VariantSpec) -> Iterator[Stored]:
    """Rows side by side and apart; of chunks, the latter from their sequences' start."""
    for problem in SMALL:
        yield replace(problem, from_start=problem.from_start and spec.mode == "ragged")


def recorded(draw: Exact) -> Iterator[Stored]:
    """Any bytes and scales."""
    yield Stored(pages=PAGES + 1, told=_any, page_gap=16 * draw.odd, gap=16 * draw.odd)


def sized(_spec: VariantSpec, sizes: Sizes) -> Stored:
    """All tokens of the batch."""
    pages = sizes.batch * -(-sizes.tokens // PAGE)
    return Stored(pages=pages, told=functools.partial(_all, sizes=sizes))


def public(spec: VariantSpec, given: Mapping[str, Any]) -> Callable[[], Any]:
    """``snapmla.dsa.fetch_index_k``."""
    out: Any = given["keys"]
    if spec.key_dtype == "fp8":
        out = out.view(torch.float8_e4m3fn), given["scales"]
    where = given["indices"] if spec.mode == "indices" else given["block_table"]
    begins = given.get("cu_seqlens")
    return lambda: fetch_index_k(given["cache"], where, cu_seqlens=begins, out=out)


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads 132 bytes a key, writes those or its channels."""
    own = PAGE_BYTES // PAGE
    written = own if spec.key_dtype == "fp8" else INDEX_DIM * DTYPES[spec.key_dtype].itemsize
    return float(sizes.batch * sizes.tokens) * (own + written)


WORKLOAD = workload(
    bit_for_bit, truth, arguments, small=small, recorded=recorded, sized=sized,
    results=lambda _, problem: {f"{x} with {problem.note}": x for x in ("keys", "scales")},
    rows=lambda _, given: exact.hashes_of([[given["keys"].contiguous(), given["scales"]]], "keys"),
    public=public, moved=moved,
)  # fmt: skip
