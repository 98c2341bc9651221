"""Sums of one tcgen05.mma by MMA-Sim's model of a B200, recorded as numbers.

    python -m profiles.record_mma_sim --from DIR          # DIR: a checkout of microsoft/MMA-Sim

MMA-Sim (arXiv 2511.10909, MIT) is a reference model of matrix units in torch; its authors report
that it agrees with a B200 bit for bit for tcgen05.mma of one CTA without ``.ws``.  Only results are
stored (``tests/data/mma_sim_b200.npz``, uint32 accumulators); operands are rebuilt anywhere from
integers, and a digest checks that.  ``tests/kernels/test_mma_sim.py`` compares them with
``softgpu.tensor_core``.  Recording takes some minutes: the model adds one number at a time.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PATH = Path(__file__).resolve().parents[1] / "tests" / "data" / "mma_sim_b200.npz"
ROWS, COLUMNS, TILES = 64, 8, 8  # a record: TILES instructions of m64n8
SOURCE = "microsoft/MMA-Sim, commit c7851383 (2026-01-29), MIT"


@dataclass(frozen=True)
class Format:
    """An operand format: exponent and fraction bits, K of an instruction, as MMA-Sim calls it."""

    exponent: int
    fraction: int
    k: int
    has_infinity: bool = True

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.fraction

    @property
    def dtype(self) -> Any:
        return np.uint8 if self.bits == 8 else np.uint16


FORMATS = {
    "e4m3": Format(4, 3, 32, has_infinity=False), "e5m2": Format(5, 2, 32),
    "f16": Format(5, 10, 16), "bf16": Format(8, 7, 16),
}  # fmt: skip
PAIRS = (("e4m3", "e4m3"), ("e5m2", "e5m2"), ("e4m3", "e5m2"), ("f16", "f16"), ("bf16", "bf16"))
FAMILIES = ("random", "cancelling", "wide", "tiny", "special")


class Integers:
    """splitmix64: the same numbers everywhere."""

    def __init__(self, seed: int) -> None:
        self._state = np.uint64(seed)

    def draw(self, shape: tuple[int, ...], below: int) -> NDArray[np.int64]:
        count = int(np.prod(shape))
        with np.errstate(over="ignore"):
            z = self._state + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(
                0x9E3779B97F4A7C15
            )
            self._state = z[-1]
            z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
            z ^= z >> np.uint64(31)
        return (z >> np.uint64(11)).astype(np.int64).reshape(shape) % below


def _pattern(r: Integers, f: Format, shape: tuple[int, ...], low: int, high: int) -> Any:
    """Finite numbers with biased exponents in [low, high), any sign and fraction."""
    high = min(high, 2**f.exponent - 1)
    exponent = low + r.draw(shape, high - low)
    fraction = r.draw(shape, 2**f.fraction)
    return (r.draw(shape, 2) << f.bits - 1 | exponent << f.fraction | fraction).astype(f.dtype)


def operand(r: Integers, f: Format, rows: int, family: str) -> Any:
    """(rows, K) bit patterns of one operand."""
    shape, middle, top = (rows, f.k), 2 ** (f.exponent - 1), 2**f.exponent - 1
    spread = min(middle - 1, 6)
    if family in ("random", "cancelling"):
        out = _pattern(r, f, shape, middle - spread // 2, middle + spread // 2)
    elif family == "tiny":
        out = _pattern(r, f, shape, 0, 2)
    else:
        out = _pattern(r, f, shape, 1 if f.exponent < 8 else middle - 40, min(top, middle + 40))
        out[r.draw(shape, 4) == 0] = 0
    if family == "special":
        infinity = (2**f.exponent - 1) << f.fraction
        nan = (1 << f.bits - 1) - 1
        specials = [nan, 0, 1 << f.bits - 1, *([infinity, infinity | 1 << f.bits - 1] * 2)]
        chosen = np.array(specials if f.has_infinity else specials[:3], f.dtype)
        where = r.draw(shape, 80) == 0
        out[where] = chosen[r.draw(shape, len(chosen))][where]
    return out


def accumulator(r: Integers, family: str, scale: int) -> NDArray[np.uint32]:
    """(64, 8) bit patterns; ``scale``: biased exponent of a typical product."""
    shape = (ROWS, COLUMNS)
    around = {"random": 6, "cancelling": 12, "wide": 40, "tiny": 20, "special": 12}[family]
    exponent = np.clip(scale - around + r.draw(shape, 2 * around), 0, 254)
    out = r.draw(shape, 2) << 31 | exponent << 23 | r.draw(shape, 2**23)
    out[r.draw(shape, 5) == 0] = 0
    if family == "special":
        chosen = np.array([0x7F800000, 0xFF800000, 0x7FC00001, 0x80000000, 1, 0x007FFFFF])
        where = r.draw(shape, 12) == 0
        out[where] = chosen[r.draw(shape, len(chosen))][where]
    return out.astype(np.uint32)


def inputs(pair: tuple[str, str], family: str) -> list[tuple[Any, Any, NDArray[np.uint32]]]:
    """The operands (64, K), (8, K) and the accumulator (64, 8) of each instruction of a record."""
    fa, fb = (FORMATS[name] for name in pair)
    r = Integers(1 + 1000 * PAIRS.index(pair) + FAMILIES.index(family) * 50)
    out = []
    for _ in range(TILES):
        a, b = operand(r, fa, ROWS, family), operand(r, fb, COLUMNS, family)
        if family == "cancelling":  # the second half takes back all but a little of the first
            half = fa.k // 2
            a[:, half:], b[:, half:] = a[:, :half] ^ (1 << fa.bits - 1), b[:, :half]
            keep = r.draw((ROWS, half), 8) == 0
            a[:, half:][keep] ^= 1
        least = [2 - 2 ** (f.exponent - 1) for f in (fa, fb)]
        scale = 127 + (sum(least) if family == "tiny" else 0)
        out.append((a, b, accumulator(r, family, scale)))
    return out


def digest() -> str:
    """Of all inputs."""
    h = hashlib.sha256()
    for pair in PAIRS:
        for family in FAMILIES:
            for arrays in inputs(pair, family):
                for array in arrays:
                    h.update(np.ascontiguousarray(array).tobytes())
    return h.hexdigest()


def _torch(array: Any, kind: str) -> Any:
    import torch

    types = {
        "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "f16": torch.float16,
        "bf16": torch.bfloat16,
    }  # fmt: skip
    signed = array.view(np.int8 if array.dtype == np.uint8 else np.int16)
    return torch.from_numpy(signed.copy()).view(types[kind])


def record(folder: Path) -> None:
    """Runs the model over all inputs and writes ``PATH``."""
    import torch

    sys.path.insert(0, str(folder))
    from mmasim.simulator.nv_ptx import tcgen05mma  # type: ignore[import-not-found]

    found: dict[str, Any] = {"source": np.array(SOURCE), "digest": np.array(digest())}
    for pair in PAIRS:
        k = FORMATS[pair[0]].k
        model = tcgen05mma("Blackwell", f"m{ROWS}n{COLUMNS}k{k}.f32.{pair[0]}.{pair[1]}")
        for family in FAMILIES:
            results = []
            for a, b, c in inputs(pair, family):
                acc = torch.from_numpy(c.view(np.float32).copy())
                d = model(_torch(a, pair[0]), _torch(b, pair[1]).T, acc)
                results.append(d.numpy().view(np.uint32))
            found[f"{pair[0]} {pair[1]} {family}"] = np.stack(results)
            print(pair, family, flush=True)
    np.savez_compressed(PATH, **found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m profiles.record_mma_sim")
    parser.add_argument("--from", dest="folder", type=Path, required=True)
    record(parser.parse_args().folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
