"""The whole pipeline through the public API on the software GPU: append, quantise, plan, decode.

Every cache starts as NaN bytes in all three tensors, tables end in absurd ids, and lengths include
0 and 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

import snapmla
from codegen import toolchain
from snapmla import PagedKVCache, QuantizedQuery, metrics, reference, selfcheck
from snapmla.plan import default_num_parts
from snapmla.reference_plan import plan_reference

pytestmark = pytest.mark.skipif(not toolchain.have_compiler(), reason="needs nvidia-cutlass-dsl")
SCALE = 192**-0.5


@dataclass
class Step:
    """One decode step's inputs, made through the public API."""

    cache: PagedKVCache
    q: QuantizedQuery
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor


def make_step(
    lengths: tuple[int, ...],
    num_heads: int,
    s_q: int,
    page_size: int = 64,
    layout: str = "split",
    granularity: str = "token_head",
) -> Step:
    """Appends every token through ``append_kv`` (one call, shuffled order, some skipped slots)."""
    counts = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(counts) + 1).tolist()
    cache = selfcheck.poisoned_cache(len(order), page_size, layout)
    table = torch.full((len(lengths), max(counts) + 2), selfcheck.ABSURD_PAGE, dtype=torch.int32)
    slots: list[int] = []
    for i, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = [order.pop() for _ in range(count)]
        table[i, :count] = torch.tensor(pages, dtype=torch.int32)
        table[i, count] = -1
        slots += [pages[t // page_size] * page_size + t % page_size for t in range(n)]
    slots += [-1, -1]
    joint = torch.cat(selfcheck.sample_tokens(len(slots)), -1).bfloat16()
    mapping = torch.tensor(slots)[torch.randperm(len(slots))]
    snapmla.append_kv(cache, joint[:, :512], joint[:, 512:], mapping.int())
    q = torch.randn(len(lengths), s_q, num_heads, 576).bfloat16()
    query = snapmla.quantize_q(q[..., :512], q[..., 512:], granularity)
    return Step(cache, query, table, torch.tensor(lengths, dtype=torch.int32))


def assert_right(step: Step, out: torch.Tensor, lse: torch.Tensor, *, causal: bool = True) -> None:
    errors = selfcheck.decode_errors(
        out, lse, step.q, step.cache, step.block_table, step.cache_seqlens, SCALE, causal=causal
    )
    assert errors.right, str(errors)


def plan_for(step: Step, **options: object) -> snapmla.DecodePlan:
    return snapmla.plan_decode(
        step.cache_seqlens,
        step.q.num_heads,
        step.q.s_q,
        page_size=step.cache.page_size,
        max_pages=step.block_table.shape[1],
        **options,  # type: ignore[arg-type]
    )


PIPELINE_CASES = [
    # pipeline, heads, s_q, page size, layout, out dtype, granularity
    ("etap", 5, 3, 64, "split", torch.float32, "token_head"),
    ("etap", 8, 1, 16, "paged", torch.bfloat16, "token_head"),
    ("etap", 10, 3, 64, "paged", torch.bfloat16, "token_head"),
    ("etap", 48, 1, 64, "row640", torch.bfloat16, "token"),
    ("etap", 65, 2, 64, "split", torch.bfloat16, "token"),  # three row blocks of 64
    ("dual_wg", 16, 2, 64, "paged", torch.bfloat16, "token_head"),
    ("dual_wg", 128, 1, 64, "split", torch.bfloat16, "token"),
]
WHOLE_MATRIX_CASES = [
    ("etap", 10, 3, 16, "paged", torch.float32, "token_head"),
    ("etap", 48, 1, 32, "row640", torch.bfloat16, "token"),
    ("etap", 32, 4, 128, "split", torch.float32, "token_head"),
    ("dual_wg", 64, 1, 32, "row640", torch.float32, "token_head"),
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
    assert_right(step, out, lse)


def test_plan_matches_its_reference_and_updates_in_place() -> None:
    step = make_step((200, 0, 64, 1, 65), 8, 1)
    plan = plan_for(step, num_parts=3, fixed_overhead=2)
    pointers = [t.data_ptr() for t in (plan.work_items, plan.part_begin, plan.split_begin)]
    capacity = plan.max_pages * plan.page_size
    for lengths in ((200, 0, 64, 1, 65), (1, 1, 1, 1, 1), (0, 0, 0, 0, 0), (9999, -3, 70, 128, 5)):
        assert plan.update_(torch.tensor(lengths, dtype=torch.int32)) is plan
        want = plan_reference(lengths, 3, 64, 2, capacity)
        found = [tuple(row) for row in plan.work_items[: len(want.work_items)].tolist()]
        assert found == want.work_items
        assert plan.part_begin.tolist() == want.part_begin
        assert plan.split_begin.tolist() == want.split_begin
    assert pointers == [t.data_ptr() for t in (plan.work_items, plan.part_begin, plan.split_begin)]


def test_update_then_decode_again() -> None:
    step = make_step((130, 64, 20), 8, 2)
    plan = plan_for(step, num_parts=2, fixed_overhead=1)
    out = torch.full((3, 2, 8, 512), math.nan, dtype=torch.bfloat16)
    lse = torch.full((3, 8, 2), math.nan)
    for lengths in ((130, 64, 20), (5, 0, 1)):
        step.cache_seqlens.copy_(torch.tensor(lengths))
        plan.update_(step.cache_seqlens)
        got = snapmla.decode(
            step.q, step.cache, step.block_table, step.cache_seqlens,
            softmax_scale=SCALE, plan=plan, out=out, lse=lse,
        )  # fmt: skip
        assert got[0] is out and got[1] is lse
        assert_right(step, out, lse)


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
    # fp32 sums of up to four pieces in another order: 1.7e-7 and 9.5e-7 as measured
    assert metrics.relative_l2(results[1][0], results[0][0]) < 1e-6
    assert metrics.lse_error(results[1][1], results[0][1]) < 1e-5


def test_append_then_fetch() -> None:
    step = make_step((33, 0, 64), 4, 1, page_size=16, layout="paged")
    c_kv, k_rope = snapmla.fetch_dequant(step.cache, step.block_table, step.cache_seqlens)
    assert tuple(c_kv.shape) == (3, step.block_table.shape[1] * 16, 512)
    for i, n in enumerate((33, 0, 64)):
        t = torch.arange(n)
        page = step.block_table[i, t // 16].long()
        want = reference.dequantize_rows(
            step.cache.content[page, t % 16], step.cache.rope[page, t % 16],
            step.cache.scale[page, t % 16],
        )  # fmt: skip
        assert torch.equal(c_kv[i, :n], want[0]) and torch.equal(k_rope[i, :n], want[1])
        assert (c_kv[i, n:] == 0).all() and (k_rope[i, n:] == 0).all()
    indices = (step.block_table[2, :1] * 16 + 5).int()
    joint = torch.zeros(1, 576, dtype=torch.bfloat16)
    flat, _ = snapmla.fetch_dequant(step.cache, indices, out=joint)
    assert torch.equal(flat[0], c_kv[2, 5]) and torch.equal(joint[0, 512:], k_rope[2, 5])


def test_quantize_into_given_tensors() -> None:
    nope, rope = torch.randn(2, 1, 4, 512), torch.randn(2, 1, 4, 64)
    out = snapmla.quantize_q(nope, rope)
    again = snapmla.quantize_q(nope.half(), rope.half(), out=out)
    assert again is out
    want = reference.quantize_rows(nope.half(), rope.half())
    assert torch.equal(out.nope_u8, want[0].view(torch.uint8))
    assert torch.equal(out.scale, want[2])


def test_empty_calls_return_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: object) -> None:
        raise AssertionError("an empty call reached a kernel")

    monkeypatch.setattr("snapmla.runtime.kernel", reached)
    snapmla.runtime.forget()
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


def test_parts_fill_the_device() -> None:
    cpu = torch.device("cpu")
    assert default_num_parts(cpu, 16, 16) == 4
    assert default_num_parts(cpu, 128, 128) == 2  # a cluster of two CTAs
    assert default_num_parts(cpu, 1024, 128) == 1


def test_selfcheck_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that cannot fail is none: a wrong scale must be noticed."""
    step = make_step((70, 3), 4, 1)
    out, lse = snapmla.decode(
        step.q, step.cache, step.block_table, step.cache_seqlens, softmax_scale=1.05 * SCALE
    )
    errors = selfcheck.decode_errors(
        out, lse, step.q, step.cache, step.block_table, step.cache_seqlens, SCALE
    )
    assert not errors.right


def test_fp32_results_get_no_allowance_for_bf16() -> None:
    """Errors that FP8 P drowns: a rounding on the way, and 1.5 times the mimic's own error."""
    step = make_step((70, 3), 4, 1)
    arguments = (step.q, step.cache, step.block_table, step.cache_seqlens)
    out, lse = snapmla.decode(*arguments, softmax_scale=SCALE, out_dtype=torch.float32)
    right = selfcheck.decode_errors(out, lse, *arguments, SCALE)
    assert right.right, str(right)
    rounded = selfcheck.decode_errors(out.bfloat16().float(), lse, *arguments, SCALE)
    assert rounded.error <= rounded.allowed and rounded.apart > rounded.apart_allowed
    assert (
        not rounded.right and selfcheck.decode_errors(out.bfloat16(), lse, *arguments, SCALE).right
    )
    truth, _ = reference.mla_decode_reference(
        step.q.nope, step.q.rope, step.q.scale, step.cache.content, step.cache.rope,
        step.cache.scale, step.block_table, step.cache_seqlens, SCALE, config=reference.FP64,
    )  # fmt: skip
    for factor in (1.15, 1.5):
        worse = (truth + factor * (out.double() - truth)).float()
        found = selfcheck.decode_errors(worse, lse, *arguments, SCALE)
        assert found.error > found.allowed and not found.right
    late = selfcheck.decode_errors(out, lse + 5e-5 + right.lse_error, *arguments, SCALE)
    assert late.lse_error > late.lse_allowed and not late.right
