"""Software GPU: barriers of a CTA and of a cluster."""

from __future__ import annotations

import pytest

from softgpu import BarrierError, Deadlock, Hazard, Options, SoftGpuError
from tests.support.ptx import WAIT, covers, run

SCHEDULES = [(mode, seed) for mode in ("early", "late", "random") for seed in (None, 1, 2)]


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


# Lane 5 of each warp stores and comes to the barrier by an instruction of its own; the others read
# what it stored in the other warp (%r3) behind theirs.
BY_THREADS = """
and.b32 %r97, %r99, 31; setp.eq.s32 %p1, %r97, 5; and.b32 %r2, %r99, 32; mov.u32 %r10, 7;
add.s32 %r2, %r2, %r50; xor.b32 %r4, %r99, 32; and.b32 %r3, %r4, 32; add.s32 %r3, %r3, %r50;
@%p1 bra ONE; <others>; ld.shared.b32 %r10, [%r3]; bra OUT;
ONE: st.shared.b32 [%r2], %r99; <one>;
OUT:
"""


def by_threads(one: str, others: str, mode: str = "early", seed: int | None = None) -> list[int]:
    body = BY_THREADS.replace("<one>", one).replace("<others>", others)
    # that a thread has ended orders nothing, so the check would report a race
    options = Options(asynchronous=mode, seed=seed, hazards="off" if one == "ret" else "raise")
    return run(body, threads=64, options=options)


@pytest.mark.parametrize("one, others", [
    ("barrier.sync 1, 64", "barrier.sync 1, 64"), ("barrier.sync 1", "barrier.cta.sync 1"),
    ("barrier.arrive 1, 64", "barrier.sync 1, 64"),
])  # fmt: skip
def test_threads_of_a_warp_come_to_a_barrier_by_two_instructions(one: str, others: str) -> None:
    """barrier without .aligned (PTX ISA 9.7.13.1): the warp has arrived with its last thread."""
    for mode, seed in SCHEDULES:
        got = by_threads(one, others, mode, seed)
        assert got == [7 if i % 32 == 5 else 5 + (32 if i < 32 else 0) for i in range(64)]


@pytest.mark.parametrize("one, others, error, text", [
    # bar is barrier.aligned: all threads execute the same instruction
    ("bar.sync 1, 64", "bar.sync 1, 64", Deadlock, "bar.sync: the other lanes"),
    ("barrier.sync.aligned 1", "barrier.sync.aligned 1", Deadlock, "the other lanes of mask"),
    ("barrier.sync.aligned 1, 64", "barrier.sync 1, 64", Deadlock, r"barrier 1: lanes \[5\]"),
    ("barrier.sync 2, 64", "barrier.sync 1, 64", Deadlock, r"barrier 1: lanes \[5\] of its own"),
    ("barrier.sync 1, 32", "barrier.sync 1, 64", BarrierError, "lanes of one warp expect"),
    ("barrier.arrive 1, 96", "barrier.sync 1, 96", Deadlock, "barrier 1: 64 of 96 threads"),
])  # fmt: skip
def test_threads_that_do_not_come_are_named(
    one: str, others: str, error: type[SoftGpuError], text: str
) -> None:
    with pytest.raises(error, match=text):
        by_threads(one, others)


def test_a_thread_that_has_exited_is_not_waited_for() -> None:
    """Lane 5 of each warp ends before or after the others come to the barrier."""
    for mode, seed in SCHEDULES:
        assert by_threads("ret", "barrier.sync 1, 64", mode, seed)[:5] == 5 * [37]


def test_lanes_that_name_other_barriers() -> None:
    with pytest.raises(BarrierError, match="disagree"):
        run("shr.u32 %r1, %r99, 4; barrier.sync %r1, 32;")
    assert run("mov.u32 %r10, 3; mov.u32 %r1, 15; barrier.sync %r1, 32;") == [3] * 32


@covers("barrier.cluster.arrive", "barrier.cluster.wait")
def test_two_arrivals_and_two_waits() -> None:
    """Works, as published programs rely on it; that it is a hazard ``test_hazards.py`` tests."""
    body = """
    mov.u32 %r20, %cluster_ctarank; xor.b32 %r21, %r20, 1; mad.lo.s32 %r1, %r99, 4, %r50;
    mapa.shared::cluster.u32 %r2, %r1, %r21; mad.lo.s32 %r3, %r20, 100, %r99;
    barrier.cluster.arrive; st.shared::cluster.b32 [%r2], %r3; barrier.cluster.arrive;
    barrier.cluster.wait; <second> ld.shared.b32 %r10, [%r1];
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    want = [100 + i for i in range(32)] + list(range(32))
    for mode, seed in SCHEDULES:
        options = Options(asynchronous=mode, seed=seed, hazards="off")
        text = body.replace("<second>", "barrier.cluster.wait;")
        assert run(text, grid=2, cluster=2, options=options) == want
        # the first wait belongs to the first arrival, which says nothing of the store
        for second, kinds in (("barrier.cluster.wait;", set()), ("", {"race"})):
            found: list[Hazard] = []
            options = Options(
                asynchronous=mode, seed=seed, hazards="collect", on_hazard=found.append
            )
            run(body.replace("<second>", second), grid=2, cluster=2, options=options)
            assert {x.kind for x in found} - {"uninitialised"} >= {"cluster-arrive-twice"} | kinds
            assert second == "" or len(found) == 1
    with pytest.raises(BarrierError, match="without an arrive"):
        run("barrier.cluster.wait;", grid=2, cluster=2)


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
