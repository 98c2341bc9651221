"""``fetch_dequant``: tokens back from a cache, by pages, by indices, or as packed chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import snapmla
from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.formats.registered import FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla.cache import layouts
from snapmla.cache.paged import PagedKVCache
from snapmla.testing import fetched
from snapmla.testing.workloads import exact, samples
from snapmla.testing.workloads.call import DTYPES, INDEX, Call, Sizes, Workload, bit_for_bit
from snapmla.testing.workloads.exact import Bits, Case, Recorded, Runner
from snapmla.testing.workloads.samples import PAGE, Random

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


def small(spec: VariantSpec) -> Iterator[Call]:
    """Calls in every layout, where pages that nobody asks for are NaN; rows joint or apart."""
    dtype, lengths = DTYPES[spec.in_dtype], (20, 0, 33)
    made: dict[str, tuple[PagedKVCache, Tensor, Tensor]] = {}
    page_size = 16
    if spec.cache_dtype == "fp8":
        made = {layout: samples.filled_cache(lengths, 16, layout) for layout in layouts.LAYOUTS}
    elif FORMATS[spec.cache_dtype].named:
        page_size = 7  # a warp's tokens lie in two
        made["rows"] = samples.filled_bytes(spec.cache_dtype, lengths, page_size)
        made["strided rows"] = samples.filled_bytes(
            spec.cache_dtype, lengths, page_size, strided=True
        )
    else:
        own = DTYPES[spec.cache_dtype]
        made["rows"] = samples.filled_rows(lengths, 16, own)
        made["3 heads"] = samples.filled_rows(lengths, 16, own, 3, strided=True)
    for i, (name, (cache, table, seqlens)) in enumerate(made.items()):
        selector, shape = _small_selector(spec, cache, table, seqlens, from_start=i == 1)
        heads = (cache.num_kv_heads,) if FORMATS[cache.format].rows else ()
        joint = i == len(made) - 1
        out = fetched.outputs((*shape, *heads), dtype, UNTOUCHED, joint=joint, fmt=spec.cache_dtype)
        given = {**samples.planes(cache), **selector, **_named(spec, out)}
        results = {f"{key[4:]} of {name}": key for key in _named(spec, out)}
        yield Call(given, results, truth(spec, given))


def _named(spec: VariantSpec, out: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Results as the kernel takes them: without RoPE where the record has none."""
    nope, rope = out
    if FORMATS[spec.cache_dtype].rope is None:
        return {"out_nope": nope}
    return {"out_nope": nope, "out_rope": rope}


def _small_selector(
    spec: VariantSpec, cache: PagedKVCache, table: Tensor, seqlens: Tensor, *, from_start: bool
) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """(arguments that select tokens, leading dimensions of a fetch's result)."""
    if spec.mode == "pages":
        return {"block_table": table, "cache_seqlens": seqlens}, (len(seqlens), 40)
    if spec.mode == "indices":
        size = cache.page_size
        at = [samples.places(table[i], n, size) for i, n in enumerate(seqlens.tolist())]
        used = torch.cat([page * size + offset for page, offset in at])
        used = used[torch.randperm(len(used))[:7]]
        # outside of the pool; beyond 32 bits what would be a token, were it cut
        outside = torch.tensor([-1, cache.num_slots, 2**31 - 1])
        if spec.index_dtype == "i64":
            outside[1:] = torch.stack([used[0] + 2**32, used[1] - 2**32])
        return {"indices": torch.cat([used, outside]).to(INDEX[spec.index_dtype])}, (10,)
    # a start in mid-page, a sequence without pages, one without rows, the end of a page
    table = torch.cat([table, table[:1]])
    table[3] = table[2]
    begins = torch.tensor([0, 17, 19, 19, 38], dtype=torch.int32)
    starts = torch.tensor([] if from_start else [3, 1, 5, 14], dtype=torch.int32)
    return {"block_table": table, "cu_seqlens": begins, "seq_starts": starts}, (41,)


def recorded(case: Case, run: Runner) -> Recorded:
    """Any codes and bits, NaN too; pages and indices outside of the pool."""
    spec, page_size, pages = case.spec, (16, 64, 128)[case.index % 3], 6
    record = FORMATS[spec.cache_dtype]
    if record.named:
        page_size = (13, 64, 21)[case.index % 3]
    bits, tokens = case.bits(), pages * page_size
    heads: tuple[int, ...] = ()
    cache: dict[str, Tensor]
    if spec.cache_dtype == "fp8":
        content = bits.below(256, (tokens, KV_LORA_RANK)).astype(np.uint8)  # NaN codes too
        fields = exact.float_fields(bits, (tokens, QK_ROPE_HEAD_DIM), 90, 150)
        rope = (fields >> 16).astype(np.uint16)
        rope[::37, 3], rope[1::41, 9], rope[2::43, 1] = 0x7FC1, 0xFF80, 0x0001
        scale = exact.float_fields(bits, (tokens,), 90, 140) & np.uint32(0x7FFFFFFF)
        scale[3::19], scale[4::23], scale[5::29] = 0x7FC00000, 0, 0x00000123
        check = exact.digest([content, rope, scale])
        cache = exact.pool(pages, page_size, exact.LAYOUTS[case.index % 3], run.device)
        exact.fill(cache, content, rope, scale)
    elif record.named:
        rows = bits.below(256, (pages, page_size, 1, record.token_bytes)).astype(np.uint8)
        if record.zero_scale and record.scale is not None:
            at = record.scale.at
            rows[:, 1::3, 0, at : at + 8] = 0  # of two groups
        check = exact.digest([rows])
        pool = exact.bytes_pool(record, pages, page_size, run.device, case.index % 2)
        cache = {"kv": pool}
        cache["kv"].copy_(torch.from_numpy(rows))
    else:
        heads = ((1, 3)[case.index % 2],)
        codes = bits.below(1 << 16, (pages, page_size, *heads, HEAD_DIM_QK)).astype(np.uint16)
        check = exact.digest([codes])
        style = spec.cache_dtype, run.device, case.index % 3
        cache = {"kv": exact.rows_pool(pages, page_size, heads[0], *style)}
        cache["kv"].copy_(exact.from_bits(codes, spec.cache_dtype))
    selector, lead = _recorded_selector(spec, bits, tokens, page_size)
    both = run.full((*lead, *heads, record.channels), 7.0, DTYPES[spec.in_dtype])
    nope, r = both[..., : record.content.count], both[..., record.content.count :]
    if case.index % 2 == 0:
        nope, r = nope.contiguous(), r.contiguous()
    where = {name: run.there(s) for name, s in selector.items()}
    outs = _named(spec, (nope, r))
    run.call(case.variant, **cache, **where, **outs)
    found = {key[4:]: x for key, x in outs.items()}
    if heads:  # one plane: one hash
        found = {"kv": torch.cat([nope, r], -1)}
    count = int(np.prod(lead))
    return Recorded(check, {k: exact.bits_of(x).reshape(count, -1) for k, x in found.items()})


def _recorded_selector(
    spec: VariantSpec, bits: Bits, tokens: int, page_size: int
) -> tuple[dict[str, exact.Array], tuple[int, ...]]:
    """(arguments that select tokens, leading dimensions of a fetch's result)."""
    if spec.mode == "indices":
        index = bits.below(tokens, (90,)).astype(exact.WIDTH[spec.index_dtype])
        index[7], index[11], index[40] = -1, tokens, 2**31 - 1
        if spec.index_dtype == "i64":
            index[50], index[51] = 2**32 + 1, 1 - 2**32
        return {"indices": index}, (90,)
    table = np.array([[3, 1, 5], [0, 2**31 - 9, -1], [4, 2, 0]], np.int32)
    if spec.mode == "pages":
        lengths = np.array([page_size * 2 + 7, page_size, 0], np.int32)
        return {"block_table": table, "cache_seqlens": lengths}, (3, page_size * 2 + 9)
    begins = np.array([0, page_size + 9, page_size + 9, 2 * page_size + 30], np.int32)
    starts = np.array([page_size - 3, 5, 2 * page_size - 11], np.int32)
    selector = {"block_table": table, "cu_seqlens": begins, "seq_starts": starts}
    return selector, (2 * page_size + 37,)


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """All tokens of sequences whose pages lie in random order; packed chunks begin in mid-page and
    are uneven: one is longer, the next shorter by as much."""
    source, b, each = Random(device, seed), sizes.batch, sizes.tokens
    start, uneven = (STARTS, min(UNEVEN, each)) if spec.mode == "ragged" else (0, 0)
    counts = [each + (uneven if i % 2 else -uneven) * (i < b // 2 * 2) for i in range(b)]
    width = -(-(start + each + uneven) // PAGE)
    table = source.order(b * width).int().view(b, width)
    given: dict[str, Any] = source.planes(b * width, PAGE, spec.cache_dtype)
    lead: tuple[int, ...] = (b * each,)
    if spec.mode == "pages":
        lead = (b, each)
        given |= {"block_table": table, "cache_seqlens": source.i32(counts)}
    elif spec.mode == "indices":
        within = torch.arange(PAGE, device=device)
        slots = (table.long()[..., None] * PAGE + within).view(b, -1)[:, :each].flatten()
        given["indices"] = slots.to(INDEX[spec.index_dtype])
    else:
        begins = [0, *np.cumsum(counts).tolist()]
        chunks = {"cu_seqlens": source.i32(begins), "seq_starts": source.i32([start] * b)}
        given |= {"block_table": table, **chunks}
    record = FORMATS[spec.cache_dtype]
    heads, width = (1,) if record.rows else (), record.content.count
    both = source.full(*lead, *heads, record.channels, dtype=DTYPES[spec.in_dtype])
    return {**given, **_named(spec, (both[..., :width], both[..., width:]))}


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
WORKLOAD = Workload(
    small, bit_for_bit, recorded, sized, truth, public, moved,
    bench={
        "fetch_dequant": {
            **{mode: {"mode": mode} for mode in _MODES},
            **{f"{mode}_bf16": {"mode": mode, "cache_dtype": "bf16"} for mode in _MODES},
            **{f"{mode}_ds_mla": {"mode": mode, "cache_dtype": "fp8_ds_mla"} for mode in _MODES},
        }
    },
)  # fmt: skip
