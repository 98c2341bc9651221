"""Helpers that the handlers of tcgen05 share: modifiers, the kernel's cta_group, descriptors."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..decode import Decoder, Mods, unmodelled
from ..errors import DescriptorError
from ..ptx import Instr
from ..tensor_memory import TensorMemory
from . import operands

SPAN = {0: 0, 2: 128, 4: 64, 6: 32}  # bytes of a swizzled row, by the descriptor's layout type
_VERSION = 1


def need_blackwell(ins: Instr, k: Decoder) -> None:
    """Raises UnmodelledInstruction where the module's target has no tensor memory."""
    if k.architecture < 100:
        raise unmodelled(ins, f".target sm_{k.architecture} has no tensor memory")


def cta_group(ins: Instr, k: Decoder, mods: Mods) -> int:
    """1 or 2.  Raises UnmodelledInstruction if the kernel uses the other one elsewhere."""
    need_blackwell(ins, k)
    named = mods.take("cta_group::1", "cta_group::2")
    if named is None:
        raise unmodelled(ins, ".cta_group expected")
    group = int(named[-1])
    if k.cta_group not in (0, group):
        raise unmodelled(ins, f"the kernel uses .cta_group::{k.cta_group} too")
    k.cta_group = group
    return group


def memory_of(block: Any) -> TensorMemory:
    """The tensor memory of a CTA of a Blackwell module."""
    found: TensorMemory = block.tensor_memory
    return found


def operand_index(
    block: Any, descriptor: int, rows: int, depth: int, element: int, mn_major: bool
) -> NDArray[np.int64]:
    """Chunks of the cluster's shared memory that a descriptor names in ``block``.

    PTX ISA 9.7.18.4.1.  Arguments and shape as of ``operands.chunk_index``.

    Raises:
        DescriptorError: a field the hardware or this model does not take, or the end of memory.
    """
    d = descriptor
    start, lbo, sbo = ((d >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    fields = {
        "bits 14-15": d >> 14 & 3, "bits 30-31": d >> 30 & 3, "version": (d >> 46 & 7) - _VERSION,
        "base offset": d >> 49 & 7, "leading dimension mode": d >> 52 & 1,
        "bits 53-60": d >> 53 & 0xFF,
    }  # fmt: skip
    for name, value in fields.items():
        if value:
            raise DescriptorError(f"shared memory descriptor {d:#018x}: {name}")
    layout = d >> 61 & 7
    if layout not in SPAN:
        raise DescriptorError(
            f"shared memory descriptor {d:#018x}: layout type {layout} is not modelled"
        )
    span = SPAN[layout]
    inside = start % operands.ATOM
    index = operands.chunk_index(rows, depth, element, inside, lbo, sbo, span, mn_major)
    index = index + ((block.base + start - inside) >> 4)
    top = int(index.max()) * operands.CHUNK + operands.CHUNK - block.base
    if top > block.shared.limit:
        raise DescriptorError(
            f"shared memory descriptor {d:#018x}: reaches offset {top} of {block.shared.limit} "
            "bytes of shared memory"
        )
    return index
