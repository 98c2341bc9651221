"""Kernels around tcgen05 instructions, and the layouts of their operands written as loops.

Nothing here is imported from the code under test: the layouts follow the tables of PTX ISA 9.7.18
element by element.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from softgpu import Options
from softgpu.testing import aligned, launch

IMAGE = 2048  # offset of the image in shared memory, whose first KiB is the system's
SPAN = {0: 0, 2: 128, 4: 64, 6: 32}  # bytes of a swizzled row by layout type
POISON = 0xFFFFFFFF


def run(
    body: str, *, image: np.ndarray | None = None, cells: np.ndarray | None = None,
    columns: int = 128, group: int = 1, commit: bool = True, every: str = "", taken: int = 512,
    options: Options | None = None,
) -> np.ndarray:  # fmt: skip
    """Runs ``body`` in thread 0 (of CTA 0) and returns tensor memory, (CTAs, 128, columns).

    Args:
        image: (CTAs, bytes) copied to shared memory at ``IMAGE``.
        cells: (CTAs, 128, columns) uint32 stored before.
        group: 2 runs a pair of CTAs.
        commit: wait for a commit of thread 0.  every: what all 128 threads run behind it.
        taken: columns allocated.
    Registers: %r80 holds the allocation's address, %r2 that of shared memory, %r1 the thread.
    """
    image = np.zeros((group, 16), np.uint8) if image is None else image
    size = -(-image.shape[1] // 2048) * 2048
    data = aligned((group, size), np.uint8)
    data[:, : image.shape[1]] = image
    out = aligned((group, 128, columns), np.uint32)
    if cells is not None:
        out[...] = cells
    g = f"cta_group::{group}"
    body = f"""
    mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mov.u32 %r90, %cluster_ctarank;
    mad.lo.s32 %r3, %r90, 128, %r1; mul.wide.s32 %rd10, %r3, {4 * columns};
    add.s64 %rd10, %rd1, %rd10; mul.wide.s32 %rd11, %r90, {size}; add.s64 %rd11, %rd2, %rd11;
    mul.wide.s32 %rd13, %r1, 16; add.s64 %rd11, %rd11, %rd13; mad.lo.s32 %r4, %r1, 16, %r2;
    """ + "".join(
        f"ld.global.v4.b32 {{%r5,%r6,%r7,%r8}}, [%rd11+{at}];"
        f"st.shared.v4.b32 [%r4+{IMAGE - 1024 + at}], {{%r5,%r6,%r7,%r8}};\n"
        for at in range(0, size, 2048)
    ) + f"""
    setp.eq.u32 %p60, %r1, 0; @%p60 mbarrier.init.shared.b64 [%r2+64], 1;
    fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;
    setp.ge.u32 %p61, %r1, 32; @%p61 bra TAKEN;
    tcgen05.alloc.{g}.sync.aligned.shared::cta.b32 [%r2], {taken};
    TAKEN: bar.sync 0; ld.shared.b32 %r80, [%r2];
    """ + "".join(_put(at, columns) for at in range(0, columns, 32) if cells is not None) + f"""
    tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync;
    barrier.cluster.arrive; barrier.cluster.wait;
    tcgen05.fence::after_thread_sync; setp.eq.u32 %p62, %r90, 0; and.pred %p62, %p62, %p60;
    @!%p62 bra ISSUED;
    {body}
    {_commit(group) if commit else ""}
    ISSUED: {"W: mbarrier.try_wait.parity.shared.b64 %p63, [%r2+64], 0; @!%p63 bra W;" * commit}
    tcgen05.fence::after_thread_sync;
    {every}
    """ + "".join(_get(at, columns) for at in range(0, columns, 32)) + f"""
    tcgen05.fence::before_thread_sync; barrier.cluster.arrive; barrier.cluster.wait;
    @%p61 bra END;
    tcgen05.relinquish_alloc_permit.{g}.sync.aligned;
    tcgen05.dealloc.{g}.sync.aligned.b32 %r80, {taken};
    END:
    """  # fmt: skip
    launch(
        body, [out, data], grid=group, block=128, cluster=group, smem=IMAGE + size, options=options,
        target="sm_100a",
    )  # fmt: skip
    return out


def _commit(group: int) -> str:
    head = f"tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster"
    if group == 1:
        return f"{head}.b64 [%r2+64];"
    return f"mov.b16 %rs9, 3; {head}.multicast::cluster.b64 [%r2+64], %rs9;"


def _put(at: int, columns: int) -> str:
    n = min(32, columns - at)
    text = "".join(
        f"ld.global.b32 %r{100 + i}, [%rd10+{4 * (at + i)}];\n" for i in range(n)
    )  # fmt: skip
    return f"{text}tcgen05.st.sync.aligned.32x32b.x{n}.b32 [%r80+{at}], {vector(100, n)};\n"


def _get(at: int, columns: int) -> str:
    n = min(32, columns - at)
    text = "".join(
        f"st.global.b32 [%rd10+{4 * (at + i)}], %r{100 + i};\n" for i in range(n)
    )  # fmt: skip
    head = f"tcgen05.ld.sync.aligned.32x32b.x{n}.b32 {vector(100, n)}, [%r80+{at}];\n"
    return head + "tcgen05.wait::ld.sync.aligned;\n" + text


def vector(first: int, n: int) -> str:
    """``{%r100, ..}``"""
    return "{" + ", ".join(f"%r{first + i}" for i in range(n)) + "}"


# ---- descriptors and operands --------------------------------------------------------------------
def descriptor(start: int, lbo: int, sbo: int, layout: int) -> int:
    """A shared memory descriptor; ``start`` is a shared address."""
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | 1 << 46 | layout << 61


CODES = {"f16": ("f16", 0), "bf16": ("f16", 1), "e4m3": ("f8f6f4", 0), "e5m2": ("f8f6f4", 1)}


def idesc(
    m: int, n: int, a: str = "e4m3", b: str = "e4m3", *, a_mn: int = 0, b_mn: int = 0,
    negate: tuple[int, int] = (0, 0),
) -> int:  # fmt: skip
    """An instruction descriptor."""
    word = 1 << 4 | CODES[a][1] << 7 | CODES[b][1] << 10 | negate[0] << 13 | negate[1] << 14
    return word | a_mn << 15 | b_mn << 16 | n >> 3 << 17 | m >> 4 << 24


def place(image: np.ndarray, at: int, rows: np.ndarray, element: int, layout: int, mn: bool) -> int:
    """Writes (rows, bytes of K) as an operand at byte ``at`` of an image; its descriptor."""
    count, nbytes = rows.shape
    depth, span = nbytes // element, SPAN[layout]
    start = IMAGE + at
    if span == 0:  # 8 x 16-byte core matrices, one behind the other
        lbo, sbo = 128, 128 * max(nbytes // 16, 1)
        if mn:
            lbo, sbo = 128, 128 * max(depth // 8, 1)
    elif mn:  # span bytes of rows a line, 8 lines an atom, atoms along K, then along the rows
        lbo, sbo = 8 * span * max(depth // 8, 1), 8 * span
    else:
        lbo, sbo = 16, 8 * span
    for r in range(count):
        for k in range(depth):
            for byte in range(element):
                if mn:
                    x = r * element + byte  # along the line
                    if span == 0:
                        to = start + k % 8 * 16 + k // 8 * lbo + x // 16 * sbo + x % 16
                    else:
                        to = start + k % 8 * span + k // 8 * sbo + x // span * lbo + x % span
                else:
                    x = k * element + byte
                    if span == 0:
                        to = start + r % 8 * 16 + r // 8 * sbo + x // 16 * lbo + x % 16
                    else:
                        to = start + r % 8 * span + r // 8 * sbo + x
                if span:
                    to ^= (to >> 7 & {128: 7, 64: 3, 32: 1}[span]) << 4
                image[to - IMAGE] = rows[r, k * element + byte]
    return descriptor(start, lbo, sbo, layout)


def place_of_d(i: int, j: int, m: int, n: int, form: str) -> list[tuple[int, int, int]]:
    """(CTA, lane, column) of D's element (i, j): the figures of layouts A to G."""
    layout = {("1", 128): "D", ("1", 64): "F", ("ws", 128): "D", ("ws", 64): "E", ("ws", 32): "G",
              ("2", 256): "A", ("2", 128): "B"}[form, m]  # fmt: skip
    half, quarter = n // 2, n // 4
    return {
        "A": lambda: [(i // 128, i % 128, j)],
        "B": lambda: [(i // 64, i % 64 + 64 * (j // half), j % half)],
        "D": lambda: [(0, i, j)],
        "E": lambda: [(0, i + 64 * (j // half), j % half)],
        "F": lambda: [(0, i % 16 + i // 16 * 32, j)],
        "G": lambda: [(0, i + 32 * (j // quarter), j % quarter)],
    }[layout]()


def copies_of_a(i: int, m: int, form: str) -> list[tuple[int, int]]:
    """(CTA, lane) of every place where row i of A must lie in tensor memory."""
    n = 128 if form == "2" else 64
    return sorted({(c, lane) for j in range(n) for c, lane, _ in place_of_d(i, j, m, n, form)})


def small_numbers(shape: tuple[int, ...], kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(raw bytes, float64 values): multiples of a half up to 4, so that sums are exact."""
    values = np.random.default_rng(seed).integers(-8, 9, shape) / 2.0
    if kind == "f16":
        return values.astype(np.float16).view(np.uint8), values
    if kind == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(
            np.uint8
        ), values
    exponent_bits, bias = {"e4m3": (4, 7), "e5m2": (5, 15)}[kind]
    raw = np.zeros(shape, np.uint8)
    for at in np.ndindex(*shape):
        raw[at] = _small_float(float(values[at]), 7 - exponent_bits, bias)
    return raw, values


def _small_float(x: float, fraction: int, bias: int) -> int:
    """The bits of a number that the format holds."""
    sign, x = (128, -x) if x < 0 else (0, x)
    if x == 0:
        return 0
    exponent = 0
    while x >= 2:
        x, exponent = x / 2, exponent + 1
    while x < 1:
        x, exponent = x * 2, exponent - 1
    return sign | (exponent + bias) << fraction | int((x - 1) * 2**fraction)


def bits(x: Any) -> np.ndarray:
    """float32 bit patterns."""
    return np.asarray(x, np.float32).view(np.uint32)
