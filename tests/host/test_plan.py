"""Making plans: capacity, fixed splits, tiles of a kernel.

What runs, runs the compiled kernels on the software GPU.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import snapmla
from dsl_kernels import registry
from dsl_kernels.families import fp8_decode
from dsl_kernels.formats.dims import TOKEN_TILE
from dsl_kernels.spec import VariantSpec, decode_spec
from snapmla import rank
from snapmla.dense.plan_decode import MAX_COST, default_num_parts
from snapmla.testing import selfcheck
from snapmla.testing.reference_plan import Cuts, Queries, plan_reference
from tests.support.bits import same_bits
from tests.support.families import with_family, with_format
from tests.support.needs import needs_compiler
from tests.support.pool import Pool

# ---------------------------------------------------------------------------- batch-invariant


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
    assert tuple(plan.work_items.shape) == (10, 8)  # 2 sequences of at most 5 pieces
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
        want = plan_reference(
            now, parts, WIDE, fp8_decode.FAMILY.item_overhead, tokens, split, Queries(8, 1, 16)
        )
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


@needs_compiler
def test_workspace_holds_the_worst_cuts() -> None:
    """Every boundary between parts cuts another sequence: 2 * (parts - 1) slots."""
    lengths = torch.full((2,), 3 * TOKEN_TILE, dtype=torch.int32)
    plan = snapmla.plan_decode(
        lengths, 8, 1, page_size=64, max_pages=3, num_parts=3, fixed_overhead=0
    )
    assert int(plan.split_begin[-1]) == 4 <= len(plan.o_accum) == len(plan.lse_accum)
    assert int(plan.part_begin[-1]) == 4 <= len(plan.work_items)


def test_tile_times_are_the_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts are weighed on cards of an architecture that was measured, by their own read rate."""
    few = decode_spec("etap", 16, 64, "bf16", "sm_90a")
    dense = VariantSpec(op="dense_decode", pipeline="split", row_tile=64, arch="sm_90a")
    assert rank.tile_times(torch.device("cpu"), few) == (0, 0)
    found = {}
    for name in ("h200", "h100", "h20"):
        card = rank.card_named(name)
        monkeypatch.setattr("snapmla.rank.calls.card_of", lambda _, card=card: card)
        found[name] = [rank.tile_times(torch.device("cuda"), s) for s in (few, dense)]
    # 64 tokens of 644 and of 1152 bytes at 0.93 of 4608 and 3162 GB/s
    # 2176 tensor cycles, of which an H20's SM does a quarter as many
    assert found == {
        "h200": [(870, 10), (1660, 17)],
        "h100": [(870, 14), (1660, 25)],
        "h20": [(870, 11), (4340, 20)],
    }
    other = decode_spec("ws", 64, 64, "bf16", "sm_100a")
    assert rank.tile_times(torch.device("cuda"), other) == (0, 0)


@needs_compiler
@pytest.mark.parametrize("parts", [1, 3, 132])
def test_fp16_items_stay_short(parts: int) -> None:
    """One plan whose lengths grow from 1K to 128K: within its room, and no item of more than 256
    tiles and what balance adds, as long as four of them make a part."""
    lengths = torch.full((9,), 1024, dtype=torch.int32)
    plan = snapmla.plan_decode(
        lengths, 16, 1, page_size=64, max_pages=2048, num_parts=parts, cache_dtype=torch.float16
    )
    tiles, overhead = 16384 // TOKEN_TILE, fp8_decode.FAMILY.item_overhead
    most = 1 if parts == 132 else 4
    assert plan.longest_item == tiles == 256 and plan.max_stretches == most
    assert len(plan.o_accum) == 2 * parts * most and plan.o_accum.dtype == torch.float32
    cuts = Cuts(longest_item=tiles, max_stretches=most)
    seen = set()
    for tokens in (1024, 9000, 14000, 20000, 30000, 45000, 60000, 2**17, 2**31 - 1):
        now = [tokens, 0, *[tokens // 3] * 6, 1]
        plan.update_(torch.tensor(now, dtype=torch.int32))
        want = plan_reference(
            now, parts, TOKEN_TILE, overhead, 2048 * 64, queries=Queries(16, 1, 16), cuts=cuts
        )
        assert tables_of(plan) == (want.work_items, want.part_begin, want.split_begin)
        assert len(want.work_items) <= len(plan.work_items)
        assert want.split_begin[-1] <= len(plan.o_accum) == len(plan.lse_accum)
        cost = sum(item[2] - item[1] for item in want.work_items) + overhead * len(now)
        seen.add(-(-cost // (parts * tiles)))
        if cost <= 4 * parts * tiles:
            longest = max(item[2] - item[1] for item in want.work_items)
            assert longest <= tiles + overhead + 1, tokens
    assert seen == {1} if most == 1 else {1, 2, 3, 4} < seen, "what was to be tried"


@needs_compiler
def test_items_of_exact_logits_stay_short() -> None:
    """Pipeline f16 sums P.V of an item in the tensor core, whatever the cache is."""
    lengths = torch.tensor([2**17], dtype=torch.int32)
    of = lambda **more: snapmla.plan_decode(
        lengths, 16, 1, page_size=64, max_pages=2048, num_parts=1, **more
    )
    plan = of(pipeline="f16")
    assert (plan.pipeline, plan.longest_item, plan.max_stretches) == ("f16", 256, 4)
    items = plan.work_items[: int(plan.part_begin[-1])]
    assert len(items) == 4 and plan.o_accum.dtype == torch.float16
    assert of().longest_item == of(pipeline="f16", fixed_split_tokens=2**16).longest_item == 0


@needs_compiler
@pytest.mark.parametrize(
    ("cache", "options"),
    [("bf16", {}), ("fp8", {}), ("f16", {"fixed_split_tokens": 2**16})],
    ids=["bf16", "fp8", "fixed"],
)
def test_other_caches_have_one_stretch_a_part(cache: str, options: dict[str, int]) -> None:
    """bf16 rounds its output more coarsely than a long sum errs; fixed pieces are as asked."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}.get(cache, cache)
    plan = snapmla.plan_decode(
        torch.tensor([2**17, 1024, 70000], dtype=torch.int32), 16, 1, page_size=64, max_pages=2048,
        num_parts=2, cache_dtype=dtype, **options,
    )  # fmt: skip
    assert plan.longest_item == 0 and plan.max_stretches == 1
    if not options:
        assert (len(plan.work_items), len(plan.o_accum)) == (2 + 3, 2 * 2)


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


def test_slots_of_a_batch_must_fit_merges_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed splits make a slot a piece; at the edge, with a bound small enough to allocate."""
    monkeypatch.setattr("snapmla.dense.plan_decode.MAX_SLOTS", 12)
    monkeypatch.setattr(snapmla.DecodePlan, "update_", lambda self, *_: self)

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


def test_parts_fill_the_device() -> None:
    cpu = torch.device("cpu")
    specs = {tile: decode_spec("etap", tile, 64, "bf16") for tile in (16, 128)}
    assert default_num_parts(cpu, 16, specs[16]) == 4
    assert default_num_parts(cpu, 128, specs[128]) == 2  # a cluster of two CTAs
    assert default_num_parts(cpu, 1024, specs[128]) == 1


@pytest.mark.parametrize(
    ("sms", "blocks", "in_step"), [(132, 33, True), (132, 15, False), (4, 3, False)]
)
def test_row_blocks_run_in_step_where_that_leaves_few_idle(
    sms: int, blocks: int, in_step: bool
) -> None:
    """33 blocks of 132 SMs are 4 parts and none idle; 15 are 8 parts, and 12 SMs idle."""
    spec = decode_spec("etap", 16, 64, "bf16")
    assert rank.unit_rows(sms, 16 * blocks - 3, spec) == (16 * blocks if in_step else 16)
    pairs = decode_spec("etap", 128, 64, "bf16")  # clusters of two CTAs
    assert rank.unit_rows(2 * sms, 128 * blocks, pairs) == 128 * (blocks if in_step else 1)


def test_ragged_queries_choose_their_kernel_by_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the mean request; with fixed splits those of one token, whatever the batch."""
    lengths, begins = torch.zeros(4, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    shape: dict[str, Any] = {"cu_seqlens_q": begins, "page_size": 64, "max_pages": 2}
    monkeypatch.setattr(snapmla.DecodePlan, "update_", lambda self, *_: self)
    made = snapmla.plan_decode(lengths, 16, total_q=16, **shape)
    fixed = snapmla.plan_decode(lengths, 16, total_q=16, fixed_split_tokens=64, **shape)
    assert made.row_tile == made.unit_rows == 64 and fixed.row_tile == fixed.unit_rows == 16
    assert made.n_units == 4 + 4 == len(made.units) and fixed.n_units == 4 + 16
    assert made.total_q == 16 and made.s_q is None and made.unit_begin.shape == (5,)


def test_what_an_item_costs_is_its_familys(monkeypatch: pytest.MonkeyPatch) -> None:
    with_family(monkeypatch, "dense_decode", item_overhead=9)
    lengths = torch.ones(2, dtype=torch.int32)
    step: dict[str, Any] = {"page_size": 64, "max_pages": 3}
    monkeypatch.setattr(snapmla.DecodePlan, "update_", lambda self, *_: self)
    plans = [
        snapmla.plan_decode(lengths, 16, 1, cache_dtype=dtype, **step)
        for dtype in ("fp8", torch.bfloat16)
    ]
    assert [plan.fixed_overhead for plan in plans] == [6, 9]


def test_long_sums_are_the_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its name: stretches of long sequences follow from what the format says."""
    monkeypatch.setattr(snapmla.DecodePlan, "update_", lambda self, *_: self)
    with_format(monkeypatch, "bf16", longest_item=128)
    lengths = torch.ones(2, dtype=torch.int32)
    plan = snapmla.plan_decode(
        lengths, 16, 1, page_size=64, max_pages=30, cache_dtype=torch.bfloat16
    )
    assert plan.longest_item == 2 and plan.max_stretches > 1
