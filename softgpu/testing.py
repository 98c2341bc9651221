"""Running hand-written PTX: for the tests of instruction handlers, and for trying things out.

    out = np.zeros(32, np.uint32)
    launch("mov.u32 %r1, %tid.x; ...", [out], block=32)

The body sees one ``.param .b64`` an array (``arg0``, ``arg1``, ...) and one ``.param .b32`` or
``.b64`` a scalar; ``REGISTERS`` lists what is declared.  On entry ``%rdI`` (``%rI`` for a scalar)
holds argument I - 1.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .decode import decode
from .machine import Machine
from .memory import SHARED_MAX, GlobalMemory
from .options import Options, Stats
from .ptx import parse
from .runtime import Launch

REGISTERS = """
    .reg .pred %p<64>;
    .reg .b16 %rs<64>;
    .reg .b32 %r<600>;
    .reg .b64 %rd<64>;
    .reg .f32 %f<64>;
    .reg .f64 %fd<64>;
"""


def aligned(shape: int | tuple[int, ...], dtype: Any, align: int = 128) -> NDArray[Any]:
    """A zeroed array whose data pointer is a multiple of ``align`` bytes."""
    count = int(np.prod(shape))
    size = count * np.dtype(dtype).itemsize
    raw = np.zeros(size + align, np.uint8)
    skip = -raw.ctypes.data % align
    return raw[skip : skip + size].view(dtype).reshape(shape)


def module(body: str, params: list[str], declarations: str = "", target: str = "sm_90a") -> str:
    """PTX text of a module with one entry ``test``."""
    loads = ""
    for i, p in enumerate(params):
        if "[" not in p:
            kind, reg = ("b64", "%rd") if "b64" in p else ("b32", "%r")
            loads += f"ld.param.{kind} {reg}{i + 1}, [arg{i}];\n"
    return (
        f".version 8.8\n.target {target}\n.address_size 64\n"
        ".extern .shared .align 1024 .b8 smem[];\n"
        f".visible .entry test({', '.join(params)})\n{{\n{REGISTERS}{declarations}\n{loads}\n"
        f"{body}\nret;\n}}\n"
    )


def launch(
    body: str,
    args: list[Any],
    *,
    grid: int = 1,
    block: int = 32,
    cluster: int = 1,
    smem: int = 32768,
    options: Options | None = None,
    declarations: str = "",
    target: str = "sm_90a",
) -> Stats:
    """Runs ``body``.

    Args:
        args: numpy arrays (passed by address, registered as buffers), ints (``.b32``), or bytes
            (passed by value as an array parameter aligned to 64 bytes, such as a tensor map).
        target: of the module; "sm_100a" has tensor memory.
    """
    params, blobs, memory = [], [], GlobalMemory()
    for i, a in enumerate(args):
        if isinstance(a, np.ndarray):
            params.append(f".param .b64 arg{i}")
            blobs.append(a.ctypes.data.to_bytes(8, "little"))
            memory.add(f"argument {i}", a.ctypes.data, a.nbytes)
        elif isinstance(a, bytes):
            params.append(f".param .align 64 .b8 arg{i}[{len(a)}]")
            blobs.append(a)
        else:
            params.append(f".param .b32 arg{i}")
            blobs.append((int(a) & 0xFFFFFFFF).to_bytes(4, "little"))
    parsed = parse(module(body, params, declarations, target))
    kernel = parsed.kernels["test"]
    program = decode(kernel, parsed)
    buffers = [ctypes.create_string_buffer(b, len(b)) for b in blobs]
    pointers = (ctypes.c_void_p * max(len(buffers), 1))(*[ctypes.addressof(b) for b in buffers])
    config = Launch(
        kernel="test", grid=(grid, 1, 1), block=(block, 1, 1), cluster=(cluster, 1, 1), pdl=False,
        cooperative=False, dynamic_smem=smem, max_dynamic_smem=SHARED_MAX, stream=0,
        params=pointers,
    )  # fmt: skip
    return Machine(program, config, memory, options or Options()).run()
