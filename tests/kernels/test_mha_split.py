"""Dense prefill split over keys: lists with pieces, pieces, merging, bits; all on the software GPU,
hazard check on."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsl_kernels.formats.mha_list import (
    HEADER,
    PIECES,
    SPLITS,
    TILES,
    SplitRoom,
    may_split,
    piece_keys,
    pieces_of,
)
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import selfcheck
from snapmla.testing.mha_split_job import SplitJob, lists_of, split_work
from snapmla.testing.workloads import mha_items as items
from softgpu import Options, mutate, using
from tests.support.needs import needs_compiler
from tests.support.rows import kernel

pytestmark = needs_compiler
CHECKED = Options(hazards="raise", seed=3)
MAIN = "mha_fwd_d192_dbf16_split_sm90a"
HELPERS = ["mha_items_split_sm90a", "mha_merge_obf16_sm90a"]
WIDE = "mha_fwd_d256_dbf16_split_sm90a"
MORE = ["mha_merge_of16_sm90a", "mha_merge_obf16_v256_sm90a", "mha_merge_of16_v256_sm90a",
        *(f"mha_fwd_d{d}_d{t}_split_sm90a" for d in (192, 128, 256)
        for t in ("bf16", "f16"))]  # fmt: skip


def clean_and_right(name: str) -> None:
    spec = VariantSpec.from_name(name)
    directory = variants.find_or_build(spec, need_library=False).directory
    with using(mutate.schedule(0)):
        result = selfcheck.Workload(spec, directory).run()
    assert result.passed, result.summary


@pytest.mark.parametrize("name", HELPERS)
def test_clean_and_right(name: str) -> None:
    """The workload: lists beside the host's model; partial rows, some of no key, beside fp64."""
    clean_and_right(name)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", MORE)
def test_clean_and_right_of_the_rest(name: str) -> None:
    """A split sequence between others, NaN and 1e30 behind ends, both masks, moving maxima."""
    clean_and_right(name)


# ------------------------------------------------------------------------------------- the rule


def test_the_rule_keeps_its_promises() -> None:
    """Pieces tile the keys in order, each of 8 tiles a row tile or more; at most 8 at once."""
    for s_q in (1, 128, 129, 300, 512, 513, 5000):
        row_tiles = -(-s_q // 128)
        for s_k in (0, 1, 1920, 1921, 2048, 4095, 7041, 8064, 8065, 9999, 32768, 2**20):
            pieces = pieces_of(s_q, s_k)
            assert pieces == 1 or pieces * row_tiles <= PIECES
            ends = [piece_keys(s_k, pieces, p) for p in range(pieces)]
            assert ends[0][0] == 0 and ends[-1][1] == s_k
            assert all(a[1] == b[0] and a[1] % 128 == 0 for a, b in itertools.pairwise(ends))
            tiles = [-(-end // 128) - first // 128 for first, end in ends]
            assert pieces == 1 or min(tiles) >= 8 * row_tiles
            assert pieces == 1 or (row_tiles <= 4 and may_split(s_k, s_k))
    assert pieces_of(128, 1920) == 1 and pieces_of(128, 1921) == 2
    assert pieces_of(128, 32768) == 8 and pieces_of(512, 8064) == 1 and pieces_of(512, 8065) == 2


def test_room_is_enough_for_any_lengths() -> None:
    """Entries, split row tiles and partial rows of random lengths, and of the worst ones."""
    generator = torch.Generator().manual_seed(1)
    worst = (128, 1921)
    for batch in (1, 2, 7, 40):
        for most_q, most_k in ((1, 2000), (128, 4000), (600, 40000), (129, 2**17), worst):
            lq, lk = (
                torch.randint(0, most + 1, (batch,), generator=generator).tolist()
                for most in (most_q, most_k)
            )
            if (most_q, most_k) == worst:
                lq, lk = [worst[0]] * batch, [worst[1]] * batch
            lists, room = lists_of(lq, lk, True), SplitRoom.of(sum(lq), batch, sum(lk))
            assert len(lists.entries) <= room.entries and len(lists.splits) <= room.splits
            used = sum(a * pieces_of(a, b) for a, b, c in zip(lq, lk, lists.bases) if c >= 0)
            assert used <= room.rows


def test_cu_seqlens_that_do_not_ascend_write_nowhere_else() -> None:
    """More split row tiles, entries and partial rows than there is room for: what does not fit is
    not split, and nothing behind the lists is written."""
    splits, rows = 3, 400
    words = HEADER + 4 * splits + 6 + 4 * 5  # room for five entries
    memory = torch.full((words + 64,), -7, dtype=torch.int32)
    cu_q = torch.tensor([0, 100, 0, 250, 0, 90, 99], dtype=torch.int32)
    cu_k = torch.tensor([0, 2000, 0, 5000, 0, 9000, 11000], dtype=torch.int32)
    call = kernel("sm_90a", op="mha_items", keys="split")
    with using(CHECKED):
        call(cu_q, cu_k, memory[:words], 1, 9000, splits, rows)
    found = memory.tolist()
    # sequence 0: 100 x 2 rows from 0; sequence 2 (250 x 2) does not fit; 4 (90 x 8) neither; 5
    # would begin behind them
    assert found[TILES] == 5 and found[SPLITS] == splits and found[3] == words - 20
    assert found[HEADER : HEADER + 4] == [0, 0, 2, 0]
    assert [found[HEADER + 4 * i + 2] for i in (1, 2)] == [0, 0], "places of those that do not fit"
    bases = HEADER + 4 * splits
    assert found[bases : bases + 6] == [0, -1, -1, -1, -1, -1]
    assert set(found[words:]) == {-7}


def test_a_wrong_list_is_noticed() -> None:
    """The judge's own check."""
    lq, lk = (300, 200), (9000, 2000)
    room = SplitRoom.of(500, 2, 11000)
    good = split_work(lq, lk, True, room, fill=-7).tolist()
    wrong = lambda work: items.wrong_split(work, lq, lk, True, room)
    begin = good[3]
    assert not wrong(good) and good[TILES] == 3 * 2 + 2
    assert "header" in wrong([1, *good[1:]])
    assert "split row tiles" in wrong([*good[:HEADER], 1, *good[HEADER + 1 :]])
    assert "first partial rows" in wrong([*good[: begin - 2], 8, *good[begin - 1 :]])
    assert "once" in wrong([*good[:begin], *good[begin + 4 : begin + 8], *good[begin + 4 :]])
    end = begin + 4 * good[TILES]
    swapped = [*good[:begin], *good[end - 4 : end], *good[begin + 4 : end - 4],
               *good[begin : begin + 4], *good[end:]]  # fmt: skip
    assert "behind a shorter" in wrong(swapped)


# -------------------------------------------------------------------------------------- kernels


def run(job: SplitJob, name: str = MAIN) -> dict[str, Any]:
    """The arguments of a call of the kernel that attends, after it."""
    spec = VariantSpec.from_name(name)
    directory = variants.find_or_build(spec, need_library=False).directory
    call, given = selfcheck.load(spec, directory), job.arguments()
    with using(CHECKED):
        call(*(given[name] for name in call.names.arguments))
    return given


@pytest.mark.whole_matrix
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", [MAIN, WIDE])
def test_row_tiles_and_heads(name: str, causal: bool) -> None:
    """Two row tiles in two pieces, two heads that share K; maxima that move.  Of tiles of 80 keys
    the first piece's last one holds keys of the second."""
    spec = VariantSpec.from_name(name)
    torch.manual_seed(4)
    job = SplitJob.draw(spec, (130, 9), (4200, 30), 2, 1, causal=causal, spread=6.0, ctas=3)
    assert lists_of(job.lq, job.lk, causal).bases == [0, -1]
    errors = job.split_errors(run(job, name))
    assert errors.right, str(errors)


@pytest.mark.whole_matrix
def test_schedules() -> None:
    """Every role ahead of and behind the others: the same bits."""
    spec = VariantSpec.from_name(MAIN)
    torch.manual_seed(3)
    job = SplitJob.draw(spec, (4, 20), (2000, 70), 1, 1, spread=6.0, ctas=2)
    directory = variants.find_or_build(spec, need_library=False).directory
    call, found = selfcheck.load(spec, directory), []
    names = ("out", "lse", "partial_out", "partial_lse")
    for seed in range(12):
        given = job.arguments()
        with using(mutate.schedule(seed)):
            call(*(given[name] for name in call.names.arguments))
        found.append([given[name].nan_to_num(7.0) for name in names])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0]))


def alone(job: SplitJob, which: int) -> SplitJob:
    """One sequence of a job."""
    q0, k0 = sum(job.lq[:which]), sum(job.lk[:which])
    s_q, s_k = job.lq[which], job.lk[which]
    return replace(
        job, q=job.q[q0 : q0 + s_q].clone(), v=job.v[k0 : k0 + s_k].clone(),
        ks=tuple(k[k0 : k0 + s_k].clone() for k in job.ks), lq=(s_q,), lk=(s_k,), ctas=1,
    )  # fmt: skip


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", [MAIN, WIDE])
def test_partial_rows_do_not_depend_on_the_batch(name: str) -> None:
    """Between neighbours of NaN, and alone, on more and fewer CTAs: the same partial rows."""
    spec = VariantSpec.from_name(name)
    torch.manual_seed(2)
    job = SplitJob.draw(spec, (2, 10, 60), (1990, 2100, 44), 1, 1, spread=4.0, ctas=3)
    for rows in (*job.ks, job.v):
        rows[:1990], rows[4090:] = 1e4, math.nan
    many, one = run(job, name), run(alone(job, 1), name)
    begin = lists_of(job.lq, job.lk, True).bases[1]
    rows: list[Tensor] = [many[n][begin : begin + 20] for n in ("partial_out", "partial_lse")]
    assert begin == 4 and one["partial_out"][:20].isfinite().all()
    assert torch.equal(rows[0], one["partial_out"][:20])
    assert torch.equal(rows[1], one["partial_lse"][:20])
