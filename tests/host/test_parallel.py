"""``snapmla.parallel``: gloo ranks on the software GPU, and the arithmetic of turns without any.

``make prove`` has four ranks and the grid of turns and query tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import snapmla
from dsl_kernels.formats.registered import FORMATS
from snapmla import SnapMLAError
from snapmla.parallel import ContextGroup
from snapmla.parallel.sharding import Sharding
from tests.support import context_job
from tests.support.context_job import WAYS, Case
from tests.support.needs import needs_compiler
from tests.support.shards import PAGE, SCALE, own_tokens

needs_ranks = pytest.mark.skipif(not distributed.is_available(), reason="torch lacks distributed")
# rank 1 of two has nothing of the sequence of one token; nobody has anything of that of none
LENGTHS = (80, 1, 17, 0)
I32 = torch.int32


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=I32)


# ---------------------------------------------------------------- who holds what


@pytest.mark.parametrize("ranks, interleave", [(1, 1), (2, 1), (4, 16), (3, 64)])
def test_lengths_are_those_of_turns(ranks: int, interleave: int) -> None:
    counts = torch.arange(-3, 700, dtype=I32)
    total = torch.zeros_like(counts)
    for rank in range(ranks):
        sharding = Sharding(rank, ranks, interleave)
        got = sharding.lengths_(counts, torch.empty_like(counts), torch.empty_like(counts))
        want = [own_tokens(n, rank, ranks, interleave) for n in counts.tolist()]
        assert got.tolist() == want
        total += got
    assert torch.equal(total, counts.clamp(0))


def test_what_query_tokens_see() -> None:
    """Of requests with several query tokens, some of them ragged, and some longer than they are."""
    lengths, ranks, interleave = (80, 2, 17, 0, 33), 2, 16
    counts = (3, 4, 0, 2, 1)
    even = Case(lengths, 4, interleave, s_q=3)
    ragged = Case(lengths, 4, interleave, s_q=None, counts=counts)
    for rank in range(ranks):
        sharding = Sharding(rank, ranks, interleave)
        rows = torch.full((5, 3), -9, dtype=I32)
        behind = ints(2, 1, 0)
        got = sharding.rows_(ints(*lengths), behind, rows, torch.empty_like(rows))
        assert got.flatten().tolist() == even.seen(rank, ranks)
        room = 12  # more than there are query tokens
        buffers = [torch.full((room,), -9, dtype=I32) for _ in range(3)]
        cu = ragged.cu_seqlens_q
        assert cu is not None
        order = torch.arange(room, dtype=I32)
        got = sharding.ragged_rows_(ints(*lengths), cu, order, *buffers)
        assert got[: sum(counts)].tolist() == ragged.seen(rank, ranks)


@pytest.mark.parametrize("interleave", [1, 16, 64, 128])
def test_slots_are_places_of_own_tokens(interleave: int) -> None:
    """Each token has one slot, on one rank; a rank's tokens lie in order in its pages."""
    ranks, page = 3, 64
    table = torch.tensor([[5, 2, 7, 1], [0, 3, 6, 4]], dtype=I32)
    at = torch.arange(600).repeat(2)
    of = torch.arange(2).repeat_interleave(600)
    holders = torch.zeros(1200)
    for rank in range(ranks):
        got = Sharding(rank, ranks, interleave).slots(at, table, of, page)
        holders += got >= 0
        for i in range(2):
            mine = got[of == i]
            local = torch.arange(own_tokens(600, rank, ranks, interleave))
            want = table[i, local // page].long() * page + local % page
            assert torch.equal(mine[mine >= 0], want)
            assert torch.equal((mine >= 0).nonzero()[:, 0] // interleave % ranks, local * 0 + rank)
    assert torch.equal(holders, torch.ones(1200))


def test_slots_of_no_token() -> None:
    """Padding, and what is behind the block table, whose entries are not read for it."""
    sharding = Sharding(0, 2, 1)
    table = ints(4, 9).view(1, 2)
    at = torch.tensor([-1, -2, 0, 254, 255, 256, 10**6])
    got = sharding.slots(at, table, torch.zeros(7, dtype=torch.long), 64)
    assert got.tolist() == [-1, -1, 256, 9 * 64 + 63, -1, -1, -1]


@pytest.mark.parametrize("pages", [1, 2])
def test_columns_of_a_rank(pages: int) -> None:
    """Of a table of whole sequences; every page is one rank's, and all ranks' widths are equal."""
    table = torch.arange(22, dtype=I32).view(2, 11)
    found = []
    for rank in range(3):
        sharding = Sharding(rank, 3, 64 * pages)
        local = sharding.block_table(table, 64)
        count = own_tokens(11 * 64, rank, 3, 64 * pages) // 64
        found += local[0, :count].tolist()
        assert local.dtype == I32 and local.shape == (2, -(-11 // (3 * pages)) * pages)
        want = [j for j in range(11) if j // pages % 3 == rank]
        assert local[0, :count].tolist() == want
        assert local[1, :count].tolist() == [11 + j for j in want]
    assert sorted(found) == list(range(11))


# ---------------------------------------------------------------- two ranks


def different_arguments(rank: int) -> None:
    """All ranks raise, and none waits for another."""
    for given, words in (
        ({"interleave": 1 + rank}, "interleave: 1 on rank 0, 2 on rank 1"),
        ({"heads": ("gathered", "replicated")[rank]}, "heads: 'gathered' on rank 0"),
    ):
        with pytest.raises(SnapMLAError, match=words):
            ContextGroup(**{"num_heads": 4, **given})  # type: ignore[arg-type]


def parts_of_others(rank: int, method: str) -> None:
    """Partial results of any kernel: what an infinite LSE's row holds does not matter."""
    torch.manual_seed(5)
    parts, lses = torch.randn(2, 3, 2, 4, 512), torch.randn(2, 3, 4, 2)
    lses[0, 0], lses[1, 1], parts[0, 0], parts[1, 1] = torch.inf, -torch.inf, torch.nan, torch.inf
    lses[:, 2, 1] = torch.inf  # nobody has a token of these
    lses[0, 2, 2], lses[1, 2, 2] = -torch.inf, torch.inf
    parts[:, 2, :, 1:3] = torch.nan
    lses[rank, 2, 3, 1] = torch.nan  # and of these it is not known
    lses[1 - rank, 2, 3, 1] = torch.nan
    want, want_lse = snapmla.merge_states(parts, lses)
    group = ContextGroup(num_heads=4, method=method, transport=torch.float32)
    own = slice(2 * rank, 2 * rank + 2)
    got, lse = group.combine(
        parts[rank], lses[rank].mT.contiguous().mT, out=torch.full((3, 2, 2, 512), torch.nan)
    )
    wanted = want[:, :, own], want_lse[:, own]
    torch.testing.assert_close(lse, wanted[1], rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(got, wanted[0], rtol=1e-5, atol=1e-6, equal_nan=True)
    assert torch.isposinf(lse[2]).sum() == (2 if rank == 0 else 0)
    if rank == 0:
        assert not got[2, :, 1].any(), "empty rows are 0"
    # packed rows
    flat, flat_lse = group.combine(parts[rank].flatten(0, 1), lses[rank].mT.flatten(0, 1).mT)
    assert flat.dtype == torch.bfloat16 and flat_lse.shape == (2, 6)
    torch.testing.assert_close(
        flat_lse, lse.mT.flatten(0, 1).mT, rtol=1e-6, atol=1e-6, equal_nan=True
    )


def calls_of_one_rank(step: context_job.Step) -> None:
    """What needs no other rank: plans, steps of no request, and mistakes, which send nothing."""
    group = step.group("all_to_all", torch.float32)
    plan = step.plan(group)
    q_nope, q_rope = step.queries(group)
    for given, error, words in wrong_calls(step, group, plan, q_nope, q_rope):
        with pytest.raises(error, match=words):
            given()
    none = group.plan_decode(ints(), 1, page_size=PAGE, max_pages=1)
    plans = snapmla.PlanCache(4, page_size=PAGE, device="cpu")
    shape: dict[str, Any] = {"page_size": PAGE, "max_pages": step.table.shape[1], "plans": plans}
    held, again = (group.plan_decode(step.lengths, 2, **shape) for _ in range(2))
    assert held.plan is again.plan and plans.stats().pinned == 1
    assert torch.equal(held.plan.planned_seqlens, plan.cache_seqlens)
    out, lse = group.decode(
        q_nope[:0, :1], q_rope[:0, :1], step.cache, step.table[:0], none, softmax_scale=SCALE
    )
    assert out.shape == (0, 1, 2, 512) and lse.shape == (0, 2, 1)


def test_slots_of_tokens_of_no_sequence() -> None:
    """A sequence without a row in the table has no slot, as a position behind it has none."""
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    for dtype in (torch.int32, torch.int64):
        at, of = torch.tensor([5, 5, 5, 5, 200]), torch.tensor([0, 7, -1, 1, 1], dtype=dtype)
        got = Sharding(0, 1, 1).slots(at, table, of, PAGE)
        assert got.tolist() == [3 * PAGE + 5, -1, -1, 5, -1]
    assert Sharding(0, 1, 1).slots(at, table[:0], of, PAGE).tolist() == [-1] * 5


def wrong_calls(
    step: context_job.Step, group: ContextGroup, plan: Any, q_nope: Tensor, q_rope: Tensor
) -> list[tuple[Any, type[Exception], str]]:
    """Calls, what they raise, and how its words begin."""
    lengths = step.lengths
    shape: dict[str, Any] = {"page_size": PAGE, "max_pages": step.table.shape[1]}

    def decode(q: Tensor = q_nope, at: Any = plan, **results: Tensor) -> Any:
        return lambda: group.decode(
            q, q_rope, step.cache, step.table, at, softmax_scale=SCALE, **results
        )

    def make(*args: Any, **given: Any) -> Any:
        return lambda: group.plan_decode(*args, **{**shape, **given})

    small = torch.zeros(9, dtype=torch.uint8)
    plans = snapmla.PlanCache(8, page_size=PAGE, device="cpu")
    return [
        (decode(q_nope.float()), TypeError, "q_nope: expected dtype bfloat16"),
        (decode(torch.cat([q_nope] * 2, 2)), ValueError, r"q_nope: expected shape \(4, 2, 2, 512"),
        (
            decode(torch.cat([q_nope] * 2, 2)),
            ValueError,
            r"(?s)q_nope: .*\(this rank's 2 of 4 heads, or a group of heads='replicated'\)",
        ),
        (
            lambda: ContextGroup(num_heads=4, heads="replicated")._check_query(
                q_nope, q_rope, tuple(q_nope.shape[:2])
            ),
            ValueError,
            r"(?s)q_nope: .*\(all 4 heads, or a group of heads='gathered'\)",
        ),
        (decode(at=plan.plan), ValueError, "plan: expected a ContextPlan of this group"),
        (decode(out=q_nope.half()), TypeError, "out: expected dtype bfloat16 or float32"),
        (decode(lse=torch.zeros(4, 2)), ValueError, r"lse: expected shape \(4, 2, 2\)"),
        (make(lengths), ValueError, "s_q: expected one of s_q and cu_seqlens_q, got neither"),
        (make(lengths, 0), ValueError, "s_q: expected 1"),
        (make(lengths, 2, workspace=small), ValueError, r"workspace: expected \d+ bytes or more"),
        (make(lengths, 2, plans=plans), ValueError, "plans: expected one made with num_heads = 4"),
        (make(lengths, 2, plans=3), TypeError, "plans: expected a snapmla.PlanCache or None"),
        (make(lengths, 2, cache_dtype=torch.float16), ValueError, "cache_dtype: expected 'fp8' or"),
        (
            lambda: plan.update_(lengths, ints(0, 1, 2, 3, 4)),
            ValueError,
            "cu_seqlens_q: expected None",
        ),
        (lambda: plan.update_(lengths[:3]), ValueError, r"cache_seqlens: expected shape \(4,\)"),
        (lambda: group.combine(q_nope, lengths), ValueError, "part: expected shape"),
        (
            lambda: group.local_slots(lengths, step.table[:2], page_size=PAGE),
            ValueError,
            "positions: expected one for each of 2 sequences",
        ),
        (
            lambda: group.local_block_table(step.table, page_size=PAGE),
            ValueError,
            "interleave: expected a multiple of page_size = 64, got 16",
        ),
        (lambda: group.workspace_bytes(1, 2, 3), ValueError, "tokens: expected b and s_q"),
        (lambda: ContextGroup(num_heads=5), ValueError, "num_heads: expected a multiple of 2"),
        (lambda: ContextGroup(num_heads=4, method="ring"), ValueError, "method: expected one of"),
        (lambda: ContextGroup(num_heads=4, transport=torch.float16), ValueError, "transport: exp"),
        (lambda: ContextGroup(num_heads=4, heads="own"), ValueError, "heads: expected one of"),
        (lambda: ContextGroup(num_heads=4, interleave=0), ValueError, "interleave: expected 1"),
    ]


def one_rank_raises(rank: int, step: context_job.Step) -> float:
    """Seconds until the rank that did not raise ended; the other one lives on meanwhile."""
    limit = 2.0
    waiting = distributed.new_group(timeout=timedelta(seconds=limit), backend="gloo")
    group = ContextGroup(waiting, num_heads=4, interleave=step.case.interleave)
    plan = step.plan(group)
    q_nope, q_rope = step.queries(group)
    begin = time.monotonic()
    if rank == 1:
        with pytest.raises(TypeError, match="q_nope: expected dtype bfloat16"):
            group.decode(q_nope.float(), q_rope, step.cache, step.table, plan, softmax_scale=SCALE)
        distributed.barrier()  # of the default group: rank 0 comes when it has given up
    else:
        words = "rank 0 of 2: all-gather of queries did not end: another rank has raised"
        with pytest.raises(SnapMLAError, match=words):
            group.decode(q_nope, q_rope, step.cache, step.table, plan, softmax_scale=SCALE)
        distributed.barrier()
    return time.monotonic() - begin


EVERYDAY = Case(LENGTHS, 4, 16, s_q=2, replicated=True)


def two_ranks(rank: int, store: str) -> None:
    """One process: all that two ranks are needed for."""
    context_job.begin(rank, 2, store)
    try:
        different_arguments(rank)
        for method in ("all_to_all", "reduce_scatter"):
            parts_of_others(rank, method)
        step = context_job.Step(EVERYDAY, rank, 2, "cpu")
        calls_of_one_rank(step)
        found = context_job.decode_case(EVERYDAY, rank, 2, "cpu")
        took = one_rank_raises(rank, step)
        torch.save((found, took), f"{store}.{rank}")
    finally:
        distributed.destroy_process_group()


@needs_compiler
@needs_ranks
def test_two_ranks(tmp_path: Path) -> None:
    """Every way of exchange is within decode's gates, and methods agree; errors end, and are told.

    A row that sees no token anywhere is 0 and -inf.
    """
    torch.multiprocessing.spawn(two_ranks, (str(tmp_path / "store"),), nprocs=2)
    (first, took), (second, _) = (torch.load(tmp_path / f"store.{rank}") for rank in range(2))
    print("\n".join(context_job.judge(EVERYDAY, 2, [first, second])))
    assert len(first) == len(WAYS) + 1
    assert 1.0 < took < 60.0, "the group's timeout was 2 s"


# ---------------------------------------------------------------- the grid

CASES = (
    *(Case(LENGTHS, 8, turn, s_q) for turn in (1, 16, 64) for s_q in (1, 2)),
    Case((130, 1, 70, 3, 0), 8, 16, s_q=None, counts=(2, 1, 0, 3, 1)),
    Case((130, 1, 70, 3), 8, 64, s_q=2, ways=WAYS[:1], options={"fixed_split_tokens": 64}),
    Case((90,), 8, 16, ways=WAYS[:1], replicated=True),
)


def decode_all(rank: int, ranks: int, store: str) -> None:
    context_job.begin(rank, ranks, store)
    try:
        print("\n".join(context_job.rows_case(rank, ranks, "cpu")))
        torch.save(
            [context_job.decode_case(case, rank, ranks, "cpu") for case in CASES],
            f"{store}.{rank}",
        )
    finally:
        distributed.destroy_process_group()


@pytest.mark.whole_matrix
@needs_compiler
@needs_ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_grid(ranks: int, tmp_path: Path) -> None:
    """2 and 4 ranks, turns of 1, 16 and 64, one and two query tokens, ragged ones, a cache of 16
    bits; with four ranks and turns of 64 two shards of the longest sequence are empty."""
    torch.multiprocessing.spawn(decode_all, (ranks, str(tmp_path / "store")), nprocs=ranks)
    parts = [torch.load(tmp_path / f"store.{rank}") for rank in range(ranks)]
    for i, case in enumerate(CASES):
        print(case)
        print("\n".join(context_job.judge(case, ranks, [part[i] for part in parts])))


# ---------------------------------------------------------------- plans that are stale


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    distributed.init_process_group(
        "gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1, timeout=timedelta(minutes=5)
    )
    yield
    distributed.destroy_process_group()


RAGGED = Case((7, 4, 6), 4, 16, s_q=None, counts=(1, 3, 2))


@needs_compiler
@needs_ranks
def test_a_plan_is_compared_with_the_calls_offsets_and_the_steps_limits(alone: None) -> None:
    """Rows of another request are NaN; what each query token sees is the ``ContextPlan``'s."""
    step = context_job.Step(RAGGED, 0, 1, "cpu")
    group = step.group("all_to_all", torch.bfloat16)
    plan = step.plan(group)
    given: list[Any] = [*step.queries(group), step.cache, step.table]
    assert plan.row_seqlens is not None and plan.row_seqlens.tolist() == [7, 2, 3, 4, 5, 6]
    plan.row_seqlens[4] = 0
    moved = ints(0, 3, 4, 6)
    out, lse = group.decode(*given, plan, softmax_scale=SCALE, cu_seqlens_q=moved)
    assert out[:3].isnan().all() and lse[:, :3].isnan().all()
    assert not out[4].any() and torch.isneginf(lse[:, 4]).all()
    assert out[5].isfinite().all() and out[5].any(-1).all() and lse[:, 5].isfinite().all()
    even = group.plan_decode(step.lengths, 2, page_size=PAGE, max_pages=1)
    with pytest.raises(ValueError, match=r"cu_seqlens_q: expected None: the plan is for s_q = 2"):
        queries = (t.view(3, 2, *t.shape[1:]) for t in given[:2])
        group.decode(*queries, *given[2:], even, softmax_scale=SCALE, cu_seqlens_q=moved)


@needs_compiler
@needs_ranks
def test_a_plan_that_is_stale_is_told(alone: None) -> None:
    """With ``check_stale``: whole lengths, and offsets, that were rewritten without ``update_``."""
    step = context_job.Step(replace(RAGGED, options={"check_stale": True}), 0, 1, "cpu")
    group = step.group("all_to_all", torch.bfloat16)
    plan = step.plan(group)
    given: list[Any] = [*step.queries(group), step.cache, step.table]
    assert step.cu is not None
    old = r"(?s)plan: .*lengths it was last updated for.*in sequence 1 \(4 -> 5\)"
    for tensor, at, words in ((step.lengths, 1, old), (step.cu, 1, "cu_seqlens_q")):
        tensor[at] += 1
        with pytest.raises(ValueError, match=words):
            group.decode(*given, plan, softmax_scale=SCALE)
        tensor[at] -= 1
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        group.decode(*given, plan, softmax_scale=SCALE, cu_seqlens_q=ints(0, 2, 4, 6))


@needs_compiler
@needs_ranks
def test_caches_and_queries_of_other_formats(alone: None) -> None:
    """What does not fit is said of the caller's own arguments, before anything is sent."""
    group, lengths, table = ContextGroup(num_heads=8), ints(1), ints(0, 1).view(1, 2)
    shape: dict[str, Any] = {"page_size": PAGE, "max_pages": 2}
    named = {"bf16": torch.bfloat16, "f16": torch.float16}
    plans = {
        name: group.plan_decode(lengths, 1, cache_dtype=named.get(name, name), **shape)
        for name in ("fp8", "bf16")
    }
    joint = torch.zeros(1, 1, 8, 576, dtype=torch.bfloat16)
    for name, record in FORMATS.items():
        dtype: Any = named.get(name, name)
        if name not in plans:
            with pytest.raises(ValueError, match=r"^cache_dtype: expected 'fp8' or torch.bfloat16"):
                group.plan_decode(lengths, 1, cache_dtype=dtype, **shape)
        cache = snapmla.PagedKVCache.allocate(2, PAGE, device="cpu", dtype=dtype)
        for planned, plan in plans.items():
            if planned != name:
                words = f"^cache: expected one of format '{planned}', as plan, got '{name}' "
                with pytest.raises(ValueError, match=words):
                    group.decode(
                        joint[..., :512], joint[..., 512:], cache, table, plan, softmax_scale=SCALE
                    )
        cut, rope = record.content.count, record.rope_channels
        if (cut, rope) != (512, 64):
            parts = joint[..., :cut], joint[..., cut : cut + rope]
            with pytest.raises(ValueError, match=r"^q_(nope|rope): .*joint\[\.\.\., ") as caught:
                group.decode(*parts, cache, table, plans["fp8"], softmax_scale=SCALE)
            assert "heads" not in str(caught.value)


# ---------------------------------------------------------------- without ranks


def test_without_a_process_group() -> None:
    with pytest.raises(ValueError, match="group: expected a process group, got no torch.distrib"):
        ContextGroup(num_heads=16)
