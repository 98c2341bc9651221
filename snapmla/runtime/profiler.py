"""Names of the public calls in profiles; in use where ``SNAPMLA_PROFILE_NAMES`` asks for them.

Eager calls go straight to compiled kernels, so a profile shows kernels without saying who launched
them.  With the switch set, the functions of ``snapmla``, ``snapmla.flash_mla`` and
``snapmla.flash_mla_fp8`` and a plan's ``update_`` are ranges called ``snapmla::decode`` and so on,
in ``torch.profiler`` and, where torch has CUDA, as NVTX ranges for Nsight.  Without it nothing is
wrapped and nothing is paid.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

_Range = torch._C._profiler._RecordFunctionFast  # record_function, but no operator: none to trace


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``function`` within a range of that name; where ``torch.compile`` traces, as it is."""
    has_nvtx = torch.version.cuda is not None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with _Range(name):
            if not has_nvtx:
                return function(*args, **kwargs)
            with torch.cuda.nvtx.range(name):
                return function(*args, **kwargs)

    return call


def name_calls(owner: Any, names: Iterable[str], prefix: str = "snapmla::") -> None:
    """Wraps those of a module's or class's ``names`` that are functions."""
    for name in names:
        function = getattr(owner, name)
        if inspect.isfunction(function):
            setattr(owner, name, named(function, prefix + name))
