"""Sparse decode whose queries are content and RoPE in a tensor each."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import snapmla
from snapmla import PagedKVCache
from snapmla.sparse.query import row_stride
from tests.support.bits import assert_same_bits
from tests.support.needs import needs_compiler

BF16 = torch.bfloat16
CONTENT = {"fp8_ds_mla": 512, "fp8_v4": 448, "bf16": 512}
SCALE, HEADS, TOPK = 0.05, 3, 40


def given(fmt: str, *rows: int, fill: bool = True) -> dict[str, Any]:
    """Arguments with one tensor of queries, (*rows, HEADS, channels), of a cache with tokens."""
    torch.manual_seed(0)
    content = CONTENT[fmt]
    kind: Any = BF16 if fmt == "bf16" else fmt
    cache = PagedKVCache.allocate(2, 64, device="cpu", dtype=kind)
    latent = torch.randn(128, content + 64).to(BF16)
    if fill:
        snapmla.append_kv(cache, latent[:, :content], latent[:, content:], torch.arange(128))
    q = torch.randn(*rows, HEADS, content + 64).to(BF16)
    indices = torch.randint(-1, 128, (*rows, TOPK), dtype=torch.int32)
    return {"q": q, "cache": cache, "indices": indices, "softmax_scale": SCALE}


def apart(q: Tensor, content: int) -> tuple[Tensor, Tensor]:
    """Content and RoPE in rows with gaps, which are NaN: 16 bytes apart, and heads of 192."""
    rows = q.shape[:-1]
    nope = torch.full((*rows, content + 8), math.nan, dtype=BF16)[..., :content]
    rope = torch.full((*rows, 192), math.nan, dtype=BF16)[..., 128:]
    nope.copy_(q[..., :content])
    rope.copy_(q[..., content:])
    return nope, rope


@needs_compiler
@pytest.mark.parametrize(
    "fmt",
    ["fp8_ds_mla", *(pytest.param(x, marks=pytest.mark.whole_matrix) for x in ("fp8_v4", "bf16"))],
)
def test_the_bits_of_one_tensor(fmt: str) -> None:
    """Of rows with gaps, and side by side."""
    call = given(fmt, 2, 1)
    pair = apart(call.pop("q"), CONTENT[fmt])
    call["plan"] = snapmla.plan_sparse_decode(
        HEADS, 1, topk=TOPK, batch=2, device="cpu", cache_dtype=BF16 if fmt == "bf16" else fmt
    )
    want = snapmla.decode(torch.cat(pair, -1), **call)
    assert bool(want[0].isfinite().all())
    assert_same_bits(snapmla.decode(pair, **call), want)
    again = [part.clone(memory_format=torch.contiguous_format) for part in pair]
    assert_same_bits(snapmla.decode((again[0], again[1]), **call), want)


@needs_compiler
@pytest.mark.whole_matrix
@pytest.mark.parametrize("fmt", CONTENT)
def test_traced_and_planned_by_the_call(fmt: str) -> None:
    call = given(fmt, 2, 1)
    pair = apart(call.pop("q"), CONTENT[fmt])
    want = snapmla.decode(torch.cat(pair, -1), **call)
    for _ in range(2):
        assert_same_bits(snapmla.decode(pair, **call), want)
    plan = snapmla.plan_sparse_decode(
        HEADS, 1, topk=TOPK, batch=2, device="cpu", cache_dtype=BF16 if fmt == "bf16" else fmt
    )
    traced = torch.compile(
        lambda nope, rope: snapmla.decode((nope, rope), **call, plan=plan),
        backend="eager", fullgraph=True,
    )  # fmt: skip
    assert_same_bits(traced(*pair), want)


@needs_compiler
@pytest.mark.whole_matrix
def test_ragged() -> None:
    call = given("fp8_ds_mla", 3)
    begins = torch.tensor([0, 2, 3], dtype=torch.int32)
    plan = snapmla.plan_sparse_decode(
        HEADS, None, topk=TOPK, batch=2, device="cpu", cache_dtype="fp8_ds_mla",
        cu_seqlens_q=begins, total_q=3,
    )  # fmt: skip
    q = call.pop("q")
    want = snapmla.decode(q, **call, plan=plan)
    assert_same_bits(snapmla.decode(apart(q, 512), **call, plan=plan), want)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda n, r: (n,), TypeError, "q: expected one tensor, or (q_nope, q_rope), both"),
        (lambda n, r: (n, None), TypeError, "q: expected one tensor, or (q_nope, q_rope), both"),
        (lambda n, r: (n, r[:1]), ValueError, "q_rope: expected shape (2, 1, 3, 64)"),
        (lambda n, r: (n[..., :448], r), ValueError, "q_nope: expected shape"),
        (lambda n, r: (n.float(), r), TypeError, "q_nope: expected dtype bfloat16"),
        (lambda n, r: (n, torch.cat([r, r], -1)[..., 4:68]), ValueError, "q_rope: expected stor"),
        (
            lambda n, r: (n.transpose(0, 2).contiguous().transpose(0, 2), r), ValueError,
            "q_nope: expected rows evenly spaced over tokens and heads",
        ),
        (
            lambda n, r: (n, r[:, :, :1].expand(2, 1, 3, 64)), ValueError,
            "q_rope: expected rows evenly spaced over tokens and heads",
        ),
    ],
)  # fmt: skip
def test_mistakes(wrong: Any, error: type[Exception], words: str) -> None:
    call = given("fp8_ds_mla", 2, 1, fill=False)
    pair = call.pop("q").split((512, 64), -1)
    with pytest.raises(error) as found:
        snapmla.decode(wrong(*(part.contiguous() for part in pair)), **call)
    assert str(found.value).startswith(words)


@pytest.mark.parametrize("fmt", ["fp8_v41_rows", "fp8_nope"])
def test_formats_without_rope_apart(fmt: str) -> None:
    cache = PagedKVCache.allocate(2, 64, device="cpu", dtype=fmt)
    pair = torch.zeros(2, 1, 3, 448, dtype=BF16), torch.zeros(2, 1, 3, 64, dtype=BF16)
    indices = torch.zeros(2, 1, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match="^q: expected one tensor of 512 channels over"):
        snapmla.decode(pair, cache, indices=indices, softmax_scale=1.0)


def test_quantised_queries_are_one_object() -> None:
    cache = PagedKVCache.allocate(2, 64, device="cpu")
    pair = torch.zeros(2, 1, 3, 512, dtype=BF16), torch.zeros(2, 1, 3, 64, dtype=BF16)
    indices = torch.zeros(2, 1, 8, dtype=torch.int32)
    with pytest.raises(TypeError, match="^q: expected a snapmla.QuantizedQuery"):
        snapmla.decode(pair, cache, indices=indices, softmax_scale=1.0)


def test_row_strides() -> None:
    rows = torch.zeros(4, 3, 2, 16)
    assert row_stride(rows) == 16
    assert row_stride(rows[..., 8:]) == 16
    assert row_stride(rows[:, :, :1]) == 32  # one head: tokens are rows
    assert row_stride(rows[::2]) is None
    assert row_stride(rows[:1, :1, :1]) == 16
    assert row_stride(rows[:, :1]) is None
    assert row_stride(rows.transpose(0, 1)) is None
    assert row_stride(rows[0, 0, :1].expand(3, 16)) is None
