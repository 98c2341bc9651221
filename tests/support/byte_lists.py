"""Checks of attention over caches of bytes: its promises about bytes and lists, on any device.

Each takes a job on that device, and its kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla.cache import byte_cache
from snapmla.testing.dense_job import LSE_GATE
from snapmla.testing.record_job import RecordJob, RecordShape
from snapmla.testing.record_reference import record_decode_reference
from softgpu import Options, using

TWO = ("fp8_v4", "fp8_v41_planar", "fp8_v41_rows")  # whose kernels take two lists
FORMATS = (*TWO, "fp8_nope")
# FlashMLA's sliding windows beside a second list of 512 or 1024 entries: row tile, heads, tokens of
# a page, entries of the second list, tokens of its pages.
WINDOWS = (
    (16, 8, 256, 512, 64), (16, 16, 64, 1024, 2), (32, 16, 2, 512, 256), (64, 8, 256, 1024, 64),
    (64, 64, 64, 512, 2), (64, 128, 2, 1024, 256),
)  # fmt: skip
ANY_BYTES = (0, 0x7F, 0xFE, 0xFF)


def window(heads: int, page_size: int, extra: int, extra_page: int, parts: int = 3) -> RecordShape:
    """Lists of 128 entries, and of ``extra`` in another cache: both whole, both of no tokens, the
    first alone, the second alone."""
    return RecordShape(
        heads, 128, (128, 99, 77, 0), page_size, layout="packed", sink=True, parts=parts,
        extra_topk=extra, extra_lengths=(extra, 5, 0, extra // 3), extra_page_size=extra_page,
    )  # fmt: skip


def assert_right(job: RecordJob, result: tuple[Tensor, Tensor]) -> None:
    """Asserts FlashMLA's gates, and results as near to fp64 as the kernel's mimic."""
    errors = job.errors(result)
    assert errors.right, f"{job.shape}: {errors}"


def scales_of(job: RecordJob) -> Tensor:
    """Bytes of a cache's scales, (pages, P, bytes), a view."""
    return byte_cache.fields_of(job.record, job.cache[:, :, None])[2].view(torch.uint8)


def whole_pages(cache: Tensor) -> Tensor:
    """(pages, bytes from one page to the next), a view: what is between pages, too."""
    return cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1))


def assert_bytes_of_nobody(job: RecordJob, kernel: Any) -> None:
    """V4's eighth byte behind a token's scales, what lies between pages or rows, tokens that no
    list names: any bytes, the same results, which are right.  Of both caches, if there are two.
    The layout is ``padded``."""
    out, lse = job.run(kernel)
    lists = [(job.cache, job.indices)]
    if job.extra is not None:
        lists.append(job.extra[:2])
    idle = [_of_nobody(job, cache, indices) for cache, indices in lists]
    assert all(bool(each.any()) for each in idle)
    for byte in ANY_BYTES:
        for (cache, _), own in zip(lists, idle, strict=True):
            whole_pages(cache)[own] = byte
        other, other_lse = job.run(kernel)
        assert torch.equal(other, out) and torch.equal(other_lse, lse), byte
    assert_right(job, (out, lse))


def _of_nobody(job: RecordJob, cache: Tensor, indices: Tensor) -> Tensor:
    """Bytes of ``whole_pages`` that no named token has."""
    whole, p = torch.ones_like(whole_pages(cache), dtype=torch.bool), cache.shape[1]
    mask = whole.as_strided(cache.shape, cache.stride())
    slots = indices[(indices >= 0) & (indices < cache.shape[0] * p)].long()
    for field in byte_cache.fields_of(job.record, mask.view(torch.uint8)[:, :, None]):
        field.view(torch.uint8)[slots // p, slots % p] = 0
    return whole


def assert_least_scale_is_a_token(job: RecordJob, kernel: Any) -> None:
    """The first list's first 32 tokens get the least scale and RoPE of 0: each weighs e^0 and adds
    nothing.  The list is dense, of 64 tokens in pages of one."""
    nothing = job.indices[0, :32].long()
    rope = byte_cache.fields_of(job.record, job.cache[:, :, None])[1]
    scales_of(job)[nothing], rope[nothing] = 0, 0.0
    result = job.run(kernel)
    assert_right(job, result)
    named = torch.where(torch.arange(job.indices.shape[1]) < 32, -1, job.indices)
    without = job.run(kernel, indices=named)
    gain = torch.exp(result[1]) - torch.exp(without[1])
    assert torch.allclose(gain, torch.full_like(gain, 32.0), rtol=1e-3)


def assert_nan_is_its_readers_alone(job: RecordJob, kernel: Any) -> None:
    """A scale of 255, or NaN, of one token: all of the query token that names it, no other's."""
    out, lse = job.run(kernel)
    page, offset = divmod(int(job.indices[0, 70]), job.cache.shape[1])
    if job.record.powers:
        scales_of(job)[page, offset, 2] = 255
    else:
        scales_of(job)[page, offset].view(torch.float32)[2] = math.nan
    other, other_lse = job.run(kernel)
    assert other[0].isnan().all() and other_lse[0].isnan().all()
    assert torch.equal(other[1], out[1]) and torch.equal(other_lse[1], lse[1])


def assert_one_list_is_two(job: RecordJob, kernel: Any) -> None:
    """Asserts the same bits if the entries behind a list's first 128 are a second list over the
    same cache."""
    out, lse = job.run(kernel)
    length, more = job.lengths.clamp(max=128), (job.lengths - 128).clamp(min=0)
    other, other_lse = job.run(
        kernel, indices=job.indices[:, :128], topk_length=length, extra_cache=job.cache,
        extra_indices=job.indices[:, 128:], extra_length=more,
    )  # fmt: skip
    assert torch.equal(other, out) and torch.equal(other_lse, lse)


@dataclass(frozen=True)
class LoneTokens:
    """LSEs of rows that one token makes.

    Attributes:
        rows: how many.
        outside: of them, those outside of FlashMLA's gate, 1e-6 or 8.01 / 65536 of the LSE.
        worst: the largest error.
    """

    rows: int
    outside: int
    worst: float


def assert_items_without_tiles(spec: VariantSpec, kernel: Any) -> None:
    """Lists of no token one behind another between others, in one part, where Q may have two
    stages: P.V's warps must not convert the next Q before softmax has heard of the last one."""
    shape = RecordShape(5, 130, (70, 0, 0, 0, 130, 0), 64, parts=1)
    for seed in range(3):
        with using(Options(hazards="raise", seed=seed)):
            result = (job := RecordJob(spec, shape)).run(kernel)
        assert_right(job, result)


def assert_lone_tokens(spec: VariantSpec, kernel: Any) -> None:
    """The LSE of rows of one token is a logit, within FlashMLA's gate, 1e-6 where it is near 0
    (docs/numerics.md)."""
    job = RecordJob(spec, RecordShape(16, 1, (1,) * 6, 64, parts=1, dense=True, powers=True))
    found = lone_tokens(job, job.run(kernel)[1])
    assert found.rows == 96 and not found.outside, found


def lone_tokens(job: RecordJob, lse: Tensor) -> LoneTokens:
    """``LoneTokens`` of a job whose lists have one entry each."""
    truth = record_decode_reference(job.call())[1]
    got = lse.transpose(0, 1).flatten(1).double()
    error = (got - truth).abs()
    outside = (error > LSE_GATE[0]) & (error > LSE_GATE[1] * truth.abs())
    return LoneTokens(error.numel(), int(outside.sum()), float(error.max()))
