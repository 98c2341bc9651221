"""Tensors of one call that share memory: results and what is read are kept apart, or refused.

Refused by the full checks and, before anything is launched, by the quick ways past them.  What only
lies side by side, or between another's pages, is served.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import snapmla
from snapmla import PagedKVCache, QuantizedQuery
from snapmla.cache import layouts
from snapmla.checks import overlap
from snapmla.compat import flash_mla_fp8 as names
from snapmla.dense import decode
from snapmla.testing import selfcheck
from tests.support.needs import needs_compiler

B, S_Q, HEADS, PAGE, SCALE = 2, 1, 4, 16, 192**-0.5
BF16 = torch.bfloat16


class Arena:
    """One allocation that tensors are cut from, one behind the other."""

    def __init__(self, size: int = 1 << 20) -> None:
        self.memory, self.used = torch.zeros(size, dtype=torch.uint8), 0

    def put(self, like: torch.Tensor) -> torch.Tensor:
        """A copy of ``like`` behind what is there."""
        made = view_at(self.memory, self.used, like.shape, like.dtype)
        self.used += made.nbytes
        made.view(torch.uint8).copy_(like.contiguous().view(torch.uint8))
        return made


def view_at(
    memory: torch.Tensor, at: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """A contiguous tensor over a tensor's bytes, from byte ``at`` on."""
    size = torch.Size(shape).numel() * dtype.itemsize
    flat = memory.view(torch.uint8).flatten()
    return flat[at : at + size].view(dtype).view(shape)


def complete_call() -> dict[str, Any]:
    """Arguments of a decode that takes the quick way; a pool that has room for an ``out``."""
    cache, table, lengths = selfcheck.filled_cache((20, 3), PAGE)
    return {
        "q": selfcheck.sample_query(B, S_Q, HEADS),
        "cache": cache,
        "block_table": table,
        "cache_seqlens": lengths,
        "softmax_scale": SCALE,
        "plan": snapmla.plan_decode(lengths, HEADS, S_Q, page_size=PAGE, max_pages=table.shape[1]),
        "out": torch.zeros(B, S_Q, HEADS, 512, dtype=BF16),
        "lse": torch.zeros(B, HEADS, S_Q),
    }


# argument, the tensor whose bytes it is given, as messages call that
ALIASED: list[tuple[str, Callable[[dict[str, Any]], torch.Tensor], str]] = [
    ("lse", lambda call: call["out"], "lse"),  # out is found first
    ("lse", lambda call: call["q"].nope, "q.nope"),
    ("lse", lambda call: call["q"].rope, "q.rope"),
    ("lse", lambda call: call["q"].scale, "q.scale"),
    ("lse", lambda call: call["cache"].scale, "cache.scale"),
    ("lse", lambda call: call["plan"].lse_accum, "plan.lse_accum"),
    ("lse", lambda call: call["plan"].work_items, "plan.work_items"),
    ("out", lambda call: call["cache"].content, "cache.content"),
    ("out", lambda call: call["plan"].o_accum, "plan.o_accum"),
]


@needs_compiler
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    ("name", "memory", "other"), ALIASED, ids=[f"{a[0]}-over-{a[2]}" for a in ALIASED]
)
def test_results_over_what_is_read(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    memory: Callable[[dict[str, Any]], torch.Tensor],
    other: str,
    quick: bool,
) -> None:
    """Also where calls on the rightful memory went before, the third as the second."""
    call = complete_call()
    if not quick:
        call["pipeline"] = call["plan"].pipeline
    launches: list[object] = []
    repeated: list[object] = []
    monkeypatch.setattr(decode, "launch_decode", lambda *a: launches.append(a))
    monkeypatch.setattr(decode, "run_prepared", lambda *a: repeated.append(a))
    for _ in range(3):
        snapmla.decode(**call)
    assert len(repeated) == 2 * quick
    given = call[name]
    aliased = view_at(memory(call), 0, given.shape, given.dtype)
    named = "out" if other == "lse" else name
    with pytest.raises(ValueError, match=rf"^{named}: expected memory apart from {other}, got te"):
        snapmla.decode(**{**call, name: aliased})
    assert len(launches) + len(repeated) == 3


@needs_compiler
@pytest.mark.parametrize("name", ["q", "cache", "plan"])
def test_an_accepted_result_is_asked_again_where_something_else_lies_over_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The same ``out`` and ``lse``; another query, cache or workspace that lies there."""
    monkeypatch.setattr(decode, "launch_decode", lambda *_: None)
    monkeypatch.setattr(decode, "run_prepared", lambda *_: None)
    call = complete_call()
    for _ in range(3):
        snapmla.decode(**call)
    out = call["out"]
    if name == "q":
        nope = view_at(out, 0, (B, S_Q, HEADS, 512), torch.uint8).view(torch.float8_e4m3fn)
        call["q"] = QuantizedQuery(nope, call["q"].rope, call["q"].scale)
    elif name == "cache":
        pages = call["cache"].num_pages
        content = torch.zeros(pages, PAGE, 512, dtype=torch.uint8)
        call["out"] = view_at(content, content.nbytes - out.nbytes, out.shape, out.dtype)
        snapmla.decode(**call)
        call["cache"] = PagedKVCache.from_tensors(content, call["cache"].rope, call["cache"].scale)
    else:
        o_accum = torch.zeros_like(call["plan"].o_accum)
        call["out"] = view_at(o_accum, 0, out.shape, out.dtype)
        snapmla.decode(**call)
        call["plan"] = call["plan"].with_workspace(o_accum, call["plan"].lse_accum)
    with pytest.raises(ValueError, match=r"^out: expected memory apart from "):
        snapmla.decode(**call)


@needs_compiler
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_an_arena_without_gaps_takes_the_quick_way(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    call = complete_call()
    want, want_lse = snapmla.decode(**{**call, "out": None, "lse": None, "out_dtype": dtype})
    arena, q = Arena(), call["q"]
    nope = arena.put(q.nope_u8).view(torch.float8_e4m3fn)
    out = arena.put(torch.zeros(want.shape, dtype=dtype))
    rope, lse, scale = arena.put(q.rope), arena.put(call["lse"]), arena.put(q.scale)
    snapmla.decode(**{**call, "out": out.clone()})  # of the same kind
    monkeypatch.setattr(decode, "checked", lambda *_: pytest.fail("the full checks ran"))
    moved = {**call, "q": QuantizedQuery(nope, rope, scale), "out": out, "lse": lse}
    snapmla.decode(**moved)
    monkeypatch.setattr(overlap.Apart, "see", lambda *_: pytest.fail("asked anew"))
    snapmla.decode(**moved)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


@needs_compiler
def test_the_same_memory_in_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered are addresses: shapes are compared on every call."""
    monkeypatch.setattr(decode, "launch_decode", lambda *_: None)
    call = complete_call()
    snapmla.decode(**call)
    q, (content, rope, scale) = call["q"], call["cache"].memory
    pages = call["cache"].num_pages // 2
    call["cache"] = PagedKVCache.from_tensors(
        *(t[: 2 * pages].view(pages, 2 * PAGE, *t.shape[2:]) for t in (content, rope, scale))
    )
    for changes in (
        {"cache": call["cache"]},
        {"q": QuantizedQuery(*(t.transpose(0, 1) for t in (q.nope, q.rope, q.scale)))},
        {"plan": dataclasses.replace(call["plan"], page_size=2 * PAGE)},
    ):
        good = {**complete_call(), "q": q, "plan": call["plan"], "cache": call["cache"]}
        good["cache"] = PagedKVCache.from_tensors(content, rope, scale)
        good |= {name: call[name] for name in ("block_table", "cache_seqlens", "out", "lse")}
        snapmla.decode(**good)
        with pytest.raises(ValueError, match="^plan: expected one made for|^block_table: "):
            snapmla.decode(**{**good, **changes})


def pool_with_gaps(cache: PagedKVCache, gap: int) -> tuple[PagedKVCache, torch.Tensor]:
    """A copy of a cache in pages that lie ``gap`` bytes apart, and the gap behind its page 1."""
    block = PAGE * layouts.TOKEN_BYTES
    pool = torch.zeros(cache.num_pages, block + gap, dtype=torch.uint8)
    apart = PagedKVCache.from_tensors(*layouts.paged_views(pool[:, :block], PAGE))
    for name in ("content_u8", "rope", "scale"):
        getattr(apart, name).copy_(getattr(cache, name))
    return apart, pool[1, block:]


@needs_compiler
def test_results_between_the_pages_of_a_pool() -> None:
    call = complete_call()
    want, _ = snapmla.decode(**{**call, "out": None, "lse": None})
    cache, gap = pool_with_gaps(call["cache"], want.nbytes + 16)
    out = view_at(gap, 0, want.shape, BF16)
    snapmla.decode(**{**call, "cache": cache, "out": out})
    assert torch.equal(out, want)
    over = view_at(cache.memory[0][1], PAGE * layouts.TOKEN_BYTES - 16, (8,), BF16)
    assert overlap.shared(cache.scale, over) and not overlap.shared(cache.rope, over)


# ---------------------------------------------------------------------------- other calls


@needs_compiler
def test_tokens_over_the_cache() -> None:
    cache = PagedKVCache.allocate(4, PAGE, device="cpu")
    cache.content_u8.zero_()
    cache.scale.fill_(1.0)
    own = {
        "c_kv": torch.zeros(5, 512, dtype=BF16), "k_rope": torch.zeros(5, 64, dtype=BF16),
        "slot_mapping": torch.arange(5, dtype=torch.int32),
    }  # fmt: skip
    snapmla.append_kv(cache, **own)
    for name, memory, other in (
        ("c_kv", cache.content, "content"), ("k_rope", cache.rope, "rope"),
        ("slot_mapping", cache.scale, "scale"), ("c_kv", cache.rope, "rope"),
    ):  # fmt: skip
        over = view_at(memory, 0, own[name].shape, own[name].dtype)
        before = cache.content_u8.clone()
        with pytest.raises(
            ValueError, match=rf"^{name}: expected memory apart from cache.{other},"
        ):
            snapmla.append_kv(cache, **{**own, name: over})
        assert torch.equal(cache.content_u8, before)


@needs_compiler
def test_tokens_between_the_pages_of_a_pool() -> None:
    cache, gap = pool_with_gaps(selfcheck.poisoned_cache(3, PAGE), 3 * 1152)
    joint = view_at(gap, 0, (3, 576), BF16)
    joint.copy_(torch.randn(3, 576))
    slots = torch.tensor([17, 0, 40], dtype=torch.int32)
    snapmla.append_kv(cache, joint[:, :512], joint[:, 512:], slots)
    want = PagedKVCache.allocate(3, PAGE, device="cpu")
    snapmla.append_kv(want, joint[:, :512].clone(), joint[:, 512:].clone(), slots)
    for got, expected in zip(
        snapmla.fetch_dequant(cache, slots), snapmla.fetch_dequant(want, slots), strict=True
    ):
        assert torch.equal(got, expected)


@needs_compiler
def test_queries_over_their_source() -> None:
    nope, rope = torch.randn(B, S_Q, HEADS, 512).bfloat16(), torch.randn(B, S_Q, HEADS, 64)
    rope = rope.bfloat16()
    out = snapmla.quantize_q(nope, rope)
    snapmla.quantize_q(nope, rope, out=out)
    fp8 = view_at(nope, 0, nope.shape, torch.float8_e4m3fn)
    scale = view_at(out.rope, 0, out.scale.shape, torch.float32)
    for bad, text in (
        (QuantizedQuery(out.nope, rope, out.scale), "out.rope: expected memory apart from q_rope"),
        (QuantizedQuery(fp8, out.rope, out.scale), "out.nope: expected memory apart from q_nope"),
        (QuantizedQuery(out.nope, out.rope, scale), "out.scale: .* apart from out.rope"),
    ):
        before = (nope.clone(), rope.clone())
        with pytest.raises(ValueError, match=f"^{text}"):
            snapmla.quantize_q(nope, rope, out=bad)
        assert torch.equal(nope, before[0]) and torch.equal(rope, before[1])


@needs_compiler
def test_fetched_rows_over_the_cache() -> None:
    cache, _, _ = selfcheck.filled_cache((20, 3), PAGE)
    where = torch.arange(6, dtype=torch.int32)
    c_kv, k_rope = torch.zeros(6, 512, dtype=BF16), torch.zeros(6, 64, dtype=BF16)
    joint = view_at(cache.content, 0, (6, 576), BF16)
    for out, text in (
        ((c_kv, view_at(cache.rope, 0, (6, 64), BF16)), r"out\[1\]: .* apart from cache\.rope"),
        ((c_kv, view_at(c_kv, 128, (6, 64), BF16)), r"out\[1\]: .* apart from out\[0\]"),
        ((view_at(cache.content, 0, (6, 512), BF16), k_rope), r"out\[0\]: .* from cache\.content"),
        (joint, "out: .* apart from cache.content"),
    ):
        before = cache.content_u8.clone()
        with pytest.raises(ValueError, match=f"^{text}, got tensors that overlap"):
            snapmla.fetch_dequant(cache, where, out=out)
        assert torch.equal(cache.content_u8, before)
    many = torch.zeros(6 * 576 * 2, dtype=torch.uint8)
    indices = view_at(many, 64, (6,), torch.int32)
    with pytest.raises(ValueError, match="^out: expected memory apart from where"):
        snapmla.fetch_dequant(cache, indices, out=view_at(many, 0, (6, 576), BF16))


def test_a_cache_of_the_same_bytes() -> None:
    pool = torch.zeros(4 * PAGE * 640, dtype=torch.uint8)
    content = view_at(pool, 0, (4, PAGE, 512), torch.uint8)
    scale = torch.ones(4, PAGE)
    end = content.nbytes
    PagedKVCache.from_tensors(content, view_at(pool, end, (4, PAGE, 64), BF16), scale)
    with pytest.raises(ValueError, match="^rope: expected memory apart from content, got"):
        PagedKVCache.from_tensors(content, view_at(pool, end - 16, (4, PAGE, 64), BF16), scale)
    for other, at in (("content", end - 16), ("rope", pool.nbytes - 16 * PAGE)):
        pool_scale = view_at(pool, at, (4, PAGE), torch.float32)
        rope = view_at(pool, end, (4, PAGE, 64), BF16)
        with pytest.raises(ValueError, match=f"^scale: expected memory apart from {other}, got"):
            PagedKVCache.from_tensors(content, rope, pool_scale)


# ---------------------------------------------------------------------------- SnapMLA's names


def engine_call() -> dict[str, Any]:
    """A decode of ``flash_mla_fp8`` that takes the quick way."""
    call = complete_call()
    q, cache, lengths = call["q"], call["cache"], call["cache_seqlens"]
    metadata, splits = names.get_mla_metadata(lengths, HEADS * S_Q, 1)
    return {
        "q_nope": q.nope, "q_rope": q.rope, "q_scale": q.scale.unsqueeze(-1),
        "k_cache_lora": cache.content.unsqueeze(2), "k_cache_rope": cache.rope.unsqueeze(2),
        "k_scale": cache.scale[..., None, None], "block_table": call["block_table"],
        "cache_seqlens": lengths, "head_dim_v": 512, "tile_scheduler_metadata": metadata,
        "num_splits": splits, "out": call["out"], "lse": call["lse"],
    }  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    ("name", "other"),
    [("out", "k_cache_lora"), ("lse", "q_nope"), ("lse", "q_scale"), ("lse", "k_scale"),
     ("lse", "k_cache_rope"), ("lse", "tile_scheduler_metadata")],
)  # fmt: skip
def test_results_of_snapmlas_name(monkeypatch: pytest.MonkeyPatch, name: str, other: str) -> None:
    call = engine_call()
    launches: list[object] = []
    monkeypatch.setattr(decode, "launch_decode", lambda *a: launches.append(a))
    names.flash_mla_ckv_fp8_per_token(**call)
    over = view_at(call[other], 0, call[name].shape, call[name].dtype)
    with pytest.raises(ValueError, match=f"^{name}: expected memory apart from {other}, got"):
        names.flash_mla_ckv_fp8_per_token(**{**call, name: over})
    assert len(launches) == 1


@needs_compiler
def test_results_of_snapmlas_name_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    call = engine_call()
    out, _ = names.flash_mla_ckv_fp8_per_token(**call)
    names.flash_mla_ckv_fp8_per_token(**call)
    want = out.clone()
    monkeypatch.setattr(overlap.Apart, "see", lambda *_: pytest.fail("asked anew"))
    monkeypatch.setattr(decode, "checked", lambda *_: pytest.fail("the long way"))
    names.flash_mla_ckv_fp8_per_token(**call)
    assert torch.equal(out, want)


@needs_compiler
def test_keys_of_snapmlas_names() -> None:
    pool = {
        "k_lora_cache": torch.zeros(256, 1, 512, dtype=torch.uint8),
        "k_lora_scale_cache": torch.ones(256, 1, 1),
        "k_rope_cache": torch.zeros(256, 1, 64, dtype=BF16),
    }
    right = {"key": torch.randn(3, 1, 576).bfloat16(), "indices": torch.arange(3), **pool}
    names.quantize_and_cache_k(**right, head_dim_v=512)
    for name, other in (
        ("key", "k_lora_cache"),
        ("key", "k_rope_cache"),
        ("indices", "k_lora_scale_cache"),
    ):
        over = view_at(pool[other], 0, right[name].shape, right[name].dtype)
        before = pool["k_lora_cache"].clone()
        wanted = f"^{name}: expected memory apart from {other}, got"
        with pytest.raises(ValueError, match=wanted):
            names.quantize_and_cache_k(**{**right, name: over}, head_dim_v=512)
        assert torch.equal(pool["k_lora_cache"], before)
    scale = view_at(pool["k_rope_cache"], 0, (256, 1, 1), torch.float32)
    with pytest.raises(ValueError, match="^k_lora_scale_cache: .* apart from k_rope_cache, got"):
        names.quantize_and_cache_k(**{**right, "k_lora_scale_cache": scale}, head_dim_v=512)
    out = (torch.zeros(3, 1, 512, dtype=BF16), view_at(pool["k_rope_cache"], 0, (3, 1, 64), BF16))
    with pytest.raises(ValueError, match=r"^out\[1\]: expected memory apart from k_rope, got"):
        names.dequantize_ckv_fused_indexed(
            pool["k_lora_cache"], pool["k_rope_cache"], pool["k_lora_scale_cache"],
            torch.arange(3, dtype=torch.int32), out=out,
        )  # fmt: skip


# ---------------------------------------------------------------------------- the question itself


def bytes_of(tensor: torch.Tensor, memory: torch.Tensor) -> set[int]:
    """Every byte of every element, by enumeration."""
    index = torch.arange(memory.nbytes // tensor.element_size())
    at = index.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten().tolist()
    size = tensor.element_size()
    return {i * size + j for i in at for j in range(size)}


def test_shared_is_what_enumerating_finds() -> None:
    memory, choose = torch.zeros(512, dtype=torch.uint8), random.Random(5)
    found = []
    for _ in range(600):
        views = []
        for dtype in choose.choices((torch.uint8, BF16, torch.float32), k=2):
            shape = [choose.randint(0, 3) if choose.random() < 0.1 else choose.randint(1, 4)
                     for _ in range(choose.randint(1, 3))]  # fmt: skip
            strides = [choose.choice((0, 1, 2, 4, 8, 12, 16)) for _ in shape]
            offset = choose.randint(0, 20)
            views.append(memory.view(dtype).as_strided(shape, strides, offset))
        want = bool(bytes_of(views[0], memory) & bytes_of(views[1], memory))
        assert overlap.shared(*views) == want
        met = overlap.meets(overlap.span(views[0]), (overlap.span(views[1]),))
        assert met or not want
        found.append((met, want))
    assert {(True, True), (True, False), (False, False)} <= set(found)


def test_what_is_remembered_is_bounded() -> None:
    apart = overlap.Apart()
    for i in range(overlap.REMEMBERED + 10):
        assert apart.see((i,), ((0, 4),), ((4, 8),))
    assert 0 < len(apart) <= overlap.REMEMBERED
    assert not apart.see(("met",), ((0, 5),), ((4, 8),)) and ("met",) not in apart
    first = overlap.place(((0, 4),))
    for i in range(overlap.REMEMBERED):
        overlap.place(((i, i + 1),))
    assert overlap.place(((0, 4),)) != first, "a number came back after it was forgotten"
    assert overlap.place(((0, 4),)) == overlap.place(((0, 4),))
