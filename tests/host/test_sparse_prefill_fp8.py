"""``sparse_prefill`` straight from the FP8 cache: decode's bits and gates, plans, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import snapmla
from snapmla.sparse.prefill import sparse_prefill
from snapmla.sparse.prefill_fp8 import plan_sparse_prefill
from tests.host.test_sparse_decode import SCALE, check, filled_cache, query, some_indices
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
S_Q, H, TOPK = 4, 5, 80
I32 = torch.int32


@pytest.fixture(scope="module")
def call() -> dict[str, Any]:
    """Lists that end everywhere, entries of no token, sinks."""
    torch.manual_seed(3)
    return {
        "q": query(S_Q, H), "kv": filled_cache(), "softmax_scale": SCALE,
        "indices": some_indices(S_Q, 1, topk=TOPK),
        "attn_sink": torch.tensor([0.5, -math.inf, math.inf, 3.0, -2.0]),
        "topk_length": torch.tensor([64, 0, 200, 65], dtype=I32),
    }  # fmt: skip


def test_right_and_decodes_bits(call: dict[str, Any]) -> None:
    """Beside fp64, by decode's gates; beside decode of one sequence of that many tokens, by a plan
    of other parts that splits nothing."""
    plan = plan_sparse_prefill(H, topk=TOPK, topk_length=call["topk_length"])
    assert plan.num_parts > 1 and not plan.may_split and plan.o_accum.shape[0] == 1
    out, most, lse = sparse_prefill(**call, plan=plan)
    assert most is None and out.shape == (S_Q, H, 512) and lse.shape == (S_Q, H)
    counts = call["topk_length"].clamp(max=TOPK)
    check(
        (out, lse.T), call["q"], call["kv"], call["indices"].squeeze(1), counts,
        attn_sink=call["attn_sink"], empty_lse="+inf",
    )  # fmt: skip
    assert not out[1].any() and torch.isposinf(lse[1]).all()
    q, whole = call["q"], call["indices"].squeeze(1)
    cut = torch.where(torch.arange(TOPK) < counts[:, None], whole, -1)
    of_one = snapmla.decode(
        snapmla.QuantizedQuery(*(x[None] for x in (q.nope, q.rope, q.scale))), call["kv"],
        indices=cut[None], softmax_scale=SCALE, attn_sink=call["attn_sink"], empty_lse="+inf",
        plan=snapmla.plan_sparse_decode(H, S_Q, topk=TOPK, batch=1, device="cpu", num_parts=1),
    )  # fmt: skip
    assert torch.equal(of_one[0][0], out) and torch.equal(of_one[1][0].T, lse)


def test_plans_and_memory(call: dict[str, Any]) -> None:
    """A plan of its own, one for other lengths, memory given: the same bits."""
    want = sparse_prefill(**call)
    plan = plan_sparse_prefill(H, S_Q, topk=TOPK, device="cpu")
    out, lse = torch.zeros(S_Q, H, 512).bfloat16(), torch.zeros(S_Q, H)
    got = sparse_prefill(**call, plan=plan, out=out, lse=lse)
    assert got[0] is out and got[2] is lse
    assert torch.equal(out, want[0]) and torch.equal(lse, want[2])
    none = {**call, "q": query(0, H), "indices": call["indices"][:0], "topk_length": None}
    assert [x is None or x.shape[0] for x in sparse_prefill(**none)] == [0, True, 0]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def rows_of_bytes() -> snapmla.PagedKVCache:
    return snapmla.PagedKVCache.from_tensors(
        zeros(2, 16, 1, 656, dtype=torch.uint8), format="fp8_ds_mla"
    )


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("q", zeros(S_Q, H, 576), TypeError, r"q: expected a snapmla\.QuantizedQuery"),
    ("q", lambda: query(S_Q, 1, H), ValueError, r"q: expected a query of \(s_q, h\) rows"),
    ("kv", rows_of_bytes(), ValueError, "kv: expected a cache of format 'fp8', .*by way of BF16"),
    ("indices", zeros(S_Q, TOPK, dtype=I32), ValueError, r"indices: expected shape \(4, 1, topk\)"),
    ("indices", zeros(S_Q, 1, TOPK), TypeError, "indices: expected dtype int32"),
    ("topk_length", zeros(1, dtype=I32), ValueError, r"topk_length: expected shape \(4,\)"),
    ("out", zeros(S_Q, H, 512), TypeError, "out: expected dtype bfloat16"),
    ("lse", zeros(H, S_Q).T, ValueError, "lse: expected a contiguous tensor"),
    ("max_logits", zeros(S_Q, H), ValueError, "max_logits: expected None over an FP8 cache"),
    ("indexer_topk", 64, ValueError, "indexer_topk: expected 0 over an FP8 cache"),
    ("d_v", 128, ValueError, "d_v: expected"),
    ("plan", "none", TypeError, r"plan: expected a snapmla\.SparsePlan"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "error", "words"), WRONG, ids=[f"{row[0]}-{i}" for i, row in enumerate(WRONG)]
)
def test_wrong_argument(
    call: dict[str, Any], name: str, value: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        sparse_prefill(**{**call, name: value() if callable(value) else value})


def test_wrong_plans(call: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="s_q: expected an int, got None"):
        plan_sparse_prefill(H, topk=TOPK)
    with pytest.raises(ValueError, match="s_q: expected 4, as topk_length, got 6"):
        plan_sparse_prefill(H, 6, topk=TOPK, topk_length=call["topk_length"])
    rows = zeros(4, 1, 576, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="plan: expected None where kv is a tensor"):
        sparse_prefill(
            zeros(1, H, 576, dtype=torch.bfloat16), rows, zeros(1, 1, 4, dtype=I32), SCALE,
            plan=plan_sparse_prefill(H, 1, topk=4, device="cpu"),
        )  # type: ignore[call-overload]  # fmt: skip
