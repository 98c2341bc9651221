"""Caches of rows of 656 bytes: told by their format's name, views of fields, calls that refuse."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import snapmla
from dsl_kernels.formats import ds_mla
from snapmla import PagedKVCache
from snapmla.cache import byte_cache, quant
from snapmla.testing.ds_mla import dequantize_ds_mla_rows, quantize_ds_mla_rows
from tests.support.bits import same_bits
from tests.support.copies import COPIES
from tests.support.needs import needs_compiler
from tests.support.rows import latents

FORMAT, ROW = ds_mla.NAME, ds_mla.ROW_BYTES


def fields_of(kv: torch.Tensor) -> byte_cache.Fields:
    return byte_cache.fields_of(ds_mla.FORMAT, kv)


def made(kv: Any, scale_fmt: str | None = None) -> PagedKVCache:
    return PagedKVCache.from_tensors(kv, format=FORMAT, scale_fmt=scale_fmt)


def allocated(pages: int = 3, page_size: int = 64, scale_fmt: str | None = None) -> PagedKVCache:
    return PagedKVCache.allocate(pages, page_size, device="cpu", dtype=FORMAT, scale_fmt=scale_fmt)


@pytest.mark.parametrize("page_size", [1, 2, 53, 64, 69, 576])
def test_fields_are_bytes_of_rows(page_size: int) -> None:
    cache = allocated(3, page_size)
    kv = cache.named_tensors["kv"].zero_()
    assert cache.format == FORMAT and cache.layout == "rows" and cache.scale_fmt is None
    assert cache.dtype is torch.uint8 and cache.num_kv_heads == 1 and cache.traceable
    assert (cache.num_pages, cache.page_size, cache.num_slots) == (3, page_size, 3 * page_size)
    assert kv.shape == (3, page_size, 1, 656) and kv.is_contiguous()
    at, row = (2, page_size - 1), kv[2, page_size - 1, 0]
    assert cache.scale is not None
    assert cache.content.dtype is torch.float8_e4m3fn
    assert cache.content.shape == (3, page_size, 512)
    cache.content_u8[*at, 511], cache.scale[*at, 3], cache.rope[*at, 0] = 9, 1.0, 1.0
    assert row[511] == 9 and row[527] == 0x3F and row[529] == 0x3F
    assert int((kv != 0).sum()) == 1 + 2 + 2
    cache.content_u8[:], cache.scale[:], cache.rope[:] = 7, 0.5, 3.0
    assert (kv != 0).any(0).sum() < kv[0].numel() and (row[:512] == 7).all()
    assert (cache.scale == 0.5).all() and (cache.rope == 3).all()


@pytest.mark.parametrize("dtype", byte_cache.BYTES)
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize(("page_size", "gap"), [(64, 0), (64, 1), (1, 3), (69, 1)])
def test_memory_of_an_engine(dtype: torch.dtype, head: bool, page_size: int, gap: int) -> None:
    """FlashMLA's and vLLM's shapes, any dtype of bytes, other layers' pages between."""
    memory = torch.zeros((4, page_size + gap, 1, ROW), dtype=torch.uint8)
    given = memory[:, gap:].view(dtype)
    cache = made(given if head else given.squeeze(2))
    assert cache.layout == ("strided" if gap else "rows") and cache.kv is not None
    assert cache.kv.stride() == ((page_size + gap) * ROW, ROW, ROW, 1)
    assert cache.kv.data_ptr() == given.data_ptr() and cache.kv.dtype is torch.uint8
    cache.kv[:] = 1
    assert (memory[:, gap:] == 1).all() and not memory[:, :gap].any()


def test_strides_over_one_are_anything() -> None:
    """One page, one token, one head: kernels see those of rows side by side."""
    memory = torch.zeros(5000, dtype=torch.uint8)
    page = memory.as_strided((1, 3, 1, ROW), (7, ROW, 0, 1))
    assert made(page).named_tensors["kv"].stride() == (3 * ROW, ROW, ROW, 1)
    token = memory.as_strided((3, 1, ROW), (672, 5, 1))
    assert made(token).named_tensors["kv"].stride() == (672, ROW, ROW, 1)
    whole = torch.zeros((2, 64, 1, ROW), dtype=torch.uint8)
    assert made(whole).kv is whole


BYTES = torch.zeros(4, 64, 1, ROW, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kv", "error", "words"),
    [
        (BYTES.float(), TypeError, "content: expected dtype uint8 or int8 or float8_e4m3fn, got f"),
        (BYTES[..., :640], ValueError, r"content: .*\(num_pages, page_size, 1, 656\), got"),
        (BYTES.squeeze(2)[..., :584], ValueError, r"content: .*\(num_pages, page_size, 656\), got"),
        (BYTES.expand(4, 64, 2, ROW), ValueError, r"content: .*1, 656\), got \(4, 64, 2, 656\)"),
        (BYTES[0, 0], ValueError, "content: expected shape"),
        (BYTES[:0], ValueError, "content: expected 1 page or more, got 0"),
        (BYTES[:, :0], ValueError, "page_size: expected 1 or more, got 0"),
        (BYTES[:, ::2], ValueError, "content: expected rows 656 bytes apart, got strides"),
        (torch.zeros(4, 64, 1, 672).byte()[..., :656], ValueError, "content: .*656 bytes apart"),
        (BYTES[:1].expand(4, 64, 1, ROW), ValueError, "content: expected strides of distinct"),
        (torch.zeros(4, 64, 2 * ROW).byte()[..., ::2], ValueError, "content: .*innermost stride 1"),
        (torch.zeros(4, 64 * ROW + 8).byte()[:, :-8].unflatten(1, (64, ROW)),
         ValueError, "content: expected outer strides that are multiples of 16 bytes"),
        (torch.zeros(4 * 64 * ROW + 8).byte()[8:].view(4, 64, ROW), ValueError,
         "content: expected storage aligned to 16 bytes"),
        ([1], TypeError, "content: expected a torch.Tensor, got list"),
    ],
)  # fmt: skip
def test_wrong_memory(kv: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=f"^{words}"):
        made(kv)


@pytest.mark.parametrize("dtype", byte_cache.BYTES)
def test_a_width_tells_no_format(dtype: torch.dtype) -> None:
    """The same bytes without a name are refused, in each way to a cache."""
    kv = torch.zeros(4, 64, 1, ROW, dtype=torch.uint8).view(dtype)
    with pytest.raises((TypeError, ValueError), match="^format: expected .* 656 bytes a token"):
        PagedKVCache.from_tensors(kv)
    content, rope, scale = fields_of(byte_cache.rows_of(ds_mla.FORMAT, kv))
    with pytest.raises(ValueError, match=r"^scale: expected shape \(4, 64\), got \(4, 64, 4\)"):
        PagedKVCache.from_tensors(content, rope, scale)
    assert PagedKVCache(content, rope, scale, format=FORMAT).kv is not None


def test_fields_must_be_those_of_one_pool() -> None:
    a, b = (fields_of(torch.zeros(2, 64, 1, ROW, dtype=torch.uint8)) for _ in range(2))
    for fields, words in (
        ((a[0], b[1], a[2]), "^rope: expected the bytes from 528 on of content's rows, got others"),
        ((a[0], a[1], b[2]), "^scale: expected the bytes from 512 on of content's rows"),
        ((a[0], a[1].contiguous(), a[2]), "^rope: "),
        ((a[0].view(torch.uint8).clone().view(torch.float8_e4m3fn), *a[1:]), "^content: "),
        ((a[0][:1], *a[1:]), r"^rope: expected shape \(1, 64, 64\)"),
    ):
        with pytest.raises(ValueError, match=words):
            PagedKVCache(*fields, format=FORMAT)


@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
def test_copies(again: Callable[[Any], Any]) -> None:
    """Two layers in one pool: the copy has the memory of both, and knows its format."""
    pool = torch.randint(0, 255, (4, 2, 5, ROW)).byte()
    cache = made(pool[:, 1], "ue8m0")
    twin = again(cache)
    assert type(twin) is PagedKVCache and (twin.format, twin.scale_fmt) == (FORMAT, "ue8m0")
    for name in ("kv", "content", "rope", "scale"):
        a, b = getattr(cache, name), getattr(twin, name)
        assert a.stride() == b.stride() and same_bits(a, b)
    assert twin.place != cache.place and twin.memory[0] is twin.kv
    twin.content_u8.zero_()
    assert not twin.kv[..., :512].any() and cache.kv is not None and cache.kv[..., :512].any()


def test_saved_once() -> None:
    cache, file = allocated(8), io.BytesIO()
    torch.save(cache, file)
    assert cache.num_slots * ROW <= file.tell() < cache.num_slots * ROW * 1.1


def test_a_place_is_of_one_format() -> None:
    """The same bytes as rows of 656 and as another format's are not one memory to plans."""
    cache = allocated(2, 64)
    assert cache.place == made(cache.kv).place
    assert cache.place != made(cache.named_tensors["kv"].view(4, 32, 1, ROW)).place
    other = PagedKVCache.allocate(2, 64, device="cpu")
    assert cache.append_options == (0,) and other.append_options == ()
    assert allocated(scale_fmt="ue8m0").append_options == (1,)


@pytest.mark.parametrize("part", ["content", "rope", "kv"])
def test_where_a_cache_begins(part: str) -> None:
    cache = allocated()
    held = getattr(cache, part)
    there, moved = held.data, held.data.clone()
    assert cache.stays
    held.data = moved
    assert not cache.stays
    held.data = there
    assert cache.stays
    cache.named_tensors["kv"].untyped_storage().resize_(0)
    assert not cache.stays
    with pytest.raises(ValueError, match="cache: expected memory, got a storage that was freed"):
        snapmla.append_kv(cache, *latents((1,), torch.bfloat16), torch.zeros(1).int())


def test_attention_takes_what_goes_with_it() -> None:
    """Queries as they are, a plan of the format; in one sentence each what is wrong."""
    q = snapmla.QuantizedQuery(
        torch.zeros(1, 1, 16, 512, dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.zeros(1, 1, 16, 64).bfloat16(), torch.ones(1, 1, 16),
    )  # fmt: skip
    lengths, table = torch.ones(1).int(), torch.zeros(1, 1).int()
    plan = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=1)
    rows, cache = torch.zeros(1, 1, 16, 576).bfloat16(), allocated(2, 64)
    own = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=1, cache_dtype=FORMAT)
    assert (own.pipeline, own.row_tile, own.dtype) == ("mix16", 16, torch.uint8)
    assert own.q_shape == rows.shape and not own.regroups
    for query, given, error, said in (
        (q, own, TypeError, "^q: expected a bfloat16 tensor, got .*takes queries as they are"),
        (rows.half(), own, TypeError, "^q: expected dtype bfloat16"),
        (rows[..., :512], own, ValueError, r"^q: expected shape \(b, s_q, num_heads, 576\)"),
        (rows, plan, ValueError, "^plan: expected one made with cache_dtype='fp8_ds_mla'"),
    ):
        with pytest.raises(error, match=said):
            snapmla.decode(query, cache, table, lengths, softmax_scale=1.0, plan=given)
    with pytest.raises(ValueError, match="^plan: expected one made for .*page_size. = .*53"):
        snapmla.decode(rows, allocated(2, 53), table, lengths, softmax_scale=1.0, plan=own)
    with pytest.raises(ValueError, match="^accuracy: expected 'standard'"):
        snapmla.plan_decode(
            lengths, 16, 1, page_size=64, max_pages=1, cache_dtype=FORMAT, accuracy="high"
        )
    needed = snapmla.rank.needs(snapmla.rank.Model((16,), dtype=FORMAT))
    assert needed[-1].name == "record_decode_mix16_r16_obf16_sm90a"


def test_leaves_of_a_tree() -> None:
    """One leaf; format and scales are the structure's."""
    cache = allocated(2, 5, "ue8m0")
    leaves, spec = pytree.tree_flatten({"cache": cache})
    assert len(leaves) == 1 and leaves[0] is cache.kv
    again = pytree.tree_unflatten(leaves, spec)["cache"]
    assert (again.format, again.scale_fmt, again.place) == (FORMAT, "ue8m0", cache.place)
    stand_in = pytree.tree_map(lambda t: str(tuple(t.shape)), cache)
    assert stand_in.kv == "(2, 5, 1, 656)"
    assert pytree.tree_structure(stand_in) == pytree.tree_structure(cache)
    others = made(cache.kv), PagedKVCache.allocate(2, 16, device="cpu", dtype=torch.bfloat16)
    assert all(spec != pytree.tree_structure({"cache": other}) for other in others)
    loaded = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert loaded == spec


# ---------------------------------------------------------------------------- calls


@needs_compiler
@pytest.mark.parametrize("scale_fmt", byte_cache.SCALE_FORMATS)
def test_append_and_fetch(scale_fmt: str | None) -> None:
    """What the library's calls write and read, among pages of another layer."""
    memory = torch.full((9, 2, 5, ROW), 0x5B, dtype=torch.uint8)
    cache = made(memory[:, 1], scale_fmt)
    c, r = latents((20,), torch.bfloat16)
    slots = torch.randperm(45)[:20].int()
    slots[3], slots[7] = -1, 45
    want = memory.clone()
    snapmla.append_kv(cache, c, r, slots)
    kept = (slots >= 0) & (slots < 45)
    rows = quantize_ds_mla_rows(c, r, power_of_two=scale_fmt is not None)
    want[slots[kept] // 5, 1, slots[kept] % 5] = rows[kept]
    assert same_bits(memory, want)
    table = torch.tensor([[7, 1, 8], [3, 0, 2147480000]], dtype=torch.int32)
    lengths = torch.tensor([13, 10], dtype=torch.int32)
    got = snapmla.fetch_dequant(cache, table, lengths)
    for i, n in enumerate(lengths.tolist()):
        tokens = want[:, 1][table[i, : -(-n // 5)].long()].flatten(0, 1)[:n]
        for a, b in zip(got, dequantize_ds_mla_rows(tokens), strict=True):
            assert a.dtype is torch.bfloat16 and not a[i, n:].any()
            assert torch.equal(a[i, :n].nan_to_num(9), b.nan_to_num(9))


@needs_compiler
def test_a_call_that_is_known_is_of_one_format() -> None:
    """Tensors alike, beside a cache of another format in as many pages: each goes its own way."""
    others = [PagedKVCache.allocate(2, 64, device="cpu"), allocated(2), allocated(2, 64, "ue8m0")]
    c, r = torch.randn(4, 512).bfloat16(), torch.randn(4, 64).bfloat16()
    slots = torch.arange(4).int()
    for _ in range(3):
        for cache in others:
            cache.content_u8.zero_()
            snapmla.append_kv(cache, c, r, slots)
            assert cache.content_u8[0, 0].any()  # the format's own kernel wrote it
    scales = [cache.scale for cache in others[1:]]
    assert scales[0] is not None and scales[1] is not None
    assert not torch.equal(scales[0][0, :4], scales[1][0, :4])
    assert (torch.frexp(scales[1][0, :4])[0] == 0.5).all()
    assert len({kind.options for kind in quant._APPEND.memo.kinds}) >= 2
