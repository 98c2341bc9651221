"""Caches of each record that is bytes: fields where the record says, memory of engines, calls,
conversion."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import snapmla
from codegen import closure
from dsl_kernels.formats.format import Format
from dsl_kernels.formats.registered import FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla import PagedKVCache
from snapmla.cache import byte_cache
from snapmla.reference import dequantize_pages, quantize_pages, quantize_rows
from snapmla.testing.workloads import samples
from tests.support.bits import assert_same, same_bits
from tests.support.copies import COPIES
from tests.support.needs import needs_compiler

# format: content channels, RoPE channels, scales, then bytes from a token's page to its first of
# content, RoPE, scales: of the token at ``t`` of ``P``; bytes of a token
Places = tuple[int, int, int, Callable[[int, int], tuple[int, int, int]], int]
PLACES: dict[str, Places] = {
    "fp8_ds_mla": (512, 64, 4, lambda t, P: (656 * t, 656 * t + 528, 656 * t + 512), 656),
    "fp8_v4": (448, 64, 7, lambda t, P: (576 * t, 576 * t + 448, 576 * P + 8 * t), 584),
    "fp8_v41_planar": (512, 0, 16, lambda t, P: (512 * t, 0, 512 * P + 16 * t), 528),
    "fp8_v41_rows": (512, 0, 16, lambda t, P: (528 * t, 0, 528 * t + 512), 528),
    "fp8_nope": (512, 0, 4, lambda t, P: (528 * t, 0, 528 * t + 512), 528),
}
KNOWN = [name for name, each in FORMATS.items() if each.named]
IN_MATRIX = [name for name in KNOWN if FORMATS[name].appends]


def tokens(record: Format, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    c, r = samples.tokens_of(record, n)
    return c.bfloat16(), r.bfloat16()


def test_each_is_known() -> None:
    assert list(PLACES) == KNOWN


@pytest.mark.parametrize("fmt", PLACES)
def test_kernels_have_one_record(fmt: str) -> None:
    """What another record's file says is no source of theirs: adding one compiles nothing anew."""
    for op, values in (("append_kv", {"index_dtype": "i32"}), ("fetch_dequant", {"mode": "pages"})):
        spec = VariantSpec(op=op, cache_dtype=fmt, **values)
        formats = {each.module.replace(".", "/") + ".py" for each in FORMATS.values()}
        files = [f for f in closure.sources(spec)[1] if f in formats]
        own = FORMATS[fmt].module.replace(".", "/") + ".py"
        assert own in files
        assert files == [own]


@pytest.mark.parametrize("page_size", [1, 2, 53, 64, 256])
@pytest.mark.parametrize("fmt", PLACES)
def test_fields_are_bytes_of_pages(fmt: str, page_size: int) -> None:
    content, rope, scales, places, token = PLACES[fmt]
    cache = PagedKVCache.allocate(3, page_size, device="cpu", dtype=fmt)
    kv = cache.named_tensors["kv"]
    assert kv.shape == (3, page_size, 1, token) and kv.stride()[1:] == (token, token, 1)
    assert kv.stride(0) >= page_size * token and kv.stride(0) % 16 == 0
    assert cache.format == fmt and cache.dtype is torch.uint8 and cache.traceable
    assert FORMATS[fmt].token_bytes == token
    assert cache.scale_fmt == ("ue8m0" if FORMATS[fmt].powers else None)
    assert cache.scale is not None
    wanted = [(cache.content, content, 1), (cache.rope, rope, 2), (cache.scale, scales, None)]
    page = kv.as_strided((3, page_size * token), (kv.stride(0), 1))
    for t in {0, page_size - 1}:
        for (view, count, size), at in zip(wanted, places(t, page_size), strict=True):
            assert view.shape == (3, page_size, count)
            width = view.element_size()
            assert size in (None, width)
            page.zero_()
            if not count:
                continue
            view.view(torch.uint8)[2, t] = 9
            assert (page[2, at : at + count * width] == 9).all()
            assert int((page != 0).sum()) == count * width


@pytest.mark.parametrize("fmt", PLACES)
@pytest.mark.parametrize("dtype", byte_cache.BYTES)
def test_memory_of_an_engine(fmt: str, dtype: torch.dtype) -> None:
    """Two layers' pages in one block, as vLLM packs them, and a slice of a page's tokens."""
    token = PLACES[fmt][-1]
    size = -(-64 * token // 576) * 576
    block = torch.zeros((4, 2 * size), dtype=torch.uint8)
    given = block[:, size : size + 64 * token].unflatten(1, (64, 1, token)).view(dtype)
    cache = PagedKVCache.from_tensors(given, format=fmt)
    assert cache.kv is not None and cache.kv.stride(0) == 2 * size
    cache.kv[:] = 1
    assert (block[:, size : size + 64 * token] == 1).all() and not block[:, :size].any()
    half = block[:, : 32 * token].view(4, 32, 1, token)
    assert PagedKVCache.from_tensors(half, format=fmt).num_slots == 4 * 32


@pytest.mark.parametrize("fmt", PLACES)
def test_wrong_memory(fmt: str) -> None:
    token = PLACES[fmt][-1]
    make = lambda kv: PagedKVCache.from_tensors(kv, format=fmt)
    right = torch.zeros((4, 64, 1, token), dtype=torch.uint8)
    for kv, words in (
        (right[..., :-16], r"content: .*page_size, 1, \d+\), got"),
        (right[:, ::2], f"content: expected rows {token} bytes apart"),
        (right[:1].expand(4, 64, 1, token), "content: expected strides of distinct"),
        (torch.zeros(4 * 64 * token + 8).byte()[8:].view(4, 64, token), "content: .*aligned to 16"),
        (torch.zeros(4, 64 * token + 8).byte()[:, :-8].unflatten(1, (64, token)),
         "content: expected outer strides that are multiples of 16 bytes"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{words}"):
            make(kv)
    named = f"^format: expected the name of what has {token} bytes a token, got None.*'{fmt}'"
    with pytest.raises(ValueError, match=named):
        PagedKVCache.from_tensors(right)  # no width tells a format


@pytest.mark.parametrize("fmt", PLACES)
def test_fields_must_be_those_of_one_pool(fmt: str) -> None:
    record = FORMATS[fmt]
    a, b = (
        byte_cache.fields_of(record, torch.zeros(2, 64, 1, record.token_bytes).byte())
        for _ in range(2)
    )
    assert PagedKVCache(*a, format=fmt).kv is not None
    with pytest.raises(ValueError, match="^scale: expected the bytes from .* of content's"):
        PagedKVCache(a[0], a[1], b[2], format=fmt)
    if record.rope is not None:
        with pytest.raises(ValueError, match="^rope: expected the bytes from .* of content's"):
            PagedKVCache(a[0], b[1], a[2], format=fmt)


@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("fmt", PLACES)
def test_copies(again: Callable[[Any], Any], fmt: str) -> None:
    """Two layers in one pool: the copy has the memory of both, and knows its format."""
    token = PLACES[fmt][-1]
    block = torch.randint(0, 255, (4, 2, 6 * token)).byte()
    cache = PagedKVCache.from_tensors(block[:, 1].unflatten(1, (6, token)), format=fmt)
    twin = again(cache)
    assert (twin.format, twin.scale_fmt) == (fmt, cache.scale_fmt)
    for name in ("kv", "content", "rope", "scale"):
        x, y = (getattr(held, name) for held in (cache, twin))
        assert x.stride() == y.stride()
        if x.numel():
            assert same_bits(x.view(torch.uint8), y.view(torch.uint8))
    assert twin.place != cache.place


@pytest.mark.parametrize("fmt", PLACES)
def test_saved_once(fmt: str) -> None:
    cache, file = PagedKVCache.allocate(8, 64, device="cpu", dtype=fmt), io.BytesIO()
    torch.save(cache, file)
    size = cache.num_slots * FORMATS[fmt].token_bytes
    assert size <= file.tell() < size * 1.1


# ---------------------------------------------------------------------------- calls


@needs_compiler
@pytest.mark.parametrize("fmt", [f for f in IN_MATRIX if f != "fp8_ds_mla"])
def test_append_and_fetch(fmt: str) -> None:
    """What the library's calls write and read; as in pages that the reference made."""
    record = FORMATS[fmt]
    cache = PagedKVCache.allocate(4, 5, device="cpu", dtype=fmt)
    kv = cache.named_tensors["kv"].zero_()
    c, r = tokens(record, 20)
    c[3, 7] = float("nan")
    snapmla.append_kv(cache, c, r if record.rope else None, torch.arange(20).int())
    want = quantize_pages(fmt, c, r, 5)
    assert_same(kv, want)
    table, lengths = torch.tensor([[2, 0]]).int(), torch.tensor([8]).int()
    got = snapmla.fetch_dequant(cache, table, lengths)
    rows = dequantize_pages(fmt, want)
    for a, b in zip(got, rows, strict=True):
        assert a.shape == (1, 10, b.shape[1]) and not a[0, 8:].any()
        assert_same(a[0, :8], torch.cat([b[10:15], b[0:3]]))


@pytest.mark.parametrize("fmt", PLACES)
def test_wrong_tokens(fmt: str) -> None:
    """Widths are the format's; attention says what to do instead."""
    record = FORMATS[fmt]
    cache = PagedKVCache.allocate(2, 4, device="cpu", dtype=fmt)
    c, r = tokens(record, 2)
    slots = torch.arange(2).int()
    with pytest.raises(ValueError, match=f"^c_kv: expected shape .*{record.content.count}"):
        snapmla.append_kv(cache, torch.zeros(2, 520).bfloat16(), r, slots)
    with pytest.raises(ValueError, match=f"^k_rope: expected shape .*{record.rope_channels}"):
        snapmla.append_kv(cache, c, torch.zeros(2, 32).bfloat16(), slots)
    q = torch.zeros(1, 1, 16, 576).bfloat16()
    table, lengths = torch.zeros(1, 1).int(), torch.ones(1).int()
    with pytest.raises(ValueError, match=r"^q: expected shape \(b, s_q, num_heads, 5"):
        snapmla.decode(q[..., :64], cache, table, lengths, softmax_scale=1.0)
    if not record.sparse:
        with pytest.raises(ValueError, match="^cache: expected an FP8 cache, .*'fp8_v4' or bfloat"):
            snapmla.decode(q, cache, indices=torch.zeros(1, 1, 64).int(), softmax_scale=1.0)


def test_a_format_that_dense_decode_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one may be that comes before its kernels."""
    early = dataclasses.replace(FORMATS["fp8_nope"], sparse="")
    monkeypatch.setitem(FORMATS, "fp8_nope", early)
    cache = PagedKVCache.allocate(2, 4, device="cpu", dtype="fp8_nope")
    q, table, lengths = torch.zeros(1, 1, 16, 512), torch.zeros(1, 1).int(), torch.ones(1).int()
    read = "'fp8_ds_mla' or 'fp8_v4' or 'fp8_v41_planar' or 'fp8_v41_rows'"
    said = f"^cache: expected an FP8 or a 16-bit cache, or one of {read}, got .*convert_cache"
    with pytest.raises(ValueError, match=said):
        snapmla.decode(q.bfloat16(), cache, table, lengths, softmax_scale=1.0)


# ---------------------------------------------------------------------------- convert_cache


def whole(cache: PagedKVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """(the channels of V, what else K has) of all slots, in fp32."""
    record = FORMATS[cache.format]
    if not record.named:
        factor = cache.named_tensors["scale"][..., None]
        c, r = cache.content.float() * factor, cache.rope.float() * factor
        return c.flatten(0, 1), r.flatten(0, 1)
    c, r = dequantize_pages(cache.format, cache.named_tensors["kv"], torch.float32)
    return (torch.cat([c, r], -1), r[:, :0]) if record.rope_in_v else (c, r)


@pytest.mark.parametrize("fmt", PLACES)
def test_to_one_scale(fmt: str) -> None:
    """As ``append_kv`` of V's channels in fp32, k_rope zeros where K has none beside."""
    record = FORMATS[fmt]
    source = PagedKVCache.from_tensors(quantize_pages(fmt, *tokens(record, 48), 16), format=fmt)
    out = samples.poisoned_cache(3, 16)
    snapmla.convert_cache(source, out)
    values, beside = whole(source)
    k_rope = beside if beside.shape[1] else torch.zeros(48, 64)
    content, rope, scale = quantize_rows(values, k_rope, slots=torch.arange(48))
    assert_same(out.content_u8.flatten(0, 1), content.view(torch.uint8))
    assert_same(out.rope.flatten(0, 1), rope)
    assert_same(out.named_tensors["scale"].flatten(), scale)


@pytest.mark.parametrize("back", PLACES)
@pytest.mark.parametrize("fmt", PLACES)
def test_between(fmt: str, back: str) -> None:
    """By the rule of ``append_kv`` of the numbers that were there; from one page to another."""
    if fmt == back:
        return
    record, target = FORMATS[fmt], FORMATS[back]
    c, r = tokens(record, 12)
    if record.rope is not None and not record.rope_in_v:
        r = torch.zeros_like(r)  # else most have no place for it
    source = PagedKVCache.from_tensors(quantize_pages(fmt, c, r, 4), format=fmt)
    out = PagedKVCache.allocate(5, 4, device="cpu", dtype=back)
    out.named_tensors["kv"].zero_()
    snapmla.convert_cache(source, out, torch.tensor([2, 0]), torch.tensor([4, 1]))
    values, _ = whole(source)
    split = target.content.count
    k_rope = values[:, split:] if target.rope_in_v else torch.zeros(12, target.rope_channels)
    want = quantize_pages(back, values[:, :split], k_rope, 4)
    got = out.named_tensors["kv"]
    assert not got[[0, 2, 3]].any()
    for page, at in ((4, 2), (1, 0)):
        numbers = [dequantize_pages(back, kv[None], torch.float32) for kv in (got[page], want[at])]
        for a, b in zip(*numbers, strict=True):
            assert_same(a, b)


def test_what_has_no_place_is_not_lost() -> None:
    """k_rope beside V: refused unless it is zeros, and nothing is written."""
    source = PagedKVCache.from_tensors(
        quantize_pages("fp8_ds_mla", *tokens(FORMATS["fp8_ds_mla"], 8), 4), format="fp8_ds_mla"
    )
    for fmt in KNOWN:
        if FORMATS[fmt].rope is not None and not FORMATS[fmt].rope_in_v:
            continue
        out = PagedKVCache.allocate(2, 4, device="cpu", dtype=fmt)
        kv = out.named_tensors["kv"].fill_(3)
        with pytest.raises(ValueError, match="^source: expected tokens whose k_rope is 0"):
            snapmla.convert_cache(source, out)
        assert (kv == 3).all()
