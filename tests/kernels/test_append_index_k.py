"""``append_index_k`` on the software GPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from dsl_kernels.spec import VariantSpec
from snapmla import runtime
from snapmla.testing import index_reference as reference
from snapmla.testing import selfcheck
from softgpu import mutate, using
from tests.support.needs import needs_compiler

EVERYDAY = ("bf16", "i64", 1)


@needs_compiler
@pytest.mark.parametrize(
    ("in_dtype", "index_dtype", "hadamard"),
    [
        EVERYDAY,
        *[
            pytest.param(*axes, marks=pytest.mark.whole_matrix)
            for axes in (
                ("bf16", "i32", 0), ("bf16", "i64", 0), ("f16", "i32", 1), ("f32", "i64", 0),
                ("f32", "i32", 1),
            )
        ],
    ],
)  # fmt: skip
def test_clean_and_right(in_dtype: str, index_dtype: str, hadamard: int) -> None:
    spec = VariantSpec(
        op="append_index_k", in_dtype=in_dtype, index_dtype=index_dtype, hadamard=hadamard
    )
    workload = selfcheck.Workload(spec, runtime.find_or_build(spec, need_library=False).directory)
    with using(mutate.schedule(0)):
        result = workload.run()
    assert result.passed, result.summary


def test_the_hadamard_matrix_is_orthogonal() -> None:
    """Sylvester's, symmetric, so twice is nothing; products of rotated rows are those of rows."""
    matrix = reference.hadamard(torch.eye(128))
    assert torch.equal(matrix.sign(), matrix.sign().mT) and bool((matrix[0] > 0).all())
    assert torch.allclose(matrix @ matrix, torch.eye(128), atol=1e-6)
    assert torch.equal(matrix[1].sign(), torch.tensor([1.0, -1.0]).repeat(64))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_rule(power_of_two: bool) -> None:
    """The largest channel uses e4m3's range, by half at least where scales are powers of two."""
    k = torch.randn(50, 128) * torch.logspace(-9, 9, 50)[:, None]
    keys, scales = reference.quantize_keys(k, power_of_two=power_of_two)
    top = keys.float().abs().amax(1)
    large = k.abs().amax(1) >= 1e-4
    assert bool((top[large] >= (224 if power_of_two else 448)).all()) and bool((top <= 448).all())
    if power_of_two:
        assert torch.equal(scales.log2(), scales.log2().round())
    error = (keys.float() * scales[:, None] - k).abs().amax(1)
    assert bool((error <= 16.001 * scales).all()), "half a step of the largest values"
