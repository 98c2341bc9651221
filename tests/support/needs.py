"""Marks for what a test needs to run at all, and the devices that tests run on."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
import torch


def have_compiler() -> bool:
    """The answer of ``codegen.toolchain``, without which the software GPU's tests do."""
    try:
        importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec("tvm_ffi") is not None


needs_compiler = pytest.mark.skipif(not have_compiler(), reason="needs nvidia-cutlass-dsl")
# a GPU machine without the compiler runs the ``gpu`` tests on variants that were built elsewhere
needs_kernels = pytest.mark.skipif(
    not have_compiler() and not torch.cuda.is_available(),
    reason="needs nvidia-cutlass-dsl",
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# objects of either architecture on the software GPU, or those of the GPU at hand; SM100's helper
# kernels are of the same sources, and every run checks a few of them (tests/kernels/test_variants)
TARGETS = [
    "sm_90a",
    pytest.param("sm_100a", marks=pytest.mark.whole_matrix),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
