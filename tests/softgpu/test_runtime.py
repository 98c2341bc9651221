"""Software GPU: what runtime.c says to an object when a CUDA call fails."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from softgpu import runtime

# The two ways an exported object meets an error: its kernels cannot be loaded, a launch failed.
SOURCE = r"""
#include <stdint.h>
extern int cuda_dialect_init_library_once(void **, int (*)(void **), int (*)(void **, int),
                                          void (*)(const char *, const char *));
extern void CuteDSLRT_TVMFFISetRaisedCudaError(
    void (*)(const char *, const char **, int32_t), int);
extern void TVMFFIErrorSetRaisedFromCStr(const char *, const char *);
extern void TVMFFIErrorSetRaisedFromCStrParts(const char *, const char **, int32_t);

static int broken(void **lib) { *lib = 0; return 218; }
static int fine(void **lib) { *lib = lib; return 0; }
static int no_device(void **lib, int device) { (void)lib; return device ? 0 : 209; }

static int start(int (*init)(void **), int (*load)(void **, int)) {
  void *lib = 0;
  return cuda_dialect_init_library_once(&lib, init, load, TVMFFIErrorSetRaisedFromCStr);
}
#define EXPORT(name) int __tvm_ffi_##name(void *self, const void *args, int n, void *result)
EXPORT(unreadable) { return start(broken, 0); }
EXPORT(unloadable) { return start(fine, no_device); }
EXPORT(loadable) { return start(fine, 0); }
EXPORT(failing) {
  CuteDSLRT_TVMFFISetRaisedCudaError(TVMFFIErrorSetRaisedFromCStrParts, 700);
  return -1;
}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> runtime.HostModule:
    folder: Path = tmp_path_factory.mktemp("object")
    (folder / "errors.c").write_text(SOURCE)
    obj = folder / "errors.o"
    compiler = runtime._compiler()
    subprocess.run([compiler, "-c", "-fPIC", "-o", obj, folder / "errors.c"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOFTGPU_CACHE_DIR", str(folder))
        return runtime.HostModule(obj, lambda launch: None)


@pytest.mark.parametrize(
    ("symbol", "text"),
    [
        ("unreadable", "softgpu: the kernel library cannot be loaded, CUDA error 218"),
        ("unloadable", "softgpu: the kernel library cannot be loaded, CUDA error 209"),
        ("failing", "softgpu: CUDA error 700"),
    ],
)
def test_errors_arrive_as_written(host: runtime.HostModule, symbol: str, text: str) -> None:
    with pytest.raises(RuntimeError) as error:
        host.call(symbol)
    assert type(error.value) is RuntimeError and str(error.value) == text


def test_no_error_where_nothing_fails(host: runtime.HostModule) -> None:
    host.call("loadable")


def test_launch_structure_matches_the_c_one() -> None:
    """Python's launch_t has the size that runtime.c's has."""
    source = (Path(runtime.__file__).parent / "runtime.c").read_text()
    struct = source[source.index("typedef struct {\n  const char *kernel") :]
    struct = struct[: struct.index("launch_t;") + len("launch_t;")]
    text = f"#include <stdint.h>\n{struct}\n_Static_assert(sizeof(launch_t) == "
    text += f'{ctypes.sizeof(runtime._Launch)}, "size");\n'
    command = [runtime._compiler(), "-fsyntax-only", "-x", "c", "-"]
    subprocess.run(command, input=text, text=True, check=True)
