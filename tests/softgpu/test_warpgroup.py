"""What the four warps of a warpgroup must execute alike: programs where one does not, and twins.

See ``tests.support.hazards``; ``tests.kernels.test_planted`` has such a branch in a shipped kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from softgpu import Deadlock, Hazard, Options
from softgpu.testing import aligned, launch
from tests.support import hazards
from tests.support.hazards import GAP

KIND = "warpgroup-divergence"
# %r99 thread, %r98 warp of the warpgroup, %r96 warpgroup; %p1 its warp 1, %p2 warp 1 of the second;
# %p3 is true for all warps of a warpgroup or for none
HEAD = """
mov.u32 %r99, %tid.x; shr.u32 %r97, %r99, 5; and.b32 %r98, %r97, 3; shr.u32 %r96, %r99, 7;
setp.eq.s32 %p1, %r98, 1; setp.eq.s32 %p2, %r97, 5; setp.eq.s32 %p3, %r96, 1;
"""
FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT0, WAIT1 = "wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"
MMA = "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3"
ZEROS = """mov.u32 %r10, smem; mad.lo.s32 %r11, %r99, 16, %r10;
st.shared.v4.b32 [%r11], {0, 0, 0, 0}; fence.proxy.async; bar.sync 0;
shr.u32 %r12, %r10, 4; cvt.u64.u32 %rd20, %r12;
"""
ONE = f"{MMA} {{%r100, %r101, %r102, %r103}}, %rd20, %rd20, 0, 1, 1;"
CHAIN = f"{FENCE} {ONE} {COMMIT} {WAIT0}"


def under(predicate: str, text: str) -> str:
    """``text`` in a branch that warps take for which ``predicate`` holds."""
    return f"{{ @!{predicate} bra OVER; {text} OVER: }}\n"


def case(**words: Any) -> hazards.Case:
    """A program for two warpgroups that begins with ``HEAD``."""
    return hazards.Case(kind=KIND, head=HEAD, launch={"block": 256}, **words)


CASES = {
    "a wait in a branch of one warp": case(
        body=f"{GAP} {FENCE}", wrong=under("%p1", WAIT0), right=under("%p3", WAIT0),
        events=("wgmma.", "wgmma."),
    ),
    "a predicate instead of a branch": case(
        body=f"{GAP} {FENCE}", wrong=f"@%p2 {WAIT0}", right=f"@%p3 {WAIT0}",
        events=("wgmma.", "wgmma."),
    ),
    "two places with one text": case(
        body=f"{FENCE} {GAP} {FENCE}", wrong=f"@%p1 {WAIT0} @!%p1 {WAIT0}",
        right=f"@%p3 {WAIT0} @!%p3 {WAIT0}", events=(WAIT0[:-1], WAIT0[:-1]),
    ),
    "one warp waits once more, at its end": case(
        body=f"{FENCE} {WAIT0} {GAP}", wrong=under("%p1", WAIT1), right=under("%p3", WAIT1),
        events=("ret", WAIT1[:-1]),
    ),
    "a loop with a trip more": case(
        body=f"add.s32 %r1, {GAP}, 2; L: {FENCE} sub.s32 %r1, %r1, 1; setp.gt.s32 %p4, %r1, 0;"
        f" @%p4 bra L; {COMMIT}", wrong="%r98", right="%r96", events=("wgmma.", "wgmma."),
    ),
    "products": case(
        body=f"{ZEROS} {CHAIN} {GAP} {CHAIN}", wrong=under("%p1", CHAIN),
        right=under("%p3", CHAIN), events=("wgmma.", "wgmma."),
    ),
    "registers": case(
        body=f"{GAP} setmaxnreg.inc.sync.aligned.u32 240;",
        wrong=under("%p2", "setmaxnreg.dec.sync.aligned.u32 240;"),
        right=under("%p3", "setmaxnreg.dec.sync.aligned.u32 240;"),
        events=("setmaxnreg", "setmaxnreg"),
    ),
    "a warp that exits before": case(
        body=f"{FENCE} {GAP} {FENCE}", wrong="@%p1 ret;", right="@%p3 ret;",
        events=(FENCE[:-1], "ret"),
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_the_broken_program_is_reported(case: hazards.Case) -> None:
    """Every schedule finds it: nothing depends on which warp comes first."""
    found = case.check_broken()
    assert {e.kind for e in found} == {KIND} and len(found) == len(hazards.SCHEDULES)


@every_case
def test_the_correct_twin_is_clean(case: hazards.Case) -> None:
    case.check_correct()


def _reports(body: str, block: int = 256) -> list[Hazard]:
    buffer = aligned(64, np.uint32)
    options = Options(hazards="collect")
    return launch(HEAD + body, [buffer], block=block, options=options).hazards


def test_warpgroups_do_not_wait_for_each_other() -> None:
    """One loads and ends, another multiplies; a warp's role within the first does not matter."""
    roles = "setmaxnreg.inc.sync.aligned.u32 240; @%p3 bra MMA; @%p1 bra E; bar.warp.sync -1;"
    assert not _reports(f"{roles} E: ret; MMA: {FENCE} {WAIT0}")


def test_a_report_names_both_warps() -> None:
    [report] = _reports(f"{under('%p2', WAIT0)} {FENCE} {WAIT1} {FENCE} {COMMIT}")
    assert report.place == "warpgroup of warps 4-7, after 0 such instructions"
    assert [(e.warp, e.text) for e in report.events] == [(4, FENCE[:-1]), (5, WAIT0[:-1])]


def test_a_block_may_end_with_part_of_a_warpgroup() -> None:
    """The rule is about the warps that there are."""
    assert not _reports(f"{FENCE} {WAIT0}", block=192)
    [report] = _reports(f"{FENCE} {under('%p2', WAIT0)}", block=192)
    assert [e.warp for e in report.events] == [4, 5] or [e.warp for e in report.events] == [5, 4]


@pytest.mark.parametrize("text", [FENCE, COMMIT, WAIT0, "setmaxnreg.inc.sync.aligned.u32 240;"])
def test_lanes_of_a_warp_that_do_not_come_together_are_a_hang(text: str) -> None:
    lanes = "and.b32 %r95, %r99, 1; setp.eq.s32 %p5, %r95, 0;"
    with pytest.raises(Deadlock, match="the other lanes of mask 0xffffffff"):
        _reports(f"{lanes} {under('%p5', text)}", block=128)


def test_without_the_check_nothing_is_said() -> None:
    buffer = aligned(64, np.uint32)
    broken = CASES["a wait in a branch of one warp"]
    broken.run(broken.wrong, Options(hazards="off"))
    launch(HEAD + CHAIN.replace(ONE, ""), [buffer], block=256, options=Options(hazards="off"))
