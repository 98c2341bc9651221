"""A read-only stream in Triton: the memory ceiling of a kernel that, like decode, hardly writes."""

import torch
import triton
import triton.language as tl


@triton.jit
def _read_kernel(source, sums, PER: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    base = source + program.to(tl.int64) * PER
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, PER, BLOCK):
        total += tl.load(base + start + offsets)
    tl.store(sums + program, tl.sum(total, axis=0))


def read_stream(source: torch.Tensor, sums: torch.Tensor, per: int, block: int, warps: int) -> None:
    """Reads all of ``source`` (int32); program p sums its ``per`` elements into ``sums[p]``."""
    programs = source.numel() // per
    if programs > sums.numel():
        raise ValueError(f"sums: expected at least {programs} elements, got {sums.numel()}")
    _read_kernel[(programs,)](source, sums, PER=per, BLOCK=block, num_warps=warps)
