"""Software GPU: it models every form of instruction that a compiled variant has."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsl_kernels.spec import VariantSpec
from softgpu.coverage import coverage


def test_compiled_variants_have_no_unmodelled_form(
    variant_dir: Path, specs: list[VariantSpec]
) -> None:
    files = [variant_dir / f"{spec.name}.ptx" for spec in specs]
    files = [path for path in files if path.exists()]
    if not files:
        pytest.skip("nothing is built")
    assert not coverage(files).missing
