"""Shared parts of the tcgen05 programs that tests plant bugs in, all in NVIDIA's CuTe DSL.

A program is a module of ``tests.support`` that ends in a call of ``command``:

    python -m tests.support.NAME OUT       writes OUT/NAME.o and .ptx; CUTE_DSL_ARCH=sm_100a

``tests.support.planting`` starts that; importing this module needs the compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.experimental import primitives as prim

SW = prim.Tcgen05SmemSwizzle


def desc(address, lbo: int, sbo: int, layout):
    return prim.Tcgen05SmemDesc.build(
        address, leading_byte_offset=lbo, stride_byte_offset=sbo, layout=layout
    )


def at(address, dtype=Int32):
    return prim.make_tmem_ptr(address, dtype)


def lanes(tmem):
    """Address of the 32 lanes that a warp may touch."""
    return tmem + (cute.arch.make_warp_uniform(cute.arch.warp_idx()) << 21)


def rows_first(x, dtype):
    """A tensor (tile, row, channel) as (row, channel, tile) of ``dtype``."""
    return cute.make_tensor(
        cute.recast_ptr(x.iterator, dtype=dtype), cute.select(x.layout, mode=[1, 2, 0])
    )


def sides(atom, shared, part):
    """(atom, shared side by stage, global side by tile) of a load of an MMA's operand."""
    both = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 3), cute.group_modes(part, 0, 3)
    )
    return (atom, *both)


def fake(dtype, *shape):
    """A row-major tensor argument."""
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)


def command(name: str, program: Any, arguments: Sequence[Any]) -> None:
    """Compiles ``program`` for these arguments and a stream into the directory ``sys.argv[1]``."""
    directory = Path(sys.argv[1])
    directory.mkdir(exist_ok=True)
    compiled = cute.compile(
        program, *arguments, make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --keep-ptx --generate-line-info --dump-dir={directory}",
    )  # fmt: skip
    compiled.export_to_c(str(directory / f"{name}.o"), function_name=name)
    (directory / f"{name}.ptx").write_text(compiled.__ptx__)
