"""Calls of variants whose results are recorded on an H200 and replayed on the software GPU.

A ``KernelCase`` builds its inputs from its name with integer operations, IEEE arithmetic and
numpy's raw PCG64 stream only, so that every machine builds the same bits (a digest checks it); its
op's workload knows how (``snapmla.testing.workloads``).  It runs on a ``Device``: the GPU of
``profiles.record_softgpu`` or the software GPU of the tests.  Results are rows; what is stored of a
row is a 64-bit hash of its bytes.  ``profiles.instructions`` has cases of single instructions.
"""

from __future__ import annotations

import zlib
from typing import Any

from codegen import abi
from dsl_kernels.spec import VariantSpec
from profiles.instructions import Device
from snapmla.runtime import variants
from snapmla.testing import workloads
from snapmla.testing.workloads.exact import LONG, Case, Recorded, Runner


def call(device: Device, variant: str, **values: Any) -> None:
    """Calls a variant with its arguments by name."""
    kernel = device.kernel(variant)  # compiles it if need be
    names = variants.argument_names(VariantSpec.from_name(variant))
    kernel(*abi.ordered(names, values))


class KernelCase(Case):
    """One compiled variant on inputs built from its name and ``index``."""

    def run(self, device: Device) -> Recorded:
        """Runs the variant on them on ``device`` and records its results."""

        def run(variant: str, **values: Any) -> None:
            call(device, variant, **values)

        recorded = workloads.of(self.spec.op).recorded
        return recorded(self, Runner(device.torch_device, run))


def kernel_cases(variant: str) -> list[KernelCase]:
    """Two cases of a helper kernel, one or two of a decode one; the index varies the inputs."""
    index = zlib.crc32(variant.encode()) % 12
    if not VariantSpec.from_name(variant).family.helper:
        long_too = "_p64_obf16" in variant or "_p64_d" in variant
        long = [KernelCase(variant, index + LONG)] if long_too else []
        return [KernelCase(variant, index), *long]
    return [KernelCase(variant, 2 * index), KernelCase(variant, 2 * index + 1)]
