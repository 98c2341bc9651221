"""Single instructions whose results are recorded on an H200 and replayed on the software GPU.

Special functions on all 2^32 arguments, and wgmma in every form that kernels have, on operands that
every machine builds with the same bits (``snapmla.testing.workloads.exact``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from profiles import record_wgmma as classes
from profiles.record_wgmma import BF16, F16, FP8
from snapmla.testing.workloads.exact import Array, Bits, Recorded, digest

STEPS = 4  # k steps of a wgmma image


class Device(Protocol):
    """Device that a case runs on."""

    torch_device: str

    def launch(self, text: str, arrays: list[Array], grid: int, block: int, smem: int) -> None:
        """Runs the entry ``test`` of a PTX text on arrays, in place."""

    def kernel(self, name: str) -> Callable[..., None]:
        """The compiled variant of that name, on tensors of ``torch_device``."""


# ---- special functions ---------------------------------------------------------------------------
BINADE = 1 << 23
MUFU_OPS = {"ex2": "ex2.approx.ftz.f32", "lg2": "lg2.approx.ftz.f32", "rcp": "rcp.approx.ftz.f32"}


def mufu_ptx(name: str) -> str:
    """PTX that maps 2^23 consecutive bit patterns, from a first one on."""
    body = f"""
    mov.u32 %r3, %ctaid.x; mov.u32 %r4, %tid.x; mad.lo.u32 %r5, %r3, 256, %r4;
    add.u32 %r6, %r5, %r2; mov.b32 %f1, %r6; {MUFU_OPS[name]} %f2, %f1;
    mul.wide.u32 %rd2, %r5, 4; add.s64 %rd3, %rd1, %rd2; st.global.f32 [%rd3], %f2;
    """
    return _module(body, [".param .b64 arg0", ".param .b32 arg1"])


def _module(body: str, params: list[str]) -> str:
    from softgpu.testing import module

    return module(body, params)


# ---- wgmma ---------------------------------------------------------------------------------------
FORMATS = {"e4m3": FP8, "bf16": BF16, "f16": F16}


@dataclass(frozen=True)
class Major:
    """Layout of an operand in 128-byte lines: its descriptor without the address, and what the next
    k step adds to it (both in units of 16 bytes)."""

    descriptor: int
    step: int


_SWIZZLE_128B = 1 << 62
K_MAJOR = Major(_SWIZZLE_128B | 64 << 32, 2)  # a line: a row's four steps; 8 rows are 1024 bytes
# a line: a k of 64 rows; 8 k are 1024 bytes, the next 64 rows 8192
MN_MAJOR = Major(_SWIZZLE_128B | 64 << 32 | 512 << 16, 128)


@dataclass(frozen=True)
class WgmmaForm:
    """One instruction form on operands in 128-byte swizzled lines of shared memory.

    Attributes:
        kind: of both operands, of ``FORMATS``.
        registers: A is in registers instead.
        a_mn, b_mn: the operand is MN-major: a line is one k of 64 rows (16-bit kinds only).
    """

    n: int
    kind: str
    registers: bool = False
    a_mn: bool = False
    b_mn: bool = False

    @property
    def name(self) -> str:
        tail = f"{'_amn' if self.a_mn else ''}{'_bmn' if self.b_mn else ''}"
        source = "rs" if self.registers else "ss"
        return f"m64n{self.n}k{self.format.k}_{self.kind}_{source}{tail}"

    @property
    def format(self) -> classes.Format:
        return FORMATS[self.kind]

    @property
    def opcode(self) -> str:
        kinds = f"k{self.format.k}.f32.{self.kind}.{self.kind}"
        return f"wgmma.mma_async.sync.aligned.m64n{self.n}{kinds}"

    @property
    def image_bytes(self) -> int:
        return 128 * (64 + self.n)

    @property
    def classes(self) -> tuple[tuple[str, str, float], ...]:
        """Of ``WGMMA_CLASSES``.  What is new of an MN-major operand is where it lies: a few."""
        return WGMMA_CLASSES[:: 4 if self.a_mn or self.b_mn else 1]

    @property
    def _flags(self) -> str:
        """Signs, then of 16-bit operands in shared memory whether they are MN-major."""
        majors = [int(self.b_mn)] if self.registers else [int(self.a_mn), int(self.b_mn)]
        return ", ".join(map(str, [1, 1, *(majors if self.kind != "e4m3" else [])]))

    def ptx(self) -> str:
        """One tile a block: four independent instructions on the four 32-byte slices of its rows.

        Arguments: accumulators (tiles, 4, n / 2, 128) f32 in place, images, A registers (tiles, 4,
        4, 128), flags (tiles,): 0 ignores the accumulators.
        """
        regs = self.n // 2
        d = ", ".join(f"%r{100 + i}" for i in range(regs))
        a = "{%r80, %r81, %r82, %r83}" if self.registers else "%rd20"
        of_a, of_b = (MN_MAJOR if mn else K_MAJOR for mn in (self.a_mn, self.b_mn))
        body = f"""
        mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mov.u32 %r9, %ctaid.x;
        mul.wide.u32 %rd10, %r9, {self.image_bytes}; add.s64 %rd2, %rd2, %rd10;
        mul.wide.u32 %rd10, %r9, {STEPS * regs * 512}; add.s64 %rd1, %rd1, %rd10;
        mul.wide.u32 %rd10, %r9, {STEPS * 2048}; add.s64 %rd3, %rd3, %rd10;
        mul.wide.u32 %rd10, %r9, 4; add.s64 %rd4, %rd4, %rd10;
        ld.global.b32 %r10, [%rd4]; setp.ne.s32 %p2, %r10, 0;
        mov.u32 %r3, %r1;
        COPY: setp.ge.s32 %p1, %r3, {self.image_bytes // 16}; @%p1 bra READY;
        mul.wide.s32 %rd10, %r3, 16; add.s64 %rd11, %rd2, %rd10;
        ld.global.v4.b32 {{%r4,%r5,%r6,%r7}}, [%rd11];
        mad.lo.s32 %r8, %r3, 16, %r2; st.shared.v4.b32 [%r8], {{%r4,%r5,%r6,%r7}};
        add.s32 %r3, %r3, 128; bra COPY;
        READY: fence.proxy.async.shared::cta; bar.sync 0;
        mul.wide.s32 %rd12, %r1, 4; add.s64 %rd13, %rd1, %rd12; add.s64 %rd14, %rd3, %rd12;
        shr.u32 %r11, %r2, 4; cvt.u64.u32 %rd15, %r11; mov.b64 %rd16, {of_a.descriptor};
        mov.b64 %rd17, {of_b.descriptor}; or.b64 %rd20, %rd15, %rd16;
        add.s64 %rd15, %rd15, {8192 // 16}; or.b64 %rd21, %rd15, %rd17;
        """
        for step in range(STEPS):
            at = step * regs * 512
            body += "".join(
                f"ld.global.b32 %r{100 + i}, [%rd13+{at + 512 * i}];\n" for i in range(regs)
            )
            if self.registers:
                body += "".join(
                    f"ld.global.b32 %r{80 + i}, [%rd14+{2048 * step + 512 * i}];\n"
                    for i in range(4)
                )
            operands = f"{{{d}}}, {a}, %rd21, %p2, {self._flags}"
            body += f"wgmma.fence.sync.aligned;\n{self.opcode} {operands};\n"
            body += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
            body += "".join(
                f"st.global.b32 [%rd13+{at + 512 * i}], %r{100 + i};\n" for i in range(regs)
            )
            body += f"add.s64 %rd20, %rd20, {of_a.step}; add.s64 %rd21, %rd21, {of_b.step};\n"
        return _module(body, [f".param .b64 arg{i}" for i in range(4)])


# those that the kernels have, and one more
WGMMA_FORMS = (
    *(WgmmaForm(n, "e4m3", registers) for n in (16, 32, 64) for registers in (False, True)),
    *(WgmmaForm(n, kind) for kind in ("bf16", "f16") for n in (16, 32, 64)),
    *(WgmmaForm(64, kind, registers=True) for kind in ("bf16", "f16")),
    *(WgmmaForm(n, "f16", registers=True) for n in (16, 32)),
    *(WgmmaForm(n, kind, a_mn=True) for kind in ("bf16", "f16") for n in (16, 32)),
    *(WgmmaForm(128, kind, b_mn=True) for kind in ("bf16", "f16")),
    *(WgmmaForm(128, kind, registers=True, b_mn=True) for kind in ("bf16", "f16")),
    *(WgmmaForm(128, kind) for kind in ("bf16", "f16", "e4m3")),
)
# operand class, initial accumulators, share of the accumulators; shares of 1 make 10^6 a form
WGMMA_CLASSES = (
    ("any", "zero", 1.0), ("any", "wide", 1.0), ("any", "near", 1.0),
    ("cancel", "zero", 1.0), ("cancel", "wide", 1.0), ("cancel", "near", 1.0),
    ("outlier", "zero", 1.0), ("outlier", "wide", 1.0), ("outlier", "near", 1.0),
    ("tiny", "near", 0.2), ("sparse2", "near", 0.2), ("special", "wide", 0.2),
    ("any", "special", 0.2),
)  # fmt: skip
FULL_ACCUMULATORS = 112_000  # of a class with share 1: nine classes make just over 10^6


@dataclass(frozen=True)
class WgmmaCase:
    """Tiles of one form, operand class and accumulator class."""

    form: WgmmaForm
    mode: str
    acc: str
    share: float

    @property
    def name(self) -> str:
        return f"wgmma.{self.form.name}.{self.mode}.{self.acc}"

    @property
    def tiles(self) -> int:
        return -(-int(self.share * FULL_ACCUMULATORS) // (STEPS * 64 * self.form.n))

    def operands(self) -> tuple[Array, Array, Array]:
        """Codes of A (tiles * 4, 64, k), B (tiles * 4, n, k), accumulators (tiles * 4, 64, n)."""
        form, fmt, bits = self.form, self.form.format, Bits(self.name)
        a, b = classes.operands(fmt, self.mode, bits, self.tiles * STEPS, form.n, fmt.k)
        exact = np.zeros((len(a), 64, form.n))
        with np.errstate(invalid="ignore"):
            x, y = classes.decode(fmt, a), classes.decode(fmt, b)
            for i in range(fmt.k):  # in this order everywhere
                exact += x[:, :, None, i] * y[:, None, :, i]
        start = classes.accumulators(self.acc, bits, exact)
        if self.acc == "zero":  # must not be read
            start = classes.accumulators("wide", bits, exact)
        return a, b, start

    def run(self, device: Device) -> Recorded:
        form, count = self.form, self.tiles
        a, b, start = self.operands()
        flags = np.full(count, self.acc != "zero", np.int32)
        acc = to_fragments(start).reshape(count, STEPS, form.n // 2, 128)
        a_bytes, b_bytes = (
            np.ascontiguousarray(v).view(np.uint8).reshape(count, STEPS, -1, 32) for v in (a, b)
        )
        pairs = ((a_bytes, form.a_mn), (b_bytes, form.b_mn))
        images = np.concatenate([_image(v, mn_major) for v, mn_major in pairs], axis=1)
        words = _a_fragments(a_bytes)
        check = digest([acc, images, words, flags])
        device.launch(form.ptx(), [acc, images, words, flags], count, 128, 32768)
        out = acc.reshape(count * STEPS, -1)
        return Recorded(check, {"d": out}, {"d": out[:1, :64].view(np.uint32)})


def _fragment_index(n: int) -> tuple[Array, Array]:
    """D fragment: (row, column) of register i in thread t, each (n / 2, 128)."""
    i, t = np.arange(n // 2)[:, None], np.arange(128)[None, :]
    return 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2


def to_fragments(d: Array) -> Array:
    """(..., 64, n) -> (..., n / 2, 128): registers of threads."""
    row, column = _fragment_index(d.shape[-1])
    return np.ascontiguousarray(d[..., row, column])


def _a_fragments(a: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """(tiles, 4, 64, 32) bytes -> (tiles, 4, 4, 128) words of the A fragment."""
    words = np.ascontiguousarray(a).view(np.uint32)
    r, t = np.arange(4)[:, None], np.arange(128)[None, :]
    row, word = 16 * (t // 32) + t % 32 // 4 + 8 * (r % 2), 4 * (r // 2) + t % 4
    return np.ascontiguousarray(words[..., row, word])


def _image(rows: NDArray[np.uint8], mn_major: bool) -> NDArray[np.uint8]:
    """(tiles, 4, R, 32) bytes -> (tiles, R * 128): lines of either major, swizzled."""
    if mn_major:
        codes = rows.view(np.uint16)  # (tiles, 4, R, 16)
        blocks = codes.reshape(*codes.shape[:2], -1, 64, 16).transpose(0, 2, 1, 4, 3)
        lines = np.ascontiguousarray(blocks).view(np.uint8)  # (tiles, R / 64, 4, 16, 128)
    else:
        lines = np.ascontiguousarray(rows.transpose(0, 2, 1, 3))  # (tiles, R, 4, 32)
    chunks = lines.reshape(len(rows), -1, 8, 16)
    line = np.arange(chunks.shape[1])[:, None]
    return chunks[:, line, np.arange(8) ^ (line & 7)].reshape(len(rows), -1)


def wgmma_cases() -> Iterator[WgmmaCase]:
    """Every form, every class."""
    for form in WGMMA_FORMS:
        for mode, acc, share in form.classes:
            yield WgmmaCase(form, mode, acc, share)
