"""``convert_cache``: pages of one FP8 cache as pages of another FP8 format.

A token is its *values*, the 512 channels that attention sums, and what else K has, 64 channels of
RoPE or none: each format's fields are read as these, and written of them.

Plain torch, for what is done once (a pool of another engine, a prefix that comes over a wire): some
twenty small kernels for every ``AT_ONCE`` tokens, and memory for those alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsl_kernels.formats.dims import CACHE_TOPS, E4M3_MAX
from dsl_kernels.formats.format import Format
from dsl_kernels.formats.registered import FORMATS, Names
from snapmla import checks
from snapmla.cache.layouts import FP8
from snapmla.cache.paged import PagedKVCache
from snapmla.call import tracing

AT_ONCE = 4096  # tokens; 8 MB in fp32
ROPE_FLOOR, SCALE_FLOOR = 2.0**-40, 2.0**-80  # of a token's one scale, as kernels have them
FRACTION, EXPONENT_AT = 0x7FFFFF, 23  # of an fp32 number
NAN_ROPE = 0x7FFF  # bits of a bfloat16
INDEX = (torch.int64, torch.int32)
_FP8 = Names(lambda each: not each.rows)
Fields = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # content in e4m3, RoPE, scales


def convert_cache(
    source: PagedKVCache,
    out: PagedKVCache,
    pages: torch.Tensor | None = None,
    out_pages: torch.Tensor | None = None,
) -> None:
    """Writes pages of an FP8 cache into one of another FP8 format, in place.

    Into ``fp8`` a token is quantised anew, since its scales become one: as ``append_kv`` would the
    token that ``fetch_dequant`` gives in float32, byte for byte.  A channel moves by at most 1/16
    of itself, or 1/1024 of the new scale if that is more; RoPE by 1/256 of itself.  From ``fp8``
    into ``fp8_ds_mla`` content is copied and the token's scale put in all four places, so that c_kv
    is the same, number for number; k_rope is multiplied out and rounded to bfloat16 (1/256).  With
    ``scale_fmt='ue8m0'``, and into formats whose scales are powers of two, each group is quantised
    anew instead, by the rule of ``append_kv``.  Between formats with the same content and scales
    these are copied.

    Channels are those that attention sums (V, always 512), then what else K has.  A format that
    keeps RoPE within V takes none beside: of what has some it refuses all but zeros.

    A token that is quantised anew and holds a NaN or an infinity becomes NaN everywhere.  A scale
    of 0 says that a token has no weight in format ``fp8``, and that channels are zeros in
    ``fp8_ds_mla``; what is converted are zeros, which have weight.

    Plain torch operations on the caches' device, for what is done once: about 20 kernels for 4096
    tokens, which take 8 MB a temporary.  It waits for page numbers that are given, and for k_rope
    where that must be zeros.

    Args:
        source: what is read, of any format but 16 bits.
        out: what is written, of another of them, on the same device, with pages of as many
            tokens; memory of its own.
        pages: int32 or int64 (n,) page numbers of ``source``; None: all.
        out_pages: int32 or int64 (n,), where each of them goes; of a number that comes twice one or
            the other is there afterwards.  None: to the same numbers.

    Raises:
        TypeError, ValueError: naming the argument.

    Example:
        source = snapmla.PagedKVCache.allocate(2, device="cpu")
        out = snapmla.PagedKVCache.allocate(2, device="cpu", dtype="fp8_ds_mla")
        snapmla.convert_cache(source, out)

    Source: our own; FlashMLA's README describes ``fp8_ds_mla``'s tokens.
    """
    _check(source, out)
    if pages is None and out_pages is None and out.num_pages < source.num_pages:
        hint = "or name the pages to convert"
        checks.value_error("out", f"{source.num_pages} pages, as source", out.num_pages, hint)
    first = _numbers("pages", pages, source, source.num_pages)
    second = first if out_pages is None else _numbers("out_pages", out_pages, out, len(first))
    if len(first) != len(second):
        hint = "one for each page of source that is converted"
        checks.value_error("out_pages", f"shape ({len(first)},)", tuple(second.shape), hint)
    _in_pool("pages", first, source, given=pages is not None)
    name = "pages" if out_pages is None else "out_pages"
    _in_pool(name, second, out, given=pages is not None or out_pages is not None)
    _expect_room(source, first, out)
    step = max(1, AT_ONCE // source.page_size)
    for at, to in zip(first.split(step), second.split(step), strict=True):
        for target, converted in _written(out, _converted(source, at, out)):
            target[to] = converted


def _check(source: PagedKVCache, out: PagedKVCache) -> None:
    """Checks the two caches."""
    for name, cache in (("source", source), ("out", out)):
        if not isinstance(cache, PagedKVCache):
            hint = "PagedKVCache.from_tensors wraps existing memory"
            checks.type_error(name, "a snapmla.PagedKVCache", checks.class_name(cache), hint)
        if tracing.by_dynamo() or not cache.plain:
            hint = "convert outside of what is compiled or traced"
            checks.value_error(name, "a cache with memory", "a tracer's stand-in", hint)
        hint = "keep the storage, or make another cache"
        checks.in_place(name, cache.begins, hint)
    if FORMATS[source.format].rows:
        hint = "rows of 16 bits are appended with snapmla.append_kv"
        checks.value_error("source", "an FP8 cache", FORMATS[source.format].about, hint)
    others = [name for name in _FP8 if name != source.format]
    if out.format not in others:
        hint = "allocate it with dtype=" + " or dtype=".join(map(repr, others))
        checks.value_error("out", "a cache of another FP8 format", repr(out.format), hint)
    if out.device != source.device:
        hint = "move one of them first"
        checks.value_error("out", f"a cache on {source.device}, as source", out.device, hint)
    if out.page_size != source.page_size:
        hint = "pages are converted whole"
        wanted = f"pages of {source.page_size} tokens, as source"
        checks.value_error("out", wanted, out.page_size, hint)
    for part in out.named_tensors.values():
        checks.apart("out", part, {f"source.{n}": t for n, t in source.named_tensors.items()})


def _numbers(name: str, value: torch.Tensor | None, of: PagedKVCache, n: int) -> torch.Tensor:
    """Page numbers as int64; those of all pages for None."""
    if value is None:
        return torch.arange(n, device=of.device)
    checks.tensor(name, value, INDEX, ("n",), of.device)
    return value.long()


def _in_pool(name: str, numbers: torch.Tensor, cache: PagedKVCache, *, given: bool) -> None:
    """Checks that a cache has pages of these numbers; waits for them if they were given."""
    if not len(numbers):
        return
    least, most = (0, len(numbers) - 1) if not given else map(int, torch.aminmax(numbers))
    if least < 0 or most >= cache.num_pages:
        hint = "page numbers of the cache, not slots"
        got = least if least < 0 else most
        checks.value_error(name, f"0 to {cache.num_pages - 1}, pages of the cache", got, hint)


def _rope_beside(record: Format) -> bool:
    """True if K has RoPE channels that V has not."""
    return record.rope is not None and not record.rope_in_v


def _expect_room(source: PagedKVCache, at: torch.Tensor, out: PagedKVCache) -> None:
    """Checks that nothing of K is lost."""
    target = FORMATS[out.format]
    if _rope_beside(target) or not _rope_beside(FORMATS[source.format]):
        return
    if bool((source.rope[at] != 0).any()):
        wanted = f"tokens whose k_rope is 0, for which {target.about} has no place"
        checks.value_error(
            "source", wanted, "others", "convert into a format that keeps RoPE apart"
        )


def _bytes_at(field: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Pages of a field; one of bytes is indexed as such."""
    if field.dtype.itemsize > 1:
        return field[at]
    return field.view(torch.uint8)[at].view(field.dtype)


def _converted(source: PagedKVCache, at: torch.Tensor, out: PagedKVCache) -> Fields:
    """Pages of ``source`` as fields of ``out``'s format."""
    assert source.scale is not None
    record, target = FORMATS[source.format], FORMATS[out.format]
    content, rope, scale = (_bytes_at(x, at) for x in (source.content, source.rope, source.scale))
    free = target.powers or out.scale_fmt is None  # scales need not be rounded
    values, beside = _values(record, content, rope, scale)
    split = target.content.count
    k_rope = values[..., split:] if target.rope_in_v else beside
    if k_rope.shape[-1] != target.rope_channels:  # K has no RoPE but in V
        k_rope = k_rope.new_zeros((*k_rope.shape[:-1], target.rope_channels))
    if target.one_scale:
        return _one_scale(values, k_rope)
    k_rope = k_rope.bfloat16()
    if record.one_scale and not target.powers and free:
        groups = split // target.group
        return content, k_rope, scale[..., None].expand(*scale.shape, groups)
    if free and _same_content(record, target):
        return content, k_rope, scale
    return _scales_of_groups(target, values[..., :split], k_rope, not free)


def _same_content(one: Format, other: Format) -> bool:
    """True if content and scales of one are those of the other."""
    assert one.scale is not None and other.scale is not None
    of = lambda x: (x.content.count, x.group, x.scale.dtype, x.rope_in_v, x.zero_scale)
    return of(one) == of(other)


def _values(
    record: Format, content: torch.Tensor, rope: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the channels of V, what else K has) in fp32."""
    factor = scale.float() if scale.ndim == content.ndim else scale[..., None]
    groups = content.float().unflatten(-1, (factor.shape[-1], -1))
    values = groups * factor[..., None]
    if record.zero_scale:
        values = torch.where(factor[..., None] == 0, 0.0, values)  # whatever the bytes are
    values, k_rope = values.flatten(-2), rope.float()
    if record.rope_scaled:
        k_rope = k_rope * factor
    if record.rope_in_v:
        return torch.cat([values, k_rope], -1), k_rope[..., :0]
    return values, k_rope


def _one_scale(c_kv: torch.Tensor, k_rope: torch.Tensor) -> Fields:
    """Tokens (pages, P, ...) by the rule of ``append_kv`` for format ``fp8``."""
    tops = [1.0 / CACHE_TOPS[i % len(CACHE_TOPS)] for i in range(c_kv.shape[1])]
    factor = torch.tensor(tops, device=c_kv.device)
    scale = torch.maximum(c_kv.abs().amax(-1) * factor, k_rope.abs().amax(-1) * ROPE_FLOOR)
    scale = _or_nan(scale.clamp_min(SCALE_FLOOR), c_kv, k_rope)
    inverse = (1.0 / scale)[..., None]
    return _e4m3(c_kv * inverse), (k_rope * inverse).bfloat16(), scale


def _scales_of_groups(
    record: Format, c_kv: torch.Tensor, k_rope: torch.Tensor, power_of_two: bool
) -> Fields:
    """Tokens (pages, P, ...) by the rule of ``append_kv`` for a record of bytes."""
    groups = c_kv.unflatten(-1, (-1, record.group))
    scale = (groups.abs().amax(-1) / E4M3_MAX).clamp_min(record.least_scale)
    if power_of_two or record.powers:
        scale = ((scale.view(torch.int32) + FRACTION) & ~FRACTION).view(torch.float32)
    scale = _or_nan(scale, c_kv, k_rope)
    bad = scale.isnan().any(-1, keepdim=True)
    content = _e4m3(groups / scale[..., None]).flatten(-2)
    k_rope = torch.where(bad, NAN_ROPE, k_rope.view(torch.int16)).view(torch.bfloat16)
    if record.powers:
        exponents = (scale.view(torch.int32) >> EXPONENT_AT).to(torch.uint8)
        scale = exponents.view(torch.float8_e8m0fnu)
    return content, k_rope, scale


def _or_nan(scale: torch.Tensor, c_kv: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """Scales, NaN of a token that holds a NaN or an infinity."""
    good = torch.isfinite(c_kv).all(-1) & torch.isfinite(k_rope).all(-1)
    return torch.where(good.view(*good.shape, *[1] * (scale.ndim - good.ndim)), scale, torch.nan)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3, ties to even, saturating."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(FP8)


def _written(out: PagedKVCache, fields: Fields) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each field's place in ``out``, with what goes there; fields of bytes as such, which are
    indexed."""
    assert out.scale is not None
    for place, field in zip((out.content, out.rope, out.scale), fields, strict=True):
        if place.dtype.itemsize == 1:
            place, field = place.view(torch.uint8), field.view(torch.uint8)
        yield place, field
