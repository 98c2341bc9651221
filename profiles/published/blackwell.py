"""A machine with a B200, as far as a Python program can tell: stand-ins for torch and the CuTe DSL.

``pretend`` swaps, for as long as its block lasts, what a program asks of torch and cutlass:

* tensors on "cuda" are CPU tensors, and ``torch.cuda`` answers like a B200;
* ``cute.compile`` compiles for sm_100a and returns a kernel that runs on the software GPU;
* ``from_dlpack`` remembers the torch tensor, ``testing.convert`` converts with torch (it would
  launch a kernel of the DSL's own), ``testing.benchmark`` measures nothing;
* ``torch.testing.assert_close`` also records how far apart its arguments were.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

SMS = 148
CAPABILITY = (10, 0)


def _on_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


class CudaOnCpu(TorchFunctionMode):
    """Every tensor asked for on "cuda" is made on the CPU; a move to "cuda" copies, as it would."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].clone()
        if func == torch.Tensor.is_cuda.__get__:
            return True
        if func == torch.Tensor.device.__get__:
            return torch.device("cuda", 0)
        moved = any(_on_cuda(x) for x in (*args[1:], kwargs.get("device")))
        args = (*args[:1], *("cpu" if _on_cuda(x) else x for x in args[1:]))
        if _on_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and moved:
            kwargs["copy"] = True
        return func(*args, **kwargs)


class HardwareInfo:
    """Stands for ``cutlass.utils.HardwareInfo``."""

    def __init__(self, device_id: int = 0) -> None:
        self.device_id = device_id

    def get_max_active_clusters(self, cluster_size: int, stream: Any = None) -> int:
        return SMS // cluster_size

    def get_device_multiprocessor_count(self) -> int:
        return SMS

    def get_l2_cache_size_in_bytes(self) -> int:
        return 126 << 20


def _torch_cuda() -> dict[str, Any]:
    stream = types.SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    properties = types.SimpleNamespace(
        multi_processor_count=SMS, major=CAPABILITY[0], minor=CAPABILITY[1], name="B200"
    )
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: "B200",
        "device": lambda device=None: contextlib.nullcontext(),
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "empty_cache": lambda: None,
    }


def relative_l2(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Root of the squared differences over that of the squared expected values, in float64."""
    a, b = got.double(), expected.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


class Comparisons:
    """Records what ``assert_close`` was given: (relative L2, greatest difference), in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []
        self._real = torch.testing.assert_close

    def __call__(self, actual: Any, expected: Any, *rest: Any, **named: Any) -> None:
        if actual.numel():
            a, b = actual.double(), expected.double()
            finite = torch.isfinite(b)
            worst = (a - b)[finite].abs().max() if finite.any() else torch.zeros(())
            self.seen.append((relative_l2(a[finite], b[finite]), float(worst)))
        self._real(actual, expected, *rest, **named)


TORCH_FP8 = {"Float8E4M3FN": torch.float8_e4m3fn, "Float8E5M2": torch.float8_e5m2}


def typed(tensor: Any) -> torch.Tensor:
    """The torch tensor behind a DSL tensor, in the type that the program declared for it."""
    source: torch.Tensor = tensor.softgpu_source
    wanted = TORCH_FP8.get(tensor.element_type.__name__)
    return source.view(wanted) if wanted is not None and source.dtype != wanted else source


def _convert(src: Any, dst: Any) -> None:
    typed(dst).copy_(typed(src))


@contextlib.contextmanager
def pretend(compile_: Callable[..., Any]) -> Iterator[Comparisons]:
    """The stand-ins, for the length of a block.

    Args:
        compile_: takes the place of ``cute.compile``.

    Yields:
        what the program compared.
    """
    import cutlass.cute as cute
    import cutlass.cute.runtime as runtime
    import cutlass.cute.testing as testing
    import cutlass.torch
    import cutlass.utils as utils
    import tvm_ffi
    from cutlass.utils import tensor_helpers

    from softgpu.runtime import CudaDlpack

    real_from_dlpack = runtime.from_dlpack

    def from_dlpack(tensor: Any, *rest: Any, **named: Any) -> Any:
        named.pop("enable_tvm_ffi", None)
        made = real_from_dlpack(CudaDlpack(tensor), *rest, **named)
        made.softgpu_source = tensor
        return made

    comparisons = Comparisons()
    swaps = [
        (torch.testing, "assert_close", comparisons), (cute, "compile", compile_),
        (runtime, "from_dlpack", from_dlpack), (cutlass.torch, "from_dlpack", from_dlpack),
        (tensor_helpers, "from_dlpack", from_dlpack),
        (testing, "convert", _convert), (testing, "benchmark", lambda *a, **k: 0.0),
        (utils, "HardwareInfo", HardwareInfo),
        (tvm_ffi, "use_torch_stream", contextlib.nullcontext),
    ]  # fmt: skip
    swaps += [(torch.cuda, name, value) for name, value in _torch_cuda().items()]
    with contextlib.ExitStack() as stack:
        for owner, name, value in swaps:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(CudaOnCpu())
        yield comparisons
