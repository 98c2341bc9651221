"""Software GPU: barriers of a CTA and of a cluster."""

from __future__ import annotations

import pytest

from softgpu import Options
from tests.support.ptx import WAIT, covers, run


@covers("bar.sync", "barrier.sync", "bar.cta.sync", "barrier.cta.sync", "bar.arrive",
        "barrier.arrive", "bar.cta.arrive", "barrier.cta.arrive")  # fmt: skip
@pytest.mark.parametrize("seed", range(4))
def test_named_barriers_by_every_name(seed: int) -> None:
    """Warps 0 and 1 hand a value to warp 2 four times, each time through another spelling."""
    names = [("bar", "bar"), ("barrier", "barrier"), ("bar.cta", "bar.cta"),
             ("barrier.cta", "barrier.cta")]  # fmt: skip
    body = "shr.u32 %r2, %r99, 5; mov.u32 %r10, 0; setp.eq.s32 %p1, %r2, 2; @%p1 bra TAKE;\n"
    body += "mad.lo.s32 %r1, %r99, 4, %r50;\n"
    for i, (_, give) in enumerate(names):
        body += f"add.s32 %r3, %r99, {i}; st.shared.b32 [%r1+{256 * i}], %r3;"
        body += f"{give}.arrive {i + 1}, 96;\n"
    body += "bra OUT; TAKE: and.b32 %r4, %r99, 31; mad.lo.s32 %r1, %r4, 4, %r50;\n"
    for i, (take, _) in enumerate(names):
        body += f"{take}.sync {i + 1}, 96; ld.shared.b32 %r5, [%r1+{256 * i}];"
        body += f"ld.shared.b32 %r6, [%r1+{256 * i + 128}]; add.s32 %r10, %r10, %r5;"
        body += "add.s32 %r10, %r10, %r6;\n"
    got = run(body + "OUT: bar.sync 0;\n", threads=96, options=Options(seed=seed, hazards="raise"))
    assert got == [0] * 64 + [sum(2 * j + 32 + 2 * i for i in range(4)) for j in range(32)]


@covers("barrier.cluster.arrive", "barrier.cluster.wait", "st.async", "mapa", "ld", "st",
        "mbarrier.try_wait")  # fmt: skip
@pytest.mark.parametrize("mode", ["early", "late", "random"])
def test_every_cta_sends_to_the_next(mode: str) -> None:
    """A ring of four: st.async of 4, 8 and 16 bytes counts on the receiver's mbarrier."""
    body = (
        """
    @%p50 mbarrier.init.shared.b64 [%r50], 1; @%p50 fence.mbarrier_init.release.cluster;
    @%p50 mbarrier.arrive.expect_tx.shared.b64 _, [%r50], 896;
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r20, %cluster_ctarank; add.s32 %r21, %r20, 1; and.b32 %r21, %r21, 3;
    mapa.shared::cluster.u32 %r22, %r50, %r21; mad.lo.s32 %r23, %r99, 16, %r22;
    mad.lo.s32 %r24, %r20, 100, %r99; mov.b64 %rd10, {%r24, %r20};
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r23+128], %r24, [%r22];
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%r23+640], %rd10, [%r22];
    st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r23+1152],
        {%r24, %r20, %r99, %r24}, [%r22];
    """
        + WAIT.format(0, 0)
        + """
    mad.lo.s32 %r1, %r99, 16, %r50; ld.shared.b32 %r2, [%r1+128]; ld.shared.b32 %r3, [%r1+644];
    ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r1+1152];
    add.s32 %r10, %r2, %r3; add.s32 %r10, %r10, %r4; add.s32 %r10, %r10, %r5;
    add.s32 %r10, %r10, %r6; add.s32 %r10, %r10, %r7;
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    )
    options = Options(asynchronous=mode, seed=2, hazards="raise")
    got = run(body, grid=4, cluster=4, options=options)
    want = []
    for rank in range(4):
        sender = (rank - 1) % 4
        want += [3 * (100 * sender + i) + 2 * sender + i for i in range(32)]
    assert got == want
