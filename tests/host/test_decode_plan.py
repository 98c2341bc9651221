"""The plan object: where it may split, other workspaces, stale plans, copies, ``explain``.

What runs, runs the compiled kernels on the software GPU.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import snapmla
from snapmla.dense import partial_rows, unit_capacity
from snapmla.runtime import launch
from snapmla.testing import selfcheck
from snapmla.testing.reference_plan import Queries, plan_reference
from tests.support.bits import same_bits
from tests.support.families import with_format
from tests.support.needs import needs_compiler
from tests.support.pool import Pool
from tests.support.steps import SCALE, assert_right, make_step, plan_for

# ---------------------------------------------------------------------------- edges of a split


SPLITS = {
    "balanced": {"num_parts": 2, "fixed_overhead": 0},
    "fixed64": {"fixed_split_tokens": 64},
    "fixed128": {"fixed_split_tokens": 128},
}


@needs_compiler
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("tokens", [64, 65, 128, 129])
def test_a_table_at_the_edge_of_a_split(tokens: int, splits: str) -> None:
    """One token more than a piece holds: there are two, and what they wrote must be merged."""
    options = SPLITS[splits]
    cache, table, lengths = selfcheck.filled_cache((tokens,), 16)
    table = table[:, :-1].contiguous()  # no page wider than the sequence is long
    q = selfcheck.sample_query(1, 1, 8)
    plan = snapmla.plan_decode(
        lengths, 8, 1, page_size=16, max_pages=table.shape[1], **options,  # type: ignore[arg-type]
    )  # fmt: skip
    out, lse = torch.full((1, 1, 8, 512), math.nan), torch.full((1, 8, 1), math.nan)
    snapmla.decode(q, cache, table, lengths, softmax_scale=SCALE, plan=plan, out=out, lse=lse)
    errors = selfcheck.decode_errors(out, lse, q, cache, table, lengths, SCALE)
    assert errors.right, str(errors)
    pieces = int(plan.split_begin[-1])
    assert (pieces > 0) == (tokens > options.get("fixed_split_tokens", 64)) == plan.may_split


@needs_compiler
def test_another_workspace() -> None:
    """A plan over another workspace gives the same bits, and leaves the first one alone."""
    cache, table, lengths = selfcheck.filled_cache((130,), 64)
    q = selfcheck.sample_query(1, 1, 8)
    plan = snapmla.plan_decode(
        lengths, 8, 1, page_size=64, max_pages=table.shape[1], num_parts=2, fixed_overhead=0
    )
    assert int(plan.split_begin[-1]) > 0

    def run(plan: snapmla.DecodePlan) -> torch.Tensor:
        return snapmla.decode(q, cache, table, lengths, softmax_scale=SCALE, plan=plan)[0]

    want = run(plan)
    plan.o_accum.fill_(math.nan)
    plan.lse_accum.fill_(math.nan)
    twin = plan.with_workspace(torch.zeros_like(plan.o_accum), torch.zeros_like(plan.lse_accum))
    assert same_bits(run(twin), want)
    assert plan.o_accum.isnan().all() and plan.lse_accum.isnan().all()


@needs_compiler
def test_a_workspace_over_other_tensors() -> None:
    """Refused over the plan's tables and where its two tensors overlap; side by side is fine."""
    lengths = torch.tensor([60, 40], dtype=torch.int32)
    plan = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=2, num_parts=5)
    o_size, lse_size = plan.o_accum.nbytes, plan.lse_accum.nbytes
    memory = torch.zeros(o_size + lse_size, dtype=torch.uint8)

    def o_at(begin: int) -> torch.Tensor:
        return memory[begin : begin + o_size].view(torch.float16).view(plan.o_accum.shape)

    def lse_at(begin: int) -> torch.Tensor:
        return memory[begin : begin + lse_size].view(torch.float32).view(plan.lse_accum.shape)

    plan.with_workspace(o_at(0), lse_at(o_size))
    plan.with_workspace(o_at(lse_size), lse_at(0))
    with pytest.raises(ValueError, match="^o_accum: expected memory apart from lse_accum, got ten"):
        plan.with_workspace(o_at(0), lse_at(o_size - 16))
    own = dataclasses.replace(plan, work_items=lse_at(0).view(torch.int32).view(-1)[:56].view(7, 8))
    with pytest.raises(ValueError, match="^lse_accum: expected memory apart from plan.work_items,"):
        own.with_workspace(plan.o_accum, lse_at(0))
    with pytest.raises(ValueError, match="^o_accum: expected memory apart from plan.work_items, "):
        own.with_workspace(o_at(0), plan.lse_accum)


@needs_compiler
def test_a_plan_whose_tables_were_freed() -> None:
    lengths = torch.tensor([60, 40], dtype=torch.int32)
    plan = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=2)
    plan.update_(lengths)
    plan.split_begin.untyped_storage().resize_(0)
    for now in (lengths, lengths.clone()):
        with pytest.raises(
            ValueError, match="^plan: expected memory, got a storage that was freed"
        ):
            plan.update_(now)


# ---------------------------------------------------------------------------- stale plans


@needs_compiler
def test_stale_plan_is_caught() -> None:
    pool = Pool()
    lengths = pool.lengths.clone()
    plan = snapmla.plan_decode(
        lengths, pool.HEADS, 1, page_size=64, max_pages=pool.table.shape[1], check_stale=True
    )

    def run() -> None:
        snapmla.decode(pool.q, pool.cache, pool.table, lengths, softmax_scale=SCALE, plan=plan)

    run()
    lengths[3] += 1  # the same number of tiles: nothing else would notice
    lengths[1] -= 2
    with pytest.raises(ValueError, match=r"plan: .*sequence 1 \(64 -> 62\), 3 \(190 -> 191\)"):
        run()
    plan.update_(lengths)
    run()


@needs_compiler
def test_stale_check_is_off_by_default_and_switched_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = torch.tensor([5] * 12, dtype=torch.int32)

    def plan() -> snapmla.DecodePlan:
        return snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=2)

    assert not plan().check_stale
    monkeypatch.setenv("SNAPMLA_CHECK_PLAN", "1")
    assert plan().check_stale
    with pytest.raises(ValueError, match=r"7 \(5 -> 6\), 4 more.*plan.update_"):
        plan().check(lengths + 1)


# ---------------------------------------------------------------------------- explain


@needs_compiler
def test_explain_says_who_does_what() -> None:
    lengths = torch.tensor([200, 0, 64, 500], dtype=torch.int32)
    plan = snapmla.plan_decode(
        lengths, 16, 2, page_size=64, max_pages=4, num_parts=3, fixed_overhead=1
    )
    text = plan.explain()
    assert "4 sequences, 16 heads x 2 query tokens, pipeline etap, row tile 32" in text
    assert "sequence 1: 0 tokens, part" in text and "written directly" in text
    assert "sequence 3: 500 tokens (clamped to 256)" in text
    want = plan_reference([200, 0, 64, 500], 3, 64, 1, 256)
    for number, (x, y) in enumerate(itertools.pairwise(want.part_begin)):
        line = next(s for s in text.splitlines() if s.startswith(f"  part {number}:"))
        for batch, begin, end, slot, *_ in want.work_items[x:y]:
            piece = f"sequence {batch} tiles {begin}..{end}"
            assert piece + (f" -> slot {slot}" if slot >= 0 else "") in line
    assert "... and 2 more sequences" in plan.explain(limit=2)
    fixed = snapmla.plan_decode(
        lengths, 16, 2, page_size=64, max_pages=4, fixed_split_tokens=128
    ).explain()
    assert "cut after each 128 tokens" in fixed


@needs_compiler
@pytest.mark.parametrize(
    ("limit", "error", "text"),
    [(-1, ValueError, "0 or more, got -1"), ("3", TypeError, "an int, got str")],
)
def test_explain_checks_its_limit(limit: object, error: type[Exception], text: str) -> None:
    plan = snapmla.plan_decode(torch.ones(2, dtype=torch.int32), 16, 1, page_size=64, max_pages=2)
    with pytest.raises(error, match=f"^limit: expected {text}"):
        plan.explain(limit)  # type: ignore[arg-type]


def test_room_for_units() -> None:
    """Of even queries as many as there are; of ragged ones a short one for each sequence."""
    assert unit_capacity(3, 5, 15, 16, 64) == 3 * 2 and unit_capacity(3, 5, 15, 16, 80) == 3
    assert unit_capacity(3, None, 15, 16, 64) == 3 + 3 and unit_capacity(3, None, 0, 16, 64) == 3


@needs_compiler
def test_a_plan_that_may_lack_tiles() -> None:
    lengths, shape = torch.tensor([70, 200], dtype=torch.int32), {"page_size": 64, "max_pages": 4}
    rows = torch.ones(2, 2, dtype=torch.int32)
    assert snapmla.plan_decode(lengths, 8, 2, **shape).trims
    assert not snapmla.plan_decode(lengths, 8, 1, **shape).trims
    assert not snapmla.plan_decode(lengths, 8, 2, causal=False, **shape).trims
    assert not snapmla.plan_decode(lengths, 8, 2, row_seqlens=rows, **shape).trims


@needs_compiler
def test_explain_says_what_units_are() -> None:
    """Also that a sequence asks nothing, and who goes by what its query tokens see."""
    lengths = torch.tensor([70, 200], dtype=torch.int32)
    shape = {"page_size": 64, "max_pages": 4, "num_parts": 3, "row_tile": 16}
    even = snapmla.plan_decode(lengths, 8, 5, row_blocks="balanced", **shape)  # type: ignore[arg-type]
    text = even.explain()
    assert "2 sequences, 8 heads x 5 query tokens" in text
    assert "6 units of 16 query rows, each scheduled for itself; a sequence has up to 3" in text
    assert re.search(r"sequence 0: 70 tokens, 3 units, part.*sequence 1: 200", text, re.DOTALL)
    assert "sequence 1 rows 72..80 tiles 0..4" in text, "the last unit is a short one"
    assert "causal" not in text
    plain = snapmla.plan_decode(lengths, 8, 1, causal=False, **shape).explain()  # type: ignore[arg-type]
    assert "units" not in plain and "no tile is left out that the causal rule" in plain
    ragged = snapmla.plan_decode(
        lengths, 8, cu_seqlens_q=torch.tensor([0, 0, 3], dtype=torch.int32), total_q=6,
        row_seqlens=torch.full((6,), 9, dtype=torch.int32), row_blocks="balanced",
        **shape,  # type: ignore[arg-type]
    )  # fmt: skip
    text = ragged.explain()
    assert "8 heads x ragged query tokens, 6 at most" in text and "2 units of 16" in text
    assert "sequence 0: 70 tokens, no query tokens" in text and "as row_seqlens says" in text
    assert "tiles 0..1" in text and "tiles 0..4" not in text
    ragged.unit_begin[1] = 9
    assert re.search(r"damaged.*unit_begin\[1\] is 9, expected 0 to 5", ragged.explain(), re.DOTALL)


@needs_compiler
def test_update_wants_what_the_plan_was_made_with() -> None:
    lengths, ints = torch.tensor([70, 200], dtype=torch.int32), {"dtype": torch.int32}
    begins, rows = torch.tensor([0, 1, 3], **ints), torch.tensor([5, 6, 7, 8], **ints)
    plan = snapmla.plan_decode(
        lengths, 8, page_size=64, max_pages=4, cu_seqlens_q=begins, total_q=4, row_seqlens=rows
    )
    assert plan.update_(lengths, begins, rows) is plan
    for name, given, error, words in (
        ("cu_seqlens_q", (lengths, None, rows), TypeError, "a torch.Tensor, got NoneType"),
        ("row_seqlens", (lengths, begins), TypeError, "a torch.Tensor, got NoneType"),
        ("cu_seqlens_q", (lengths, begins[:2], rows), ValueError, r"shape \(3,\), got \(2,\)"),
        ("cu_seqlens_q", (lengths, begins.long(), rows), TypeError, "dtype int32, got int64"),
        ("row_seqlens", (lengths, begins, rows[:3]), ValueError, r"shape \(4,\), got \(3,\)"),
        ("row_seqlens", (lengths, begins, rows.view(2, 2)),
         ValueError, r"shape \(4,\), got \(2, 2\)"),
    ):  # fmt: skip
        with pytest.raises(error, match=rf"^{name}: expected {words}"):
            plan.update_(*given)
    with pytest.raises(TypeError, match=r"^total_q: expected an int beside cu_seqlens_q, got None"):
        snapmla.plan_decode(lengths, 8, page_size=64, max_pages=4, cu_seqlens_q=begins)
    with pytest.raises(ValueError, match=r"^total_q: expected at most 536870911 query tokens"):
        snapmla.plan_decode(
            lengths, 8, page_size=64, max_pages=4, cu_seqlens_q=begins, total_q=2**28
        )


@needs_compiler
def test_copies_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments prepared for launches stay with the original, and need not be copyable."""
    monkeypatch.setattr("snapmla.dense.plan.launch_plan", lambda *_: None)
    monkeypatch.setattr("snapmla.runtime.launch.prepared", lambda *tensors: (lambda: tensors,))
    lengths = torch.tensor([200, 70], dtype=torch.int32)
    plan = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=4)
    cache = snapmla.PagedKVCache.allocate(2, 64, device="cpu")
    for value, name in ((plan, "work_items"), (cache, "content")):
        assert value.arguments is value.arguments
        twin = copy.deepcopy(value)
        assert twin.arguments is not value.arguments
        a, b = getattr(twin, name), getattr(value, name)
        assert a.data_ptr() != b.data_ptr() and torch.equal(
            a.view(torch.uint8), b.view(torch.uint8)
        )
        read = pickle.loads(pickle.dumps(value))
        assert torch.equal(getattr(read, name).view(torch.uint8), b.view(torch.uint8))
    assert twin.content_u8.data_ptr() == twin.content.data_ptr()


@needs_compiler
def test_explain_of_an_empty_batch() -> None:
    empty = torch.zeros(0, dtype=torch.int32)
    text = snapmla.plan_decode(empty, 16, 1, page_size=64, max_pages=2).explain()
    assert "0 sequences" in text and "0 items" in text


@needs_compiler
@pytest.mark.parametrize(
    ("table", "index", "value", "text"),
    [
        ("part_begin", 1, 99, r"part_begin\[1\] is 99, expected 0 to 5"),
        ("part_begin", -1, -7, r"part_begin\[3\] is -7"),
        ("part_begin", 0, 1, r"part_begin\[0\] is 1, expected 0"),
        ("split_begin", 1, 2**31 - 1, r"split_begin\[1\] is 2147483647"),
        ("work_items", (0, 0), 5, r"work_items\[0\] is of sequence 5, expected 0 to 1"),
        ("work_items", (0, 0), 1, "no item is of sequence 0"),
        ("work_items", (0, 1), -1, r"work_items\[0\] has tiles -1\.\."),
        ("work_items", (0, 3), 6, r"work_items\[0\] has slot 6, expected -1 to 5"),
        (
            "work_items",
            (0, 4),
            16,
            r"work_items\[0\] has rows 16\.\.16, expected a range within 32",
        ),
        ("work_items", (0, 5), 33, r"work_items\[0\] has rows 0\.\.33"),
    ],
)
def test_explain_says_what_is_damaged(table: str, index: object, value: int, text: str) -> None:
    lengths = torch.tensor([64, 200], dtype=torch.int32)
    plan = snapmla.plan_decode(
        lengths, 16, 1, page_size=64, max_pages=4, num_parts=3, fixed_overhead=8
    )
    assert "damaged" not in plan.explain()
    getattr(plan, table)[index] = value
    found = plan.explain()
    assert found.startswith("decode plan: its tables are damaged") and re.search(text, found), found
    assert "damaged" not in plan.update_(lengths).explain()


@needs_compiler
@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_parts": 1}, "part_begin"), ({"batch": 3}, "split_begin"),
        ({"num_heads": 64}, "split_begin"), ({"unit_rows": 64}, "o_accum"),
        ({"s_q": None, "total_q": 9}, "split_begin"),
        ({"unit_begin": torch.zeros(3, dtype=torch.int32)}, "unit_begin"),
        ({"units": torch.zeros(2, 2, dtype=torch.int32)}, "units"),
        ({"row_limits": torch.zeros(3, dtype=torch.int32)}, "row_limits"),
        ({"planned_seqlens": torch.zeros(3, dtype=torch.int32)}, "planned_seqlens"),
        ({"work_items": torch.zeros(4, 3, dtype=torch.int32)}, "work_items"),
        ({"lse_accum": torch.zeros(1, 16)}, "lse_accum"),
    ],
)  # fmt: skip
def test_parts_of_two_plans_are_refused(change: dict[str, object], name: str) -> None:
    lengths = torch.tensor([64, 200], dtype=torch.int32)
    plan = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=4, num_parts=3)
    assert dataclasses.replace(plan, check_stale=True).check_stale
    with pytest.raises(ValueError, match=rf"^plan\.{name}: expected shape .* beside its numbers"):
        dataclasses.replace(plan, **change)  # type: ignore[arg-type]


@needs_compiler
def test_repr_is_of_shapes_alone() -> None:
    """A print or a logged exception must not wait for the device, nor fill the screen."""
    lengths = torch.tensor([64, 200], dtype=torch.int32)
    plan = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=4, num_parts=3)
    cache = snapmla.PagedKVCache.allocate(2, 64, "paged", "cpu")
    query = selfcheck.sample_query(2, 1, 16)
    texts = {
        plan: "DecodePlan(work_items=int32(5, 8), part_begin=int32(4,), ",
        cache: "PagedKVCache(content=float8_e4m3fn(2, 64, 512), rope=bfloat16(2, 64, 64), "
        "scale=float32(2, 64), layout='paged')",
        query: "QuantizedQuery(nope=float8_e4m3fn(2, 1, 16, 512), rope=bfloat16(2, 1, 16, 64), "
        "scale=float32(2, 1, 16))",
    }
    for value, text in texts.items():
        assert repr(value).startswith(text) and len(repr(value)) < 600, repr(value)
    with FakeTensorMode() as mode:
        there = mode.from_tensor(plan.work_items)
    assert "int32(5, 8)" in launch._brief(there)
    on_meta = launch._brief(torch.empty(3, device="meta"))
    assert on_meta == "float32(3,) on meta"  # never a value: there is none


@needs_compiler
def test_plan_matches_its_reference_and_updates_in_place() -> None:
    step = make_step((200, 0, 64, 1, 65), 8, 1)
    plan = plan_for(step, num_parts=3, fixed_overhead=2)
    pointers = [t.data_ptr() for t in (plan.work_items, plan.part_begin, plan.split_begin)]
    capacity = plan.max_pages * plan.page_size
    for lengths in ((200, 0, 64, 1, 65), (1, 1, 1, 1, 1), (0, 0, 0, 0, 0), (9999, -3, 70, 128, 5)):
        assert plan.update_(torch.tensor(lengths, dtype=torch.int32)) is plan
        want = plan_reference(lengths, 3, 64, 2, capacity, queries=Queries(8, 1, 16))
        found = [tuple(row) for row in plan.work_items[: len(want.work_items)].tolist()]
        assert found == want.work_items
        assert plan.part_begin.tolist() == want.part_begin
        assert plan.split_begin.tolist() == want.split_begin
    assert pointers == [t.data_ptr() for t in (plan.work_items, plan.part_begin, plan.split_begin)]


@needs_compiler
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


def test_who_merges() -> None:
    """Nobody, a merge, or one that asks whether the tables fit: the exported function's number."""

    class Outside(snapmla.DecodePlan):
        _outside = True

    lengths = torch.tensor([300], dtype=torch.int32)
    for parts, merges in ((1, 0), (4, 1)):
        plan = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=5, num_parts=parts)
        values = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
        assert plan.merges == merges and Outside(**values).merges == 2


def test_partial_rows_are_the_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    with_format(monkeypatch, "bf16", partial="f32")
    found = {name: partial_rows(name) for name in ("fp8", "bf16", "f16")}
    narrow, wide = (torch.float16, 528), (torch.float32, 512)
    assert found == {"fp8": narrow, "bf16": wide, "f16": wide}
