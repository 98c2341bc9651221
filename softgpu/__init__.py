"""A software GPU: runs exported CuTe DSL objects on the CPU.

    kernel = softgpu.load("decode.o", "decode.ptx", "snapmla_decode...")
    kernel(*cpu_tensors, *scalars)          # synchronous, in place

The host half of the object runs as it is; its launches are interpreted from the PTX of the same
compile.  See docs/software-gpu.md.
"""

from .accumulate import exact, hopper
from .errors import (
    BarrierError,
    Deadlock,
    DescriptorError,
    LaunchError,
    MemoryFault,
    PtxSyntaxError,
    SoftGpuError,
    ToolchainError,
    UnmodelledInstruction,
)
from .loader import LoadedKernel, load
from .machine import Options, Stats

__all__ = [
    "BarrierError", "Deadlock", "DescriptorError", "LaunchError", "LoadedKernel", "MemoryFault",
    "Options", "PtxSyntaxError", "SoftGpuError", "Stats", "ToolchainError",
    "UnmodelledInstruction", "exact", "hopper", "load",
]  # fmt: skip
