"""Records how Hopper's tensor core accumulates, and compares the model with the record.

``record`` needs an sm_90 GPU and nvcc: it builds ``wgmma_probe.cu``, runs it over the operand
classes below and writes the fp32 results as ``wgmma_<group>.npz`` (uint32 bit patterns).  Operands
are not stored: they are integer functions of the class name, so ``compare`` rebuilds them anywhere
(a digest in the file catches a generator that changed) and prints the share of bit-equal results of
the model in ``softgpu.tensor_core`` for each class.  ``sample`` keeps eight rows of each class's
first tile for the tests (``tests/data/wgmma_h200.npz``).

    python profiles/record_wgmma.py record --out DIR
    python profiles/record_wgmma.py compare --out DIR
    python profiles/record_wgmma.py sample --out DIR
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiles.device import require_cuda
from snapmla.testing.workloads.exact import Bits

ROWS = 64
HERE = pathlib.Path(__file__).resolve().parent
SAMPLE = HERE.parent / "tests" / "data" / "wgmma_h200.npz"
SAMPLE_ROWS = 8


@dataclass(frozen=True)
class Format:
    """A binary floating-point operand format."""

    name: str
    exponent_bits: int
    fraction_bits: int
    dtype: type

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def k(self) -> int:
        """Numbers of one 32-byte step."""
        return 32 // np.dtype(self.dtype).itemsize


FP8 = Format("fp8", 4, 3, np.uint8)
BF16 = Format("bf16", 8, 7, np.uint16)
F16 = Format("f16", 5, 10, np.uint16)


def decode(fmt: Format, codes: np.ndarray) -> np.ndarray:
    """Codes to float64.  e4m3 has no infinity; its only NaN is S.1111.111."""
    codes = codes.astype(np.int64)
    fraction = codes & ((1 << fmt.fraction_bits) - 1)
    exponent = (codes >> fmt.fraction_bits) & ((1 << fmt.exponent_bits) - 1)
    sign = np.where(codes >> (fmt.fraction_bits + fmt.exponent_bits), -1.0, 1.0)
    normal = exponent > 0
    significand = fraction + np.where(normal, 1 << fmt.fraction_bits, 0)
    value = np.ldexp(
        significand.astype(np.float64), np.maximum(exponent, 1) - fmt.bias - fmt.fraction_bits
    )
    top = exponent == (1 << fmt.exponent_bits) - 1
    if fmt is FP8:
        value = np.where(top & (fraction == 7), np.nan, value)
    else:
        value = np.where(top, np.where(fraction > 0, np.nan, np.inf), value)
    return sign * value


def encode(fmt: Format, values: np.ndarray) -> np.ndarray:
    """Nearest code (ties to the lower magnitude) of finite values, saturating."""
    count = (1 << (fmt.exponent_bits + fmt.fraction_bits)) - (
        1 if fmt is FP8 else 1 << fmt.fraction_bits
    )
    table = decode(fmt, np.arange(count))
    codes = np.searchsorted((table[1:] + table[:-1]) / 2, np.abs(values))
    sign = np.signbit(values).astype(np.int64) << (fmt.exponent_bits + fmt.fraction_bits)
    return (codes | sign).astype(fmt.dtype)


def _fields(fmt: Format, bits: Bits, shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    """Random sign and fraction, biased exponent field in [low, high]."""
    exponent = low + bits.below(high - low + 1, shape)
    fraction = bits.below(1 << fmt.fraction_bits, shape)
    if fmt is FP8:
        fraction = np.where((exponent == 15) & (fraction == 7), 6, fraction)
    sign = bits.below(2, shape)
    width = fmt.exponent_bits + fmt.fraction_bits
    return ((sign << width) | (exponent << fmt.fraction_bits) | fraction).astype(fmt.dtype)


MODES = (
    "any",
    "gauss",
    "positive",
    "narrow",
    "cancel",
    "outlier",
    "tiny",
    "sparse1",
    "sparse2",
    "sparse4",
    "special",
)


def operands(
    fmt: Format, mode: str, bits: Bits, tiles: int, n: int, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Codes of A (tiles, 64, k) and B (tiles, n, k) of one class."""
    sa, sb = (tiles, ROWS, k), (tiles, n, k)
    middle = fmt.bias
    span = 7 if fmt is FP8 else 10
    low, high = max(middle - span, 0), middle + (8 if fmt is FP8 else span)
    if mode == "any":
        return _fields(fmt, bits, sa, low, high), _fields(fmt, bits, sb, low, high)
    if mode == "gauss":
        return encode(fmt, 120 * bits.normal(sa)), encode(fmt, 120 * bits.normal(sb))
    if mode == "positive":
        return encode(fmt, 448 * bits.unit(sa)), encode(fmt, 64 * (bits.normal(sb) + 0.5))
    if mode == "narrow":
        return _fields(fmt, bits, sa, middle, middle + 1), _fields(
            fmt, bits, sb, middle, middle + 1
        )
    if mode == "cancel":
        a, b = (
            _fields(fmt, bits, sa, middle, middle + 3),
            _fields(fmt, bits, sb, middle, middle + 3),
        )
        half = k // 2
        sign: Any = np.array(1 << (fmt.exponent_bits + fmt.fraction_bits), fmt.dtype)
        a[..., half:] = a[..., :half]
        b[..., half:] = b[..., :half] ^ sign
        flip = bits.below(8, b[..., half:].shape) == 0
        b[..., half:] ^= flip.astype(fmt.dtype)
        order = np.argsort(bits.below(1 << 30, (k,)), kind="stable")
        return a[..., order].copy(), b[..., order].copy()
    if mode == "outlier":
        a, b = _fields(fmt, bits, sa, low, low + 6), _fields(fmt, bits, sb, low, low + 6)
        spot = bits.below(k, sa[:-1])[..., None] == np.arange(k)
        return np.where(spot, _fields(fmt, bits, sa, high - 1, high), a), b
    if mode == "tiny":
        return _fields(fmt, bits, sa, 0, 2), _fields(fmt, bits, sb, 0, 2 if fmt is FP8 else high)
    if mode.startswith("sparse"):
        rank = np.argsort(bits.below(1 << 30, sa), axis=-1, kind="stable")
        a = _fields(fmt, bits, sa, low, high)
        return np.where(rank < int(mode[6:]), a, 0).astype(fmt.dtype), _fields(
            fmt, bits, sb, low, high
        )
    if mode == "special":
        a, b = _fields(fmt, bits, sa, low, high), _fields(fmt, bits, sb, low, high)
        top = ((1 << fmt.exponent_bits) - 1) << fmt.fraction_bits
        hit = bits.below(k * 8, sa)
        a = np.where(hit == 0, top | ((1 << fmt.fraction_bits) - 1), a)  # NaN
        a = np.where(hit == 1, 0, np.where((hit == 2) & (fmt is not FP8), top, a))  # zero, infinity
        return a.astype(fmt.dtype), b
    raise ValueError(f"mode: expected one of {MODES}, got {mode!r}")


def accumulators(acc: str, bits: Bits, exact: np.ndarray) -> np.ndarray:
    """Initial accumulators (float32) for a class: zero, wide, near, special."""
    shape = exact.shape
    if acc == "zero":
        return np.zeros(shape, np.float32)
    if acc == "wide":
        field = (bits.below(2, shape) << 31) | ((127 - 26 + bits.below(53, shape)) << 23)
        return (field | bits.below(1 << 23, shape)).astype(np.uint32).view(np.float32)
    if acc == "near":
        factor = np.where(bits.below(2, shape), 1.0, -1.0) * np.ldexp(
            1.0 + bits.unit(shape), bits.below(9, shape) - 5
        )
        nearly = -(1 + np.ldexp(bits.unit(shape) - 0.5, -bits.below(20, shape)))
        with np.errstate(invalid="ignore", over="ignore"):
            value = np.where(bits.below(3, shape) == 0, nearly, factor) * exact
            return np.nan_to_num(value, nan=1.0, posinf=1.0, neginf=-1.0).astype(np.float32)
    if acc == "special":
        word = np.array(
            [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x00000001, 0x007FFFFF, 0x80400000,
             0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F000000, 0x80000000, 0x0C000000, 0x33800000,
             0x5F000000, 0x71000000]
        )  # fmt: skip
        return word[bits.below(len(word), shape)].astype(np.uint32).view(np.float32)
    raise ValueError(f"acc: unknown {acc!r}")


@dataclass(frozen=True)
class Case:
    """One run of the probe: ``tiles`` tiles of one operand class and one accumulator class."""

    group: str  # output file
    kind: str  # argument of wgmma_probe
    mode: str
    acc: str
    tiles: int

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.mode}.{self.acc}"

    @property
    def n(self) -> int:
        return 8 if self.kind.endswith("n8") else 64

    @property
    def segments(self) -> tuple[tuple[Format, int], ...]:
        """(format, steps) in the order they are issued."""
        table: dict[str, tuple[tuple[Format, int], ...]] = {
            "fp8x1": ((FP8, 1),), "fp8x1rs": ((FP8, 1),), "fp8x1n8": ((FP8, 1),),
            "fp8x16": ((FP8, 16),), "bf16x1": ((BF16, 1),), "bf16x4": ((BF16, 4),),
            "f16x1": ((F16, 1),), "qk": ((FP8, 16), (BF16, 4)),
        }  # fmt: skip
        return table[self.kind]

    def build(self) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
        """One (A codes, B codes) pair for each segment, and the initial accumulators."""
        bits = Bits(self.name)
        pairs = [
            operands(fmt, self.mode, bits, self.tiles, self.n, fmt.k * steps)
            for fmt, steps in self.segments
        ]
        exact = np.zeros((self.tiles, ROWS, self.n))
        with np.errstate(invalid="ignore"):
            for (fmt, _), (a, b) in zip(self.segments, pairs, strict=True):
                x, y = decode(fmt, a), decode(fmt, b)
                for i in range(x.shape[-1]):  # not a matmul: the operands must not depend on a BLAS
                    exact += x[:, :, None, i] * y[:, None, :, i]
        return pairs, accumulators(self.acc, bits, exact)


def cases() -> Iterator[Case]:
    for acc in ("zero", "wide", "near"):
        for mode in MODES[:-1]:
            yield Case(f"fp8_{acc}", "fp8x1", mode, acc, 28)
    yield Case("fp8_zero", "fp8x1", "special", "zero", 8)
    yield Case("fp8_wide", "fp8x1", "any", "special", 28)
    for acc in ("zero", "wide", "near"):
        for mode in MODES[:-1]:
            yield Case("bf16", "bf16x1", mode, acc, 25)
        for mode in ("any", "narrow", "cancel", "sparse2", "tiny"):
            yield Case("f16", "f16x1", mode, acc, 14)
    yield Case("f16", "bf16x1", "special", "zero", 8)
    yield Case("f16", "bf16x1", "any", "special", 28)
    for mode in ("gauss", "positive", "any"):
        for acc in ("zero", "near"):
            yield Case("chain", "fp8x16", mode, acc, 25)
            yield Case("chain", "qk", mode, acc, 25)
            yield Case("chain", "bf16x4", mode, acc, 25)
        yield Case("chain", "fp8x1rs", mode, "near", 14)
        yield Case("chain", "fp8x1n8", mode, "near", 112)


def _bytes(arrays: list[np.ndarray]) -> bytes:
    flat = [np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape[:2], -1) for x in arrays]
    return np.ascontiguousarray(np.concatenate(flat, axis=-1)).tobytes()


def _probe(case: Case, probe: pathlib.Path, work: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Runs one case; returns (results as uint32, digest of the operands)."""
    pairs, acc = case.build()
    blobs = [_bytes([a for a, _ in pairs]), _bytes([b for _, b in pairs]), acc.tobytes()]
    paths = [work / f"{case.name}.{end}" for end in ("a", "b", "acc", "out")]
    for path, blob in zip(paths, blobs, strict=False):
        path.write_bytes(blob)
    subprocess.run([str(probe), case.kind, str(case.tiles), *map(str, paths)], check=True)
    out = np.frombuffer(paths[3].read_bytes(), np.uint32).reshape(acc.shape)
    return out, digest(blobs)


def digest(blobs: list[bytes]) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(b"".join(blobs)).digest(), np.uint8)


def record(out: pathlib.Path) -> int:
    """Builds and runs the probe over every case; writes one .npz for each group."""
    groups: dict[str, dict[str, np.ndarray]] = {}
    todo = list(cases())
    with tempfile.TemporaryDirectory() as tmp, ThreadPoolExecutor(8) as pool:
        probe = pathlib.Path(tmp) / "wgmma_probe"
        arch = "-gencode=arch=compute_90a,code=sm_90a"
        subprocess.run(
            ["nvcc", "-O2", arch, "-o", str(probe), str(HERE / "wgmma_probe.cu")], check=True
        )
        results = pool.map(lambda case: _probe(case, probe, pathlib.Path(tmp)), todo)
        for case, (bits, check) in zip(todo, results, strict=True):
            group = groups.setdefault(case.group, {})
            group[case.name], group[case.name + ".digest"] = bits, check
    for name, arrays in groups.items():
        path = out / f"wgmma_{name}.npz"
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
        print(f"{path.name}: {len(arrays) // 2} classes, {path.stat().st_size / 1e6:.1f} MB")
    return 0


def model(case: Case, tiles: int | None = None, rows: int = ROWS) -> np.ndarray:
    """The model's (tiles, rows, n) uint32 for the first ``tiles`` tiles' first ``rows`` rows."""
    sys.path.insert(0, str(HERE.parent))
    from softgpu.tensor_core import chain_numpy

    pairs, acc = case.build()
    out = np.empty_like(acc[:tiles, :rows])
    for tile in range(len(out)):
        cur = acc[tile, :rows]
        for (fmt, _), (a, b) in zip(case.segments, pairs, strict=True):
            values = [decode(fmt, x).astype(np.float32) for x in (a[tile, :rows], b[tile])]
            cur = chain_numpy(cur, *values, fp8=fmt is FP8, smallest=2.0 ** (1 - fmt.bias))
        out[tile] = cur
    return out.view(np.uint32)


def compare(out: pathlib.Path) -> int:
    """Prints the share of bit-equal accumulators for each class; returns 1 if any differs."""
    total = equal = 0
    for case in cases():
        with np.load(out / f"wgmma_{case.group}.npz") as data:
            want, check = data[case.name], data[case.name + ".digest"]
        pairs, acc = case.build()
        if not (
            digest([_bytes([a for a, _ in pairs]), _bytes([b for _, b in pairs]), acc.tobytes()])
            == check
        ).all():
            raise SystemExit(f"{case.name}: the operands are not those of the record")
        same = int((model(case) == want).sum())
        total, equal = total + want.size, equal + same
        print(
            f"{case.name:28} {same:8} of {want.size:8} bit-equal ({100 * same / want.size:.4f} %)"
        )
    print(f"{'all':28} {equal:8} of {total:8} bit-equal ({100 * equal / total:.4f} %)")
    return int(equal != total)


def sample(out: pathlib.Path) -> int:
    """Writes the tests' share of the record."""
    kept = {}
    for case in cases():
        with np.load(out / f"wgmma_{case.group}.npz") as data:
            kept[case.name] = data[case.name][0, :SAMPLE_ROWS]
    np.savez_compressed(SAMPLE, **kept)  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=("record", "compare", "sample"))
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the .npz files")
    args = parser.parse_args()
    if args.verb == "record":
        require_cuda()
    sys.exit({"record": record, "compare": compare, "sample": sample}[args.verb](args.out))
