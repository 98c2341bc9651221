"""Finds the tools and libraries around the compiler, without importing it."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
from pathlib import Path

_DSL = "nvidia-cutlass-dsl"


def dsl_version() -> str | None:
    """Version of the installed CuTe DSL, None if there is none."""
    try:
        return importlib.metadata.version(_DSL)
    except importlib.metadata.PackageNotFoundError:
        return None


def have_compiler() -> bool:
    """Whether variants can be compiled here."""
    return dsl_version() is not None and importlib.util.find_spec("tvm_ffi") is not None


@functools.cache
def driver_major() -> int | None:
    """CUDA major that the driver supports, None without a driver."""
    try:
        version = ctypes.c_int(0)
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value // 1000
    except (OSError, AttributeError):
        pass
    return None


@functools.cache
def flavour() -> str:
    """Toolkit flavour that the DSL will pick here: the newest installed one the driver can load."""
    installed = [major for major in (12, 13, 14) if _dist(f"{_DSL}-libs-cu{major}")]
    driver = driver_major()
    usable = [m for m in installed if driver is None or m <= driver]
    return f"cu{max(usable)}" if usable else "none"


def _dist(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _package_dirs(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    locations = spec.submodule_search_locations if spec else None
    return [Path(p) for p in locations or ()]


def _newest(paths: list[Path]) -> Path | None:
    """The path with the largest number in any of its parts (cu13 before cu12)."""
    return max(paths, key=lambda p: [int(n) for n in re.findall(r"\d+", str(p))], default=None)


@functools.cache
def nvdisasm() -> Path | None:
    """The disassembler: the wheel's first (it is as new as the DSL's toolkit), then ``PATH``."""
    wheels = [p for d in _package_dirs("nvidia") for p in d.glob("cu*/bin/nvdisasm")]
    wheels += [p for d in _package_dirs("nvidia") for p in d.glob("cuda_nvdisasm/bin/nvdisasm")]
    on_path = shutil.which("nvdisasm")
    return _newest(wheels) or (Path(on_path) if on_path else None)


@functools.cache
def c_compiler() -> str | None:
    """C compiler driver used for linking."""
    return next((p for p in map(shutil.which, (os.environ.get("CC") or "gcc", "cc")) if p), None)


@functools.cache
def cudart_static() -> Path | None:
    """Directory of libcudart_static.a: CUDA_HOME, CUDA_PATH, /usr/local/cuda*, nvidia wheels."""
    roots = [Path(os.environ[v]) for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    roots += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    roots += [p for d in _package_dirs("nvidia") for p in sorted(d.glob("cu*"), reverse=True)]
    for root in roots:
        for sub in ("lib64", "lib", "targets/x86_64-linux/lib"):
            if (root / sub / "libcudart_static.a").is_file():
                return root / sub
    return None


@functools.cache
def dsl_lib_dir() -> Path | None:
    """Directory of libcute_dsl_runtime.so and libcuda_dialect_runtime_static.a."""
    for base in _package_dirs("nvidia_cutlass_dsl"):
        if (base / flavour() / "lib").is_dir():
            return base / flavour() / "lib"
    return None


@functools.cache
def tvm_ffi_lib_dir() -> Path | None:
    """Directory of libtvm_ffi.so."""
    for base in _package_dirs("tvm_ffi"):
        if (base / "lib" / "libtvm_ffi.so").is_file():
            return base / "lib"
    return None
