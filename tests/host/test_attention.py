"""``decode`` on the software GPU: the whole pipeline, the quick way of a planned call, failures.

Lengths include 0 and 1; truth, poison and layouts of single variants: tests/kernels.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import snapmla
import softgpu
from snapmla import PagedKVCache, metrics
from snapmla.dense import PlanVariant
from snapmla.dense import decode as attention
from snapmla.runtime import env, variants
from snapmla.testing import selfcheck
from snapmla.testing.rounding import MIMIC_F16
from tests.support.bits import same_bits
from tests.support.needs import needs_compiler
from tests.support.steps import SCALE, Step, assert_right, make_step, plan_for
from tests.support.wrong_arguments import decode_arguments, decode_rows_arguments

pytestmark = needs_compiler
PIPELINE_CASES = [
    # pipeline, heads, s_q, page size, layout, out dtype, granularity
    ("etap", 5, 3, 64, "split", torch.float32, "token_head"),
    ("etap", 10, 3, 64, "paged", torch.bfloat16, "token_head"),
    ("etap", 48, 1, 64, "row640", torch.bfloat16, "token"),
    ("dual_wg", 16, 2, 64, "paged", torch.bfloat16, "token_head"),
]
WHOLE_MATRIX_CASES = [
    ("dual_wg", 128, 1, 64, "split", torch.bfloat16, "token"),
    ("etap", 65, 2, 64, "split", torch.bfloat16, "token"),  # three row blocks of 64
    ("etap", 8, 1, 16, "paged", torch.bfloat16, "token_head"),
    ("etap", 10, 3, 16, "paged", torch.float32, "token_head"),
    ("etap", 48, 1, 32, "row640", torch.bfloat16, "token"),
    ("etap", 32, 4, 128, "split", torch.float32, "token_head"),
    ("dual_wg", 64, 1, 64, "row640", torch.float32, "token_head"),
    ("f16", 10, 3, 64, "paged", torch.bfloat16, "token_head"),
    ("f16", 5, 3, 16, "row640", torch.float32, "token"),
    ("f16", 65, 1, 64, "split", torch.float32, "token_head"),  # two row blocks of 64
]


@pytest.mark.parametrize(
    ("pipeline", "heads", "s_q", "page_size", "layout", "dtype", "granularity"),
    [
        *PIPELINE_CASES,
        *(pytest.param(*c, marks=pytest.mark.whole_matrix) for c in WHOLE_MATRIX_CASES),
    ],
    ids=[f"{c[0]}-h{c[1]}-q{c[2]}-p{c[3]}-{c[4]}" for c in PIPELINE_CASES + WHOLE_MATRIX_CASES],
)
def test_pipeline(
    pipeline: str,
    heads: int,
    s_q: int,
    page_size: int,
    layout: str,
    dtype: torch.dtype,
    granularity: str,
) -> None:
    step = make_step((200, 0, 64, 1, 65), heads, s_q, page_size, layout, granularity)
    plan = plan_for(step, pipeline=pipeline, num_parts=3, fixed_overhead=0)
    assert int(plan.split_begin[-1]) > 0, "the case should exercise splits"
    out, lse = snapmla.decode(
        step.q, step.cache, step.block_table, step.cache_seqlens,
        softmax_scale=SCALE, plan=plan, out_dtype=dtype,
    )  # fmt: skip
    assert out.dtype == dtype and tuple(lse.shape) == (5, heads, s_q)
    assert (out[1] == 0).all() and torch.isneginf(lse[1]).all()
    assert_right(step, out, lse, config=MIMIC_F16 if pipeline == "f16" else None)


@pytest.mark.parametrize(
    ("heads", "s_q", "lengths", "row_blocks"),
    [(1, 9, (70, 5), None), (20, 9, (70, 5), "balanced"), (1, 33, (70, 5), None),
     pytest.param(20, 9, (70,), "in_step", marks=pytest.mark.whole_matrix),
     pytest.param(16, 33, (70,), None, marks=pytest.mark.whole_matrix)],
)  # fmt: skip
def test_any_number_of_query_tokens(
    heads: int, s_q: int, lengths: tuple[int, ...], row_blocks: str | None
) -> None:
    """Also more than the sequence is long; units leave out tiles that none of their rows sees."""
    step = make_step(lengths, heads, s_q)
    plan = plan_for(step, num_parts=3, fixed_overhead=1, row_blocks=row_blocks)
    blocks = -(-heads * s_q // plan.row_tile)
    alone = blocks == 1 or row_blocks == "in_step"
    assert plan.unit_rows == (blocks * plan.row_tile if alone else plan.row_tile)
    assert len(plan.units) == (0 if alone else blocks * len(lengths))
    tiles = (plan.work_items[:, 2] - plan.work_items[:, 1])[: int(plan.part_begin[-1])].sum()
    whole = sum(-(-n // 64) for n in lengths) * (1 if alone else blocks)
    assert tiles == whole if alone else tiles < whole
    out, lse = snapmla.decode(
        step.q, step.cache, step.block_table, step.cache_seqlens, softmax_scale=SCALE, plan=plan
    )
    assert_right(step, out, lse)


# ---------------------------------------------------------------------------- ragged queries


RAGGED_LENGTHS, RAGGED_TOKENS, RAGGED_HEADS = (65, 1, 63, 0, 70), (2, 1, 0, 1, 4), 5


@dataclasses.dataclass
class Ragged:
    """A step of requests with different numbers of query tokens; room for three more."""

    step: Step
    q: torch.Tensor  # (total_q, h, 576) bfloat16
    begin: torch.Tensor

    @staticmethod
    def make(lengths: tuple[int, ...] = RAGGED_LENGTHS) -> Ragged:
        step = make_step(lengths, 1, 1)
        q = torch.randn(sum(RAGGED_TOKENS) + 3, RAGGED_HEADS, 576).bfloat16()
        begin = torch.tensor([0, *itertools.accumulate(RAGGED_TOKENS)], dtype=torch.int32)
        return Ragged(step, q, begin)

    def plan(self, **options: Any) -> snapmla.DecodePlan:
        given: dict[str, Any] = {"cu_seqlens_q": self.begin, "total_q": len(self.q), **options}
        return snapmla.plan_decode(
            self.step.cache_seqlens, RAGGED_HEADS, page_size=64,
            max_pages=self.step.block_table.shape[1], **given,
        )  # fmt: skip

    def decode(
        self, plan: snapmla.DecodePlan, q: snapmla.QuantizedQuery | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = self.step
        q = snapmla.quantize_q(self.q[..., :512], self.q[..., 512:]) if q is None else q
        return snapmla.decode(
            q, step.cache, step.block_table, step.cache_seqlens, softmax_scale=SCALE, plan=plan,
            **options,
        )  # fmt: skip

    def assert_right(
        self, out: torch.Tensor, lse: torch.Tensor, q: snapmla.QuantizedQuery, **rule: Any
    ) -> None:
        step = self.step
        errors = selfcheck.decode_errors(
            out, lse, q, step.cache, step.block_table, step.cache_seqlens, SCALE,
            cu_seqlens_q=self.begin, **rule,
        )  # fmt: skip
        assert errors.right, str(errors)


@pytest.mark.parametrize("name", ["block_table", "cache_seqlens"])
def test_results_over_the_tables_are_refused(name: str) -> None:
    """Also of a call that is like the last but for that."""
    arguments = decode_arguments()
    held, lse = arguments[name], arguments["lse"]
    memory = torch.zeros(max(held.numel(), lse.numel()))
    arguments[name] = memory.view(torch.int32)[: held.numel()].view(held.shape).copy_(held)
    over = memory[: lse.numel()].view(lse.shape)
    words = f"lse: expected memory apart from {name}, got tensors that overlap"
    for given in (over, lse, lse, lse, over):
        if given is lse:
            snapmla.decode(**arguments)
        else:
            with pytest.raises(ValueError, match=words):
                snapmla.decode(**{**arguments, "lse": given})


def test_memory_that_changes_in_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By calls that are like the last but for that."""
    arguments = decode_arguments()
    without_kernels(monkeypatch, arguments["plan"])
    for _ in range(3):
        snapmla.decode(**arguments)
    table = arguments["block_table"]
    whole = table.data
    table.data = whole[:, 1:].contiguous()
    with pytest.raises(ValueError, match="^block_table: expected a width of"):
        snapmla.decode(**arguments)
    table.data = whole
    snapmla.decode(**arguments)
    cache = arguments["cache"]
    for part in (cache.content, cache.rope, cache.scale):
        moved = part.data
        part.data = moved.clone()
        with pytest.raises(ValueError, match="^cache: expected memory where it was, got a storage"):
            snapmla.decode(**arguments)
        part.data = moved
        snapmla.decode(**arguments)


def test_content_that_moved_before_the_first_call() -> None:
    """Kernels read the bytes that it was over when the cache was made."""
    for arguments in (decode_arguments(), decode_rows_arguments()):
        cache = arguments["cache"]
        cache.content.data = cache.content.data.clone()
        with pytest.raises(ValueError, match="^cache: expected memory where it was, got a storage"):
            snapmla.decode(**arguments)


# what is freed, as the message calls it, and whether the host sees it before every launch
FREED: list[tuple[str, Callable[[dict[str, Any]], torch.Tensor], bool]] = [
    ("cache", lambda call: call["cache"].content, True),
    ("cache", lambda call: call["cache"].rope, True),
    ("cache", lambda call: call["cache"].scale, True),
    ("q", lambda call: call["q"].nope, True),
    ("q", lambda call: call["q"].rope, False),
    ("q", lambda call: call["q"].scale, False),
    ("plan", lambda call: call["plan"].o_accum, True),
    ("plan", lambda call: call["plan"].work_items, False),
    ("out", lambda call: call["out"], True),
    ("lse", lambda call: call["lse"], True),
    ("block_table", lambda call: call["block_table"], False),
    ("cache_seqlens", lambda call: call["cache_seqlens"], False),
]


@pytest.mark.parametrize(("name", "part", "seen"), FREED)
def test_memory_that_was_freed(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    part: Callable[[dict[str, Any]], torch.Tensor],
    seen: bool,
) -> None:
    """By a first call, one like the last, and one of other options; if not before the launch, then
    by what the launch says."""
    words = f"^{name}: expected memory, got a storage that was freed"
    for calls in (0, 3):
        call = decode_arguments()
        without_kernels(monkeypatch, call["plan"])
        for _ in range(calls):
            snapmla.decode(**call)
        if not seen:
            monkeypatch.undo()
        part(call).untyped_storage().resize_(0)
        for base in ("e", "2"):
            with pytest.raises(ValueError, match=words):
                snapmla.decode(**{**call, "lse_base": base})


@pytest.mark.parametrize("name", ["block_table", "cache_seqlens"])
def test_a_known_table_that_becomes_its_opposite(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its identity and its shape stay; by a call like the last, and by one of another kind."""
    for calls in (1, 3):
        call = decode_arguments()
        without_kernels(monkeypatch, call["plan"])
        for _ in range(calls):
            snapmla.decode(**call)
        table = call[name]
        table.data = torch._neg_view(-table)
        for base in ("e", "2"):
            with pytest.raises(ValueError, match=f"^{name}: expected values as memory holds them"):
                snapmla.decode(**{**call, "lse_base": base})
        table.data = table.resolve_neg()
        snapmla.decode(**call)


def test_ragged_results_that_moved_in_place() -> None:
    ragged = Ragged.make()
    plan = ragged.plan(num_parts=5, fixed_overhead=0, row_tile=16)
    total, heads = ragged.q.shape[:2]
    out, lse = torch.full((total, heads, 512), 7.0), torch.full((heads, total), 7.0)
    ragged.decode(plan, out=out, lse=lse)
    want = out.clone()
    out.data, lse.data = torch.full_like(out, 7), torch.full_like(lse, 7)
    assert same_bits(ragged.decode(plan, out=out, lse=lse)[0], want)


def test_ragged_queries() -> None:
    """Also of no token; another step of the same room, in place; rows of nobody stay."""
    ragged = Ragged.make()
    plan = ragged.plan(num_parts=5, fixed_overhead=0, row_tile=16)
    assert int(plan.split_begin[-1]) > 0, "the case should exercise splits"
    q = snapmla.quantize_q(ragged.q[..., :512], ragged.q[..., 512:], "token")
    assert q.granularity == "token" and q.ragged and q.batch is None and q.s_q is None
    total, heads = ragged.q.shape[:2]
    out, lse = torch.full((total, heads, 512), 7.0), torch.full((heads, total), 7.0)
    for tokens in (RAGGED_TOKENS, (0, 3, 7, 1, 0), (0, 0, 0, 0, 0)):
        ragged.begin = torch.tensor([0, *itertools.accumulate(tokens)], dtype=torch.int32)
        plan.update_(ragged.step.cache_seqlens, ragged.begin)
        out.fill_(7.0), lse.fill_(7.0)
        assert ragged.decode(plan, q, out=out, lse=lse)[0] is out
        used = sum(tokens)
        assert (out[used:] == 7).all() and (lse[:, used:] == 7).all()
        if used:
            ragged.assert_right(out, lse, q)


def test_ragged_queries_are_each_requests_own() -> None:
    """With fixed splits the same bits alone, and as a request of so many query tokens."""
    ragged = Ragged.make()
    options: dict[str, Any] = {"fixed_split_tokens": 64, "row_tile": 16}
    out, lse = ragged.decode(ragged.plan(**options))
    begin = ragged.begin.tolist()
    for i, n in enumerate(RAGGED_TOKENS):
        if n < 2:
            continue
        at, own = slice(begin[i], begin[i + 1]), slice(i, i + 1)
        table, lengths = ragged.step.block_table[own], ragged.step.cache_seqlens[own]
        shape = {"page_size": 64, "max_pages": table.shape[1], **options}
        ends = torch.tensor([0, n], dtype=torch.int32)
        packed = snapmla.plan_decode(lengths, RAGGED_HEADS, cu_seqlens_q=ends, total_q=n, **shape)
        even = snapmla.plan_decode(lengths, RAGGED_HEADS, n, **shape)
        for plan, q in ((packed, ragged.q[at]), (even, ragged.q[None, at])):
            query = snapmla.quantize_q(q[..., :512], q[..., 512:])
            alone, alone_lse = snapmla.decode(
                query, ragged.step.cache, table, lengths, softmax_scale=SCALE, plan=plan
            )
            assert same_bits(alone.view(n, RAGGED_HEADS, 512), out[at])
            assert same_bits(alone_lse.view(RAGGED_HEADS, n), lse[:, at])


def test_row_seqlens() -> None:
    """As the causal rule has them: the same bits; else as many as they say, none among them.

    With two terms of P, too.
    """
    ragged = Ragged.make()
    lengths, begin = ragged.step.cache_seqlens.tolist(), ragged.begin.tolist()
    by_rule = [
        n - (end - 1 - t)
        for n, (first, end) in zip(lengths, itertools.pairwise(begin), strict=True)
        for t in range(first, end)
    ]
    odd = [0, 70, 1, -5, 64, 2**31 - 1, -(2**31), 65]
    q = snapmla.quantize_q(ragged.q[..., :512], ragged.q[..., 512:])
    shape: dict[str, Any] = {"num_parts": 2, "fixed_overhead": 1, "row_tile": 16}
    want, want_lse = ragged.decode(ragged.plan(**shape), q)
    used = begin[-1]
    rows = torch.tensor([*by_rule, 5, 5, 5], dtype=torch.int32)
    plan = ragged.plan(row_seqlens=rows, **shape)
    out, lse = ragged.decode(plan, q, causal=False)  # which is of no effect
    assert same_bits(out[:used], want[:used]) and same_bits(lse[:, :used], want_lse[:, :used])
    rows[:used] = torch.tensor(odd)
    plan.update_(ragged.step.cache_seqlens, ragged.begin, rows)
    out, lse = ragged.decode(plan, q)
    ragged.assert_right(out, lse, q, row_seqlens=rows)
    assert (out[0] == 0).all() and torch.isneginf(lse[:, [0, 3]]).all()
    precise = ragged.plan(row_seqlens=rows, accuracy="high", **shape)
    assert (plan.pipeline, precise.pipeline) == ("etap", "f16")
    out, lse = ragged.decode(precise, q, out_dtype=torch.float32)
    ragged.assert_right(out, lse, q, row_seqlens=rows, config=MIMIC_F16)


def test_row_seqlens_of_an_even_step() -> None:
    step = make_step((70, 3), 4, 4)
    rows = torch.tensor([[64, 1, 70, 0], [3, 2, 1, 3]], dtype=torch.int32)
    out, lse = snapmla.decode(
        step.q, step.cache, step.block_table, step.cache_seqlens, softmax_scale=SCALE,
        plan=plan_for(step, row_seqlens=rows),
    )  # fmt: skip
    assert_right(step, out, lse, row_seqlens=rows)


@pytest.mark.parametrize("begin", [[-3, 2, 2**31 - 1, 0, 9, 9], [11, 0, 11, 0, 11, 0]])
def test_garbage_offsets_stay_inside(begin: list[int]) -> None:
    """Whatever they are, nothing outside of the arguments is read or written, and calls end."""
    ragged = Ragged.make((65, 1, 3, 0, 7))
    ragged.begin = torch.tensor(begin, dtype=torch.int32)
    plan = ragged.plan(num_parts=2, row_tile=16)
    with softgpu.using(softgpu.Options(hazards="collect")):
        out, _ = ragged.decode(plan)
    assert out.shape == (11, RAGGED_HEADS, 512)


def test_ragged_queries_need_their_plan() -> None:
    ragged = Ragged.make()
    q = snapmla.quantize_q(ragged.q[..., :512], ragged.q[..., 512:])
    with pytest.raises(ValueError, match=r"^plan: expected one made with cu_seqlens_q, beside rag"):
        ragged.decode(None, q)  # type: ignore[arg-type]
    plan = ragged.plan()
    even = snapmla.quantize_q(ragged.q[None, :5, :, :512], ragged.q[None, :5, :, 512:])
    with pytest.raises(ValueError, match=r"^block_table: expected shape \(1, width\)"):
        ragged.decode(plan, even)
    even = make_step(RAGGED_LENGTHS, RAGGED_HEADS, 1).q
    with pytest.raises(ValueError, match=r"^plan: expected one made for \(b, s_q, num_heads, page"):
        ragged.decode(plan, even)
    short = snapmla.quantize_q(ragged.q[:9, :, :512], ragged.q[:9, :, 512:])
    with pytest.raises(ValueError, match=r"\(total_q, num_heads, page_size\) = \(9, 5, 64\), got"):
        ragged.decode(plan, short)
    with pytest.raises(ValueError, match=r"^lse: expected shape \(5, 11\), got \(11, 5\)"):
        ragged.decode(plan, q, lse=torch.zeros(11, 5))


def test_a_trimmed_plan_is_causal() -> None:
    """Its work list may lack tiles; a plan that leaves none out serves both."""
    step = make_step((70, 3), 4, 4)
    arguments = (step.q, step.cache, step.block_table, step.cache_seqlens)
    for call in (
        lambda plan: snapmla.decode(*arguments, softmax_scale=SCALE, plan=plan, causal=False),
        lambda plan: snapmla.decode(*arguments, softmax_scale=1, plan=plan, causal=0),
    ):
        with pytest.raises(
            ValueError, match=r"^causal: .*\(plan_decode\(..., causal=False\) serves"
        ):
            call(plan_for(step))
    plan = plan_for(step, causal=False)
    for causal in (True, False):
        out, lse = snapmla.decode(*arguments, softmax_scale=SCALE, plan=plan, causal=causal)
        assert_right(step, out, lse, causal=causal)
    one = make_step((70, 3), 4, 1)  # one query token: there is nothing to hide
    out, lse = snapmla.decode(
        one.q, one.cache, one.block_table, one.cache_seqlens, softmax_scale=SCALE,
        plan=plan_for(one), causal=False,
    )  # fmt: skip
    assert_right(one, out, lse)


def test_without_a_plan_and_not_causal() -> None:
    step = make_step((70, 3), 4, 4)
    out, lse = snapmla.decode(
        step.q, step.cache, step.block_table, step.cache_seqlens, softmax_scale=SCALE, causal=False
    )
    assert_right(step, out, lse, causal=False)
    causal, _ = snapmla.decode(
        step.q, step.cache, step.block_table, step.cache_seqlens, softmax_scale=SCALE
    )
    assert torch.equal(causal[:, 3], out[:, 3]) and not torch.equal(causal[:, 0], out[:, 0])


def test_lse_base_and_empty_rows() -> None:
    step = make_step((2, 0), 4, 4)  # causal: the first two query tokens of sequence 0 see nothing
    run = {"softmax_scale": SCALE, "plan": plan_for(step)}
    arguments = (step.q, step.cache, step.block_table, step.cache_seqlens)
    out, natural = snapmla.decode(*arguments, **run)  # type: ignore[arg-type]
    _, base2 = snapmla.decode(*arguments, **run, lse_base="2", empty_lse="+inf")  # type: ignore[arg-type]
    empty = torch.isneginf(natural)
    assert empty[0, :, :2].all() and not empty[0, :, 2:].any() and empty[1].all()
    assert torch.isposinf(base2[empty]).all()
    torch.testing.assert_close(base2[~empty] * math.log(2.0), natural[~empty])
    assert (out.transpose(1, 2)[empty] == 0).all()


def test_unsplit_and_split_agree() -> None:
    step = make_step((300, 40), 8, 1)
    results = []
    for parts in (1, 4):
        plan = plan_for(step, num_parts=parts, fixed_overhead=0)
        assert plan.may_split == (parts > 1)
        results.append(
            snapmla.decode(
                step.q, step.cache, step.block_table, step.cache_seqlens,
                softmax_scale=SCALE, plan=plan, out_dtype=torch.float32,
            )
        )  # fmt: skip
    # Pieces are fp16, whole sequences are not: half a step is at most 2^-11 of a value, spread
    # evenly 2^-11 / sqrt(3) in the mean.  LSEs are fp32 sums of up to four pieces in another order.
    assert metrics.relative_l2(results[1][0], results[0][0]) < 2**-11 / math.sqrt(3)
    assert metrics.lse_error(results[1][1], results[0][1]) < 1e-5


def test_empty_calls_return_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: object) -> None:
        raise AssertionError("an empty call reached a kernel")

    monkeypatch.setattr("snapmla.runtime.variants.kernel", reached)
    snapmla.runtime.variants.forget()
    cache = PagedKVCache.allocate(2, 16, device="cpu")
    empty = torch.zeros(0, dtype=torch.int32)
    snapmla.append_kv(cache, torch.zeros(0, 512), torch.zeros(0, 64), empty)
    q = snapmla.quantize_q(torch.zeros(0, 1, 4, 512), torch.zeros(0, 1, 4, 64))
    table = torch.zeros((0, 3), dtype=torch.int32)
    plan = snapmla.plan_decode(empty, 4, 1, page_size=16, max_pages=3)
    for given in (plan, None):
        out, lse = snapmla.decode(q, cache, table, empty, softmax_scale=SCALE, plan=given)
        assert tuple(out.shape) == (0, 1, 4, 512) and tuple(lse.shape) == (0, 4, 1)
    fetched = snapmla.fetch_dequant(cache, empty)
    assert tuple(fetched[0].shape) == (0, 512)


HEADS, WIDTH = 16, 4
NOTED = 18  # calls of a kind until one is like the last that was noted
BF16 = torch.bfloat16


def complete_call() -> dict[str, Any]:
    """Arguments of a call that is right; page 64, b 2, s_q 2."""
    cache, table, lengths = selfcheck.filled_cache((130, 70), 64)
    q = selfcheck.sample_query(2, 2, HEADS)
    return {
        "q": q,
        "cache": cache,
        "block_table": table,
        "cache_seqlens": lengths,
        "softmax_scale": SCALE,
        "plan": snapmla.plan_decode(lengths, HEADS, 2, page_size=64, max_pages=WIDTH),
        "out": torch.zeros(2, 2, HEADS, 512, dtype=BF16),
        "lse": torch.zeros(2, HEADS, 2),
    }


def test_gaps_that_the_exported_function_does_not_see() -> None:
    """s_q 1: the stride over heads is 1 as it should be, that over sequences is not."""
    cache, table, lengths = selfcheck.filled_cache((130, 70), 64)
    q = selfcheck.sample_query(2, 1, HEADS)
    plan = snapmla.plan_decode(lengths, HEADS, 1, page_size=64, max_pages=table.shape[1])
    lse = torch.zeros(HEADS, 2, 1).transpose(0, 1)
    out = torch.zeros(2, 1, HEADS, 512, dtype=BF16)
    call = {"softmax_scale": SCALE, "plan": plan, "out": out}
    snapmla.decode(q, cache, table, lengths, **call, lse=torch.zeros(2, HEADS, 1))
    with pytest.raises(ValueError, match="lse: .*contiguous"):
        snapmla.decode(q, cache, table, lengths, **call, lse=lse)


def test_objects_of_another_shape() -> None:
    call = complete_call()
    lengths = call["cache_seqlens"]
    other = snapmla.plan_decode(lengths, HEADS, 1, page_size=64, max_pages=WIDTH)
    with pytest.raises(ValueError, match=r"plan: .*\(2, 2, 16, 64\), got \(2, 1, 16, 64\)"):
        snapmla.decode(**{**call, "plan": other})
    small = snapmla.PagedKVCache.allocate(4, 32, device="cpu")
    with pytest.raises(ValueError, match="plan: "):
        snapmla.decode(**{**call, "cache": small})


def test_complete_call_takes_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    call = complete_call()

    def reached(*_: object) -> None:
        raise AssertionError("the full checks ran")

    fresh = {**call, "out": None, "lse": None, "out_dtype": torch.float32}
    for kind in (call, fresh):  # the first of its kind is checked
        snapmla.decode(**kind)
    call["out"].zero_()
    monkeypatch.setattr(attention, "checked", reached)
    out, lse = snapmla.decode(**call)
    assert out is call["out"] and lse is call["lse"] and out.abs().sum() > 0
    fresh, _ = snapmla.decode(**fresh)
    assert fresh.dtype == torch.float32
    assert torch.equal(fresh.bfloat16(), out), "the same fp32 values, rounded at the very end"


def without_kernels(monkeypatch: pytest.MonkeyPatch, plan: snapmla.DecodePlan) -> list[Any]:
    """Launches nothing; returns where calls that are like their last are noted."""
    for dtype in plan.variant.out_dtypes:
        monkeypatch.setitem(plan.variant.kernels, dtype, lambda *_: None)
    repeated, run = [], attention.run_prepared
    monkeypatch.setattr(attention, "run_prepared", lambda *a: repeated.append(a) or run(*a))
    return repeated


def test_a_repeated_call_allocates_what_a_first_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever results the calls before it were given."""
    call = complete_call()
    repeated = without_kernels(monkeypatch, call["plan"])
    wide = call["out"].float()
    kinds: list[tuple[dict[str, Any], torch.dtype]] = [
        ({"out": None}, BF16), ({"out": None, "out_dtype": torch.float32}, torch.float32),
        ({}, BF16), ({"out": wide}, torch.float32),
    ]  # fmt: skip
    for before, _ in kinds:
        for other, dtype in kinds:
            repeated.clear()
            for _ in range(NOTED):
                snapmla.decode(**{**call, **before})
            assert repeated
            out, _ = snapmla.decode(**{**call, **other})
            assert out.dtype is dtype, (before, other)


def test_kinds_of_calls_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are noted seldom; one that comes again and again is, in the end."""
    call, notes = complete_call(), []
    repeated = without_kernels(monkeypatch, call["plan"])
    note = attention.Prepared.of
    monkeypatch.setattr(attention.Prepared, "of", lambda *a: notes.append(a) or note(*a))
    for _ in range(50):
        for scale in (0.1, 0.2):
            snapmla.decode(**{**call, "softmax_scale": scale})
    assert 0 < len(notes) <= 100 // 16 + 1
    repeated.clear()
    for _ in range(NOTED):
        snapmla.decode(**{**call, "softmax_scale": 0.3})
    assert repeated


@pytest.mark.parametrize("width", [WIDTH - 1, WIDTH + 1])
def test_the_table_is_as_wide_as_planned(width: int) -> None:
    """Kernels clamp lengths by the table's own width, plans by the one they were told."""
    call = complete_call()
    table = torch.zeros(2, width, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^block_table: expected a width of {WIDTH}, .*{width}"):
        snapmla.decode(**{**call, "block_table": table})
    assert not call["out"].any()


def test_strided_block_table_is_fine() -> None:
    call = complete_call()
    out, _ = snapmla.decode(**{**call, "out": None, "lse": None})
    wide = torch.full((2, 2 * WIDTH), -1, dtype=torch.int32)
    wide[:, :WIDTH] = call["block_table"]
    snapmla.decode(**{**call, "block_table": wide[:, :WIDTH]})
    assert torch.equal(out, call["out"])


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA error 700"), ValueError("Mismatched"), TypeError("no"), KeyError(1)],
)
def test_a_failing_kernel_is_called_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """And reported as it failed, also by words that otherwise tell of a wrong argument."""
    call, calls = complete_call(), []

    def failing(*_: object) -> None:
        calls.append(1)
        raise error

    repeated = without_kernels(monkeypatch, call["plan"])
    for _ in range(NOTED):
        snapmla.decode(**call)
    assert repeated
    PlanVariant.forget()  # the kernels that were loaded
    monkeypatch.setattr(PlanVariant, "kernel", lambda *_: failing)
    for changes in ({}, {"out": None, "lse": None}, {"pipeline": call["plan"].pipeline}):
        calls.clear()
        with pytest.raises(type(error)) as caught:
            snapmla.decode(**{**call, **changes})
        assert caught.value is error and calls == [1]
        assert error.__cause__ is None and error.__context__ is None


def test_a_fault_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The software GPU stops in the first decode grid; no other grid is started."""
    call, grids = complete_call(), []
    run = softgpu.machine.Machine.run
    monkeypatch.setattr(
        softgpu.machine.Machine, "run", lambda machine: grids.append(1) or run(machine)
    )
    with (
        softgpu.using(softgpu.Options(max_instructions=500)),
        pytest.raises(softgpu.SoftGpuError, match="^stopped after"),
    ):
        snapmla.decode(**call)
    assert grids == [1]


def test_a_kernel_that_does_not_compile_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call, asked = complete_call(), []
    monkeypatch.setattr(env, "variant_dirs", lambda: [tmp_path])

    def broken(spec: object) -> None:
        asked.append(spec)
        raise snapmla.errors.VariantError("it did not compile")

    monkeypatch.setattr(variants, "compile_variant", broken)
    monkeypatch.setattr(variants, "jit_refusal", lambda: None)
    variants.forget()
    with pytest.raises(snapmla.errors.VariantError, match="^it did not compile"):
        snapmla.decode(**call)
    variants.forget()
    assert len(asked) == 1


def test_a_stale_plan_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    call, compared = complete_call(), []
    call["plan"] = dataclasses.replace(call["plan"], check_stale=True)
    check = snapmla.DecodePlan.check
    monkeypatch.setattr(
        snapmla.DecodePlan,
        "check",
        lambda plan, lengths: compared.append(1) or check(plan, lengths),
    )
    call["cache_seqlens"] = call["cache_seqlens"] - 1
    with pytest.raises(ValueError, match=r"^plan: expected the lengths it was last updated for"):
        snapmla.decode(**call)
    assert compared == [1]


def test_a_failure_beside_a_wrong_argument_stays_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the exported function refuses is told in our words alone; a failure is the cause."""
    call = complete_call()
    words = "^q: expected memory, got a storage that was freed"

    def failing(*_: object) -> None:
        raise RuntimeError("CUDA error 700")

    def refusing(*_: object) -> None:
        raise ValueError("Mismatched")

    without_kernels(monkeypatch, call["plan"])
    for _ in range(2):
        snapmla.decode(**call)
    call["q"].rope.untyped_storage().resize_(0)  # which a known call does not see
    PlanVariant.forget()  # the kernels that were loaded
    monkeypatch.setattr(PlanVariant, "kernel", lambda *_: refusing)
    with pytest.raises(ValueError, match=words) as caught:
        snapmla.decode(**call)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    monkeypatch.setattr(PlanVariant, "kernel", lambda *_: failing)
    with pytest.raises(ValueError, match=words) as caught:
        snapmla.decode(**call)
    assert str(caught.value.__cause__) == "CUDA error 700"


def test_several_gpus_take_the_quick_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are compared then; a tensor elsewhere goes to the full checks."""
    call = complete_call()
    monkeypatch.setattr(attention.launch, "several_gpus", lambda: True)
    checked = []
    full = attention.checked
    monkeypatch.setattr(attention, "checked", lambda *a, **b: checked.append(1) or full(*a, **b))
    snapmla.decode(**call)
    checked.clear()
    snapmla.decode(**call)
    assert not checked and call["out"].abs().sum() > 0
    with pytest.raises(ValueError, match="lse: expected a tensor on cpu, got meta"):
        snapmla.decode(**{**call, "lse": call["lse"].to("meta")})
    assert checked
