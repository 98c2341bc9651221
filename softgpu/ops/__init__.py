"""Instruction families; importing this package registers every builder with the decoder."""

from . import (
    atomic,
    barrier,
    convert,
    copy_async,
    float_alu,
    integer_alu,
    launch_control,
    load_store,
    matrix,
    mbarrier,
    misc,
    move,
    tcgen05_copy,
    tcgen05_memory,
    tcgen05_mma,
    tma,
    warp_ops,
    wgmma,
)

__all__ = [
    "atomic", "barrier", "convert", "copy_async", "float_alu", "integer_alu", "launch_control",
    "load_store", "matrix", "mbarrier", "misc", "move", "tcgen05_copy", "tcgen05_memory",
    "tcgen05_mma", "tma", "warp_ops", "wgmma",
]  # fmt: skip
