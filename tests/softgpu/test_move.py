"""Software GPU: registers, addresses, hints."""

from __future__ import annotations

import numpy as np
import pytest

from softgpu import SoftGpuError
from softgpu.testing import aligned, launch
from tests.support.ptx import TID, covers, run


@covers("mov", "cvta", "isspacep", "mapa", "getctarank", "createpolicy", "prefetch", "prefetchu",
        "applypriority", "discard", "nanosleep", "pmevent", "setmaxnreg.inc", "fence", "membar",
        "griddepcontrol.wait", "griddepcontrol.launch_dependents", "cp.async.bulk.prefetch",
        "cp.async.bulk.prefetch.tensor")  # fmt: skip
def test_moves_addresses_and_hints() -> None:
    got = run("""
    mov.b64 %rd5, {%r99, %r50}; mov.b64 {%r1, %r2}, %rd5; mov.b32 {%rs1, %rs2}, %r50;
    mov.b32 %r3, {%rs2, %rs1}; sub.s32 %r2, %r2, %r50; shr.u32 %r4, %r50, 16;
    shl.b32 %r5, %r50, 16; or.b32 %r4, %r4, %r5; sub.s32 %r3, %r3, %r4;
    add.s32 %r10, %r1, %r2; add.s32 %r10, %r10, %r3;
    """)
    assert got == list(range(32))
    source = aligned(32, np.uint32)
    got = run("""
    cvt.u64.u32 %rd5, %r50; cvta.shared.u64 %rd6, %rd5; cvta.to.shared.u64 %rd7, %rd6;
    cvta.to.global.u64 %rd8, %rd2;
    prefetch.global.L2 [%rd2]; prefetchu.L1 [%rd2];
    applypriority.global.L2::evict_normal [%rd2], 128;
    discard.global.L2 [%rd2], 128; createpolicy.fractional.L2::evict_first.b64 %rd9, 1.0;
    cp.async.bulk.prefetch.L2.global [%rd2], 64; nanosleep.u32 20; pmevent 1;
    fence.acq_rel.gpu; fence.proxy.async; fence.proxy.alias; membar.gl;
    fence.mbarrier_init.release.cluster;
    setmaxnreg.inc.sync.aligned.u32 240; griddepcontrol.wait; griddepcontrol.launch_dependents;
    @!%p50 bra OVER; cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%rd2, {0}]; OVER:
    mov.u32 %r20, %cluster_ctarank; xor.b32 %r21, %r20, 1;
    mapa.shared::cluster.u32 %r22, %r50, %r21; getctarank.shared::cluster.u32 %r23, %r22;
    mapa.u64 %rd10, %rd6, %r21; getctarank.u64 %r24, %rd10;
    isspacep.shared %p1, %rd6; isspacep.global %p2, %rd2; isspacep.shared::cta %p3, %rd10;
    isspacep.shared::cluster %p4, %rd10; isspacep.local %p5, %rd6; isspacep.global %p6, %rd6;
    setp.eq.u64 %p7, %rd7, %rd5; setp.eq.u64 %p8, %rd8, %rd2;
    mov.u32 %r10, 0;
    @%p1 or.b32 %r10, %r10, 1; @%p2 or.b32 %r10, %r10, 2; @%p3 or.b32 %r10, %r10, 4;
    @%p4 or.b32 %r10, %r10, 8; @%p5 or.b32 %r10, %r10, 16; @%p6 or.b32 %r10, %r10, 32;
    @%p7 or.b32 %r10, %r10, 64; @%p8 or.b32 %r10, %r10, 128;
    shl.b32 %r23, %r23, 8; or.b32 %r10, %r10, %r23; shl.b32 %r24, %r24, 9; or.b32 %r10, %r10, %r24;
    """, source, grid=2, cluster=2)  # fmt: skip
    flags = 1 | 2 | 8 | 64 | 128
    assert got == [flags | 0x300] * 32 + [flags] * 32


@covers("setmaxnreg.dec")
@pytest.mark.parametrize("moves", ["inc 120", "dec 136", "dec 40; inc 32", "dec 120; dec 128"])
def test_registers_the_wrong_way_are_an_illegal_instruction(moves: str) -> None:
    """512 threads are launched with 128 each."""
    code = [f"setmaxnreg.{'.sync.aligned.u32 '.join(m.split())};" for m in moves.split("; ")]
    with pytest.raises(SoftGpuError, match="an illegal instruction"):
        run(" ".join(code), threads=512)
    way, count = moves.split("; ")[0].split()
    other = {"inc": "dec", "dec": "inc"}[way] if ";" not in moves else way
    run(f"setmaxnreg.{other}.sync.aligned.u32 {count}; mov.u32 %r10, 0;", threads=512)


def test_clocks_only_go_forward() -> None:
    """A reading is later than all before it, of whatever thread; its high half is apart."""
    got = run("""
    mov.u32 %r1, %globaltimer_lo; mov.u64 %rd5, %globaltimer; mov.u32 %r2, %clock;
    mov.u64 %rd6, %clock64; mov.u32 %r3, %globaltimer_lo; mov.u32 %r4, %globaltimer_hi;
    cvt.u32.u64 %r5, %rd5; cvt.u32.u64 %r6, %rd6;
    setp.lt.u32 %p1, %r1, %r5; setp.lt.u32 %p2, %r5, %r2; setp.lt.u32 %p3, %r2, %r6;
    setp.lt.u32 %p4, %r6, %r3; setp.eq.u32 %p5, %r4, 0; mov.u32 %r10, %r1;
    and.pred %p1, %p1, %p2; and.pred %p1, %p1, %p3; and.pred %p1, %p1, %p4;
    and.pred %p1, %p1, %p5; @!%p1 mov.u32 %r10, 0;
    """, grid=2)  # fmt: skip
    first, second = set(got[:32]), set(got[32:])
    assert len(first) == len(second) == 1 and first != second and 0 not in first | second


@covers("mov", "ld", "st")
def test_wide_registers_and_accesses() -> None:
    """128-bit registers, packed and unpacked, through shared memory; 32 bytes a lane to global."""
    out, data = aligned((32, 4), np.uint64), aligned((32, 4), np.uint64)
    data[...] = np.random.default_rng(0).integers(0, 2**63, data.shape, np.uint64)
    launch(TID + """
    mad.lo.s64 %rd10, %rd60, 32, %rd2; mad.lo.s64 %rd11, %rd60, 32, %rd1;
    ld.global.v4.b64 {%rd20, %rd21, %rd22, %rd23}, [%rd10];
    mov.b128 %q1, {%rd20, %rd21}; mad.lo.s32 %r1, %r99, 16, %r50;
    st.shared.b128 [%r1], %q1; mov.b128 %q2, %q1; ld.shared.b128 %q3, [%r1];
    mov.b128 {%rd30, %rd31}, %q3; mov.b128 {%rd32, %rd33}, %q2; setp.lt.u32 %p1, %r99, 16;
    @%p1 st.global.v4.b64 [%rd11], {%rd31, %rd30, %rd32, %rd23};
    """, [out, data], declarations=".reg .b128 %q<4>;")  # fmt: skip
    want = data[:, [1, 0, 0, 3]]
    want[16:] = 0
    np.testing.assert_array_equal(out, want)
