"""``append_kv``: tokens into slots of a cache, as they are or behind RMS norm and RoPE."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import snapmla
from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.formats.format import Format
from dsl_kernels.formats.registered import FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla.cache import byte_cache
from snapmla.testing import rounding
from snapmla.testing.byte_records import quantize_tokens
from snapmla.testing.workloads import exact, rotary, samples
from snapmla.testing.workloads.call import DTYPES, INDEX, Sizes, bit_for_bit
from snapmla.testing.workloads.draw import Draw, Plant, nothing
from snapmla.testing.workloads.exact import Exact
from snapmla.testing.workloads.problem import Problem, workload
from snapmla.testing.workloads.samples import PAGE


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
    record: Format, kv: Tensor, given: Mapping[str, Any], stored: Any, where: tuple[Tensor, Tensor]
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


@dataclass(frozen=True, kw_only=True)
class Tokens(Problem):
    """Tokens for the slots of a pool.

    Attributes:
        tokens, pages, page_size, heads: extents.
        outside: tokens whose slots are none, as ``Draw.slots`` has them.
        plant: (draw, c_kv, k_rope), both of all heads.
        style: of the cache's memory.
        joint: both are slices of one tensor.
        power_of_two: scales, of formats of bytes.
    """

    tokens: int
    pages: int
    page_size: int
    heads: int = 1
    outside: Sequence[int] = ()
    plant: Plant = nothing
    style: int = 0
    joint: bool = False
    power_of_two: int = 0


def arguments(spec: VariantSpec, problem: Tokens, draw: Draw) -> dict[str, Any]:
    """Arguments by name; problems of one draw with as many heads have the same tokens."""
    n, pages, page_size, heads = problem.tokens, problem.pages, problem.page_size, problem.heads
    record, index = FORMATS[spec.cache_dtype], INDEX[spec.index_dtype]
    c_kv, k_rope = draw.once(("tokens", heads), lambda: _tokens(spec, problem, draw))
    cache = draw.cache(spec.cache_dtype, pages, page_size, heads, problem.style)
    slots, turning = draw.once(("slots", heads), lambda: (
        draw.slots(n, pages * page_size, index, outside=problem.outside),
        rotary.arguments(spec, n, draw),
    ))  # fmt: skip
    draw.identify_by(slots.long(), bits=(c_kv, k_rope))
    given = {**cache, "c_kv": c_kv[:, : record.content.count], "slot_mapping": slots, **turning}
    if record.rope is not None:
        given["k_rope"] = k_rope
    if record.named:
        given["power_of_two"] = problem.power_of_two
    return given


def _tokens(spec: VariantSpec, problem: Tokens, draw: Draw) -> tuple[Tensor, Tensor]:
    """c_kv and k_rope of all heads, as wide as MLA's."""
    c, r = draw.tokens(problem.tokens * problem.heads, DTYPES[spec.in_dtype])
    problem.plant(draw, c, r)
    if not problem.joint:
        return draw.there(c), draw.there(r)
    both = draw.there(torch.cat([c, r], -1))
    return both[:, :KV_LORA_RANK], both[:, KV_LORA_RANK:]


def _large_rope(_draw: Draw, c: Tensor, r: Tensor) -> None:
    """Plants an all-zero latent with a large RoPE, and NaN."""
    c[2], r[2], c[3, 7] = 0.0, 1e3, math.nan


def _groups(draw: Draw, c: Tensor, r: Tensor) -> None:
    """Plants groups of magnitudes far from one another, and infinity, too."""
    _large_rope(draw, c, r)
    c[4, 128:256] *= 2.0**-12
    c[6, 300] = math.inf


def _wild(_draw: Draw, c: Tensor, r: Tensor) -> None:
    """Plants NaN and infinity."""
    c[3, 7], r[4, 8] = math.nan, math.inf


def small(spec: VariantSpec) -> Iterator[Tokens]:
    """Nine tokens into each layout; of bytes, free scales into pages of 16 tokens and powers of two
    into pages of 3 that lie apart; of 16 bits, into one KV head and three that lie apart."""
    made: dict[str, Any] = {"tokens": 9, "pages": 3, "page_size": 16}
    if FORMATS[spec.cache_dtype].rows:
        for heads in (1, 3):
            yield Tokens(
                **made, heads=heads, style=heads // 3, outside=(5, 6), joint=True, plant=_wild,
                note=f"rows of {heads} heads",
            )  # fmt: skip
    elif FORMATS[spec.cache_dtype].named:
        for apart, page_size in enumerate((16, 3)):
            made |= {"pages": 48 // page_size, "page_size": page_size}
            yield Tokens(
                **made, style=apart, outside=(5, 7), plant=_groups, power_of_two=apart,
                note=f"rows in pages of {page_size}",
            )  # fmt: skip
    else:
        for style in range(len(exact.LAYOUTS)):
            yield Tokens(**made, style=style, outside=(5,), plant=_large_rope)


def _results(_spec: VariantSpec, problem: Tokens) -> dict[str, str]:
    """Planes; of the caches that are one the problem's name."""
    if problem.note:
        return {problem.note: "kv"}
    return {name: name for name in ("content", "rope", "scale")}


def recorded(draw: Exact) -> Iterator[Tokens]:
    """57 tokens; slots outside of the pool, and outside of any."""
    third, form = draw.case.index % 3, FORMATS[draw.case.spec.cache_dtype]
    page_size = ((1, 69, 64) if form.named else (16, 64, 128))[third]
    yield Tokens(
        tokens=57, pages=128 // page_size + 2, page_size=page_size,
        heads=3 if form.rows and draw.odd else 1, outside=(18, 19, 20, 21),
        style=draw.odd if form.named else third, joint=bool(draw.odd), power_of_two=draw.odd,
    )  # fmt: skip


def _rows(_spec: VariantSpec, given: Mapping[str, Any]) -> exact.Rows:
    """Tokens of the pool, of FP8 the bytes of all planes side by side."""
    planes = [given[name] for name in ("content", "rope", "scale", "kv") if name in given]
    rows = [exact.bits_of(x).reshape(x.shape[0] * x.shape[1], -1) for x in planes]
    if len(rows) > 1:
        rows = [np.concatenate([x.view(np.uint8) for x in rows], axis=1)]
    return {"pool": rows[0]}


def sized(_spec: VariantSpec, sizes: Sizes) -> Tokens:
    """All tokens of the batch, to slots in random order."""
    n = sizes.batch * sizes.tokens
    return Tokens(tokens=n, pages=-(-n // PAGE), page_size=PAGE)


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
WORKLOAD = workload(
    bit_for_bit, truth, arguments, small=small, recorded=recorded, sized=sized, results=_results,
    rows=_rows, public=public, moved=moved,
    bench={
        "append_kv": {
            "": {}, "bf16": {"cache_dtype": "bf16"}, "ds_mla": {"cache_dtype": "fp8_ds_mla"},
        },
        "rope_append_kv": {"": _ROPE, "norm": {**_ROPE, "norm": "rms"}},
    },
)  # fmt: skip
