"""Software GPU: control flow, warp collectives, barriers, clusters, deadlock reports."""

from __future__ import annotations

import numpy as np
import pytest

from softgpu import BarrierError, Deadlock, LaunchError, Options
from softgpu.testing import aligned, launch

STORE = """
mov.u32 %r90, %tid.x; mov.u32 %r91, %ctaid.x; mov.u32 %r92, %ntid.x;
mad.lo.s32 %r93, %r91, %r92, %r90; mul.wide.s32 %rd90, %r93, 4; add.s64 %rd91, %rd1, %rd90;
st.global.b32 [%rd91], %r10;
"""


def run(body: str, *, threads: int = 32, grid: int = 1, args: list | None = None, **kw) -> list:
    """Runs ``body``, which leaves its result in %r10, and returns that of every thread."""
    out = aligned(threads * grid, np.uint32)
    declarations = ".reg .b32 %r90, %r91, %r92, %r93; .reg .b64 %rd90, %rd91;"
    launch(body + STORE, [out, *(args or [])], block=threads, grid=grid,
           declarations=declarations, **kw)  # fmt: skip
    return out.tolist()


def test_loops_with_a_trip_count_per_lane() -> None:
    got = run("""
    mov.u32 %r1, %tid.x; mov.u32 %r10, 0; mov.u32 %r2, 0;
    LOOP: setp.ge.s32 %p1, %r2, %r1; @%p1 bra DONE;
    and.b32 %r3, %r2, 1; setp.eq.s32 %p2, %r3, 0; @%p2 bra EVEN;
    add.s32 %r10, %r10, 100; bra NEXT;
    EVEN: add.s32 %r10, %r10, 1;
    NEXT: add.s32 %r2, %r2, 1; bra LOOP;
    DONE:
    """)
    assert got == [(n + 1) // 2 + 100 * (n // 2) for n in range(32)]


def test_lanes_reconverge_before_a_collective() -> None:
    got = run("""
    mov.u32 %r1, %tid.x; setp.lt.s32 %p1, %r1, 7; mov.u32 %r2, 5;
    @%p1 bra SKIP;
    mov.u32 %r2, 9;
    SKIP: shfl.sync.idx.b32 %r10, %r2, 31, 31, -1;
    """)
    assert got == [9] * 32


def test_repeated_labels_in_scopes() -> None:
    block = "{ .reg .pred P; setp.gt.s32 P, %r1, 3; @P bra OUT; add.s32 %r10, %r10, 1; OUT: }\n"
    got = run("mov.u32 %r1, %tid.x; mov.u32 %r10, 0;" + 3 * block)
    assert got == [3 if n <= 3 else 0 for n in range(32)]


def test_partial_warps_and_early_exit() -> None:
    got = run("""
    mov.u32 %r1, %tid.x; setp.gt.s32 %p1, %r1, 37; @%p1 ret;
    bar.sync 0; activemask.b32 %r10;
    """, threads=40)  # fmt: skip
    assert got[:32] == [0xFFFFFFFF] * 32
    assert got[32:] == [0x3F] * 6 + [0, 0]


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("clamp", ["31", "0", "0x181f", "0x1c1f", "0x1000"])
def test_shuffles(mode: str, clamp: str) -> None:
    c = int(clamp, 0)
    for b in (0, 1, 3, 9, 30):
        got = run(f"mov.u32 %r1, %tid.x; mov.u32 %r2, {b}; mov.u32 %r3, {clamp};"
                  f"shfl.sync.{mode}.b32 %r4|%p1, %r1, %r2, %r3, -1;"
                  "selp.b32 %r5, 256, 0, %p1; add.s32 %r10, %r4, %r5;")  # fmt: skip
        fixed = run(f"mov.u32 %r1, %tid.x; shfl.sync.{mode}.b32 %r4|%p1, %r1, {b}, {clamp}, -1;"
                    "selp.b32 %r5, 256, 0, %p1; add.s32 %r10, %r4, %r5;")  # fmt: skip
        want = []
        for lane in range(32):  # the pseudo code of the PTX manual
            segment, cval = c >> 8 & 31, c & 31
            top, low = (lane & segment) | (cval & ~segment), lane & segment
            j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b,
                 "idx": low | (b & ~segment)}[mode]  # fmt: skip
            p = j >= top if mode == "up" else j <= top
            want.append((j if p else lane) + (256 if p else 0))
        assert got == want and fixed == want


def test_votes_match_redux_elect() -> None:
    head = "mov.u32 %r1, %tid.x; setp.lt.s32 %p1, %r1, 5;"
    assert run(head + "vote.sync.ballot.b32 %r10, %p1, -1;") == [31] * 32
    assert run(head + "vote.sync.any.pred %p2, %p1, -1; selp.b32 %r10, 1, 0, %p2;") == [1] * 32
    assert run(head + "vote.sync.all.pred %p2, %p1, -1; selp.b32 %r10, 1, 0, %p2;") == [0] * 32
    assert run(head + "vote.sync.all.pred %p2, !%p1, -1; selp.b32 %r10, 1, 0, %p2;") == [0] * 32
    got = run("mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 3; match.any.sync.b32 %r10, %r2, -1;")
    assert got == [0x11111111 << (i & 3) for i in range(32)]
    assert run(head + "redux.sync.add.s32 %r10, %r1, -1;") == [496] * 32
    assert run(head + "redux.sync.max.u32 %r10, %r1, -1;") == [31] * 32
    got = run(head + "mov.u32 %r10, 0; @%p1 bra END; elect.sync %r2|%p2, 0xffffffe0;"
              "selp.b32 %r10, %r2, 99, %p2; END: mov.u32 %r3, 0;")  # fmt: skip
    assert got == [0] * 5 + [5] + [99] * 26


def test_named_barriers_order_producer_and_consumer() -> None:
    got = run("""
    mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.u32 %r3, smem; shl.b32 %r4, %r1, 2;
    mov.u32 %r10, 0; setp.ne.s32 %p1, %r2, 2; @%p1 bra PRODUCE;
    bar.sync 3, 96;
    and.b32 %r5, %r1, 31; mad.lo.s32 %r6, %r5, 4, %r3; ld.shared.b32 %r7, [%r6];
    ld.shared.b32 %r8, [%r6+128]; add.s32 %r10, %r7, %r8; bra END;
    PRODUCE: add.s32 %r6, %r3, %r4; mul.lo.s32 %r7, %r1, 10; st.shared.b32 [%r6], %r7;
    bar.arrive 3, 96;
    END:
    """, threads=96)  # fmt: skip
    assert got[64:] == [10 * i + 10 * (i + 32) for i in range(32)]


def test_named_barrier_with_different_counts() -> None:
    body = "mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mad.lo.s32 %r3, %r2, 32, 64; bar.sync 1, %r3;"
    with pytest.raises(BarrierError, match="barrier 1.*expects? "):
        run(body, threads=64)


INIT = "mov.u32 %r50, smem; mov.u32 %r51, %tid.x; setp.eq.s32 %p50, %r51, 0;"


def test_mbarrier_phases_and_arrivals() -> None:
    """Three warps, four rounds: each adds before it arrives, all see the sum of the round."""
    got = run(INIT + """
    @%p50 mbarrier.init.shared.b64 [%r50], 3; add.s32 %r6, %r50, 64; @%p50 st.shared.b32 [%r6], 0;
    bar.sync 0;
    and.b32 %r4, %r51, 31; setp.eq.s32 %p2, %r4, 0; mov.u32 %r10, 0; mov.u32 %r11, 0;
    ROUND: @%p2 red.shared.add.u32 [%r6], 1;
    @%p2 mbarrier.arrive.shared.b64 _, [%r50];
    and.b32 %r12, %r11, 1;
    W: mbarrier.try_wait.parity.shared.b64 %p4, [%r50], %r12; @!%p4 bra W;
    ld.shared.b32 %r13, [%r6]; mad.lo.s32 %r10, %r10, 16, %r13; bar.sync 0;
    add.s32 %r11, %r11, 1; setp.lt.s32 %p3, %r11, 4; @%p3 bra ROUND;
    """, threads=96)  # fmt: skip
    assert got == [0x369C] * 96


def test_test_wait_does_not_block_and_try_wait_gives_up() -> None:
    got = run(
        INIT
        + """
    @%p50 mbarrier.init.shared.b64 [%r50], 1; bar.warp.sync -1;
    mbarrier.test_wait.parity.shared.b64 %p1, [%r50], 0;
    mbarrier.try_wait.parity.shared.b64 %p2, [%r50], 0;
    mbarrier.test_wait.parity.shared.b64 %p3, [%r50], 1;
    selp.b32 %r1, 1, 0, %p1; selp.b32 %r2, 2, 0, %p2; selp.b32 %r3, 4, 0, %p3;
    add.s32 %r10, %r1, %r2; add.s32 %r10, %r10, %r3;
    """
    )
    assert got == [4] * 32  # phase 0 is open; the phase before it counts as complete


def test_too_many_arrivals() -> None:
    body = INIT + "@%p50 mbarrier.init.shared.b64 [%r50], 1; bar.warp.sync -1;"
    body += "@%p50 mbarrier.arrive.expect_tx.shared.b64 _, [%r50], 16;"
    body += "@%p50 mbarrier.arrive.shared.b64 _, [%r50];"
    with pytest.raises(BarrierError, match="more arrivals than pending"):
        run(body)


def test_mbarrier_without_init() -> None:
    with pytest.raises(BarrierError, match="mbarrier at CTA 0, offset 0 was not initialised"):
        run(INIT + "@%p50 mbarrier.arrive.shared.b64 _, [%r50];")


def test_deadlock_report_names_what_is_waited_for() -> None:
    body = (
        INIT
        + """
    @%p50 mbarrier.init.shared.b64 [%r50], 1; bar.sync 0;
    shr.u32 %r2, %r51, 5; setp.eq.s32 %p1, %r2, 0; @%p1 bra OTHER;
    .loc 1 77 3
    W: mbarrier.try_wait.parity.shared.b64 %p4, [%r50], 0; @!%p4 bra W;
    .loc 1 78 3
    OTHER: bar.sync 2, 64;
    .loc 1 79 3
    """
    )
    with pytest.raises(Deadlock) as error:
        run(body, threads=64)
    text = str(error.value)
    assert "mbarrier at CTA 0, offset 0 to complete phase parity 0" in text
    assert "pending 1 of 1" in text
    assert "barrier 2: 32 of 64 threads have arrived" in text
    assert "warp 1" in text and "PTX line" in text
    [barrier] = [x for x in text.splitlines() if "barrier 2: " in x]
    assert ":78 (PTX line" in barrier, barrier


def test_spinning_without_effect_is_reported() -> None:
    with pytest.raises(Deadlock, match="spin without effect"):
        run("mov.u32 %r10, 0; S: ld.global.b32 %r1, [%rd1]; setp.eq.s32 %p1, %r1, 0; @%p1 bra S;")


def test_blocks_that_wait_for_a_later_block() -> None:
    """Block 0 spins on a flag that block 1 sets: more blocks are admitted."""
    flag = aligned(1, np.uint32)
    got = run("""
    mov.u32 %r1, %ctaid.x; mov.u32 %r10, 7; setp.eq.s32 %p1, %r1, 1; @%p1 bra SET;
    S: ld.acquire.gpu.global.b32 %r2, [%rd2]; setp.eq.s32 %p2, %r2, 0; @%p2 bra S; bra END;
    SET: st.release.gpu.global.b32 [%rd2], 1;
    END:
    """, grid=2, args=[flag])  # fmt: skip
    assert got == [7] * 64


def test_distributed_shared_memory() -> None:
    got = run("""
    mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mad.lo.s32 %r3, %r1, 4, %r2;
    mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1;
    mapa.shared::cluster.u32 %r6, %r3, %r5;
    mad.lo.s32 %r7, %r4, 1000, %r1;
    barrier.cluster.arrive.relaxed; barrier.cluster.wait;
    st.shared::cluster.b32 [%r6], %r7;
    barrier.cluster.arrive; barrier.cluster.wait;
    ld.shared.b32 %r10, [%r3];
    """, grid=2, cluster=2)  # fmt: skip
    assert got == [1000 + i for i in range(32)] + list(range(32))


def test_remote_arrive_and_st_async() -> None:
    got = run(INIT + """
    mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1; add.s32 %r8, %r50, 128;
    @%p50 mbarrier.init.shared.b64 [%r50], 2;
    @%p50 mbarrier.arrive.expect_tx.shared.b64 _, [%r50], 128;
    barrier.cluster.arrive; barrier.cluster.wait;
    mapa.shared::cluster.u32 %r6, %r50, %r5;
    mad.lo.s32 %r9, %r51, 4, %r8; mapa.shared::cluster.u32 %r7, %r9, %r5;
    add.s32 %r11, %r51, 500;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r7], %r11, [%r6];
    @%p50 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];
    W: mbarrier.try_wait.parity.shared.b64 %p4, [%r50], 0; @!%p4 bra W;
    ld.shared.b32 %r10, [%r9];
    barrier.cluster.arrive; barrier.cluster.wait;
    """, grid=2, cluster=2, options=Options(asynchronous="late"))  # fmt: skip
    assert got == [500 + i for i in range(32)] * 2


def test_seeds_change_the_order_but_not_the_result() -> None:
    body = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mad.lo.s32 %r3, %r1, 4, %r2; st.shared.b32 [%r3], %r1;
    bar.sync 0; xor.b32 %r4, %r1, 64; mad.lo.s32 %r5, %r4, 4, %r2; ld.shared.b32 %r10, [%r5];
    """
    for seed in range(5):
        assert run(body, threads=128, options=Options(seed=seed)) == [i ^ 64 for i in range(128)]


def test_the_same_seed_gives_the_same_run() -> None:
    """In the order of an atomic counter, with clusters that come and go."""
    body = """
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %tid.x; shr.u32 %r3, %r3, 5; mov.u32 %r9, 0;
    AGAIN: atom.global.add.u32 %r5, [%rd2], 1; add.s32 %r9, %r9, 1; setp.lt.s32 %p1, %r9, 8;
    @%p1 bra AGAIN; bar.sync 0; mad.lo.s32 %r4, %r2, 4, %r3; mul.wide.u32 %rd3, %r4, 4;
    add.s64 %rd3, %rd1, %rd3; st.global.u32 [%rd3], %r5;
    """
    runs, clutter = [], []
    for i in range(4):
        out, count = np.zeros(24 * 4, np.uint32), np.zeros(1, np.uint32)
        options = Options(asynchronous="early", seed=5, resident=3)
        launch(body, [out, count], grid=24, block=128, options=options)
        runs.append(out)
        clutter.append([object() for _ in range(1000 * i)])  # other addresses for new objects
    assert all((out == runs[0]).all() for out in runs)


@pytest.mark.parametrize("name, text", [("ACCUMULATE", "fast"), ("SEED", "one"), ("ASYNC", "soon"),
                                        ("HAZARDS", "on")])  # fmt: skip
def test_environment_is_checked(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"SOFTGPU_{name}", text)
    with pytest.raises(ValueError, match=f"(?i){name}.*: .*got '{text}'"):
        Options()


def test_launch_checks() -> None:
    with pytest.raises(LaunchError, match="not a multiple of cluster"):
        run("mov.u32 %r10, 0;", grid=3, cluster=2)
    with pytest.raises(LaunchError, match="at most 232448"):
        run("mov.u32 %r10, 0;", smem=300000)
    with pytest.raises(ValueError, match="asynchronous"):
        Options(asynchronous="sometimes")
