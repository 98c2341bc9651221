"""Equal bit for bit: what "the same" means where rounding is no excuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Shape, dtype and every bit, NaN payloads and signs of zero included."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    a, b = (t.contiguous().view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def assert_same_bits(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """``same_bits`` of every pair."""
    assert len(found) == len(wanted)
    for number, (a, b) in enumerate(zip(found, wanted)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), number
        assert same_bits(a, b), f"tensor {number} differs"


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit, any NaN being as good as another."""
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    if actual.dtype.is_floating_point:
        assert torch.equal(actual.isnan(), expected.isnan())
        bits = {2: torch.int16, 4: torch.int32}[actual.element_size()]
        actual = torch.where(actual.isnan(), 0, actual).view(bits)
        expected = torch.where(expected.isnan(), 0, expected).view(bits)
    different = (actual != expected).nonzero()
    assert not len(different), f"{len(different)} differ, first at {different[0].tolist()}"
