"""The unit that the cost of ``make test`` is told in.

CPU seconds of the same tests differ by 1.4 between machines alike by name, and by as much on one
machine: two hyperthreads of a core take nearly twice the seconds of one.  So a run measures two
fixed jobs beside its own: a compile (``tests.support.calibration_kernel``) while it compiles, and
``work`` again and again while it tests.  A unit is a CPU second of a machine on which these two
take ``COMPILE`` and ``WORK`` seconds; the suite of commit 5b6b44b4 is 1800 of them.

``work`` does what the software GPU does (calls of closures over views of 32 lanes, gathers, cut
products of tiles) and uses nothing of it: a faster software GPU costs fewer units, and so do fewer
compiles.  It must never change, nor may the kernel; where the compiler or numpy does, the suite is
measured with the old and the new one on one machine and the constants are set so that both agree.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

COMPILE, WORK = 0.150, 0.0228  # CPU seconds of the two jobs where a unit is one
CEILING = 1900  # units of `make test`
EVERY = 60.0  # CPU seconds of a process between two measurements of ``work``
COMPILES = 3  # measurements of a compile, behind one that imports the compiler

Instruction = Callable[[list[Any], Any], None]


@dataclass
class Cost:
    """CPU seconds of a run and what its calibration took.

    Attributes:
        compiling: seconds of compiling before the first test.
        testing: all others.
        compiles, works: measurements of the two jobs, each while the run did the like.
    """

    compiling: float
    testing: float
    compiles: Sequence[float] = field(default=())
    works: Sequence[float] = field(default=())

    @property
    def units(self) -> float | None:
        """The seconds on the reference machine; None where a run was too short to measure.

        A run whose variants are up to date measures no compile: then ``works`` scales all.
        """
        if not self.works:
            return None
        slow = statistics.median(self.works) / WORK
        compiler = statistics.median(self.compiles) / COMPILE if self.compiles else slow
        return self.compiling / compiler + self.testing / slow


def work() -> float:
    """CPU seconds of the fixed job."""
    started = time.process_time()
    _interpret(600)
    _multiply_tiles(40)
    return time.process_time() - started


class Compiles:
    """``COMPILES`` measurements of the fixed compile, one at every ``step``-th call."""

    def __init__(self, step: int, compile_once: Callable[[], float] | None = None) -> None:
        self.step, self.calls = max(step, 1), 0
        self.seconds: list[float] = []
        self._compile_once = compile_once or _compile_once
        self._warm = False

    def __call__(self, *ignored: Any) -> None:
        """A variant has been built."""
        self.calls += 1
        if self.calls % self.step or len(self.seconds) == COMPILES:
            return
        if not self._warm:
            self._warm = True
            self._compile_once()  # imports the compiler
        self.seconds.append(self._compile_once())


def _compile_once() -> float:
    with _target("sm_90a"):
        from tests.support import calibration_kernel

        return calibration_kernel.compile_once()


@contextlib.contextmanager
def _target(arch: str) -> Iterator[None]:
    """The compiler's target, and what it was afterwards: workers start with the environment."""
    kept = os.environ.get("CUTE_DSL_ARCH")
    os.environ["CUTE_DSL_ARCH"] = arch
    try:
        yield
    finally:
        if kept is None:
            del os.environ["CUTE_DSL_ARCH"]
        else:
            os.environ["CUTE_DSL_ARCH"] = kept


# ------------------------------------------------------------------------------ the fixed job


def _interpret(rounds: int) -> None:
    """Runs a program of eight instructions as ``softgpu.warp`` runs a kernel."""
    v: list[Any] = [
        np.arange(32, dtype=np.uint32), np.full(32, 7919, np.uint32), np.zeros(32, np.uint32),
        np.ones(32, np.float32), np.full(32, 0.5, np.float32), np.full(32, 0.25, np.float32),
        np.zeros(32, bool), np.zeros(32, np.uint32), np.zeros(32, np.uint32),
    ]  # fmt: skip
    every = np.ones(32, bool).tobytes()
    code = [(0, fn, 6 if i in (0, 5) else -1) for i, fn in enumerate(_program())]
    for _ in range(rounds):
        for kind, fn, guard in code:
            m: Any = True
            if guard >= 0:
                m = v[guard].copy()
                if m.tobytes() == every:
                    m = True
            if kind == 0:
                fn(v, m)


def _program() -> list[Instruction]:
    words = np.arange(1 << 16, dtype=np.uint8).view(np.uint32)
    seen: dict[int, tuple[int, int]] = {}

    def add(v: list[Any], m: Any) -> None:
        if m is True:
            np.add(v[0], v[1], out=v[0])
        else:
            v[0][m] = (v[0] + v[1])[m]

    def multiply(v: list[Any], m: Any) -> None:
        v[2][:] = (v[0].astype(np.uint64) * v[1]).astype(np.uint32) >> np.uint32(3)

    def fused(v: list[Any], m: Any) -> None:
        v[3][:] = (v[3].astype(np.float64) * v[4] + v[5]).astype(np.float32)

    def compare(v: list[Any], m: Any) -> None:
        np.less(v[2], v[0], out=v[6])

    def select(v: list[Any], m: Any) -> None:
        v[7][:] = np.where(v[6], v[0], v[2])

    def load(v: list[Any], m: Any) -> None:
        at = _addresses(v[7])
        if int(at.max()) >= len(words) or int(at.min()) < 0:
            raise IndexError
        v[8][:] = words[at]

    def store(v: list[Any], m: Any) -> None:
        words[_addresses(v[2])] = v[8]

    def remember(v: list[Any], m: Any) -> None:
        for lane in v[8][:8].tolist():
            seen[lane & 1023] = (lane, len(seen))

    return [add, multiply, fused, compare, select, load, store, remember]


def _addresses(x: NDArray[np.uint32]) -> NDArray[np.int64]:
    return (x & np.uint32(0x3FFF)).astype(np.int64)


def _multiply_tiles(steps: int) -> None:
    """Products that are cut and added, as a step of ``softgpu.tensor_core``."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 8, (64, 32)).astype(np.float32) for _ in range(2))
    acc = np.zeros((64, 64), np.float32)
    for _ in range(steps):
        products = a[:, None, :] * b[None, :, :]
        top = np.maximum(np.abs(products).max(-1), np.float32(1))
        products *= (np.float32(8192) / top)[:, :, None]
        acc += np.trunc(products, out=products).sum(-1, dtype=np.float32)


def shares(by_file: Mapping[str, float], compiling: float) -> str:
    """One line: compiling and each package's tests in CPU seconds, and what part of all they are.

    Args:
        by_file: CPU seconds by test file, such as ``tests/host/test_cache.py``.
    """
    found = Counter[str](compiling=compiling)  # type: ignore[arg-type]
    for file, seconds in by_file.items():
        folders = file.split("/")[1:-1]
        found[folders[0] if folders else "tests"] += seconds
    total = sum(found.values()) or 1.0
    told = (f"{name} {n:.0f} ({n / total:.0%})" for name, n in found.most_common() if n)
    return f"CPU seconds by package: {', '.join(told)}"
