"""FlashMLA's records on the host: made, read into tables that hold them, kept for who made them."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from snapmla.compat import flash_mla, sched_meta
from snapmla.testing.reference_plan import plan_reference, records_of, records_reference
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
SHAPE = sched_meta.Shape(2, 4, 1, 16, 4, "f16", 1)


def test_records_are_flashmlas() -> None:
    """Shape without the batch, values as its records have them; several KV heads share the SMs."""
    for lengths in ([1000, 0, 64, 65, 5000], [3]):
        made, splits = flash_mla.get_mla_metadata_tensors(
            torch.tensor(lengths, dtype=torch.int32), 16, 1
        )
        assert isinstance(made, torch.Tensor) and splits is not None
        assert made.shape == (4, 8) and made.dtype == splits.dtype == torch.int32
        want, want_splits = records_of(plan_reference(lengths, 4, 64, 6))
        assert list(map(tuple, made.tolist())) == want and splits.tolist() == want_splits
    one = torch.ones(2, dtype=torch.int32)
    for rows, heads, parts in ((64, 1, 4), (65, 1, 2), (16, 2, 2), (128, 2, 1), (1000, 8, 1)):
        made, _ = flash_mla.get_mla_metadata_tensors(one, rows, heads)
        assert made.shape == (parts, 8)
        again, _ = flash_mla.get_mla_metadata_tensors(
            one, num_heads_per_head_k=rows, num_heads_k=heads
        )
        assert torch.equal(again, made)
    nothing, splits = flash_mla.get_mla_metadata_tensors(torch.zeros(0, dtype=torch.int32), 16, 1)
    assert nothing.shape == (4, 8) and splits.tolist() == [0]


@pytest.mark.parametrize(("batch", "parts", "kv_heads"), [(9, 2, 1), (2, 9, 1), (3, 3, 4)])
def test_tables_hold_every_cut(batch: int, parts: int, kv_heads: int) -> None:
    """Cuts in mid-request, as many items and slots as there may be."""
    g = random.Random(batch)
    shape = sched_meta.Shape(batch, 4, 2, 64, 40, "bf16", kv_heads)
    for _ in range(4):
        lengths = [g.randint(300, 2500) for _ in range(batch)]
        cuts = sorted([g.randrange(batch), g.randint(1, 4)] for _ in range(parts))
        table = [[*cut, 0, 0, 0, 0, 0, 0] for cut in cuts]
        plan = sched_meta.kept_reader(torch.tensor(table, dtype=torch.int32), shape).read(
            torch.tensor(table, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
        )
        want = records_reference(table, lengths, 64 * 40, 64, shape.rows, kv_heads)
        n = len(want.work_items)
        assert [tuple(x) for x in plan.work_items[:n].tolist()] == want.work_items
        assert plan.part_begin.tolist() == want.part_begin
        assert plan.split_begin.tolist() == want.split_begin
        assert want.split_begin[-1] <= plan.o_accum.shape[0]


def test_as_many_records_as_the_kernel_holds() -> None:
    for parts, room in ((1024, True), (1025, False), (0, False)):
        table = torch.zeros(parts, 8, dtype=torch.int32)
        if room:
            sched_meta.check_records(table, table.device)
            continue
        with pytest.raises(ValueError, match="expected 1 to 1024 parts, got"):
            sched_meta.check_records(table, table.device)


def test_threads_have_readers_of_their_own() -> None:
    """Another thread may convert its records between this one's conversion and decode."""
    table = torch.zeros(2, 8, dtype=torch.int32)
    mine, theirs = sched_meta.kept_reader(table, SHAPE), []
    thread = threading.Thread(target=lambda: theirs.append(sched_meta.kept_reader(table, SHAPE)))
    thread.start()
    thread.join()
    assert sched_meta.kept_reader(table, SHAPE) is mine and theirs[0] is not mine
    assert theirs[0].plan.work_items is not mine.plan.work_items


def test_a_batch_of_too_many_tiles() -> None:
    shape = sched_meta.Shape(2**20, 4, 1, 64, 2**12, "bf16", 1)
    with pytest.raises(ValueError, match="^block_table: expected at most .* tiles of 64 tokens"):
        sched_meta.make_reader(torch.zeros(1, 8, dtype=torch.int32), 1, shape, None)


def test_readers_are_kept_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By shape and number of records; no more than there may be."""
    monkeypatch.setattr(sched_meta, "_readers", {})
    monkeypatch.setattr(sched_meta, "KEPT_READERS", 2)
    for parts, kept in ((1, 1), (1, 1), (2, 2), (3, 1), (2, 2)):
        sched_meta.kept_reader(torch.zeros(parts, 8, dtype=torch.int32), SHAPE)
        assert len(sched_meta._readers) == kept
