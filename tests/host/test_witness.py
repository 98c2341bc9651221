"""Plans that are stale: what a call's own offsets and limits, and ``check_stale``, make of them.

The caches of requests hold a number each, so that a row says whose tokens it saw.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import snapmla
from snapmla import PagedKVCache
from snapmla.dense import DecodePlan
from tests.support.needs import needs_compiler

I32 = {"dtype": torch.int32}
HEADS, PAGE, WIDTH = 4, 64, 2
VALUES = (1.0, -2.0, 4.0)  # what the cache of each request holds


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, **I32)


class Step:
    """Three requests over a cache of their own values; ``dtype`` is the cache's."""

    def __init__(self, total: int = 6, dtype: Any = "fp8", kv_heads: int = 1):
        pages = WIDTH * len(VALUES)
        more = {} if dtype == "fp8" else {"num_kv_heads": kv_heads}
        self.cache = PagedKVCache.allocate(pages, PAGE, device="cpu", dtype=dtype, **more)
        values = torch.tensor(VALUES).repeat_interleave(WIDTH * PAGE).bfloat16()
        if dtype == "fp8":
            x = values[:, None].expand(-1, 576)
            slots = torch.arange(pages * PAGE, **I32)
            snapmla.append_kv(self.cache, x[:, :512].contiguous(), x[:, 512:].contiguous(), slots)
        else:
            for part in (self.cache.content, self.cache.rope):
                part.copy_(values.view(pages, PAGE, *[1] * (part.ndim - 2)).expand_as(part))
        self.table = torch.arange(pages, **I32).view(len(VALUES), WIDTH)
        self.lengths = i32(70, 40, 65)
        self.total, self.dtype, self.kv_heads = total, dtype, kv_heads
        q = torch.randn(total, HEADS, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
        self.q = snapmla.quantize_q(q[..., :512] * 0.1, q[..., 512:] * 0.1) if dtype == "fp8" else q

    def plan(self, offsets: torch.Tensor, **options: Any) -> DecodePlan:
        more = {} if self.dtype == "fp8" else {"cache_dtype": self.dtype}
        return snapmla.plan_decode(
            self.lengths, HEADS, cu_seqlens_q=offsets, total_q=self.total, page_size=PAGE,
            max_pages=WIDTH, num_kv_heads=self.kv_heads, **more, **options,
        )  # fmt: skip

    def run(self, plan: DecodePlan, **witness: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(first channel of each row, LSE of each row), (total, heads); 99: unwritten."""
        out = torch.full((self.total, HEADS, 512), 99.0).bfloat16()
        lse = torch.full((HEADS, self.total), 99.0)
        snapmla.decode(
            self.q, self.cache, self.table, self.lengths, softmax_scale=0.1, plan=plan, out=out,
            lse=lse, **witness,
        )  # fmt: skip
        assert bool(((out == out[..., :1]) | out.isnan()).all())  # a row has one value, or none
        return out[..., 0].float(), lse.T


def near(rows: torch.Tensor, value: float) -> torch.Tensor:
    """Rows that average ``value``: weights of few tokens in e4m3 add up to 1 within 4 %."""
    return (rows - value).abs() <= 0.04 * abs(value)


def expect_own(step: Step, out: torch.Tensor, lse: torch.Tensor, offsets: list[int]) -> None:
    """Rows of each request are its own value or NaN, in ``out`` and in LSE alike."""
    for i, (begin, end) in enumerate(itertools.pairwise(offsets)):
        rows = out[begin:end]
        assert bool((near(rows, VALUES[i]) | rows.isnan()).all()), (i, rows)
    assert torch.equal(out[: offsets[-1]].isnan(), lse[: offsets[-1]].isnan())


LSE = {"rtol": 0.0, "atol": 1e-5}
KINDS = [("fp8", 1), (torch.bfloat16, 1), (torch.bfloat16, 2)]
# planned offsets, the call's, query tokens that cannot be right: others of a unit may be NaN, too
MOVED = [
    ([0, 1, 4, 6], [0, 1, 4, 6], []),
    ([0, 1, 4, 6], [0, 3, 4, 6], [0, 1, 2]),
    ([0, 1, 4, 6], [0, 1, 4, 5], [4]),
    ([0, 1, 2, 3], [0, 2, 4, 6], [0, 1, 2, 3, 4, 5]),
    ([0, 0, 0, 0], [0, 2, 2, 6], [0, 1, 2, 3, 4, 5]),
    ([2, 3, 5, 6], [0, 3, 5, 6], [0, 1]),
    ([0, 2, 4, 6], [0, 0, 4, 6], [0, 1]),
    ([0, 2, 4, 6], [0, 2, 4, 4], []),
]
OFTEN = (0, 1, 4, 5)  # the others are of a kind with these


@needs_compiler
@pytest.mark.parametrize(
    "planned, own, void",
    [pytest.param(*x, marks=() if i in OFTEN else pytest.mark.whole_matrix)
     for i, x in enumerate(MOVED)],
)  # fmt: skip
def test_offsets_of_the_call(planned: list[int], own: list[int], void: list[int]) -> None:
    compare(Step(), planned, own, void)


@needs_compiler
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("planned, own, void", MOVED[1:2])
def test_offsets_over_16_bits(
    kv_heads: int, planned: list[int], own: list[int], void: list[int]
) -> None:
    compare(Step(dtype=torch.bfloat16, kv_heads=kv_heads), planned, own, void)


KERNELS = [
    ("dual_wg", 64),
    *[
        pytest.param(*other, marks=pytest.mark.whole_matrix)
        for other in [("f16", 16), ("etap", 64)]
    ],
]


@needs_compiler
@pytest.mark.parametrize("pipeline, rows", KERNELS)
def test_offsets_by_pipeline(pipeline: str, rows: int) -> None:
    compare(Step(), *MOVED[1], pipeline=pipeline, row_tile=rows)


@needs_compiler
@pytest.mark.whole_matrix
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("planned, own, void", MOVED)
def test_more_offsets_over_16_bits(
    kv_heads: int, planned: list[int], own: list[int], void: list[int]
) -> None:
    compare(Step(dtype=torch.bfloat16, kv_heads=kv_heads), planned, own, void)


def compare(
    step: Step, planned: list[int], own: list[int], void: list[int], **options: Any
) -> None:
    """A plan of ``planned`` offsets in a call with its ``own`` beside a plan of these."""
    plan = step.plan(i32(*planned), **options)
    fresh, fresh_lse = step.run(step.plan(i32(*own), **options))
    out, lse = step.run(plan, cu_seqlens_q=i32(*own))
    expect_own(step, out, lse, own)
    rows = out[: own[-1]].isnan()
    assert bool(rows[void].all())
    there = ~out[: own[-1]].isnan()
    for old, new in zip(itertools.pairwise(planned), itertools.pairwise(own), strict=True):
        assert old != new or bool(there[slice(*new)].all())  # nothing of theirs moved
    assert torch.equal(out[: own[-1]][there], fresh[: own[-1]][there])
    # and sees as much: other pieces of the work round the LSE otherwise
    torch.testing.assert_close(lse[: own[-1]][there], fresh_lse[: own[-1]][there], **LSE)
    if planned == own:
        assert torch.equal(out, fresh) and torch.equal(lse, fresh_lse)


@needs_compiler
@pytest.mark.parametrize("options", [{"fixed_split_tokens": 64}, {"num_parts": 7}])
def test_pieces_do_not_stand_either(options: dict[str, Any]) -> None:
    step = Step()
    plan = step.plan(i32(0, 1, 4, 6), **options)
    assert int(plan.split_begin[-1]) > 0
    out, lse = step.run(plan, cu_seqlens_q=i32(0, 3, 4, 6))
    assert bool(out[:3].isnan().all() & lse[:3].isnan().all())
    assert bool(near(out[4:], VALUES[2]).all())


@needs_compiler
def test_longer_sequences_than_planned() -> None:
    step = Step()
    offsets = i32(0, 1, 4, 6)
    plan = step.plan(offsets)
    step.lengths = i32(70, 100, 60)  # of the second sequence a tile is missing
    out, lse = step.run(plan, cu_seqlens_q=offsets)
    assert bool(out[1:4].isnan().all() & lse[1:4].isnan().all())
    fresh, fresh_lse = step.run(step.plan(offsets))
    for rows in (slice(1), slice(4, 6)):
        assert torch.equal(out[rows], fresh[rows])
        torch.testing.assert_close(lse[rows], fresh_lse[rows], **LSE)


@needs_compiler
def test_limits_of_the_call() -> None:
    step = Step()
    offsets, limits = i32(0, 1, 4, 6), i32(70, 10, 20, 30, 64, 65)
    plan = step.plan(offsets, row_seqlens=limits)
    own = i32(3, 30, 1, 2, 20, 65)  # no row sees more than its tiles
    want = step.run(step.plan(offsets, row_seqlens=own))
    got = step.run(plan, row_seqlens=own)
    torch.testing.assert_close(got[1], want[1], **LSE)
    assert bool((got[0] - want[0]).abs().max() <= 0.01)  # pieces round P each in its own frame
    step.lengths = i32(70, 100, 65)
    plan = step.plan(offsets, row_seqlens=limits)
    out, lse = step.run(plan, row_seqlens=i32(3, 30, 65, 2, 20, 65))  # one does
    assert bool(out[2].isnan().all())
    assert bool(near(out[4:], VALUES[2]).all()) and bool(near(out[0], VALUES[0]).all())
    assert torch.equal(out.isnan(), lse.isnan())


@needs_compiler
def test_limits_without_a_plan() -> None:
    step = Step(total=3)
    q = snapmla.QuantizedQuery(*(x.unsqueeze(1) for x in (step.q.nope, step.q.rope, step.q.scale)))
    limits = i32(1, 40, 0).view(3, 1)
    call = dict(softmax_scale=0.1)
    out, lse = snapmla.decode(q, step.cache, step.table, step.lengths, row_seqlens=limits, **call)
    plan = snapmla.plan_decode(
        step.lengths, HEADS, 1, page_size=PAGE, max_pages=WIDTH, row_seqlens=limits
    )
    want = snapmla.decode(q, step.cache, step.table, step.lengths, plan=plan, **call)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    assert bool(lse[2].isneginf().all())


def sparse_step(total: int = 6) -> tuple[Step, torch.Tensor]:
    step = Step(total)
    return step, torch.zeros(total, 64, **I32)


@needs_compiler
def test_sparse() -> None:
    """Lists are a query token's own; how many of its entries count is its request's."""
    step, indices = sparse_step()
    indices[:] = torch.tensor([0, 0, 2, 2, 4, 4]).view(6, 1) * PAGE + torch.arange(64)
    lengths, planned, own = i32(1, 64, 3), i32(0, 1, 4, 6), i32(0, 3, 4, 6)
    plan = snapmla.plan_sparse_decode(
        HEADS, topk=64, topk_length=lengths, cu_seqlens_q=planned, total_q=6
    )
    call = dict(indices=indices, softmax_scale=0.1, topk_length=lengths, plan=plan)
    fresh, fresh_lse = snapmla.decode(step.q, step.cache, **call)
    same, same_lse = snapmla.decode(step.q, step.cache, cu_seqlens_q=planned, **call)
    assert torch.equal(fresh, same) and torch.equal(fresh_lse, same_lse)
    out, lse = snapmla.decode(step.q, step.cache, cu_seqlens_q=own, **call)
    assert bool(out[:3].isnan().all() & lse[:, :3].isnan().all())
    assert torch.equal(out[3:], fresh[3:]) and torch.equal(lse[:, 3:], fresh_lse[:, 3:])


# ------------------------------------------------------------------------------ check_stale


def refused(what: str) -> Any:
    return pytest.raises(ValueError, match=rf"^plan: expected the {what} it was last updated for")


@needs_compiler
@pytest.mark.parametrize("dtype, kv_heads", KINDS)
def test_rewritten_offsets_are_noticed(dtype: Any, kv_heads: int) -> None:
    step, offsets = Step(dtype=dtype, kv_heads=kv_heads), i32(0, 1, 4, 6)
    plan = step.plan(offsets, check_stale=True)
    step.run(plan)
    offsets.copy_(i32(0, 3, 4, 6))
    with refused("cu_seqlens_q"):
        step.run(plan)
    with pytest.raises(ValueError, match=r"sequence 0 \(\[0, 1\) -> \[0, 3\)\), 1 \(\[1, 4\) -> "):
        step.run(plan)
    step.run(plan.update_(step.lengths, offsets))
    with refused("cu_seqlens_q"):
        step.run(plan, cu_seqlens_q=i32(0, 1, 4, 6))  # another tensor without ``update_``
    step.run(plan, cu_seqlens_q=offsets.clone())


@needs_compiler
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_rewritten_limits_are_noticed(kv_heads: int) -> None:
    step, offsets = Step(dtype=torch.bfloat16, kv_heads=kv_heads), i32(0, 1, 4, 5)
    limits = i32(70, 10, 20, 30, 64, 65)
    plan = step.plan(offsets, row_seqlens=limits, check_stale=True)
    step.run(plan)
    limits[5] = 1  # of no request's query token
    step.run(plan)
    limits[2] = 21
    with refused("row_seqlens"):
        step.run(plan)
    step.run(plan.update_(step.lengths, offsets, limits))
    with refused("row_seqlens"):
        step.run(plan, cu_seqlens_q=offsets, row_seqlens=limits + 1)


@needs_compiler
def test_workspaces_share_what_is_watched() -> None:
    step, offsets = Step(), i32(0, 1, 4, 6)
    plan = step.plan(offsets, check_stale=True)
    other = plan.with_workspace(plan.o_accum.clone(), plan.lse_accum.clone())
    offsets[1] = 2
    with refused("cu_seqlens_q"):
        step.run(other)


@needs_compiler
def test_rewritten_offsets_of_sparse_plans_are_noticed() -> None:
    step, indices = sparse_step()
    offsets = i32(0, 1, 4, 6)
    plan = snapmla.plan_sparse_decode(
        HEADS, topk=64, batch=3, device="cpu", cu_seqlens_q=offsets, total_q=6, check_stale=True
    )
    call = dict(indices=indices, softmax_scale=0.1, plan=plan)
    snapmla.decode(step.q, step.cache, **call)
    offsets[1] = 3
    with refused("cu_seqlens_q"):
        snapmla.decode(step.q, step.cache, **call)


@needs_compiler
def test_plan_caches_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    step, offsets = Step(), i32(0, 1, 4, 6)
    monkeypatch.setenv("SNAPMLA_CHECK_PLAN", "1")
    plans = snapmla.PlanCache(HEADS, page_size=PAGE, device="cpu")
    plan = plans.get(step.lengths, max_pages=WIDTH, cu_seqlens_q=offsets, total_q=6)
    step.run(plan)
    offsets[1] = 3
    with refused("cu_seqlens_q"):
        step.run(plan)
    step.run(plans.get(step.lengths, max_pages=WIDTH, cu_seqlens_q=offsets, total_q=6))


def test_a_witness_needs_something_to_compare() -> None:
    step, offsets = Step(), i32(0, 1, 4, 6)
    plan = step.plan(offsets)
    with pytest.raises(ValueError, match="row_seqlens: expected None: the plan has no row_seqlens"):
        step.run(plan, row_seqlens=i32(0, 0, 0, 0, 0, 0))
    with pytest.raises(ValueError, match=r"cu_seqlens_q: expected shape \(4,\)"):
        step.run(plan, cu_seqlens_q=i32(0, 1, 6))
    with pytest.raises(TypeError, match="cu_seqlens_q"):
        step.run(plan, cu_seqlens_q=offsets.long())
    even = snapmla.plan_decode(step.lengths, HEADS, 2, page_size=PAGE, max_pages=WIDTH)
    q = snapmla.QuantizedQuery(
        *(x.unflatten(0, (3, 2)) for x in (step.q.nope, step.q.rope, step.q.scale))
    )
    call = dict(softmax_scale=0.1, cu_seqlens_q=offsets)
    with pytest.raises(ValueError, match="cu_seqlens_q: expected None: the plan is for s_q = 2"):
        snapmla.decode(q, step.cache, step.table, step.lengths, plan=even, **call)
    with pytest.raises(ValueError, match="cu_seqlens_q: expected None without a plan"):
        snapmla.decode(q, step.cache, step.table, step.lengths, **call)
