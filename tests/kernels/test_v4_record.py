"""``append_kv`` and ``fetch_dequant`` over DeepSeek V4's pages, 584 bytes a token, byte for byte.

The truth is the engines' append written down once more, group by group, into pages whose planes are
reckoned here: data of P tokens, 576 bytes each, then their scales, 8 bytes each.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from snapmla.testing import fetched
from snapmla.testing.rope import rotate_rows
from snapmla.testing.workloads import samples
from tests.support.bits import assert_same
from tests.support.needs import TARGETS, needs_kernels
from tests.support.rows import DTYPES, FP8, INDEX, device_of, kernel, latents, outputs

pytestmark = needs_kernels
FORMAT, TOKEN = "fp8_v4", 584
RARELY = pytest.mark.whole_matrix


def v4_token(c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """(576 bytes of data, 8 of scales) of a token; one with a NaN or an infinity is NaN."""
    content, scales = [], []
    for group in c.float().split(64):
        largest = max(float(group.abs().max()), 1e-4)
        mantissa, exponent = math.frexp(float(torch.tensor(largest) / torch.tensor(448.0)))
        power = exponent - (mantissa == 0.5)  # up to the next power of two
        content.append((group / 2.0**power).clamp(-448, 448).to(FP8).view(torch.uint8))
        scales.append(power + 127)
    rope = r.bfloat16()
    if not (c.isfinite().all() and r.isfinite().all()):
        content, scales = [torch.full((448,), 0x7F, dtype=torch.uint8)], [255] * 7
        rope = torch.full((64,), 0x7FFF, dtype=torch.int16).view(torch.bfloat16)
    return torch.cat([*content, rope.view(torch.uint8)]), torch.tensor([*scales, 0]).byte()


def store(memory: Tensor, page_size: int, slots: Tensor, c: Tensor, r: Tensor) -> None:
    """Tokens into pages (pages, bytes)."""
    for slot, *token in zip(slots.tolist(), c, r, strict=True):
        page, offset = divmod(slot, page_size)
        data, scales = v4_token(*token)
        memory[page, 576 * offset : 576 * (offset + 1)] = data
        at = 576 * page_size + 8 * offset
        memory[page, at : at + 8] = scales


def pool(pages: int, page_size: int, gap: int, device: str) -> tuple[Tensor, Tensor]:
    """(memory (pages, bytes) of 0x5b, its tokens as engines shape them), ``gap`` bytes between."""
    size = -(-page_size * TOKEN // 16) * 16 + gap
    memory = torch.full((pages, size), 0x5B, dtype=torch.uint8, device=device)
    return memory, memory[:, : page_size * TOKEN].unflatten(1, (page_size, 1, TOKEN))


APPENDS = [
    ("bf16", "i32", 3, 64),
    pytest.param("bf16", "i32", 1, 0, marks=RARELY),
    pytest.param("bf16", "i32", 64, 0, marks=RARELY),
    pytest.param("bf16", "i64", 256, 320, marks=RARELY),
    pytest.param("f16", "i64", 64, 0, marks=RARELY),
    pytest.param("f32", "i32", 2, 0, marks=RARELY),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("in_dtype", "index_dtype", "page_size", "gap"), APPENDS)
def test_append(target: str, in_dtype: str, index_dtype: str, page_size: int, gap: int) -> None:
    """Tokens of every kind; slots of none, past the pool and at the ends of their dtype; what lies
    beside a token stays as it was; tokens that are rows of 512 channels."""
    n, pages, index = 41, 60 // page_size + 2, INDEX[index_dtype]
    c, r = latents((n,), DTYPES[in_dtype])
    c = c[:, :448].clone()
    c[32:40, 128:384] *= 2.0**-12  # groups that differ
    c[38, ::3], c[39], c[31, 64:128] = -0.0, -0.0, 448.0
    c[30, 0:64], c[29, 0:64] = 1e-4, 3e-6
    joint = torch.cat([c, r], 1)
    slots = torch.randperm(pages * page_size)[:n]
    slots[5], slots[17] = -1, pages * page_size
    slots[40], slots[22] = torch.iinfo(index).max, torch.iinfo(index).min
    memory, kv = pool(pages, page_size, gap, device_of(target))
    run = kernel(
        target, op="append_kv", in_dtype=in_dtype, index_dtype=index_dtype, cache_dtype=FORMAT
    )
    tokens = joint.to(kv.device)
    run(kv, tokens[:, :448], tokens[:, 448:], slots.to(index).to(kv.device), 1)
    kept = (slots >= 0) & (slots < pages * page_size)
    want, _ = pool(pages, page_size, gap, "cpu")
    store(want, page_size, slots[kept], c[kept], r[kept])
    assert_same(memory, want)
    assert (want == 255).any() and (want == 105).any()  # a token of NaN, a least scale


@RARELY
@pytest.mark.parametrize("target", TARGETS)
def test_rope(target: str) -> None:
    """RoPE and append; tokens without a position are NaN."""
    n, positions = 9, torch.tensor([0, 5, 39, 7, 40, -1, 3, 3, 12])
    angle = torch.arange(40.0)[:, None] * 10000.0 ** -(torch.arange(32) / 32)
    table = torch.cat([angle.cos(), angle.sin()], -1)
    c, r = (torch.randn(n, d).bfloat16() for d in (448, 64))
    slots = torch.tensor([3, 9, -1, 0, 14, 1, 15, 6, 20])
    memory, kv = pool(5, 3, 16, device_of(target))
    run = kernel(
        target, op="append_kv", index_dtype="i64", rope_style="interleaved", cache_dtype=FORMAT
    )
    run(kv, *(x.to(kv.device) for x in (c, r, slots, positions, table)), 1)
    r = rotate_rows(r, positions, table)
    want, _ = pool(5, 3, 16, "cpu")
    kept = (slots >= 0) & (slots < 15)
    store(want, 3, slots[kept], c[kept], r[kept])
    assert_same(memory, want)


def on_device(kv: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """The same bytes at the same strides, which a copy to a GPU would not keep; 0xff between."""
    if torch.device(device).type == "cpu":
        return kv
    room = kv.untyped_storage().nbytes() - kv.storage_offset()
    memory = torch.full((room,), 255, dtype=torch.uint8, device=device)
    return memory.as_strided(kv.shape, kv.stride()).copy_(kv)


FETCHES = [3, *(pytest.param(p, marks=RARELY) for p in (1, 2, 64, 256))]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("page_size", FETCHES)
def test_fetch_pages(target: str, page_size: int) -> None:
    """Tokens of a warp in pages far apart, whose bytes behind the scales are 0xff; garbage behind
    the last page; rows past the lengths; each field where a page has it."""
    lengths = (75, 0, 33, 1)
    strided = page_size == 64
    cache, table, seqlens = samples.filled_bytes(FORMAT, lengths, page_size, strided=strided)
    device, slots = device_of(target), fetched.padded_slots(table, seqlens, page_size, 80)
    want = fetched.rows_at(cache, slots, torch.bfloat16, 7.0)
    kv = cache.named_tensors["kv"]
    pages = kv.as_strided((kv.shape[0], page_size * TOKEN), (kv.stride(0), 1))
    for t in range(0, 75, 7):
        page, offset = divmod(t, page_size)
        at = int(table[0, page])
        data = pages[at, 576 * offset : 576 * (offset + 1)]
        scales = pages[at, 576 * page_size + 8 * offset :][:7]
        values = data[:448].contiguous().view(FP8).float().view(7, 64)
        factor = torch.exp2(scales.double() - 127).float()[:, None]
        factor[scales == 255] = math.nan
        assert_same(want[0][0, t], (values * factor).flatten().bfloat16())
        assert_same(want[1][0, t], data[448:].contiguous().view(torch.bfloat16))
    table[1] = 2147480000
    both = outputs((4, 80), torch.bfloat16, device, True)  # content and RoPE of rows of 576
    nope, rope = both[0][..., :448], both[1]
    run = kernel(target, op="fetch_dequant", mode="pages", cache_dtype=FORMAT)
    run(on_device(kv, device), table.to(device), seqlens.to(device), nope, rope)
    for got, values in zip((nope, rope), want, strict=True):
        assert_same(got, values)
    assert (both[0][..., 448:] == 7).all()  # behind the content nobody writes
    assert want[0][0].isnan().any() and not want[0][2, :3].isnan().any()


@RARELY
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_every_scale(target: str, dtype: str) -> None:
    """Each byte: 2^(b - 127), also below the normal numbers, and NaN."""
    _, kv = pool(1, 256, 0, "cpu")
    kv.view(1, -1)[0, : 576 * 256] = torch.arange(576 * 256).remainder(127).byte()
    scales = torch.arange(256).byte()[:, None].expand(256, 8).clone()
    kv.view(1, -1)[0, 576 * 256 :] = scales.flatten()
    device, own = device_of(target), DTYPES[dtype]
    out = torch.full((1, 256, 512), 7.0, dtype=own, device=device)
    run = kernel(target, op="fetch_dequant", in_dtype=dtype, mode="pages", cache_dtype=FORMAT)
    table, length = torch.tensor([[0]]).int(), torch.tensor([256]).int()
    run(*(t.to(device) for t in (kv, table, length)), out[..., :448], out[..., 448:])
    data = kv.view(-1)[: 576 * 256].view(256, 576)
    factor = torch.exp2(torch.arange(256).double() - 127).float()[:, None]
    factor[255] = math.nan
    assert_same(out[0, :, :448], (data[:, :448].contiguous().view(FP8).float() * factor).to(own))
    assert_same(out[0, :, 448:], data[:, 448:].contiguous().view(torch.bfloat16).to(own))
