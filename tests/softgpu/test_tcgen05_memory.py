"""Software GPU: tensor memory: tcgen05.ld and st of every shape, cp, commit, alloc and dealloc."""

from __future__ import annotations

import numpy as np
import pytest

from softgpu import (
    BarrierError,
    Deadlock,
    DescriptorError,
    Options,
    SoftGpuError,
    TensorMemoryError,
    UnmodelledInstruction,
)
from softgpu.testing import aligned, launch
from tests.support.ptx import covers
from tests.support.tcgen05 import POISON, place, run, vector

SHAPES = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}  # registers of x1


def numbered(columns: int, ctas: int = 1) -> np.ndarray:
    """Every cell another number."""
    return np.arange(ctas * 128 * columns, dtype=np.uint32).reshape(ctas, 128, columns) * 65537


def cell(shape: str, r: int, t: int, offset: int) -> tuple[int, int]:
    """(lane, column) of register r in thread t: the figures of PTX ISA, read lane by lane."""
    if shape == "32x32b":
        return t, r
    if shape == "16x32bx2":
        return (t, r) if t < 16 else (t - 16, offset + r)
    if shape == "16x64b":  # threads 4i .. 4i+3 hold columns 0, 1 of rows i and i + 8
        return t // 4 + (8 if t % 2 else 0), 2 * r + (1 if t % 4 >= 2 else 0)
    if shape == "16x128b":  # registers 2i, 2i+1: rows 0-7 and 8-15 of four columns
        return t // 4 + (8 if r % 2 else 0), r // 2 * 4 + t % 4
    block, inside = divmod(r, 4)  # 16x256b: pairs of columns, rows 0-7, then 8-15
    return t // 4 + (8 if inside >= 2 else 0), 8 * block + 2 * (t % 4) + inside % 2


WIDTH = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 2}  # columns of x1
CASES = [
    (shape, num, half)
    for shape in SHAPES
    for num in (1, 2, 4, 8, 16, 32, 64)
    for half in (False, True)
    if WIDTH[shape] * num * (1 + half) <= 64
]


@covers("tcgen05.ld", "tcgen05.st", "tcgen05.wait::ld", "tcgen05.wait::st")
@pytest.mark.parametrize(("shape", "num", "half"), CASES)
def test_loads_and_stores_of_every_shape(shape: str, num: int, half: bool) -> None:
    """Loads columns 0-63 with the shape, stores to 64-127 as 32x32b and to 128-191 as loaded."""
    n = SHAPES[shape] * num
    base = 0 if shape == "32x32b" or num == 2 else 16
    offset = 32  # of the second half of 16x32bx2
    second = f", {offset}" if shape == "16x32bx2" else ""
    pack, unpack = (".pack::16b", ".unpack::16b") if half else ("", "")
    every = f"""
    add.s32 %r81, %r80, {base << 16};
    tcgen05.ld.sync.aligned.{shape}.x{num}{pack}.b32 {vector(300, n)}, [%r81]{second};
    tcgen05.wait::ld.sync.aligned;
    tcgen05.st.sync.aligned.32x32b.x{n}.b32 [%r80+64], {vector(300, n)};
    tcgen05.st.sync.aligned.{shape}.x{num}{unpack}.b32 [%r81+128]{second}, {vector(300, n)};
    tcgen05.wait::st.sync.aligned;
    """
    cells = np.zeros((1, 128, 192), np.uint32)
    cells[..., :64] = numbered(64)
    got = run("", cells=cells, columns=192, commit=False, every=every)
    for warp in range(4):
        for t in range(32):
            for r in range(n):
                lane, column = cell(shape, r, t, 0)
                lane += 32 * warp + base
                column = 2 * column if half else column
                column += offset if shape == "16x32bx2" and t >= 16 else 0
                value = int(cells[0, lane, column])
                if half:
                    value = value & 0xFFFF | (int(cells[0, lane, column + 1]) & 0xFFFF) << 16
                    cells[0, lane, 128 + column + 1] = value >> 16
                cells[0, lane, 128 + column] = value & 0xFFFF if half else value
                cells[0, 32 * warp + t, 64 + r] = value
    np.testing.assert_array_equal(got, cells)


def test_the_widest_load() -> None:
    cells = numbered(128)
    every = f"tcgen05.ld.sync.aligned.32x32b.x128.b32 {vector(300, 128)}, [%r80];"
    every += f"tcgen05.st.sync.aligned.32x32b.x128.b32 [%r80+128], {vector(300, 128)};"
    cells = np.concatenate([cells, 0 * cells], 2)
    got = run("", cells=cells, columns=256, commit=False, every=every)
    np.testing.assert_array_equal(got[..., 128:], cells[..., :128])


def test_addresses_of_loads() -> None:
    """The lane field may name the warp's own quarter; columns are added by an offset."""
    every = """
    and.b32 %r82, %r1, 96; shl.b32 %r82, %r82, 16; add.s32 %r82, %r82, %r80;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r300}, [%r82+5];
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r80], {%r300}; tcgen05.wait::st.sync.aligned;
    """
    cells = numbered(32)
    got = run("", cells=cells, columns=32, commit=False, every=every)
    np.testing.assert_array_equal(got[0, :, 0], cells[0, :, 5])
    for bad, message in (
        ("add.s32 %r82, %r80, 4194304;", "lane 64; warp 3 reaches lanes 96 to 127"),
        ("add.s32 %r82, %r80, 65536;", "starts at lane 1 of the warp's 32, expected 0$"),
        ("add.s32 %r82, %r80, %r1;", "the lanes name different addresses"),
        ("mov.u32 %r82, 511;", "columns 511 to 512"),
    ):
        load = bad + "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r300,%r301}, [%r82];"
        with pytest.raises(TensorMemoryError, match=f"(?m){message}"):
            run("", columns=32, commit=False, every=load)
    load = "add.s32 %r82, %r80, 524288; tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r300}, [%r82];"
    with pytest.raises(TensorMemoryError, match="starts at lane 8 .* expected 0 or 16"):
        run("", columns=32, commit=False, every=load)
    with pytest.raises(UnmodelledInstruction, match="2 registers, expected 4"):
        every = "tcgen05.ld.sync.aligned.16x128b.x2.b32 {%r300, %r301}, [%r80];"
        run("", columns=32, commit=False, every=every)


def test_fresh_columns_are_poison() -> None:
    assert (run("", columns=64, commit=False) == POISON).all()


def test_columns_are_poison_again() -> None:
    """What was stored before a dealloc is gone after the next alloc."""
    out = aligned(2, np.uint32)
    take, free = ALLOC.format(g=1, at=0, n=32), FREE.format(g=1, a="%r10", n=32)
    look = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r11}}, [%r10]; st.global.b32 [%rd1+{}], %r11;"
    body = f"""mov.u32 %r2, smem; mov.u32 %r12, 7; {take} ld.shared.b32 %r10, [%r2];
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r10], {{%r12}}; tcgen05.wait::st.sync.aligned;
    {look.format(0)} {free} {take} {look.format(4)} {free}"""
    launch(body, [out], target="sm_100a")
    assert out.tolist() == [7, POISON]


def test_stores_land_late_and_in_order() -> None:
    """Two stores of a warp to one cell, then its own load: always the second one."""
    every = """
    mov.u32 %r300, 1; mov.u32 %r301, 2;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r80], {%r300};
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r80], {%r301};
    mov.u32 %r301, 3;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r302}, [%r80]; tcgen05.wait::ld.sync.aligned;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r80+1], {%r302};
    """
    for seed in range(4):
        for mode in ("late", "random"):
            options = Options(asynchronous=mode, seed=seed)
            got = run("", columns=32, commit=False, every=every, options=options)
            assert (got[0, :, :2] == 2).all()


def test_a_store_that_nobody_waits_for_lands_late() -> None:
    """A barrier does not complete it: what is freed behind the barrier is written afterwards."""
    every = """
    mov.u32 %r300, 1; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r80], {%r300}; WAIT bar.sync 0;
    @%p61 bra END; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r80, 512; bra END;
    """
    late = Options(asynchronous="late")
    waits = every.replace("WAIT", "tcgen05.wait::st.sync.aligned;")
    run("", columns=32, commit=False, every=waits, options=late)
    with pytest.raises(TensorMemoryError, match=r"(?s)allocated are no columns.*issued at PTX"):
        run("", columns=32, commit=False, every=every.replace("WAIT", ""), options=late)


# ---- cp ------------------------------------------------------------------------------------------
CP = {
    "128x256b": lambda lane: lane,
    "128x128b": lambda lane: lane,
    "64x128b.warpx2::02_13": lambda lane: lane % 64,
    "64x128b.warpx2::01_23": lambda lane: 32 * (lane // 64) + lane % 32,
    "32x128b.warpx4": lambda lane: lane % 32,
    "4x256b": lambda lane: lane // 32,
}


@covers("tcgen05.cp", "tcgen05.commit")
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("shape", CP)
def test_copies(shape: str, group: int) -> None:
    rows, width = int(shape.split("x")[0]), 32 if "256b" in shape else 16
    data = np.random.default_rng(7).integers(0, 256, (group, rows, width)).astype(np.uint8)
    for layout in (0, 2, 6) if width == 32 else (0, 2):
        image = np.zeros((group, 16384), np.uint8)
        words = {place(image[c], 0, data[c], 1, layout, False) for c in range(group)}
        first = 3 << 16 if rows == 4 else 0
        body = f"mov.b64 %rd20, {words.pop()}; add.s32 %r81, %r80, {first + 4};"
        body += f"tcgen05.cp.cta_group::{group}.{shape} [%r81], %rd20;"
        got = run(body, image=image, columns=32, group=group)
        want = np.full((group, 128, 32), POISON, np.uint32)
        for c in range(group):
            for lane in range(128):
                if rows == 4 and lane % 32 != 3:
                    continue
                row = data[c, CP[shape](lane)].view(np.uint32)
                want[c, lane, 4 : 4 + width // 4] = row
        np.testing.assert_array_equal(got, want)


def test_copies_that_are_refused() -> None:
    for opcode, error, message in (
        ("128x256b.b8x16.b6x16_p32", UnmodelledInstruction, "b8x16"),
        ("64x128b", UnmodelledInstruction, "shape"),
        ("128x256b", DescriptorError, "version"),
    ):
        body = f"mov.b64 %rd20, 0; tcgen05.cp.cta_group::1.{opcode} [%r80], %rd20;"
        with pytest.raises(error, match=message):
            run(body)
    body = "add.s32 %r81, %r80, 1048576; tcgen05.cp.cta_group::1.128x256b [%r81], %rd20;"
    with pytest.raises(TensorMemoryError, match="target at lane 16"):
        run(body)


def test_commit_needs_its_barrier() -> None:
    body = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2+72];"
    with pytest.raises(BarrierError, match="not initialised"):
        run(body)


# ---- allocation ----------------------------------------------------------------------------------
ALLOC = "tcgen05.alloc.cta_group::{g}.sync.aligned.shared::cta.b32 [%r2+{at}], {n};\n"
FREE = "tcgen05.dealloc.cta_group::{g}.sync.aligned.b32 {a}, {n};\n"
GIVE_UP = "tcgen05.relinquish_alloc_permit.cta_group::{g}.sync.aligned;\n"


def manage(body: str, words: int = 4, block: int = 32, **kw: object) -> list[int]:
    """Runs ``body`` and returns the first words of shared memory."""
    out = aligned(words, np.uint32)
    tail = "".join(f"ld.shared.b32 %r9, [%r2+{4 * i}]; st.global.b32 [%rd1+{4 * i}], %r9;"
                   for i in range(words))  # fmt: skip
    head = "mov.u32 %r2, smem; mov.u32 %r1, %tid.x; mov.u32 %r90, %cluster_ctarank;"
    launch(head + body + tail, [out], block=block, target="sm_100a", **kw)  # type: ignore[arg-type]
    return out.tolist()


@covers("tcgen05.alloc", "tcgen05.dealloc", "tcgen05.relinquish_alloc_permit")
def test_allocations() -> None:
    body = "".join(ALLOC.format(g=1, at=4 * i, n=n) for i, n in enumerate((256, 128, 64, 64)))
    body += "".join(f"ld.shared.b32 %r{10 + i}, [%r2+{4 * i}];" for i in range(4))
    body += GIVE_UP.format(g=1)
    for i, n in enumerate((256, 128, 64, 64)):
        body += FREE.format(g=1, a=f"%r{10 + i}", n=n)
    starts = manage(body)
    taken = [set(range(s, s + n)) for s, n in zip(starts, (256, 128, 64, 64), strict=True)]
    assert len(set.union(*taken)) == 512


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (ALLOC.format(g=1, at=0, n=48), "48 columns: expected a power of two"),
        (ALLOC.format(g=1, at=0, n=16), "16 columns"),
        (ALLOC.format(g=1, at=0, n=1024), "1024 columns"),
        (ALLOC.format(g=1, at=0, n=32) + ALLOC.format(g=1, at=0, n=64), "sizes must not grow"),
        (GIVE_UP.format(g=1) + ALLOC.format(g=1, at=0, n=32), "after tcgen05.relinquish"),
        (ALLOC.format(g=1, at=0, n=32), "ended with columns 0 to 31 of tensor memory allocated"),
        (FREE.format(g=1, a="0", n=32), "allocated are no columns"),
        (ALLOC.format(g=1, at=0, n=64) + FREE.format(g=1, a="0", n=32), "dealloc of 32 columns"),
        (ALLOC.format(g=1, at=0, n=64) + FREE.format(g=1, a="65536", n=64), "has a lane"),
    ],
)
def test_allocations_that_are_refused(body: str, message: str) -> None:
    with pytest.raises(TensorMemoryError, match=message):
        manage(body)


def test_alloc_waits_for_room() -> None:
    """Warp 1 gets columns when warp 0 gives some back; without that nothing can go on."""
    body = f"""
    setp.ge.u32 %p1, %r1, 32; @%p1 bra SECOND;
    {ALLOC.format(g=1, at=0, n=512)} bar.sync 0; ld.shared.b32 %r10, [%r2];
    {FREE.format(g=1, a="%r10", n=512)} bra END;
    SECOND: bar.sync 0; {ALLOC.format(g=1, at=4, n=256)} ld.shared.b32 %r10, [%r2+4];
    {FREE.format(g=1, a="%r10", n=256)}
    END: bar.sync 0;
    """
    for seed in (None, *range(6)):
        assert manage(body, block=64, options=Options(seed=seed))[:2] == [0, 0]
    with pytest.raises(Deadlock, match="512 free columns; allocated are columns 0 to 511"):
        manage(2 * ALLOC.format(g=1, at=0, n=512))


def pair(first: str, second: str, **kw: object) -> list[int]:
    """One warp in each CTA of a pair."""
    body = f"setp.ne.u32 %p2, %r90, 0; @%p2 bra ODD; {first} bra END;\nODD: {second}\nEND:\n"
    return manage(body, grid=2, cluster=2, **kw)


def test_pairs_allocate_together() -> None:
    take = ALLOC.format(g=2, at=0, n=256) + "ld.shared.b32 %r10, [%r2];"
    free = FREE.format(g=2, a="%r10", n=256)
    work = take + take.replace("%r10", "%r11") + free.replace("%r10", "%r11") + free
    for seed in (None, *range(6)):
        assert pair(work, work, options=Options(seed=seed))[0] == 256
    with pytest.raises(Deadlock, match=r"tcgen05\.alloc of the CTA's peer"):
        pair(work, "")
    with pytest.raises(Deadlock, match="free columns in both CTAs"):
        pair(take + take + take, take + take + take)
    with pytest.raises(Deadlock, match=r"tcgen05\.dealloc of the CTA's peer"):
        pair(take, take + free)
    with pytest.raises(TensorMemoryError, match="peer executes tcgen05.alloc of 256"):
        pair(take, take.replace("256", "128"))
    with pytest.raises(TensorMemoryError, match="after tcgen05.relinquish"):
        pair(take, GIVE_UP.format(g=2) + take)


def test_pairs_wait_for_room() -> None:
    """Two warps of each CTA: one frees what the other waits for, whoever comes first."""
    take = [ALLOC.format(g=2, at=at, n=n) for at, n in ((0, 512), (4, 256))]
    free = [FREE.format(g=2, a="%r10", n=n) for n in (512, 256)]
    body = f"""
    setp.ge.u32 %p1, %r1, 32; @%p1 bra SECOND;
    {take[0]} bar.sync 0; ld.shared.b32 %r10, [%r2]; {free[0]} bra END;
    SECOND: bar.sync 0; {take[1]} ld.shared.b32 %r10, [%r2+4]; {free[1]}
    END: bar.sync 0;
    """
    for seed in (None, *range(12)):
        assert manage(body, block=64, grid=2, cluster=2, options=Options(seed=seed))[:2] == [0, 0]


def test_the_whole_warp_takes_part() -> None:
    with pytest.raises((SoftGpuError, Deadlock)):
        manage("setp.eq.u32 %p1, %r1, 0; @%p1 bra END;" + ALLOC.format(g=1, at=0, n=32) + "END:")


@pytest.mark.parametrize(("target", "count"), [("sm_90a", 132), ("sm_100a", 148)])
def test_multiprocessors(target: str, count: int) -> None:
    out = aligned(1, np.uint32)
    launch("mov.u32 %r1, %nsmid; st.global.b32 [%rd1], %r1;", [out], target=target)
    assert out[0] == count
