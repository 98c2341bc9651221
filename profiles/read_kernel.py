"""Triton kernels of the probes: a read-only stream, because decode hardly writes either; the same
out of the L2 cache; and a wait on every SM."""

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


@triton.jit
def _read_again_kernel(  # type: ignore[no-untyped-def]
    source, sums, chunks, rounds, PER: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for number in range(rounds):
        base = source + (program + number) % chunks * PER
        for start in range(0, PER, BLOCK):
            # .cg: L1 must not answer
            total += tl.load(base + start + offsets, cache_modifier=".cg")
    tl.store(sums + program, tl.sum(total, axis=0))


def read_again(
    source: torch.Tensor, sums: torch.Tensor, programs: int, rounds: int, per: int, block: int,
    warps: int,
) -> None:  # fmt: skip
    """Each of ``programs`` reads ``rounds`` chunks of ``per`` elements of ``source`` (int32) in
    turn, not through L1, and writes their sum; programs * rounds * per * 4 bytes in all."""
    if programs > sums.numel():
        raise ValueError(f"sums: expected at least {programs} elements, got {sums.numel()}")
    _read_again_kernel[(programs,)](
        source, sums, source.numel() // per, rounds, PER=per, BLOCK=block, num_warps=warps
    )


@triton.jit
def _wait_kernel(sink, rounds):  # type: ignore[no-untyped-def]
    last = tl.program_id(0)
    for _ in range(rounds):
        last += tl.inline_asm_elementwise(
            "nanosleep.u32 1000; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.store(sink + tl.program_id(0), last)


def wait(sink: torch.Tensor, rounds: int) -> None:
    """One CTA for each element of ``sink`` (int32) sleeps ``rounds`` times about a microsecond."""
    _wait_kernel[(sink.numel(),)](sink, rounds)
