"""What ``cute.compile`` makes under ``blackwell.pretend``: kernels for the software GPU."""

from __future__ import annotations

import inspect
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import softgpu

from .blackwell import TORCH_FP8, typed

OPTIONS = "--enable-tvm-ffi --generate-line-info --keep-ptx"
SYMBOL = "published"


@dataclass
class Record:
    """What happened to a program's launches.

    Attributes:
        compile_seconds, run_seconds: CPU seconds.
        instructions: warp instructions of the first schedule.
        differing: schedules whose results were not the first's, bit for bit.
        hazards: texts of the hazard check's reports, each once.
        opcodes: tcgen05 opcodes of the PTX.
    """

    compile_seconds: float = 0.0
    run_seconds: float = 0.0
    instructions: int = 0
    launches: int = 0
    differing: list[str] = field(default_factory=list)
    hazards: list[str] = field(default_factory=list)
    opcodes: set[str] = field(default_factory=set)


class Compiler:
    """Stands for ``cute.compile``; every kernel it makes adds to ``record``."""

    def __init__(self, schedules: dict[str, softgpu.Options]) -> None:
        import cutlass.cute as cute

        self.record = Record()
        self._schedules = schedules
        self._real = cute.compile
        self._folder = tempfile.TemporaryDirectory(prefix="published-")
        self.kernels: list[Kernel] = []

    def __getitem__(self, options: Any) -> Compiler:
        return self

    def __call__(self, function: Any, *args: Any, options: str = "", **named: Any) -> Kernel:
        started = time.process_time()
        arguments = [_stream_of_the_caller(a) for a in args]
        compiled = self._real(
            function, *arguments, options=f"{options} {OPTIONS} --dump-dir={self._folder.name}",
            **named,
        )  # fmt: skip
        path = Path(self._folder.name, f"kernel{len(self.kernels)}.o")
        compiled.export_to_c(str(path), function_name=SYMBOL)
        ptx = path.with_suffix(".ptx")
        ptx.write_text(compiled.__ptx__)
        self.record.opcodes |= {
            word for line in compiled.__ptx__.splitlines()
            for word in line.split()[:2] if word.startswith("tcgen05.")
        }  # fmt: skip
        kernel = Kernel(
            softgpu.load(path, ptx, SYMBOL), _at_run_time(function, args), self._schedules,
            self.record,
        )  # fmt: skip
        self.kernels.append(kernel)
        self.record.compile_seconds += time.process_time() - started
        return kernel


def _at_run_time(function: Any, args: tuple[Any, ...]) -> list[Any]:
    """The arguments that a call passes: no compile-time constants, no streams."""
    annotations = [p.annotation for p in inspect.signature(function).parameters.values()]
    return [
        a for a, annotation in zip(args, annotations, strict=False)
        if not _is_stream(a) and "Constexpr" not in str(annotation)
    ]  # fmt: skip


def _is_stream(value: Any) -> bool:
    return type(value).__name__ in ("CUstream", "_FakeStream")


def _stream_of_the_caller(value: Any) -> Any:
    """A CUstream argument becomes the stream that TVM-FFI takes from its environment."""
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True) if _is_stream(value) else value


class Kernel:
    """A compiled kernel; a call runs it under every schedule and leaves the first one's results.

    Attributes:
        tensors: the tensors of the last call.
    """

    def __init__(
        self, loaded: Any, compiled_for: list[Any], schedules: dict[str, softgpu.Options],
        record: Record,
    ) -> None:  # fmt: skip
        self._loaded, self._compiled_for = loaded, compiled_for
        self._schedules, self._record = schedules, record
        self.tensors: list[torch.Tensor] = []
        loaded.fp8_as_bytes = False

    def __call__(self, *args: Any, **named: Any) -> None:
        with torch._C.DisableTorchFunction():  # the CPU tensors as what they are
            self._run(*args, **named)

    def _run(self, *args: Any, **named: Any) -> None:
        if named:
            raise TypeError(f"a kernel was called with {sorted(named)}: not expected")
        values = [_plain(a) for a in args if not _is_stream(a)]
        left_out = self._compiled_for[len(values) :]
        if all(a is None for a in left_out):  # optional arguments that the call leaves out
            values += left_out
        declared = zip(values, self._compiled_for, strict=False)
        values = [_as_declared(v, c) for v, c in declared] + values[len(self._compiled_for) :]
        self.tensors = tensors = [v for v in values if isinstance(v, torch.Tensor)]
        before = [_raw(t).clone() for t in tensors]
        first: list[torch.Tensor] = []
        for name, options in self._schedules.items():
            for tensor, old in zip(tensors, before, strict=True):
                _raw(tensor).copy_(old)
            started = time.process_time()
            self._loaded.options = options
            self._loaded(*values)
            self._record.run_seconds += time.process_time() - started
            for stats in self._loaded.last_stats:
                texts = [str(h) for h in stats.hazards]
                self._record.hazards += [t for t in texts if t not in self._record.hazards]
            after = [_raw(t).clone() for t in tensors]
            if not first:
                first = after
                self._record.launches += len(self._loaded.last_stats)
                self._record.instructions += sum(s.instructions for s in self._loaded.last_stats)
            elif not all(torch.equal(a, b) for a, b in zip(first, after, strict=True)):
                self._record.differing.append(name)
        for tensor, result in zip(tensors, first, strict=True):
            _raw(tensor).copy_(result)


def _plain(value: Any) -> Any:
    """A torch tensor, a Python number, None: what the exported function takes."""
    if hasattr(value, "softgpu_source"):
        return typed(value)
    if type(value).__module__.startswith("cutlass") and hasattr(value, "value"):
        return value.value
    return value


def _as_declared(value: Any, compiled_for: Any) -> Any:
    """Bytes that a program passes for float8, which it declared, as float8."""
    kind = getattr(getattr(compiled_for, "element_type", None), "__name__", "")
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and kind in TORCH_FP8:
        return value.view(TORCH_FP8[kind])
    return value


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))
