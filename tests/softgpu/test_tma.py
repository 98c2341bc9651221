"""Software GPU: copies that tensor maps describe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from softgpu import Options
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
    dtype = np.dtype(data.draw(st.sampled_from([np.uint8, np.uint16, np.uint32])))
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
    tensor[...] = np.random.default_rng(seed).integers(1, np.iinfo(dtype).max, tensor.shape)
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
