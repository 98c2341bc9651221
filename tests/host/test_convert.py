"""``convert_cache``: the bytes and errors that it says; other pages are untouched."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import snapmla
from dsl_kernels.families.fp8_decode import PAGE_SIZES
from dsl_kernels.formats import ds_mla
from snapmla import PagedKVCache
from snapmla.cache import byte_cache
from snapmla.testing.ds_mla import dequantize_ds_mla_rows, quantize_ds_mla_rows
from snapmla.testing.rounding import quantize_rows
from snapmla.testing.workloads import samples
from tests.support.bits import assert_same, same_bits
from tests.support.cases import LAYOUTS
from tests.support.needs import needs_compiler
from tests.support.rows import latents


def fields_of(kv: torch.Tensor) -> byte_cache.Fields:
    return byte_cache.fields_of(ds_mla.FORMAT, kv)


def rows_cache(pages: int, page_size: int, scale_fmt: str | None = None) -> PagedKVCache:
    """Tokens of every kind, with scales that other writers leave: 0 beside NaN, and tiny ones."""
    cache = samples.poisoned_bytes(ds_mla.NAME, pages, page_size, scale_fmt)
    kv = cache.named_tensors["kv"]
    tokens = latents((pages * page_size,), torch.bfloat16)
    kv[:] = quantize_ds_mla_rows(*tokens).view(kv.shape)
    content, _, scale = fields_of(kv)
    scale[0, 2, 1], content.view(torch.uint8)[0, 2, 130:140] = 0.0, 0x7F
    scale[0, 3], scale[0, 5, 2], scale[0, 6, 0] = 0.0, 2.0**-140, math.inf
    return cache


def unpacked(cache: PagedKVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """c_kv and k_rope of all slots in fp32."""
    if cache.format == ds_mla.NAME:
        c, r = dequantize_ds_mla_rows(cache.named_tensors["kv"].squeeze(2), torch.float32)
    else:
        factor = cache.named_tensors["scale"][..., None]
        c, r = cache.content.float() * factor, cache.rope.float() * factor
    return c.flatten(0, 1), r.flatten(0, 1)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_to_one_scale(layout: str, page_size: int) -> None:
    """As ``append_kv`` of the tokens in fp32, byte for byte: the rule in torch."""
    source = rows_cache(3, page_size)
    out = samples.poisoned_cache(3, page_size, layout)
    snapmla.convert_cache(source, out)
    c, r = unpacked(source)
    content, rope, scale = quantize_rows(c, r, slots=torch.arange(len(c)))
    assert_same(out.content_u8.flatten(0, 1), content.view(torch.uint8))
    assert_same(out.rope.flatten(0, 1), rope)
    assert_same(out.named_tensors["scale"].flatten(), scale)
    assert scale.isnan().any() and (c[3] == 0).all() and not scale[2:4].isnan().any()


@needs_compiler
def test_to_one_scale_as_the_kernel_does() -> None:
    source, out = rows_cache(2, 64), samples.poisoned_cache(2, 64)
    snapmla.convert_cache(source, out)
    want = samples.poisoned_cache(2, 64)
    snapmla.append_kv(want, *unpacked(source), torch.arange(128, dtype=torch.int32))
    for name, part in want.named_tensors.items():
        if name == "content":
            assert_same(out.content_u8, want.content_u8)
        else:
            assert_same(out.named_tensors[name], part)


def test_what_one_scale_loses() -> None:
    """The bounds that the docstring states, of groups as far apart as 2^20; and both are met."""
    source, out = samples.poisoned_bytes(ds_mla.NAME, 4, 64), samples.poisoned_cache(4, 64)
    c, r = torch.randn(256, 512), torch.randn(256, 64)
    c = c * torch.exp2(torch.randint(-20, 1, (256, 4)).float()).repeat_interleave(128, 1)
    kv = source.named_tensors["kv"]
    kv[:] = quantize_ds_mla_rows(c, r).view(kv.shape)
    snapmla.convert_cache(source, out)
    (c, r), (c2, r2) = unpacked(source), unpacked(out)
    sigma = out.named_tensors["scale"].view(-1, 1)
    slack = 1 + 2.0**-20
    allowed = torch.maximum(c.abs() / 16, sigma / 1024)
    moved = (c2 - c).abs() / allowed
    assert 0.9 < moved.max() <= slack and (moved[c.abs() > sigma / 64] > 0.9).any()
    assert 0.9 < ((r2 - r).abs() / (r.abs() / 256)).max() <= slack


@pytest.mark.parametrize("layout", LAYOUTS)
def test_to_four_scales(layout: str) -> None:
    """Content and scale as they are, k_rope multiplied out and rounded."""
    source, out = (
        samples.poisoned_cache(3, 16, layout),
        samples.poisoned_bytes(ds_mla.NAME, 3, 16),
    )
    c, r = latents((48,), torch.bfloat16)
    content, rope, scale = quantize_rows(c, r, slots=torch.arange(48))
    scale[5] = 0.0
    source.content_u8[:] = content.view(torch.uint8).view(3, 16, 512)
    source.rope[:], source.named_tensors["scale"][:] = rope.view(3, 16, 64), scale.view(3, 16)
    snapmla.convert_cache(source, out)
    kept, kept_rope, scales = fields_of(out.named_tensors["kv"])
    assert_same(kept.view(torch.uint8), source.content_u8)
    assert_same(scales, scale.view(3, 16, 1).expand(3, 16, 4))
    assert_same(kept_rope.flatten(0, 1), (rope.float() * scale[:, None]).bfloat16())
    (a, _), (b, _) = unpacked(source), unpacked(out)
    assert ((a == b) | (a.isnan() & b.isnan())).all() and not b[5].any()


def test_to_powers_of_two() -> None:
    """Each group is quantised anew, as ``append_kv`` does."""
    source, out = (
        samples.poisoned_cache(2, 32),
        samples.poisoned_bytes(ds_mla.NAME, 2, 32, "ue8m0"),
    )
    c, r = latents((64,), torch.bfloat16)
    content, rope, scale = quantize_rows(c, r, slots=torch.arange(64))
    source.content_u8[:] = content.view(torch.uint8).view(2, 32, 512)
    source.rope[:], source.named_tensors["scale"][:] = rope.view(2, 32, 64), scale.view(2, 32)
    snapmla.convert_cache(source, out)
    want = quantize_ds_mla_rows(*unpacked(source), power_of_two=True)
    got = fields_of(out.named_tensors["kv"])
    fields = fields_of(want.view(2, 32, 1, 656))
    for a, b in zip(got, fields, strict=True):
        assert_same(*(x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in (a, b)))


@pytest.mark.parametrize("back", [False, True])
def test_some_pages(back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each where it is sent, in steps of one page; the others keep every byte."""
    monkeypatch.setattr("snapmla.cache.convert.AT_ONCE", 16)
    rows, planes = rows_cache(5, 16), samples.poisoned_cache(6, 16, "paged")
    snapmla.convert_cache(rows, planes)  # the first five
    source, out = (planes, samples.poisoned_bytes(ds_mla.NAME, 7, 16)) if back else (rows, planes)
    whole = samples.poisoned_bytes(ds_mla.NAME, 7, 16) if back else samples.poisoned_cache(7, 16)
    snapmla.convert_cache(source, whole)
    before = [part.clone() for part in parts(out)]
    pages, out_pages = torch.tensor([3, 0, 4]), torch.tensor([5, 2, 0], dtype=torch.int32)
    snapmla.convert_cache(source, out, pages, out_pages)
    for part, old, all_ in zip(parts(out), before, parts(whole), strict=True):
        old[out_pages.long()] = all_[pages]
        assert same_bits(part, old)
    snapmla.convert_cache(source, out, torch.tensor([], dtype=torch.int64))
    snapmla.convert_cache(source, out, torch.tensor([2]))
    for part, all_ in zip(parts(out), parts(whole), strict=True):
        assert same_bits(part[2], all_[2])


def parts(cache: PagedKVCache) -> list[torch.Tensor]:
    """Its tensors as bytes or numbers that can be indexed."""
    if cache.format == ds_mla.NAME:
        return list(cache.named_tensors.values())
    return [cache.content_u8, cache.rope, cache.named_tensors["scale"]]


def test_pages_end_with_the_cache() -> None:
    """Of both, the first page and the last are there, those beside them not."""
    source, out = rows_cache(3, 16), samples.poisoned_cache(5, 16)
    snapmla.convert_cache(source, out, torch.tensor([0, 2]), torch.tensor([4, 0]))
    for pages, out_pages in (([3], [0]), ([-1], [0]), ([0], [5]), ([0], [-1])):
        with pytest.raises(ValueError, match=r"pages: expected 0 to \d, pages of the cache, got"):
            snapmla.convert_cache(source, out, torch.tensor(pages), torch.tensor(out_pages))


def test_a_tracer_is_refused() -> None:
    with FakeTensorMode():
        source = PagedKVCache.allocate(2, 64, device="cpu", dtype=ds_mla.NAME)
        out = PagedKVCache.allocate(2, 64, device="cpu")
        with pytest.raises(ValueError, match="^source: expected a cache with memory, got a tracer"):
            snapmla.convert_cache(source, out)
    real = rows_cache(2, 16), samples.poisoned_cache(2, 16)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="source: expected a cache with memory"):
        torch.compile(snapmla.convert_cache, fullgraph=True, backend="eager")(*real)
