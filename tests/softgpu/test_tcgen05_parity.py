"""wgmma and tcgen05 multiply the same bytes of shared memory, named by the same descriptor fields.

With the same arithmetic (``exact``) their accumulators have to agree bit for bit: wgmma is known to
be right about operands and fragments from an H200 (``test_h200.py``).
"""

from __future__ import annotations

import numpy as np
import pytest

from softgpu import Options, exact, floats
from softgpu.testing import aligned
from tests.softgpu.test_wgmma import mma as wgmma
from tests.support.tcgen05 import IMAGE, bits, idesc, place, run

A_AT, B_AT, SIZE = 0, 16384, 49152
WGMMA_AT = 1024  # of the same image: shared memory begins there
MODE = {0: 0, 2: 1, 4: 2, 6: 3}  # wgmma's number of tcgen05's layout type


def as_wgmma(word: int) -> int:
    """The descriptor of the same operand for wgmma, in an image that begins at ``WGMMA_AT``."""
    fields = word & ((1 << 46) - 1)
    return fields - ((IMAGE - WGMMA_AT) >> 4) | MODE[word >> 61] << 62


def operand(rows: int, kind: str, seed: int) -> np.ndarray:
    """(rows, 32) bytes of finite numbers whose sums are rounded."""
    rng = np.random.default_rng(seed)
    if kind == "e4m3":
        raw = rng.integers(0, 256, (rows, 32)).astype(np.uint8)
        return np.where(raw & 0x7F == 0x7F, np.uint8(0x30), raw)
    words = rng.standard_normal((rows, 16)).astype(np.float32).view(np.uint32) >> 16
    return words.astype(np.uint16).view(np.uint8)


@pytest.mark.parametrize("kind,n,layout,mn", [
    ("e4m3", 8, 0, False), ("e4m3", 64, 2, False), ("e4m3", 128, 4, False),
    ("e4m3", 256, 6, False), ("bf16", 24, 0, False), ("bf16", 64, 2, False),
    ("bf16", 128, 4, False), ("bf16", 64, 6, False), ("bf16", 64, 2, True),
    ("bf16", 128, 4, True), ("bf16", 32, 6, True), ("bf16", 64, 0, True),
])  # fmt: skip
def test_the_same_accumulators(kind: str, n: int, layout: int, mn: bool) -> None:
    a, b = operand(64, kind, 1), operand(n, kind, 2)
    old = (100 * np.random.default_rng(3).standard_normal((64, n))).astype(np.float32)
    element, depth = (1, 32) if kind == "e4m3" else (2, 16)
    image = np.zeros((1, SIZE), np.uint8)
    word_a = place(image[0], A_AT, a, element, layout, mn)
    word_b = place(image[0], B_AT, b, element, layout, mn)
    major = f", {int(mn)}, {int(mn)}" if kind == "bf16" else ""
    shared = aligned(SIZE, np.uint8)
    shared[:] = image[0]
    want = wgmma(
        shared, f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.f32.{kind}.{kind}", n,
        as_wgmma(word_a), as_wgmma(word_b), f"1, 1, 1{major}", start=old,
        options=Options(accumulate=exact),
    )  # fmt: skip
    lanes = np.arange(64) % 16 + np.arange(64) // 16 * 32
    columns = -(-n // 32) * 32
    cells = np.zeros((1, 128, columns), np.uint32)
    cells[0, lanes, :n] = bits(old)
    name = "f8f6f4" if kind == "e4m3" else "f16"
    body = f"""
    mov.b64 %rd20, {word_a}; mov.b64 %rd21, {word_b};
    mov.b32 %r81, {idesc(64, n, kind, kind, a_mn=int(mn), b_mn=int(mn))};
    setp.eq.u32 %p4, %r81, %r81;
    tcgen05.mma.cta_group::1.kind::{name} [%r80], %rd20, %rd21, %r81, %p4;
    """
    options = Options(accumulate=exact)
    got = run(body, image=image, cells=cells, columns=columns, options=options)[0, lanes, :n]
    np.testing.assert_array_equal(got, bits(want))
    decode = floats.E4M3.__getitem__ if kind == "e4m3" else floats.bf16_to_f32
    raw = (a, b) if kind == "e4m3" else (a.view(np.uint16), b.view(np.uint16))
    np.testing.assert_array_equal(want, exact(old, decode(raw[0]), decode(raw[1]), kind))
