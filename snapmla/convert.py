"""``convert_cache``: pages of one FP8 cache as pages of the other FP8 format.

Plain torch, for what is done once (a pool of another engine, a prefix that comes over a wire): some
twenty small kernels for every ``AT_ONCE`` tokens, and memory for those alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsl_kernels.dims import CACHE_TOPS, E4M3_MAX, KV_LORA_RANK
from dsl_kernels.cache_records.ds_mla import GROUPS, LEAST_SCALE
from dsl_kernels.families.formats import DEFAULT, FORMATS
from snapmla import checks, ds_mla, tracing
from snapmla.cache import PagedKVCache
from snapmla.layouts import FP8

AT_ONCE = 4096  # tokens; 8 MB in fp32
ROPE_FLOOR, SCALE_FLOOR = 2.0**-40, 2.0**-80  # of a token's one scale, as kernels have them
FRACTION = 0x7FFFFF  # of an fp32 number
INDEX = (torch.int64, torch.int32)
_OTHER = {DEFAULT: ds_mla.FORMAT, ds_mla.FORMAT: DEFAULT}
Fields = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # content in e4m3, RoPE, scales


def convert_cache(
    source: PagedKVCache,
    out: PagedKVCache,
    pages: torch.Tensor | None = None,
    out_pages: torch.Tensor | None = None,
) -> None:
    """Writes pages of an FP8 cache into one of format ``fp8_ds_mla``, or back, in place.

    From ``fp8_ds_mla`` a token is quantised anew, since its four scales become one: as
    ``append_kv`` would the token that ``fetch_dequant`` gives in float32, byte for byte.  A channel
    moves by at most 1/16 of itself, or 1/1024 of the new scale if that is more; RoPE by 1/256 of
    itself.  Into ``fp8_ds_mla`` content is copied and the token's scale put in all four places, so
    that c_kv is the same, number for number; k_rope is multiplied out and rounded to bfloat16
    (1/256).  With ``scale_fmt='ue8m0'`` each group is quantised anew instead, by the rule of
    ``append_kv``.

    A token that is quantised anew and holds a NaN or an infinity becomes NaN everywhere.  A scale
    of 0 says that a token has no weight in format ``fp8``, and that channels are zeros in
    ``fp8_ds_mla``; what is converted are zeros, which have weight.

    Plain torch operations on the caches' device, for what is done once: about 20 kernels for 4096
    tokens, which take 8 MB a temporary.  It waits for page numbers that are given.

    Args:
        source: what is read, of format ``fp8`` or ``fp8_ds_mla``.
        out: what is written, of the other of them, on the same device, with pages of as many
            tokens; memory of its own.
        pages: int32 or int64 (n,) page numbers of ``source``; None: all.
        out_pages: int32 or int64 (n,), where each of them goes; of a number that comes twice one or
            the other is there afterwards.  None: to the same numbers.

    Raises:
        TypeError, ValueError: naming the argument.

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
    if source.format not in _OTHER:
        hint = "rows of 16 bits are appended with snapmla.append_kv"
        checks.value_error("source", "an FP8 cache", FORMATS[source.format].about, hint)
    wanted = _OTHER[source.format]
    if out.format != wanted:
        hint = f"allocate it with dtype={wanted!r}"
        checks.value_error("out", f"a cache of format {wanted!r}", repr(out.format), hint)
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


def _converted(source: PagedKVCache, at: torch.Tensor, out: PagedKVCache) -> Fields:
    """Pages of ``source`` as fields of ``out``'s format."""
    assert source.scale is not None
    content, rope, scale = source.content_u8[at].view(FP8), source.rope[at], source.scale[at]
    if source.format == ds_mla.FORMAT:
        groups = content.float().unflatten(-1, (GROUPS, -1))
        zero = scale[..., None] == 0  # whatever the bytes are
        c_kv = torch.where(zero, 0.0, groups * scale[..., None]).flatten(-2)
        return _one_scale(c_kv, rope.float())
    factor = scale[..., None]
    k_rope = (rope.float() * factor).bfloat16()
    if out.scale_fmt is None:
        return content, k_rope, factor.expand(*scale.shape, GROUPS)
    return _powers_of_two(torch.where(factor == 0, 0.0, content.float() * factor), k_rope)


def _one_scale(c_kv: torch.Tensor, k_rope: torch.Tensor) -> Fields:
    """Tokens (pages, P, ...) by the rule of ``append_kv`` for format ``fp8``."""
    tops = [1.0 / CACHE_TOPS[i % len(CACHE_TOPS)] for i in range(c_kv.shape[1])]
    factor = torch.tensor(tops, device=c_kv.device)
    scale = torch.maximum(c_kv.abs().amax(-1) * factor, k_rope.abs().amax(-1) * ROPE_FLOOR)
    scale = _or_nan(scale.clamp_min(SCALE_FLOOR), c_kv, k_rope)
    inverse = (1.0 / scale)[..., None]
    return _e4m3(c_kv * inverse), (k_rope * inverse).bfloat16(), scale


def _powers_of_two(c_kv: torch.Tensor, k_rope: torch.Tensor) -> Fields:
    """Tokens (pages, P, ...) by the rule of ``append_kv`` for ``scale_fmt='ue8m0'``."""
    groups = c_kv.unflatten(-1, (GROUPS, -1))
    scale = (groups.abs().amax(-1) / E4M3_MAX).clamp_min(LEAST_SCALE)
    scale = ((scale.view(torch.int32) + FRACTION) & ~FRACTION).view(torch.float32)
    scale = _or_nan(scale, c_kv, k_rope)
    return _e4m3(groups / scale[..., None]).flatten(-2), k_rope, scale


def _or_nan(scale: torch.Tensor, c_kv: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """Scales, NaN of a token that holds a NaN or an infinity."""
    good = torch.isfinite(c_kv).all(-1) & torch.isfinite(k_rope).all(-1)
    return torch.where(good.view(*good.shape, *[1] * (scale.ndim - good.ndim)), scale, torch.nan)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3, ties to even, saturating."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(FP8)


def _written(out: PagedKVCache, fields: Fields) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each field's place in ``out``, with what goes there; content as bytes, which are indexed."""
    assert out.scale is not None
    content, rope, scale = fields
    assert content.shape[-1] == KV_LORA_RANK
    yield out.content_u8, content.view(torch.uint8)
    yield out.rope, rope
    yield out.scale, scale
