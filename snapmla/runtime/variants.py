"""Finds and loads compiled variants: on a GPU through tvm_ffi, on CPU tensors through softgpu.

A variant is looked up by its name in ``env.variant_dirs()``: as ``<name>.json`` beside its files,
or, where a bundle was unpacked, in the directory's ``bundle.json``.  If it is missing, damaged,
older than its sources or built for a newer CUDA than the driver's, and the compiler is installed,
it is compiled in a subprocess, announced on the log, and kept on disk; ``SNAPMLA_NO_JIT=1``
forbids that: then, or without the compiler, an outdated one runs, and the log says so.  What is
loaded stays loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsl_kernels import registry
from dsl_kernels.families import ARCHS, TARGETS, UNTESTED
from dsl_kernels.spec import VariantSpec
from snapmla import checks
from snapmla.errors import UnsupportedDeviceError, VariantError
from snapmla.runtime import env

Kernel = Callable[..., Any]
log = logging.getLogger("snapmla")

BUNDLE = "bundle.json"  # all records of a bundle's variants
OLDEST_CUDA = 12  # major that variants can be built for
_ARCH_OF_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_100a"}
# Where other projects' kernels serve MLA, by the major of a compute capability.
_ELSEWHERE = {
    12: "FlashInfer's sparse MLA kernels for SM120 and SM121, and vLLM's Triton fallback, serve "
    "there"
}
_kernels: dict[tuple[VariantSpec, str], Kernel] = {}
_modules: list[Any] = []  # libraries must outlive the functions taken from them
_lock = threading.RLock()
_told: set[str] = set()  # what was said once
_met: set[tuple[int, int]] = set()  # capabilities of the GPUs that ``arch_of`` was asked for


@dataclass(frozen=True)
class Artifact:
    """A built variant on disk; ``library`` is None if it was not linked.

    ``cuda`` is the CUDA major it was built with, 0 if unknown; ``arch`` its architecture;
    ``target`` what its cubin was assembled for (``dsl_kernels.families.TARGETS``); ``checksums``
    its files' SHA-256 by suffix, as far as they are known.
    """

    directory: Path
    name: str
    symbol: str
    source_hash: str
    cuda: int = 0
    arch: str = ""
    target: str = ""
    checksums: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def obj(self) -> Path:
        return self.directory / f"{self.name}.o"

    @property
    def ptx(self) -> Path:
        return self.directory / f"{self.name}.ptx"

    @property
    def library(self) -> Path | None:
        path = self.directory / f"{self.name}.so"
        return path if path.is_file() else None


class Damage(NamedTuple):
    """A file of a build that is not as it was written, and what is wrong with it."""

    path: Path
    what: str

    def __str__(self) -> str:
        return f"{self.path} is damaged: {self.what}"


@functools.lru_cache(maxsize=64)
def arch_of(device: torch.device) -> str:
    """Compilation target for tensors on ``device``.

    CPU tensors run on the software GPU, as ``SNAPMLA_SOFTGPU_ARCH`` (sm_90a by default).
    Raises ValueError if that is no architecture, UnsupportedDeviceError for other devices.  Logs a
    warning, once a device, where the kernels have been executed on the software GPU only.
    """
    if device.type == "cpu":
        checks.choice(env.SOFTGPU_ARCH.name, env.SOFTGPU_ARCH.get(), ARCHS)
        return env.SOFTGPU_ARCH.get()
    if device.type != "cuda":
        raise UnsupportedDeviceError(
            f"device {device}: kernels are built for cuda (sm_90, sm_100); cpu tensors run on the "
            "software GPU"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability not in _ARCH_OF_CAPABILITY:
        raise UnsupportedDeviceError(unserved(torch.cuda.get_device_name(device), capability))
    _met.add(capability)
    arch = _ARCH_OF_CAPABILITY[capability]
    if arch in UNTESTED:
        log.warning(
            "%s: the %s kernels have been executed on the software GPU only, never on hardware; "
            "compare results with snapmla.reference", torch.cuda.get_device_name(device), arch,
        )  # fmt: skip
    return arch


def arch_of_capability(major: int, minor: int) -> str | None:
    """Compilation target for a card of that compute capability; None where no kernel runs."""
    return _ARCH_OF_CAPABILITY.get((major, minor))


def unserved(name: str, capability: tuple[int, int]) -> str:
    """Reason why no kernel runs on a card of a compute capability, and what does there."""
    reason = (
        f"{name} is sm_{capability[0]}{capability[1]}: kernels are built for sm_90 (Hopper), "
        "sm_100 and sm_103 (Blackwell)"
    )
    elsewhere = _ELSEWHERE.get(capability[0])
    return "; ".join(filter(None, (reason, elsewhere, "snapmla.reference runs anywhere")))


def kernel(spec: VariantSpec, device_type: str) -> Kernel:
    """The callable of one variant, loaded once per process.

    Args:
        device_type: ``cuda`` or ``cpu`` (software GPU).

    Raises:
        VariantError: it is not there and cannot or must not be compiled here.
    """
    found = _kernels.get((spec, device_type))
    if found is not None:
        return found
    with _lock:
        if (spec, device_type) not in _kernels:
            artifact = find_or_build(spec, need_library=device_type == "cuda")
            _kernels[spec, device_type] = _watched(spec, load(artifact, device_type))
        return _kernels[spec, device_type]


def _watched(spec: VariantSpec, loaded: Kernel) -> Kernel:
    """Returns a loaded kernel, wrapped if ``SNAPMLA_LOG`` is on or ``SNAPMLA_DUMP`` is set."""
    if not env.LOG.enabled() and not env.DUMP.get():
        return loaded
    from snapmla.runtime import watch

    return watch.watched(loaded, spec, argument_names(spec))


def loaded() -> list[VariantSpec]:
    """The variants that this process has loaded."""
    return [spec for spec, _ in _kernels]


def forget() -> None:
    """Drops all loaded kernels, so that the next call sees rebuilt files."""
    with _lock:
        _kernels.clear()
        for cached in _forget_hooks:
            cached()


_forget_hooks: list[Callable[[], None]] = []


def on_forget(hook: Callable[[], None]) -> None:
    """Registers the clearing of a cache that holds kernels of this module."""
    _forget_hooks.append(hook)


def load(artifact: Artifact, device_type: str) -> Kernel:
    """Loads one artifact.  Raises VariantError with the reason if that fails."""
    if (wrong := damage(artifact, need_library=device_type == "cuda")) is not None:
        raise VariantError(str(wrong))
    record = _record(artifact.directory, artifact.name) or {}
    _expect_sources(artifact, record)
    if device_type == "cpu":
        import softgpu

        names = softgpu.Names(
            _names(record), tuple((name, at) for name, at in record.get("shared_plan") or ())
        )
        return softgpu.load(artifact.obj, artifact.ptx, artifact.symbol, names=names)
    if artifact.library is None:
        raise VariantError(
            f"{artifact.name}: {artifact.directory} has the object but no .so; run "
            "`python -m codegen precompile` on a machine with a C compiler"
        )
    if (reason := too_new(artifact) or other_cards(artifact)) is not None:
        raise VariantError(reason)
    import tvm_ffi

    try:
        module = tvm_ffi.load_module(str(artifact.library))
    except Exception as error:
        raise VariantError(f"{artifact.library}: cannot be loaded: {error}") from error
    _modules.append(module)
    function = module[artifact.symbol]
    # One call may launch two kernels, the second of which reads what the first left in a workspace:
    # another Python thread must not come between them.  Holding on is 80 ns faster, too.
    function.release_gil = False
    return function


def _expect_sources(artifact: Artifact, record: dict[str, Any]) -> None:
    """Raises VariantError for a variant of an older release that looks like one of this."""
    wanted = VariantSpec.from_name(artifact.name).family.relies_on
    sources = record.get("sources")
    if wanted and sources is not None and not any(name.endswith(wanted) for name in sources):
        raise VariantError(
            f"{artifact.name} in {artifact.directory} is of an older release (made without "
            f"{wanted}): build it anew, `make precompile` in a checkout"
        )


def argument_names(spec: VariantSpec) -> tuple[str, ...]:
    """Names of a built variant's arguments, in ABI order.  Raises VariantError if it is not built.

    Host functions know the order; tools call by name (``dsl_kernels.arguments.ordered``).
    """
    artifact = find(spec)
    if artifact is None:
        raise VariantError(f"variant {spec.name} is not built")
    return _names(_record(artifact.directory, artifact.name) or {})


def _names(record: dict[str, Any]) -> tuple[str, ...]:
    return tuple(argument["name"] for argument in record.get("arguments") or ())


def find(spec: VariantSpec, directories: Iterable[Path] | None = None) -> Artifact | None:
    """The first built artifact of ``spec`` on the search path, None if there is none."""
    for directory in env.variant_dirs() if directories is None else directories:
        record = _record(directory, spec.name)
        if record is None:
            continue
        cuda = str(record.get("flavour", "")).removeprefix("cu")
        artifact = Artifact(
            directory,
            spec.name,
            spec.symbol,
            source_hash=record.get("source_hash", ""),
            cuda=int(cuda) if cuda.isdigit() else 0,
            arch=spec.arch,
            target=record.get("target") or spec.arch,  # of older builds
            checksums=_checksums(record),
        )
        if artifact.obj.is_file() or artifact.library is not None:
            return artifact
    return None


def _record(directory: Path, name: str) -> dict[str, Any] | None:
    """Record of a variant in a directory: its own file, else the bundle's entry; None if damaged.

    ``manifest.json`` of a directory that is built in does not count: it outlives a killed build.
    """
    try:
        found = json.loads((directory / f"{name}.json").read_text())
    except OSError:
        return _bundled(directory).get(name)
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("name") != name:
        return None
    if "digest" in found and found.pop("digest") != _digest(found):
        return None
    return found


def _digest(record: dict[str, Any]) -> str:
    """Digest as ``codegen.artifacts`` wrote it into the record; older builds' have none."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _checksums(record: dict[str, Any]) -> dict[str, str]:
    """SHA-256 of a variant's files by suffix; a bundle has libraries only."""
    if "sha256" in record:
        return {"so": record["sha256"]}
    return record.get("checksums") or {}


def damage(artifact: Artifact, need_library: bool) -> Damage | None:
    """The first file that a load would read and that is not as it was built, None if all are.

    Args:
        need_library: the library is what will be loaded, not object and PTX.
    """
    for suffix in ("so",) if need_library else ("o", "ptx"):
        path = artifact.directory / f"{artifact.name}.{suffix}"
        if suffix not in artifact.checksums or not path.is_file():
            continue  # of an older build, or missing, which is another error
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != artifact.checksums[suffix]:
            return Damage(path, f"its {len(data):,} bytes are not those that were built")
    return None


def _damaged_record(name: str) -> Damage | None:
    """The first record of a variant that is there and cannot be used, None if there is none."""
    for directory in env.variant_dirs():
        path = directory / f"{name}.json"
        if path.is_file() and _record(directory, name) is None:
            return Damage(path, "it is not the record of this variant's build")
    return None


def _bundled(directory: Path) -> dict[str, dict[str, Any]]:
    """Records by name of a directory that came with a bundle, {} for others."""
    path = directory / BUNDLE
    try:
        return _parsed(path, path.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError):
        return {}


@functools.lru_cache(maxsize=8)
def _parsed(path: Path, _mtime_ns: int) -> dict[str, dict[str, Any]]:
    return {record["name"]: record for record in json.loads(path.read_text())["variants"]}


def available(directories: Iterable[Path] | None = None) -> list[VariantSpec]:
    """Built variants on the search path (or in ``directories``), by name, each once."""
    found: dict[str, VariantSpec] = {}
    for directory in env.variant_dirs() if directories is None else directories:
        names = {path.stem for path in directory.glob("*_sm*.json")} | set(_bundled(directory))
        for name in sorted(names - set(found)):
            try:
                spec = VariantSpec.from_name(name)
            except (ValueError, TypeError):
                continue
            if _record(directory, name) is not None:
                found[name] = spec
    return [found[name] for name in sorted(found)]


@functools.cache
def driver_version() -> tuple[int, int] | None:
    """(major, minor) of the newest CUDA that the installed driver supports, None without one."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def too_new(artifact: Artifact) -> str | None:
    """Reason why the driver cannot load the variant, or None: it was built with a newer CUDA."""
    driver = driver_version()
    if driver is None or artifact.cuda <= driver[0]:
        return None
    reason = (
        f"variant {artifact.name} in {artifact.directory} was built with CUDA {artifact.cuda} and "
        f"the driver supports CUDA {driver[0]}.{driver[1]}: update the driver"
    )
    if driver[0] < OLDEST_CUDA:
        return reason
    return f"{reason}, or build with `make precompile CUDA={driver[0]}`"


def other_cards(artifact: Artifact, met: Iterable[tuple[int, int]] | None = None) -> str | None:
    """Reason why a card does not load the variant, or None: its cubin was assembled for others.

    Args:
        met: compute capabilities of cards; None: of those that calls have named.
    """
    for capability in sorted(_met if met is None else met):
        serves = TARGETS.get(artifact.target, ())
        if _ARCH_OF_CAPABILITY.get(capability) == artifact.arch and capability not in serves:
            return (
                f"variant {artifact.name} in {artifact.directory} was assembled for "
                f"{artifact.target}, which sm_{capability[0]}{capability[1]} does not load: "
                f"`make precompile ARCH={artifact.arch}` with CUDA 12.9 or newer builds for all "
                "cards of the family"
            )
    return None


def find_or_build(spec: VariantSpec, *, need_library: bool) -> Artifact:
    """Like ``find``, but compiles what is missing or outdated, if that is allowed here."""
    if registry.module_name(spec) is None:
        raise VariantError(_no_kernel(spec))
    artifact = find(spec)
    refusal = jit_refusal()
    wrong = _damaged_record(spec.name) if artifact is None else damage(artifact, need_library)
    if artifact is not None and wrong is None:
        complete = artifact.library is not None if need_library else artifact.ptx.is_file()
        reason = too_new(artifact) or other_cards(artifact) if need_library else None
        if complete and reason is not None:
            if refusal is not None:
                raise VariantError(reason)
        elif complete and refusal is not None:
            _tell_outdated(spec, artifact, refusal)
            return artifact
        elif complete and not _outdated(spec, artifact):
            return artifact
    if refusal is not None:
        raise VariantError(_refused(spec, artifact, wrong, refusal, need_library))
    if wrong is not None:
        log.warning("%s", wrong)  # compiling is announced next
    return compile_variant(spec)


def _refused(
    spec: VariantSpec, artifact: Artifact | None, wrong: Damage | None, refusal: str, library: bool
) -> str:
    """Message about a variant that cannot be used as it is, if compiling is refused."""
    if wrong is not None and (wrong.path.parent / BUNDLE).is_file():
        return f"{wrong}, and {refusal}: unpack the bundle again"
    if wrong is not None:
        command = f"`python -m codegen build {spec.name} --out {wrong.path.parent}`"
        return f"{wrong}, and {refusal}: put the built file back, or run {command}"
    if artifact is not None and not library:
        return (
            f"variant {spec.name} in {artifact.directory} has no PTX: the software GPU, which CPU "
            "tensors run on, needs a build by `python -m codegen precompile`, not a bundle"
        )
    return _missing(spec, refusal)


def jit_refusal() -> str | None:
    """Reason why variants cannot be compiled in this process, or None."""
    if env.NO_JIT.enabled():
        return f"{env.NO_JIT.name} forbids compiling"
    if not (env.ROOT / "codegen" / "compile.py").is_file():
        return (
            "the compiler is not installed (a source checkout and `pip install .` have it, bundles "
            "and the wheels of `make wheels` do not)"
        )
    if importlib.util.find_spec("cutlass") is None:
        return "the compiler is not installed (pip install 'snapmla[compile]')"
    return None


def _outdated(spec: VariantSpec, artifact: Artifact) -> bool:
    """True if the kernel's sources here are not those of the build, or the build must not ship.

    False where they cannot be compared: in a bundle, or where ``codegen`` is something else.
    """
    if not _codegen_is_ours():
        return False
    if other_sources(spec, artifact):
        return True
    from codegen import artifacts, audit

    record = artifacts.Record.read(artifact.directory / f"{artifact.name}.json")
    return record is not None and bool(audit.problems(record))


def other_sources(spec: VariantSpec, artifact: Artifact) -> bool:
    """True if the kernel's sources here are not those of the build; False as of ``_outdated``.

    Nothing is read where no sources of kernels are; else milliseconds a variant.
    """
    if not _codegen_is_ours():
        return False
    from codegen import closure

    try:
        return closure.sources(spec)[0] != artifact.source_hash
    except SyntaxError:  # somebody is at it
        return True


def _tell_outdated(spec: VariantSpec, artifact: Artifact, refusal: str) -> None:
    """Logs, once a variant, that a build runs which is not of the sources that are here."""
    if artifact.source_hash and spec.name not in _told and other_sources(spec, artifact):
        _told.add(spec.name)
        log.warning(
            "variant %s in %s is outdated and runs as it is, as %s: it was built from other kernel "
            "sources than those here (`python -m codegen build %s`)",
            spec.name, artifact.directory, refusal, spec.name,
        )  # fmt: skip


def _codegen_is_ours() -> bool:
    """True if ``import codegen`` gives the package beside this one, not the application's."""
    try:
        found = importlib.util.find_spec("codegen")
    except ValueError:  # a module of that name without a spec
        return False
    ours = env.ROOT / "codegen" / "__init__.py"
    return found is not None and found.origin is not None and Path(found.origin).resolve() == ours


def _no_kernel(spec: VariantSpec) -> str:
    """Message about a spec that no kernel module builds."""
    what = f"{spec.arch} {spec.op} kernel"
    if (pipeline := dict(spec.values).get("pipeline")) is not None:
        what += f" of pipeline {pipeline}"
    others = (spec.replace(arch=arch) for arch in ARCHS)
    near = next((s.name for s in others if registry.module_name(s) is not None), None)
    hint = f"; the nearest one that can be built is {near}" if near else ""
    return f"variant {spec.name}: no {what} exists yet{hint}"


def _missing(spec: VariantSpec, refusal: str) -> str:
    close = nearest(spec)
    hint = f"; the nearest one there is {close}" if close else "; no variant of this op is there"
    archs = {other.arch for other in available()}
    if archs and spec.arch not in archs:
        hint = f"; all variants there are for {', '.join(sorted(archs))}, not for {spec.arch}"
    refused = [place.refused for place in env.places() if place.refused is not None]
    hint += "".join(f"; {reason}" for reason in refused)
    looked = ", ".join(str(d) for d in env.variant_dirs() if d.is_dir()) or "no directory"
    said = (
        f"variant {spec.name} is not built and {refusal}{hint} (looked in {looked}); `python -m "
        f"codegen build {spec.name}` builds it where the compiler is"
    )
    points = spec.family.points(spec.arch)
    if spec not in (VariantSpec(op=spec.op, arch=spec.arch, **values) for values in points):
        name = spec.name.rpartition("_")[0]
        said += f"; no default wheel has it: make wheels ARCH={spec.arch} FILTER='*,{name}'"
    return said


def nearest(spec: VariantSpec) -> str | None:
    """Name of the built variant of the same op and arch that differs in the fewest axes."""
    best: tuple[int, float, str] | None = None
    for other in available():
        if other.arch != spec.arch or other.op != spec.op:
            continue
        differing = [(a, b) for (_, a), (_, b) in zip(spec.values, other.values) if a != b]
        distance = sum(abs(a - b) for a, b in differing if isinstance(a, int))
        candidate = (len(differing), float(distance), other.name)
        best = candidate if best is None else min(best, candidate)
    return best[2] if best else None


def compile_variant(spec: VariantSpec) -> Artifact:
    """Compiles ``spec`` in a subprocess into ``env.compile_dir()``.

    Processes that want the same variant wait for one another (codegen takes a file lock); whoever
    comes second finds it built.  Raises VariantError with the compiler's message.
    """
    what = f"variant {spec.name} is not built and cannot be compiled"
    try:
        directory = env.compile_dir()
        directory.mkdir(parents=True, exist_ok=True)
    except RuntimeError as error:
        raise VariantError(f"{what}: {error}") from error
    except OSError as error:
        hint = f"{env.VARIANT_DIR.name} names another directory"
        raise VariantError(f"{what}: {error}; {hint}") from error
    log.warning("compiling variant %s into %s (once; takes seconds)", spec.name, directory)
    # The codegen beside this package, whatever else has that name: not the current directory's.
    path = os.pathsep.join([str(env.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-P", "-m", "codegen", "build", spec.name, "--out", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        reasons = [_killed(done.returncode), (done.stdout + done.stderr).strip()]
        message = ": ".join(filter(None, reasons))
        raise VariantError(f"variant {spec.name} did not compile: {message}")
    artifact = find(spec, [directory])
    if artifact is None:
        raise VariantError(f"variant {spec.name}: compiled, but not found in {directory}")
    if artifact.library is None and "library" not in _told:
        _told.add("library")
        log.warning(
            "no C compiler was found ($CC, cc, gcc, clang): variants that are compiled here have "
            "no library, which a GPU loads"
        )
    return artifact


def _killed(code: int) -> str:
    """Message about a compiler that a signal ended; empty if none did."""
    if code >= 0:
        return ""
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    if -code == signal.SIGKILL:
        return f"the compiler was ended by {name} (memory that runs out is the usual cause)"
    return f"the compiler was ended by {name}"
