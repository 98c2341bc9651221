"""Sparse decode over a BF16 cache: split lists and whole ones beside fp64, plans, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import snapmla
from snapmla.sparse.rows import pieces_of, plan_rows, sparse_decode_rows
from snapmla.testing import metrics
from softgpu import Options, using
from tests.support.needs import needs_kernels

pytestmark = needs_kernels
B, S_Q, H, TOPK, PAGES, P = 2, 2, 3, 200, 5, 16
SCALE = 576**-0.5
I32 = torch.int32


def call(s_q: int = S_Q) -> dict[str, Any]:
    """Lists with entries of no token; NaN in tokens that nobody names."""
    torch.manual_seed(s_q)
    cache = snapmla.PagedKVCache.allocate(PAGES, P, device="cpu", dtype=torch.bfloat16)
    assert cache.kv is not None
    cache.kv.copy_(torch.randn(cache.kv.shape))
    indices = torch.randint(0, PAGES * P - 1, (B, s_q, TOPK), dtype=I32)
    indices[torch.rand(indices.shape) < 0.2] = -1
    indices[0, 0, 64:128] = 2**31 - 1
    cache.kv[-1, -1] = math.nan
    return {
        "q": torch.randn(B, s_q, H, 576).bfloat16() * 3, "cache": cache, "indices": indices,
        "softmax_scale": SCALE, "topk_length": torch.tensor([TOPK, 70], dtype=I32),
        "attn_sink": torch.tensor([0.5, -math.inf, math.inf]),
    }  # fmt: skip


def truth(given: dict[str, Any], empty: float) -> tuple[Tensor, Tensor]:
    """(out, natural LSE) in fp64."""
    q, rows = given["q"].double(), given["cache"].kv.reshape(-1, 576).double()
    b, s_q, heads, _ = q.shape
    out, lse = torch.zeros(b, s_q, heads, 512).double(), torch.full((b, heads, s_q), empty).double()
    for i, j in ((i, j) for i in range(b) for j in range(s_q)):
        named = given["indices"][i, j, : int(given["topk_length"][i])].long()
        kv = rows[named[(named >= 0) & (named < len(rows))]]
        if len(kv):
            logits = q[i, j] @ kv.T * SCALE
            lse[i, :, j] = logits.logsumexp(-1)
            kept = 1 / (1 + torch.exp(given["attn_sink"].double() - lse[i, :, j]))
            out[i, j] = logits.softmax(-1) @ kv[:, :512] * kept[:, None]
    return out, lse


@pytest.mark.whole_matrix
@pytest.mark.parametrize("s_q", [1, 2])
@pytest.mark.parametrize("splits", [None, 1, 2])
def test_beside_fp64(s_q: int, splits: int | None) -> None:
    """A sequence that sees nothing; pieces that are empty, or behind the length."""
    given = call(s_q)
    given["indices"][1, s_q - 1] = -1
    plan = plan_rows(H, s_q, topk=TOPK, batch=B, device="cpu", num_splits=splits)
    assert plan.pieces == (splits or plan.pieces)
    with using(Options(hazards="raise")):
        out, lse = sparse_decode_rows(**given, plan=plan)
    want, of_rows = truth(given, -math.inf)
    assert metrics.relative_l2(out, want) < 4e-3
    seen = of_rows.isfinite()
    assert torch.equal(lse[~seen].double(), of_rows[~seen])
    assert float((lse[seen] - of_rows[seen]).abs().max()) < 1e-4
    assert not out[1, s_q - 1].any() and not out[:, :, 2].any() and out[0, 0, :2].any()
    _, base2 = sparse_decode_rows(**given, plan=plan, lse_base="2", empty_lse="+inf")
    assert torch.allclose(base2[seen], lse[seen] / math.log(2), atol=1e-5)
    assert torch.isposinf(base2[~seen]).all()


@pytest.mark.whole_matrix
def test_bits_depend_on_the_width_alone() -> None:
    """A sequence alone, and among others."""
    given = call()
    plans = [plan_rows(H, S_Q, topk=TOPK, batch=n, device="cpu", num_splits=4) for n in (B, 1)]
    out, lse = sparse_decode_rows(**given, plan=plans[0])
    for name in ("q", "indices", "topk_length"):
        given[name] = given[name][1:]
    alone = sparse_decode_rows(**given, plan=plans[1])
    assert torch.equal(alone[0], out[1:]) and torch.equal(alone[1], lse[1:])


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        ((2, 16, 2048), (32, 64)), ((2, 128, 2048), (32, 64)), ((8, 128, 2048), (8, 256)),
        ((128, 16, 2048), (1, 2048)), ((40, 64, 2048), (3, 704)), ((1, 8, 17), (1, 64)),
        ((0, 8, 100), (2, 64)), ((2, 16, 8192), (32, 256)),
    ],
)  # fmt: skip
def test_pieces(shape: tuple[int, int, int], want: tuple[int, int]) -> None:
    """On 132 SMs: pieces cover the list, and fill no more than the device."""
    pieces, width = pieces_of(*shape, 132)
    assert (pieces, width) == want and (pieces - 1) * width < shape[2] <= pieces * width


WRONG = [
    ("q", lambda c: c["q"].float(), TypeError, "q: expected dtype bfloat16"),
    ("cache", lambda c: snapmla.PagedKVCache.allocate(2, 16, device="cpu"), ValueError,
     "cache: expected a cache of bfloat16 with one KV head, got fp8"),
    ("indices", lambda c: c["indices"][:1], ValueError, r"indices: expected shape \(2, 2, topk\)"),
    ("topk_length", lambda c: c["topk_length"][:1], ValueError, r"shape \(2,\)"),
    ("attn_sink", lambda c: c["attn_sink"][:2], ValueError, r"attn_sink: expected shape \(3,\)"),
    ("plan", lambda c: plan_rows(H, 1, topk=TOPK, batch=B, device="cpu"), ValueError,
     r"plan: expected one made for \(b, s_q, h, topk\) = \(2, 2, 3, 200\), got \(2, 1, 3, 200\)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error", "words"), WRONG, ids=[row[0] for row in WRONG])
def test_wrong_argument(name: str, value: Any, error: type[Exception], words: str) -> None:
    given = call()
    with pytest.raises(error, match=words):
        sparse_decode_rows(**{**given, name: value(given)})


def test_pages_that_lie_apart() -> None:
    given = call()
    memory = torch.zeros(PAGES, P + 1, 1, 576).bfloat16()
    given["cache"] = snapmla.PagedKVCache.from_tensors(memory[:, :P])
    with pytest.raises(ValueError, match="cache: expected pages that follow one another"):
        sparse_decode_rows(**given)
