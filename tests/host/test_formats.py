"""Cache formats: one table, which everything else follows."""

from __future__ import annotations

import pytest
import torch

from dsl_kernels.families.family import CACHE_DTYPE
from dsl_kernels.formats.registered import DEFAULT, FORMATS
from snapmla import PagedKVCache, checks


def test_a_format_is_a_value_of_the_axis() -> None:
    assert tuple(FORMATS) == CACHE_DTYPE.values and CACHE_DTYPE.default == DEFAULT


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_takes_what_its_format_says(name: str) -> None:
    """Bytes of the memory of a pool, which nothing else is in."""
    fmt = FORMATS[name]
    dtype = name if fmt.named or name == DEFAULT else getattr(torch, fmt.element)
    cache = PagedKVCache.allocate(2, 64, device="cpu", dtype=dtype)
    assert cache.format == name and cache.dtype is getattr(torch, fmt.element)
    assert fmt.named or checks.format_of(cache.content) == name
    parts = [getattr(cache, part) for part in fmt.parts]
    assert sum(part.nbytes for part in parts) == 2 * 64 * fmt.token_bytes


def test_a_dtype_of_no_format_is_refused() -> None:
    wanted = r"content: expected dtype float8_e4m3fn or bfloat16 or float16, got float32"
    with pytest.raises(TypeError, match=wanted):
        checks.format_of(torch.zeros(1))
