"""Software GPU: asynchronous copies, their groups and barriers."""

from __future__ import annotations

import numpy as np
import pytest

from softgpu import Hazard, MemoryFault, Options, UnmodelledInstruction
from softgpu.testing import aligned, launch
from tests.support.ptx import TID, WAIT, covers, run

BULK_LOAD = "cp.async.bulk.shared::{}.global.mbarrier::complete_tx::bytes"


@covers("cp.async.ca", "cp.async.cg", "cp.async.commit_group", "cp.async.wait_group",
        "cp.async.wait_all")  # fmt: skip
def test_cp_async_groups() -> None:
    """Four groups; wait_group N lets the last N stay in flight, so that their target is poison."""
    for keep in (0, 1, 2, 3, None):
        cp_async_groups(keep)


def cp_async_groups(keep: int | None) -> None:
    source, out = aligned((4, 32, 4), np.uint32), aligned((4, 32, 4), np.uint32)
    source[...] = np.arange(512).reshape(source.shape)
    body = "mad.lo.s64 %rd10, %rd60, 16, %rd2; mad.lo.s64 %rd11, %rd60, 16, %rd1;"
    body += "mad.lo.s32 %r1, %r99, 16, %r50;"
    sizes = [16, 16, 8, 4]
    for g, size in enumerate(sizes):
        form = "cg" if size == 16 else "ca"
        body += f"cp.async.{form}.shared.global [%r1+{512 * g}], [%rd10+{512 * g}], {size};"
        body += "cp.async.commit_group;" if g < 3 or keep is not None else ""
    body += "cp.async.wait_all;" if keep is None else f"cp.async.wait_group {keep};"
    for g in range(4):
        body += f"ld.shared.v4.b32 {{%r3,%r4,%r5,%r6}}, [%r1+{512 * g}];"
        body += f"st.global.v4.b32 [%rd11+{512 * g}], {{%r3,%r4,%r5,%r6}};"
    launch(TID + body, [out, source], options=Options(asynchronous="late"))
    want = source.copy()
    for g, size in enumerate(sizes):
        want[g, :, size // 4 :] = 0xFFFFFFFF
    want[4 - (keep or 0) :] = 0xFFFFFFFF
    np.testing.assert_array_equal(out, want)


@covers("cp.async.mbarrier.arrive", "mbarrier.init", "mbarrier.try_wait")
@pytest.mark.parametrize("mode", ["early", "late", "random"])
def test_cp_async_arrives_at_an_mbarrier(mode: str) -> None:
    source = aligned(32, np.uint32)
    source[:] = np.arange(32) * 3
    got = run("""
    @%p50 mbarrier.init.shared.b64 [%r50], 32; bar.warp.sync -1;
    mad.lo.s64 %rd10, %rd60, 4, %rd2; mad.lo.s32 %r1, %r99, 4, %r50;
    cp.async.ca.shared.global [%r1+64], [%rd10], 4;
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r50];
    W: mbarrier.try_wait.parity.shared.b64 %p1, [%r50], 0; @!%p1 bra W;
    xor.b32 %r2, %r1, 0; ld.shared.b32 %r10, [%r2+64];
    """, source, options=Options(asynchronous=mode, seed=3))  # fmt: skip
    assert got == source.tolist()


@covers("cp.async.bulk.shared", "cp.async.bulk.shared::cluster", "cp.async.bulk.shared::cta",
        "mbarrier.init", "mbarrier.arrive", "mbarrier.try_wait")  # fmt: skip
@pytest.mark.parametrize("mode", ["early", "late", "random"])
def test_bulk_loads_multicast_and_between_ctas(mode: str) -> None:
    """CTA 0 loads, multicasts, and copies into CTA 1; all on the barriers of the targets."""
    source = aligned(64, np.uint32)
    source[:] = 1000 + np.arange(64)
    body = (
        """
    mov.u32 %r20, %cluster_ctarank; setp.eq.s32 %p2, %r20, 0; and.pred %p2, %p2, %p50;
    @%p50 mbarrier.init.shared.b64 [%r50], 1;
    @%p50 fence.mbarrier_init.release.cluster;
    mov.u32 %r22, 1; mov.u16 %rs5, 3;
    @%p50 mbarrier.arrive.expect_tx.shared.b64 _, [%r50], 256;
    barrier.cluster.arrive; barrier.cluster.wait;
    """
        + f"@%p2 {BULK_LOAD.format('cta')} [%r50+128], [%rd2], 64, [%r50];\n"
        + "@%p2 cp.async.bulk.shared.global.mbarrier::complete_tx::bytes"
        + " [%r50+192], [%rd2+64], 64, [%r50];\n"
        + f"@%p2 {BULK_LOAD.format('cluster')}.multicast::cluster"
        + " [%r50+256], [%rd2+128], 128, [%r50], %rs5;\n"
        + """
    mapa.shared::cluster.u32 %r30, %r50, %r22;
    add.s32 %r31, %r30, 128;
    """
        + "setp.ne.s32 %p4, %r20, 0; @%p4 bra W0;\n"
        + "W9: mbarrier.try_wait.parity.shared.b64 %p51, [%r50], 0; @!%p51 bra W9;\n"
        + "@%p50 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
        + " [%r31], [%r50+128], 128, [%r30];\n"
        + WAIT.format(0, 0)
        + """
    mad.lo.s32 %r1, %r99, 4, %r50; ld.shared.b32 %r2, [%r1+128]; ld.shared.b32 %r3, [%r1+256];
    shl.b32 %r3, %r3, 16; or.b32 %r10, %r2, %r3;
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    )
    options = Options(asynchronous=mode, seed=5, hazards="raise")
    got = run(body, source, grid=2, cluster=2, options=options)
    want = [int(source[i]) | int(source[32 + i]) << 16 for i in range(32)]
    assert got == want * 2


@covers("cp.async.bulk.global", "cp.async.bulk.commit_group", "cp.async.bulk.wait_group",
        "cp.async.bulk.wait_group.read", "fence")  # fmt: skip
def test_bulk_groups_belong_to_threads() -> None:
    """Lanes 0 and 1 commit three stores each; lane 0 waits for all but ``keep``, lane 1 not."""
    for read in ("", ".read"):
        for keep in range(3):
            bulk_groups(keep, read)


def bulk_groups(keep: int, read: str) -> None:
    out, landed = aligned((2, 3, 4), np.uint32), aligned((2, 3, 4), np.uint32)
    body = """
    mad.lo.s32 %r1, %r99, 4, %r50; add.s32 %r2, %r99, 1; st.shared.b32 [%r1], %r2;
    fence.proxy.async; bar.warp.sync -1;
    setp.ge.s32 %p1, %r99, 2; @%p1 bra OUT;
    mad.lo.s64 %rd10, %rd60, 48, %rd1; mad.lo.s32 %r3, %r99, 48, %r50;
    """
    for i in range(3):
        body += f"cp.async.bulk.global.shared::cta.bulk_group [%rd10+{16 * i}], [%r3+{16 * i}], 16;"
        body += "cp.async.bulk.commit_group;"
    body += f"@%p50 cp.async.bulk.wait_group{read} {keep};"
    for i in range(6):
        body += f"ld.global.v4.b32 {{%r4,%r5,%r6,%r7}}, [%rd1+{16 * i}];"
        body += f"@%p50 st.global.v4.b32 [%rd2+{16 * i}], {{%r4,%r5,%r6,%r7}};"
    launch(TID + body + "OUT:\n", [out, landed], options=Options(asynchronous="late"))
    assert out.reshape(-1).tolist() == list(range(1, 25))  # by the end all have landed
    assert landed[0].reshape(-1).tolist() == [x * (x <= 12 - 4 * keep) for x in range(1, 13)]
    assert not landed[1].any()


ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group"


@covers("cp.reduce.async.bulk.global")
@pytest.mark.parametrize("kind, dtype", [
    ("f32", np.float32), ("f64", np.float64), ("u32", np.uint32), ("s32", np.int32),
    ("u64", np.uint64),
])  # fmt: skip
def test_bulk_copies_that_add(kind: str, dtype: type) -> None:
    """Four CTAs add the same 256 bytes: every element of each arrives once, in any order."""
    total, source = aligned(256 // np.dtype(dtype).itemsize, dtype), aligned(64, np.uint32)
    values = np.arange(total.size).astype(dtype) - dtype(3)
    source.view(dtype)[:] = values
    body = """
    mad.lo.s64 %rd10, %rd60, 8, %rd2; mad.lo.s32 %r1, %r99, 8, %r50;
    ld.global.v2.b32 {%r2, %r3}, [%rd10]; st.shared.v2.b32 [%r1], {%r2, %r3};
    <fence> bar.warp.sync -1; @!%p50 bra OUT;
    """
    body += f"{ADD}.add.{kind} [%rd1], [%r50], 256; cp.async.bulk.commit_group;"
    body += "cp.async.bulk.wait_group<read> 0; OUT:\n"

    def go(fence: str, read: str, mode: str) -> None:
        total[:] = 10
        text = TID + body.replace("<fence>", fence).replace("<read>", read)
        options = Options(asynchronous=mode, seed=3, hazards="raise")
        launch(text, [total, source], grid=4, options=options)
        np.testing.assert_array_equal(total, dtype(10) + dtype(4) * values)

    for mode in ("early", "late", "random"):
        go("fence.proxy.async;", "", mode)
        go("fence.proxy.async;", ".read", mode)
        with pytest.raises(Hazard, match="missing-proxy-fence"):
            go("", "", mode)


def test_bulk_additions_that_are_not_modelled() -> None:
    for form in ("add.noftz.bf16", "min.u32", "add.b32", "and.b32"):
        with pytest.raises(UnmodelledInstruction):
            launch(f"{ADD}.{form} [%rd1], [%r1], 16;", [aligned(4, np.uint32)])
    with pytest.raises(MemoryFault, match="multiples of 16"):
        launch(f"mov.u32 %r1, smem; {ADD}.add.f32 [%rd1], [%r1], 8;", [aligned(4, np.uint32)])
