"""The variants of a run of the tests."""

from __future__ import annotations

from codegen import matrix, toolchain
from dsl_kernels.families import FAMILIES
from dsl_kernels.spec import VariantSpec

HELPER_OPS = tuple(op for op, family in FAMILIES.items() if family.helper)


def shipped(*, whole: bool) -> list[VariantSpec]:
    """All of sm_90a, the helper kernels of sm_100a: every variant, or the test set of them."""
    if not toolchain.have_compiler():  # without it nothing is known of the matrix
        return []
    pick = matrix.default_specs if whole else matrix.sample_specs
    return [*pick("sm_90a"), *(s for s in pick("sm_100a") if s.op in HELPER_OPS)]
