"""The matrix: what is in it, and that every pruned point says why."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from codegen import closure, matrix, toolchain
from codegen.__main__ import app
from dsl_kernels.spec import PAGE_SIZES, PIPELINES, ROW_TILES, cluster_of, decode_spec


def test_decode_axes_are_complete() -> None:
    decode = [s for s in matrix.points("sm_90a") if s.op == "decode"]
    assert len(decode) == len(PIPELINES) * len(ROW_TILES) * len(PAGE_SIZES) * 2
    assert all(s.cluster == cluster_of(s.row_tile) for s in decode)


def test_helper_axes_are_complete() -> None:
    helpers = [s for s in matrix.points("sm_100a") if s.op != "decode"]
    assert len(helpers) == 1 + 2 + 3 * (2 + 2 + 2)


@pytest.mark.skipif(not toolchain.have_compiler(), reason="feasible() imports the compiler")
def test_reasons() -> None:
    points = matrix.matrix("sm_90a")
    for point in points:
        assert point.reason is None or len(point.reason) > 10
    by_name = {p.spec.name: p.reason for p in points}
    assert "M = 64" in (by_name["decode_dual_wg_r16_p64_obf16_sm90a"] or "")
    for row_tile in ROW_TILES:
        for page_size in PAGE_SIZES:
            spec = decode_spec("etap", row_tile, page_size, "bf16")
            assert by_name[spec.name] is None, by_name[spec.name]


def test_kernel_limits_are_the_kernels_own() -> None:
    """Listed without the compiler, the matrix repeats no rule of a kernel's ``feasible``."""
    assert not [p for p in matrix.matrix("sm_90a", ask_kernels=False) if p.reason]


def test_every_kernel_module_exists() -> None:
    for spec in matrix.points("sm_90a"):
        assert closure.has_source(spec), spec.name


def test_filter() -> None:
    found = matrix.matrix("sm_90a", "decode_etap_r16_*", ask_kernels=False)
    assert len(found) == len(PAGE_SIZES) * 2


@pytest.mark.skipif(not toolchain.have_compiler(), reason="feasible() imports the compiler")
def test_command_prints_counts_and_reasons() -> None:
    result = CliRunner().invoke(app, ["matrix", "--filter", "decode_*"])
    assert result.exit_code == 0, result.output
    assert "M = 64" in result.output
    total = next(line for line in result.output.splitlines() if "total" in line)
    numbers = [int(x) for x in total.replace("│", " ").split() if x.isdigit()]
    assert sum(numbers) == len(PIPELINES) * len(ROW_TILES) * len(PAGE_SIZES) * 2


def test_unknown_arch_is_refused() -> None:
    result = CliRunner().invoke(app, ["matrix", "--arch", "sm_80"])
    assert result.exit_code == 1 and "expected one of" in result.output


def test_closure_follows_imports_only() -> None:
    spec = decode_spec("etap", 64, 64, "bf16")
    digest, files = closure.sources(spec)
    assert "dsl_kernels/sm90/decode_etap.py" in files and "dsl_kernels/spec.py" in files
    assert not any("append_kv" in f for f in files)
    assert closure.sources(decode_spec("etap", 16, 16, "f32"))[0] == digest
