"""One digest of all that the software GPU receives when a variant's workload runs.

A launch adds the kernel's number in the order of first launches, grid, block, cluster, attributes,
shared memory and parameters; an address counts as a buffer and an offset.  A call adds the bytes of
every buffer at its start.  The variant's own kernels return at once, so that a digest takes a
second; the planning kernel in front of them runs.  Memory that is not written has fixed bytes.

Workloads with equal digests do the same if instructions and software GPU are equal.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from codegen import abi
from dsl_kernels.spec import VariantSpec
from snapmla.testing import selfcheck, workloads
from snapmla.testing.workloads.call import run_all
from softgpu import LoadedKernel, Options, using
from softgpu.decode import EXIT, register_names
from softgpu.memory import GlobalMemory
from softgpu.ptx import Kernel, Mem, type_bytes

LENGTH = 24
WORD = 8  # bytes of an address
TENSOR_MAP = 128  # bytes


class Recorder:
    """An observer (``softgpu.options.Observer``) that adds every launch to a digest."""

    def __init__(self) -> None:
        self.found = hashlib.sha256()
        self.launches = 0
        self._memory: GlobalMemory | None = None
        self._buffers: list[tuple[int, int, int]] = []  # by address: begin, end, which argument
        self._names: dict[str, int] = {}
        self._reads: dict[tuple[str, int], bytes] = {}

    def launched(self, machine: Any) -> None:
        self.launches += 1
        if machine.memory is not self._memory:  # the first of a call
            self._memory = machine.memory
            self._call([(start, end) for start, end, _ in machine.memory.buffers])
        launch = machine.launch
        name = self._names.setdefault(launch.kernel, len(self._names))
        self._add(
            name, launch.grid, launch.block, launch.cluster, launch.pdl, launch.cooperative,
            launch.dynamic_smem, launch.max_dynamic_smem,
        )  # fmt: skip
        kernel = machine.program.kernel
        for i, parameter in enumerate(kernel.params):
            data = ctypes.string_at(launch.params[i], parameter.size)
            if (kernel.name, i) not in self._reads:
                self._reads[kernel.name, i] = _read(kernel, parameter.name, parameter.size)
            pairs = zip(data, self._reads[kernel.name, i], strict=True)
            self._add(self._told(bytes(byte * read for byte, read in pairs)))

    def started(self, warp: Any) -> None:
        """Nothing: warps run as they are."""

    def _add(self, *values: Any) -> None:
        self.found.update(repr(values).encode())

    def _call(self, buffers: list[tuple[int, int]]) -> None:
        self._buffers = sorted((start, end, i) for i, (start, end) in enumerate(buffers))
        for i, (start, end) in enumerate(buffers):
            before = [k for k, (s, e) in enumerate(buffers[:i]) if s <= start < e]
            inside = (before[0], start - buffers[before[0]][0]) if before else None
            contents = hashlib.sha256(ctypes.string_at(start, end - start)).hexdigest()
            self._add(i, inside, end - start, contents)

    def _told(self, data: bytes) -> list[Any]:
        """A parameter's words, addresses of buffers as their place among them."""
        told: list[Any] = []
        for at in range(0, len(data), WORD):
            word = data[at : at + WORD]
            value = int.from_bytes(word, "little") if len(word) == WORD else 0
            k = bisect.bisect_right(self._buffers, (value, 1 << 64, 0)) - 1
            start, end, which = self._buffers[k] if k >= 0 else (0, -1, 0)
            told.append((which, value - start) if start <= value <= end else word)
        return told

    def digest(self) -> str:
        return self.found.hexdigest()[:LENGTH]


def _read(kernel: Kernel, name: str, size: int) -> bytes:
    """1 for each byte of a parameter that an instruction reads; nobody writes what is padding."""
    seen = bytearray(size)
    for ins in kernel.code:
        if name not in (n for arg in ins.args for n in register_names(arg)):
            continue
        source = ins.args[-1]
        if ins.parts[:2] != ["ld", "param"] or not isinstance(source, Mem):
            # its address goes on, as that of a tensor map does, whose second half is not used
            used = size // 2 if size == TENSOR_MAP else size
            return (b"\1" * used).ljust(size, b"\0")
        vector = next((int(part[1]) for part in ins.parts if part in ("v2", "v4", "v8")), 1)
        at, count = source.offset, vector * type_bytes(ins.parts[-1])
        seen[at : at + count] = b"\1" * count
    return bytes(seen)


@contextlib.contextmanager
def _filled() -> Iterator[None]:
    """Memory that torch hands out is filled, so that bytes which nobody wrote are the same."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


@contextlib.contextmanager
def _returning(kernel: LoadedKernel) -> Iterator[None]:
    """Every kernel of the object returns at once."""
    programs = {name: kernel.program(name) for name in kernel.module.kernels}
    for name, program in programs.items():
        code = [(EXIT, None, -1, False), *program.code[1:]]
        kernel.replace_program(name, dataclasses.replace(program, code=code))
    try:
        yield
    finally:
        for name, program in programs.items():
            kernel.replace_program(name, program)


def digest(spec: VariantSpec, directory: Path) -> str:
    """The digest of a variant's workload, of the calls that the hazard check makes.

    Raises:
        VariantError: the variant, or what plans for it, is not there.
        ValueError: nothing was launched.
    """
    recorder = Recorder()
    with _filled():
        workload = selfcheck.Workload(spec, directory)
        kernel = workload.kernel
        assert isinstance(kernel, LoadedKernel)
        quiet = Options(asynchronous="early", seed=-1, hazards="off", observer=recorder)
        with _returning(kernel), using(quiet):
            if workload.job is not None:
                workload.job.run(kernel)
            else:
                torch.manual_seed(0)
                calls = workloads.of(spec.op).small(spec)
                names = kernel.names.arguments
                for _ in run_all(calls, lambda given: kernel(*abi.ordered(names, given))):
                    pass
    if not recorder.launches:
        raise ValueError(f"{spec.name}: its workload launches nothing")
    return recorder.digest()
