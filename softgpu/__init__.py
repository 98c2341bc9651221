"""A software GPU: runs exported CuTe DSL objects on the CPU.

    kernel = softgpu.load("decode.o", "decode.ptx", "snapmla_decode...")
    kernel(*cpu_tensors, *scalars)          # synchronous, in place

The host half of the object runs as it is; its launches are interpreted from the PTX of the same
compile.  See docs/software-gpu.md.
"""

from . import ops as _ops  # noqa: F401 (registers every builder with the decoder)
from .accumulate import blackwell, exact, hopper
from .cuda import CudaObject, load_cuda
from .errors import (
    BarrierError,
    Deadlock,
    DescriptorError,
    Hazard,
    LaunchError,
    MemoryFault,
    PtxSyntaxError,
    SoftGpuError,
    TensorMemoryError,
    ToolchainError,
    UnmodelledInstruction,
)
from .hazard import Event
from .loader import LoadedKernel, Names, load, using
from .options import Options, Stats

__all__ = [
    "BarrierError", "CudaObject", "Deadlock", "DescriptorError", "Event", "Hazard", "LaunchError",
    "LoadedKernel", "MemoryFault", "Names", "Options", "PtxSyntaxError", "SoftGpuError", "Stats",
    "TensorMemoryError", "ToolchainError", "UnmodelledInstruction", "blackwell", "exact", "hopper",
    "load", "load_cuda", "using",
]  # fmt: skip
