"""``fetch_dequant``: tokens back from a cache, by pages, by indices, or as packed chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import snapmla
from dsl_kernels.formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.formats.registered import FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla.cache import layouts
from snapmla.cache.paged import PagedKVCache
from snapmla.testing import fetched
from snapmla.testing.workloads import exact, samples
from snapmla.testing.workloads.call import DTYPES, INDEX, Sizes, bit_for_bit
from snapmla.testing.workloads.draw import Draw
from snapmla.testing.workloads.exact import Exact
from snapmla.testing.workloads.problem import Problem, workload
from snapmla.testing.workloads.samples import PAGE

UNTOUCHED = 7.0  # in results before a small call
STARTS, UNEVEN = 37, 5  # of packed chunks: first token, and how far lengths are from their mean


def truth(spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Rows of the slots that the arguments mean; those of no sequence stay as they are."""
    cache, out = samples.cache_of(given, spec.cache_dtype), _outs(given)
    slots = _slots(spec, cache, given, out[0].shape)
    kept = (slots == fetched.UNTOUCHED).view(*slots.shape, *[1] * (out[0].ndim - slots.ndim))
    rows = fetched.rows_at(cache, slots, out[0].dtype, UNTOUCHED)
    return {
        name: torch.where(kept, before, now)
        for name, before, now in zip(("out_nope", "out_rope"), out, rows, strict=True)
        if name in given
    }


def _outs(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The results, RoPE of no channels where the record has none."""
    nope = given["out_nope"]
    return nope, given.get("out_rope", nope[..., :0])


def _slots(
    spec: VariantSpec, cache: PagedKVCache, given: Mapping[str, Any], shape: torch.Size
) -> Tensor:
    """The slot of each row of a result, ``fetched.ZEROS`` or ``UNTOUCHED``."""
    if spec.mode == "indices":
        index = given["indices"].long()
        return torch.where((index >= 0) & (index < cache.num_slots), index, fetched.ZEROS)
    table = given["block_table"]
    if spec.mode == "pages":
        return fetched.padded_slots(table, given["cache_seqlens"], cache.page_size, shape[1])
    starts = given["seq_starts"] if len(given["seq_starts"]) else None
    return fetched.packed_slots(table, given["cu_seqlens"], starts, cache, shape[0])


def _names(spec: VariantSpec) -> tuple[str, ...]:
    """Results that the kernel takes: without RoPE where the record has none."""
    return ("out_nope", "out_rope")[: 1 + (FORMATS[spec.cache_dtype].rope is not None)]


@dataclass(frozen=True, kw_only=True)
class Tokens(Problem):
    """Tokens of a cache, which are fetched by pages, as packed chunks, or by indices.

    Attributes:
        cache: (spec, problem, draw) -> planes and block table.
        page_size, heads, style: of the cache.
        lengths, tokens: of sequences, and the rows of each in a result by pages.
        begins, starts, total: of packed chunks; rows of their result.
        slots: (problem, draw, block table, slots of the pool) -> slots that indices name.
        outside: indices that name none instead; of int64 those, too, that would be cut to one.
        apart: results are two tensors.
    """

    cache: Callable[[VariantSpec, Any, Any], tuple[dict[str, Tensor], Tensor]]
    page_size: int
    heads: int = 1
    style: int | str = 0
    lengths: Sequence[int]
    tokens: int
    begins: Sequence[int]
    starts: Sequence[int]
    total: int
    slots: Callable[[Any, Any, Tensor, int], Tensor]
    outside: Sequence[int] = ()
    apart: bool = False


def arguments(spec: VariantSpec, problem: Tokens, draw: Draw) -> dict[str, Any]:
    """Arguments by name; results full of ``UNTOUCHED``."""
    cache, table = problem.cache(spec, problem, draw)
    where, shape = {"block_table": table}, [problem.total]
    if spec.mode == "pages":
        where["cache_seqlens"] = draw.i32(problem.lengths)
        shape = [len(table), problem.tokens]
    elif spec.mode == "ragged":
        where |= {"cu_seqlens": draw.i32(problem.begins), "seq_starts": draw.i32(problem.starts)}
    else:
        pages, page_size, *_ = next(iter(cache.values())).shape
        slots = problem.slots(problem, draw, table, pages * page_size)
        none = (-1, pages * page_size, 2**31 - 1, 2**32 + 1, 1 - 2**32)
        for at, slot in zip(problem.outside, none[: 5 if spec.index_dtype == "i64" else 3]):
            slots[at] = slot
        where, shape = {"indices": draw.there(slots, INDEX[spec.index_dtype])}, [len(slots)]
    record = FORMATS[spec.cache_dtype]
    shape += [problem.heads] if record.rows else []
    dtype, width = DTYPES[spec.in_dtype], record.content.count
    both = draw.full(*shape, record.channels, value=UNTOUCHED, dtype=dtype)
    out = both[..., :width], both[..., width:]
    if problem.apart:
        out = out[0].contiguous(), out[1].contiguous()
    return {**cache, **where, **dict(zip(_names(spec), out))}


def _few(spec: VariantSpec, problem: Tokens, _draw: Draw) -> tuple[dict[str, Tensor], Tensor]:
    """Tokens in shuffled pages; those that nobody asks for are NaN."""
    lengths, size, style = tuple(problem.lengths), problem.page_size, problem.style
    if FORMATS[spec.cache_dtype].rows:
        dtype, heads = DTYPES[spec.cache_dtype], problem.heads
        found = samples.filled_rows(lengths, size, dtype, heads, strided=bool(style))
    elif FORMATS[spec.cache_dtype].named:
        found = samples.filled_bytes(spec.cache_dtype, lengths, size, strided=bool(style))
    else:
        found = samples.filled_cache(lengths, size, str(style))
    return samples.planes(found[0]), found[1]


def _any(spec: VariantSpec, problem: Tokens, draw: Exact) -> tuple[dict[str, Tensor], Tensor]:
    """Any codes and bits, NaN too; pages outside of the pool."""
    pages, size, bits, record = 6, problem.page_size, draw.bits(), FORMATS[spec.cache_dtype]
    cache = draw.cache(spec.cache_dtype, pages, size, problem.heads, int(problem.style))
    if record.rows:
        codes = bits.below(1 << 16, cache["kv"].shape).astype(np.uint16)
        fields = [exact.from_bits(codes, spec.cache_dtype)]
    elif record.named:
        rows = bits.below(256, cache["kv"].shape).astype(np.uint8)
        if record.zero_scale and record.scale is not None:
            at = record.scale.at
            rows[:, 1::3, 0, at : at + 8] = 0  # of two groups
        fields = [torch.from_numpy(rows)]
    else:
        tokens = pages * size
        content = bits.below(256, (tokens, KV_LORA_RANK)).astype(np.uint8)  # NaN codes too
        rope = (exact.float_fields(bits, (tokens, QK_ROPE_HEAD_DIM), 90, 150) >> 16).astype(
            np.uint16
        )
        rope[::37, 3], rope[1::41, 9], rope[2::43, 1] = 0x7FC1, 0xFF80, 0x0001
        scale = exact.float_fields(bits, (tokens,), 90, 140) & np.uint32(0x7FFFFFFF)
        scale[3::19], scale[4::23], scale[5::29] = 0x7FC00000, 0, 0x00000123
        numbers = torch.from_numpy(scale.view(np.float32))
        fields = [torch.from_numpy(content), exact.from_bits(rope, "bf16"), numbers]
    draw.identify_by(bits=fields)
    for plane, field in zip(cache.values(), fields, strict=True):
        plane.copy_(field.view(plane.shape))
    return cache, draw.i32([[3, 1, 5], [0, 2**31 - 9, -1], [4, 2, 0]])


def _all(spec: VariantSpec, problem: Tokens, draw: Draw) -> tuple[dict[str, Tensor], Tensor]:
    """Random tokens in pages in random order."""
    b, end = len(problem.lengths), max(problem.lengths) + max(problem.starts)
    table = draw.page_ids(b, -(-end // problem.page_size))
    return draw.cache(spec.cache_dtype, table.numel(), problem.page_size), table


def _used(problem: Tokens, _draw: Draw, table: Tensor, _room: int) -> Tensor:
    """Slots of all tokens, sequence by sequence."""
    size = problem.page_size
    at = [samples.places(row, n, size) for row, n in zip(table, problem.lengths, strict=True)]
    return torch.cat([pages * size + offsets for pages, offsets in at])


def _some(problem: Tokens, draw: Draw, table: Tensor, room: int) -> Tensor:
    """Slots of twelve tokens."""
    used = _used(problem, draw, table, room)
    return used[draw.order(len(used))[:12]]


def small(spec: VariantSpec) -> Iterator[Tokens]:
    """Each layout; packed chunks start in mid-page, have no pages, no rows, the end of a page."""
    form, size = FORMATS[spec.cache_dtype], 16
    made: dict[str, dict[str, Any]] = {name: {"style": name} for name in layouts.LAYOUTS}
    if form.rows:
        made = {"rows": {}, "3 heads": {"heads": 3, "style": 1}}
    elif form.named:
        made, size = {"rows": {}, "strided rows": {"style": 1}}, 7  # a warp's tokens lie in two
    for i, (name, layout) in enumerate(made.items()):
        yield Tokens(
            cache=_few, page_size=size, lengths=(20, 0, 33, 33), tokens=40,
            begins=(0, 17, 19, 19, 38), starts=() if i == 1 else (3, 1, 5, 14), total=41,
            slots=_some, outside=range(7, 12), apart=i < len(made) - 1, **layout, note=name,
        )  # fmt: skip


def recorded(draw: Exact) -> Iterator[Tokens]:
    """Chunks and lengths about the ends of pages."""
    form, third = FORMATS[draw.case.spec.cache_dtype], draw.case.index % 3
    size = ((13, 64, 21) if form.named else (16, 64, 128))[third]
    yield Tokens(
        cache=_any, page_size=size, heads=(1, 3)[draw.odd] if form.rows else 1,
        style=draw.odd if form.named else third, lengths=(2 * size + 7, size, 0),
        tokens=2 * size + 9, begins=(0, size + 9, size + 9, 2 * size + 30),
        starts=(size - 3, 5, 2 * size - 11), total=2 * size + 37,
        slots=lambda _problem, draw, _table, room: draw.below(room, 90),
        outside=(7, 11, 40, 50, 51), apart=not draw.odd,
    )  # fmt: skip


def _rows(spec: VariantSpec, given: Mapping[str, Any]) -> exact.Rows:
    """Rows of results; of the caches that are one plane one row."""
    found = {name[4:]: given[name] for name in _names(spec)}
    if FORMATS[spec.cache_dtype].rows:
        found = {"kv": torch.cat(_outs(given), -1).flatten(-2)}
    return {name: exact.bits_of(x).reshape(-1, x.shape[-1]) for name, x in found.items()}


def sized(spec: VariantSpec, sizes: Sizes) -> Tokens:
    """All tokens of sequences whose pages lie in random order; packed chunks begin in mid-page and
    are uneven: one is longer, the next shorter by as much."""
    b, each = sizes.batch, sizes.tokens
    start, uneven = (STARTS, min(UNEVEN, each)) if spec.mode == "ragged" else (0, 0)
    counts = [each + (uneven if i % 2 else -uneven) * (i < b // 2 * 2) for i in range(b)]
    return Tokens(
        cache=_all, page_size=PAGE, lengths=counts, tokens=each,
        begins=[0, *itertools.accumulate(counts)], starts=[start] * b, total=b * each,
        slots=_used,
    )  # fmt: skip


def public(spec: VariantSpec, given: Mapping[str, Any]) -> Callable[[], Any]:
    """``snapmla.fetch_dequant``."""
    cache, out = samples.cache_of(given, spec.cache_dtype), _outs(given)
    if FORMATS[spec.cache_dtype].rows:
        out = (out[0].squeeze(-2), out[1].squeeze(-2))
    where = given["indices" if spec.mode == "indices" else "block_table"]
    names = ("cu_seqlens", "seq_starts", "cache_seqlens")
    told = {name: given[name] for name in names if name in given}
    return lambda: snapmla.fetch_dequant(cache, where, **told, out=out)


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads a token each, writes rows of 576."""
    row = FORMATS[spec.cache_dtype].channels * DTYPES[spec.in_dtype].itemsize
    return float(sizes.batch * sizes.tokens) * (samples.token_bytes(spec.cache_dtype) + row)


_MODES = ("pages", "indices", "ragged")
WORKLOAD = workload(
    bit_for_bit, truth, arguments, small=small, recorded=recorded, sized=sized,
    results=lambda spec, problem: {f"{x[4:]} of {problem.note}": x for x in _names(spec)},
    rows=_rows, public=public, moved=moved,
    bench={
        "fetch_dequant": {
            **{mode: {"mode": mode} for mode in _MODES},
            **{f"{mode}_bf16": {"mode": mode, "cache_dtype": "bf16"} for mode in _MODES},
            **{f"{mode}_ds_mla": {"mode": mode, "cache_dtype": "fp8_ds_mla"} for mode in _MODES},
        }
    },
)  # fmt: skip
