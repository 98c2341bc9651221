"""Variants for servers with another CPU: ``python -m codegen cross``, aarch64 from x86-64.

A variant is device code and a host half: checks of arguments, TMA descriptors, the launch.  Only
the host half differs between CPUs, so what is built and audited for this machine is the model::

    build/variants/<name>.o           its device code must be found again, byte for byte
    build/variants-aarch64/<name>.o   the same, with a host half for ``Target``
    build/variants-aarch64/<name>.so  linked with launch.c by a compiler for that CPU
    build/variants-aarch64/<name>.json  this machine's record, with another ``host_cpu`` and key

The DSL compiles for other CPUs in its C export and refuses that together with TVM-FFI, where it
writes the object and nowhere else.  So this writes the object itself, by functions of the DSL that
it does not document; ``_export`` says so if they are gone.

The compiler is ``aarch64-linux-gnu-gcc``, or zig's from ``pip install ziglang``.  It links against
a stand-in for libtvm_ffi with the exported names of the one here: which library a variant needs and
what of it is all that the linker looks at.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from codegen import artifacts, link, precompile, same_sass, toolchain
from codegen import compile as compiler
from codegen.artifacts import Record
from dsl_kernels import registry
from dsl_kernels.spec import VariantSpec


@dataclass(frozen=True)
class Target:
    """A CPU that variants are made for.

    Attributes:
        machine: as ``platform.machine`` and wheels' tags have it.
        triple: of the compilers.
        cpu: the oldest server CPU of it whose instructions are used.
        glibc: of the oldest system that zig links for.
    """

    machine: str
    triple: str
    cpu: str
    glibc: str

    def folder(self, native: Path) -> Path:
        """Folder of its variants, beside this machine's."""
        return native.with_name(f"{native.name}-{self.machine}")


TARGETS = {
    "aarch64": Target("aarch64", "aarch64-unknown-linux-gnu", "neoverse-n1", "2.28"),
}
_EXPORTED = re.compile(r"\sD[FO]\s+\.\S+\s+[0-9a-f]+\s+(?:\S+\s+)?(TVMFFI\w+)$", re.MULTILINE)


def machine_of(record: Record) -> str:
    """The machine that a record's library is for, empty: this one."""
    cpus = {target.cpu: target.machine for target in TARGETS.values()}
    return cpus.get(record.host_cpu, "")


def compiler_of(target: Target) -> list[str] | None:
    """Command of a C compiler for a target, None if none is installed."""
    gcc = shutil.which(f"{target.machine}-linux-gnu-gcc")
    if gcc:
        return [gcc]
    if importlib.util.find_spec("ziglang") is not None:
        zig = f"{target.machine}-linux-gnu.{target.glibc}"
        return [sys.executable, "-m", "ziglang", "cc", "-target", zig]
    return None


def refusal(target: Target) -> str | None:
    """Reason why nothing can be built for a target here, for people, or None."""
    if toolchain.tvm_ffi_lib_dir() is None or shutil.which("objdump") is None:
        return f"variants for {target.machine} need apache-tvm-ffi and objdump (binutils) here"
    if compiler_of(target) is None:
        return (
            f"no C compiler for {target.machine} here: install {target.machine}-linux-gnu-gcc "
            f"(Debian: gcc-{target.machine}-linux-gnu), or pip install ziglang"
        )
    return None


# ------------------------------------------------------------------------------------- building


def key(native: Record, target: Target) -> str:
    """Key of a build for a target: a hash of this file, the native build's key, triple and CPU."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update("\0".join([native.key, target.triple, target.cpu]).encode())
    return digest.hexdigest()[:24]


def up_to_date(spec: VariantSpec, native_dir: Path, out_dir: Path, target: Target) -> Record | None:
    """The record of a variant for a target, if it is as it would be built now."""
    native = compiler.up_to_date(spec, native_dir, linked=False)
    record = Record.read(artifacts.paths(out_dir, spec)["json"])
    if native is None or record is None or record.key != key(native, target):
        return None
    good = record.link == link.identity() and artifacts.intact(out_dir, record, "o", "so")
    return record if good else None


def ensure(
    spec: VariantSpec, native_dir: Path, out_dir: Path, target: Target
) -> tuple[Record, bool]:
    """Brings one variant for a target up to date; (record, was it built?).

    Raises:
        BuildError: it is not built for this machine, or its device code came out otherwise.
        RuntimeError: no compiler, or the linker failed.
    """
    with artifacts.lock(out_dir, spec.name):
        found = up_to_date(spec, native_dir, out_dir, target)
        return (found, False) if found is not None else (build(spec, native_dir, out_dir, target),
                                                         True)  # fmt: skip


def build(spec: VariantSpec, native_dir: Path, out_dir: Path, target: Target) -> Record:
    """Like ``ensure``, whatever is there.  ptxas' remarks go to where this process writes."""
    reason, native = refusal(target), compiler.up_to_date(spec, native_dir, linked=False)
    if reason is not None:
        raise RuntimeError(reason)
    if native is None:
        raise compiler.BuildError(
            spec, [f"{native_dir} has no build of these sources for this machine: run `python -m "
                   f"codegen precompile --arch {spec.arch}`"],
        )  # fmt: skip
    files, model = (artifacts.paths(folder, spec) for folder in (out_dir, native_dir))
    compiler.set_target(spec.arch)
    with tempfile.TemporaryDirectory(prefix="snapmla-") as tmp:
        obj, library = Path(tmp, "variant.o"), Path(tmp, "variant.so")
        try:
            _export(spec, Path(tmp), obj, target)
        except Exception as error:
            artifacts.write_atomic(files["log"], f"{error}\n")
            raise compiler.BuildError(spec, [str(error) or type(error).__name__]) from error
        if same_sass.cubins(obj) != same_sass.cubins(model["o"]):
            raise compiler.BuildError(spec, ["the device code is not that of this machine's build"])
        link_for(target, obj, library, native.target, native.flavour)
        record = dataclasses.replace(
            native, key=key(native, target), host_cpu=target.cpu, host_beyond=None,
            link=link.identity(), checksums={},
        )  # fmt: skip
        for suffix in ("json", "so"):
            files[suffix].unlink(missing_ok=True)
        artifacts.write_atomic(files["o"], obj.read_bytes())
        artifacts.write_atomic(files["so"], library.read_bytes())
    artifacts.finish(out_dir, record)
    return record


def _export(spec: VariantSpec, tmp: Path, obj: Path, target: Target) -> None:
    """Compiles a variant and writes its object for a target."""
    toolchain.import_compiler()
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    function, fakes = registry.build(spec)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    gpu = toolchain.target_of(spec.arch)
    options = f"{compiler.OPTIONS} --gpu-arch {gpu} --dump-dir={shlex.quote(str(tmp))}"
    with _relative_sources():
        compiled = cute.compile(function, *fakes.values(), stream, options=options)
    name = compiled.function_name
    try:
        provider: Any = importlib.import_module("cutlass.cutlass_dsl.tvm_ffi_provider")
        native: Any = importlib.import_module("cutlass._mlir._mlir_libs._cutlass_ir")
        module = provider.get_export_module(
            compiled.ir_module, f"__cute_internal_{spec.symbol}",
            preserve_symbols={f"__tvm_ffi_{name}"},
        )  # fmt: skip
        provider.rename_tvm_ffi_function(module, name, spec.symbol)
        native._mlirExecutionEngine.dump_object_file_pic(
            module, str(obj), f"__tvm_ffi_{spec.symbol}", host_triple=target.triple,
            host_cpu=target.cpu, host_features="",
        )  # fmt: skip
    except (ImportError, AttributeError, TypeError) as error:
        raise RuntimeError(
            f"nvidia-cutlass-dsl {toolchain.dsl_version()} does not export for other CPUs as the "
            f"one that this was written for: {error}"
        ) from error


def _relative_sources() -> Any:
    """Names sources in line info as ``compile.py`` does; it is part of the device code compared."""
    location = importlib.import_module("cutlass._mlir.ir").Location  # type: ignore[attr-defined]
    real, root = location.file, f"{artifacts.ROOT}{os.sep}"

    def relative(filename: str, *rest: Any, **named: Any) -> Any:
        return real(filename.removeprefix(root), *rest, **named)

    return mock.patch.object(location, "file", staticmethod(relative))


# -------------------------------------------------------------------------------------- linking


def exported_names() -> list[str]:
    """Functions and data that libtvm_ffi exports for callers in C."""
    folder = toolchain.tvm_ffi_lib_dir()
    assert folder is not None
    done = subprocess.run(
        ["objdump", "-T", str(folder / "libtvm_ffi.so")], capture_output=True, text=True
    )
    found = sorted(set(_EXPORTED.findall(done.stdout)))
    if done.returncode or not found:
        raise RuntimeError(f"names of libtvm_ffi.so cannot be read: {done.stderr.strip()}")
    return found


@functools.cache
def _stand_in(target: Target) -> bytes:
    """A library with libtvm_ffi's name and exported names, for the linker alone."""
    with tempfile.TemporaryDirectory() as tmp:
        source, out = Path(tmp, "names.c"), Path(tmp, "libtvm_ffi.so")
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in exported_names()))
        soname = "-Wl,-soname,libtvm_ffi.so"
        _run(target, "-shared", "-fPIC", "-O2", soname, "-o", str(out), str(source))
        return out.read_bytes()


@functools.cache
def _launch_object(target: Target, arch: str, flavour: str) -> bytes:
    """``launch.c`` for a target."""
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp, "launch.o")
        facts = [f'-DSNAPMLA_ARCH="{arch}"', f"-DSNAPMLA_TOOLKIT={flavour.removeprefix('cu')}"]
        _run(target, *link.COMPILE, *facts, str(link.SOURCE), "-o", str(out))
        return out.read_bytes()


def link_for(target: Target, obj: Path, out: Path, arch: str, flavour: str) -> None:
    """``link.link`` for a target, into ``out``.

    Raises:
        RuntimeError: with the compiler's message.
    """
    with tempfile.TemporaryDirectory() as tmp:
        launch, exports, ffi = (Path(tmp, n) for n in ("launch.o", "exports.map", "libtvm_ffi.so"))
        launch.write_bytes(_launch_object(target, arch, flavour))
        exports.write_text(link.EXPORTS)
        ffi.write_bytes(_stand_in(target))
        version = f"-Wl,--version-script={exports}"
        inputs = [str(obj), str(launch), f"-L{tmp}", "-ltvm_ffi", "-ldl"]
        _run(target, *link.LINK, version, "-o", str(out), *inputs)
    os.chmod(out, 0o644)


def _run(target: Target, *words: str) -> None:
    command = [*(compiler_of(target) or ()), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"failed: {shlex.join(command)}\n{done.stderr.strip()}")


# ------------------------------------------------------------------------------------------ many


def build_all(
    specs: Sequence[VariantSpec], native_dir: Path, out_dir: Path, target: Target, jobs: int,
    progress: Callable[[str], None],
) -> precompile.Report:  # fmt: skip
    """``ensure`` for variants of one architecture, in worker processes.

    Args:
        progress: called with the name of each variant that is finished.
    """
    report = precompile.Report()
    with precompile.workers(specs[0].arch, min(jobs, len(specs))) as executor:
        futures = {executor.submit(_one, s, native_dir, out_dir, target): s for s in specs}
        for future in as_completed(futures):
            name = futures[future].name
            outcome = future.result()
            if isinstance(outcome, list):
                report.failed[name] = outcome
            else:
                record, built = outcome
                (report.built if built else report.reused)[name] = record
            progress(name)
    return report


def _one(spec: VariantSpec, native_dir: Path, out_dir: Path, target: Target) -> precompile.Outcome:
    with open(os.devnull, "wb") as nowhere:  # ptxas' remarks, which this machine's build has read
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        return ensure(spec, native_dir, out_dir, target)
    except compiler.BuildError as error:
        return error.problems
    except Exception as error:  # one that fails must not stop the others
        return [f"{type(error).__name__}: {error}"]
