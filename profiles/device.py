"""Check for a GPU to measure on, made before anything heavy is imported."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

NEEDED = "profiling needs a CUDA device"


def visible() -> int:
    """CUDA devices that the driver shows this process; 0 without a driver."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else count.value


def require_cuda(arguments: Sequence[str] = ()) -> None:
    """Ends the program with one sentence where nothing can be measured.

    Args:
        arguments: the command line's; help and the software GPU (``--device cpu``) need no device.

    Raises:
        SystemExit: the driver shows no device, or torch cannot use it.
    """
    if {"-h", "--help", "cpu", "--device=cpu"} & set(arguments):
        return
    if not visible():
        raise SystemExit(f"{NEEDED}: the driver shows none here")
    import torch  # only now: it takes seconds

    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise SystemExit(f"{NEEDED} that torch can use: torch {torch.__version__} is built {built}")
