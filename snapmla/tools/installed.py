"""The smallest problem of each op by the variants that are installed: ``snapmla selfcheck``.

An op is checked by the plainest of its variants (``snapmla.tools.info.installed``), on the first of
its small calls (``snapmla.testing.workloads``), on a GPU or the software GPU.  Nothing is compiled.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass

from dsl_kernels.spec import VariantSpec
from snapmla.errors import VariantError
from snapmla.runtime import variants
from snapmla.testing import on_card, selfcheck
from snapmla.testing.workloads.call import Result
from snapmla.tools import info


@dataclass(frozen=True)
class Outcome:
    """An op's check: variant, result, seconds."""

    spec: VariantSpec
    result: Result
    seconds: float


def check_all(arch: str, device_type: str) -> tuple[int, Iterator[Outcome]]:
    """Number of ops with a variant, and their outcomes, one after the other.

    A check that raises is an outcome, too: it failed, and the error is its summary.

    Args:
        device_type: ``cuda``, the current GPU, or ``cpu``, the software GPU.
    """
    specs = list(info.installed(arch, device_type).values())
    return len(specs), (_outcome(spec, device_type) for spec in specs)


def check(spec: VariantSpec, device_type: str) -> Result:
    """Runs a variant that is installed on the first small call of its op.

    Raises:
        VariantError: it is not installed, or cannot be loaded.
    """
    artifact = variants.find(spec)
    if artifact is None:
        raise VariantError(f"variant {spec.name} is not installed")
    kernel = variants.load(artifact, device_type)
    if device_type == "cuda":
        kernel = on_card.on_the_card(kernel)
    names = variants.argument_names(spec)
    return selfcheck.check_kernel(spec, kernel, names, most=1)


def _outcome(spec: VariantSpec, device_type: str) -> Outcome:
    started = time.perf_counter()
    gc.collect()  # circles of large arrays of the op before, whose size the collector does not see
    try:
        result = check(spec, device_type)
    except Exception as error:  # whatever a kernel or a driver raises: the other ops are checked
        result = Result(False, f"{type(error).__name__}: {error}")
    return Outcome(spec, result, time.perf_counter() - started)
