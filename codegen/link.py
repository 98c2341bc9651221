"""Object file to loadable library.

The library holds the object and a few kilobytes of our own launch code over the CUDA driver
(``launch.c``); it needs libtvm_ffi, which the ``tvm_ffi`` package has loaded by then, and libc.
Neither the CUDA toolkit nor the DSL's runtime takes part, when linking or when loading.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from codegen import toolchain

SOURCE = Path(__file__).resolve().parent / "launch.c"
COMPILE = ["-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Werror", "-c"]
# Of all that the object defines, callers need its entry only: short symbol tables load faster.
LINK = ["-shared", "-s", "-Wl,--no-undefined", "-Wl,--gc-sections", "-Wl,--build-id=none"]
EXPORTS = "{ global: __tvm_ffi_*; local: *; };\n"


@functools.cache
def identity() -> str | None:
    """Changes when libraries must be linked anew; None if this machine cannot link."""
    if toolchain.c_compiler() is None or toolchain.tvm_ffi_lib_dir() is None:
        return None
    digest = hashlib.sha256(SOURCE.read_bytes())
    digest.update("\0".join([*COMPILE, *LINK, EXPORTS]).encode())
    return f"driver-{digest.hexdigest()[:12]}"


def refusal() -> str | None:
    """Reason why libraries are not linked here, for people, or None."""
    if identity() is not None:
        return None
    if toolchain.c_compiler() is None:
        return "no C compiler here ($CC, cc, gcc, clang): objects, but no libraries for a GPU"
    return "no libtvm_ffi.so here (pip install apache-tvm-ffi): objects, but no libraries for a GPU"


@functools.cache
def _launch_object(arch: str, flavour: str) -> bytes:
    """``launch.c`` compiled for the error messages of one target."""
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp, "launch.o")
        facts = [f'-DSNAPMLA_ARCH="{arch}"', f"-DSNAPMLA_TOOLKIT={flavour.removeprefix('cu')}"]
        _run([str(toolchain.c_compiler()), *COMPILE, *facts, str(SOURCE), "-o", str(out)])
        return out.read_bytes()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"link failed: {' '.join(command)}\n{done.stderr.strip()}")


def link(obj: Path, out: Path, arch: str, flavour: str) -> str | None:
    """Links ``obj``, built for ``arch`` with toolkit ``flavour``, into ``out`` (atomically).

    Returns ``identity()``: None, and nothing is written, if this machine cannot link.  Raises
    RuntimeError with the linker's message if linking fails.
    """
    found = identity()
    if found is None:
        return None
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as tmp:
        launch, exports, result = (Path(tmp, n) for n in ("launch.o", "exports.map", out.name))
        launch.write_bytes(_launch_object(arch, flavour))
        exports.write_text(EXPORTS)
        command = [str(toolchain.c_compiler()), *LINK]
        command += ["-Xlinker", f"--version-script={exports}"]  # -Wl would split a path at commas
        command += ["-o", str(result), str(obj), str(launch)]
        command += [f"-L{toolchain.tvm_ffi_lib_dir()}", "-ltvm_ffi", "-ldl"]
        _run(command)
        os.chmod(result, 0o644)
        os.replace(result, out)
    return found
