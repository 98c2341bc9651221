"""``snapmla.compat.metadata_pair``: tables in FlashMLA's pair; plans and workspaces that are
kept."""

from __future__ import annotations

import itertools

import pytest
import torch

import snapmla
import snapmla.dense.plan_decode
from dsl_kernels.families import FAMILIES, fp8_decode
from snapmla import rank
from snapmla.compat import flash_mla_fp8 as names
from snapmla.compat import metadata_pair
from snapmla.testing.reference_plan import PlanReference, Queries, plan_reference
from tests.support.bits import assert_same_bits
from tests.support.families import with_family
from tests.support.needs import needs_compiler
from tests.support.pairs import PAGE, WIDTH, Step

pytestmark = needs_compiler


def test_static_buffers_of_a_graph() -> None:
    """The framework's graph code: buffers for the largest batch, fresh pairs copied onto them."""
    step = Step((200, 0, 64), 16, 1)
    static, splits = names.get_mla_metadata(torch.ones(32, dtype=torch.int32), 16, 1)
    fresh, fresh_splits = step.metadata()
    static.copy_(fresh)
    splits[:4].copy_(fresh_splits)
    assert_same_bits(step.decode((static, splits[:4])), step.primary())
    for lengths in ((5, 130, 64), (0, 0, 0)):
        step.lengths.copy_(torch.tensor(lengths))
        before = static.data_ptr()
        pair = step.metadata(out=(static, splits[:4]))
        assert pair[0] is static and static.data_ptr() == before
        step.table = step.table.abs()  # every page is readable: lengths moved
        got = step.decode(pair)
        want = step.primary()
        torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)


def test_a_pair_lies_apart_from_the_lengths() -> None:
    """Else the launch would overwrite what it reads; also behind calls whose tensors lie apart."""
    columns = metadata_pair.width_for(4, 9)
    memory = torch.zeros(4 * columns + 8, dtype=torch.int32)
    metadata = memory[: 4 * columns].view(4, columns)
    lengths, splits = memory[4 * columns :], torch.zeros(9, dtype=torch.int32)
    lengths.copy_(torch.arange(1, 9))

    def plan(n: torch.Tensor, out: metadata_pair.Pair) -> None:
        names.get_mla_metadata(n, 16, 1, out=out)

    for batch in (2, 8):
        plan(lengths[:batch], (metadata, splits[: batch + 1]))
        for _ in range(2):  # the splits behind the lengths, and over the last of them
            plan(lengths[:2], (metadata, lengths[2:5]))
            with pytest.raises(ValueError, match="^num_splits: expected memory apart from cache_s"):
                plan(lengths[:3], (metadata, lengths[2:6]))
    kept = lengths.clone()
    with pytest.raises(ValueError, match="^tile_scheduler_metadata: .* memory apart from num_spl"):
        plan(lengths[:2], (metadata, metadata.view(-1)[:3]))
    with pytest.raises(ValueError, match="^tile_scheduler_metadata: .* memory apart from cache_s"):
        plan(metadata[1, :2], (metadata, splits[:3]))
    assert torch.equal(lengths, kept)


def schedule(lengths: list[int], parts: int, token_tile: int = 64) -> PlanReference:
    """What a pair for 16 rows holds."""
    overhead = FAMILIES["decode"].item_overhead
    return plan_reference(lengths, parts, token_tile, overhead, queries=Queries(16, 1, 16))


def test_metadata_is_the_schedule() -> None:
    lengths = torch.tensor([300, 0, 64, 700], dtype=torch.int32)
    metadata, splits = names.get_mla_metadata(lengths, 16, 1, max_batch=9)
    parts = metadata.shape[0]
    want = schedule(lengths.tolist(), parts)
    flat = metadata.view(-1).tolist()
    found = [tuple(flat[8 * i : 8 * i + 8]) for i in range(len(want.work_items))]
    assert found == want.work_items
    assert flat[-(parts + 1) :] == want.part_begin and splits.tolist() == want.split_begin
    assert metadata.shape[1] == metadata_pair.width_for(parts, 9)
    assert metadata_pair.capacity(metadata) >= 9


def test_metadata_counts_in_the_tiles_of_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned before the page size is known, run by the kernel that the page size picks."""
    monkeypatch.setitem(fp8_decode.TOKEN_TILES, ("sm_90a", "etap"), 128)
    lengths = torch.tensor([300, 0, 129, 700], dtype=torch.int32)
    pair = names.get_mla_metadata(lengths, 16, 1)
    parts = pair[0].shape[0]
    want = schedule(lengths.tolist(), parts, 128)
    for page_size in fp8_decode.PAGE_SIZES:
        plan = metadata_pair.make_plan(*pair, 4, 16, 1, page_size, 5, None)
        found = plan.work_items[: len(want.work_items)].tolist()
        assert [tuple(item) for item in found] == want.work_items and plan.token_tile == 128
        assert plan.split_begin.tolist() == want.split_begin


@pytest.mark.parametrize("rows", [1, 16, 17, 40, 64, 128, 1000])
def test_pages_do_not_change_a_pairs_kernel(rows: int) -> None:
    """A pair knows the rows alone: parts and tiles must suit whatever pages come."""
    wanted = metadata_pair.kernel_for(torch.device("cpu"), rows)
    for page_size in fp8_decode.PAGE_SIZES:
        found = rank.choose(torch.device("cpu"), rows, 1, page_size)
        assert found == wanted.replace(page_size=page_size)
        assert found.token_tile == wanted.token_tile


@pytest.mark.parametrize("parts", [1, 2, 4, 33, 66, 132])
@pytest.mark.parametrize("batch", [1, 7, 2048])
def test_metadata_has_room(parts: int, batch: int) -> None:
    """Items and, from the back, part_begin and lengths never overlap; room for what was asked."""
    metadata = torch.zeros(parts, metadata_pair.width_for(parts, batch), dtype=torch.int32)
    assert metadata_pair.capacity(metadata) >= batch
    assert 8 * (parts + batch) + batch + parts + 1 <= metadata.numel()


def ints_of(metadata: torch.Tensor, batch: int) -> list[tuple[int, int]]:
    """Where a pair's tables begin and end in its metadata, in ints, in order."""
    base = metadata.data_ptr()
    return sorted(
        ((t.data_ptr() - base) // 4, (t.data_ptr() - base) // 4 + t.numel())
        for t in metadata_pair.tables_of(metadata, batch)
    )


@pytest.mark.parametrize("columns", range(18, 27, 2))
@pytest.mark.parametrize("parts", [1, 2, 4, 33])
def test_a_full_metadata_tensor(parts: int, columns: int) -> None:
    """As many sequences as there is room for: tables side by side, and no room for one more."""
    metadata = torch.zeros(parts, columns * (8 if parts == 1 else 1), dtype=torch.int32)
    room = metadata_pair.capacity(metadata)
    spans = ints_of(metadata, room)
    assert spans[0][0] >= 0 and spans[-1][1] <= metadata.numel()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))

    one_more = 8 * (parts + room + 1) + (room + 1) + (parts + 1)  # items, lengths, part_begin
    assert metadata.numel() < one_more
    lengths, splits = torch.ones(room, dtype=torch.int32), torch.zeros(room + 1, dtype=torch.int32)
    names.get_mla_metadata(lengths, 16, 1, out=(metadata, splits))
    want = schedule([1] * room, parts)
    items = metadata_pair.tables_of(metadata, room).work_items[:room].tolist()
    assert [tuple(item) for item in items] == want.work_items
    more = torch.ones(room + 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"expected room for {room + 1} .*got room for {room} "):
        names.get_mla_metadata(more, 16, 1, out=(metadata, torch.zeros(room + 2).int()))


def test_another_shape_at_the_same_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the metadata are parts: the same memory in other rows is another schedule."""
    with_family(monkeypatch, "decode", item_overhead=1)
    metadata_pair._plans.clear()
    step = Step((70, 250), 16, 1)
    pair = step.metadata()
    # Few first: tables lie at the end, so a plan of more parts finds those of fewer all the same.
    for parts in (2, 4):
        own = step.metadata(out=(pair[0].view(parts, -1), pair[1]))
        plan = snapmla.plan_decode(
            step.lengths, 16, 1, page_size=PAGE, max_pages=WIDTH, num_parts=parts, fixed_overhead=1
        )
        assert int(own[1][-1]) == int(plan.split_begin[-1]) > 0
        out, lse = torch.full((2, 1, 16, 512), 7.0).bfloat16(), torch.full((2, 16, 1), 7.0)
        assert_same_bits(step.decode(own, out=out, lse=lse), step.primary(plan=plan))
    metadata_pair._plans.clear()


def test_workspace_is_kept() -> None:
    like = torch.zeros(1, dtype=torch.int32)
    first = metadata_pair.workspace(like, 0, 3, 16)
    assert metadata_pair.workspace(like, 0, 3, 16)[0] is first[0]
    for other in ((0, 4, 16), (0, 3, 32), (7, 3, 16), (None, 3, 16)):
        assert metadata_pair.workspace(like, *other)[0] is not first[0]
    captured = [metadata_pair.workspace(like, None, 3, 16)[0] for _ in range(2)]
    assert captured[0] is not captured[1]


def test_stale_metadata_is_caught_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPMLA_CHECK_PLAN", "1")
    step = Step((70, 3), 16, 1)
    pair = step.metadata()
    step.decode(pair)
    step.lengths[1] = 2
    with pytest.raises(ValueError, match=r"planned -> now.* 1 \(3 -> 2\)"):
        step.decode(pair)
    step.decode(step.metadata(out=pair))


def test_stale_metadata_is_named_as_the_caller_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPMLA_CHECK_PLAN", "1")
    step = Step((70, 3), 16, 1)
    pair = step.metadata()
    step.lengths[1] = 2
    for extra in ({}, {"softmax_scale": 1}):  # the quick way and the long one
        with pytest.raises(ValueError, match=r"^tile_scheduler_metadata: .*\(call get_mla"):
            step.decode(pair, **extra)


def test_stale_metadata_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPMLA_CHECK_PLAN", "1")
    step, compared = Step((70, 3), 16, 1), []
    pair = step.metadata()
    check = snapmla.DecodePlan.check
    monkeypatch.setattr(
        snapmla.DecodePlan,
        "check",
        lambda plan, lengths: compared.append(1) or check(plan, lengths),
    )
    step.lengths[1] = 2
    with pytest.raises(ValueError, match="^tile_scheduler_metadata: "):
        step.decode(pair)
    assert compared == [1]


@pytest.mark.parametrize(("planned", "decoded"), [((40, 40, 40), 2), ((40, 40, 50), 2), ((70,), 2)])
def test_metadata_of_another_batch(
    monkeypatch: pytest.MonkeyPatch, planned: tuple[int, ...], decoded: int
) -> None:
    """Shapes cannot tell, the pair has room for any batch: named in debug mode, harmless without.

    Of a larger batch's pair the first sequences come out right.
    """
    step = Step((40,) * decoded, 4, 1)
    metadata, splits = names.get_mla_metadata(torch.tensor(planned, dtype=torch.int32), 4, 1)
    pair = (metadata, torch.cat([splits, splits[-1:]])[: decoded + 1])
    results = {
        "out": torch.full((decoded, 1, 4, 512), 7.0),
        "lse": torch.full((decoded, 4, 1), 7.0),
    }
    out, lse = step.decode(pair, **results)
    if len(planned) > decoded:
        assert_same_bits((out, lse), step.primary(out_dtype=torch.float32))
    metadata_pair._plans.clear()
    monkeypatch.setenv("SNAPMLA_CHECK_PLAN", "1")
    with pytest.raises(
        ValueError,
        match=rf"^tile_scheduler_metadata: expected one made for b = {decoded} sequences, got "
        rf"{len(planned)} \(call get_mla_metadata\(..., out=\) after the batch changes\)",
    ):
        step.decode(pair)
    step.decode(step.metadata(out=pair))
    metadata_pair._plans.clear()


def test_debug_mode_survives_garbage_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPMLA_CHECK_PLAN", "1")
    step = Step((70, 3), 4, 1)
    metadata, splits = step.metadata()
    metadata.random_(-(2**31), 2**31)
    with pytest.raises(ValueError, match=r"^tile_scheduler_metadata: .*b = 2 sequences, got"):
        step.decode((metadata, splits))


@pytest.mark.parametrize("batch", [128, 200])
def test_garbage_lengths_do_not_overflow_the_schedule(batch: int) -> None:
    """The pair knows no capacity; the sum of all tiles must still fit 32 bits."""
    lengths = torch.full((batch,), 2**31 - 1, dtype=torch.int32)
    metadata, splits = names.get_mla_metadata(lengths, 16, 1)
    parts = metadata.shape[0]
    begin = metadata.view(-1)[-(parts + 1) :].tolist()
    assert begin[0] == 0 and begin == sorted(begin) and batch <= begin[-1] < batch + parts
    items = metadata.view(-1)[: 8 * begin[-1]].view(-1, 8)
    assert (items[:, 2] > items[:, 1]).all() and splits[-1] <= 2 * parts
    assert items[:, 0].unique().numel() == batch


def test_other_metadata_beside_the_same_splits() -> None:
    """A kept plan belongs to both tensors of the pair."""
    step = Step((200, 500), 16, 1)
    first, splits = step.metadata()
    step.decode((first, splits))
    step.lengths.copy_(torch.tensor([200, 1]))
    second, fresh = step.metadata()
    splits.copy_(fresh)
    assert not torch.equal(first, second)
    assert_same_bits(step.decode((second, splits)), step.primary())


def test_a_kept_plan_is_for_the_very_same_view() -> None:
    """Other views of a kept pair's memory, at the same address, are checked anew."""
    lengths = torch.ones(2, dtype=torch.int32)
    metadata, _ = names.get_mla_metadata(lengths, 16, 1)
    buffer = torch.zeros(9, dtype=torch.int32)
    plan = metadata_pair.kept_plan(metadata, buffer[:3], 2, 16, 1, 64, 4)
    assert metadata_pair.kept_plan(metadata.view(4, -1), buffer[:3], 2, 16, 1, 64, 4) is plan
    rows, columns = metadata.shape
    others = (metadata.view(torch.float32), metadata.as_strided((rows, columns), (1, rows)))
    for other in others:
        with pytest.raises((TypeError, ValueError), match="^tile_scheduler_metadata: "):
            metadata_pair.kept_plan(other, buffer[:3], 2, 16, 1, 64, 4)
    for other in (buffer[:4], buffer[::2][:3], buffer[:3].view(torch.float32)):
        with pytest.raises((TypeError, ValueError), match="^num_splits: "):
            metadata_pair.kept_plan(metadata, other, 2, 16, 1, 64, 4)


def test_kept_plans_are_bounded() -> None:
    lengths = torch.ones(1, dtype=torch.int32)
    metadata_pair._plans.clear()
    for width in range(1, metadata_pair.KEPT_PLANS + 10):
        metadata_pair.kept_plan(*names.get_mla_metadata(lengths, 16, 1), 1, 16, 1, 64, width)
        assert 0 < len(metadata_pair._plans) <= metadata_pair.KEPT_PLANS


@pytest.mark.parametrize("called", [(8, 1), (16, 2)])
def test_other_rows_are_refused_in_debug_mode(
    monkeypatch: pytest.MonkeyPatch, called: tuple[int, int]
) -> None:
    monkeypatch.setenv("SNAPMLA_CHECK_PLAN", "1")
    step = Step((40, 3), *called)
    rows = called[0] * called[1]
    for planned in {8, 16, 32, 64, 128, 256} - {rows}:
        pair = names.get_mla_metadata(step.lengths, planned, 1)
        with pytest.raises(
            ValueError,
            match=r"^tile_scheduler_metadata: expected one made for s_q \* num_heads = "
            rf"{rows} query rows a sequence, got {planned} \(num_heads_per_head_k is s_q \* num",
        ):
            step.decode(pair)
    step.decode(step.metadata())


# two parts, three sequences of 4, 1 and 2 tiles, of which the first is cut in two
ITEMS = [[0, 0, 3, 0], [0, 3, 4, 1], [1, 0, 1, -1], [2, 0, 2, -1], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("place", "value", "right"),
    [
        (None, 0, [True] * 3),
        ((1, 1), 4, [False, True, True]),  # a gap
        ((1, 2), 3, [False, True, True]),  # ends early
        ((1, 2), 2, [False, True, True]),  # ends before it begins
        ((1, 3), 2, [False, True, True]),  # a slot left out
        ((2, 3), 1, [False, False, True]),  # the slot of another sequence
        ((2, 0), 0, [False, False, True]),  # one item too many
        ((2, 0), 7, [True, False, True]),  # none
        ((3, 1), 1, [True, True, False]),
        ((3, 3), 0, [False, True, False]),
    ],
)
def test_covered(place: tuple[int, int] | None, value: int, right: list[bool]) -> None:
    items = [list(item) for item in ITEMS]
    if place is not None:
        items[place[0]][place[1]] = value
    assert metadata_pair.covered(items, [0, 1, 4], [0, 2, 2, 2], [4, 1, 2], 4) == right


def test_covered_wants_sound_tables() -> None:
    """Parts and slots from 0, ascending, no more than there are; items together."""
    good, splits, tiles = [0, 1, 4], [0, 2, 2, 2], [4, 1, 2]
    for parts in ([1, 1, 4], [0, 5, 4], [0, 1, 6]):
        assert not any(metadata_pair.covered(ITEMS, parts, splits, tiles, 4))
    for begin, slots in (([0, 2, 2, 2], 1), ([1, 2, 2, 2], 4), ([0, 2, 1, 2], 4)):
        assert not any(metadata_pair.covered(ITEMS, good, begin, tiles, slots))
    apart = [ITEMS[0], ITEMS[2], ITEMS[1], ITEMS[3]]
    assert metadata_pair.covered(apart, good, splits, tiles, 4) == [False, True, True]
