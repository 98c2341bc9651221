"""Software GPU: what runtime.c answers to an object: errors, tensor maps."""

from __future__ import annotations

import ctypes
import errno
import subprocess
from pathlib import Path

import pytest

from softgpu import runtime
from softgpu.ops.tma import decode_map

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

/* Encodes the map that `wanted` describes into it, and leaves the driver's code there. */
struct { uint64_t map[16], address, extent[5], stride[4]; uint32_t box[5], step[5];
         int type, rank, interleave, swizzle, code; } *wanted;
extern int _cuTensorMapEncodeTiled(uint64_t *, int, unsigned, uint64_t, const uint64_t *,
                                   const uint64_t *, const uint32_t *, const uint32_t *, int, int,
                                   int, int);
EXPORT(encode) {
  wanted = *(void **)((const char *)args + 8); /* TVMFFIAny: type, padding, value */
  wanted->code = _cuTensorMapEncodeTiled(
      wanted->map, wanted->type, wanted->rank, wanted->address, wanted->extent, wanted->stride,
      wanted->box, wanted->step, wanted->interleave, wanted->swizzle, 0, 0);
  return 0;
}
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


@pytest.mark.parametrize("full", [False, True])
def test_a_folder_that_takes_nothing_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, full: bool
) -> None:
    """A file in its place stands for a read-only one; of a full disk linkers say not even that."""
    folder = tmp_path / "folder"
    if not full:
        folder.touch()
    failed = subprocess.CompletedProcess([], 1, "", "collect2: error: ld returned 1 exit status")
    monkeypatch.setenv("SOFTGPU_CACHE_DIR", str(folder))
    monkeypatch.setattr(runtime.subprocess, "run", lambda *command, **options: failed)
    (tmp_path / "a.o").write_bytes(b"object")
    with monkeypatch.context() as patch:
        if full:
            patch.setattr(runtime.os, "fsync", no_space)
        with pytest.raises(runtime.ToolchainError) as caught:
            runtime.link(tmp_path / "a.o")
    message = str(caught.value)
    assert message.startswith(f"softgpu: {folder}, the folder of linked objects, cannot be written")
    assert message.endswith("SOFTGPU_CACHE_DIR names another"), message
    if full:
        with pytest.raises(runtime.ToolchainError, match="ld returned 1 exit status"):
            runtime.link(tmp_path / "a.o")
        assert not list(folder.iterdir()), "something half was left"


def no_space(fd: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


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


class _Wanted(ctypes.Structure):
    _fields_ = (
        ("map", ctypes.c_uint64 * 16), ("address", ctypes.c_uint64),
        ("extent", ctypes.c_uint64 * 5), ("stride", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint32 * 5), ("step", ctypes.c_uint32 * 5),
        *((name, ctypes.c_int) for name in ("type", "rank", "interleave", "swizzle", "code")),
    )  # fmt: skip


def encode(host: runtime.HostModule, **fields: object) -> _Wanted:
    """Runs the driver's encoder of tensor maps; by default of a valid map."""
    wanted = _Wanted(
        address=0x7F0000001230, extent=(640, 70, 3, 1 << 32, 5), stride=(1280, 89600, 1 << 30,
        (1 << 36) - 16), box=(64, 7, 1, 256, 2), step=(1,) * 5, type=6, rank=5, swizzle=3,
    )  # fmt: skip
    for name, value in fields.items():
        setattr(wanted, name, value)
    host.call("encode", ctypes.c_void_p(ctypes.addressof(wanted)))
    return wanted


@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_tensor_maps_are_encoded_as_they_are_decoded(host: runtime.HostModule, rank: int) -> None:
    elements = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}
    for code, element in elements.items():  # CUtensorMapDataType
        wanted = encode(host, rank=rank, type=code, swizzle=rank % 4)
        assert wanted.code == 0
        found = decode_map(bytes(wanted.map))
        assert (found.address, found.rank, found.element) == (wanted.address, rank, element)
        assert found.extent == tuple(wanted.extent[:rank]) and found.swizzle == rank % 4
        assert found.stride == tuple(wanted.stride[: rank - 1])
        assert found.box == tuple(wanted.box[:rank])


@pytest.mark.parametrize("wrong", [
    {"address": 8}, {"rank": 6}, {"rank": 0}, {"type": 10}, {"swizzle": 4}, {"interleave": 1},
    {"stride": (8, 16, 16, 16)}, {"box": (257, 1, 1, 1, 1)}, {"extent": (0, 1, 1, 1, 1)},
    {"step": (2, 1, 1, 1, 1)},
], ids=str)  # fmt: skip
def test_tensor_maps_that_the_driver_refuses(host: runtime.HostModule, wrong: dict) -> None:
    assert encode(host, **wrong).code == 1
