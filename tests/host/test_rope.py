"""``rope_append_kv`` and ``rope_quantize_q`` through the public API."""

from __future__ import annotations

import pytest
import torch

import snapmla
from snapmla import PagedKVCache
from tests.support.bits import same_bits
from tests.support.needs import needs_compiler
from tests.support.rotation import EPS, MAX_POSITION, rotation
from tests.support.rows import joint, latents

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64


@needs_compiler
@pytest.mark.parametrize("norm", [False, True])
def test_append_is_the_steps(norm: bool) -> None:
    """The norm goes with the other style and table, so that both are variants of the test set."""
    n = 21
    how = rotation(n, BF16, table=BF16 if norm else F32, index=I64, is_neox=norm, norm=norm)
    c, r = joint(*latents((n,), BF16))
    slots = torch.randperm(64)[:n]
    slots[4] = -1
    got, want = (PagedKVCache.allocate(4, 16, at, "cpu") for at in ("row640", "split"))
    for cache in (got, want):
        cache.content_u8.zero_()
        cache.rope.zero_()
        cache.scale.zero_()
    snapmla.rope_append_kv(
        got, c, r, slots, how.positions, how.cos_sin_cache, is_neox=how.is_neox,
        norm_weight=how.weight, norm_eps=EPS,
    )  # fmt: skip
    snapmla.append_kv(want, *how.steps(c, r), slots)
    for a, b in zip(
        (got.content_u8, got.rope, got.scale), (want.content_u8, want.rope, want.scale), strict=True
    ):
        assert same_bits(a, b)
    assert got.scale.count_nonzero() == n - 1


@needs_compiler
def test_positions_of_queries_may_be_flat_or_packed() -> None:
    how = rotation(6, BF16, table=F32, index=I64, is_neox=False)
    c, r = latents((2, 3, 5), BF16)
    _, turned = how.steps(c.flatten(0, 1), r.flatten(0, 1))
    want = snapmla.quantize_q(c, turned.view_as(r))
    packed = snapmla.rope_quantize_q(
        c.flatten(0, 1), r.flatten(0, 1), how.positions, how.cos_sin_cache
    )
    out = snapmla.quantize_q(torch.zeros_like(c), torch.zeros_like(r))
    for positions in (how.positions, how.positions.view(2, 3)):
        got = snapmla.rope_quantize_q(c, r, positions, how.cos_sin_cache, out=out)
        assert got is out
        for part in ("nope_u8", "rope", "scale"):
            assert same_bits(getattr(got, part), getattr(want, part)), part
            assert same_bits(getattr(packed, part), getattr(want, part).flatten(0, 1)), part
        out.scale.zero_()


def test_no_tokens_launch_nothing() -> None:
    cache = PagedKVCache.allocate(2, 16, device="cpu")
    table = torch.zeros(MAX_POSITION, 64)
    none = torch.zeros(0, dtype=I64)
    tokens = torch.zeros(0, 512).bfloat16(), torch.zeros(0, 64).bfloat16()
    snapmla.rope_append_kv(cache, *tokens, none, none, table)
    q = torch.zeros(0, 1, 4, 512).bfloat16(), torch.zeros(0, 1, 4, 64).bfloat16()
    assert snapmla.rope_quantize_q(*q, none, table).rows_shape == (0, 1, 4)


@pytest.mark.parametrize("name", ["positions", "cos_sin_cache", "norm_weight"])
def test_angles_over_the_cache(name: str) -> None:
    cache = PagedKVCache.allocate(4, 16, device="cpu")
    memory = cache.content_u8.view(-1)
    given = {
        "positions": torch.zeros(3, dtype=I64), "cos_sin_cache": torch.zeros(5, 64),
        "norm_weight": torch.zeros(512, dtype=BF16),
    }  # fmt: skip
    over = given[name]
    given[name] = memory[: over.nbytes].view(over.dtype).view(over.shape)
    weight = given.pop("norm_weight")
    tokens = torch.zeros(3, 512).bfloat16(), torch.zeros(3, 64).bfloat16()
    with pytest.raises(ValueError, match=f"^{name}: expected memory apart from cache.content,"):
        snapmla.rope_append_kv(cache, *tokens, torch.arange(3), **given, norm_weight=weight)
