"""The hazard checker and the two CTAs of a pair (.cta_group::2): rule by rule, as for one CTA.

Each CTA has four warps, 64 rows of A and 8 of B; thread 0 of CTA 0 issues for both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support import hazards
from tests.support.hazards import GAP, wait

A_AT, B_AT = 2048, 4096  # addresses in shared memory: smem + 1024, smem + 3072
DESCRIPTOR = 1 << 46 | 128 >> 4 << 32  # version, SBO of 8 rows without swizzle
A = DESCRIPTOR | 1024 >> 4 << 16 | A_AT >> 4
B = DESCRIPTOR | 128 >> 4 << 16 | B_AT >> 4
SHAPE = 1 << 4 | 16 >> 3 << 17 | 128 >> 4 << 24  # f32 = e4m3 e4m3, 128 x 16: 8 columns
CLUSTER = "barrier.cluster.arrive; barrier.cluster.wait;\n"
# %r99 thread, %r98 warp, %r90 rank; %p50 thread 0 of CTA 0, %p51 warp 0, %p52 the other warps,
# %p53 CTA 1, %p54 warp 1 of CTA 1, %p55 thread 0; %r1 two mbarriers; %r40 tensor memory
HEAD = f"""
mov.u32 %r99, %tid.x; shr.u32 %r98, %r99, 5; mov.u32 %r1, smem; mov.u32 %r90, %cluster_ctarank;
setp.eq.s32 %p55, %r99, 0; setp.eq.s32 %p51, %r98, 0; setp.ne.s32 %p52, %r98, 0;
setp.eq.s32 %p53, %r90, 1; setp.eq.s32 %p54, %r98, 1; and.pred %p54, %p54, %p53;
not.pred %p56, %p53; and.pred %p50, %p55, %p56; setp.eq.s32 %p2, %r1, %r1;
mov.b64 %rd20, {A}; mov.b64 %rd21, {B}; mov.b32 %r41, {SHAPE}; mov.b16 %rs1, 3;
@%p55 mbarrier.init.shared.b64 [%r1], 1; @%p55 mbarrier.init.shared.b64 [%r1+8], 1;
@%p55 fence.mbarrier_init.release.cluster;
add.s32 %r5, %r1, 1024; mad.lo.s32 %r6, %r99, 16, %r5;
"""
OPERANDS = """
st.shared.v4.b32 [%r6], {0, 0, 0, 0}; st.shared.v4.b32 [%r6+2048], {0, 0, 0, 0};
fence.proxy.async.shared::cta;
"""
ALLOC = """@%p51 tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1+64], 32;
bar.sync 0; ld.shared.b32 %r40, [%r1+64];
"""
DEALLOC = "@%p51 tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r40, 32;\n"
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;\n", "tcgen05.fence::after_thread_sync;\n"
WAIT_LD, WAIT_ST = "tcgen05.wait::ld.sync.aligned;\n", "tcgen05.wait::st.sync.aligned;\n"
START = f"{HEAD} {OPERANDS} {ALLOC} {CLUSTER}"
END = f"{WAIT_LD} {WAIT_ST} {BEFORE} {CLUSTER} {AFTER} {DEALLOC}"
MMA = "@%p50 tcgen05.mma.cta_group::2.kind::f8f6f4 [%r40], %rd20, %rd21, %r41, !%p2;\n"
OUT = "{" + ", ".join(f"%r{120 + i}" for i in range(8)) + "}"
LD = f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {OUT}, [%r40];\n"
ST = "tcgen05.st.sync.aligned.32x32b.x8.b32 [%r40], {0, 0, 0, 0, 0, 0, 0, 0};\n"


def commit(barrier: str = "%r1", multicast: bool = True) -> str:
    cast, mask = (".multicast::cluster", ", %rs1") if multicast else ("", "")
    return (
        "@%p50 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
        f"{cast}.b64 [{barrier}]{mask};\n"
    )


COMMIT, WAIT = commit(), wait()
DONE_2 = f"{commit('%r1+8')} {wait('%r1+8')} {AFTER}"
MMA_T, LD_T, DEALLOC_T = "tcgen05.mma", "tcgen05.ld", "tcgen05.dealloc"


@dataclass
class Case(hazards.Case):
    """A program for the two CTAs of a pair."""

    head: str = START
    launch: dict[str, Any] = field(
        default_factory=lambda: {"target": "sm_100a", "block": 128, "grid": 2, "cluster": 2}
    )


CASES = {
    "the peer's operands": Case(
        "race", f"{HEAD} {ALLOC} {CLUSTER} {OPERANDS} {GAP} {MMA} {COMMIT} {WAIT} {END}", CLUSTER,
        events=("st.shared", MMA_T), some=True, head="",
    ),
    "the peer loads before its phase": Case(
        "read-before-complete", f"{MMA} {COMMIT} {CLUSTER} {GAP} {AFTER} {LD} {WAIT} {END}", WAIT,
        events=(MMA_T, LD_T),
    ),
    "the peer still loads what is overwritten": Case(
        "overwrite-in-use",
        f"{MMA} {COMMIT} {WAIT} {AFTER} {LD} {WAIT_LD} {BEFORE} {GAP} {AFTER} {MMA} {DONE_2} {END}",
        CLUSTER, "bar.sync 0;", events=(LD_T, MMA_T), some=True,
    ),
    "the peer's stores": Case(
        "read-before-complete",
        f"{ST} {GAP} {BEFORE} {CLUSTER} {AFTER} {MMA.replace('!%p2', '%p2')} {COMMIT} {WAIT} {END}",
        WAIT_ST, "@!%p54 " + WAIT_ST, events=("tcgen05.st", MMA_T),
    ),
    "the peer's operands overwritten": Case(
        "overwrite-in-use",
        f"{MMA} {COMMIT} {CLUSTER} {GAP} @%p53 st.shared.b32 [%r6], 1; {WAIT} {END}", WAIT,
        events=(MMA_T, "st.shared"),
    ),
    "the peer has ended": Case(  # barrier.cluster does not wait for threads that have exited
        "exited-block", f"{GAP} {CLUSTER} {MMA} {COMMIT} {WAIT} {END}", "", "@%p53 exit;",
        events=("exit", MMA_T),
    ),
    "the peer may end before the mma does": Case(
        "exit-in-flight", f"{MMA} {COMMIT} {CLUSTER} {GAP} {END}", WAIT, "@%p53 exit;",
        events=("tcgen05", "exit"), some=True,
    ),
    "dealloc in the peer": Case(
        "early-dealloc",
        f"{MMA} {COMMIT} {WAIT} {AFTER} @%p54 {LD} @%p54 {WAIT_LD} {GAP} {AFTER} {DEALLOC}",
        f"{BEFORE} bar.sync 0;",
        events=(LD_T, DEALLOC_T), some=True,
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_the_broken_program_is_reported(case: Case) -> None:
    case.check_broken()


@every_case
def test_the_correct_twin_is_clean(case: Case) -> None:
    case.check_correct()
