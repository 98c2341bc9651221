"""The list of work of dense prefill beside a host model: every row tile once, longest first."""

from __future__ import annotations

import pytest
import torch

from dsl_kernels.formats.mha_list import HEADER, most_tiles, workspace_words
from snapmla.testing.mha_job import offsets, row_tiles
from snapmla.testing.workloads import mha_items as work
from softgpu import Options, using
from tests.support.needs import TARGETS, needs_kernels
from tests.support.rows import device_of, kernel

pytestmark = needs_kernels


def made(
    target: str, lq: list[int], lk: list[int], causal: bool, longest: int, words: int = 0
) -> list[int]:
    """The workspace after a call; -7 where nothing was written."""
    device = device_of(target)
    room = words or workspace_words(sum(lq), len(lq))
    out = torch.full((room,), -7, dtype=torch.int32, device=device)
    call = kernel(target, op="mha_items")
    call(offsets(lq).to(device), offsets(lk).to(device), out, int(causal), longest)
    return list(out.tolist())


@pytest.mark.parametrize("target", TARGETS)
def test_clean_and_right(target: str) -> None:
    """The workload under the hazard check."""
    for problem in work.SMALL:
        lq, lk, causal = problem.lq, problem.lk, problem.causal
        with using(Options(hazards="raise", seed=1)):
            found = made(target, list(lq), list(lk), causal, max(lk, default=0))
        assert not work.wrong(found, lq, lk, causal)
        assert set(found[HEADER + 2 * len(row_tiles(lq, lk, causal)) :]) <= {-7}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("longest", [0, 1000, 2**31 - 1])
def test_a_wrong_longest_costs_order_alone(target: str, longest: int) -> None:
    """``max_seqlen_k`` is a promise; broken, every row tile is there all the same."""
    lq, lk = [300, 40, 1000], [300, 5000, 200000]
    found = made(target, lq, lk, True, longest)
    tiles = row_tiles(lq, lk, True)
    words = found[HEADER:]
    assert found[:HEADER] == [0, len(tiles), 0, 0]
    assert sorted(zip(words[::2], words[1::2]))[-len(tiles) :] == sorted(tiles)


@pytest.mark.parametrize("target", TARGETS)
def test_cu_seqlens_that_do_not_ascend_write_nowhere_else(target: str) -> None:
    """Negative lengths count as none; more row tiles than there is room for are left out."""
    device, room = device_of(target), 3
    words = workspace_words(0, 0) + 2 * room
    memory = torch.full((words + 64,), -7, dtype=torch.int32, device=device)
    call = kernel(target, op="mha_items")
    cu_q = torch.tensor([0, 5000, 100, 300], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, 300, 600, 100], dtype=torch.int32, device=device)
    call(cu_q, cu_k, memory[:words], 1, 300)
    found = memory.tolist()
    assert found[:HEADER] == [0, room, 0, 0]
    assert set(found[words:]) == {-7}
    assert all(sequence in (0, 2) for sequence in found[HEADER:words:2])


def test_room_is_enough_for_any_lengths() -> None:
    """One more row tile for each sequence that has an end inside one."""
    generator = torch.Generator().manual_seed(1)
    for batch in (1, 2, 7, 40):
        for most in (1, 127, 128, 129, 700):
            lq = torch.randint(0, most + 1, (batch,), generator=generator).tolist()
            assert len(row_tiles(lq, lq, True)) <= most_tiles(sum(lq), batch)


def test_a_wrong_list_is_noticed() -> None:
    """The judge's own check."""
    lq, lk = (200, 300), (300, 900)
    tiles = [(1, 2), (1, 1), (1, 0), (0, 1), (0, 0)]
    good = [0, len(tiles), 0, 0, *(word for tile in tiles for word in tile)]
    assert not work.wrong(good, lq, lk, True)
    swapped = [*good[:4], *good[6:8], *good[4:6], *good[8:]]
    assert "side by side" in work.wrong(swapped, lq, lk, True)
    assert "behind a shorter" in work.wrong([*good[:4], *good[10:], *good[4:10]], lq, lk, True)
    assert "once" in work.wrong([*good[:-2], *good[-4:-2]], lq, lk, True)
    assert "header" in work.wrong([1, *good[1:]], lq, lk, True)
