"""Software GPU: wgmma operands, descriptors and fragments against matrices laid out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from softgpu import DescriptorError, Options, UnmodelledInstruction, exact, floats, hopper
from softgpu.tensor_core import fp8_step_numpy, half_step_numpy
from softgpu.testing import aligned, launch

EXACT = Options(accumulate=exact)
A_AT, B_AT = 1024, 17408  # offsets from smem, which starts at 1024
SPAN = {0: 16, 1: 128, 2: 64, 3: 32}  # row bytes of a descriptor swizzle mode (0: core matrices)
SWIZZLE = {0: 0, 1: 7, 2: 3, 3: 1}


def place(smem: np.ndarray, base: int, rows: np.ndarray, mode: int) -> tuple[int, int]:
    """Writes (rows, 32) bytes as a K-major operand, byte by byte; returns (LBO, SBO)."""
    lbo, sbo = (128, 256) if mode == 0 else (0, 8 * SPAN[mode])
    for r in range(len(rows)):
        for byte in range(32):
            if mode == 0:  # 8 x 16-byte core matrices, neighbours along K at LBO
                at = base + r // 8 * sbo + byte // 16 * lbo + r % 8 * 16 + byte % 16
            else:
                at = base + r // 8 * sbo + r % 8 * SPAN[mode] + byte
                at ^= (at >> 7 & SWIZZLE[mode]) << 4
            smem[at - 1024] = rows[r, byte]
    return lbo, sbo


def place_mn(smem: np.ndarray, base: int, matrix: np.ndarray) -> tuple[int, int]:
    """Writes (rows, 16) 16-bit elements MN-major, 128-byte swizzle: 64 rows are one k line."""
    rows = len(matrix)
    lbo, sbo = 2048, 1024  # next 64 rows, next 8 k
    view = smem.view(np.uint16)
    for r in range(rows):
        for k in range(16):
            at = base + r // 64 * lbo + k // 8 * sbo + k % 8 * 128 + r % 64 * 2
            at ^= (at >> 7 & 7) << 4
            view[(at - 1024) // 2] = matrix[r, k]
    return lbo, sbo


def descriptor(start: int, lbo: int, sbo: int, mode: int) -> int:
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | mode << 62


def mma(
    image: np.ndarray, opcode: str, n: int, desc_a: int, desc_b: int, tail: str, *,
    a_words: np.ndarray | None = None, start: np.ndarray | None = None, options: Options = EXACT,
) -> np.ndarray:  # fmt: skip
    """One wgmma by a warpgroup; returns D (64, n).  ``image`` is copied into shared memory."""
    out = aligned((n // 2, 128), np.float32)
    if start is not None:
        out[...] = to_fragments(start)
    words = aligned((4, 128), np.uint32)
    if a_words is not None:
        words[...] = a_words
    d = ", ".join(f"%r{100 + i}" for i in range(n // 2))
    a = "{%r80, %r81, %r82, %r83}" if a_words is not None else "%rd20"
    body = f"""
    mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mov.u32 %r3, %r1;
    COPY: setp.ge.s32 %p1, %r3, {image.size // 16}; @%p1 bra READY;
    mul.wide.s32 %rd10, %r3, 16; add.s64 %rd11, %rd2, %rd10; ld.global.v4.b32 {{%r4,%r5,%r6,%r7}}, [%rd11];
    mad.lo.s32 %r8, %r3, 16, %r2; st.shared.v4.b32 [%r8], {{%r4,%r5,%r6,%r7}};
    add.s32 %r3, %r3, 128; bra COPY;
    READY: fence.proxy.async.shared::cta; bar.sync 0;
    mul.wide.s32 %rd12, %r1, 4; add.s64 %rd13, %rd1, %rd12; add.s64 %rd14, %rd3, %rd12;
    """  # noqa: E501
    body += "".join(f"ld.global.b32 %r{100 + i}, [%rd13+{512 * i}];\n" for i in range(n // 2))
    body += "".join(f"ld.global.b32 %r{80 + i}, [%rd14+{512 * i}];\n" for i in range(4))
    body += f"mov.b64 %rd20, {desc_a}; mov.b64 %rd21, {desc_b}; setp.eq.s32 %p2, %r2, %r2;\n"
    body += f"wgmma.fence.sync.aligned; {opcode} {{{d}}}, {a}, %rd21, {tail};\n"
    body += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;\n"
    body += "".join(f"st.global.b32 [%rd13+{512 * i}], %r{100 + i};\n" for i in range(n // 2))
    launch(body, [out, image, words], block=128, smem=65536, options=options)
    return from_fragments(out)


def from_fragments(x: np.ndarray) -> np.ndarray:
    """PTX's figure of the D fragment, element by element."""
    n = 2 * len(x)
    d = np.zeros((64, n), np.float32)
    for t in range(128):
        for i in range(n // 2):
            row = 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2)
            d[row, 8 * (i // 4) + 2 * (t % 4) + i % 2] = x[i, t]
    return d


def to_fragments(d: np.ndarray) -> np.ndarray:
    x = np.zeros((d.shape[1] // 2, 128), np.float32)
    for t in range(128):
        for i in range(len(x)):
            row = 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2)
            x[i, t] = d[row, 8 * (i // 4) + 2 * (t % 4) + i % 2]
    return x


def fp8(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    codes = np.random.default_rng(seed).integers(0, 256, (rows, 32)).astype(np.uint8)
    codes = np.where(codes & 0x7F == 0x7F, np.uint8(0x30), codes)
    return codes, floats.E4M3[codes]


def bf16(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).standard_normal((rows, 16)).astype(np.float32)
    codes = floats.to_bf16(x)
    return codes, floats.bf16_to_f32(codes)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [8, 24, 64, 256])
def test_fp8_from_shared_memory(n: int, mode: int) -> None:
    (a8, a), (b8, b) = fp8(64, 1), fp8(n, 2)
    image = aligned(65536, np.uint8)
    da = descriptor(1024 + A_AT, *place(image, 1024 + A_AT, a8, mode), mode)
    db = descriptor(1024 + B_AT, *place(image, 1024 + B_AT, b8, mode), mode)
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3"
    got = mma(image, opcode, n, da, db, "0, 1, 1")
    np.testing.assert_array_equal(got, exact(np.zeros((64, n), np.float32), a, b, "e4m3"))


def test_second_k_step_inside_a_swizzled_row() -> None:
    """A start address 32 bytes into a 128-byte row: the swizzle acts on addresses."""
    codes = np.random.default_rng(5).integers(0, 0x7F, (64, 128)).astype(np.uint8)
    image = aligned(65536, np.uint8)
    for base in (A_AT, B_AT):
        for r in range(64):
            for byte in range(128):
                at = 1024 + base + r * 128 + byte
                image[(at ^ ((at >> 7 & 7) << 4)) - 1024] = codes[r, byte]
    for step in range(4):
        da = descriptor(1024 + A_AT + 32 * step, 0, 1024, 1)
        db = descriptor(1024 + B_AT + 32 * step, 0, 1024, 1)
        opcode = "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"
        got = mma(image, opcode, 64, da, db, "0, 1, 1")
        x = floats.E4M3[codes[:, 32 * step : 32 * step + 32]]
        np.testing.assert_array_equal(got, exact(np.zeros((64, 64), np.float32), x, x, "e4m3"))


def test_a_from_registers_and_accumulation() -> None:
    (a8, a), (b8, b) = fp8(64, 3), fp8(32, 4)
    start = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    image = aligned(65536, np.uint8)
    db = descriptor(1024 + B_AT, *place(image, 1024 + B_AT, b8, 2), 2)
    words = np.zeros((4, 128), np.uint32)
    for t in range(128):
        for reg in range(4):  # PTX's figure of the A fragment of m64k32
            row = 16 * (t // 32) + t % 32 // 4 + 8 * (reg % 2)
            k = 16 * (reg // 2) + 4 * (t % 4)
            words[reg, t] = a8[row, k : k + 4].copy().view(np.uint32)[0]
    opcode = "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3"
    got = mma(image, opcode, 32, 0, db, "%p2, 1, 1", a_words=words, start=start)
    np.testing.assert_array_equal(got, exact(start, a, b, "e4m3"))
    got = mma(image, opcode, 32, 0, db, "%p2, -1, 1", a_words=words, start=start)
    np.testing.assert_array_equal(got, exact(start, -a, b, "e4m3"))


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_bf16_from_shared_memory(mode: int) -> None:
    (a16, a), (b16, b) = bf16(64, 1), bf16(40, 2)
    image = aligned(65536, np.uint8)
    da = descriptor(1024 + A_AT, *place(image, 1024 + A_AT, a16.view(np.uint8), mode), mode)
    db = descriptor(1024 + B_AT, *place(image, 1024 + B_AT, b16.view(np.uint8), mode), mode)
    opcode = "wgmma.mma_async.sync.aligned.m64n40k16.f32.bf16.bf16"
    got = mma(image, opcode, 40, da, db, "0, 1, 1, 0, 0")
    np.testing.assert_array_equal(got, exact(np.zeros((64, 40), np.float32), a, b, "bf16"))


def test_bf16_transposed_operands() -> None:
    (a16, a), (b16, b) = bf16(64, 1), bf16(128, 2)
    image = aligned(65536, np.uint8)
    da = descriptor(1024 + A_AT, *place_mn(image, 1024 + A_AT, a16), 1)
    db = descriptor(1024 + B_AT, *place_mn(image, 1024 + B_AT, b16), 1)
    opcode = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
    got = mma(image, opcode, 128, da, db, "0, 1, 1, 1, 1")
    np.testing.assert_array_equal(got, exact(np.zeros((64, 128), np.float32), a, b, "bf16"))


def test_hardware_accumulation_is_plugged_in() -> None:
    (a8, a), (b8, b) = fp8(64, 6), fp8(16, 7)
    start = np.random.default_rng(1).standard_normal((64, 16)).astype(np.float32) * 1e4
    image = aligned(65536, np.uint8)
    da = descriptor(1024 + A_AT, *place(image, 1024 + A_AT, a8, 1), 1)
    db = descriptor(1024 + B_AT, *place(image, 1024 + B_AT, b8, 1), 1)
    opcode = "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3"
    got = mma(image, opcode, 16, da, db, "1, 1, 1", start=start, options=Options(accumulate=hopper))
    np.testing.assert_array_equal(got, fp8_step_numpy(start, a, b))
    assert (got != exact(start, a, b, "e4m3")).any()
    (_, x), (_, y) = bf16(16, 8), bf16(8, 9)
    zero = np.zeros((16, 8), np.float32)
    np.testing.assert_array_equal(hopper(zero, x, y, "bf16"), half_step_numpy(zero, x, y))


def test_descriptor_outside_shared_memory() -> None:
    image = aligned(1024, np.uint8)
    db = descriptor(1024 + 64000, 0, 1024, 1)
    opcode = "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3"
    with pytest.raises(DescriptorError, match="shared memory"):
        mma(image, opcode, 256, descriptor(2048, 0, 1024, 1), db, "0, 1, 1")


def test_unmodelled_shape() -> None:
    with pytest.raises(UnmodelledInstruction, match="k64"):
        launch("wgmma.mma_async.sync.aligned.m64n8k64.f32.e4m3.e4m3 {%r1,%r2,%r3,%r4}, %rd1, "
               "%rd2, 0, 1, 1;", [])  # fmt: skip
