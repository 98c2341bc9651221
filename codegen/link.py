"""Object file to loadable library.

``static``: the DSL's small launch runtime and the CUDA runtime are linked in; only libtvm_ffi stays
a needed library, and the ``tvm_ffi`` package has loaded it by then.  ``dynamic``: where no
libcudart_static.a is found, the result needs libcute_dsl_runtime.so beside libtvm_ffi.so.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path

from codegen import toolchain

# The one symbol that the static launch runtime lacks.
_STUB = """
extern void TVMFFIErrorSetRaisedFromCStr(const char *, const char *);
extern const char *cudaGetErrorString(int);
extern int snprintf(char *, unsigned long, const char *, ...);
void CuteDSLRT_TVMFFISetRaisedCudaError(int code) {
  char text[256];
  snprintf(text, sizeof text, "CUDA error %d at launch: %s", code, cudaGetErrorString(code));
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", text);
}
"""


def mode() -> str | None:
    """``static``, ``dynamic``, or None if nothing can be linked on this machine."""
    libs = toolchain.dsl_lib_dir()
    if toolchain.c_compiler() is None or libs is None or toolchain.tvm_ffi_lib_dir() is None:
        return None
    archive = libs / "libcuda_dialect_runtime_static.a"
    return "static" if archive.is_file() and toolchain.cudart_static() else "dynamic"


@functools.cache
def _stub_object() -> bytes:
    with tempfile.TemporaryDirectory() as tmp:
        source, out = Path(tmp, "stub.c"), Path(tmp, "stub.o")
        source.write_text(_STUB)
        _run([str(toolchain.c_compiler()), "-fPIC", "-O2", "-c", str(source), "-o", str(out)])
        return out.read_bytes()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"link failed: {' '.join(command)}\n{done.stderr.strip()}")


def link(obj: Path, out: Path) -> str | None:
    """Links ``obj`` into ``out`` (replaced atomically).

    Returns the mode used, None if this machine cannot link.  Raises RuntimeError with the linker's
    message if linking fails.
    """
    how = mode()
    if how is None:
        return None
    libs, ffi = toolchain.dsl_lib_dir(), toolchain.tvm_ffi_lib_dir()
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as tmp:
        result = Path(tmp, out.name)
        command = [str(toolchain.c_compiler()), "-shared", "-s", "-o", str(result), str(obj)]
        if how == "static":
            stub = Path(tmp, "stub.o")
            stub.write_bytes(_stub_object())
            # Local symbols only: several variants share one process, each with its own runtime.
            command += ["-Wl,--no-undefined", "-Wl,--exclude-libs,ALL", str(stub)]
            command += [f"{libs}/libcuda_dialect_runtime_static.a"]
            command += [f"-L{toolchain.cudart_static()}", "-lcudart_static"]
            command += [f"-L{ffi}", "-ltvm_ffi", "-ldl", "-lrt", "-lpthread"]
        else:
            command += [f"-L{libs}", "-lcute_dsl_runtime", f"-L{ffi}", "-ltvm_ffi"]
        _run(command)
        os.replace(result, out)
    return how
