"""Service code tells formats of a cache by their records' fields, by no list of names."""

from __future__ import annotations

import ast

import pytest

from tests.support.format_names import comparisons, listed, names


def test_nobody_lists_formats() -> None:
    assert listed() == {"names": [], "comparisons": []}


@pytest.mark.parametrize(
    "line",
    [
        "KINDS = ('fp8_v4', 'fp8')",
        "hint = 'sparse decode over fp8_ds_mla rows'",
        "f(format='fp8_nope')",
        "text = f'{x} of fp8_v41_rows'",
    ],
)
def test_a_name_is_found(line: str) -> None:
    assert names(ast.parse(line)) == [1]


@pytest.mark.parametrize(
    "line",
    [
        "cache.format == 'bf16'",
        "'fp8' != plan.cache_dtype",
        "fmt in ('', 'fp8')",
        "cache.format not in formats.BYTES",
        "record.name == CACHES[pipeline]",
        "model.dtype == ROWS",
        "kind == DEFAULT",
        "TAKEN = Names(f); x in TAKEN",
        "from a.formats import BYTES as OURS; x in OURS",
    ],
)
def test_a_comparison_is_found(line: str) -> None:
    assert comparisons(ast.parse(line)) == [1]


@pytest.mark.parametrize(
    "line",
    [
        '"""A cache of fp8_v4."""',
        "plan.cache_dtype == cache.format",
        "FORMATS[cache.format].rope is None",
        "spec.in_dtype == 'bf16'",
        "record.scale.dtype == 'ue8m0'",
        "content.dtype in checks.ROWS",
    ],
)
def test_what_is_right_is_not(line: str) -> None:
    assert not names(ast.parse(line)) and not comparisons(ast.parse(line))
