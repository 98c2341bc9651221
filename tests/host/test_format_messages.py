"""Tensors of another format than the call's: each sentence names what really fits."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import pytest
import torch

import snapmla
from dsl_kernels.formats.registered import FORMATS
from snapmla import PagedKVCache, dsa
from snapmla.compat import flash_mla, flash_mla_fp8, vllm

PAGES, PAGE, HEADS = 2, 64, 8
BYTES = {name: each for name, each in FORMATS.items() if each.named}
I32, BF16 = torch.int32, torch.bfloat16


def cache_of(name: str) -> PagedKVCache:
    dtype: Any = {"bf16": BF16, "f16": torch.float16}.get(name, name)
    return PagedKVCache.allocate(PAGES, PAGE, device="cpu", dtype=dtype)


def pool_of(name: str) -> torch.Tensor:
    return torch.zeros(PAGES, PAGE, 1, FORMATS[name].token_bytes, dtype=torch.uint8)


def said(call: Any, error: type[Exception] = ValueError) -> str:
    """What a refused call says; all numbers and format names in it."""
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def names_in(text: str) -> set[str]:
    """Formats that a sentence names in quotes."""
    return set(re.findall(r"'(\w+)'", text)) & set(FORMATS)


def joint(channels: int) -> torch.Tensor:
    return torch.zeros(3, channels, dtype=BF16)


# ---------------------------------------------------------------- caches


@pytest.mark.parametrize("name", BYTES)
def test_a_pool_without_its_name_is_told_who_has_its_width(name: str) -> None:
    for pool in (pool_of(name), pool_of(name).squeeze(2), pool_of(name).view(torch.int8)):
        text = said(lambda pool=pool: PagedKVCache.from_tensors(pool))
        alike = {n for n, each in BYTES.items() if each.token_bytes == FORMATS[name].token_bytes}
        assert text.startswith("format: expected the name of what has ")
        assert names_in(text) == alike and f"{FORMATS[name].token_bytes} bytes" in text


def test_a_word_that_formats_begin_with_is_told_all_of_them() -> None:
    text = said(lambda: PagedKVCache.allocate(2, 64, device="cpu", dtype="fp8_v41"))
    assert text.endswith("(did you mean 'fp8_v41_planar' or 'fp8_v41_rows'?)")
    pool = pool_of("fp8_v41_rows")
    text = said(lambda: PagedKVCache.from_tensors(pool, format="fp8_v41"))
    assert text.endswith("(did you mean 'fp8_v41_planar' or 'fp8_v41_rows'?)")


@pytest.mark.parametrize(("name", "given"), list(itertools.permutations(BYTES, 2)))
def test_a_pool_of_another_width_under_a_name(name: str, given: str) -> None:
    if FORMATS[name].token_bytes == FORMATS[given].token_bytes:
        return  # which no width tells apart
    text = said(lambda: PagedKVCache.from_tensors(pool_of(given), format=name))
    assert f"{FORMATS[name].token_bytes})" in text.partition(", got")[0]


# ---------------------------------------------------------------- tokens and queries


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("other", ["fp8", "fp8_v4", "fp8_nope"])
def test_tokens_of_another_format(name: str, other: str) -> None:
    """c_kv and k_rope as ``other`` splits a joint row."""
    fmt, cut = FORMATS[name], FORMATS[other].content.count
    rope = FORMATS[other].rope_channels
    if (cut, rope) == (fmt.content.count, fmt.rope_channels):
        return
    row = joint(cut + rope)
    slots = torch.arange(3, dtype=I32)
    cache = cache_of(name)
    dtype = cache.dtype if fmt.rows else BF16
    row = row.to(dtype)
    text = said(
        lambda: snapmla.append_kv(cache, row[:, :cut], row[:, cut:] if rope else None, slots)
    )
    assert text.startswith(("c_kv: expected shape (n, ", "k_rope: expected shape (3, "))
    _, _, hint = text.partition(", got ")
    assert f"joint[:, :{fmt.content.count}]" in hint or (text[0] == "k" and not fmt.named)
    if fmt.named:
        assert names_in(hint) == {name}
        assert ("k_rope=None" in hint) == (not fmt.rope_channels)
        assert f"joint[:, {fmt.content.count}:]" in hint or not fmt.rope_channels


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("other", ["fp8", "fp8_v4", "fp8_nope"])
def test_tokens_to_rotate_of_another_format(name: str, other: str) -> None:
    """Caches that take no rotated tokens are named; others say how a joint row is cut."""
    fmt, cut = FORMATS[name], FORMATS[other].content.count
    rope = FORMATS[other].rope_channels
    takes = not fmt.rows and bool(fmt.rope_channels)
    if takes and (cut, rope) == (fmt.content.count, fmt.rope_channels):
        return
    row, numbers = joint(cut + rope), torch.arange(3)
    angles = torch.zeros(8, 64, dtype=BF16)
    k_rope: Any = row[:, cut:] if rope else None
    text = said(
        lambda: snapmla.rope_append_kv(
            cache_of(name), row[:, :cut], k_rope, numbers, numbers, angles
        )
    )
    if not takes:
        assert text.startswith("cache: expected ") and "snapmla.append_kv" in text
        assert names_in(text) == ({name} if fmt.named else set())
        return
    assert text.startswith(("c_kv: expected shape (n, ", "k_rope: expected shape (3, "))
    _, _, hint = text.partition(", got ")
    assert f"joint[:, :{fmt.content.count}]" in hint or (text[0] == "k" and not fmt.named)
    assert names_in(hint) == ({name} if fmt.named else set())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("other", FORMATS)
@pytest.mark.parametrize("joint_out", [False, True])
def test_results_of_another_format(name: str, other: str, joint_out: bool) -> None:
    """``out`` of a fetch, as another format's tokens would fill it."""
    fmt, given = FORMATS[name], FORMATS[other]
    widths, own = ((f.content.count, f.rope_channels) for f in (given, fmt))
    if widths == own or (joint_out and sum(widths) == sum(own)):
        return
    parts = tuple(torch.zeros(3, width, dtype=BF16) for width in widths)
    out = torch.cat(parts, -1) if joint_out else parts
    numbers = torch.arange(3, dtype=I32)
    text = said(lambda: snapmla.fetch_dequant(cache_of(name), numbers, out=out))
    assert re.match(r"out(\[[01]\])?: expected shape \(3, ", text)
    _, _, hint = text.partition(", got ")
    assert f"c_kv of {own[0]} channels and k_rope of {own[1]}" in hint
    assert names_in(hint) == ({name} if fmt.named else set())
    if not (joint_out or widths[1]):
        text = said(lambda: snapmla.fetch_dequant(cache_of(name), numbers, out=(parts[0], None)),
                    TypeError)  # fmt: skip
        assert text.startswith("out[1]: expected a torch.Tensor") and f"of {own[1]};" in text


@pytest.mark.parametrize("name", FORMATS)
def test_caches_that_are_not_converted(name: str) -> None:
    """Rows of 16 bits on either side, a cache into its own format, memory without a name."""
    fp8 = "fp8_v4" if name == "fp8" else "fp8"
    text = said(lambda: snapmla.convert_cache(cache_of(name), cache_of(name)))
    if FORMATS[name].rows:
        assert text.startswith("source: expected an FP8 cache") and "snapmla.append_kv" in text
        text = said(lambda: snapmla.convert_cache(cache_of(fp8), cache_of(name)))
        assert names_in(text.partition("(")[2]) == {n for n in FORMATS if not FORMATS[n].rows} - {
            fp8
        }
    else:
        assert names_in(text.partition("(")[2]) == {n for n in FORMATS if not FORMATS[n].rows} - {
            name
        }
    text = said(lambda: snapmla.convert_cache(cache_of(fp8), pool_of("fp8_v4")), TypeError)
    assert text.startswith("out: expected a snapmla.PagedKVCache") and "from_tensors" in text


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("sparse", [False, True])
def test_queries_of_another_format(name: str, sparse: bool) -> None:
    channels = {512: 576, 576: 512}[FORMATS[name].channels]
    cache, q = cache_of(name), torch.zeros(1, 1, HEADS, channels, dtype=BF16)
    table, lengths = torch.zeros(1, 2, dtype=I32), torch.ones(1, dtype=I32)

    def call() -> None:
        if sparse:
            indices = torch.zeros(1, 1, 64, dtype=I32)
            snapmla.decode(q, cache, indices=indices, softmax_scale=1.0)
        else:
            snapmla.decode(q, cache, table, lengths, softmax_scale=1.0)

    text = said(call)
    assert text.startswith("q: expected shape (b, s_q, num_heads, ")
    hint = text.partition(f"{channels}) (")[2]
    assert names_in(hint) == {name} and f"{FORMATS[name].channels} channels" in hint
    assert "then 64 of RoPE" in hint or not FORMATS[name].rope_channels


@pytest.mark.parametrize("name", BYTES)
def test_query_kinds_that_do_not_go_with_bytes(name: str) -> None:
    """A quantised query; the sentence says that of this format."""
    q = torch.zeros(1, 1, HEADS, 576, dtype=BF16)
    query, cache = (
        snapmla.QuantizedQuery(
            q[..., :512].to(torch.float8_e4m3fn), q[..., 512:].contiguous(), torch.ones(1, 1, HEADS)
        ),
        cache_of(name),
    )
    indices = torch.zeros(1, 1, 64, dtype=I32)
    text = said(lambda: snapmla.decode(query, cache, indices=indices, softmax_scale=1.0), TypeError)
    assert names_in(text) == {name}


# ---------------------------------------------------------------- FlashMLA's names


def flash(k_cache: torch.Tensor, channels: int, **options: Any) -> Any:
    q = torch.zeros(1, 1, HEADS, channels, dtype=BF16)
    indices = torch.zeros(1, 1, 64, dtype=I32)
    return flash_mla.flash_mla_with_kvcache(
        q, k_cache, None, None, 512, flash_mla.get_mla_metadata()[0],
        **{"is_fp8_kvcache": True, "indices": indices, **options},
    )  # fmt: skip


@pytest.mark.parametrize(("name", "given"), list(itertools.permutations(BYTES, 2)))
def test_a_k_cache_of_another_format_than_kv_format(name: str, given: str) -> None:
    """The cache is blamed, and who has its width is named, whatever channels the query has."""
    width = FORMATS[given].token_bytes
    if FORMATS[name].token_bytes == width:
        return
    for channels in (512, 576):
        text = said(lambda c=channels: flash(pool_of(given), c, kv_format=name))
        assert text.startswith("k_cache: expected shape (num_pages, page_size, 1, "), text
        wanted, _, hint = text.partition(", got ")
        assert f"{FORMATS[name].token_bytes})" in wanted
        alike = {n for n, each in BYTES.items() if each.token_bytes == width}
        assert names_in(hint) == alike or "three formats have 528" in hint, text


def test_other_sentences_of_flash_mla() -> None:
    pool = pool_of("fp8_ds_mla")
    text = said(lambda: flash(pool[..., :600], 576))
    assert "shape (num_pages, page_size, 1, 656), got" in text
    text = said(lambda: flash(pool_of("fp8_v4"), 576))
    assert text.startswith("q: expected shape") and names_in(text) == {"fp8_v4"}
    extra = torch.zeros(1, 1, 64, dtype=I32)
    text = said(lambda: flash(pool_of("fp8_ds_mla"), 576, extra_indices_in_kvcache=extra))
    assert text.startswith("extra_indices_in_kvcache: expected None beside rows of 656 bytes")
    text = said(lambda: flash(pool_of("fp8_v4"), 512, extra_indices_in_kvcache=extra))
    assert text == "extra_k_cache: expected a tensor, as its fellow is given, got None"
    text = said(lambda: flash(pool_of("fp8_v4"), 512, extra_k_cache=pool_of("fp8_v4")))
    assert text.startswith("extra_indices_in_kvcache: expected a tensor")


# ---------------------------------------------------------------- the indexer's cache, plans


def test_an_index_cache_is_not_made_by_the_cache_of_latents() -> None:
    k, slots = torch.zeros(3, 128, dtype=BF16), torch.arange(3)
    for cache in (torch.zeros(4, 32, 132, dtype=torch.uint8), torch.zeros(0, 64, 132).byte()):
        text = said(lambda c=cache: dsa.append_index_k(c, k, slots))
        assert "torch.zeros(pages, 64, 132, dtype=torch.uint8)" in text
    for cache in (cache_of("fp8"), torch.zeros(4, 64, 132)):
        text = said(lambda c=cache: dsa.append_index_k(c, k, slots), TypeError)
        assert "torch.zeros(pages, 64, 132, dtype=torch.uint8)" in text or "uint8" in text
        assert "PagedKVCache.allocate" not in text


@pytest.mark.parametrize("name", [n for n, each in FORMATS.items() if each.sparse or n == "bf16"])
def test_a_sparse_plan_of_another_format_or_shape(name: str) -> None:
    """What to make is sparse decode's plan, or prefill's."""
    indices = torch.zeros(1, 1, 64, dtype=I32)

    def plan(of: str, heads: int = HEADS, topk: int = 64) -> Any:
        return snapmla.plan_sparse_decode(
            heads, 1, topk=topk, batch=1, device="cpu", cache_dtype=of
        )

    cache, q = cache_of(name), torch.zeros(1, 1, HEADS, FORMATS[name].channels, dtype=BF16)
    query: Any = q
    if FORMATS[name].quantized_query:
        query = snapmla.quantize_q(q[..., :512], q[..., 512:])
    other = "fp8_ds_mla" if name == "fp8" else "fp8"
    for given in (plan(other), plan(name, 16)):
        with pytest.raises((TypeError, ValueError), match="^plan: ") as caught:
            snapmla.decode(query, cache, indices=indices, softmax_scale=1.0, plan=given)
        assert "plan_sparse_decode" in str(caught.value)


def test_a_prefill_plan_of_another_topk() -> None:
    q = torch.zeros(3, HEADS, 576, dtype=BF16)
    query = snapmla.quantize_q(q[..., :512], q[..., 512:])
    plan = snapmla.plan_sparse_prefill(HEADS, 3, topk=64, device="cpu")
    indices = torch.zeros(3, 1, 128, dtype=I32)
    text = said(lambda: snapmla.sparse_prefill(query, cache_of("fp8"), indices, 1.0, plan=plan))
    assert text.startswith("plan: expected one made for topk 128, the width of indices, got 64 (")
    assert "plan_sparse_prefill" in text


def test_a_sparse_plan_calls_its_lengths_topk_length() -> None:
    ones = torch.ones(2, dtype=I32)
    plan = snapmla.plan_sparse_decode(HEADS, 1, topk=64, topk_length=ones)
    assert plan.update_(ones) is plan
    for given, error in (
        ((), TypeError), ((ones.long(),), TypeError), ((ones[:1],), ValueError),
        ((ones[None],), ValueError), ((ones.repeat(2)[::2],), ValueError), (([1, 2],), TypeError),
    ):  # fmt: skip
        assert said(lambda g=given: plan.update_(*g), error).startswith("topk_length: expected ")
    cached = snapmla.SparsePlanCache(HEADS, device="cpu")
    rows = torch.ones(2, 3, dtype=I32)
    for _ in range(2):  # a new shape, and a known one
        text = said(lambda: cached.get(ones, 1, topk=64, row_lengths=rows))
        assert text.startswith("row_lengths: expected shape")
        cached.get(ones, 1, topk=64, row_lengths=rows[:, :1].contiguous())


# ---------------------------------------------------------------- what takes no cache


SHARED = torch.tensor([0, 3], dtype=I32)  # one sequence of three tokens


@pytest.mark.parametrize("name", FORMATS)
def test_a_cache_in_the_place_of_a_tensor(name: str) -> None:
    """Its tokens have to be read out of it."""
    cache: Any = cache_of(name)
    q, lse = torch.zeros(3, 4, 192, dtype=BF16), torch.zeros(4, 3)
    for call in (
        lambda: snapmla.mha_prefill(q, cache, cache, SHARED, SHARED, 3, 3),
        lambda: snapmla.merge_state(cache, lse, cache, lse),
        lambda: snapmla.merge_states([cache, cache], [lse, lse]),
        lambda: snapmla.quantize_q(cache, cache),
    ):
        text = said(call, TypeError)
        assert text.endswith("(snapmla.fetch_dequant reads a cache's tokens into tensors)"), text


@pytest.mark.parametrize("name", FORMATS)
def test_latents_are_no_heads_and_no_results(name: str) -> None:
    """Latents in ``mha_prefill``, a format's content and bytes in a merge."""
    fmt = FORMATS[name]
    latent, lse = torch.zeros(3, 4, fmt.channels, dtype=BF16), torch.zeros(4, 3)
    content = latent[..., : fmt.content.count]
    text = said(lambda: snapmla.mha_prefill(latent, latent, content, SHARED, SHARED, 3, 3))
    assert text.startswith("q: expected shape (tokens, heads, 192 or 128 or 256), got ")
    assert "latents are decode's" in text
    q = torch.zeros(3, 4, 192, dtype=BF16)
    text = said(lambda: snapmla.mha_prefill(q, latent, content, SHARED, SHARED, 3, 3))
    assert text.startswith("k_nope: expected shape (tokens, heads, 192), got ")
    if fmt.named:
        pool: Any = pool_of(name).view(PAGES, PAGE, -1)
        text = said(lambda: snapmla.merge_state(pool, lse, pool, lse), TypeError)
        assert text.startswith("out_a: expected dtype bfloat16 or float32, got uint8")
    if content.shape[-1] != 512:
        text = said(lambda: snapmla.merge_states([content, content], [lse, lse]))
        assert text.startswith("outs[0]: expected shape (total, h, 512), got (3, 4, ")
        whole = latent.new_zeros(3, 4, 512)
        text = said(lambda: snapmla.merge_state(whole, lse, whole, lse, out=content))
        assert text.startswith("out: expected shape (3, 4, 512), got (3, 4, ")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rotate", [False, True])
def test_queries_that_are_not_quantised(name: str, rotate: bool) -> None:
    """Parts of another format's queries: who wants queries quantised is named."""
    fmt = FORMATS[name]
    cut, q = fmt.content.count, torch.zeros(3, 4, fmt.channels, dtype=BF16)
    if (cut, fmt.rope_channels) == (512, 64):
        return

    def quantised(*parts: Any) -> str:
        error = TypeError if parts[1] is None else ValueError
        if not rotate:
            return said(lambda: snapmla.quantize_q(*parts), error)
        at, angles = torch.zeros(3, dtype=torch.long), torch.zeros(8, 64, dtype=BF16)
        return said(lambda: snapmla.rope_quantize_q(*parts, at, angles), error)

    texts = [quantised(q[..., :cut], q[..., cut:])]
    if not fmt.rope_channels:
        texts.append(quantised(q[..., :cut], None))
    for text in texts:
        assert text.startswith(("q_nope: expected shape (", "q_rope: expected "))
        assert names_in(text) == {"fp8"} and "want queries quantised" in text


# ---------------------------------------------------------------- prefill, plans, SnapMLA's names


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "fp8"])
def test_a_prefill_over_a_cache_of_another_format(name: str) -> None:
    q = torch.zeros(3, HEADS, 576, dtype=BF16)
    indices, cache = torch.zeros(3, 1, 64, dtype=I32), cache_of(name)
    for query in (q, snapmla.quantize_q(q[..., :512], q[..., 512:])):
        text = said(lambda query=query: snapmla.sparse_prefill(query, cache, indices, 1.0))
        assert text.startswith(f"kv: expected a cache of format 'fp8', got one of '{name}' (")
        wanted = {"fp8_ds_mla": "fetch_dequant", "bf16": "its rows as kv", "f16": "BF16 rows"}
        assert wanted.get(name, "snapmla.decode(indices=) reads its tokens") in text
    if FORMATS[name].named:
        pool: Any = pool_of(name).view(-1, 1, FORMATS[name].token_bytes)
        for rows in (pool, pool.view(torch.int8), pool.view(torch.float8_e4m3fn)):
            text = said(lambda r=rows: snapmla.sparse_prefill(q, r, indices, 1.0), TypeError)
            assert text.startswith("kv: expected dtype bfloat16, got ") and "fetch_dequant" in text


def dtype_of(name: str) -> Any:
    return {"bf16": BF16, "f16": torch.float16}.get(name, name)


def test_a_plan_of_another_caches_format() -> None:
    lengths, table = torch.ones(1, dtype=I32), torch.zeros(1, 2, dtype=I32)
    shape: dict[str, Any] = {"page_size": PAGE, "max_pages": 2}
    plans = {
        name: snapmla.plan_decode(lengths, HEADS, 1, cache_dtype=dtype_of(name), **shape)
        for name in FORMATS
    }
    told = lambda name: repr(dtype_of(name)) if isinstance(dtype_of(name), str) else dtype_of(name)
    for name, given in itertools.permutations(FORMATS, 2):
        cache, fmt = cache_of(name), FORMATS[name]
        q: Any = torch.zeros(1, 1, HEADS, fmt.channels, dtype=cache.dtype if fmt.rows else BF16)
        if fmt.quantized_query:
            q = snapmla.quantize_q(q[..., :512], q[..., 512:])
        options = {"softmax_scale": 1.0, "plan": plans[given]}
        decode = functools.partial(snapmla.decode, q, cache, table, lengths, **options)
        text = said(decode)
        assert text.startswith(
            f"plan: expected one made with cache_dtype={told(name)}, got {told(given)} ("
        )


@pytest.mark.parametrize("name", BYTES)
def test_a_pool_of_another_format_under_snapmlas_names(name: str) -> None:
    pool, lengths = pool_of(name), torch.ones(1, dtype=I32)
    q = torch.zeros(1, 1, HEADS, 576, dtype=BF16)
    nope, rope, scale = flash_mla_fp8.quantize_ckv_per_token_head(q, 512)
    metadata = flash_mla_fp8.get_mla_metadata(lengths, HEADS, 1)
    factors, slots = torch.ones(PAGES, PAGE, 1, 1), torch.arange(3)
    for call in (
        lambda: flash_mla_fp8.flash_mla_ckv_fp8_per_token(
            nope, rope, pool, pool, scale, factors, torch.zeros(1, 2, dtype=I32), lengths, 512,
            *metadata,
        ),
        lambda: flash_mla_fp8.quantize_and_cache_k(
            torch.zeros(3, 1, 576, dtype=BF16), pool, factors, pool, slots, 512
        ),
        lambda: flash_mla_fp8.dequantize_ckv_fused_indexed(pool, pool, factors, slots),
    ):  # fmt: skip
        text = said(call)
        assert re.match(r"k_(cache_lora|lora_cache|lora): expected shape \(", text)
        width = FORMATS[name].token_bytes
        alike = {n for n, each in BYTES.items() if each.token_bytes == width}
        assert names_in(text) == alike and f"has {width} bytes a token" in text


@pytest.mark.parametrize("name", FORMATS)
def test_latents_under_vllms_names_of_the_indexers_cache(name: str) -> None:
    """Arguments are called as vLLM calls them."""
    pool: Any = pool_of(name).squeeze(2) if FORMATS[name].named else cache_of(name).content
    table, slots = torch.zeros(1, 2, dtype=I32), torch.arange(3)
    keys, latents = (torch.zeros(3, n, dtype=BF16) for n in (128, FORMATS[name].channels))
    into = torch.zeros(3, 128).to(torch.float8_e4m3fn), torch.zeros(3, 1)
    index = torch.zeros(4, 64, 132, dtype=torch.uint8)
    for error, call in (
        ((TypeError, ValueError), lambda: vllm.indexer_k_quant_and_cache(
            keys, pool, slots, 128, "ue8m0")),
        ((TypeError, ValueError), lambda: vllm.cp_gather_indexer_k_quant_cache(
            pool, *into, table, SHARED)),
        (TypeError, lambda: vllm.indexer_k_quant_and_cache(
            keys, cache_of(name), slots, 128, "ue8m0")),
    ):  # fmt: skip
        text = said(call, error)  # type: ignore[arg-type]
        assert text.startswith("kv_cache: expected ")
        assert "pages, 64, 132" in text or "dtype uint8" in text
    text = said(lambda: vllm.indexer_k_quant_and_cache(latents, index, slots, 128, "ue8m0"))
    assert text.startswith("k: expected shape (n, 128), got (3, ") and "snapmla.append_kv" in text
