"""The family of ``sum_pipeline``: what a test declares, apart from the kernel, as families are."""

from __future__ import annotations

from dsl_kernels.families.family import Axis, Family

FAMILY = Family(
    "sum_rows",
    (Axis("row_tile", "r", (8,), 8), Axis("page_size", "p", (16, 64, 128), 64)),
    module=lambda _arch, _values: "tests.support.sum_pipeline",
    points=lambda _arch: iter(()),
)
