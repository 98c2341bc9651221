"""References of index logits: in fp64, and by the tensor core's own sums, Hopper's or Blackwell's.

A call is made of tensors as the kernel takes them: q (rows, heads, 128) e4m3 or its bytes, w (rows,
heads) fp32, a cache of pages (``dsl_kernels.formats.index_cache``), and tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsl_kernels.formats.dims import QK_ROPE_HEAD_DIM
from dsl_kernels.formats.index_cache import INDEX_DIM, LEAST_AMAX, PAGE, PAGE_BYTES, SCALES_AT
from snapmla.testing import accumulate, rope

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
EXACT = "exact"
# How the 128 channels of q . k are added, in one chain; of each architecture its tensor core's way.
Products = Callable[[Tensor, Tensor], Tensor]
PRODUCTS: dict[str, Products] = {
    "hopper": accumulate.hopper_fp8_dot,
    "blackwell": accumulate.blackwell_fp8_dot,
    EXACT: lambda q, k: q.double() @ k.double().T,
}
PRODUCTS_OF = {"sm_90a": "hopper", "sm_100a": "blackwell"}


class Row(NamedTuple):
    """A query token: its row of the block table, and how many tokens it sees."""

    sequence: int
    seen: int


class Scores(NamedTuple):
    """Scores of one row, fp64: a value and a size for each token that it sees.

    Attributes:
        values: (tokens,).
        size: (tokens,) sum_h |w| |relu| scale; errors may be a small fraction of it.
    """

    values: Tensor
    size: Tensor


def rows_of(given: Mapping[str, Any]) -> list[Row]:
    """The rows of a call; a sequence has the tokens that its pages and columns hold at most."""
    lengths, table, rows = given["cache_seqlens"], given["block_table"], given["q"].shape[0]
    most = min(PAGE * table.shape[1], given["out"].shape[1])
    starts = given["cu_seqlens_q"].tolist()
    if not starts:
        starts = [i * given["s_q"] for i in range(len(lengths) + 1)]
    found = [Row(0, 0)] * rows
    for i, length in enumerate(lengths.tolist()):
        length, n = min(max(length, 0), most), starts[i + 1] - starts[i]
        for j in range(n):
            found[starts[i] + j] = Row(i, max(0, length - n + 1 + j))
    return found


def pages_of(cache: Tensor) -> tuple[Tensor, Tensor]:
    """(keys (pages, 64, 128) e4m3, scales (pages, 64) fp32) of pages (pages, bytes), copied."""
    keys, scales = (
        part.clone(memory_format=torch.contiguous_format)  # one page's parts are contiguous views
        for part in (cache[:, :SCALES_AT], cache[:, SCALES_AT:PAGE_BYTES])
    )
    return keys.view(E4M3).view(-1, PAGE, INDEX_DIM), scales.view(torch.float32)


def fill_pages(cache: Tensor, keys: Tensor, scales: Tensor) -> None:
    """Writes keys (pages, 64, 128) e4m3 and scales (pages, 64) into pages (pages, bytes)."""
    cache[:, :SCALES_AT] = keys.contiguous().view(torch.uint8).view(len(keys), -1)
    cache[:, SCALES_AT:PAGE_BYTES] = scales.contiguous().view(torch.uint8)


def scores(given: Mapping[str, Any], products: str = "hopper") -> list[Scores]:
    """Scores of each row of a call, by ``PRODUCTS[products]``; the sum over heads is in fp64."""
    q, found = given["q"].view(E4M3), []
    for r, (keys, scale) in enumerate(_seen(given)):
        dots, scale = PRODUCTS[products](q[r], keys).double(), scale.double()
        terms = given["w"][r].double()[:, None] * torch.relu(dots)
        found.append(Scores(terms.sum(0) * scale, terms.abs().sum(0) * scale.abs()))
    return found


def bits_on_blackwell(
    given: Mapping[str, Any], products: Products = accumulate.blackwell_fp8_dot
) -> list[Tensor]:
    """fp32 scores of each row, bit for bit as ``sm100/indexer/index_logits.py``.

    Four sums take heads h, h + 4, ... by FMA, with one rounding for each head.  They are added in
    pairs, and the total is multiplied by the token's scale.
    """
    q, found = given["q"].view(E4M3), []
    for r, (keys, scale) in enumerate(_seen(given)):
        terms = torch.relu(products(q[r], keys)).view(q.shape[1] // 4, 4, len(keys))
        weights = given["w"][r].view(-1, 4, 1)
        sums = torch.zeros(4, len(keys))
        for x, w in zip(terms, weights, strict=True):
            sums = fma(x, w, sums)
        found.append(((sums[0] + sums[1]) + (sums[2] + sums[3])) * scale)
    return found


def fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x * y + z of fp32, rounded once: in fp64 the product is exact and the sum is rounded to odd,
    so that rounding it again is as if it had been exact."""
    product, addend = x.double() * y.double(), z.double()
    total = product + addend
    back = total - product
    rest = (product - (total - back)) + (addend - back)
    even = (total.view(torch.int64) & 1) == 0
    other = torch.nextafter(total, torch.where(rest > 0, torch.inf, -torch.inf).to(total))
    return torch.where((rest != 0) & even & torch.isfinite(total), other, total).float()


def _seen(given: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields for each row the keys (tokens, 128) that it sees, and their scales (tokens,)."""
    keys, scales = pages_of(given["cache"])
    for sequence, seen in rows_of(given):
        ids = given["block_table"][sequence].long().clamp(0, len(keys) - 1)
        ids = ids[: -(-seen // PAGE)]
        yield keys[ids].reshape(-1, INDEX_DIM)[:seen], scales[ids].reshape(-1)[:seen]


def magnitudes(given: Mapping[str, Any]) -> list[Tensor]:
    """sum_h |w| sum_c |q k| scale of each row and token, which bounds what a chain of sums cuts."""
    found = []
    for r, (keys, scale) in enumerate(_seen(given)):
        dots = given["q"].view(E4M3)[r].double().abs() @ keys.double().abs().T
        terms = given["w"][r].double().abs()[:, None] * dots
        found.append(terms.sum(0) * scale.double().abs())
    return found


# ---------------------------------------------------------------------------- keys

ROPE = QK_ROPE_HEAD_DIM


def layer_norm(k: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of keys (n, 128), bit for bit as ``append_index_k``: in fp32, each operation
    rounded, of k's dtype at the end; a lane adds its four channels, then lanes l and l ^ 16, l ^ 8
    and so on."""
    x = k.float()
    x = x - _warp_sum(x) * (1.0 / INDEX_DIM)
    variance = _warp_sum(x * x) * (1.0 / INDEX_DIM)
    variance = variance + torch.tensor(eps, dtype=torch.float32, device=k.device)
    inverse = 1.0 / variance.double().sqrt().float()
    return (x * inverse * weight + bias).to(k.dtype)


def rms_norm(k: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of keys (n, 128), bit for bit as ``append_index_k``, as ``layer_norm``."""
    x = k.float()
    mean = _warp_sum(x * x) * (1.0 / INDEX_DIM)
    mean = mean + torch.tensor(eps, dtype=torch.float32, device=k.device)
    inverse = 1.0 / mean.double().sqrt().float()
    return (x * inverse * weight).to(k.dtype)


def _warp_sum(x: Tensor) -> Tensor:
    """(n, 1), in the order of a warp whose lanes have four channels each."""
    each = x.view(-1, INDEX_DIM // 4, 4)
    total = each[..., 0]
    for channel in range(1, 4):
        total = total + each[..., channel]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total


def rotate(
    k: Tensor, positions: Tensor, cos_sin: Tensor, is_neox: bool, last: bool = False
) -> Tensor:
    """Keys with their first 64 channels turned, or the ``last``."""
    if last:
        turned = rope.rotate_rows(k[:, -ROPE:], positions, cos_sin, is_neox)
        return torch.cat([k[:, :-ROPE], turned], 1)
    turned = rope.rotate_rows(k[:, :ROPE], positions, cos_sin, is_neox)
    return torch.cat([turned, k[:, ROPE:]], 1)


HADAMARD_FACTOR = INDEX_DIM**-0.5


def hadamard(k: Tensor) -> Tensor:
    """Rows of 128 times the Hadamard matrix in Sylvester's order and 128^-0.5; fp32, in the order
    in which the kernel adds: channels that differ in bit 0 first, then bit 1, and so on."""
    k = k.float()
    for bit in range(INDEX_DIM.bit_length() - 1):
        pairs = k.view(-1, INDEX_DIM >> (bit + 1), 2, 1 << bit)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        k = torch.stack([low + high, low - high], 2).reshape(-1, INDEX_DIM)
    return k * torch.tensor(HADAMARD_FACTOR, dtype=torch.float32)


def quantize_keys(k: Tensor, *, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """(e4m3, fp32 scale) of keys (n, 128), bit for bit as ``append_index_k`` stores them."""
    k = k.float()
    amax = k.abs().amax(-1)
    bad = ~torch.isfinite(k).all(-1)
    scale = amax.clamp_min(LEAST_AMAX) / E4M3_MAX
    if power_of_two:
        below = (1 << 23) - 1
        scale = ((scale.view(torch.int32) + below) & ~below).view(torch.float32)
    scale = torch.where(bad, torch.nan, scale)
    values = torch.where(bad[:, None], torch.nan, k / scale[:, None])
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scale
