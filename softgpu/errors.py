"""Errors of the software GPU.  Every one carries the place in the kernel when there is one."""

from __future__ import annotations


class SoftGpuError(RuntimeError):
    """Base class."""


class ToolchainError(SoftGpuError):
    """No usable C compiler or TVM-FFI library to link an exported object with."""


class PtxSyntaxError(SoftGpuError):
    """The PTX text could not be parsed."""


class UnmodelledInstruction(SoftGpuError):
    """An instruction, or a form of one, that no handler implements."""


class LaunchError(SoftGpuError):
    """A launch the hardware would refuse: geometry, shared memory, parameters."""


class MemoryFault(SoftGpuError):
    """Out-of-bounds or misaligned access."""


class BarrierError(SoftGpuError):
    """Misuse of an mbarrier, named barrier or cluster barrier."""


class DescriptorError(SoftGpuError):
    """A tensor map or matrix descriptor that the hardware would not accept."""


class Deadlock(SoftGpuError):
    """No warp can make progress; the message lists what each one waits for."""
