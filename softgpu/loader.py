"""``load``: an exported object plus its PTX -> a Python callable on CPU tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .decode import Program, decode
from .errors import LaunchError, MemoryFault, SoftGpuError
from .hazard import Footprint
from .machine import Machine, Options, Stats
from .memory import GlobalMemory
from .ptx import Module, parse
from .runtime import HostModule, Launch, as_cuda

KEPT = 24  # modules that stay decoded; one of the largest kernels takes some 15 MB

_lock = threading.RLock()
_override = threading.local()
_prior: list[Footprint] = []  # what the grid launched last wrote; streams run in order


def _check_storage(name: str, tensor: Any) -> None:
    """Refuses a tensor that reaches past its storage: freed, or made smaller, behind its back."""
    end = tensor.storage_offset() * tensor.element_size() + _span(tensor)
    held = tensor.untyped_storage().nbytes()
    if _span(tensor) and end > held:
        raise MemoryFault(f"{name}: reaches byte {end} of a storage that has {held}: was it freed?")


def _span(tensor: Any) -> int:
    """Bytes from the first to behind the last element."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())


@dataclass(frozen=True)
class Names:
    """Names that reports use.

    Attributes:
        arguments: of the exported function, in order.
        shared: (name, offset) of the arrays in the entry kernel's dynamic shared memory, ascending.
    """

    arguments: tuple[str, ...] = ()
    shared: tuple[tuple[str, int], ...] = ()


@contextlib.contextmanager
def using(options: Options) -> Iterator[None]:
    """Every kernel called in the block (by this thread) runs with ``options``, not its own."""
    before = getattr(_override, "options", None)
    _override.options = options
    try:
        yield
    finally:
        _override.options = before


class _Decoded:
    """A PTX text, parsed; its kernels, each decoded when it is first asked for."""

    def __init__(self, text: str) -> None:
        self.module: Module = parse(text)
        self._programs: dict[str, Program] = {}

    def program(self, kernel: str) -> Program:
        """The kernel's program, with a list of instructions that is the caller's own."""
        found = self._programs.get(kernel)
        if found is None:
            found = decode(self.module.kernels[kernel], self.module)
            found.globals = {
                n: v for n, v in self.module.variables.items() if v.space in ("global", "const")
            }
            self._programs[kernel] = found
        own = dataclasses.replace(found, code=list(found.code))
        own.files = found.files  # warps of all copies use the same registers, one after another
        return own


# A process loads some kernels again and again: a plan for each decode, what was forgotten.
_decoded = functools.lru_cache(maxsize=KEPT)(_Decoded)


class Loaded:
    """Kernels of one object: decoded from its PTX, run when its host code launches them.

    Attributes:
        options: execution options; may be replaced between calls, see also ``using``.
        last_stats: counts of the last call, one entry a launch.
        launches: those of the last call, as the host code asked for them.
        extra_buffers: tensors the kernels may touch besides the arguments.
    """

    def __init__(
        self, ptx_path: str | os.PathLike[str], options: Options | None, names: Names | None
    ) -> None:
        self.names = names or Names()
        self.options = options or Options()
        self._decoded = _decoded(pathlib.Path(ptx_path).read_text())
        self.module = self._decoded.module
        self.ptx_path = pathlib.Path(ptx_path)
        self._programs: dict[str, Program] = {}
        self._memory: GlobalMemory | None = None
        self.last_stats: list[Stats] = []
        self.launches: list[Launch] = []
        self.extra_buffers: list[Any] = []

    @property
    def entry(self) -> str:
        """The object's first kernel: the one it is named for; others are launched behind it."""
        return next(iter(self.module.kernels))

    def program(self, kernel: str) -> Program:
        """The decoded kernel.  Raises LaunchError if the PTX has no such entry."""
        if kernel not in self._programs:
            if kernel not in self.module.kernels:
                raise LaunchError(
                    f"{self.ptx_path} has no kernel {kernel!r}; it has "
                    f"{sorted(self.module.kernels)}. Object and PTX must come from one compile."
                )
            program = self._decoded.program(kernel)
            named = self.names.shared if kernel == self.entry else ()
            arrays = [*named, ("", 1 << 24)]
            program.shared_map = [
                (name, at, end - at) for (name, at), (_, end) in itertools.pairwise(arrays)
            ]
            self._programs[kernel] = program
        return self._programs[kernel]

    def replace_program(self, kernel: str, program: Program) -> None:
        """Runs ``program`` as ``kernel`` from now on (mutation studies)."""
        self._programs[kernel] = program

    def _launched(self, launch: Launch) -> None:
        assert self._memory is not None
        self.launches.append(launch)
        global _prior
        options = getattr(_override, "options", None) or self.options
        machine = Machine(self.program(launch.kernel), launch, self._memory, options, _prior)
        _prior = []
        self.last_stats.append(machine.run())
        if machine.globals is not None:
            # what this grid did not wait for, a dependent of it may still overtake too
            _prior = machine.globals.footprints() + ([] if machine.prior_waited else machine.prior)

    @contextlib.contextmanager
    def _called(self) -> Iterator[GlobalMemory]:
        """The memory of one call; calls run one after the other."""
        with _lock:
            self._memory = GlobalMemory()
            self.last_stats, self.launches = [], []
            try:
                yield self._memory
            finally:
                self._memory = None

    def _label(self, index: int, dtype: Any, shape: Any) -> str:
        """Text for an argument in reports: name, dtype and shape."""
        known = index < len(self.names.arguments)
        name = self.names.arguments[index] if known else f"argument {index}"
        return f"{name} {str(dtype).removeprefix('torch.')}{list(shape)}"

    def _add_tensor(self, memory: GlobalMemory, index: int, tensor: Any) -> None:
        """Lets kernels touch an argument.  Raises SoftGpuError, MemoryFault."""
        if tensor.device.type != "cpu":
            raise SoftGpuError(f"argument {index}: expected a CPU tensor, got {tensor.device}")
        label = self._label(index, tensor.dtype, tensor.shape)
        _check_storage(label, tensor)
        memory.add(label, tensor.data_ptr(), _span(tensor))

    def _add_extra_buffers(self, memory: GlobalMemory) -> None:
        for i, t in enumerate(self.extra_buffers):
            memory.add(f"extra buffer {i} {list(t.shape)}", t.data_ptr(), _span(t))


class LoadedKernel(Loaded):
    """An exported function whose launches run on the software GPU.

    Call it with CPU torch tensors and Python scalars in the order of the ABI.  Runs synchronously
    and writes into the given tensors.  Errors of the object's own argument checks come through as
    TVM-FFI raises them; what goes wrong in the kernel is a ``SoftGpuError``.

    Attributes:
        fp8_as_bytes: float8 tensors cross the ABI as uint8; False for a function that declares
            them as float8.
    """

    def __init__(
        self,
        object_path: str | os.PathLike[str],
        ptx_path: str | os.PathLike[str],
        symbol: str,
        options: Options | None = None,
        names: Names | None = None,
    ) -> None:
        super().__init__(ptx_path, options, names)
        self.symbol = symbol
        self._host = HostModule(object_path, self._launched)
        self.fp8_as_bytes = True

    def __call__(self, *args: Any) -> None:
        _untraced(self._run)(*args)

    def _run(self, *args: Any) -> None:
        with self._called() as memory:
            values = []
            for i, a in enumerate(args):
                if hasattr(a, "data_ptr"):
                    self._add_tensor(memory, i, a)
                    a = as_cuda(_bytes_of_fp8(a) if self.fp8_as_bytes else a)
                values.append(a)
            self._add_extra_buffers(memory)
            self._host.call(self.symbol, *values)


def _untraced(function: Callable[..., None]) -> Callable[..., None]:
    """The function out of reach of Dynamo, which would trace the interpreter between two graphs."""
    if "torch._dynamo" not in sys.modules:  # nothing that could trace; loading it takes seconds
        return function
    import torch

    return torch.compiler.disable(function)


def _bytes_of_fp8(tensor: Any) -> Any:
    """float8 tensors cross the ABI as uint8."""
    import torch

    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return tensor.view(torch.uint8)
    return tensor


def load(
    object_path: str | os.PathLike[str],
    ptx_path: str | os.PathLike[str],
    symbol: str,
    options: Options | None = None,
    names: Names | None = None,
) -> LoadedKernel:
    """Loads an exported object for the software GPU.

    Args:
        object_path: the ``.o`` that ``export_to_c`` wrote.
        ptx_path: PTX text of the same compile.
        symbol: the exported function's name.
        options: how to execute; None for the defaults.
        names: of arguments and shared arrays, for reports.

    Raises:
        FileNotFoundError, ToolchainError (no C compiler, link error), PtxSyntaxError.
    """
    return LoadedKernel(object_path, ptx_path, symbol, options, names)
