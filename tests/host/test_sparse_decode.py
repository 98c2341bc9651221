"""``decode(..., indices=)`` by its public names, on the software GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import snapmla
from snapmla.sparse import decode as sparse_call
from snapmla.sparse import lists
from snapmla.testing import metrics
from snapmla.testing.comparison import MIMIC_OF
from snapmla.testing.sparse_reference import sparse_decode_reference
from softgpu import Options, using
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
SCALE = 576**-0.5
Results = tuple[torch.Tensor, torch.Tensor]
PAGES, P = 4, 16
NONE = (-1, 2**31 - 1, PAGES * P, -(2**31))  # entries that are no token


def filled_cache(layout: str = "split") -> snapmla.PagedKVCache:
    cache = snapmla.PagedKVCache.allocate(PAGES, P, layout, "cpu")
    slots = torch.arange(PAGES * P, dtype=torch.int32)
    c_kv, k_rope = torch.randn(len(slots), 512).bfloat16(), torch.randn(len(slots), 64).bfloat16()
    snapmla.append_kv(cache, c_kv, k_rope, slots)
    return cache


def query(*rows: int) -> snapmla.QuantizedQuery:
    return snapmla.quantize_q(torch.randn(*rows, 512).bfloat16(), torch.randn(*rows, 64).bfloat16())


def some_indices(*rows: int, topk: int) -> torch.Tensor:
    """Tokens at random; one entry in five is none."""
    indices = torch.randint(PAGES * P, (*rows, topk), dtype=torch.int32)
    idle = torch.rand(indices.shape) < 0.2
    indices[idle] = torch.tensor(NONE, dtype=torch.int32)[torch.randint(4, (int(idle.sum()),))]
    return indices


def truth(
    q: snapmla.QuantizedQuery, cache: snapmla.PagedKVCache, indices: torch.Tensor,
    counts: torch.Tensor, **options: Any,
) -> Results:  # fmt: skip
    """(out, lse) of ``decode``, in fp64."""
    assert cache.scale is not None
    rows = q.rope.shape[:-1]
    flat = [x.reshape(-1, *x.shape[len(rows) - 1 :]) for x in (q.nope, q.rope, q.row_scale)]
    out, lse = sparse_decode_reference(
        *flat, cache.content, cache.rope, cache.scale, indices.flatten(0, -2), counts, SCALE,
        **options,
    )  # type: ignore[misc]  # three tensors  # fmt: skip
    if len(rows) == 2:
        return out, lse
    b, s_q, heads = rows
    return out.view(b, s_q, heads, 512), lse.view(heads, b, s_q).transpose(0, 1)


def check(made: Results, *call: Any, rows: int | None = None, **options: Any) -> None:
    """``close`` to the truth of a call; ``rows``: the first of ragged ones."""
    want, mimic = truth(*call, **options), truth(*call, config=MIMIC_OF["sm_90a"], **options)
    if rows is not None:
        made, want, mimic = ((out[:rows], lse[:, :rows]) for out, lse in (made, want, mimic))
    close(made, want, mimic)


def close(made: Results, want: Results, mimic: Results | None = None) -> None:
    """Within what the model of the kernel's rounding allows."""
    rounding = metrics.relative_l2((mimic or want)[0], want[0])
    assert metrics.relative_l2(made[0], want[0]) < 1.1 * rounding + 2.5e-3
    empty = torch.isinf(want[1])
    assert torch.equal(made[1][empty].double(), want[1][empty])
    assert float((made[1][~empty] - want[1][~empty]).abs().max()) < 2e-3
    assert not made[0].transpose(-3, -2)[empty].any()


@pytest.mark.parametrize("layout", ["split", "row640"])
def test_sequences_of_two_query_tokens(layout: str) -> None:
    cache, q = filled_cache(layout), query(3, 2, 5)
    indices, length = some_indices(3, 2, topk=150), torch.tensor([150, 0, 70], dtype=torch.int32)
    sink = torch.tensor([0.5, -math.inf, math.inf, 3.0, -2.0])
    indices[0, 1] = -1
    options = {"empty_lse": "+inf", "lse_base": "2"}
    plan = snapmla.plan_sparse_decode(5, 2, topk=150, topk_length=length, num_parts=4)
    with using(Options(hazards="raise")):
        made = snapmla.decode(
            q, cache, indices=indices, topk_length=length, attn_sink=sink, softmax_scale=SCALE,
            plan=plan, **options,
        )  # type: ignore[arg-type]  # fmt: skip
    check(made, q, cache, indices, length.repeat_interleave(2), attn_sink=sink, **options)


def test_one_plan_serves_every_step_of_its_shape() -> None:
    cache, plan = filled_cache(), snapmla.plan_sparse_decode(3, 1, topk=70, batch=2, device="cpu")
    for _ in range(2):
        q, indices = query(2, 1, 3), some_indices(2, 1, topk=70)
        out = torch.full((2, 1, 3, 512), math.nan, dtype=torch.bfloat16)
        lse = torch.full((2, 3, 1), math.nan)
        made = snapmla.decode(
            q, cache, indices=indices, softmax_scale=SCALE, plan=plan, out=out, lse=lse
        )
        assert made[0] is out and made[1] is lse
        check(made, q, cache, indices, torch.full((2,), 70))
    assert len(plan.memo.kinds) == 1


def test_without_a_plan() -> None:
    cache, q, indices = filled_cache(), query(2, 1, 3), some_indices(2, 1, topk=9)
    length = torch.tensor([9, 4], dtype=torch.int32)
    made = snapmla.decode(q, cache, indices=indices, softmax_scale=SCALE, topk_length=length)
    check(made, q, cache, indices, length)


def test_ragged_queries() -> None:
    """Rows of no sequence are left as they are."""
    cache, q, begins = filled_cache(), query(5, 3), torch.tensor([0, 3, 3, 4], dtype=torch.int32)
    indices, length = some_indices(5, topk=80), torch.tensor([80, 80, 30], dtype=torch.int32)
    plan = snapmla.plan_sparse_decode(
        3, topk=80, topk_length=length, cu_seqlens_q=begins, total_q=5, num_parts=3
    )
    out = torch.full((5, 3, 512), 7.0).bfloat16()
    made = snapmla.decode(
        q, cache, indices=indices, topk_length=length, softmax_scale=SCALE, plan=plan, out=out
    )
    counts = torch.tensor([80, 80, 80, 30, 0])
    check(made, q, cache, indices, counts, rows=4)
    assert bool((out[4] == 7).all())


def test_the_bits_of_dense_decode() -> None:
    """The same tokens in the table's order, nothing split."""
    cache, q = filled_cache(), query(2, 1, 16)
    table = torch.tensor([[2, 0, 3], [1, 3, 0]], dtype=torch.int32)
    length = torch.tensor([3 * P, 2 * P + 3], dtype=torch.int32)
    dense_plan = snapmla.plan_decode(length, 16, 1, page_size=P, max_pages=3, num_parts=1)
    dense = snapmla.decode(q, cache, table, length, softmax_scale=SCALE, plan=dense_plan)
    position = torch.arange(3 * P)
    indices = (table[:, position // P] * P + position % P).unsqueeze(1).int()
    plan = snapmla.plan_sparse_decode(16, 1, topk=3 * P, topk_length=length, num_parts=1)
    sparse = snapmla.decode(
        q, cache, indices=indices, topk_length=length, softmax_scale=SCALE, plan=plan
    )
    assert all(map(torch.equal, dense, sparse))


def test_fixed_splits_are_batch_invariant() -> None:
    cache, q, indices = filled_cache(), query(3, 1, 4), some_indices(3, 1, topk=200)
    options = {"topk": 200, "fixed_split_tokens": 64, "device": "cpu"}
    plan = snapmla.plan_sparse_decode(4, 1, batch=3, **options)  # type: ignore[arg-type]
    together = snapmla.decode(q, cache, indices=indices, softmax_scale=SCALE, plan=plan)
    one = snapmla.plan_sparse_decode(4, 1, batch=1, **options)  # type: ignore[arg-type]
    for i in range(3):
        alone = snapmla.QuantizedQuery(q.nope[i : i + 1], q.rope[i : i + 1], q.scale[i : i + 1])
        out, lse = snapmla.decode(
            alone, cache, indices=indices[i : i + 1], softmax_scale=SCALE, plan=one
        )
        assert torch.equal(out[0], together[0][i]) and torch.equal(lse[0], together[1][i])


def test_compiled_and_exported_calls_are_one_operator() -> None:
    cache, q, indices = filled_cache(), query(2, 1, 3), some_indices(2, 1, topk=9)
    plan = snapmla.plan_sparse_decode(3, 1, topk=9, batch=2, device="cpu")

    def step(q: Any, cache: Any, indices: Any, plan: Any) -> Any:
        return snapmla.decode(q, cache, indices=indices, softmax_scale=SCALE, plan=plan)

    eager = step(q, cache, indices, plan)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(q, cache, indices, plan)
    assert all(map(torch.equal, eager, compiled))


class Right:
    """A call that is right, and known."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {
            "q": query(2, 1, 3), "cache": filled_cache(), "indices": some_indices(2, 1, topk=9),
            "topk_length": torch.tensor([9, 4], dtype=torch.int32), "attn_sink": torch.zeros(3),
            "plan": snapmla.plan_sparse_decode(3, 1, topk=9, batch=2, device="cpu"),
            "out": torch.empty(2, 1, 3, 512, dtype=torch.bfloat16), "lse": torch.empty(2, 3, 1),
        }  # fmt: skip
        self.run()
        assert len(self.arguments["plan"].memo.kinds) == 1

    def run(self, **wrong: Any) -> Any:
        return snapmla.decode(**{"softmax_scale": SCALE, **self.arguments, **wrong})


def test_wrong_arguments_of_a_known_call() -> None:
    right = Right()
    given, dense = right.arguments, snapmla.plan_decode(
        torch.ones(2, dtype=torch.int32), 3, 1, page_size=P, max_pages=1
    )  # fmt: skip
    out, indices = given["out"], given["indices"]
    for name, value, words in (
        ("q", query(2, 1, 4), "plan: expected one made for"),
        ("q", torch.zeros(2, 1, 3, 576), "q: expected a snapmla.QuantizedQuery"),
        ("indices", indices.long(), "indices: expected dtype int32"),
        ("indices", indices[..., :8], "indices: expected shape"),
        ("indices", indices.expand(2, 1, 9)[:, :, ::1].mT.contiguous().mT, None),
        ("indices", torch.zeros(2, 1, 18, dtype=torch.int32)[..., ::2], "indices: expected inner"),
        ("topk_length", torch.zeros(3, dtype=torch.int32), "topk_length: expected shape"),
        ("topk_length", torch.zeros(2), "topk_length: expected dtype int32"),
        ("attn_sink", torch.zeros(2), "attn_sink: expected shape"),
        ("attn_sink", torch.zeros(3).double(), "attn_sink: expected dtype float32"),
        ("plan", dense, "plan: expected a snapmla.SparsePlan or None"),
        ("out", out[:1], "out: expected shape"),
        ("out", given["cache"].content.view(torch.bfloat16).view(-1)[:3072].view_as(out),
         "out: expected memory apart from cache.content"),
        ("out", torch._neg_view(out), "out: expected "),
        ("lse", out.view(-1)[:12].view(torch.float32).view(2, 3, 1), "(out|lse): expected memory"),
        ("softmax_scale", 0.0, "softmax_scale: expected a positive"),
        ("lse_base", "10", "lse_base: expected one of"),
        ("out_dtype", torch.float16, "out_dtype: expected"),
        ("pipeline", "dual_wg", "pipeline: expected one of"),
    ):  # fmt: skip
        if words is None:  # strides of rows are free
            right.run(**{name: value})
            continue
        with pytest.raises((TypeError, ValueError), match=f"^{words}"):
            right.run(**{name: value})
    with pytest.raises(ValueError, match="^plan: expected one made for .b, s_q, num_heads, page_s"):
        snapmla.decode(
            given["q"], given["cache"], torch.zeros(2, 1, dtype=torch.int32),
            torch.ones(2, dtype=torch.int32), softmax_scale=SCALE, plan=given["plan"],
        )  # fmt: skip


def test_a_cache_beyond_the_gathers_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a plan, and where another cache was known to be within it."""
    right, far = Right(), filled_cache()
    monkeypatch.setattr(lists, "MAX_STRIDE", P * 512)
    for plan in (None, right.arguments["plan"]):
        with pytest.raises(ValueError, match="^cache.content: expected pages and tokens less than"):
            right.run(cache=far, plan=plan)


def test_the_operator_asks_for_the_gathers_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code runs the operator alone."""
    right = Right()
    monkeypatch.setattr(lists, "MAX_STRIDE", P * 512)
    monkeypatch.setattr(sparse_call.tracing, "active", lambda *_: True)
    with pytest.raises(ValueError, match="^content: expected pages and tokens less than"):
        right.run()
