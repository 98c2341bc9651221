"""``append_kv`` and ``fetch_dequant`` over rows of 656 bytes, byte for byte.

The truth is vLLM's append written down once more, group by group, as its kernel goes.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsl_kernels.formats import ds_mla
from snapmla import PagedKVCache
from snapmla.cache import byte_cache
from snapmla.testing import fetched
from snapmla.testing.rope import rms_norm_rows, rotate_rows
from snapmla.testing.workloads import samples
from tests.support.bits import assert_same
from tests.support.needs import TARGETS, needs_kernels
from tests.support.rows import DTYPES, FP8, INDEX, device_of, joint, kernel, latents, outputs

pytestmark = needs_kernels
FORMAT, ROW = ds_mla.NAME, ds_mla.ROW_BYTES
FLT_MIN = torch.finfo(torch.float32).tiny


def fields_of(kv: Tensor) -> byte_cache.Fields:
    return byte_cache.fields_of(ds_mla.FORMAT, kv)


def vllm_row(c: Tensor, r: Tensor, power_of_two: bool = False) -> Tensor:
    """One token's bytes; a token with a NaN or an infinity, which vLLM stores in parts, as NaN."""
    content, scales = [], []
    for group in c.float().split(128):
        scale = torch.maximum(group.abs().max() / torch.tensor(448.0), torch.tensor(FLT_MIN))
        if power_of_two:
            mantissa, exponent = math.frexp(float(scale))
            scale = torch.tensor(2.0 ** (exponent - (mantissa == 0.5)))
        content.append((group / scale).clamp(-448, 448).to(FP8).view(torch.uint8))
        scales.append(scale)
    rope = r.bfloat16()
    if not (c.isfinite().all() and r.isfinite().all()):
        content = [torch.full((512,), 0x7F, dtype=torch.uint8)]
        scales = [torch.tensor(math.nan)] * 4
        rope = torch.full((64,), 0x7FFF, dtype=torch.int16).view(torch.bfloat16)
    return torch.cat([*content, torch.stack(scales).view(torch.uint8), rope.view(torch.uint8)])


def vllm_rows(c: Tensor, r: Tensor, power_of_two: bool = False) -> Tensor:
    return torch.stack([vllm_row(a, b, power_of_two) for a, b in zip(c, r, strict=True)])


def pool(pages: int, page_size: int, gap: int, device: str) -> tuple[Tensor, Tensor]:
    """(memory of bytes 0x5b, the rows (pages, page_size, 1, 656) in it, ``gap`` rows apart)."""
    memory = torch.full((pages, page_size + gap, 1, ROW), 0x5B, dtype=torch.uint8, device=device)
    return memory, memory[:, gap:]


def append(target: str, kv: Tensor, c: Tensor, r: Tensor, slots: Tensor, flag: int = 0) -> None:
    run = kernel(
        target, op="append_kv", in_dtype={v: k for k, v in DTYPES.items()}[c.dtype],
        index_dtype={v: k for k, v in INDEX.items()}[slots.dtype], cache_dtype=FORMAT,
    )  # fmt: skip
    run(kv, *(x.to(kv.device) for x in (c, r, slots)), flag)


COMPILED = pytest.mark.whole_matrix  # when it is asked for
APPENDS = [
    ("bf16", "i32", 64, 0, 0),
    ("bf16", "i32", 1, 0, 1),
    ("bf16", "i32", 69, 3, 1),
    ("bf16", "i32", 2, 1, 0),
    pytest.param("bf16", "i64", 69, 3, 1, marks=COMPILED),
    pytest.param("f16", "i64", 64, 0, 0, marks=COMPILED),
    pytest.param("f32", "i32", 2, 1, 0, marks=COMPILED),
    pytest.param("f32", "i32", 64, 0, 1, marks=COMPILED),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("in_dtype", "index_dtype", "page_size", "gap", "power_of_two"), APPENDS)
def test_append(
    target: str, in_dtype: str, index_dtype: str, page_size: int, gap: int, power_of_two: int
) -> None:
    """Rows of every kind; slots of none, past the pool and at the ends of their dtype; what lies
    beside a row stays as it was."""
    n, pages, index = 41, 130 // page_size + 2, INDEX[index_dtype]
    c, r = latents((n,), DTYPES[in_dtype])
    c[32:40, 128:384] *= 2.0**-14  # groups that differ
    c[38, ::3], c[39] = -0.0, -0.0
    slots = torch.randperm(pages * page_size)[:n]
    slots[5], slots[17] = -1, pages * page_size
    slots[40], slots[22] = torch.iinfo(index).max, torch.iinfo(index).min
    memory, kv = pool(pages, page_size, gap, device_of(target))
    append(target, kv, *(joint(c, r) if gap else (c, r)), slots.to(index), power_of_two)
    kept = (slots >= 0) & (slots < pages * page_size)
    want, rows = pool(pages, page_size, gap, "cpu")
    at = slots[kept] // page_size, slots[kept] % page_size
    rows[at] = vllm_rows(c[kept], r[kept], bool(power_of_two)).unsqueeze(1)
    assert_same(memory, want)
    scale = fields_of(rows)[2][at]
    assert (scale == FLT_MIN).any() and scale.isnan().any() and (scale > 100).any()
    assert (scale[:, :1] != scale).any(1).sum() > 5


def ties(exponent: int, down: int) -> Tensor:
    """(32, 512) bf16: groups with each mantissa, of 2^exponent, as their largest, beside all others
    ``down`` binades below, or up to it."""
    mantissa = 1 + torch.arange(128) / 128
    c = (mantissa * 2.0 ** (exponent - down)).expand(128, 128).clone()
    if not down:
        c = torch.minimum(c, (mantissa * 2.0**exponent)[:, None])
    c[:, 0] = mantissa * 2.0**exponent
    return c.view(32, 512).bfloat16()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("exponent", [0, -111, 118])
def test_quotients_are_ieee(target: str, exponent: int) -> None:
    """Quotients x / scale that are ties of e4m3, or next to one: products by the reciprocal miss
    some, and so does a residual that is subnormal."""
    c = torch.cat([ties(exponent, down) for down in (0, 1, 14, 16)])
    r = torch.zeros(len(c), 64).bfloat16()
    _, kv = pool(2, 64, 0, device_of(target))
    append(target, kv, c, r, torch.arange(len(c), dtype=torch.int32))
    assert_same(kv.reshape(-1, ROW)[: len(c)], vllm_rows(c, r))


@pytest.mark.whole_matrix
def test_every_quotient_of_f16() -> None:
    """2^20 pairs of mantissas."""
    _, kv = pool(1, 2048, 0, "cpu")
    mantissa = 1 + torch.arange(1024) / 1024
    for part in range(0, 1024, 256):
        groups = mantissa.repeat(256, 1)
        top = mantissa[part : part + 256]
        c = torch.minimum(groups, top[:, None]).view(256, 8, 128)
        c[:, :, 0] = top[:, None]
        c = c.reshape(-1, 512).half()
        r = torch.zeros(len(c), 64).half()
        append("sm_90a", kv, c, r, torch.arange(len(c)))
        assert_same(kv.view(-1, ROW)[: len(c)], vllm_rows(c, r))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("power_of_two", [0, 1])
def test_norm_and_rope(target: str, power_of_two: int) -> None:
    """RMS norm, RoPE and append, each rounded; tokens without a position are NaN."""
    n, positions = 9, torch.tensor([0, 5, 39, 7, 40, -1, 3, 3, 12])
    angle = torch.arange(40.0)[:, None] * 10000.0 ** -(torch.arange(32) / 32)
    table = torch.cat([angle.cos(), angle.sin()], -1)
    c, r = (torch.randn(n, d).bfloat16() for d in (512, 64))
    c[3, 5], c[7] = math.inf, 0.0
    weight = (1 + 0.2 * torch.randn(512)).bfloat16()
    slots = torch.tensor([3, 9, -1, 0, 14, 1, 15, 6, 20])
    memory, kv = pool(5, 3, 1, device_of(target))
    run = kernel(
        target, op="append_kv", index_dtype="i64", rope_style="interleaved", norm="rms",
        cache_dtype=FORMAT,
    )  # fmt: skip
    given = (c, r, slots, positions, table, weight)
    run(kv, *(x.to(kv.device) for x in given), 1e-6, power_of_two)
    c, r = rms_norm_rows(c, weight, 1e-6), rotate_rows(r, positions, table)
    want, rows = pool(5, 3, 1, "cpu")
    kept = (slots >= 0) & (slots < 15)
    rows[slots[kept] // 3, slots[kept] % 3] = vllm_rows(
        c[kept], r[kept], bool(power_of_two)
    ).unsqueeze(1)
    assert_same(memory, want)
    assert kept.sum() == 6 and fields_of(rows)[2].isnan().any(2).sum() == 3


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("page_size", [1, 2, 64, 69])
def test_fetch_pages(target: str, page_size: int) -> None:
    """Tokens of a warp in pages far apart; garbage behind the last page; rows past the lengths."""
    lengths = (75, 0, 33, 1)
    cache, table, seqlens = samples.filled_bytes(
        FORMAT, lengths, page_size, strided=page_size == 69
    )
    device, slots = device_of(target), fetched.padded_slots(table, seqlens, page_size, 80)
    want = fetched.rows_at(cache, slots, torch.bfloat16, 7.0)
    table[1] = 2147480000
    out = outputs((4, 80), torch.bfloat16, device, page_size == 64)
    run = kernel(target, op="fetch_dequant", mode="pages", cache_dtype=FORMAT)
    run(*(t.to(device) for t in (cache.kv, table, seqlens)), *out)
    for got, values in zip(out, want, strict=True):
        assert_same(got, values)
    assert want[0][0].isnan().any() and not want[0][2, :3].isnan().any()


@pytest.mark.parametrize("target", TARGETS)
def test_scales_of_any_size(target: str) -> None:
    """0 is zeros, whatever the bytes; the smallest numbers are numbers; NaN and infinity stay."""
    cache = samples.poisoned_bytes(FORMAT, 2, 9)
    kv = cache.named_tensors["kv"]
    content, rope, scale = fields_of(kv)
    content.view(torch.uint8)[0, :] = torch.arange(512).view(2, 256).flip(0).flatten().byte()
    rope[0] = torch.randn(9, 64).bfloat16()
    scale[0] = torch.tensor(
        [0.0, 1e-38, FLT_MIN, 2.0**-149, 1e38, math.inf, math.nan, 1.0, -2.0]
    )[:, None]  # fmt: skip
    scale[0, 7] = torch.tensor([0.0, 1.0, 0.0, 2.0])
    device = device_of(target)
    out = outputs((1, 9), torch.bfloat16, device, False)
    run = kernel(target, op="fetch_dequant", mode="pages", cache_dtype=FORMAT)
    table, length = torch.tensor([[0]]).int(), torch.tensor([9]).int()
    run(*(t.to(device) for t in (kv, table, length)), *out)
    values = content[0].float().view(9, 4, 128)
    want = torch.where(scale[0][..., None] == 0, 0.0, values * scale[0][..., None])
    assert_same(out[0][0], want.view(9, 512).bfloat16())
    assert_same(out[1][0], rope[0])
    assert values.isnan().any() and (out[0][0, 0] == 0).all() and (out[0][0, 7, :128] == 0).all()
    assert (out[0][0, 2].nan_to_num() != 0).any()


def test_pool_beyond_4_gib() -> None:
    """Pages more than 4 GiB apart, of which only the touched parts become resident."""
    page = 2**32 + 64
    try:
        memory = torch.empty(page + 5 * ROW, dtype=torch.uint8)
    except RuntimeError as error:
        pytest.skip(f"no address space for it: {error}")
    kv = memory.as_strided((2, 5, 1, ROW), (page, ROW, ROW, 1))
    c, r = latents((4,), torch.bfloat16, seed=2)
    slots = torch.tensor([9, 5, 0, 6], dtype=torch.int32)
    append("sm_90a", kv, c, r, slots)
    want = vllm_rows(c, r)
    assert_same(torch.stack([kv[s // 5, s % 5, 0] for s in slots.tolist()]), want)
    out = outputs((1, 2), torch.bfloat16, "cpu", True)
    run = kernel("sm_90a", op="fetch_dequant", mode="pages", cache_dtype=FORMAT)
    run(kv, torch.tensor([[1]]).int(), torch.tensor([2]).int(), *out)
    cache = PagedKVCache.from_tensors(kv, format=FORMAT)
    rows = fetched.rows_at(cache, torch.tensor([5, 6]), torch.bfloat16, 7.0)
    assert_same(torch.cat(out, -1)[0], torch.cat(rows, -1))


@pytest.mark.parametrize("n", [0, 1])
def test_few(n: int) -> None:
    memory, kv = pool(2, 3, 0, "cpu")
    c, r = torch.ones(n, 512).bfloat16(), torch.ones(n, 64).bfloat16()
    append("sm_90a", kv, c, r, torch.full((n,), 4, dtype=torch.int32))
    assert ((memory != 0x5B).flatten(2).any(2).sum()) == n
