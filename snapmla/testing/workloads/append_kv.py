"""``append_kv``: tokens into slots of a cache, as they are or behind RMS norm and RoPE."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import snapmla
from dsl_kernels.cache_records.record import Record
from dsl_kernels.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.families.formats import FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla import byte_cache, layouts
from snapmla.testing import rounding
from snapmla.testing.byte_records import quantize_tokens
from snapmla.testing.workloads import exact, rotary, samples
from snapmla.testing.workloads.call import DTYPES, INDEX, Call, Sizes, Workload, bit_for_bit
from snapmla.testing.workloads.exact import Case, Exact, Recorded, Runner
from snapmla.testing.workloads.samples import PAGE, Adversarial, Random


def truth(spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Each plane of the cache with the tokens in their slots; where no slot is, as before."""
    planes = {
        name: given[name].clone(memory_format=torch.contiguous_format)
        for name in ("content", "rope", "scale", "kv") if name in given
    }  # fmt: skip
    slots = given["slot_mapping"].long()
    pages, page_size = next(iter(planes.values())).shape[:2]
    kept = (slots >= 0) & (slots < pages * page_size)
    rows = slots[kept]
    if FORMATS[spec.cache_dtype].rows:
        heads = planes["kv"].shape[2]
        tokens = torch.cat([given["c_kv"], given["k_rope"]], -1).view(len(slots), heads, -1)
        planes["kv"].view(-1, heads, HEAD_DIM_QK)[rows] = tokens[kept].to(planes["kv"].dtype)
        return planes
    k_rope = given.get("k_rope", given["c_kv"][:, :0])
    stored = rotary.truth(spec, given, given["c_kv"], k_rope)
    if "kv" in planes:
        _truth_of_bytes(FORMATS[spec.cache_dtype], planes["kv"], given, stored, (rows, kept))
        return planes
    content, rope, scale = rounding.quantize_rows(*(x[kept] for x in stored), slots=rows)
    planes["content"].view(-1, KV_LORA_RANK)[rows] = content.view(torch.uint8)
    planes["rope"].view(-1, QK_ROPE_HEAD_DIM)[rows] = rope
    planes["scale"].view(-1)[rows] = scale
    return planes


def _truth_of_bytes(
    record: Record, kv: Tensor, given: Mapping[str, Any], stored: Any, where: tuple[Tensor, Tensor]
) -> None:
    """Writes tokens to the rows that have slots; bytes behind a token's scales are 0."""
    rows, kept = where
    at = rows // kv.shape[1], rows % kv.shape[1]
    c, rope = stored
    fields = quantize_tokens(record, c, rope, bool(given["power_of_two"]))
    assert record.scale is not None
    room = replace(record.scale, dtype="ue8m0", count=record.scale_bytes)
    byte_cache.field_of(record, kv, room).view(torch.uint8)[at] = 0
    for place, field in zip(byte_cache.fields_of(record, kv), fields, strict=True):
        if field.dtype.itemsize == 1:
            place, field = place.view(torch.uint8), field.view(torch.uint8)
        place[at] = field[kept]


def small(spec: VariantSpec) -> Iterator[Call]:
    """Nine tokens into each layout; of 16 bits, into one KV head and three that lie apart, values
    as they are, NaN and infinity too."""
    if FORMATS[spec.cache_dtype].rows:
        yield from _small_rows(spec)
        return
    n = 9
    c_kv, k_rope = (t.to(DTYPES[spec.in_dtype]) for t in samples.sample_tokens(n))
    c_kv[2], k_rope[2] = 0.0, 1e3  # an all-zero latent with a large RoPE
    c_kv[3, 7] = math.nan
    slots = torch.randperm(48)[:n].to(INDEX[spec.index_dtype])
    slots[5] = -1
    tokens = {
        "c_kv": c_kv,
        "k_rope": k_rope,
        "slot_mapping": slots,
        **rotary.arguments(spec, n, Adversarial()),
    }
    if FORMATS[spec.cache_dtype].named:
        yield from _small_bytes(spec, tokens)
        return
    for layout in layouts.LAYOUTS:
        given = samples.planes(samples.poisoned_cache(3, 16, layout)) | tokens
        yield Call(given, {name: name for name in ("content", "rope", "scale")}, truth(spec, given))


def _small_bytes(spec: VariantSpec, tokens: dict[str, Any]) -> Iterator[Call]:
    """Free scales into pages of 16 tokens, powers of two into pages of 3 that lie apart; groups of
    magnitudes far from one another, infinity, and a slot past the pool."""
    tokens["c_kv"][4, 128:256] *= 2.0**-12
    tokens["c_kv"][6, 300], tokens["slot_mapping"][7] = math.inf, 48
    record = FORMATS[spec.cache_dtype]
    tokens["c_kv"] = tokens["c_kv"][:, : record.content.count]
    if record.rope is None:
        del tokens["k_rope"]
    for flag, page_size in enumerate((16, 3)):
        cache = samples.poisoned_bytes(
            spec.cache_dtype, 48 // page_size, page_size, strided=bool(flag)
        )
        last = {"power_of_two": flag}
        given = {**samples.planes(cache), **tokens, **last}
        yield Call(given, {f"rows in pages of {page_size}": "kv"}, truth(spec, given))


def _small_rows(spec: VariantSpec) -> Iterator[Call]:
    n, own = 9, DTYPES[spec.cache_dtype]
    for heads in (1, 3):
        tokens = torch.cat(samples.sample_tokens(n * heads), -1).to(DTYPES[spec.in_dtype])
        tokens[3, 7], tokens[4, 520] = math.nan, math.inf
        slots = torch.randperm(48)[:n].to(INDEX[spec.index_dtype])
        slots[5], slots[6] = -1, 48
        cache = samples.poisoned_rows(3, 16, own, heads, strided=heads > 1)
        given = {
            **samples.planes(cache), "c_kv": tokens[:, :KV_LORA_RANK],
            "k_rope": tokens[:, KV_LORA_RANK:], "slot_mapping": slots,
        }  # fmt: skip
        yield Call(given, {f"rows of {heads} heads": "kv"}, truth(spec, given))


def recorded(case: Case, run: Runner) -> Recorded:
    """57 tokens; slots outside of the pool, and outside of any."""
    spec, n, page_size = case.spec, 57, (16, 64, 128)[case.index % 3]
    rows_, fp8 = FORMATS[spec.cache_dtype].rows, spec.cache_dtype == "fp8"
    if not rows_ and not fp8:
        page_size = (1, 69, 64)[case.index % 3]
    pages = 128 // page_size + 2
    heads = 3 if rows_ and case.index % 2 else 1
    c, r = exact.latents(case, n * heads, spec.in_dtype)
    order = case.bits().below(1 << 40, (pages * page_size,))
    slots = np.argsort(order, kind="stable")[:n]
    slots[18], slots[19] = -1, pages * page_size
    ends = np.iinfo(exact.WIDTH[spec.index_dtype])
    slots[20], slots[21] = ends.min, ends.max
    index = torch.from_numpy(slots.astype(ends.dtype))
    check = exact.digest([exact.bits_of(c), exact.bits_of(r), slots])
    if case.index % 2:  # slices of one (n, 576) tensor
        both = torch.cat([c, r], -1).to(run.device)
        c, r = both[:, :KV_LORA_RANK], both[:, KV_LORA_RANK:]
    given: dict[str, Any] = {"c_kv": c.to(run.device), "k_rope": r.to(run.device)}
    record = FORMATS[spec.cache_dtype]
    given["c_kv"] = given["c_kv"][:, : record.content.count]
    if record.rope is None:
        del given["k_rope"]
    given["slot_mapping"] = index.to(run.device)
    cache: dict[str, Tensor]
    if fp8:
        cache = exact.pool(pages, page_size, exact.LAYOUTS[case.index % 3], run.device)
    elif not rows_:
        pool = exact.bytes_pool(record, pages, page_size, run.device, case.index % 2)
        cache = {"kv": pool}
        given["power_of_two"] = case.index % 2
    else:
        style = (heads, spec.cache_dtype, run.device, case.index % 3)
        cache = {"kv": exact.rows_pool(pages, page_size, *style)}
    run.call(case.variant, **cache, **given, **rotary.arguments(spec, n, Exact(case, run.device)))
    rows = [exact.bits_of(x).reshape(pages * page_size, -1) for x in cache.values()]
    if fp8:
        rows = [np.concatenate([x.view(np.uint8) for x in rows], axis=1)]
    return Recorded(check, {"pool": rows[0]})


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """All tokens of the batch, to slots in random order."""
    source, n = Random(device, seed), sizes.batch * sizes.tokens
    pages = -(-n // PAGE)
    joint = source.normal(n, HEAD_DIM_QK, dtype=DTYPES[spec.in_dtype])
    record = FORMATS[spec.cache_dtype]
    last = {"power_of_two": 0} if record.named else {}
    tokens = {"c_kv": joint[:, : record.content.count]}
    if record.rope is not None:
        tokens["k_rope"] = joint[:, KV_LORA_RANK:]
    return {
        **source.planes(pages, PAGE, spec.cache_dtype), **tokens,
        "slot_mapping": source.order(pages * PAGE)[:n].to(INDEX[spec.index_dtype]),
        **rotary.arguments(spec, n, source), **last,
    }  # fmt: skip


def public(spec: VariantSpec, given: Mapping[str, Any]) -> Callable[[], Any]:
    """``snapmla.append_kv`` or ``rope_append_kv``."""
    cache = samples.cache_of(given, spec.cache_dtype)
    c_kv, slots = given["c_kv"], given["slot_mapping"]
    if spec.rope_style == "applied":
        return lambda: snapmla.append_kv(cache, c_kv, given.get("k_rope"), slots)
    tokens = c_kv, given["k_rope"], slots
    where, told = rotary.options(spec, given)
    return lambda: snapmla.rope_append_kv(cache, *tokens, *where, **told)


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads rows of 576 and a slot each, writes a token each."""
    n = sizes.batch * sizes.tokens
    read = HEAD_DIM_QK * DTYPES[spec.in_dtype].itemsize + INDEX[spec.index_dtype].itemsize
    return float(n) * (read + samples.token_bytes(spec.cache_dtype)) + rotary.moved(spec, n)


_ROPE = {"rope_style": "interleaved", "index_dtype": "i64"}
WORKLOAD = Workload(
    small, bit_for_bit, recorded, sized, truth, public, moved,
    bench={
        "append_kv": {
            "": {}, "bf16": {"cache_dtype": "bf16"}, "ds_mla": {"cache_dtype": "fp8_ds_mla"},
        },
        "rope_append_kv": {"": _ROPE, "norm": {**_ROPE, "norm": "rms"}},
    },
)  # fmt: skip
