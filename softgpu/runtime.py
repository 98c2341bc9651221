"""The seam between a compiled object and the interpreter.

``link`` turns ``kernel.o`` into a shared object with ``runtime.c`` in place of the CUDA runtime
(``cudart.c`` for an object that nvcc made); ``HostModule`` loads an exported CuTe DSL object
through TVM-FFI, ``CudaModule`` one of CUDA C++, and both deliver its launches to a Python function;
``as_cuda`` dresses a CPU tensor as a CUDA one, so that the object's own argument checks run
unchanged.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import SoftGpuError, ToolchainError

_HERE = pathlib.Path(__file__).resolve().parent
_RUNTIME_C = _HERE / "runtime.c"
_CUDART_C = _HERE / "cudart.c"  # includes runtime.c
_CUDA = 2  # DLDeviceType.kDLCUDA
_CALLBACK_FAILED = 719  # cudaErrorLaunchFailure


class _Launch(ctypes.Structure):
    """launch_t of runtime.c."""

    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("pdl", ctypes.c_uint32),
        ("cooperative", ctypes.c_uint32),
        ("attribute_count", ctypes.c_uint32),
        ("dynamic_smem", ctypes.c_uint64),
        ("max_dynamic_smem", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("params", ctypes.POINTER(ctypes.c_void_p)),
    ]


_CallbackType = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Launch))


@dataclass(frozen=True)
class Launch:
    """One kernel launch as the host half of the object issued it.

    Attributes:
        kernel: name of the ``.entry``.
        grid, block, cluster: extents x, y, z; cluster is (1, 1, 1) without the attribute.
        pdl: programmatic stream serialisation (griddepcontrol) was asked for.
        dynamic_smem: bytes.
        max_dynamic_smem: limit set for the kernel by attribute, 0 if never set.
        stream: stream handle.
        params: address of each parameter, in order; valid during the callback only.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    pdl: bool
    cooperative: bool
    dynamic_smem: int
    max_dynamic_smem: int
    stream: int
    params: Any


def cache_dir() -> pathlib.Path:
    """Folder of linked objects: ``SOFTGPU_CACHE_DIR``, else a per-user cache folder.

    Where the home directory cannot be written, a folder under the system's temporary one.
    """
    env = os.environ.get("SOFTGPU_CACHE_DIR")
    if env:
        return pathlib.Path(env)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = pathlib.Path(base) / "snapmla-softgpu"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return pathlib.Path(tempfile.gettempdir()) / f"snapmla-softgpu-{os.getuid()}"
    return path


def c_compiler() -> str | None:
    """The C compiler that links: the first there is of $CC, cc, gcc and clang, None without one."""
    names = (os.environ.get("CC") or "cc", "cc", "gcc", "clang")
    return next((path for path in map(shutil.which, names) if path), None)


def _compiler() -> str:
    found = c_compiler()
    if found is not None:
        return found
    raise ToolchainError(
        "softgpu: no C compiler found (tried $CC, cc, gcc, clang); one is needed once per compiled "
        "variant, to link it with the software runtime"
    )


def link(object_path: str | os.PathLike[str], cuda: bool = False) -> pathlib.Path:
    """Links an exported object, or one of nvcc's (``cuda``), with the stand-in runtime.

    Returns the shared object in ``cache_dir()``, named by the hash of its inputs; a second call
    with the same inputs links nothing.  Raises FileNotFoundError, or ToolchainError: no compiler,
    a folder that takes nothing, or the linker's words.
    """
    data = pathlib.Path(object_path).read_bytes()
    runtime, seen = _RUNTIME_C, _RUNTIME_C.read_bytes()
    if cuda:
        runtime, seen = _CUDART_C, seen + _CUDART_C.read_bytes()
        # host code in C++ may want its library; with --as-needed it is asked for only then
        libraries = ["-Wl,--as-needed", "-lstdc++", "-lm"]
    else:
        import tvm_ffi

        tvm_lib = pathlib.Path(tvm_ffi.libinfo.find_libtvm_ffi())
        seen += str(tvm_lib).encode()
        libraries = [f"-L{tvm_lib.parent}", f"-Wl,-rpath,{tvm_lib.parent}", "-ltvm_ffi"]
    target = cache_dir() / f"{hashlib.sha256(data + seen).hexdigest()[:32]}.so"
    if target.exists():
        return target
    try:
        _link([os.fspath(object_path), os.fspath(runtime)], target, libraries, 2 * len(data))
    except OSError as error:
        raise ToolchainError(
            f"softgpu: {target.parent}, the folder of linked objects, cannot be written: {error}; "
            "SOFTGPU_CACHE_DIR names another"
        ) from error
    return target


def _link(inputs: list[str], target: pathlib.Path, libraries: list[str], size: int) -> None:
    """Links an object and its runtime, ``inputs``, into ``target``.

    That is whole as soon as it is there, and has at most ``size`` bytes.

    Raises OSError where its folder takes nothing, ToolchainError with the linker's words.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(suffix=".so.tmp", dir=target.parent)
    os.close(fd)
    command = [
        _compiler(), "-shared", "-fPIC", "-O1", "-w", "-fvisibility=hidden", "-Wl,-Bsymbolic",
        "-Wl,--no-undefined", "-o", temporary, *inputs, *libraries,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            with open(temporary, "wb") as probe:  # of a disk that is full linkers say less
                probe.write(bytes(size))
                os.fsync(probe.fileno())
            raise ToolchainError(
                f"softgpu: linking {inputs[0]} with the software runtime failed; an undefined "
                "symbol below means the object uses a CUDA call that "
                f"{pathlib.Path(inputs[1]).name} does not offer.\n"
                f"{' '.join(command)}\n{done.stderr}"
            )
        os.replace(temporary, target)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


class _Library:
    """A linked object that delivers its launches to ``on_launch``."""

    def __init__(self, path: pathlib.Path, on_launch: Callable[[Launch], None]) -> None:
        self._library = ctypes.CDLL(str(path))
        self._on_launch = on_launch
        self._error: BaseException | None = None
        self._callback = _CallbackType(self._launched)  # must outlive the library's use of it
        self._library.softgpu_set_callback(self._callback)

    def _launched(self, pointer: Any) -> int:
        raw = pointer.contents
        try:
            self._on_launch(
                Launch(
                    kernel=raw.kernel.decode(),
                    grid=tuple(raw.grid),
                    block=tuple(raw.block),
                    cluster=tuple(raw.cluster),
                    pdl=bool(raw.pdl),
                    cooperative=bool(raw.cooperative),
                    dynamic_smem=raw.dynamic_smem,
                    max_dynamic_smem=raw.max_dynamic_smem,
                    stream=raw.stream,
                    params=raw.params,
                )
            )
        except BaseException as error:
            self._error = error
            return _CALLBACK_FAILED
        return 0

    def _run(self, owner: Any, symbol: str, *args: Any) -> Any:
        """Calls ``symbol`` of ``owner``.  An error of the launch callback is raised as it was."""
        try:
            function = getattr(owner, symbol)
        except AttributeError as error:
            raise SoftGpuError(f"softgpu: the object exports no function {symbol!r}") from error
        # Several modules may share one library (same content): the last one set must win.
        self._library.softgpu_set_callback(self._callback)
        self._error = None
        try:
            result = function(*args)
        except Exception:
            if self._error is not None:
                raise self._error from None
            raise
        if self._error is not None:
            raise self._error
        return result


class HostModule(_Library):
    """A linked object of the CuTe DSL: calls its exported functions through TVM-FFI."""

    def __init__(
        self, object_path: str | os.PathLike[str], on_launch: Callable[[Launch], None]
    ) -> None:
        import tvm_ffi

        path = link(object_path)
        self._module = tvm_ffi.load_module(str(path))
        super().__init__(path, on_launch)

    def call(self, symbol: str, *args: Any) -> None:
        """Calls ``symbol``.  An error of the launch callback is raised as it was."""
        self._run(self._module, symbol, *args)


class CudaModule(_Library):
    """A linked object of nvcc's: calls its ``extern "C"`` functions.

    ``architecture`` is that of the PTX: host code that asks is on an H200, from 100 on on a B200.
    """

    def __init__(
        self,
        object_path: str | os.PathLike[str],
        on_launch: Callable[[Launch], None],
        architecture: int,
    ) -> None:
        super().__init__(link(object_path, cuda=True), on_launch)
        self._library.softgpu_set_capability(100 if architecture >= 100 else 90)

    def call(self, symbol: str, *args: Any) -> int:
        """Calls ``symbol`` with ctypes values; returns its int, a cudaError_t.

        An error of the launch callback is raised as it was.
        """
        return int(self._run(self._library, symbol, *args))


class CudaDlpack:
    """DLPack producer that reports a CPU tensor as living on CUDA device 0, strides untouched."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CUDA, 0)

    def __dlpack__(self, **_: Any) -> Any:
        from torch.utils.dlpack import to_dlpack

        capsule = to_dlpack(self._tensor)
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype = ctypes.c_void_p
        get.argtypes = [ctypes.py_object, ctypes.c_char_p]
        base = get(capsule, b"dltensor")
        # DLTensor: data 0, device 8 (type) and 12 (id), ndim 16, dtype 20, shape 24, strides 32
        ctypes.c_int32.from_address(base + 8).value = _CUDA
        ctypes.c_int32.from_address(base + 12).value = 0
        ndim = ctypes.c_int32.from_address(base + 16).value
        strides = ctypes.c_void_p.from_address(base + 32).value
        if strides and ndim:
            # Exporting rewrites the strides of extents below 2; a CUDA tensor arrives as it is.
            (ctypes.c_int64 * ndim).from_address(strides)[:] = list(self._tensor.stride())
        return capsule


def as_cuda(tensor: Any) -> Any:
    """A TVM-FFI tensor over the memory of a CPU torch tensor that claims to be on CUDA device 0."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(CudaDlpack(tensor))
