"""Software GPU: copies that tensor maps describe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from softgpu import DescriptorError, Options, SoftGpuError, UnmodelledInstruction
from softgpu.testing import aligned, launch
from tests.softgpu.test_memory import encode_map, swizzled
from tests.support.ptx import FEW, TID, WAIT, covers


@covers("cp.async.bulk.tensor", "mbarrier.init", "mbarrier.arrive", "mbarrier.try_wait")
@pytest.mark.parametrize("swizzle", range(4))
@FEW
@given(data=st.data())
def test_tensor_copies(swizzle: int, data: Any) -> None:
    """A box anywhere, also outside, of a random tensor: loaded (zeros outside), then stored."""
    rank = data.draw(st.integers(1, 5))
    dtype = np.dtype(data.draw(st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64])))
    span = {0: 128, 1: 32, 2: 64, 3: 128}[swizzle]
    inner = data.draw(st.integers(1, span // 16)) * 16 // dtype.itemsize if swizzle == 0 else (
        span // dtype.itemsize)  # fmt: skip
    most = (9, 3, 2, 2)
    box = (inner, *(data.draw(st.integers(1, n)) for n in most[: rank - 1]))
    extent = (data.draw(st.integers(1, 2 * inner)), *(
        data.draw(st.integers(1, 5)) for _ in range(rank - 1)))  # fmt: skip
    coords = [data.draw(st.integers(-b, e)) for b, e in zip(box, extent, strict=True)]
    pitch = -(-extent[0] * dtype.itemsize // 16) * 16 // dtype.itemsize
    tensor = aligned((*reversed(extent[1:]), pitch), dtype)
    seed = data.draw(st.integers(0, 2**32))
    tensor[...] = np.random.default_rng(seed).integers(1, np.iinfo(dtype).max, tensor.shape, dtype)
    copy = aligned(tensor.shape, dtype)
    strides = tuple(reversed(tensor.strides[:-1]))
    maps = [encode_map(x, extent, strides, box, swizzle) for x in (tensor, copy)]
    # the oracle: pad the tensor on all sides, slice
    real = tensor[..., : extent[0]]
    width = [(b, b) for b in reversed(box)]
    dense = np.pad(real, width)[tuple(
        slice(c + b, c + 2 * b) for c, b in zip(reversed(coords), reversed(box), strict=True)
    )]  # fmt: skip
    whole = -(-dense.nbytes // 1024) * 1024  # read back to the end of the last swizzle atom
    out = aligned(whole, np.uint8)
    where = ", ".join(map(str, coords))
    body = f"""
    @%p50 mbarrier.init.shared.b64 [%r50], 1; @%p50 fence.mbarrier_init.release.cluster;
    @%p50 mbarrier.arrive.expect_tx.shared.b64 _, [%r50], {dense.nbytes};
    bar.warp.sync -1; add.s32 %r1, %r50, 1024; mov.u64 %rd10, arg1; mov.u64 %rd11, arg2;
    @%p50 cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%r1], [%rd10, {{{where}}}], [%r50];
    {WAIT.format(0, 0)}
    @%p50 cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group
        [%rd11, {{{where}}}], [%r1];
    @%p50 cp.async.bulk.commit_group; @%p50 cp.async.bulk.wait_group 0;
    mul.lo.s32 %r3, %r99, 16;
    COPY: setp.ge.s32 %p1, %r3, {whole}; @%p1 bra END;
    add.s32 %r4, %r3, %r1; ld.shared.v4.b32 {{%r5,%r6,%r7,%r8}}, [%r4];
    cvt.u64.u32 %rd12, %r3; add.s64 %rd12, %rd12, %rd1;
    st.global.v4.b32 [%rd12], {{%r5,%r6,%r7,%r8}};
    add.s32 %r3, %r3, 512; bra COPY;
    END:
    """
    mode = data.draw(st.sampled_from(["early", "late", "random"]))
    launch(TID + body, [out, *maps, tensor, copy], smem=65536, options=Options(asynchronous=mode))
    flat = np.ascontiguousarray(dense).reshape(-1).view(np.uint8)
    got = [int(out[swizzled(i, swizzle)]) for i in range(dense.nbytes)]
    assert got == flat.tolist()
    back = np.zeros_like(np.pad(real, width))
    back[tuple(
        slice(c + b, c + 2 * b) for c, b in zip(reversed(coords), reversed(box), strict=True)
    )] = dense  # fmt: skip
    inside = tuple(slice(b, b + e) for b, e in zip(reversed(box), reversed(extent), strict=True))
    np.testing.assert_array_equal(copy[..., : extent[0]], back[inside])
    assert not copy[..., extent[0] :].any()


ROWS = [3, -1, 0, 7]
GATHER = """
mov.u64 %rd10, arg1; add.s32 %r1, %r50, 1024;
@%p50 mbarrier.init.shared.b64 [%r50], 1; @%p50 fence.mbarrier_init.release.cluster;
@%p50 mbarrier.arrive.expect_tx.shared.b64 _, [%r50], 512; bar.warp.sync -1;
@%p50 cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes
    [%r1], [%rd10, {{16, {}}}], [%r50];
"""


@covers("cp.async.bulk.tensor")
@pytest.mark.parametrize("mode", ["early", "late"])
def test_gathered_rows(mode: str) -> None:
    """Four rows of a 128-byte swizzle, named one by one; one that does not exist gives zeros."""
    tensor, out = aligned((7, 160), np.uint8), aligned(512, np.uint8)
    tensor[...] = np.random.default_rng(0).integers(1, 256, tensor.shape)
    tail = f"""{WAIT.format(0, 0)}
    mul.lo.s32 %r3, %r99, 16; add.s32 %r4, %r3, %r1; cvt.u64.u32 %rd12, %r3;
    add.s64 %rd12, %rd12, %rd1; ld.shared.v4.b32 {{%r5,%r6,%r7,%r8}}, [%r4];
    st.global.v4.b32 [%rd12], {{%r5,%r6,%r7,%r8}};
    """
    coded = encode_map(tensor, (160, 7), (160,), (128, 1), 3)
    names = ", ".join(map(str, ROWS))
    launch(TID + GATHER.format(names) + tail, [out, coded, tensor],
           options=Options(asynchronous=mode, hazards="raise"))  # fmt: skip
    for i, row in enumerate(ROWS):
        want = tensor[row, 16:144] if 0 <= row < 7 else np.zeros(128, np.uint8)
        got = [out[swizzled(128 * i + x, 3)] for x in range(128)]
        assert got == want.tolist()
    with pytest.raises(DescriptorError, match="a box of one row"):
        wrong = encode_map(tensor, (160, 7), (160,), (128, 2), 3)
        launch(TID + GATHER.format(names), [out, wrong, tensor])
    with pytest.raises(UnmodelledInstruction, match="3 coordinates"):
        launch(TID + GATHER.format("0, 1"), [out, coded, tensor])


@covers("cp.reduce.async.bulk.tensor", "cp.async.bulk.commit_group", "cp.async.bulk.wait_group")
def test_boxes_that_are_added() -> None:
    """Two additions of a box of f32 that reaches past the tensor; other types are refused."""
    tensor, out = aligned((3, 8), np.float32), aligned(1, np.uint32)
    tensor[...] = np.arange(24).reshape(3, 8)
    body = """
    cvt.rn.f32.u32 %f1, %r99; shl.b32 %r3, %r99, 2; add.s32 %r3, %r3, %r50;
    st.shared.f32 [%r3], %f1; fence.proxy.async.shared::cta; bar.warp.sync -1;
    mov.u64 %rd10, arg1; @!%p50 bra END;
    cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd10, {4, 1}], [%r50];
    cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd10, {4, 1}], [%r50];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:
    """
    want = tensor.copy()
    want[1:, 4:] += 2 * np.arange(32).reshape(4, 8)[:2, :4]
    f32 = 7 << 7 ^ 2 << 7
    coded = np.frombuffer(encode_map(tensor, (8, 3), (32,), (8, 4), 0), np.uint64).copy()
    with pytest.raises(SoftGpuError, match="elements of type u32"):
        launch(TID + body, [out, coded.tobytes(), tensor])
    coded[1] ^= np.uint64(f32)
    launch(TID + body, [out, coded.tobytes(), tensor], options=Options(asynchronous="late"))
    np.testing.assert_array_equal(tensor, want)


@covers("cp.async.bulk.tensor")
@pytest.mark.parametrize("multicast", [False, True])
def test_loads_of_a_pair(multicast: bool) -> None:
    """.cta_group::2: both CTAs' loads complete on the even one's mbarrier, multicast or not."""
    tensor, out = aligned((2, 16), np.uint8), aligned((2, 16), np.uint8)
    tensor[...] = np.random.default_rng(0).integers(1, 256, tensor.shape)
    word = ".multicast::cluster" if multicast else ""
    mask = ", %rs1" if multicast else ""
    body = f"""
    mov.u64 %rd10, arg1; add.s32 %r1, %r50, 1024; mov.u32 %r90, %cluster_ctarank;
    and.b32 %r2, %r50, 0xFEFFFFFF; setp.eq.u32 %p1, %r90, 0; and.pred %p2, %p1, %p50;
    @%p2 mbarrier.init.shared.b64 [%r50], 1; fence.mbarrier_init.release.cluster;
    @%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r50], 32;
    barrier.cluster.arrive; barrier.cluster.wait; mov.b16 %rs1, 3; and.pred %p3, %p50, %p50;
    {"mov.pred %p3, %p2;" if multicast else ""} mov.u32 %r5, {0 if multicast else "%r90"};
    @%p3 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{word}.cta_group::2
        [%r1], [%rd10, {{0, %r5}}], [%r2]{mask};
    @!%p1 bra OVER; {WAIT.format(0, 0)} OVER: barrier.cluster.arrive; barrier.cluster.wait;
    ld.shared.v4.b32 {{%r5,%r6,%r7,%r8}}, [%r1]; mul.wide.u32 %rd12, %r90, 16;
    add.s64 %rd12, %rd12, %rd1; st.global.v4.b32 [%rd12], {{%r5,%r6,%r7,%r8}};
    """  # noqa: E501
    coded = encode_map(tensor, (16, 2), (16,), (16, 1), 0)
    launch(TID + body, [out, coded, tensor], grid=2, cluster=2, target="sm_100a")
    np.testing.assert_array_equal(out, tensor[[0, 0]] if multicast else tensor)
