"""Plans: capacity, fixed splits, stale plans, copies, ``explain``.

What runs, runs the compiled kernels on the software GPU.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import pickle
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import snapmla
from dsl_kernels import registry
from dsl_kernels.dims import TOKEN_TILE
from dsl_kernels.families import fp8_decode
from dsl_kernels.spec import VariantSpec, decode_spec
from snapmla import launch
from snapmla.plan import DEFAULT_FIXED_OVERHEAD, MAX_COST, default_num_parts
from snapmla.testing import selfcheck
from snapmla.testing.reference_plan import plan_reference
from tests.support.bits import same_bits
from tests.support.needs import needs_compiler
from tests.support.steps import SCALE, assert_right, make_step, plan_for

# ---------------------------------------------------------------------------- batch-invariant


class Pool:
    """Five requests in one cache; any of them can be decoded with any others."""

    LENGTHS = (300, 64, 0, 190, 129)
    HEADS = 8

    def __init__(self) -> None:
        self.cache, self.table, self.lengths = selfcheck.filled_cache(self.LENGTHS, 64)
        self.q = selfcheck.sample_query(len(self.LENGTHS), 1, self.HEADS)

    def decode(
        self, requests: list[int], *, out_dtype: torch.dtype | None = None, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of these requests as one batch."""
        at = torch.tensor(requests)
        q = snapmla.QuantizedQuery(self.q.nope[at], self.q.rope[at], self.q.scale[at])
        table, lengths = self.table[at], self.lengths[at]
        plan = snapmla.plan_decode(
            lengths, self.HEADS, 1, page_size=64, max_pages=table.shape[1], **options,  # type: ignore[arg-type]
        )  # fmt: skip
        return snapmla.decode(
            q, self.cache, table, lengths, softmax_scale=SCALE, plan=plan, out_dtype=out_dtype
        )


@needs_compiler
@pytest.mark.parametrize("batches", [6, pytest.param(20, marks=pytest.mark.whole_matrix)])
def test_fixed_splits_are_batch_invariant(batches: int) -> None:
    pool = Pool()
    options = {"fixed_split_tokens": 128, "num_parts": 3}
    alone = [pool.decode([i], **options) for i in range(5)]
    generator = torch.Generator().manual_seed(5)
    for _ in range(batches):
        size = int(torch.randint(2, 5, (), generator=generator))
        batch = torch.randint(0, 5, (size,), generator=generator).tolist()
        out, lse = pool.decode(batch, **options)
        for row, request in enumerate(batch):
            assert same_bits(out[row], alone[request][0][0]), (batch, request)
            assert same_bits(lse[row], alone[request][1][0]), (batch, request)


@needs_compiler
def test_balanced_splits_are_not() -> None:
    """The test above can fail: without fixed splits the neighbours decide where a cut falls."""
    pool = Pool()
    options = {"num_parts": 3, "fixed_overhead": 0}
    _, alone = pool.decode([0], **options)
    _, lse = pool.decode([0, 3, 4], **options)
    assert not same_bits(lse[0], alone[0])
    torch.testing.assert_close(lse[0], alone[0])


@needs_compiler
def test_fixed_splits_agree_with_balanced() -> None:
    pool = Pool()
    everyone = list(range(5))
    out, lse = pool.decode(everyone, fixed_split_tokens=64, out_dtype=torch.float32)
    want, want_lse = pool.decode(everyone, num_parts=1, out_dtype=torch.float32)
    # Pieces are fp16, whole sequences are not: an error spread evenly over half a step, 2^-11 of a
    # value, is 2^-11 / sqrt(3) in the mean.  LSEs are fp32 sums in another order.
    # Measured: 1.5e-4 and 1.9e-6.
    assert selfcheck.metrics.relative_l2(out, want) < 2**-11 / math.sqrt(3)
    assert selfcheck.metrics.lse_error(lse, want_lse) < 1e-5


@needs_compiler
def test_fixed_split_capacity() -> None:
    lengths = torch.tensor([1000, 70], dtype=torch.int32)
    plan = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=20, fixed_split_tokens=256)
    assert tuple(plan.work_items.shape) == (10, 4)  # 2 sequences of at most 5 pieces
    assert tuple(plan.o_accum.shape) == (10, 16, 528)
    assert plan.workspace_bytes == 10 * 16 * (1056 + 4)
    assert plan.may_split and int(plan.split_begin[-1]) == 4
    whole = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=20, fixed_split_tokens=1280)
    assert not whole.may_split and tuple(whole.o_accum.shape) == (1, 16, 528)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (
            100,
            ValueError,
            "fixed_split_tokens: .* multiple of 64, got 100 .*nearest is 128",
        ),
        (0, ValueError, "fixed_split_tokens: expected 64"),
        (64.0, TypeError, "fixed_split_tokens: expected an int, got float"),
    ],
)
def test_fixed_split_errors(value: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        snapmla.plan_decode(
            torch.ones(2, dtype=torch.int32), 16, 1, page_size=64, max_pages=2,
            fixed_split_tokens=value,  # type: ignore[arg-type]
        )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"max_pages": 2**24},
        {"max_pages": 2**24, "fixed_split_tokens": 2**29},
        {"max_pages": 2, "fixed_overhead": 2**16, "fixed_split_tokens": 64},
    ],
)
def test_costs_of_a_batch_must_fit_32_bits(options: dict[str, int]) -> None:
    """The kernel adds up tiles and overheads of all sequences, whatever their lengths turn out to
    be; garbage lengths of a batch that could overflow would give a wrong plan or wild stores."""
    lengths = torch.zeros(10000, dtype=torch.int32)
    with pytest.raises(ValueError, match="^max_pages: .*at most 1073479680 tiles.*narrow the"):
        snapmla.plan_decode(lengths, 16, 1, page_size=64, **options)


# ---------------------------------------------------------------------------- tiles of a kernel


WIDE = 128


@pytest.fixture
def wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that the dispatcher takes declares tiles of 128 tokens."""
    monkeypatch.setitem(fp8_decode.TOKEN_TILES, ("sm_90a", "etap"), WIDE)


class Watching(TorchDispatchMode):
    """Watches, so that public functions become operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def tables_of(plan: snapmla.DecodePlan) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    items = [tuple(row) for row in plan.work_items.tolist()]
    return items[: int(plan.part_begin[-1])], plan.part_begin.tolist(), plan.split_begin.tolist()


@needs_compiler
@pytest.mark.parametrize("watch", [contextlib.nullcontext, Watching], ids=["eager", "operator"])
@pytest.mark.parametrize("split", [0, 3])
def test_a_plan_counts_in_the_tiles_of_its_kernel(
    wide_tiles: None, split: int, watch: type[contextlib.AbstractContextManager[object]]
) -> None:
    lengths, parts, tokens = [0, 1, 127, 128, 129, 5000, 700], 3, 320 * 16
    plan = snapmla.plan_decode(
        torch.tensor(lengths, dtype=torch.int32), 8, 1, page_size=16, max_pages=320,
        num_parts=parts, fixed_split_tokens=split * WIDE or None,
    )  # fmt: skip
    assert plan.token_tile == WIDE and plan.split_tiles == split
    for now in (lengths, [n + 64 for n in lengths]):
        with watch():
            plan.update_(torch.tensor(now, dtype=torch.int32))
        want = plan_reference(now, parts, WIDE, DEFAULT_FIXED_OVERHEAD, tokens, split)
        assert tables_of(plan) == (want.work_items, want.part_begin, want.split_begin)
    rule = f"after each {split * WIDE} tokens" if split else "its 128-token tiles"
    assert rule in plan.explain()


@needs_compiler
@pytest.mark.parametrize(("arch", "pipeline"), fp8_decode.MODULES)
def test_declared_tiles_are_those_of_the_kernels(arch: str, pipeline: str) -> None:
    spec = VariantSpec(op="decode", arch=arch, pipeline=pipeline)
    assert spec.token_tile == registry.module(spec).TILE


@pytest.mark.parametrize("name", ["merge_obf16_sm90a", "decode_dual_wg_r64_p64_obf16_sm100a"])
def test_what_walks_no_tiles_has_none(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: no kernel that walks a work list"):
        _ = VariantSpec.from_name(name).token_tile


@needs_compiler
@pytest.mark.parametrize(("tokens", "split"), [(128, False), (144, True)])
def test_capacities_count_in_tiles(wide_tiles: None, tokens: int, split: bool) -> None:
    """128 tokens are one tile, which nobody can cut; a page more are two."""
    lengths = torch.full((2,), tokens, dtype=torch.int32)
    shape = {"page_size": 16, "max_pages": tokens // 16}
    plan = snapmla.plan_decode(lengths, 8, 1, num_parts=4, fixed_overhead=0, **shape)
    fixed = snapmla.plan_decode(lengths, 8, 1, fixed_split_tokens=WIDE, **shape)
    assert plan.may_split == fixed.may_split == split
    assert len(fixed.work_items) == 2 * (1 + split) and len(fixed.o_accum) == (4 if split else 1)
    assert int(plan.split_begin[-1]) == int(fixed.split_begin[-1]) == (4 if split else 0)
    with pytest.raises(ValueError, match=r"^fixed_split_tokens: expected a multiple of 128, got"):
        snapmla.plan_decode(lengths, 8, 1, fixed_split_tokens=192, **shape)


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
def test_workspace_holds_the_worst_cuts() -> None:
    """Every boundary between parts cuts another sequence: 2 * (parts - 1) slots."""
    lengths = torch.full((2,), 3 * TOKEN_TILE, dtype=torch.int32)
    plan = snapmla.plan_decode(
        lengths, 8, 1, page_size=64, max_pages=3, num_parts=3, fixed_overhead=0
    )
    assert int(plan.split_begin[-1]) == 4 <= len(plan.o_accum) == len(plan.lse_accum)
    assert int(plan.part_begin[-1]) == 4 <= len(plan.work_items)


@needs_compiler
def test_workspace_holds_a_broken_tile() -> None:
    """Five pages of 16 are two tiles; the second piece needs an item and a slot too."""
    lengths = torch.full((3,), 80, dtype=torch.int32)
    plan = snapmla.plan_decode(lengths, 8, 1, page_size=16, max_pages=5, fixed_split_tokens=64)
    assert int(plan.part_begin[-1]) == 6 == len(plan.work_items)
    assert int(plan.split_begin[-1]) == 6 == len(plan.o_accum) == len(plan.lse_accum)


def test_costs_up_to_the_limit() -> None:
    lengths = torch.zeros(4095, dtype=torch.int32)
    pages = MAX_COST // 4095 - 6
    assert 4095 * (pages + 6) == MAX_COST
    plan = snapmla.plan_decode(lengths, 8, 1, page_size=64, max_pages=pages, fixed_overhead=6)
    assert plan.max_pages == pages
    with pytest.raises(ValueError, match="^max_pages: .*at most"):
        snapmla.plan_decode(lengths, 8, 1, page_size=64, max_pages=pages, fixed_overhead=7)


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


def test_slots_of_a_batch_must_fit_merges_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed splits make a slot a piece; at the edge, with a bound small enough to allocate."""
    monkeypatch.setattr("snapmla.plan.MAX_SLOTS", 12)
    monkeypatch.setattr(snapmla.DecodePlan, "update_", lambda self, _: self)

    def slots(batch: int, pages: int) -> int:
        lengths = torch.zeros(batch, dtype=torch.int32)
        plan = snapmla.plan_decode(
            lengths, 16, 1, page_size=64, max_pages=pages, fixed_split_tokens=64
        )
        return plan.o_accum.shape[0]

    assert slots(3, 4) == slots(4, 3) == slots(2, 6) == 12
    with pytest.raises(
        ValueError, match=r"^fixed_split_tokens: expected at most 12 pieces in a batch, got 13, 13 "
    ):
        slots(1, 13)


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
        for batch, begin, end, slot in want.work_items[x:y]:
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


@needs_compiler
def test_copies_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments prepared for launches stay with the original, and need not be copyable."""
    monkeypatch.setattr("snapmla.launch.prepared", lambda *tensors: (lambda: tensors,))
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
        ({"num_heads": 64}, "o_accum"), ({"row_tile": 64}, "o_accum"),
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
        plan: "DecodePlan(work_items=int32(5, 4), part_begin=int32(4,), ",
        cache: "PagedKVCache(content=float8_e4m3fn(2, 64, 512), rope=bfloat16(2, 64, 64), "
        "scale=float32(2, 64), layout='paged')",
        query: "QuantizedQuery(nope=float8_e4m3fn(2, 1, 16, 512), rope=bfloat16(2, 1, 16, 64), "
        "scale=float32(2, 1, 16))",
    }
    for value, text in texts.items():
        assert repr(value).startswith(text) and len(repr(value)) < 500, repr(value)
    with FakeTensorMode() as mode:
        there = mode.from_tensor(plan.work_items)
    assert "int32(5, 4)" in launch._brief(there)
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
        want = plan_reference(lengths, 3, 64, 2, capacity)
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


def test_parts_fill_the_device() -> None:
    cpu = torch.device("cpu")
    specs = {tile: decode_spec("etap", tile, 64, "bf16") for tile in (16, 128)}
    assert default_num_parts(cpu, 16, specs[16]) == 4
    assert default_num_parts(cpu, 128, specs[128]) == 2  # a cluster of two CTAs
    assert default_num_parts(cpu, 1024, specs[128]) == 1
