"""Every environment variable of the project, in one table (``TABLE``).

The first ones are read through this module.  The others are read where they are used, by parts
that do not import this package (softgpu) or are not installed with it (benchmarks, GPU tests).
``XDG_CACHE_HOME`` and ``CC`` have their usual meaning.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from snapmla._version import __version__

PACKAGE = Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent
ON, OFF = ("1", "true", "yes", "on", "y"), ("0", "false", "no", "off", "n")  # words of a switch
KERNELS = "snapmla.kernels"  # entry points of packages that hold variants
NOTE = "build.json"  # in a wheel's package, as codegen.wheels writes it


@dataclass(frozen=True)
class EnvVar:
    """One variable: name, default as text, what it does."""

    name: str
    default: str
    doc: str

    def get(self) -> str:
        return os.environ.get(self.name, self.default)

    def enabled(self) -> bool:
        """True if a switch is on: a word of ``ON``; not of ``OFF``, nor empty; in any case.

        Raises:
            ValueError: another word, which might have been meant either way.
        """
        text = self.get()
        word = text.strip().lower()
        if word and word not in (*ON, *OFF):
            words = ", ".join((*ON, *OFF))
            raise ValueError(f"{self.name}: expected one of {words}, got {text!r}")
        return word in ON


VARIANT_DIR = EnvVar(
    "SNAPMLA_VARIANT_DIR", "", "directory of built variants, searched first and written to"
)
NO_JIT = EnvVar(
    "SNAPMLA_NO_JIT",
    "0",
    "1 forbids compiling at run time: a missing variant is an error, an outdated one runs and is "
    "logged",
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
LOG = EnvVar(
    "SNAPMLA_LOG", "0", "1 logs a line a call (logger snapmla); read when a kernel is first called"
)
DUMP = EnvVar(
    "SNAPMLA_DUMP", "", "folder that calls which fail are written to, for `snapmla repro` (slow)"
)
DUMP_WHEN = EnvVar(
    "SNAPMLA_DUMP_WHEN", "error", "calls to write: error, nan (and those that give NaN), all"
)
DUMP_MB = EnvVar("SNAPMLA_DUMP_MB", "1024", "the most that a process writes there, in megabytes")
VLLM_SPARSE = EnvVar(
    "SNAPMLA_VLLM_SPARSE",
    "0",
    "1 gives vLLM 0.26's backend FLASHMLA_SPARSE to ours; newer releases have SNAPMLA_SPARSE",
)
VLLM_FLASHMLA = EnvVar(
    "SNAPMLA_VLLM_FLASHMLA",
    "0",
    "1 puts our kernels in the place of FlashMLA's inside of vLLM 0.26 and 0.33, V4's among them",
)
SGLANG_FLASHMLA = EnvVar(
    "SNAPMLA_SGLANG_FLASHMLA",
    "0",
    "1 puts our kernels in the place of FlashMLA's inside of SGLang 0.5.23, V4's among them",
)
AS_FLASH_MLA = EnvVar(
    "SNAPMLA_AS_FLASH_MLA",
    "0",
    "1 lets `import flash_mla` find snapmla, with the wheel `snapmla-as-flash-mla`; tensors: "
    "and its `get_mla_metadata` with arguments gives two tensors",
)
TEST_GPU = EnvVar("SNAPMLA_TEST_GPU", "1", "0 skips the tests that need a CUDA device")
TABLE: tuple[EnvVar, ...] = (
    VARIANT_DIR,
    NO_JIT,
    SOFTGPU_ARCH,
    CHECK_PLAN,
    PROFILE_NAMES,
    LOG,
    DUMP,
    DUMP_WHEN,
    DUMP_MB,
    VLLM_SPARSE,
    VLLM_FLASHMLA,
    SGLANG_FLASHMLA,
    EnvVar(
        "SNAPMLA_CUDA", "", "CUDA major that codegen builds for, 12 or 13; the driver's if empty"
    ),
    AS_FLASH_MLA,
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
    EnvVar(
        "SNAPMLA_SGLANG",
        "",
        "folder of SGLang's releases that tests drive, a per-user one if empty",
    ),
    EnvVar(
        "SNAPMLA_LMDEPLOY",
        "",
        "folder of LMDeploy's releases that tests drive, a per-user one if empty",
    ),
    EnvVar(
        "SNAPMLA_TRANSFORMERS",
        "",
        "folder of transformers' releases that tests drive, a per-user one if empty",
    ),
    TEST_GPU,
)


def is_checkout() -> bool:
    """True if the package runs from a source checkout (so ``build/variants`` is its own)."""
    return (ROOT / "pyproject.toml").is_file() and (ROOT / "codegen").is_dir()


class Place(NamedTuple):
    """A directory of variants.

    Attributes:
        what: it is, in words. writable: whether run-time compiles may go there.
        refused: why variants there are not used, in a sentence, or None.
    """

    what: str
    path: Path
    writable: bool
    refused: str | None = None


def places() -> list[Place]:
    """Folders that are searched for variants, in order; other versions have their own cache."""
    found: list[Place] = []
    if VARIANT_DIR.get():
        found.append(Place(f"`{VARIANT_DIR.name}`", Path(VARIANT_DIR.get()), True))
    if is_checkout():
        path = ROOT / "build" / "variants"
        found.append(Place("the checkout's `build/variants`", path, True))
    packed = PACKAGE / "variants"  # a bundle
    found.append(Place("the package's own `variants`", packed, False))
    found += kernel_wheels()
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


@functools.cache
def kernel_wheels() -> tuple[Place, ...]:
    """Installed packages of variants (``snapmla-kernels-sm90-cu13``), by the name of their entry
    point.

    One that was built from other device sources than this package is refused: its functions may
    take other arguments.  Where this package has no note of its sources (a checkout, a bundle),
    versions are compared.
    """
    found = []
    for entry in sorted(importlib.metadata.entry_points(group=KERNELS), key=lambda e: e.name):
        spec = importlib.util.find_spec(entry.module)
        if spec is None or spec.origin is None or entry.dist is None:
            continue
        name, root = entry.dist.name, Path(spec.origin).parent
        path = root / "variants"
        theirs, ours = _note(root), _note(PACKAGE)
        if ours["sources"]:
            same = ours["sources"] == theirs["sources"]
        else:
            same = theirs["version"] == __version__
        refused = (
            f"{name} {theirs['version'] or 'of no version'} was built from other kernel sources "
            f"than snapmla {__version__}: install both from one release"
        )
        found.append(Place(f"an installed `{name}`", path, False, None if same else refused))
    return tuple(found)


def _note(package: Path) -> dict[str, str]:
    """Version, commit and digest of kernels' sources, as a wheel's build noted them.

    A value that was not noted is "".
    """
    try:
        found = json.loads((package / NOTE).read_text())
    except (OSError, ValueError):
        found = {}
    return {name: str(found.get(name, "")) for name in ("version", "commit", "sources")}


def commit() -> str:
    """The commit that this package was made from, empty where nobody knows."""
    if not is_checkout():
        return _note(PACKAGE)["commit"]
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def variant_dirs() -> list[Path]:
    """Directories searched for variants, in order."""
    return [place.path for place in places() if place.refused is None]


def compile_dir() -> Path:
    """Directory that takes run-time compiles: the first one searched that is no package's.

    Raises RuntimeError that says what to set if there is none.
    """
    found = [place.path for place in places() if place.writable]
    if not found:
        raise RuntimeError(f"this user has no home directory: set {VARIANT_DIR.name}")
    return found[0]
