"""Additions of tensor cores, Hopper's and Blackwell's: the torch form of ``softgpu.accumulate``.

The rules and where they come from are told in ``softgpu.tensor_core``.  Here they run on whole
matrices, on a CPU or a GPU, in fp32 for Hopper's e4m3 (every intermediate is exact) and in fp64
for the others, chunked so that the products of one step of one chunk are all that is ever held.
The constants are spelled here again: the reference runs where no software GPU is installed, and
tests hold the two forms together bit for bit.

Shapes carry any leading batch dimensions: a (..., R, K), b (..., N, K) -> (..., R, N).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FP8_STEP = 32
HALF_STEP = 16
FP8_FRACTION_BITS = 13
HALF_FRACTION_BITS = 25
CANONICAL_NAN = 0x7FFFFFFF
FP32_MIN_NORMAL = 2.0**-126
HALF_SMALLEST_TOP = 2.0**-133
_FP8_MIN_NORMAL = 2.0**-6
_HALF_MIN_NORMAL = {torch.bfloat16: FP32_MIN_NORMAL, torch.float16: 2.0**-14}
_FP8_RESULT_MASK = -(1 << (23 - FP8_FRACTION_BITS))
_FP32_RESULT_MASK = -(1 << (52 - 23))


def _power_of_two(x: Tensor, smallest: float) -> Tensor:
    """2^exponent(x); 0 where x is 0, ``smallest`` where it is subnormal.  x: float32 or float64."""
    if x.dtype == torch.float64:
        power = (x.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    else:
        power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(x == 0, 0.0, power.clamp_min(smallest))


def _finish(out: Tensor, acc: Tensor, total: Tensor) -> Tensor:
    """Puts infinities of the accumulator back and makes every NaN the hardware's."""
    bad = ~(torch.isfinite(acc) & torch.isfinite(total))
    if not bool(bad.any()):
        return out
    out = torch.where(bad, acc + total.float(), out)
    nan = torch.full_like(out.view(torch.int32), CANONICAL_NAN).view(torch.float32)
    return torch.where(torch.isnan(out), nan, out)


def fp8_step(acc: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """One k32 step of e4m3 products into fp32 accumulators.

    Args:
        acc: (...) float32.
        a: (..., 32) float8_e4m3fn, or float32 that hold e4m3 values; broadcast against b.
        b: (..., 32), likewise.

    Returns:
        (...) float32, bit for bit what WGMMA leaves.
    """
    a, b = a.float(), b.float()
    return _fp8_step(
        acc, a, b, _power_of_two(a, _FP8_MIN_NORMAL), _power_of_two(b, _FP8_MIN_NORMAL)
    )


def _fp8_step(acc: Tensor, a: Tensor, b: Tensor, power_a: Tensor, power_b: Tensor) -> Tensor:
    finite_acc = torch.where(torch.isfinite(acc), acc, 0.0)
    top = (power_a * power_b).amax(-1)
    top = torch.maximum(top, _power_of_two(finite_acc, FP32_MIN_NORMAL)).clamp_min(FP32_MIN_NORMAL)
    # Below 2^-100 only the accumulator can be non-zero, and 2^13 / top might overflow.
    scale = 2.0**FP8_FRACTION_BITS / top.clamp_min(2.0**-100)
    total = (a * b).mul_(scale[..., None]).trunc_().sum(-1)
    total = total + (finite_acc * (1.0 / top) * 2.0**FP8_FRACTION_BITS).trunc()
    kept = (total.view(torch.int32) & _FP8_RESULT_MASK).view(torch.float32)
    return _finish(kept * 2.0**-FP8_FRACTION_BITS * top + 0.0, acc, total)


def half_step(acc: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """One k16 step of bf16 or f16 products into fp32 accumulators.

    Args:
        acc: (...) float32.
        a, b: (..., 16) bfloat16 or float16, both alike, broadcast against each other.

    Returns:
        (...) float32, bit for bit what WGMMA leaves.
    """
    return _wide_step(acc, a, b, _HALF_MIN_NORMAL[a.dtype])


def _wide_step(acc: Tensor, a: Tensor, b: Tensor, smallest: float) -> Tensor:
    """One step of any k that keeps fp32; ``smallest``: normal number of the operands' format."""
    wide_a, wide_b = a.double(), b.double()
    products = wide_a * wide_b
    special = products.sum(-1)  # not finite where an operand is not
    usable = torch.isfinite(acc) & torch.isfinite(special)
    finite_acc = torch.where(usable, acc, 0.0).double()
    top = (_power_of_two(wide_a, smallest) * _power_of_two(wide_b, smallest)).amax(-1)
    top = torch.maximum(top, _power_of_two(finite_acc, FP32_MIN_NORMAL)).clamp_min(
        HALF_SMALLEST_TOP
    )
    scale = 2.0**HALF_FRACTION_BITS / torch.where(torch.isfinite(special), top, 1.0)
    total = products.mul_(scale[..., None]).trunc_().sum(-1) + (finite_acc * scale).trunc()
    kept = (total.view(torch.int64) & _FP32_RESULT_MASK).view(torch.float64) / scale
    subnormal = (kept * 2.0**149).trunc() * 2.0**-149
    out = torch.where(kept.abs() < FP32_MIN_NORMAL, subnormal, kept).float() + 0.0
    return _finish(out, acc, special)


def _chunk_rows(x: Tensor, others: int, k: int) -> int:
    """Rows of b in one chunk: 2^26 products on a GPU, 2^19 (cache-sized) on a CPU."""
    budget = 1 << (26 if x.is_cuda else 19)
    return max(1, budget // max(1, others * k))


def hopper_fp8_dot(a: Tensor, b: Tensor, acc: Tensor | None = None) -> Tensor:
    """a . b^T as a chain of k32 e4m3 WGMMAs into one fp32 accumulator.

    Args:
        a: (..., R, K) float8_e4m3fn, or float32 that hold e4m3 values; K a multiple of 32.
        b: (..., N, K), likewise, with the same (or broadcastable) leading dimensions.
        acc: (..., R, N) float32, the accumulator before the first step; zero without it.

    Returns:
        (..., R, N) float32.
    """
    return _dot(a.float(), b.float(), acc, FP8_STEP, _hopper_fp8_chain)


def blackwell_fp8_dot(a: Tensor, b: Tensor, acc: Tensor | None = None) -> Tensor:
    """a . b^T as a chain of k32 e4m3 tcgen05.mma into one fp32 accumulator, which keeps fp32.

    Arguments and result as of ``hopper_fp8_dot``.
    """
    return _dot(a.float(), b.float(), acc, FP8_STEP, _wide_chain)


def bf16_dot(acc: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """acc + a . b^T as a chain of k16 bf16 (or f16) MMAs into one fp32 accumulator, of either arch.

    Args:
        acc: (..., R, N) float32, or None for zero.
        a: (..., R, K) bfloat16 or float16, K a multiple of 16.
        b: (..., N, K), likewise.

    Returns:
        (..., R, N) float32.
    """
    if a.dtype not in _HALF_MIN_NORMAL or a.dtype != b.dtype:
        raise TypeError(f"a, b: expected bfloat16 or float16, both alike, got {a.dtype}, {b.dtype}")
    return _dot(a, b, acc, HALF_STEP, _wide_chain)


Chain = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def _dot(a: Tensor, b: Tensor, acc: Tensor | None, step: int, chain: Chain) -> Tensor:
    k = a.shape[-1]
    if b.shape[-1] != k or k % step:
        raise ValueError(
            f"a, b: expected equal last dimensions, a multiple of {step}, got {k}, {b.shape[-1]}"
        )
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    rows, columns = a.shape[-2], b.shape[-2]
    out = torch.empty(*batch, rows, columns, dtype=torch.float32, device=a.device)
    size = _chunk_rows(a, rows * max(1, int(torch.Size(batch).numel())), step)
    for start in range(0, columns, size):
        part = b[..., start : start + size, :]
        cur = out[..., start : start + size]
        cur.copy_(acc[..., start : start + size]) if acc is not None else cur.zero_()
        cur.copy_(chain(cur.contiguous(), a, part, step))
    return out


def _hopper_fp8_chain(cur: Tensor, a: Tensor, b: Tensor, step: int) -> Tensor:
    """All steps of one chunk: cur (..., R, N), a (..., R, K), b (..., N, K)."""
    power_a, power_b = _power_of_two(a, _FP8_MIN_NORMAL), _power_of_two(b, _FP8_MIN_NORMAL)
    for part in _steps(a.shape[-1], step):
        cur = _fp8_step(
            cur, a[..., :, None, part], b[..., None, :, part], power_a[..., :, None, part],
            power_b[..., None, :, part],
        )  # fmt: skip
    return cur


def _wide_chain(cur: Tensor, a: Tensor, b: Tensor, step: int) -> Tensor:
    """Likewise, of steps that keep fp32; fp32 operands hold e4m3 values."""
    smallest = _HALF_MIN_NORMAL.get(a.dtype, _FP8_MIN_NORMAL)
    for part in _steps(a.shape[-1], step):
        cur = _wide_step(cur, a[..., :, None, part], b[..., None, :, part], smallest)
    return cur


def _steps(k: int, step: int) -> list[slice]:
    return [slice(i, i + step) for i in range(0, k, step)]
