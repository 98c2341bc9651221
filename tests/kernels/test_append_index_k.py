"""``append_index_k`` on the software GPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from dsl_kernels import registry
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import index_reference as reference
from snapmla.testing import selfcheck
from softgpu import mutate, using
from tests.support.needs import needs_compiler

NAME = "append_index_k_x{}_sm90a"


@needs_compiler
@pytest.mark.parametrize(
    "axes",
    [
        "bf16_ii64_hd1",
        *[
            pytest.param(axes, marks=pytest.mark.whole_matrix)
            for axes in (
                "bf16_ii32", "bf16_ii64", "f16_ii32_hd1", "f32_ii64", "f32_ii32_hd1",
                "bf16_ii64_neox", "bf16_ii64_neox_layer", "bf16_ii64_hd1_neox_layer_csbf16",
                "bf16_ii64_hd1_interleaved_layer", "f16_ii32_interleaved_csf16",
                "f32_ii32_hd1_neox_layer_posi64", "f32_ii64_interleaved_layer",
                "bf16_ii64_interleaved_rms_last", "f32_ii64_neox_rms", "f16_ii32_hd1_neox_last",
            )
        ],
    ],
)  # fmt: skip
def test_clean_and_right(axes: str) -> None:
    spec = VariantSpec.from_name(NAME.format(axes))
    workload = selfcheck.Workload(spec, variants.find_or_build(spec, need_library=False).directory)
    with using(mutate.schedule(0)):
        result = workload.run()
    assert result.passed, result.summary


def test_what_cannot_be_built_says_why() -> None:
    reasons = [
        registry.feasible(VariantSpec(op="append_index_k", **axes))
        for axes in (
            {"norm": "layer"}, {"turned": "last"}, {"rope_style": "neox", "cos_sin_dtype": "f16"}
        )
    ]  # fmt: skip
    assert reasons == [
        "the norm comes with a rotary embedding, of style interleaved or neox",
        "channels are turned by a rotary embedding, of style interleaved or neox",
        "cos and sin are f32 or as the input, bf16, not f16",
    ]


def test_layer_norm_is_torchs() -> None:
    """But for roundings of fp32; bit for bit is what kernels are held to."""
    k, weight, bias = torch.randn(50, 128) * 3 + 1, torch.rand(128) + 0.5, torch.randn(128)
    found = reference.layer_norm(k, weight, bias, 1e-6)
    want = torch.nn.functional.layer_norm(k.double(), (128,), weight.double(), bias.double(), 1e-6)
    assert torch.allclose(found.double(), want, atol=1e-5)


def test_rms_norm_is_torchs() -> None:
    """Likewise; V4's, whose keys have a mean."""
    k, weight = torch.randn(50, 128) * 3 + 1, torch.rand(128) + 0.5
    found = reference.rms_norm(k, weight, 1e-6)
    want = torch.nn.functional.rms_norm(k.double(), (128,), weight.double(), 1e-6)
    assert torch.allclose(found.double(), want, atol=1e-5)


def test_the_last_channels_are_turned_as_the_first() -> None:
    k, position = torch.randn(5, 128), torch.arange(5)
    angles = torch.randn(8, 64)
    found = reference.rotate(k, position, angles, False, last=True)
    want = reference.rotate(k.roll(64, 1), position, angles, False)
    assert torch.equal(found, want.roll(64, 1)) and not torch.equal(found, k)


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
