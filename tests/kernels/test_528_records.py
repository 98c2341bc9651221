"""``append_kv`` and ``fetch_dequant`` over the three records of 528 bytes, which are compiled when
they are asked for: tokens byte for byte, each where its format has it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from snapmla.testing import fetched
from snapmla.testing.workloads import samples
from tests.support.bits import assert_same
from tests.support.needs import TARGETS, needs_kernels
from tests.support.rows import DTYPES, FP8, device_of, kernel, latents

pytestmark = needs_kernels
WHOLE = pytest.mark.whole_matrix
FORMATS = ("fp8_v41_planar", "fp8_v41_rows", "fp8_nope")
TOKEN = 528


def quantised(fmt: str, c: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """(512 bytes of content, 16 of scales) of a token; one with a NaN or an infinity is NaN."""
    width, least = (128, 2.0**-126) if fmt == "fp8_nope" else (32, 1e-4 / 448)
    content, scales = [], []
    for group in c.float().split(width):
        quotient = group.abs().max() / torch.tensor(448.0)
        scale = torch.maximum(quotient, torch.tensor(least))
        if power_of_two:
            mantissa, exponent = math.frexp(float(scale))
            scale = torch.tensor(2.0 ** (exponent - (mantissa == 0.5)))
        content.append((group / scale).clamp(-448, 448).to(FP8).view(torch.uint8))
        scales.append(scale)
    if not c.isfinite().all():
        content = [torch.full((512,), 0x7F, dtype=torch.uint8)]
        scales = [torch.tensor(math.nan)] * len(scales)
    bits = torch.stack(scales)
    if fmt == "fp8_nope":
        return torch.cat(content), bits.view(torch.uint8)
    return torch.cat(content), (bits.view(torch.int32) >> 23).to(torch.uint8)


def places(fmt: str, page_size: int, offset: int) -> tuple[int, int]:
    """(first byte of content, first byte of scales) of a token in its page."""
    if fmt == "fp8_v41_planar":
        return 512 * offset, 512 * page_size + 16 * offset
    return TOKEN * offset, TOKEN * offset + 512


@pytest.mark.parametrize("fmt", FORMATS[1:])
def test_a_token_and_back(fmt: str) -> None:
    """Everyday part of the two tests below."""
    test_append(fmt, 3, 1, "bf16", "sm_90a")
    test_fetch(fmt, 3, "bf16", "pages", "sm_90a")


@WHOLE
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("in_dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(("page_size", "power_of_two"), [(3, 1), (64, 0)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_append(fmt: str, page_size: int, power_of_two: int, in_dtype: str, target: str) -> None:
    n, pages, device = 41, 60 // page_size + 2, device_of(target)
    c, _ = latents((n,), DTYPES[in_dtype])
    c[32:40, 128:384] *= 2.0**-12
    c[38, ::3], c[39] = -0.0, -0.0
    slots = torch.randperm(pages * page_size)[:n].int()
    slots[5], slots[17] = -1, pages * page_size
    size = page_size * TOKEN + 32
    memory = torch.full((pages, size), 0x5B, dtype=torch.uint8, device=device)
    kv = memory[:, : page_size * TOKEN].unflatten(1, (page_size, 1, TOKEN))
    run = kernel(target, op="append_kv", in_dtype=in_dtype, index_dtype="i32", cache_dtype=fmt)
    run(kv, c.to(device), slots.to(device), power_of_two)
    want = torch.full((pages, size), 0x5B, dtype=torch.uint8)
    for slot, token in zip(slots.tolist(), c, strict=True):
        page, offset = divmod(slot, page_size)
        if 0 <= page < pages:
            content, scales = quantised(fmt, token, bool(power_of_two) or fmt != "fp8_nope")
            at, scales_at = places(fmt, page_size, offset)
            want[page, at : at + 512] = content
            want[page, scales_at : scales_at + 16] = scales
    assert_same(memory, want)


@WHOLE
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mode", ["pages", "indices", "ragged"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("page_size", [3, 64])
@pytest.mark.parametrize("fmt", FORMATS)
def test_fetch(fmt: str, page_size: int, dtype: str, mode: str, target: str) -> None:
    """One result, of 512 channels; scales of every kind."""
    lengths, device, own = (75, 0, 33, 1), device_of(target), DTYPES[dtype]
    cache, table, seqlens = samples.filled_bytes(fmt, lengths, page_size, strided=True)
    kv = cache.named_tensors["kv"]
    run = kernel(target, op="fetch_dequant", in_dtype=dtype, mode=mode, cache_dtype=fmt)
    if mode == "pages":
        slots = fetched.padded_slots(table, seqlens, page_size, 80)
        where: tuple[Tensor, ...] = (table, seqlens)
    elif mode == "indices":
        slots = fetched.padded_slots(table, seqlens, page_size, 80)[0, :70]
        slots[3] = fetched.ZEROS
        where = (slots.int(),)
    else:
        begins, starts = torch.tensor([0, 70, 70, 100, 100]).int(), torch.tensor([5, 0, 3, 1]).int()
        slots = fetched.packed_slots(table, begins, starts, cache, 104)
        where = (table, begins, starts)
    want = fetched.rows_at(cache, slots, own, 7.0)[0]
    out = torch.full_like(want, 7.0, device=device)
    run(kv.to(device) if device == "cuda" else kv, *(t.to(device) for t in where), out)
    assert_same(out, want)
    pages = kv.as_strided((kv.shape[0], page_size * TOKEN), (kv.stride(0), 1))
    page, offset = divmod(int(slots.flatten()[10]), page_size)
    at, scales_at = places(fmt, page_size, offset)
    scales = pages[page, scales_at : scales_at + 16]
    factor = torch.exp2(scales.double() - 127).float()
    if fmt == "fp8_nope":
        factor = scales.contiguous().view(torch.float32)
    values = pages[page, at : at + 512].contiguous().view(FP8).float().view(len(factor), -1)
    assert_same(want.view(-1, 512)[10], (values * factor[:, None]).flatten().to(own))
