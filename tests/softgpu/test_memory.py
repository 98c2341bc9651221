"""Software GPU: loads, stores, matrices, atomics, asynchronous copies and tensor maps."""

from __future__ import annotations

import numpy as np
import pytest

from softgpu import DescriptorError, MemoryFault, Options
from softgpu.memory import GlobalMemory
from softgpu.ops.tma import TensorMap, decode_map
from softgpu.testing import aligned, launch
from tests.support.ptx import run
from tests.support.tensor_maps import encode_map, swizzled

TID = "mov.u32 %r99, %tid.x; cvt.u64.u32 %rd60, %r99;\n"


def at(pointer: str, size: int, out: str) -> str:
    """``out`` = ``pointer`` + tid * size."""
    return f"mad.lo.s64 {out}, %rd60, {size}, {pointer};\n"


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("vector", "kind"), [(1, "b8"), (1, "b16"), (1, "b32"), (1, "b64"),
                                              (2, "b32"), (4, "b32"), (2, "b64")])  # fmt: skip
def test_round_trip(space: str, vector: int, kind: str) -> None:
    size = int(kind[1:]) // 8 * vector
    source = np.random.default_rng(0).integers(0, 256, 32 * size, dtype=np.uint8)
    source, out = aligned_copy(source), aligned(32 * size, np.uint8)
    prefix = {"b8": "%rs", "b16": "%rs", "b32": "%r", "b64": "%rd"}[kind]
    regs = ", ".join(f"{prefix}{20 + i}" for i in range(vector))
    word, regs = (f".v{vector}", "{" + regs + "}") if vector > 1 else ("", regs)
    body = TID + at("%rd1", size, "%rd61") + at("%rd2", size, "%rd62")
    body += f"ld.global{word}.{kind} {regs}, [%rd62];\n"
    if space == "shared":
        body += f"mov.u32 %r1, smem; mad.lo.s32 %r2, %r99, {size}, %r1;\n"
        body += f"st.shared{word}.{kind} [%r2], {regs};\n"
        body += "".join(f"mov.b64 %rd{20 + i}, 0;" for i in range(4))
        body += f"ld.shared{word}.{kind} {regs}, [%r2];\n"
    body += f"st.global{word}.{kind} [%rd61], {regs};"
    launch(body, [out, source])
    np.testing.assert_array_equal(out, source)


def aligned_copy(x: np.ndarray) -> np.ndarray:
    y = aligned(x.shape, x.dtype)
    y[...] = x
    return y


def test_narrow_loads_extend() -> None:
    source = aligned_copy(np.arange(120, 120 + 32, dtype=np.uint8))
    signed, unsigned = aligned(32, np.int32), aligned(32, np.int32)
    body = TID + at("%rd1", 4, "%rd61") + at("%rd2", 4, "%rd62") + at("%rd3", 1, "%rd63")
    body += "ld.global.s8 %r1, [%rd63]; ld.global.u8 %r2, [%rd63];"
    body += "st.global.b32 [%rd61], %r1; st.global.b32 [%rd62], %r2;"
    launch(body, [signed, unsigned, source])
    np.testing.assert_array_equal(signed, source.view(np.int8))
    np.testing.assert_array_equal(unsigned, source)


def test_predicated_store_touches_only_its_lanes() -> None:
    out = aligned(32, np.uint32)
    body = TID + at("%rd1", 4, "%rd61")
    body += "and.b32 %r1, %r99, 1; setp.eq.s32 %p1, %r1, 1; @%p1 st.global.b32 [%rd61], %r99;"
    launch(body, [out])
    assert out.tolist() == [i if i % 2 else 0 for i in range(32)]


def test_generic_addresses_reach_shared_global_and_local() -> None:
    out = aligned(32, np.uint32)
    body = TID + at("%rd1", 4, "%rd61")
    body += """
    mov.u64 %rd2, smem; cvta.shared.u64 %rd3, %rd2; mad.lo.s64 %rd4, %rd60, 4, %rd3;
    mov.u64 %rd5, depot; cvta.local.u64 %rd6, %rd5;
    st.b32 [%rd4], %r99;                 // shared through a generic address
    ld.b32 %r1, [%rd4]; add.s32 %r1, %r1, 100;
    st.b32 [%rd6+8], %r1; ld.local.b32 %r2, [%rd5+8];   // local, private to each thread
    st.b32 [%rd61], %r2;                 // global
    """
    launch(body, [out], declarations=".local .align 8 .b8 depot[16];\n")
    assert out.tolist() == [i + 100 for i in range(32)]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("ld.global.b32 %r1, [%rd1+128];", r"out-of-bounds global load of 4 bytes.*argument 0"),
        ("ld.global.b32 %r1, [%rd1+-4];", r"4 bytes before argument 0"),
        ("st.global.v4.b32 [%rd1+120], {%r1,%r1,%r1,%r1};", r"misaligned global store of 16"),
        ("mov.u32 %r1, smem; st.shared.b32 [%r1+4096], %r1;", r"out-of-bounds shared store"),
        ("mov.u32 %r1, smem; ld.shared.b64 %rd5, [%r1+4];", r"misaligned shared load of 8"),
        ("mov.u64 %rd5, 0; ld.global.b8 %rs1, [%rd5];", r"out-of-bounds global load"),
        ("mov.u32 %r1, smem; add.s32 %r1, %r1, 16777216; ld.shared.b32 %r2, [%r1];", "out-of-b"),
    ],
)
def test_faults_say_what_and_where(body: str, text: str) -> None:
    with pytest.raises(MemoryFault, match=text) as error:
        launch(body, [aligned(32, np.uint32)], smem=4096)
    assert "PTX line" in str(error.value) and "warp 0" in str(error.value)


def test_address_0_is_no_memory() -> None:
    """numpy would make memory of its own for it, and every access would be in bounds."""
    memory = GlobalMemory()
    memory.add("empty", 0, 0)
    with pytest.raises(MemoryFault, match=r"^content uint8\[2\]: 2 bytes at address 0: .*freed"):
        memory.add("content uint8[2]", 0, 2)
    assert not memory.regions


def test_a_single_bad_lane_is_named() -> None:
    body = TID + at("%rd1", 4, "%rd61") + "setp.eq.s32 %p1, %r99, 9;"
    body += "@%p1 add.s64 %rd61, %rd61, 4096; ld.global.b32 %r1, [%rd61];"
    with pytest.raises(MemoryFault, match=r"argument 0 \+ 4132"):
        launch(body, [aligned(32, np.uint32)])


def test_uninitialised_shared_memory_reads_as_nan() -> None:
    out = aligned(32, np.float32)
    body = TID + at("%rd1", 4, "%rd61")
    launch(body + "ld.shared.f32 %f1, [smem]; st.global.f32 [%rd61], %f1;", [out])
    assert np.isnan(out).all()


# ---- matrices ------------------------------------------------------------------------------------
@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(count: int, trans: bool) -> None:
    matrices = np.arange(count * 64, dtype=np.uint16).reshape(count, 8, 8)
    source, back = aligned_copy(matrices), aligned(matrices.shape, np.uint16)
    fragments = aligned((count, 32), np.uint32)
    regs = "{" + ", ".join(f"%r{20 + i}" for i in range(count)) + "}"
    t = ".trans" if trans else ""
    rows = 8 * count
    body = (
        TID
        + f"""
    mov.u32 %r1, smem; mad.lo.s32 %r2, %r99, 16, %r1; {at("%rd1", 16, "%rd61")}
    setp.lt.s32 %p1, %r99, {rows};
    @%p1 ld.global.v4.b32 {{%r3,%r4,%r5,%r6}}, [%rd61];
    @%p1 st.shared.v4.b32 [%r2], {{%r3,%r4,%r5,%r6}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x{count}{t}.shared.b16 {regs}, [%r2];
    add.s32 %r7, %r2, 2048;
    stmatrix.sync.aligned.m8n8.x{count}{t}.shared.b16 [%r7], {regs};
    @%p1 ld.shared.v4.b32 {{%r3,%r4,%r5,%r6}}, [%r7];
    {at("%rd2", 16, "%rd62")} @%p1 st.global.v4.b32 [%rd62], {{%r3,%r4,%r5,%r6}};
    {at("%rd3", 4, "%rd63")}
    """
        + "".join(f"st.global.b32 [%rd63+{128 * i}], %r{20 + i};" for i in range(count))
    )
    launch(body, [source, back, fragments])
    np.testing.assert_array_equal(back, matrices)
    for i in range(count):
        for lane in range(32):
            g, q = lane // 4, lane % 4
            m = matrices[i].T if trans else matrices[i]
            want = int(m[g, 2 * q]) | int(m[g, 2 * q + 1]) << 16
            assert fragments[i, lane] == want


# ---- atomics -------------------------------------------------------------------------------------
def test_atomics() -> None:
    out = aligned(8, np.uint32)
    out[:] = [0, 100, 0, 0xFFFFFFFF, 5, 0, 0, 0]
    old = aligned(32, np.uint32)
    body = (
        TID
        + at("%rd2", 4, "%rd62")
        + """
    atom.global.add.u32 %r1, [%rd1], 1; st.global.b32 [%rd62], %r1;
    red.global.min.u32 [%rd1+4], %r99; red.global.max.s32 [%rd1+8], %r99;
    red.global.and.b32 [%rd1+12], 0xff0f; atom.global.cas.b32 %r2, [%rd1+16], 5, 77;
    atom.global.inc.u32 %r3, [%rd1+20], 6; red.global.add.f32 [%rd1+24], 0f3F000000;
    mov.u32 %r4, smem; setp.eq.s32 %p1, %r99, 0; @%p1 st.shared.b32 [%r4], 0; bar.warp.sync -1;
    atom.shared.add.u32 %r5, [%r4], %r99; ld.shared.b32 %r6, [%r4]; st.global.b32 [%rd1+28], %r6;
    """
    )
    launch(body, [out, old])
    assert sorted(old.tolist()) == list(range(32))
    assert out[:6].tolist() == [32, 0, 31, 0xFF0F, 77, 32 % 7]
    assert out[6:7].view(np.float32)[0] == 16.0
    assert out[7] == sum(range(32))


# ---- asynchronous copies -------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["early", "late", "random"])
def test_cp_async(mode: str) -> None:
    source = aligned_copy(np.arange(128, dtype=np.uint32))
    out = aligned(128, np.uint32)
    body = (
        TID
        + at("%rd1", 16, "%rd61")
        + at("%rd2", 16, "%rd62")
        + """
    mov.u32 %r1, smem; mad.lo.s32 %r2, %r99, 16, %r1;
    cp.async.cg.shared.global [%r2], [%rd62], 16, 8;
    cp.async.commit_group; cp.async.wait_group 0;
    ld.shared.v4.b32 {%r3,%r4,%r5,%r6}, [%r2]; st.global.v4.b32 [%rd61], {%r3,%r4,%r5,%r6};
    """
    )
    launch(body, [out, source], options=Options(asynchronous=mode, seed=1))
    want = source.reshape(32, 4).copy()
    want[:, 2:] = 0  # behind src-size
    np.testing.assert_array_equal(out.reshape(32, 4), want)


LOAD = "cp.async.bulk.tensor.{}d.shared::{}.global.tile.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.{}d.global.shared::cta.tile.bulk_group"
BARRIER = "mov.u32 %r50, smem; mov.u32 %r51, %tid.x; setp.eq.s32 %p50, %r51, 0;\n"
WAIT = """
WAITING:
mbarrier.try_wait.parity.shared::cta.b64 %p51, [%r50], 0;
@!%p51 bra WAITING;
"""


@pytest.mark.parametrize("mode", ["early", "late"])
def test_bulk_copy_there_and_back(mode: str) -> None:
    source, out = aligned_copy(np.arange(64, dtype=np.uint32)), aligned(64, np.uint32)
    body = (
        BARRIER
        + """
    @%p50 mbarrier.init.shared.b64 [%r50], 1;
    @%p50 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r50], 256;
    add.s32 %r1, %r50, 128;
    @%p50 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r1], [%rd2], 256, [%r50];
    """
        + WAIT
        + """
    @%p50 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 256;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    """
    )
    launch(body, [out, source], options=Options(asynchronous=mode))
    np.testing.assert_array_equal(out, source)


def test_tensor_map_fields() -> None:
    array = aligned((5, 4, 8, 64), np.uint16)
    raw = encode_map(array, (64, 8, 4, 5), (128, 1024, 4096), (64, 4, 2, 1), 3)
    assert decode_map(raw) == TensorMap(
        array.ctypes.data, 4, 2, (64, 8, 4, 5), (128, 1024, 4096), (64, 4, 2, 1), 3, "u16"
    )
    with pytest.raises(DescriptorError, match="element type 15"):
        decode_map(np.array([0, 2 | 15 << 7, *[0] * 14], np.uint64).tobytes())


TENSORS = {
    1: ((200,), (64,), (100,)),
    2: ((200, 30), (64, 8), (150, -3)),
    3: ((64, 20, 3), (64, 8, 2), (0, 15, 2)),
    4: ((32, 6, 5, 4), (32, 3, 2, 2), (0, 4, -1, 3)),
    5: ((32, 4, 3, 2, 2), (32, 2, 2, 1, 2), (0, 3, 1, 1, 1)),
}


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_tensor_load_and_store(rank: int, swizzle: int) -> None:
    extent, box, coords = TENSORS[rank]
    if swizzle:
        inner = {1: 32, 2: 64, 3: 128}[swizzle]
        box = (inner // 2, *box[1:])
        coords = (0, *coords[1:]) if inner // 2 <= extent[0] else coords
    shape = tuple(reversed(extent[:1] if rank == 1 else extent))
    pad = -(-extent[0] * 2 // 16) * 8  # row pitch in elements: a multiple of 16 bytes
    store = aligned((*shape[:-1], pad), np.uint16)
    store[...] = np.random.default_rng(rank).integers(1, 60000, store.shape)
    strides = tuple(reversed(store.strides[:-1]))
    raw = encode_map(store, extent, strides, box, swizzle)
    dense = np.zeros(tuple(reversed(box)), np.uint16)
    for index in np.ndindex(*dense.shape):
        where = [c + i for c, i in zip(coords, reversed(index))]
        if all(0 <= x < e for x, e in zip(where, extent)):
            dense[index] = store[tuple(reversed(where))]
    size = dense.nbytes
    out, copy = aligned(size // 2, np.uint16), aligned(store.shape, np.uint16)
    target = encode_map(copy, extent, strides, box, swizzle)
    at_ = ", ".join(str(c) for c in coords)
    body = (
        BARRIER
        + f"""
    @%p50 mbarrier.init.shared.b64 [%r50], 1;
    @%p50 mbarrier.arrive.expect_tx.shared.b64 _, [%r50], {size};
    add.s32 %r1, %r50, 1024;
    mov.u64 %rd10, arg1; cvta.param.u64 %rd11, %rd10; mov.u64 %rd12, arg2;
    @%p50 {LOAD.format(rank, "cta")} [%r1], [%rd11, {{{at_}}}], [%r50];
    {WAIT}
    @%p50 {STORE.format(rank)} [%rd12, {{{at_}}}], [%r1];
    @%p50 cp.async.bulk.commit_group; @%p50 cp.async.bulk.wait_group.read 0;
    mov.u32 %r3, %tid.x;
    COPY: setp.ge.s32 %p1, %r3, {size // 2}; @%p1 bra END;
    mad.lo.s32 %r4, %r3, 2, %r1; ld.shared.b16 %rs1, [%r4];
    mul.wide.s32 %rd13, %r3, 2; add.s64 %rd13, %rd13, %rd1; st.global.b16 [%rd13], %rs1;
    add.s32 %r3, %r3, 32; bra COPY;
    END:
    """
    )
    launch(body, [out, raw, target, store, copy], smem=65536)
    flat = dense.reshape(-1)
    for i, value in enumerate(flat):
        assert out[swizzled(2 * i, swizzle) // 2] == value
    want = np.zeros_like(copy)
    for index in np.ndindex(*dense.shape):
        where = [c + i for c, i in zip(coords, reversed(index))]
        if all(0 <= x < e for x, e in zip(where, extent)):
            want[tuple(reversed(where))] = dense[index]
    np.testing.assert_array_equal(copy, want)


@pytest.mark.parametrize("mode", ["early", "late"])
def test_multicast_reaches_every_cta_of_the_mask(mode: str) -> None:
    source = aligned((8, 64), np.uint16)
    source[...] = np.arange(512).reshape(8, 64)
    raw = encode_map(source, (64, 8), (128,), (64, 8), 0)
    out = aligned((2, 512), np.uint16)
    body = (
        BARRIER
        + """
    @%p50 mbarrier.init.shared.b64 [%r50], 1;
    @%p50 mbarrier.arrive.expect_tx.shared.b64 _, [%r50], 1024;
    barrier.cluster.arrive; barrier.cluster.wait;
    add.s32 %r1, %r50, 1024; mov.u64 %rd10, arg1; mov.u16 %rs2, 3;
    mov.u32 %r5, %cluster_ctarank; setp.eq.s32 %p2, %r5, 0; and.pred %p2, %p2, %p50;
    @%p2 MULTICAST
        [%r1], [%rd10, {0, 0}], [%r50], %rs2;
    """
        + WAIT
        + """
    mov.u32 %r3, %tid.x; mul.wide.u32 %rd12, %r5, 1024; add.s64 %rd12, %rd12, %rd1;
    COPY: setp.ge.s32 %p1, %r3, 512; @%p1 bra END;
    mad.lo.s32 %r4, %r3, 2, %r1; ld.shared.b16 %rs1, [%r4];
    mul.wide.s32 %rd13, %r3, 2; add.s64 %rd13, %rd13, %rd12; st.global.b16 [%rd13], %rs1;
    add.s32 %r3, %r3, 32; bra COPY;
    END: barrier.cluster.arrive; barrier.cluster.wait;
    """
    )
    body = body.replace("MULTICAST", LOAD.format(2, "cluster") + ".multicast::cluster")
    launch(body, [out, raw, source], grid=2, cluster=2, options=Options(asynchronous=mode))
    np.testing.assert_array_equal(out[0], source.reshape(-1))
    np.testing.assert_array_equal(out[1], source.reshape(-1))


@pytest.mark.parametrize("resident", [1, 3])
def test_a_cta_finds_nothing_of_the_one_before(resident: int) -> None:
    """Registers are zeros (of every width) and shared memory is poison, in the next launch too."""
    found = "ld.shared.b32 %r10, [%r50]; not.b32 %r10, %r10; or.b32 %r10, %r10, %r40;\n"
    found += "cvt.u32.u64 %r41, %rd40; or.b32 %r10, %r10, %r41; @%p40 or.b32 %r10, %r10, 1;\n"
    left = "bar.sync 0; mov.u32 %r40, 5; mov.u64 %rd40, 6; setp.eq.s32 %p40, %r40, 5;\n"
    left += "st.shared.b32 [%r50], %r40;\n"
    for _ in range(2):
        got = run(found + left, threads=64, grid=5, options=Options(resident=resident))
        assert got == [0] * 320


def test_loads_of_one_address_and_of_many() -> None:
    """What lanes that agree take a shorter way to: values, masked lanes, faults."""
    data = aligned(32, np.uint32)
    data[:] = np.arange(100, 132)
    one = "add.s64 %rd10, %rd2, 12; ld.global.b32 %r10, [%rd10];\n"
    assert run(one, data) == [103] * 32
    each = "mad.lo.s64 %rd10, %rd60, 4, %rd2; ld.global.b32 %r10, [%rd10];\n"
    assert run(each, data) == data.tolist()
    some = "mov.u32 %r10, 7; setp.gt.u32 %p1, %r99, 20; " + one.replace("ld.", "@%p1 ld.")
    assert run(some, data) == [7] * 21 + [103] * 11
    for offset, said in ((2, "misaligned global load of 4 bytes"), (128, "out-of-bounds global")):
        with pytest.raises(MemoryFault, match=said):
            run(one.replace("12", str(offset)), data)
