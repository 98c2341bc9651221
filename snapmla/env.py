"""Every environment variable of the project, in one table (``TABLE``).

The first five are read through this module.  The others are read where they are used, by parts
that do not import this package (softgpu) or are not installed with it (benchmarks, GPU tests).
``XDG_CACHE_HOME`` and ``CC`` have their usual meaning.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from snapmla._version import __version__

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class EnvVar:
    """One variable: name, default as text, what it does."""

    name: str
    default: str
    doc: str

    def get(self) -> str:
        return os.environ.get(self.name, self.default)

    def enabled(self) -> bool:
        """True unless empty, 0, false or no."""
        return self.get().strip().lower() not in ("", "0", "false", "no")


VARIANT_DIR = EnvVar(
    "SNAPMLA_VARIANT_DIR", "", "directory of built variants, searched first and written to"
)
NO_JIT = EnvVar(
    "SNAPMLA_NO_JIT", "0", "1 forbids compiling missing or outdated variants at run time"
)
SOFTGPU_ARCH = EnvVar(
    "SNAPMLA_SOFTGPU_ARCH", "sm_90a", "architecture that CPU tensors run on (software GPU)"
)
CHECK_PLAN = EnvVar(
    "SNAPMLA_CHECK_PLAN", "0", "1 makes decode check that its plan fits the lengths (waits)"
)
PROFILE_NAMES = EnvVar(
    "SNAPMLA_PROFILE_NAMES", "0", "1, set before the import, names calls in profiles (NVTX, too)"
)
TABLE: tuple[EnvVar, ...] = (
    VARIANT_DIR,
    NO_JIT,
    SOFTGPU_ARCH,
    CHECK_PLAN,
    PROFILE_NAMES,
    EnvVar(
        "SNAPMLA_CUDA", "", "CUDA major that codegen builds for, 12 or 13; the driver's if empty"
    ),
    EnvVar("SOFTGPU_ACCUMULATE", "hopper", "arithmetic of softgpu's tensor core, or exact"),
    EnvVar("SOFTGPU_ASYNC", "early", "when softgpu's asynchronous work lands: early, late, random"),
    EnvVar("SOFTGPU_HAZARDS", "off", "what softgpu does about missing synchronisation; 1: raise"),
    EnvVar("SOFTGPU_SEED", "-1", "order of softgpu's warps; -1 runs them in order"),
    EnvVar("SOFTGPU_CACHE_DIR", "", "folder of softgpu's linked objects, a per-user one if empty"),
    EnvVar("SNAPMLA_COMMIT", "", "commit that benchmarks record where there is no git"),
    EnvVar("SNAPMLA_PEERS", "", "folder of other libraries' kernels that the GPU check compares"),
    EnvVar(
        "SNAPMLA_VLLM", "", "folder of vLLM's releases that tests drive, a per-user one if empty"
    ),
    EnvVar("SNAPMLA_TEST_GPU", "1", "0 skips the tests that need a CUDA device"),
)


def is_checkout() -> bool:
    """Whether the package runs from a source checkout (so ``build/variants`` is its own)."""
    return (ROOT / "pyproject.toml").is_file() and (ROOT / "codegen").is_dir()


class Place(NamedTuple):
    """A directory of variants: what it is, in words, and whether run-time compiles may go there."""

    what: str
    path: Path
    writable: bool


def places() -> list[Place]:
    """Where variants are searched, in order; other versions of the package have their own cache."""
    found: list[Place] = []
    if VARIANT_DIR.get():
        found.append(Place(f"`{VARIANT_DIR.name}`", Path(VARIANT_DIR.get()), True))
    if is_checkout():
        path = ROOT / "build" / "variants"
        found.append(Place("the checkout's `build/variants`", path, True))
    packed = Path(__file__).resolve().parent / "variants"  # a wheel or bundle
    found.append(Place("the package's own `variants`", packed, False))
    if (home := cache_home()) is not None:  # not there without a home directory
        path = home / "snapmla" / __version__ / "variants"
        found.append(Place("the user's cache folder", path, True))
    return found


def cache_home() -> Path | None:
    """The user's folder of caches; None for a user without a home directory."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"])
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a container's user without HOME and without an entry in passwd
        return None


def variant_dirs() -> list[Path]:
    """Directories searched for variants, in order."""
    return [place.path for place in places()]


def compile_dir() -> Path:
    """Directory that takes run-time compiles: the first one searched that is no package's.

    Raises RuntimeError that says what to set if there is none.
    """
    found = [place.path for place in places() if place.writable]
    if not found:
        raise RuntimeError(f"this user has no home directory: set {VARIANT_DIR.name}")
    return found[0]
