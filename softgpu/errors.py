"""Errors of the software GPU.  Every one carries the place in the kernel when there is one."""

from __future__ import annotations

from typing import Any


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


class TensorMemoryError(SoftGpuError):
    """Misuse of tensor memory: allocation, permit, columns nobody owns, lanes out of reach."""


class DescriptorError(SoftGpuError):
    """A tensor map, matrix or instruction descriptor that the hardware would not accept."""


class Deadlock(SoftGpuError):
    """No warp can make progress; the message lists what each one waits for."""


class Hazard(SoftGpuError):
    """Two accesses that nothing orders, or an asynchronous operation used before it is complete.

    Attributes:
        kind: short name, such as ``race`` or ``missing-proxy-fence``.
        what: one sentence.
        place: buffer and offset, or registers.
        events: the conflicting accesses (``softgpu.hazard.Event``), the earlier one first.
        why: what is missing.
    """

    def __init__(self, kind: str, what: str, place: str, events: list[Any], why: str) -> None:
        self.kind, self.what, self.place, self.events, self.why = kind, what, place, events, why
        lines = [f"hazard [{kind}]: {what}", f"  at  {place}"]
        lines += [f"  {i + 1}.  {e}" for i, e in enumerate(events)]
        super().__init__("\n".join([*lines, f"  why: {why}"]))
