"""Finds the tools and libraries around the compiler, and imports it for one toolkit flavour."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

_DSL = "nvidia-cutlass-dsl"
ENV_CUDA = "SNAPMLA_CUDA"
MAJORS = (12, 13)  # toolkit flavours of the DSL
# Targets that all cards of a family load, and the first CUDA whose ptxas knows them.
_OF_FAMILY = {"sm_100a": ("sm_100f", (12, 9))}
_EXTENSION = "cutlass._mlir._mlir_libs._cutlass_ir"


def dsl_version() -> str | None:
    """Version of the installed CuTe DSL, None if there is none."""
    try:
        return importlib.metadata.version(_DSL)
    except importlib.metadata.PackageNotFoundError:
        return None


def have_compiler() -> bool:
    """True if variants can be compiled here."""
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


def installed_majors() -> list[int]:
    """CUDA majors of the toolkit flavours that are installed with the DSL."""
    return [major for major in MAJORS if _dist(f"{_DSL}-libs-cu{major}")]


def flavour() -> str:
    """Toolkit flavour to build with: ``$SNAPMLA_CUDA``, else the newest that the driver can load.

    Raises ValueError in one sentence if the flavour asked for is unknown or not installed.
    """
    installed, asked = installed_majors(), os.environ.get(ENV_CUDA, "")
    if asked:
        if asked not in map(str, MAJORS):
            raise ValueError(f"CUDA: expected one of {', '.join(map(str, MAJORS))}, got {asked!r}")
        if int(asked) not in installed:
            raise ValueError(
                f"CUDA={asked}: the DSL's cu{asked} libraries are not installed: pip install "
                f"'{_DSL}-libs-cu{asked}=={dsl_version()}'"
            )
        return f"cu{asked}"
    driver = driver_major()
    usable = [m for m in installed if driver is None or m <= driver]
    return f"cu{max(usable)}" if usable else "none"


def _no_flavour() -> str:
    """Reason why ``flavour()`` is none, and what to do."""
    installed, driver = installed_majors(), driver_major()
    if not installed:
        return (
            f"the DSL's toolkit libraries are not installed: pip install '{_DSL}=={dsl_version()}'"
        )
    have = " and ".join(f"cu{major}" for major in installed)
    if driver not in MAJORS:
        return f"the driver supports CUDA {driver} and the DSL's libraries are {have}: update it"
    return (
        f"the driver supports CUDA {driver} and the DSL's libraries are {have}: pip install "
        f"'{_DSL}-libs-cu{driver}=={dsl_version()}'"
    )


class _Library(ctypes.CDLL):
    """Stands in for ``ctypes.CDLL`` while the DSL is imported: libcuda reports ``major``."""

    major = 0

    def __init__(self, name: Any, *args: Any, **kwargs: Any) -> None:
        if name != "libcuda.so.1":
            super().__init__(name, *args, **kwargs)

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.major * 1000 + 90
        return 0


def import_compiler() -> None:
    """Imports the DSL with the toolkit flavour that ``flavour()`` names.

    The DSL picks a flavour by the driver's version and has no switch for it, so the driver seems
    to be of the wanted CUDA major meanwhile; afterwards the choice is verified.  Raises
    RuntimeError if another flavour is loaded, as in a process that imported the DSL before.
    """
    wanted = flavour()
    if wanted == "none":
        raise RuntimeError(_no_flavour())
    if _EXTENSION not in sys.modules:
        _Library.major = int(wanted.removeprefix("cu"))
        real, ctypes.CDLL = ctypes.CDLL, _Library  # type: ignore[misc]
        try:
            importlib.import_module("cutlass.cute")
        finally:
            ctypes.CDLL = real  # type: ignore[misc]
    file = getattr(sys.modules.get(_EXTENSION), "__file__", "") or ""
    if f".{wanted}." not in Path(file).name:
        raise RuntimeError(f"the DSL loaded {Path(file).name or 'nothing'}, {wanted} was asked for")


def target_of(arch: str) -> str:
    """Target that variants of ``arch`` are assembled for.

    The family's (sm_100f, which B200 and B300 load) if the imported toolkit has it, else ``arch``.
    """
    target, since = _OF_FAMILY.get(arch, (arch, (0, 0)))
    return target if toolkit() >= since else arch


def toolkit() -> tuple[int, int]:
    """(major, minor) of the CUDA toolkit of the flavour that ``import_compiler`` imported."""
    found = importlib.import_module("cutlass.base_dsl.version_info").CUDA_VERSION
    return int(found.major), int(found.minor)


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


@functools.cache
def nvdisasm() -> Path | None:
    """The disassembler: the wheel's first, then ``PATH``: ``softgpu.cost.cubin.nvdisasm``."""
    from softgpu.cost import cubin  # not at the top: a command that needs none starts faster

    return cubin.nvdisasm()


@functools.cache
def c_compiler() -> str | None:
    """C compiler driver used for linking: the first there is of $CC, cc, gcc and clang.

    ``softgpu.runtime``, which does without this package, has the same function.
    """
    names = (os.environ.get("CC") or "cc", "cc", "gcc", "clang")
    return next((path for path in map(shutil.which, names) if path), None)


@functools.cache
def tvm_ffi_lib_dir() -> Path | None:
    """Directory of libtvm_ffi.so."""
    for base in _package_dirs("tvm_ffi"):
        if (base / "lib" / "libtvm_ffi.so").is_file():
            return base / "lib"
    return None
