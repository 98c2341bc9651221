"""Bugs planted between the two CTAs of a pair (tests/support/pair_gemm.py), and their reports.

As in ``test_tcgen05_planted``, of which this is the second program.
"""

from __future__ import annotations

import pytest
import torch

import softgpu
from softgpu import mutate
from softgpu.cost.profile import profile
from softgpu.cost.recorder import Recorder
from softgpu.cost.timeline import Player
from softgpu.errors import Deadlock
from tests.support.needs import needs_compiler
from tests.support.planting import Bench, Source, at, check, granted, with_operand

pytestmark = needs_compiler
SOURCE = Source("pair_gemm")
TILES, ROWS, COLUMNS, CHANNELS = 4, 128, 64, 64

line = SOURCE.line
EMPTY_WAIT, EXPECT = line("mbarrier_wait(cta.bars + EMPTY"), line("mbarrier_arrive_and_expect_tx")
LOAD, MMA = line("cute.copy("), line("prim.tcgen05_mma(")
FULL_WAIT, DONE_WAIT = (line(f"mbarrier_wait(cta.bars + {x}") for x in ("FULL", "DONE"))
EMPTY_COMMIT, DONE_COMMIT = line("tcgen05_commit(empty"), line("tcgen05_commit(cta.bars + DONE")
LOAD_C = line("prim.tcgen05_ld(")
LAST_ARRIVE = line("cute.arch.cluster_arrive()", "self.finish")
LAST_WAIT, DEALLOC = line("cute.arch.cluster_wait()", "self.finish"), line("dealloc_tmem(")
HALF = "shr.u32 n, {}, 1;"
LEAVE = (  # in front of the old statement: CTA 1 ends
    "{ .reg .b32 rank; .reg .pred peer; mov.u32 rank, %cluster_ctarank;"
    f" setp.eq.u32 peer, rank, 1; @peer exit; {mutate.OLD} }}"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Built for sm_100a; the oracle is a float64 matrix product, exact for these small integers."""
    kernel = SOURCE.build(tmp_path_factory.mktemp(SOURCE.name))
    generator, f8 = torch.Generator().manual_seed(5), torch.float8_e4m3fn
    a, b = (
        torch.randint(-4, 5, (TILES, n, CHANNELS), generator=generator).double()
        for n in (ROWS, COLUMNS)
    )
    arguments = [x.to(f8).view(torch.uint8) for x in (a, b)]
    return Bench(kernel, arguments, (a @ b.mT).sum(0).float())


modes = pytest.mark.parametrize("mode", ["early", "late"])


def test_every_schedule_gives_one_clean_result(pair: Bench) -> None:
    pair.check_schedules()


def test_cost_counts_both_ctas(pair: Bench) -> None:
    """64 of 128 rows a CTA: 16 cycles for each of two steps of K; operands are 64 + 32 rows of 32
    bytes.  The timeline plays commits that arrive at both, and waits for the peer."""
    recorder = Recorder()
    with softgpu.using(softgpu.Options(asynchronous="early", observer=recorder)):
        assert pair.right()
    found = profile(recorder, None, (0, 0), None)
    assert found.ctas == 2 and found.tile.tensor == TILES * 2 * 16
    assert found.tile.waves["operands"] == TILES * 2 * (64 + 32) * 32 // 128
    kernel = recorder.programs[found.kernel].kernel
    play = Player(kernel, recorder.warps, {}, 20.0).play()
    for rank in range(2):
        assert play.busy[rank, "tensor"] == found.tile.tensor
    assert play.waits()["mbarrier that an MMA commits to"] > 0


# ---- the peer's life -----------------------------------------------------------------------------
@modes
def test_the_peer_ends_with_its_copies_in_flight(pair: Bench, mode: str) -> None:
    """It neither waits for the result nor meets the leader at the end."""
    [wait] = pair.all("mbarrier.try_wait", DONE_WAIT)
    [arrive] = pair.all("barrier.cluster.arrive", LAST_ARRIVE)
    error = pair.broken({wait.pc: LEAVE, arrive.pc: LEAVE}, mode)
    check(error, "exit-in-flight", LOAD, LAST_ARRIVE)
    assert "shared memory of block (1, 0, 0)" in str(error)


def test_the_peer_is_not_alive(pair: Bench) -> None:
    """It has no rows and leaves at once; the leader counts its own bytes only, but multiplies."""
    [wait], [load] = (pair.all("mbarrier.try_wait", x) for x in (DONE_WAIT, EMPTY_WAIT))
    [arrive] = pair.all("barrier.cluster.arrive", LAST_ARRIVE)
    [expect] = pair.all("mbarrier.arrive.expect_tx", EXPECT)
    changes = {i.pc: LEAVE for i in (wait, load, arrive)}
    found = pair.reports({**changes, expect.pc: with_operand(expect, -1, HALF)}, range(8))
    assert ("exited-block", LAST_ARRIVE, MMA) in found, found
    early = ("uninitialised", MMA)  # before the peer has ended
    assert {kind for kind, *_ in found - {early}} == {"exited-block"}, found


@modes
def test_the_peer_skips_the_last_barrier(pair: Bench, mode: str) -> None:
    """Nothing is in flight any more, but its half of the columns is still allocated."""
    [arrive] = pair.all("barrier.cluster.arrive", LAST_ARRIVE)
    error = pair.broken({arrive.pc: LEAVE}, mode)
    at(error, Deadlock, DEALLOC, "tcgen05.dealloc of the CTA's peer")


def test_no_barrier_at_the_end(pair: Bench) -> None:
    [arrive] = pair.all("barrier.cluster.arrive", LAST_ARRIVE)
    [wait] = pair.all("barrier.cluster.wait", LAST_WAIT)
    found = pair.reports({arrive.pc: "", wait.pc: ""}, range(4))
    assert ("early-dealloc", LOAD_C, DEALLOC) in found, found


# ---- commits that arrive in both CTAs ------------------------------------------------------------
@modes
@pytest.mark.parametrize(
    ("commit", "wait", "offset"), [(EMPTY_COMMIT, EMPTY_WAIT, 16), (DONE_COMMIT, DONE_WAIT, 32)],
    ids=["a stage is free", "C is done"],
)  # fmt: skip
def test_the_commit_reaches_one_cta_only(
    pair: Bench, commit: str, wait: str, offset: int, mode: str
) -> None:
    [ins] = pair.all("tcgen05.commit", commit)
    error = pair.broken({ins.pc: with_operand(ins, -1, "and.b16 n, {}, 1;")}, mode)
    at(error, Deadlock, wait, f"mbarrier at CTA 1, offset {offset} to complete phase parity 0")


def test_commit_before_the_last_mma(pair: Bench) -> None:
    [commit], mma = pair.all("tcgen05.commit", EMPTY_COMMIT), pair.all("tcgen05.mma", MMA)[-1]
    earlier = f"{with_operand(commit, -1, 'mov.b16 n, 3;')} {mutate.OLD}"
    found = pair.reports({commit.pc: "", mma.pc: earlier}, range(4))
    assert ("overwrite-in-use", MMA, LOAD) in found, found


# ---- the peer's operands -------------------------------------------------------------------------
@modes
def test_operands_not_waited_for(pair: Bench, mode: str) -> None:
    [wait] = pair.all("mbarrier.try_wait", FULL_WAIT)
    check(pair.broken({wait.pc: granted(wait)}, mode), "read-before-complete", LOAD, MMA)


def test_the_peers_bytes_not_expected(pair: Bench) -> None:
    [expect] = pair.all("mbarrier.arrive.expect_tx", EXPECT)
    found = pair.reports({expect.pc: with_operand(expect, -1, HALF)}, range(6))
    assert ("read-before-complete", LOAD, MMA) in found, found
    assert ("wrong-tx-count", EXPECT, LOAD) in found, found


def test_stage_loaded_again_too_early(pair: Bench) -> None:
    [wait] = pair.all("mbarrier.try_wait", EMPTY_WAIT)
    assert pair.reports({wait.pc: granted(wait)}, range(4)) == {("race", LOAD, LOAD)}


# ---- every synchronisation -----------------------------------------------------------------------
def test_every_instruction_that_can_be_removed_is_missed(pair: Bench) -> None:
    """The permit is a hint for other CTAs on the multiprocessor: nothing here wants columns."""
    outcomes = list(mutate.study(pair.kernel, pair.entry, pair.right, 3))
    assert {o.site.family for o in outcomes} == {"wait", "arrive", "fence", "commit", "allocation"}
    survivors = [o.site.text.split(".cta")[0] for o in outcomes if not o.killed]
    assert survivors == ["tcgen05.relinquish_alloc_permit"]
