"""Rows of all kinds, their quantisation in plain torch, and the kernels that take them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from tests.support.cases import allocate_pool

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
INDEX = {"i32": torch.int32, "i64": torch.int64}
FP8 = torch.float8_e4m3fn


def skip_unbuilt(spec: VariantSpec, device: torch.device) -> None:
    """Skips a test that asks a GPU machine without compiler for what no default build has."""
    points = spec.family.points(spec.arch)
    asked = spec not in (VariantSpec(op=spec.op, arch=spec.arch, **values) for values in points)
    if device.type == "cuda" and asked and variants.jit_refusal() and variants.find(spec) is None:
        pytest.skip(f"{spec.name} is compiled when it is asked for, and nothing compiles here")


def kernel(target: str, **fields: object) -> Callable[..., None]:
    """The kernel of one variant for ``target``; skips what a GPU machine without compiler lacks,
    because nobody builds it by default and nobody took it there."""
    device = device_of(target)
    arch = variants.arch_of(torch.device(device)) if device == "cuda" else target
    spec = VariantSpec(arch=arch, **fields)  # type: ignore[arg-type]
    skip_unbuilt(spec, torch.device(device))
    return variants.kernel(spec, device)


def device_of(target: str) -> str:
    return "cuda" if target == "cuda" else "cpu"


TOPS = (448, 320, 384, 256, 416, 288, 352, 240)


def quantised(
    c: Tensor, r: Tensor, token_dims: int = 1, slots: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The quantisation rule in torch: (content bytes, rope bf16, scale f32).

    The scale is shared over the last ``token_dims`` dimensions; ``slots`` of cached tokens.
    """
    c, r = c.float().cpu(), r.float().cpu()
    dims = tuple(range(-token_dims, 0))
    amax_c, amax_r = c.abs().amax(dims, keepdim=True), r.abs().amax(dims, keepdim=True)
    factor = torch.tensor([1 / 448])
    if slots is not None:
        factor = torch.tensor([1 / TOPS[s % 8] for s in slots.tolist()])[:, None]
    scale = torch.maximum(amax_c * factor, amax_r * 2.0**-40)
    scale = torch.maximum(scale, torch.tensor(2.0**-80))
    scale = torch.where(scale.isfinite(), scale, math.nan)
    inv = 1 / scale
    content = (c * inv).clamp(-448, 448).to(FP8).view(torch.uint8)
    content = torch.where(scale.isnan(), 0x7F, content)
    return content, (r * inv).to(torch.bfloat16), scale.reshape(scale.shape[: c.dim() - token_dims])


def latents(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of all kinds: magnitudes 1e-3 .. 1e3, outliers, zeros, huge and tiny RoPE, NaN, Inf."""
    g = torch.Generator().manual_seed(seed)
    rows = math.prod(shape)
    size = 10 ** (torch.rand(rows, 1, generator=g) * 6 - 3)
    c = torch.randn(rows, 512, generator=g) * size
    r = torch.randn(rows, 64, generator=g) * size
    big = 6e4 if dtype == torch.float16 else 1e30
    special: list[Callable[[int], None]] = [
        lambda i: c[i].zero_(),
        lambda i: (c[i].zero_(), r[i].zero_()),  # type: ignore[func-returns-value]
        lambda i: (c[i].zero_(), r[i].mul_(0).add_(1e3)),  # type: ignore[func-returns-value]
        lambda i: (c[i].zero_(), r[i].fill_(big)),  # type: ignore[func-returns-value]
        lambda i: c[i, 511:].fill_(math.nan),
        lambda i: c[i, 7:8].fill_(-math.inf),
        lambda i: r[i, 63:].fill_(math.nan),
        lambda i: r[i, :1].fill_(math.inf),
        lambda i: c[i, 300:301].fill_(-big),
        lambda i: c[i].mul_(1e-30),
        lambda i: r[i, 5:6].fill_(1000.0),
    ]
    for i, change in enumerate(special):
        change((i * 3 + 1) % rows)
    return c.view(*shape, 512).to(dtype), r.view(*shape, 64).to(dtype)


def joint(c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """The same rows as two slices of one (..., 576) tensor."""
    both = torch.cat([c, r], -1)
    return both[..., :512], both[..., 512:]


def random_cache(
    pages: int, page_size: int, layout: str, device: str
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """A cache with every byte value, scales over ten decades and NaN; and its fp32 contents."""
    pool = allocate_pool(pages, page_size, layout, torch.device(device), 255)
    content = torch.randint(0, 256, (pages, page_size, 512), dtype=torch.uint8)
    rope = (torch.randn(pages, page_size, 64) * 100).bfloat16()
    scale = 10 ** (torch.rand(pages, page_size) * 10 - 7)
    scale[0, 1] = math.nan
    pool[0].view(torch.uint8).copy_(content)
    pool[1].copy_(rope)
    pool[2].copy_(scale)
    nope32 = content.view(FP8).float() * scale[..., None]
    return pool, nope32, rope.float() * scale[..., None]


def outputs(shape: tuple[int, ...], dtype: torch.dtype, device: str, slices: bool) -> list[Tensor]:
    if slices:
        both = torch.full((*shape, 576), 7.0, dtype=dtype, device=device)
        return [both[..., :512], both[..., 512:]]
    return [torch.full((*shape, d), 7.0, dtype=dtype, device=device) for d in (512, 64)]
