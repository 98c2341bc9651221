"""Software GPU: ``ldmatrix``, ``stmatrix``, ``movmatrix``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from softgpu import Options, SoftGpuError, UnmodelledInstruction
from softgpu.testing import aligned, launch
from tests.support.cute_layout import at
from tests.support.ptx import FEW, TID, covers


@covers("ld", "ldu", "st", "ldmatrix", "stmatrix", "movmatrix")
@FEW
@given(seed=st.integers(0, 2**32), count=st.sampled_from([1, 2, 4]), trans=st.booleans(),
       back=st.booleans())  # fmt: skip
def test_matrices(seed: int, count: int, trans: bool, back: bool) -> None:
    """ldmatrix[.trans] of scattered rows, movmatrix, stmatrix[.trans] to other scattered rows."""
    rng = np.random.default_rng(seed)
    source = aligned((32, 8), np.uint16)
    source[...] = rng.integers(0, 65536, (32, 8))
    place, target = aligned(32, np.uint32), aligned(32, np.uint32)
    place[:], target[:] = rng.permutation(64)[:32] * 16, rng.permutation(64)[:32] * 16
    fragments, moved, out = (aligned((4, 32), np.uint32) for _ in range(3))
    regs = "{" + ", ".join(f"%r{20 + i}" for i in range(count)) + "}"
    lines = "".join(
        f"st.global.b32 [%rd11+{128 * i}], %r{20 + i};"
        f"movmatrix.sync.aligned.m8n8.trans.b16 %r30, %r{20 + i};"
        f"st.global.b32 [%rd12+{128 * i}], %r30;"
        for i in range(count)
    )
    t, s = (".trans" if x else "" for x in (trans, back))
    body = f"""
    mad.lo.s64 %rd11, %rd60, 4, %rd4; mad.lo.s64 %rd12, %rd60, 4, %rd5;
    mad.lo.s64 %rd13, %rd60, 16, %rd1; mad.lo.s64 %rd14, %rd60, 4, %rd2;
    mad.lo.s64 %rd15, %rd60, 4, %rd3; mad.lo.s64 %rd16, %rd60, 16, %rd6;
    ldu.global.b32 %r1, [%rd14]; ld.global.b32 %r2, [%rd15];
    add.s32 %r1, %r1, %r50; add.s32 %r2, %r2, %r50;
    ld.global.v4.b32 {{%r3,%r4,%r5,%r6}}, [%rd13]; st.shared.v4.b32 [%r1], {{%r3,%r4,%r5,%r6}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x{count}{t}.shared.b16 {regs}, [%r1];
    {lines}
    stmatrix.sync.aligned.m8n8.x{count}{s}.shared.b16 [%r2+2048], {regs};
    bar.warp.sync -1; setp.ge.s32 %p1, %r99, {8 * count}; @%p1 bra END;
    ld.shared.v4.b32 {{%r3,%r4,%r5,%r6}}, [%r2+2048]; st.global.v4.b32 [%rd16], {{%r3,%r4,%r5,%r6}};
    END:
    """
    launch(TID + body, [source, place, target, fragments, moved, out],
           options=Options(hazards="raise"))  # fmt: skip
    for i in range(count):
        matrix = source[8 * i : 8 * i + 8]
        held = matrix.T if trans else matrix
        assert fragments[i].tolist() == [
            int(held[n // 4, n % 4 * 2]) | int(held[n // 4, n % 4 * 2 + 1]) << 16 for n in range(32)
        ]
        turned = np.ascontiguousarray(held.T)
        assert moved[i].tolist() == turned.view(np.uint32).reshape(-1).tolist()
        got = out.reshape(-1).view(np.uint16).reshape(32, 8)[8 * i : 8 * i + 8]
        np.testing.assert_array_equal(got, turned if back else held)


@pytest.mark.parametrize("count", [1, 2, 4])
@covers("stmatrix")
def test_byte_matrices_are_stored_transposed(count: int) -> None:
    """m16n8 of bytes: CUTLASS's SM100_U8x4_STSM_T, as the bit each (thread, value) goes to."""
    rng = np.random.default_rng(count)
    held, target = aligned((4, 32), np.uint32), aligned(32, np.uint32)
    held[...], target[:] = rng.integers(0, 2**32, (4, 32)), rng.permutation(64)[:32] * 16
    out = aligned((32, 16), np.uint8)
    regs = "{" + ", ".join(f"%r{20 + i}" for i in range(count)) + "}"
    loads = "".join(f"ld.global.b32 %r{20 + i}, [%rd11+{128 * i}];" for i in range(count))
    body = f"""
    mad.lo.s64 %rd11, %rd60, 4, %rd1; mad.lo.s64 %rd15, %rd60, 4, %rd2;
    mad.lo.s64 %rd16, %rd60, 16, %rd3; ld.global.b32 %r2, [%rd15]; add.s32 %r2, %r2, %r50;
    {loads}
    stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%r2], {regs};
    bar.warp.sync -1; setp.ge.s32 %p1, %r99, {8 * count}; @%p1 bra END;
    ld.shared.v4.b32 {{%r3,%r4,%r5,%r6}}, [%r2]; st.global.v4.b32 [%rd16], {{%r3,%r4,%r5,%r6}};
    END:
    """
    launch(TID + body, [held, target, out], options=Options(hazards="raise"), target="sm_100a")
    t, value = np.arange(32)[:, None], np.arange(4 * count)[None, :]
    bit = at((4, 8), (256, 8), t) + at((2, 2, count), (128, 64, 1024), value)
    want = np.zeros((32, 16), np.uint8)
    want[bit // 128, bit % 128 // 8] = held[:count].T.copy().view(np.uint8)
    np.testing.assert_array_equal(out, want)
    with pytest.raises(UnmodelledInstruction, match="before sm_100a"):
        launch(TID + body, [held, target, out])


def test_matrix_moves_need_the_whole_warp() -> None:
    move = "movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1;"
    with pytest.raises(SoftGpuError, match="movmatrix needs all 32 lanes"):
        launch(f"mov.u32 %r1, %tid.x; setp.gt.s32 %p1, %r1, 7; @%p1 exit; {move}", [])
