"""Small caches, tables, tokens and queries, drawn by torch from its global seed.

What no call may read is poison: NaN in caches, page ids of no page in tables.  ``Adversarial``
draws arguments of them, ``Random`` those that are as large as in service.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.formats.format import Format
from dsl_kernels.formats.index_cache import PAGE as INDEX_PAGE
from dsl_kernels.formats.index_cache import PAGE_BYTES, SCALES_AT
from dsl_kernels.formats.registered import FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla.cache import byte_cache
from snapmla.cache.paged import PagedKVCache
from snapmla.cache.quant import QuantizedQuery
from snapmla.dense import partial_rows
from snapmla.testing import partials, rounding
from snapmla.testing.byte_records import quantize_tokens
from snapmla.testing.reference_plan import NOTHING_HIDDEN
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import NATURAL, Sizes
from snapmla.testing.workloads.draw import Draw

ABSURD_PAGE = 2147480000
SHAPES = {16: (7, 2), 32: (16, 2), 64: (20, 3), 128: (64, 2)}  # row tile: (heads, s_q)
LENGTHS = (64, 0, 130, 1)
PARTS = 2
PAGE = 64  # of sized calls whose op has no such axis


def poisoned_cache(pages: int, page_size: int, layout: str = "split") -> PagedKVCache:
    """A cache whose every byte is NaN in all three tensors."""
    cache = PagedKVCache.allocate(pages, page_size, layout, "cpu")
    cache.content_u8.fill_(0x7F)
    cache.rope.fill_(math.nan)
    cache.named_tensors["scale"].fill_(math.nan)
    return cache


def poisoned_rows(
    pages: int, page_size: int, dtype: torch.dtype, heads: int = 1, *, strided: bool = False
) -> PagedKVCache:
    """A cache of 16 bits whose every value is NaN; ``strided``: heads before tokens, and gaps."""
    if not strided:
        rows = torch.full((pages, page_size, heads, HEAD_DIM_QK), math.nan, dtype=dtype)
        return PagedKVCache.from_tensors(rows)
    memory = torch.full((pages, heads, page_size + 1, HEAD_DIM_QK + 8), math.nan, dtype=dtype)
    return PagedKVCache.from_tensors(memory[:, :, 1:, 8:].transpose(1, 2))


def poisoned_bytes(
    fmt: str, pages: int, page_size: int, scale_fmt: str | None = None, *, strided: bool = False
) -> PagedKVCache:
    """A cache of a format of bytes whose every byte is 0x7f, and 0xff in scales: NaN but for RoPE;
    ``strided``: pages lie apart."""
    token = FORMATS[fmt].token_bytes
    size, gap = page_size * token, -(-token // 16) * 16 if strided else 0
    memory = torch.full((pages, -(-size // 16) * 16 + 2 * gap), 0x7F).byte()
    tokens = memory[:, gap : gap + size].unflatten(1, (page_size, token))
    cache = PagedKVCache.from_tensors(tokens, format=fmt, scale_fmt=scale_fmt)
    held(cache, "scale").view(torch.uint8)[:] = 0xFF
    return cache


def held(cache: PagedKVCache, name: str) -> Tensor:
    """A field of a cache that has it."""
    field: Tensor = getattr(cache, name)
    return field


def shuffled_table(lengths: Sequence[int], page_size: int) -> tuple[int, Tensor]:
    """(pages of the pool, block_table) with shuffled pages and ids of none where no token is."""
    counts = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(counts) + 2).tolist()
    pool = len(order)
    table = torch.full((len(lengths), max(counts) + 1), ABSURD_PAGE, dtype=torch.int32)
    for i, count in enumerate(counts):
        pages = [order.pop() for _ in range(count)]
        table[i, :count] = torch.tensor(pages, dtype=torch.int32)
        table[i, count:-1] = -1
    return pool, table


def places(table: Tensor, n: int, page_size: int) -> tuple[Tensor, Tensor]:
    """(page, offset) of the first ``n`` tokens of a sequence, whose row of the table is given."""
    t = torch.arange(n, device=table.device)
    return table[t // page_size].long(), t % page_size


def filled_cache(
    lengths: tuple[int, ...], page_size: int, layout: str = "split"
) -> tuple[PagedKVCache, Tensor, Tensor]:
    """(cache, block_table, cache_seqlens) with shuffled pages and poison wherever no token is."""
    pool, table = shuffled_table(lengths, page_size)
    cache = poisoned_cache(pool, page_size, layout)
    for i, n in enumerate(lengths):
        content, rope, scale = rounding.quantize_rows(*sample_tokens(n), slots=torch.arange(n))
        at = places(table[i], n, page_size)
        cache.content_u8[at] = content.view(torch.uint8)
        cache.rope[at] = rope
        cache.named_tensors["scale"][at] = scale
    return cache, table, torch.tensor(lengths, dtype=torch.int32)


def filled_rows(
    lengths: tuple[int, ...],
    page_size: int,
    dtype: torch.dtype,
    heads: int = 1,
    *,
    strided: bool = False,
) -> tuple[PagedKVCache, Tensor, Tensor]:
    """Like ``filled_cache``, of 16 bits."""
    pool, table = shuffled_table(lengths, page_size)
    cache = poisoned_rows(pool, page_size, dtype, heads, strided=strided)
    for i, n in enumerate(lengths):
        rows = torch.cat(sample_tokens(n * heads), -1).view(n, heads, HEAD_DIM_QK)
        cache.named_tensors["kv"][places(table[i], n, page_size)] = rows.to(dtype)
    return cache, table, torch.tensor(lengths, dtype=torch.int32)


def filled_bytes(
    fmt: str, lengths: tuple[int, ...], page_size: int, *, strided: bool = False
) -> tuple[PagedKVCache, Tensor, Tensor]:
    """Like ``filled_cache``, of a byte format; with scales of any size, of fp32 ones 0 beside NaN
    content too."""
    record = FORMATS[fmt]
    pool, table = shuffled_table(lengths, page_size)
    cache = poisoned_bytes(fmt, pool, page_size, strided=strided)
    places_of = held(cache, "content"), cache.rope, held(cache, "scale")
    for i, n in enumerate(lengths):
        content, rope, scale = quantize_tokens(record, *tokens_of(record, n), power_of_two=False)
        group = i % scale.shape[-1]
        if record.powers:
            odd = torch.tensor([0, 1, 255, 254, 13], dtype=torch.uint8).view(scale.dtype)
        else:
            odd = torch.tensor([0.0, 2.0**-126, 2.0**-140, 3e38, math.nan, 1e-30])
        scale, odd = _indexed(scale), _indexed(odd)
        scale[3::5, group] = odd.repeat(n)[: len(scale[3::5])]
        content = _indexed(content)
        content[3::30, record.group * group + 5] = 0x7F  # beside a scale of 0
        at = places(table[i], n, page_size)
        for place, field in zip(places_of, (content, rope, scale), strict=True):
            _indexed(place)[at] = field
    return cache, table, torch.tensor(lengths, dtype=torch.int32)


def _indexed(field: Tensor) -> Tensor:
    """A field that can be indexed: those of bytes as such."""
    return field.view(torch.uint8) if field.dtype.itemsize == 1 else field


def tokens_of(record: Format, n: int) -> tuple[Tensor, Tensor]:
    """(c_kv, k_rope) of ``sample_tokens``, as many channels as a record has."""
    c, r = sample_tokens(n)
    return c[:, : record.content.count], r[:, : record.rope_channels]


def sample_tokens(n: int) -> tuple[Tensor, Tensor]:
    """(c_kv (n, 512), k_rope (n, 64)): biased channels, log-normal token amplitudes."""
    amplitude = torch.exp(0.3 * torch.randn(n, 1))
    return (
        amplitude * (torch.randn(n, KV_LORA_RANK) + 0.5),
        3.0 * torch.randn(n, QK_ROPE_HEAD_DIM),
    )


def sample_query(b: int, s_q: int, heads: int) -> QuantizedQuery:
    """A quantised query of unit-variance rows."""
    nope = torch.randn(b, s_q, heads, KV_LORA_RANK)
    return QuantizedQuery(
        *rounding.quantize_rows(nope, torch.randn(b, s_q, heads, QK_ROPE_HEAD_DIM))
    )


def planes(cache: PagedKVCache) -> dict[str, Tensor]:
    """A cache as kernels take it, by name."""
    form = FORMATS[cache.format]
    return {
        name: getattr(cache, held) for name, held in zip(form.parts, form.arguments, strict=True)
    }


def cache_of(given: Mapping[str, Any], fmt: str) -> PagedKVCache:
    """The cache of a format over the planes among a call's arguments."""
    if "kv" in given:
        return PagedKVCache.from_tensors(given["kv"], format=fmt if FORMATS[fmt].named else None)
    content = given["content"].view(torch.float8_e4m3fn)
    return PagedKVCache.from_tensors(content, given["rope"], given["scale"])


def token_bytes(cache_dtype: str) -> int:
    """Bytes of a cached token, its scale included."""
    return FORMATS[cache_dtype].token_bytes


def _fill(scale: Tensor, record: Format) -> None:
    """Scales of 0.01, or of the power of two below."""
    if record.powers:
        scale.view(torch.uint8).fill_(120)
    else:
        scale.fill_(0.01)


# ---------------------------------------------------------------------------- draws


class Adversarial(Draw):
    """Numbers of small calls: torch's global seed, on the CPU."""

    fill = 7.0
    angles = 50
    byte = 0x7F

    def __init__(self) -> None:
        super().__init__("cpu")

    def rows(self, *shape: int) -> Tensor:
        return torch.randn(shape)

    def below(self, bound: int, n: int) -> Tensor:
        return torch.randint(0, bound, (n,))

    def order(self, n: int) -> Tensor:
        return torch.randperm(n)

    def lses(self, *shape: int) -> Tensor:
        return 4.0 * self.rows(*shape)

    def tokens(self, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        c, r = sample_tokens(n)
        return c.to(dtype), r.to(dtype)

    def positions(self, n: int, dtype: torch.dtype) -> Tensor:
        """The last is past the table."""
        found = super().positions(n, dtype)
        found[-1] = self.angles
        return found

    def page_ids(self, batch: int, width: int, bound: int = 0) -> Tensor:
        """Pages in order, if each occurs once."""
        if bound:
            return super().page_ids(batch, width, bound)
        return torch.arange(batch * width, dtype=torch.int32).view(batch, width)

    def cache(
        self, cache_dtype: str, pages: int, page_size: int, heads: int = 1, style: int = 0
    ) -> dict[str, Tensor]:
        form, strided = FORMATS[cache_dtype], bool(style)
        if form.rows:
            dtype = exact.TORCH[cache_dtype]
            return planes(poisoned_rows(pages, page_size, dtype, heads, strided=strided))
        if form.named:
            return planes(poisoned_bytes(cache_dtype, pages, page_size, strided=strided))
        return planes(poisoned_cache(pages, page_size, exact.LAYOUTS[style]))

    def key_pages(self, pages: int, gap: int = 0) -> Tensor:
        """All codes, scales of any size and one that is NaN."""
        wide = torch.randint(256, (pages, PAGE_BYTES + gap), dtype=torch.uint8)
        scales = torch.randn(pages, INDEX_PAGE).exp() * 0.1
        scales[1, 3] = math.nan
        wide[:, SCALES_AT:PAGE_BYTES] = scales.view(torch.uint8)
        return wide

    def there(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        made = super().there(x, dtype)
        if made.dtype != x.dtype and made.is_floating_point():
            made[made.isnan()] = math.nan  # casts make other patterns on other machines
        return made


class Random(Draw):
    """Numbers of a device's generator; of device ``meta`` tensors without any."""

    fill = 0.0
    angles = 163840  # of DeepSeek-V3's rotary embedding
    byte = 0xFF

    def __init__(self, device: str, seed: int) -> None:
        super().__init__(device)
        self._generator = None
        if device != "meta":
            self._generator = torch.Generator(device).manual_seed(seed)

    def rows(self, *shape: int) -> Tensor:
        return self.normal(*shape, dtype=torch.float32)

    def cache(
        self, cache_dtype: str, pages: int, page_size: int, heads: int = 1, style: int = 0
    ) -> dict[str, Tensor]:
        """Random tokens of one KV head, without gaps."""
        return self.planes(pages, page_size, cache_dtype)

    def key_pages(self, pages: int, gap: int = 0) -> Tensor:
        """Zeros."""
        return self.full(pages, PAGE_BYTES + gap, dtype=torch.uint8)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self._generator, device=self.device).to(dtype)

    def e4m3(self, *shape: int) -> Tensor:
        """Random e4m3 bytes without NaN; at most 2^20 different ones, repeated."""
        total = math.prod(shape)
        block = self.normal(min(total, 1 << 20), dtype=torch.float32).mul_(50)
        block = block.to(torch.float8_e4m3fn).view(torch.uint8)
        return block.repeat(-(-total // block.numel()))[:total].view(shape)

    def order(self, n: int) -> Tensor:
        """0 to n - 1 in random order, int64."""
        return torch.randperm(n, generator=self._generator, device=self.device)

    def below(self, bound: int, n: int) -> Tensor:
        """(n,) int64 of [0, bound)."""
        return torch.randint(0, bound, (n,), generator=self._generator, device=self.device)

    def planes(self, pages: int, page_size: int, cache_dtype: str) -> dict[str, Tensor]:
        """A cache of random tokens, FP8 or of 16 bits, with one KV head."""
        if FORMATS[cache_dtype].rows:
            shape = (pages, page_size, 1, HEAD_DIM_QK)
            return {"kv": self.normal(*shape, dtype=exact.TORCH[cache_dtype])}
        record = FORMATS[cache_dtype]
        if record.named:
            shape = (pages, page_size, 1, record.token_bytes)
            kv = self.full(*shape, dtype=torch.uint8)
            content, rope, scale = byte_cache.fields_of(record, kv)
            content.view(torch.uint8).copy_(self.e4m3(*content.shape))
            rope.copy_(self.normal(*rope.shape))
            _fill(scale, record)
            return {"kv": kv}
        return {
            "content": self.e4m3(pages, page_size, KV_LORA_RANK),
            "rope": self.normal(pages, page_size, QK_ROPE_HEAD_DIM),
            "scale": self.full(pages, page_size, value=0.01),
        }

    def partial_rows(self, slots: int, rows: int, cache_dtype: str) -> dict[str, Tensor]:
        """Partial results as kernels over a cache of that dtype keep them."""
        o = self.normal(slots, rows, KV_LORA_RANK, dtype=torch.float32)
        if partial_rows(cache_dtype)[0] is not torch.float32:
            o = partials.encode(o)
        return {"o_accum": o, "lse_accum": self.full(slots, rows)}

    def split_work(self, sizes: Sizes, token_tile: int) -> tuple[dict[str, Tensor], int]:
        """(a work list that gives each part the same number of tiles, its slots)."""
        tiles = -(-sizes.tokens // token_tile)
        *lists, slots = split_evenly(sizes.batch, sizes.heads * sizes.s_q, tiles, sizes.parts)
        names = ("work_items", "part_begin", "split_begin")
        return {name: self.i32(x) for name, x in zip(names, lists, strict=True)}, slots

    def decode(
        self, spec: VariantSpec, sizes: Sizes, cache_dtype: str, out_dtype: str
    ) -> dict[str, Any]:
        """Arguments that decodes over any cache share: work list, workspace, results, scalars."""
        work, slots = self.split_work(sizes, spec.token_tile)
        rows = -(-sizes.heads * sizes.s_q // spec.row_tile) * spec.row_tile
        return {
            **work, **self.alone("units", "row_limits", "cu_seqlens_q"),
            **self.results(sizes.batch, sizes.s_q, sizes.heads, exact.TORCH[out_dtype]),
            **self.partial_rows(slots, rows, cache_dtype), "softmax_scale": exact.SOFTMAX_SCALE,
            "causal": 1, **NATURAL, "may_split": 0, "witness": 0,
        }  # fmt: skip

    def paged(self, sizes: Sizes, page_size: int) -> tuple[dict[str, Tensor], int]:
        """(block table of shuffled pages, with the lengths; pages of the pool)."""
        width = -(-sizes.tokens // page_size)
        pages = sizes.batch * width
        lengths = self.i32([sizes.tokens] * sizes.batch)
        table = self.page_ids(sizes.batch, width)
        return {"block_table": table, "cache_seqlens": lengths}, pages


def split_evenly(batch: int, rows: int, tiles: int, parts: int) -> tuple[Any, Any, Any, int]:
    """(work_items, part_begin, split_begin, slots) that give each part the same number of tiles."""
    total, part_begin, split_begin = batch * tiles, [0], [0]
    items: list[list[int]] = []
    slots = 0
    cuts = [total * p // parts for p in range(parts + 1)]
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(batch)]  # (item, part)
    for p in range(parts):
        at = cuts[p]
        while at < cuts[p + 1]:
            b, first = divmod(at, tiles)
            last = min(tiles, first + cuts[p + 1] - at)
            pieces[b].append((len(items), p))
            items.append([b, first, last, -1, b * rows, (b + 1) * rows, NOTHING_HIDDEN, 0])
            at += last - first
        part_begin.append(len(items))
    for found in pieces:
        if len(found) > 1:
            for item, _ in found:
                items[item][3] = slots
                slots += 1
        split_begin.append(slots)
    return items, part_begin, split_begin, max(slots, 1)
