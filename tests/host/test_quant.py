"""``append_kv``, ``quantize_q`` and ``QuantizedQuery``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import snapmla
from snapmla import QuantizedQuery, reference
from snapmla.cache import quant
from snapmla.testing import selfcheck
from tests.support.bits import same_bits
from tests.support.copies import COPIES
from tests.support.needs import needs_compiler


@needs_compiler
def test_quantize_into_given_tensors() -> None:
    nope, rope = torch.randn(2, 1, 4, 512), torch.randn(2, 1, 4, 64)
    out = snapmla.quantize_q(nope, rope)
    again = snapmla.quantize_q(nope.half(), rope.half(), out=out)
    assert again is out
    want = reference.quantize_rows(nope.half(), rope.half())
    assert torch.equal(out.nope_u8, want[0].view(torch.uint8))
    assert torch.equal(out.scale, want[2])


def test_query_must_be_contiguous() -> None:
    nope = torch.zeros((2, 0, 16, 512), dtype=torch.uint8).view(torch.float8_e4m3fn)
    wide = torch.zeros((2, 1, 32, 512), dtype=torch.uint8).view(torch.float8_e4m3fn)
    rope, scale = torch.zeros((2, 1, 16, 64), dtype=torch.bfloat16), torch.ones(2, 1, 16)
    with pytest.raises(ValueError, match=r"q\.nope: expected a contiguous"):
        QuantizedQuery(wide[:, :, ::2], rope, scale)
    with pytest.raises(ValueError, match=r"s_q: expected 1 to 536870911, got 0"):
        QuantizedQuery(nope, rope, scale)


@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("scale_dims", [2, 3])
def test_copies_of_a_query(again: Callable[[Any], Any], scale_dims: int) -> None:
    q = selfcheck.sample_query(2, 1, 4)
    if scale_dims == 2:
        q = QuantizedQuery(q.nope, q.rope, q.scale[..., 0].contiguous())
    twin = again(q)
    assert type(twin) is QuantizedQuery and twin.granularity == q.granularity
    for name in ("nope", "rope", "scale", "nope_u8", "row_scale"):
        a, b = getattr(q, name), getattr(twin, name)
        assert (a.dtype, a.stride()) == (b.dtype, b.stride()) and same_bits(a, b)
        assert a.data_ptr() != b.data_ptr()
    assert twin.nope_u8.data_ptr() == twin.nope.data_ptr()


@needs_compiler
def test_a_repeated_quantize_is_still_checked() -> None:
    """A call like one that passed goes straight to its kernel, which sees what is wrong now."""
    joint = torch.randn(2, 1, 4, 584).bfloat16()
    nope, rope = joint[..., :512], joint[..., 512:576]
    out = snapmla.quantize_q(nope, rope)
    for given in (None, out):
        first = snapmla.quantize_q(nope, rope, out=given)
        again = snapmla.quantize_q(nope, rope, out=given)
        assert same_bits(first.nope_u8, again.nope_u8) and (again is out) is (given is out)
    for wrong, error, text in (  # what tests/host/test_checks.py leaves out
        ({"q_nope": joint[..., 1:513]}, ValueError, "q_nope: expected storage aligned"),
        ({"q_nope": nope.half()}, TypeError, "q_rope: expected dtype float16, got bfloat16"),
        ({"q_nope": torch._neg_view(nope)}, ValueError, "q_nope: .*negative bit"),
        ({"granularity": ["token"]}, ValueError, "granularity: expected one of"),
        ({"granularity": "token", "out": out}, ValueError, r"out.scale: expected shape \(2, 1\)"),
    ):
        with pytest.raises(error, match=text):
            snapmla.quantize_q(**{"q_nope": nope, "q_rope": rope, **wrong})


@needs_compiler
def test_two_views_of_one_memory_are_two_caches() -> None:
    """Remembered calls know heads: the same memory as more tokens of one head."""
    rows = torch.zeros((2, 64, 2, 576), dtype=torch.bfloat16)
    two = snapmla.PagedKVCache.from_tensors(rows)
    one = snapmla.PagedKVCache.from_tensors(rows.view(2, 128, 1, 576))
    assert one.spans[0][0] == two.spans[0][0]
    c_kv, k_rope = (
        torch.ones((3, 512), dtype=torch.bfloat16),
        torch.ones((3, 64), dtype=torch.bfloat16),
    )
    slots = torch.arange(3, dtype=torch.int32)
    snapmla.append_kv(one, c_kv, k_rope, slots)
    with pytest.raises(ValueError, match=r"c_kv: expected shape \(n, 2, 512\)"):
        snapmla.append_kv(two, c_kv, k_rope, slots)


@needs_compiler
@pytest.mark.parametrize("part", ["content", "rope", "scale"])
def test_a_cache_that_was_freed_or_moved(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Before the launch, by a first call and by one like the last."""
    monkeypatch.setattr(quant, "launch_append", lambda *_: None)
    tokens = torch.ones(3, 512).bfloat16(), torch.ones(3, 64).bfloat16(), torch.arange(3)
    for calls in (0, 2):
        cache = snapmla.PagedKVCache.allocate(2, 64, device="cpu")
        for _ in range(calls):
            snapmla.append_kv(cache, *tokens)
        held = getattr(cache, part)
        if calls:
            there, held.data = held.data, held.data.clone()
            with pytest.raises(
                ValueError, match="^cache: expected memory where it was, got a stor"
            ):
                snapmla.append_kv(cache, *tokens)
            held.data = there
            snapmla.append_kv(cache, *tokens)
        held.untyped_storage().resize_(0)
        for _ in range(2):
            with pytest.raises(ValueError, match="^cache: expected memory, got a storage that was"):
                snapmla.append_kv(cache, *tokens)


@needs_compiler
def test_a_query_to_write_that_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its content before the launch; what a launch finds is said in the same words."""
    nope, rope = torch.ones(1, 1, 4, 512).bfloat16(), torch.ones(1, 1, 4, 64).bfloat16()
    for part in ("nope_u8", "rope", "scale"):
        out = snapmla.quantize_q(nope, rope)
        for _ in range(2):
            snapmla.quantize_q(nope, rope, out=out)
        getattr(out, part).untyped_storage().resize_(0)
        with monkeypatch.context() as patch:
            if part == "nope_u8":
                patch.setattr(quant, "_launch_quantize", lambda *_: pytest.fail("launched"))
            with pytest.raises(ValueError, match="^out: expected memory, got a storage that was"):
                snapmla.quantize_q(nope, rope, out=out)
