"""``load_cuda``: an object that nvcc made of CUDA C++, plus its PTX -> Python calls on CPU memory.

    nvcc -gencode arch=compute_100a,code=compute_100a -Xcompiler -fPIC -c kernel.cu -o kernel.o
    nvcc -gencode arch=compute_100a,code=compute_100a -ptx kernel.cu -o kernel.ptx

    gemm = softgpu.load_cuda("kernel.o", "kernel.ptx")
    gemm.call("run_gemm", a, b, d, 128)     # extern "C" int run_gemm(void *, void *, void *, int)

Host code runs as it is: launches with <<<>>> or cudaLaunchKernelEx, tensor maps, attributes.  It
works on memory of the caller's; see ``cudart.c`` for the CUDA calls that there are.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from typing import Any

import numpy as np

from .errors import LaunchError, SoftGpuError
from .loader import Loaded, Names
from .memory import GlobalMemory
from .options import Options
from .runtime import CudaModule, Launch

_INT = 1 << 31


class CudaObject(Loaded):
    """Host functions of an object whose launches run on the software GPU.

    See ``Loaded`` for options, statistics and launches.
    """

    def __init__(
        self,
        object_path: str | os.PathLike[str],
        ptx_path: str | os.PathLike[str],
        options: Options | None = None,
        names: Names | None = None,
    ) -> None:
        super().__init__(ptx_path, options, names)
        self._host = CudaModule(object_path, self._launched, self.module.architecture)

    def call(self, symbol: str, *args: Any) -> None:
        """Calls a host function, ``extern "C" int symbol(...)``, which returns a cudaError_t.

        Args:
            args: CPU tensors and numpy arrays (their address is passed, and kernels may touch
                them), ints (as a C int), None (a null pointer), and values of ctypes.

        Raises:
            SoftGpuError: no such function, it returned an error, or what the kernel did wrong.
            TypeError: an argument that C would not know the type of, such as a Python float.
        """
        with self._called() as memory:
            values = [self._value(memory, i, a) for i, a in enumerate(args)]
            self._add_extra_buffers(memory)
            code = self._host.call(symbol, *values)
        if code:
            raise SoftGpuError(f"{symbol} returned CUDA error {code}")

    def _value(self, memory: GlobalMemory, index: int, value: Any) -> Any:
        if hasattr(value, "data_ptr"):
            self._add_tensor(memory, index, value)
            return ctypes.c_void_p(value.data_ptr())
        if isinstance(value, np.ndarray):
            if not value.flags.c_contiguous:
                raise TypeError(f"argument {index}: expected a contiguous array")
            memory.add(
                self._label(index, value.dtype, value.shape), value.ctypes.data, value.nbytes
            )
            return ctypes.c_void_p(value.ctypes.data)
        if value is None:
            return ctypes.c_void_p(None)
        if isinstance(value, int) and -_INT <= value < _INT:
            return ctypes.c_int(value)
        if isinstance(value, ctypes._SimpleCData | ctypes.Structure):
            return value
        raise TypeError(
            f"argument {index}: expected a tensor, an array, an int of 32 bits, None or a value of "
            f"ctypes (c_float, c_longlong, a structure), got {type(value).__name__} {value!r}"
        )

    def _launched(self, launch: Launch) -> None:
        """The PTX of a kernel with __cluster_dims__ says its cluster; a launch may leave it out."""
        kernel = self.program(launch.kernel).kernel
        words = kernel.directives.get("reqnctapercluster", "")
        if words:
            given = tuple(int(x) for x in words.replace(" ", "").split(","))
            x, y, z = given + (1,) * (3 - len(given))
            if launch.cluster not in ((1, 1, 1), (x, y, z)):
                raise LaunchError(f"cluster {launch.cluster}: the kernel requires {(x, y, z)}")
            launch = dataclasses.replace(launch, cluster=(x, y, z))
        super()._launched(launch)


def load_cuda(
    object_path: str | os.PathLike[str],
    ptx_path: str | os.PathLike[str],
    options: Options | None = None,
    names: Names | None = None,
) -> CudaObject:
    """Loads an object of nvcc's for the software GPU.

    Args:
        object_path: compiled with ``-Xcompiler -fPIC``.
        ptx_path: PTX of the same source; ``-lineinfo`` puts source lines into reports.
        options: how to execute; None for the defaults.
        names: of arguments and shared arrays, for reports.

    Raises:
        FileNotFoundError, ToolchainError (no C compiler, or a CUDA call that ``cudart.c`` lacks),
        PtxSyntaxError.
    """
    return CudaObject(object_path, ptx_path, options, names)


__all__ = ["CudaObject", "load_cuda"]
