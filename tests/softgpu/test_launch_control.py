"""Software GPU: clusters that cancel others and do their work (clusterlaunchcontrol)."""

from __future__ import annotations

import numpy as np
import pytest

from softgpu import MemoryFault, Options, SoftGpuError
from softgpu.testing import aligned, launch
from tests.support.ptx import covers

ASK = """
mbarrier.init.shared.b64 [%r50], 1; fence.mbarrier_init.release.cluster; mov.u32 %r3, 0;
mov.u32 %r7, %ctaid.x;
LOOP: mul.wide.u32 %rd10, %r7, 4; add.s64 %rd10, %rd1, %rd10;
atom.global.add.u32 %r8, [%rd10], 1;
mbarrier.arrive.expect_tx.shared.b64 _, [%r50], 16;
clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128
    [%r50+16], [%r50];
WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r50], %r3; @!%p1 bra WAIT;
xor.b32 %r3, %r3, 1; ld.shared.b128 %q1, [%r50+16];
fence.proxy.async.shared::cta;
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q1;
"""
NEXT = """
@!%p2 bra END;
clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r7, %q1;
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r10, %r11, %r12, _}, %q1;
sub.s32 %r7, %r7, %r11; bra LOOP;
"""


def ask(tail: str, grid: int = 9, resident: int = 1, **kw: object) -> list[int]:
    """Thread 0 of every CTA counts its own work and that of those it cancels."""
    out = aligned(grid, np.uint32)
    body = "mov.u32 %r50, smem; mov.u32 %r99, %tid.x; setp.ne.u32 %p9, %r99, 0; @%p9 bra END;"
    stats = launch(
        body + ASK + tail + "END:", [out], grid=grid, declarations=".reg .b128 %q<2>;",
        options=Options(resident=resident, **kw), target="sm_100a",
    )  # fmt: skip
    return [*out.tolist(), stats.blocks]


@covers("clusterlaunchcontrol.try_cancel", "clusterlaunchcontrol.query_cancel")
@pytest.mark.parametrize("mode", ["early", "late", "random"])
def test_work_is_done_once(mode: str) -> None:
    *work, blocks = ask(NEXT, asynchronous=mode, hazards="raise")
    assert work == [1] * 9
    assert blocks == 1  # the first one takes all the others
    for seed in range(4):
        *work, blocks = ask(NEXT, asynchronous=mode, seed=seed, resident=3)
        assert work == [1] * 9
        assert 3 <= blocks <= 9


def test_after_a_refusal() -> None:
    with pytest.raises(SoftGpuError, match="an earlier request was refused"):
        ask("bra LOOP;")


FIRST = "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r7, %q1;"


def test_the_coordinates_of_a_refusal_are_poison() -> None:
    """They may be read before is_canceled is looked at (PTX ISA 9.7.13.18.2), and not be used."""
    *work, _ = ask(f"{FIRST} @!%p2 bra END; bra LOOP;", grid=9)
    assert work == [1] * 9
    with pytest.raises(MemoryFault):  # the counter of a cluster that is none
        ask(f"{FIRST} bra LOOP;", grid=9)
    *work, _ = ask(f"{FIRST} mov.u32 %r8, 0xdeadbeef; st.global.b32 [%rd1], %r7;", grid=1)
    assert work == [0xDEADBEEF]


def test_every_cta_of_the_cluster_is_answered() -> None:
    out = aligned(4, np.uint32)
    body = """
    mov.u32 %r50, smem; mov.u32 %r99, %tid.x; mov.u32 %r90, %cluster_ctarank;
    setp.eq.u32 %p1, %r99, 0; setp.eq.u32 %p2, %r90, 1; and.pred %p2, %p2, %p1;
    @%p1 mbarrier.init.shared.b64 [%r50], 1; fence.mbarrier_init.release.cluster;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r50], 16;
    barrier.cluster.arrive; barrier.cluster.wait;
    @%p2 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 [%r50+16], [%r50];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r50], 0; @!%p3 bra WAIT;
    ld.shared.b128 %q1, [%r50+16]; mul.wide.u32 %rd10, %r90, 4; add.s64 %rd10, %rd1, %rd10;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r7, %q1;
    @%p1 st.global.b32 [%rd10], %r7;
    """  # noqa: E501
    launch(body, [out], grid=4, cluster=2, declarations=".reg .b128 %q<2>;", target="sm_100a")
    assert out.tolist() == [2, 2, 0, 0]
