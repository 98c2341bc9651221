"""Inputs whose results are recorded on an H200 and replayed on the software GPU.

A ``Case`` builds its inputs from its name with integer operations, IEEE arithmetic and numpy's raw
PCG64 stream only, so that every machine builds the same bits (a digest checks it), and runs on a
``Device``: the GPU of ``profiles.record_softgpu`` or the software GPU of the tests.  Results are
rows; what is stored of a row is a 64-bit hash of its bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from codegen import abi
from dsl_kernels.dims import ITEM_WORDS, PARTIAL_ROW
from dsl_kernels.records import RECORD_WORDS
from dsl_kernels.spec import VariantSpec
from profiles import record_wgmma as classes
from profiles.record_wgmma import BF16, F16, FP8, Bits
from snapmla.decode_plan import new_workspace
from snapmla.testing import partials
from snapmla.testing.reference_plan import NOTHING_HIDDEN, plan_reference, records_of

Array = NDArray[Any]
Rows = dict[str, Array]  # name -> (rows, ...) results

D_V, D_ROPE, D_QK = 512, 64, 576
SOFTMAX_SCALE = 0.07216878364870323  # 192^-0.5
LN2 = 0.6931471805599453
STEPS = 4  # k steps of a wgmma image


class Device(Protocol):
    """Where a case runs."""

    torch_device: str

    def launch(self, text: str, arrays: list[Array], grid: int, block: int, smem: int) -> None:
        """Runs the entry ``test`` of a PTX text on arrays, in place."""

    def kernel(self, name: str) -> Callable[..., None]:
        """The compiled variant of that name, on tensors of ``torch_device``."""


def call(device: Device, variant: str, **values: Any) -> None:
    """Calls a variant with its arguments by name."""
    from snapmla import runtime

    kernel = device.kernel(variant)  # compiles it if need be
    names = runtime.argument_names(VariantSpec.from_name(variant))
    kernel(*abi.ordered(names, values))


def hash_rows(rows: Array) -> NDArray[np.uint64]:
    """(rows, ...) of any dtype -> one 64-bit hash a row."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    digests = b"".join(hashlib.blake2b(r.tobytes(), digest_size=8).digest() for r in flat)
    return np.frombuffer(digests, np.uint64)


def digest(arrays: list[Array]) -> NDArray[np.uint8]:
    """16 bytes that identify inputs."""
    h = hashlib.blake2b(digest_size=16)
    for a in arrays:
        h.update(repr((a.dtype.str, a.shape)).encode())
        h.update(np.ascontiguousarray(a).tobytes())
    return np.frombuffer(h.digest(), np.uint8)


@dataclass
class Result:
    """What a case gave: ``inputs`` identifies what went in, ``rows`` is what is compared."""

    inputs: NDArray[np.uint8]
    rows: Rows
    raw: Rows = field(default_factory=dict)  # small parts kept unhashed, for debugging


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
    """How an operand lies in 128-byte lines: its descriptor without the address, and what the next
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
    *(WgmmaForm(n, kind, a_mn=True) for kind in ("bf16", "f16") for n in (16, 32)),
    *(WgmmaForm(128, kind, b_mn=True) for kind in ("bf16", "f16")),
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

    def run(self, device: Device) -> Result:
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
        return Result(check, {"d": out}, {"d": out[:1, :64].view(np.uint32)})


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


# ---- tensors -------------------------------------------------------------------------------------
TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def float_fields(bits: Bits, shape: tuple[int, ...], low: int, high: int) -> NDArray[np.uint32]:
    """float32 bit patterns: random sign and fraction, biased exponent in [low, high]."""
    out = bits.below(2, shape) << 31 | (low + bits.below(high - low + 1, shape)) << 23
    return (out | bits.below(1 << 23, shape)).astype(np.uint32)


def bell(bits: Bits, shape: tuple[int, ...], exponent: Array) -> NDArray[np.float32]:
    """Values of size 2^exponent whose logarithm falls off geometrically to smaller ones."""
    raw = bits.below(1 << 20, shape) | 1 << 20
    drop = np.zeros(shape, np.int64)  # trailing zeros of raw
    for i in range(8):
        drop += (raw & ((2 << i) - 1)) == 0
    fields = float_fields(bits, shape, 127, 127).view(np.float32)
    return np.ldexp(fields, np.broadcast_to(exponent - drop, shape).astype(np.int32))


def as_tensor(x: NDArray[np.float32], dtype: torch.dtype, device: str) -> torch.Tensor:
    """float32 array -> tensor; bf16 and f16 by IEEE rounding to nearest even."""
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype).to(device)


def bits_of(t: torch.Tensor) -> Array:
    """Contiguous copy as unsigned integers (numpy)."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    flat = t.detach().cpu().contiguous().view(kind).numpy().copy()  # never a view of ``t``
    return flat.view(f"u{t.element_size()}")


def latents(name: str, rows: int, in_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, 512) and (rows, 64): sizes 2^-20 .. 2^14, then rows of every awkward kind."""
    bits = Bits(name + ".latents")
    size = bits.below(34 if in_dtype != "f16" else 20, (rows, 1)) - 20
    c, r = bell(bits, (rows, D_V), size), bell(bits, (rows, D_ROPE), size)
    big = 6e4 if in_dtype == "f16" else 1e38
    nan, inf, least = np.float32(np.nan), np.float32(np.inf), np.float32(2.0**-149)
    c[1], c[2], r[2] = 0, -0.0, 0
    c[3], r[3] = 0, 1000 * r[3]
    c[4], r[4] = 0, big
    c[5, 511], c[6, 7], r[7, 63], r[8, 0] = nan, -inf, nan, inf
    c[9, 300], c[10], r[10] = -big, big, -big
    c[11] *= np.float32(2.0**-100)
    c[12], r[12] = least, -least
    r[13, 5] = 1000
    c[14] = np.where(bits.below(2, (D_V,)), 448, 17) * np.float32(1)  # ties of e4m3
    c[15] = np.ldexp(np.float32(1), bits.below(30, (D_V,)).astype(np.int32) - 25)
    c[16], c[16, 9] = 0, np.float32(448 * 2.0**-80)
    dtype = TORCH[in_dtype]
    return as_tensor(c, dtype, "cpu"), as_tensor(r, dtype, "cpu")


def pool(
    pages: int, page_size: int, layout: str, device: str, fill: int = 255
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(content u8, rope bf16, scale f32) of a cache whose every byte is ``fill``."""

    def block(*shape: int) -> torch.Tensor:
        return torch.full(shape, fill, dtype=torch.uint8, device=device)

    p, row = page_size, D_V + 2 * D_ROPE
    if layout == "paged":
        page = block(pages, p * (row + 4))
        rope = page.view(torch.bfloat16)[:, D_V * p // 2 : (D_V // 2 + D_ROPE) * p]
        return (
            page[:, : D_V * p].unflatten(1, (p, D_V)),
            rope.unflatten(1, (p, D_ROPE)),
            page.view(torch.float32)[:, row * p // 4 :],
        )
    if layout == "row640":
        rows = block(pages, p, row)
        rope = rows.view(torch.bfloat16)[..., D_V // 2 :]
        return rows[..., :D_V], rope, block(pages, 4 * p).view(torch.float32)
    return (
        block(pages, p, D_V),
        block(pages, p, 2 * D_ROPE).view(torch.bfloat16),
        block(pages, 4 * p).view(torch.float32),
    )


LAYOUTS = ("split", "paged", "row640")


def named(cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A cache as kernels' arguments."""
    return dict(zip(("content", "rope", "scale"), cache, strict=True))


def rows_pool(
    pages: int, page_size: int, heads: int, dtype: str, device: str, style: int
) -> torch.Tensor:
    """(pages, page_size, heads, 576) of a 16-bit cache whose every byte is 255; ``style`` 0 is
    contiguous, 1 has gaps behind rows, 2 also heads before tokens."""
    gap = 8 if style else 0
    shape = (pages, page_size, heads) if style < 2 else (pages, heads, page_size)
    memory = torch.full((*shape, D_QK + gap), -1, dtype=torch.int16, device=device)
    rows = memory.view(TORCH[dtype])[..., :D_QK]
    return rows if style < 2 else rows.transpose(1, 2)


def from_bits(x: NDArray[np.uint16], dtype: str) -> torch.Tensor:
    """Tensor (CPU) of a 16-bit dtype with these bit patterns."""
    return torch.from_numpy(x.view(np.int16)).view(TORCH[dtype])


def bf16(x: NDArray[np.uint16]) -> torch.Tensor:
    """bfloat16 tensor (CPU) of these bit patterns."""
    return from_bits(x, "bf16")


def fill(
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    content: NDArray[np.uint8],
    rope: NDArray[np.uint16],
    scale: NDArray[np.uint32],
) -> None:
    """Writes bit patterns (tokens, 512), (tokens, 64), (tokens,) to ``pool``'s tensors."""
    sources = (torch.from_numpy(content), bf16(rope), torch.from_numpy(scale.view(np.float32)))
    for target, source in zip(cache, sources, strict=True):
        target.copy_(source.view(target.shape))


# ---- helper kernels ------------------------------------------------------------------------------
@dataclass(frozen=True)
class KernelCase:
    """One compiled variant on inputs built from its name and ``index``."""

    variant: str
    index: int = 0

    @property
    def name(self) -> str:
        return f"{self.variant}.{self.index}"

    @property
    def spec(self) -> VariantSpec:
        return VariantSpec.from_name(self.variant)

    def run(self, device: Device) -> Result:
        return _RUNNERS[self.spec.op](self, device)


def _rotation(case: KernelCase, tokens: int, dev: str) -> dict[str, Any]:
    """Arguments of a variant with RoPE; numbers of [-1, 1] stand for cosines and sines."""
    spec = case.spec
    if spec.rope_style == "applied":
        return {}
    bits = Bits(case.name + ".rope")
    unit = (bits.below(1 << 24, (40, D_ROPE)) * 2.0**-23 - 1).astype(np.float32)
    ends = np.iinfo(np.int32 if spec.position_dtype == "i32" else np.int64)
    positions = bits.below(40, (tokens,)).astype(ends.dtype)
    outside = (-1, 40, ends.min, ends.max)[: tokens // 2]
    positions[: len(outside)] = outside
    given: dict[str, Any] = {
        "positions": torch.from_numpy(positions).to(dev),
        "cos_sin": as_tensor(unit, TORCH[spec.cos_sin_dtype], dev),
    }
    if dict(spec.values).get("norm") == "rms":
        weight = (bits.below(1 << 16, (D_V,)) * 2.0**-15).astype(np.float32)
        given |= {"norm_weight": as_tensor(weight, TORCH[spec.in_dtype], dev), "norm_eps": 1e-6}
    return given


def _append(case: KernelCase, device: Device) -> Result:
    spec, dev = case.spec, device.torch_device
    n, page_size = 57, (16, 64, 128)[case.index % 3]
    pages = 128 // page_size + 2
    heads = 3 if spec.cache_dtype != "fp8" and case.index % 2 else 1
    c, r = latents(case.name, n * heads, spec.in_dtype)
    bits = Bits(case.name)
    slots = np.argsort(bits.below(1 << 40, (pages * page_size,)), kind="stable")[:n]
    slots[18], slots[19] = -1, pages * page_size
    ends = np.iinfo(np.int32 if spec.index_dtype == "i32" else np.int64)
    slots[20], slots[21] = ends.min, ends.max
    index = torch.from_numpy(slots.astype(ends.dtype))
    check = digest([bits_of(c), bits_of(r), slots])
    if case.index % 2:  # slices of one (n, 576) tensor
        both = torch.cat([c, r], -1).to(dev)
        c, r = both[:, :D_V], both[:, D_V:]
    given = {"c_kv": c.to(dev), "k_rope": r.to(dev), "slot_mapping": index.to(dev)}
    if spec.cache_dtype != "fp8":
        kv = rows_pool(pages, page_size, heads, spec.cache_dtype, dev, case.index % 3)
        call(device, case.variant, kv=kv, **given)
        return Result(check, {"pool": bits_of(kv).reshape(pages * page_size, -1)})
    cache = pool(pages, page_size, LAYOUTS[case.index % 3], dev)
    call(device, case.variant, **named(cache), **given, **_rotation(case, n, dev))
    content, rope, scale = (bits_of(x) for x in cache)
    rows = np.concatenate(
        [
            content.reshape(-1, D_V),
            rope.reshape(-1, D_ROPE).view(np.uint8),
            scale.reshape(-1, 1).view(np.uint8),
        ],
        axis=1,
    )
    return Result(check, {"pool": rows})


def _quantize(case: KernelCase, device: Device) -> Result:
    spec, dev = case.spec, device.torch_device
    b, s_q, heads = (3, 2, 17) if case.index % 2 else (2, 1, 61)
    shape = (b, s_q, heads)
    c, r = latents(case.name, b * s_q * heads, spec.in_dtype)
    check = digest([bits_of(c), bits_of(r)])
    both = torch.cat([c, r], -1).to(dev).reshape(*shape, D_V + D_ROPE)
    nope, rope = both[..., :D_V], both[..., D_V:]
    if not case.index % 2:
        nope, rope = nope.contiguous(), rope.contiguous()
    q8 = torch.zeros((*shape, D_V), dtype=torch.uint8, device=dev)
    q_rope = torch.zeros((*shape, D_ROPE), dtype=torch.bfloat16, device=dev)
    scale = torch.zeros(shape if spec.mode == "token_head" else shape[:2], device=dev)
    call(
        device, case.variant, q_nope=nope, q_rope=rope, out_nope=q8, out_rope=q_rope,
        out_scale=scale, **_rotation(case, b * s_q, dev),
    )  # fmt: skip
    return Result(
        check,
        {
            "nope": bits_of(q8).reshape(-1, D_V),
            "rope": bits_of(q_rope).reshape(-1, D_ROPE),
            "scale": bits_of(scale).reshape(-1, 1),
        },
    )


def _fetch(case: KernelCase, device: Device) -> Result:
    spec, dev = case.spec, device.torch_device
    page_size, pages = (16, 64, 128)[case.index % 3], 6
    bits = Bits(case.name)
    tokens, heads = pages * page_size, 1
    cache: dict[str, torch.Tensor]
    if spec.cache_dtype == "fp8":
        content = bits.below(256, (tokens, D_V)).astype(np.uint8)  # NaN codes too
        rope = (float_fields(bits, (tokens, D_ROPE), 90, 150) >> 16).astype(np.uint16)
        rope[::37, 3], rope[1::41, 9], rope[2::43, 1] = 0x7FC1, 0xFF80, 0x0001
        scale = float_fields(bits, (tokens,), 90, 140) & np.uint32(0x7FFFFFFF)
        scale[3::19], scale[4::23], scale[5::29] = 0x7FC00000, 0, 0x00000123
        check = digest([content, rope, scale])
        planes = pool(pages, page_size, LAYOUTS[case.index % 3], dev)
        fill(planes, content, rope, scale)
        cache = named(planes)
    else:
        heads = (1, 3)[case.index % 2]
        codes = bits.below(1 << 16, (pages, page_size, heads, D_QK)).astype(np.uint16)
        check = digest([codes])
        kv = rows_pool(pages, page_size, heads, spec.cache_dtype, dev, case.index % 3)
        kv.copy_(from_bits(codes, spec.cache_dtype))
        cache = {"kv": kv}
    selector, lead = _fetch_selector(spec, bits, tokens, page_size)
    own = () if spec.cache_dtype == "fp8" else (heads,)
    both = torch.full((*lead, *own, D_QK), 7.0, dtype=TORCH[spec.in_dtype], device=dev)
    nope, r = both[..., :D_V], both[..., D_V:]
    if case.index % 2 == 0:
        nope, r = nope.contiguous(), r.contiguous()
    where = {name: torch.from_numpy(s).to(dev) for name, s in selector.items()}
    call(device, case.variant, **cache, **where, out_nope=nope, out_rope=r)
    tokens_out = int(np.prod(lead))
    found = {"nope": nope, "rope": r}
    if own:  # one plane: one hash
        found = {"kv": torch.cat([nope, r], -1)}
    return Result(check, {k: bits_of(x).reshape(tokens_out, -1) for k, x in found.items()})


def _fetch_selector(
    spec: VariantSpec, bits: Bits, tokens: int, page_size: int
) -> tuple[dict[str, Array], tuple[int, ...]]:
    """(what a fetch is told, leading dimensions of its result)."""
    if spec.mode == "indices":
        width = {"i32": np.int32, "i64": np.int64}[spec.index_dtype]
        index = bits.below(tokens, (90,)).astype(width)
        index[7], index[11], index[40] = -1, tokens, 2**31 - 1
        if spec.index_dtype == "i64":
            index[50], index[51] = 2**32 + 1, 1 - 2**32
        return {"indices": index}, (90,)
    table = np.array([[3, 1, 5], [0, 2**31 - 9, -1], [4, 2, 0]], np.int32)
    if spec.mode == "pages":
        lengths = np.array([page_size * 2 + 7, page_size, 0], np.int32)
        return {"block_table": table, "cache_seqlens": lengths}, (3, page_size * 2 + 9)
    begins = np.array([0, page_size + 9, page_size + 9, 2 * page_size + 30], np.int32)
    starts = np.array([page_size - 3, 5, 2 * page_size - 11], np.int32)
    selector = {"block_table": table, "cu_seqlens": begins, "seq_starts": starts}
    return selector, (2 * page_size + 37,)


def _merge(case: KernelCase, device: Device) -> Result:
    spec, dev = case.spec, device.torch_device
    b, s_q, heads, rows_pad = ((6, 2, 7, 16), (6, 1, 23, 32))[case.index % 2]
    counts = np.array([0, 1, 2, 5, 33, 3])
    begin = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    slots = int(begin[-1])
    bits = Bits(case.name)
    o = bell(bits, (slots, rows_pad, D_V), np.array(2))
    lse = bell(bits, (slots, rows_pad), bits.below(9, (slots, rows_pad)) - 2)
    hit = bits.below(12, lse.shape)
    lse[hit == 0] = -np.inf
    o[hit == 0] = 0
    lse[:, 1] = -np.inf
    o[:, 1] = 0
    lse[2, 3], lse[4, 4], lse[9, 5] = np.nan, np.inf, -np.inf
    o[5, 6, 7], o[6, 2, 3] = np.nan, np.inf
    lse[:, 0] = np.float32(3.25)  # equal weights
    check = digest([o, lse, begin])
    out = torch.full((b, s_q, heads, D_V), 3.0, dtype=TORCH[spec.out_dtype], device=dev)
    lse_out = torch.full((b, heads, s_q), 3.0, device=dev)
    factor, empty = ((LN2, float("-inf")), (1.0, float("inf")))[case.index % 2]
    rows = partials.encode(torch.from_numpy(o))
    o_there, lse_there, begin_there = (
        x.to(dev) for x in (rows, torch.from_numpy(lse), torch.from_numpy(begin))
    )
    call(
        device, case.variant, o_accum=o_there, lse_accum=lse_there, split_begin=begin_there,
        **_alone(dev, "units"), out=out, lse=lse_out, lse_factor=factor, empty_lse=empty,
    )  # fmt: skip
    return Result(
        check, {"out": bits_of(out).reshape(-1, D_V), "lse": bits_of(lse_out).reshape(-1, 1)}
    )


def _merge_states(case: KernelCase, device: Device) -> Result:
    """Parts of which some are empty, of either sign, over values that are NaN or infinite."""
    spec, dev = case.spec, device.torch_device
    n = {"pair": 2, "list": (3, 8)[case.index % 2], "stack": (5, 19)[case.index % 2]}[spec.mode]
    b, s_q, heads = ((3, 2, 5), (1, 7, 3))[case.index % 2]
    bits = Bits(case.name)
    o = bell(bits, (n, b, s_q, heads, D_V), np.array(2))
    lse = bell(bits, (n, b, heads, s_q), bits.below(9, (n, b, heads, s_q)) - 2)
    hit = bits.below(8, lse.shape)
    lse[hit == 0], lse[hit == 1] = -np.inf, np.inf
    lse[hit == 2] = np.float32(3.25)  # equal weights
    o.swapaxes(2, 3)[hit == 0], o.swapaxes(2, 3)[hit == 1] = np.nan, np.inf
    lse[:, 0, 0, 0], lse[0, 0, 1, 0], lse[:, 0, 2, 1] = np.inf, -np.inf, -np.inf
    lse[1, 0, 1, 1] = np.nan
    check = digest([o, lse])
    parts = as_tensor(o, TORCH[spec.in_dtype], dev), torch.from_numpy(lse).to(dev)
    out = torch.full((b, s_q, heads, D_V), 3.0, dtype=TORCH[spec.out_dtype], device=dev)
    lse_out = torch.full((b, heads, s_q), 3.0, device=dev)
    factor = (LN2, 1.0)[case.index % 2]
    results = {"out": out, "lse": lse_out, "lse_factor": factor}
    if spec.mode == "stack":
        call(device, case.variant, o=parts[0], lses=parts[1], **results)
    else:
        count = 2 if spec.mode == "pair" else 8
        given = {f"o_{i}": parts[0][min(i, n - 1)] for i in range(count)}
        given |= {f"lse_{i}": parts[1][min(i, n - 1)] for i in range(count)}
        call(device, case.variant, **given, **results, **({"parts": n} if count > 2 else {}))
    return Result(
        check, {"out": bits_of(out).reshape(-1, D_V), "lse": bits_of(lse_out).reshape(-1, 1)}
    )


def _alone(device: torch.device, *names: str) -> dict[str, torch.Tensor]:
    """Tables that are empty where every sequence is one unit of query rows."""
    return {
        name: torch.zeros((0, 2) if name == "units" else 0, dtype=torch.int32, device=device)
        for name in names
    }


def _plan(case: KernelCase, device: Device) -> Result:
    """Several problems in one case; a row is one problem."""
    dev, bits, found, seen = device.torch_device, Bits(case.name), [], []
    for i in range(12):
        b = (1, 2, 5, 33, 64, 7)[i % 6]
        parts = (1, 4, 66, 132, 3, 17)[i // 2 % 6]
        split_tiles = (0, 0, 3)[i % 3]
        lengths = bits.below((2, 200, 5000, 70000)[i % 4], (b,)).astype(np.int32)
        lengths[bits.below(7, (b,)) == 0] = 0
        lengths[0] = (-5, 2**31 - 1, lengths[0], 64)[i // 3 % 4]
        pieces = b + (b * 65536 // 64 // split_tiles if split_tiles else parts)
        planned = torch.zeros(b, dtype=torch.int32, device=dev)
        work = torch.zeros((pieces, ITEM_WORDS), dtype=torch.int32, device=dev)
        part = torch.zeros(parts + 1, dtype=torch.int32, device=dev)
        split = torch.zeros(b + 1, dtype=torch.int32, device=dev)
        call(
            device, case.variant, cache_seqlens=torch.from_numpy(lengths).to(dev),
            work_items=work, part_begin=part, split_begin=split, planned_seqlens=planned,
            max_tokens=65536, token_tile=64, fixed_overhead=(4, 0, 1)[i % 3],
            split_tiles=split_tiles, longest_item=0, max_stretches=1, tile_ns=870 * (i % 2),
            read_ns=9, num_heads=1, s_q=1, unit_rows=1, causal=0,
            **_alone(dev, "cu_seqlens_q", "row_seqlens", "units", "unit_begin", "row_limits"),
        )  # fmt: skip
        seen.append(lengths)
        tiles = work[:, :4].contiguous()  # the words that are recorded: rows follow from the first
        both = [bits_of(x).reshape(-1) for x in (tiles, part, split, planned)]
        found.append(hash_rows(np.concatenate(both)[None])[0])
    return Result(digest(seen), {"plan": np.array(found)[:, None]})


def _schedules(case: KernelCase) -> Iterator[tuple[Bits, NDArray[np.int32], int]]:
    """(stream, lengths, parts) of a case's problems."""
    for i in range(12):
        bits = Bits(f"{case.name}.{i}")
        b = (1, 2, 5, 33, 64, 700)[i % 6]
        lengths = bits.below((2, 200, 5000, 70000)[i % 4], (b,)).astype(np.int32)
        lengths[bits.below(7, (b,)) == 0] = 0
        yield bits, lengths, (1, 4, 66, 132, 3, 17)[i // 2 % 6]


def _records_to_plan(case: KernelCase, device: Device) -> Result:
    """Records that FlashMLA would make, the same of other lengths, and any words; a row is one
    problem."""
    dev, found, seen = device.torch_device, [], []
    for i, (bits, lengths, parts) in enumerate(_schedules(case)):
        b, heads, capacity = len(lengths), (1, 3)[i % 2], 65536
        records = bits.below(1 << 32, (parts, RECORD_WORDS)).astype(np.uint32).view(np.int32)
        if i % 3 == 1:
            records[:, 0] = bits.below(b + 3, (parts,)) - 1
            records[:, 1] = bits.below(1100, (parts,)) - 3
        elif i % 3 == 2:
            planned = lengths if i % 2 else lengths[::-1]
            plan = plan_reference(planned.tolist(), parts, 64, 5, capacity)
            records = np.array(records_of(plan)[0], np.int32)
        if i % 4 == 3:
            lengths[0], lengths[-1] = 2**31 - 1, -5
        shapes = {
            "work_items": ((b + parts - 1) * heads, ITEM_WORDS), "part_begin": (parts * heads + 1,),
            "split_begin": (b * heads + 1,), "planned_seqlens": (b * heads,),
        }  # fmt: skip
        made = {k: torch.full(v, -7, dtype=torch.int32, device=dev) for k, v in shapes.items()}
        call(
            device, case.variant, records=torch.from_numpy(records).to(dev),
            cache_seqlens=torch.from_numpy(lengths).to(dev), **made,
            tile_begin=torch.empty(b + 1, dtype=torch.int32, device=dev), max_tokens=capacity,
            token_tile=64, rows=(16, 77)[i % 2], num_kv_heads=heads,
        )  # fmt: skip
        seen += [records, lengths]
        found.append(np.concatenate([bits_of(x).reshape(-1) for x in made.values()])[None])
    return _of_problems(seen, found)


def _plan_to_records(case: KernelCase, device: Device) -> Result:
    """Of plans by ``plan_reference``; a row is one problem."""
    dev, found, seen = device.torch_device, [], []
    for i, (_, lengths, parts) in enumerate(_schedules(case)):
        plan = plan_reference(lengths.tolist(), parts, 64, (4, 0, 1)[i % 3], 65536)
        names = ("work_items", "part_begin", "split_begin")
        tables = {name: np.array(getattr(plan, name), np.int32) for name in names}
        shapes = {"records": (parts, RECORD_WORDS), "num_splits": (len(lengths) + 1,)}
        made = {k: torch.full(v, -7, dtype=torch.int32, device=dev) for k, v in shapes.items()}
        given = {name: torch.from_numpy(x).to(dev) for name, x in tables.items()}
        call(device, case.variant, **given, **made)
        seen += tables.values()
        found.append(np.concatenate([bits_of(x).reshape(-1) for x in made.values()])[None])
    return _of_problems(seen, found)


def _of_problems(seen: list[Array], found: list[Array]) -> Result:
    """A row of one hash for each problem."""
    hashes = np.array([hash_rows(words)[0] for words in found])
    return Result(digest(seen), {"tables": hashes[:, None]})


# ---- decode --------------------------------------------------------------------------------------
SHAPES = {  # row tile -> (heads, s_q) by index; rows below the tile leave padding
    16: ((16, 1), (6, 2)), 32: ((32, 1), (15, 2)), 64: ((64, 1), (20, 3)), 128: ((128, 1), (60, 2)),
}  # fmt: skip
LONG = 12  # from this index on: a sequence split unevenly, long enough to reuse every stage
STYLES = ("plain", "sharp", "outlier", "awkward")


@dataclass(frozen=True)
class _Problem:
    """Tensors of one decode step, on the CPU."""

    q8: NDArray[np.uint8]
    q_rope: NDArray[np.uint16]
    q_scale: NDArray[np.uint32]
    content: NDArray[np.uint8]
    rope: NDArray[np.uint16]
    scale: NDArray[np.uint32]
    table: NDArray[np.int32]
    lengths: NDArray[np.int32]

    @property
    def arrays(self) -> list[Array]:
        return [getattr(self, f.name) for f in dataclasses.fields(self)]


def _e4m3(bits: Bits, shape: tuple[int, ...], exponent: Array) -> NDArray[np.uint8]:
    """Codes of ``bell``."""
    x = bell(bits, shape, exponent)
    return np.asarray(classes.encode(FP8, x.astype(np.float64)), np.uint8)


def _bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def _block_table(bits: Bits, lengths: NDArray[np.int32], p: int) -> tuple[NDArray[np.int32], int]:
    """(shuffled pages of each sequence, absurd ids behind its end; pages of the pool)."""
    used = -(-lengths // p)
    pages = int(used.sum()) + 2
    order = np.argsort(bits.below(1 << 40, (pages,)), kind="stable").astype(np.int32)
    table = np.where(np.arange(int(used.max()) + 2) % 2, -1, 2147480000).astype(np.int32)
    table = np.repeat(table[None], len(lengths), 0)
    for i, count in enumerate(used):
        table[i, :count], order = order[:count], order[count:]
    return table, pages


def _tokens(case: KernelCase, bits: Bits, tokens: int, style: str) -> tuple[Array, Array, Array]:
    """(content codes, rope, scale) of a pool's tokens, the latter two float32."""
    content = _e4m3(bits, (tokens, D_V), bits.below(2, (tokens, 1)))
    if case.index // 4 % 2:  # latents with a mean: sums that grow
        content &= np.where(bits.below(3, content.shape) > 0, 0x7F, 0xFF).astype(np.uint8)
    rope = bell(bits, (tokens, D_ROPE), np.array(3 if style == "outlier" else 0))
    mantissa = np.float32(1) + bits.unit((tokens,)).astype(np.float32)
    scale = np.ldexp(mantissa, (bits.below(5, (tokens,)) - 4).astype(np.int32))
    return content, rope, scale.astype(np.float32)


def _lengths(case: KernelCase) -> NDArray[np.int32]:
    """Tokens of each sequence."""
    if case.index >= LONG:
        return np.array([700, 65], np.int32)
    few = [0, 1, 150, 65] if case.spec.row_tile > 32 else [0, 1, 64, 63, 197, 65]
    return np.array(few, np.int32)


def _problem(case: KernelCase) -> _Problem:
    """Content logits of deviation 1 to 3; unused bytes NaN, page ids behind the end absurd."""
    spec, bits = case.spec, Bits(case.name)
    style, p = STYLES[case.index % 4], spec.page_size
    heads, s_q = SHAPES[spec.row_tile][case.index // 2 % 2]
    lengths = _lengths(case)
    table, pages = _block_table(bits, lengths, p)
    shape = (len(lengths), s_q, heads)
    q8 = _e4m3(bits, (*shape, D_V), np.array(0))
    q_rope = bell(bits, (*shape, D_ROPE), np.array(0))
    mantissa = np.float32(1) + bits.unit(shape).astype(np.float32)
    q_scale = np.ldexp(mantissa, -1 if style == "sharp" else -3).astype(np.float32)
    content, rope, scale = _tokens(case, bits, pages * p, style)
    slot = (table[:, :, None].astype(np.int64) * p + np.arange(p)).reshape(len(lengths), -1)
    if style == "awkward":
        zero, nan, huge = slot[-2, 5], slot[-1, 2], slot[-2, 40]
        content[zero], rope[zero], scale[zero] = 0, 0, 2.0**-80
        rope[huge] *= np.float32(8)
        content[nan], scale[nan], rope[nan] = 0x7F, np.nan, np.nan
    unused = np.ones(pages * p, bool)
    for i, length in enumerate(lengths):
        unused[slot[i, :length]] = False
    content[unused], rope[unused], scale[unused] = 0xFF, np.nan, np.nan
    return _Problem(
        q8, _bf16(q_rope), q_scale.view(np.uint32), content, _bf16(rope), scale.view(np.uint32),
        table, lengths,
    )  # fmt: skip


def _work(
    lengths: NDArray[np.int32], rows: int, size: int, tile: int
) -> tuple[list[NDArray[np.int32]], int]:
    """([work items, part_begin, split_begin], slots): ``size`` tiles an item, two items a part.

    Args:
        rows: query rows of a sequence.
    """
    items: list[tuple[int, ...]] = []
    split, slots = [0], 0
    for i, tiles in enumerate(-(-lengths // tile)):
        split_up = int(tiles > size)
        for first in range(0, max(int(tiles), 1), size):
            own = (i * rows, (i + 1) * rows, NOTHING_HIDDEN, 0)
            slot = slots if split_up else -1
            items.append((i, first, min(first + size, int(tiles)), slot, *own))
            slots += split_up
        split.append(slots)
    part = [*range(0, len(items), 2), len(items)]
    return [np.array(x, np.int32) for x in (items, part, split)], slots


def _decode(case: KernelCase, device: Device) -> Result:
    """decode without its merge, whose kernel then runs by itself: both results are recorded."""
    spec, dev, problem = case.spec, device.torch_device, _problem(case)
    b, s_q, heads, _ = problem.q8.shape
    rows_pad = -(-s_q * heads // spec.row_tile) * spec.row_tile

    def there(x: Array) -> torch.Tensor:
        return torch.from_numpy(x).to(dev)

    pages = len(problem.scale) // spec.page_size
    cache = pool(pages, spec.page_size, LAYOUTS[case.index % 3], dev)
    fill(cache, problem.content, problem.rope, problem.scale)
    size = 8 if case.index >= LONG else 2
    plan, slots = _work(problem.lengths, s_q * heads, size, spec.token_tile)
    work, part, split = (there(x) for x in plan)
    o_accum = torch.full((slots, rows_pad, PARTIAL_ROW), 5.0, dtype=torch.float16, device=dev)
    lse_accum = torch.full((slots, rows_pad), 5.0, device=dev)
    out = torch.full((b, s_q, heads, D_V), 5.0, dtype=TORCH[spec.out_dtype], device=dev)
    lse = torch.full((b, heads, s_q), 5.0, device=dev)
    factor, empty = ((LN2, float("-inf")), (1.0, float("inf")))[case.index // 2 % 2]
    results = {"out": out, "lse": lse, "lse_factor": factor, "empty_lse": empty}
    partials = {
        "o_accum": o_accum, "lse_accum": lse_accum, "split_begin": split, **_alone(dev, "units")
    }  # fmt: skip
    call(
        device, case.variant, q_nope=there(problem.q8), q_rope=bf16(problem.q_rope).to(dev),
        q_scale=there(problem.q_scale.view(np.float32)), **named(cache),
        block_table=there(problem.table), cache_seqlens=there(problem.lengths), work_items=work,
        part_begin=part, **_alone(dev, "row_limits"), **results, **partials,
        softmax_scale=SOFTMAX_SCALE,
        causal=int(case.index % 3 != 2), may_split=0,
    )  # fmt: skip
    before = bits_of(out).reshape(-1, D_V)
    merge = VariantSpec(op="merge", arch=spec.arch, out_dtype=spec.out_dtype)
    call(device, merge.name, **partials, **results)
    rows = {
        "o_accum": bits_of(o_accum).reshape(-1, PARTIAL_ROW),
        "lse_accum": bits_of(lse_accum).reshape(-1, 1),
        "unmerged": before,
        "out": bits_of(out).reshape(-1, D_V),
        "lse": bits_of(lse).reshape(-1, 1),
    }
    raw = {"lse": rows["lse"][:, 0], "lse_accum": rows["lse_accum"][:, 0]}
    return Result(digest(problem.arrays), rows, raw)


def _dense_rows(case: KernelCase, bits: Bits, slot: Array, shape: tuple[int, ...]) -> Array:
    """(tokens, KV heads, 576) float32: NaN where no sequence has a token.

    Args:
        slot: (tokens of all sequences,), one behind the other.
        shape: tokens of the pool, KV heads.
    """
    style = STYLES[case.index % 4]
    rows = bell(bits, (len(slot), shape[1], D_QK), bits.below(2, (len(slot), 1, 1)) - 1)
    if case.index // 4 % 2:  # latents with a mean: sums that grow
        rows = np.where(bits.below(3, rows.shape) > 0, np.abs(rows), rows)
    if style == "outlier":  # logits far apart: frames move
        rows *= np.where(bits.below(24, (len(slot), 1, 1)) == 0, np.float32(16), np.float32(1))
    elif style == "awkward":  # of the last sequence; some query tokens do not see its last token
        rows[-9], rows[-1, :, 3] = 0, np.nan
        rows[-40, :, 9], rows[-20] = 2.0**-24, rows[-20] * np.float32(2.0**-14)
        rows[-70, :, 550] = np.inf  # of the sequence before, in RoPE alone
    out = np.full((*shape, D_QK), np.nan, np.float32)
    out[slot] = rows
    return out


def _dense(case: KernelCase, device: Device) -> Result:
    """With its merge, in one call; a short case may have two KV heads, each a sequence."""
    spec, dev, bits = case.spec, device.torch_device, Bits(case.name)
    heads, s_q = SHAPES[spec.row_tile][case.index // 2 % 2]
    p, rows_pad = spec.page_size, -(-s_q * heads // spec.row_tile) * spec.row_tile
    lengths, kv_heads = _lengths(case), 1
    if case.index < LONG and case.index % 3 == 2:
        lengths, kv_heads = lengths[-2:], 2
    table, pages = _block_table(bits, lengths, p)
    places = (table[:, :, None].astype(np.int64) * p + np.arange(p)).reshape(len(lengths), -1)
    slot = np.concatenate([places[i, :n] for i, n in enumerate(lengths)])
    rows = _dense_rows(case, bits, slot, (pages * p, kv_heads))
    own, table = np.repeat(lengths, kv_heads), np.repeat(table, kv_heads, 0)
    amplitude = np.array(1 if STYLES[case.index % 4] == "sharp" else -1)
    q = as_tensor(bell(bits, (len(own), s_q, heads, D_QK), amplitude), TORCH[spec.dtype], "cpu")
    codes = as_tensor(rows, TORCH[spec.dtype], "cpu")
    check = digest([bits_of(q), bits_of(codes), own, table])
    cache = rows_pool(pages, p, kv_heads, spec.dtype, dev, case.index % 3)
    cache.copy_(codes.view(cache.shape))
    plan, slots = _work(own, s_q * heads, 8 if case.index >= LONG else 2, spec.token_tile)
    work, part, split, seqlens, pages_of = (
        torch.from_numpy(x).to(dev) for x in (*plan, own, table)
    )
    workspace = new_workspace(work, slots, rows_pad, spec.dtype)
    partial = dict(zip(("o_accum", "lse_accum"), (x.fill_(5.0) for x in workspace), strict=True))
    out = torch.full((*q.shape[:3], D_V), 5.0, dtype=TORCH[spec.dtype], device=dev)
    lse = torch.full((len(own), heads, s_q), 5.0, device=dev)
    factor, empty = ((LN2, float("-inf")), (1.0, float("inf")))[case.index // 2 % 2]
    call(
        device, case.variant, q=q.to(dev), cache=cache, block_table=pages_of, cache_seqlens=seqlens,
        work_items=work, part_begin=part, split_begin=split, **_alone(dev, "units", "row_limits"),
        out=out, lse=lse, **partial, softmax_scale=SOFTMAX_SCALE, causal=int(case.index % 4 != 1),
        lse_factor=factor, empty_lse=empty, may_split=1,
    )  # fmt: skip
    rows_of = [bits_of(x).reshape(slots * rows_pad, -1).view(np.uint8) for x in partial.values()]
    found = {
        "partial": np.concatenate(rows_of, 1),
        "out": bits_of(out).reshape(-1, D_V),
        "lse": bits_of(lse).reshape(-1, 1),
    }
    return Result(check, found, {"lse": found["lse"][:32, 0]})


_RUNNERS: dict[str, Callable[[KernelCase, Device], Result]] = {
    "append_kv": _append,
    "quantize_q": _quantize,
    "fetch_dequant": _fetch,
    "merge": _merge,
    "merge_states": _merge_states,
    "plan_decode": _plan,
    "records_to_plan": _records_to_plan,
    "plan_to_records": _plan_to_records,
    "decode": _decode,
    "dense_decode": _dense,
}


def wgmma_cases() -> Iterator[WgmmaCase]:
    """Every form, every class."""
    for form in WGMMA_FORMS:
        for mode, acc, share in form.classes:
            yield WgmmaCase(form, mode, acc, share)


def kernel_cases(variant: str) -> list[KernelCase]:
    """Two cases of a helper kernel, one or two of a decode one; the index varies the inputs."""
    index = zlib.crc32(variant.encode()) % 12
    if not VariantSpec.from_name(variant).family.helper:
        long_too = "_p64_obf16" in variant or "_p64_d" in variant
        long = [KernelCase(variant, index + LONG)] if long_too else []
        return [KernelCase(variant, index), *long]
    return [KernelCase(variant, 2 * index), KernelCase(variant, 2 * index + 1)]
