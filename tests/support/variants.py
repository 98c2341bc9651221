"""The variants of a run of the tests."""

from __future__ import annotations

from codegen import matrix, toolchain
from dsl_kernels.families import ARCHS
from dsl_kernels.spec import VariantSpec


def shipped(*, whole: bool) -> list[VariantSpec]:
    """Of both architectures: every variant, or the test set of them."""
    if not toolchain.have_compiler():  # without it nothing is known of the matrix
        return []
    pick = matrix.default_specs if whole else matrix.sample_specs
    return [spec for arch in ARCHS for spec in pick(arch)]
