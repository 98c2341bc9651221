"""The matrix: what is in it, and that every pruned point says why."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from typer.testing import CliRunner

from codegen import closure, matrix, render, toolchain
from codegen.__main__ import app
from dsl_kernels import registry
from dsl_kernels.blocks import budget as bud
from dsl_kernels.families import ARCHS, FAMILIES
from dsl_kernels.families.family import OUT_DTYPE
from dsl_kernels.families.fp8_decode import (
    DEFAULT_PAGES,
    ON_REQUEST,
    PAGE_SIZES,
    ROW_TILES,
    TILES_OF,
    cluster_of,
    pipelines_of,
)
from dsl_kernels.spec import VariantSpec, decode_spec
from tests.support import variants


def decodes_of(arch: str) -> int:
    """Points of its default matrix."""
    own = (pipeline for pipeline in pipelines_of(arch) if pipeline not in ON_REQUEST)
    tiles = {pipeline: TILES_OF.get(pipeline, ROW_TILES) for pipeline in own}
    points = sum(len(DEFAULT_PAGES[pipeline]) * len(tiles[pipeline]) for pipeline in tiles)
    return points * len(OUT_DTYPE.values)


@pytest.mark.parametrize("arch", ARCHS)
def test_decode_axes_are_complete(arch: str) -> None:
    decode = [s for s in matrix.points(arch) if s.op == "decode"]
    assert len(decode) == decodes_of(arch) > 0
    assert all(s.cluster == cluster_of(s.row_tile) for s in decode)


def test_helper_axes_are_complete() -> None:
    helpers = [s for s in matrix.points("sm_100a") if s.family.helper]
    rotating = 2 * 2 * 2 + 2 * 2  # append_kv by style, norm and table; quantize_q by two of them
    rows = 2 * 2 + 2 * 4  # append_kv by dtype and index; fetch_dequant by dtype and mode
    ds_mla = 2 + 2 + 3  # append_kv by index, and with norm and RoPE by table; fetch_dequant by mode
    v4 = 2 + 1 + 3  # append_kv by index, and with RoPE; fetch_dequant by mode
    logits = 3 + 4  # index_logits of 64 heads, of 32, by rows
    index = 8 + 4 + logits  # select_topk; append_index_k, dsa_prologue, index_rows, fetch_index_k
    merging = 2 + 2 * 2 * 3 + 1  # merge; merge_states by dtypes and mode, and of 128 channels
    assert len(helpers) == 3 + merging + index + 3 * (2 + 2 + 4) + rotating + rows + ds_mla + v4


# Of SM100: what decode over pages and its helpers have, and what sparse attention's step adds.
OVER_PAGES = {
    "decode": 16, "dense_decode": 16, "plan_decode": 1, "records_to_plan": 1, "plan_to_records": 1,
    "merge": 2, "merge_states": 12, "append_kv": 25, "quantize_q": 10, "fetch_dequant": 26,
}  # fmt: skip
OF_LISTS = {
    "sparse_decode": 2, "index_logits": 7, "select_topk": 8, "append_index_k": 1, "index_rows": 1,
    "fetch_index_k": 1, "dsa_prologue": 1, "mha_items": 1, "merge_states": 1,
}  # fmt: skip


def test_what_a_step_over_lists_adds_to_sm100() -> None:
    """At most 24 variants: each is compiled, audited and proved by everyone who changes kernels."""
    assert sum(OF_LISTS.values()) <= 24
    found = Counter(spec.op for spec in matrix.default_specs("sm_100a"))
    assert found == Counter(OVER_PAGES) + Counter(OF_LISTS)


@pytest.mark.skipif(not toolchain.have_compiler(), reason="feasible() imports the compiler")
def test_reasons() -> None:
    points = matrix.matrix("sm_90a")
    for point in points:
        assert point.reason is None or len(point.reason) > 10
    by_name = {p.spec.name: p.reason for p in points}
    assert "M = 64" in str(registry.feasible(decode_spec("dual_wg", 16, 64, "bf16")))
    for row_tile in ROW_TILES:
        for page_size in PAGE_SIZES:
            spec = decode_spec("etap", row_tile, page_size, "bf16")
            assert by_name[spec.name] is None, by_name[spec.name]
    for pipeline, row_tile in (("etap", 64), ("etap", 128), ("dual_wg", 64)):
        spec = decode_spec(pipeline, row_tile, 64, "bf16").replace(p_terms=2)
        assert f"{pipeline} has " in str(registry.feasible(spec)), spec.name
    ws = decode_spec("ws", 64, 64, "bf16", "sm_100a").replace(p_terms=2)
    assert registry.feasible(ws) == "ws has one term of P so far"


@pytest.mark.parametrize("arch", ARCHS)
def test_kernel_limits_are_the_kernels_own(arch: str) -> None:
    """Listed without the compiler, the matrix repeats no rule of a kernel's ``feasible``."""
    assert not [p for p in matrix.matrix(arch, ask_kernels=False) if p.reason]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_module_exists(arch: str) -> None:
    for spec in matrix.points(arch):
        assert closure.has_source(spec), spec.name


def test_filter() -> None:
    found = matrix.matrix("sm_90a", "decode_etap_r16_*", ask_kernels=False)
    assert len(found) == len(PAGE_SIZES) * 2


STEP = ["plan_decode_sm90a", "append_kv_xbf16_ii64_sm90a", "decode_etap_r16_p64_obf16_sm90a"]
THREE_STAGES = "decode_etap_r64_p64_obf16_st3_sm90a"


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        (",".join(STEP), STEP),
        ("  ".join(reversed(STEP)) + ",", STEP),
        ("plan_decode", ["plan_decode_sm90a"]),
        ("plan_decode, plan_d*,merge_o*6", ["plan_decode_sm90a", "merge_obf16_sm90a"]),
        (f"merge_of32,{THREE_STAGES}", ["merge_of32_sm90a", THREE_STAGES]),
        ("decode_etap_r64_p64_obf16_st3", [THREE_STAGES]),
    ],
)
def test_a_filter_is_a_list(pattern: str, wanted: list[str]) -> None:
    """Of globs, each with the architecture or without; whole names need not be in the matrix."""
    found = matrix.matrix("sm_90a", pattern, ask_kernels=False)
    assert [point.spec.name for point in found] == wanted
    assert matrix.no_match("sm_90a", pattern) is None


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("plan_decod", "'plan_decod' (`make matrix` lists them); did you mean plan_decode_sm90a?"),
        ("plan_decode,merge_obf61", "'merge_obf61' (`make matrix` lists them); did you mean "
         "merge_obf16_sm90a"),
        ("plan_decode_sm100a", "'plan_decode_sm100a' (`make matrix` lists them); did you mean "
         "plan_decode_sm90a"),
        ("no_*,none", "'no_*' or 'none' (`make matrix` lists them)"),
        (" , ", "' , ' (`make matrix` lists them)"),
    ],
)  # fmt: skip
def test_each_part_of_a_filter_must_match(pattern: str, words: str) -> None:
    wrong = matrix.no_match("sm_90a", pattern)
    assert wrong is not None and wrong.startswith(f"no variant of sm_90a matches {words}")


@pytest.mark.parametrize("command", ["matrix", "audit", "precompile", "bundle", "wheels"])
def test_commands_refuse_a_filter_with_a_part_too_many(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--filter", "plan_decode,plan_decod"])
    assert result.exit_code == 1 and result.output.count("\n") == 1, result.output
    start = "--filter (make's FILTER=): no variant of sm_90a matches 'plan_decod' ("
    assert result.output.startswith(start) or "nvidia-cutlass-dsl" in result.output


@pytest.mark.skipif(not toolchain.have_compiler(), reason="feasible() imports the compiler")
def test_command_prints_counts_and_reasons() -> None:
    asked = "decode_dual_wg_r16_p64_obf16"
    assert "M = 64" in CliRunner().invoke(app, ["matrix", "--filter", asked]).output
    result = CliRunner().invoke(app, ["matrix", "--filter", "decode_*"])
    assert result.exit_code == 0, result.output
    total = next(line for line in result.output.splitlines() if "total" in line)
    numbers = [int(x) for x in total.replace("│", " ").split() if x.isdigit()]
    assert sum(numbers) == decodes_of("sm_90a")


def test_unknown_arch_is_refused() -> None:
    result = CliRunner().invoke(app, ["matrix", "--arch", "sm_80"])
    assert result.exit_code == 1 and "expected one of" in result.output


def test_closure_follows_imports_only() -> None:
    spec = decode_spec("etap", 64, 64, "bf16")
    digest, files = closure.sources(spec)
    assert "dsl_kernels/sm90/fp8/transposed.py" in files and "dsl_kernels/formats/dims.py" in files
    assert not any("append_kv" in f for f in files)
    assert closure.sources(decode_spec("etap", 16, 16, "f32"))[0] == digest


def test_no_kernel_depends_on_what_axes_and_ops_there_are() -> None:
    """So that a new axis or op recompiles nothing that exists."""
    for spec in (spec for arch in ARCHS for spec in matrix.points(arch)):
        for name in closure.sources(spec)[1]:
            assert not re.search(r"spec\.py|registry\.py|families/", name), (spec.name, name)


@pytest.mark.skipif(not toolchain.have_compiler(), reason="budgets import the kernel modules")
def test_variants_page_is_fresh() -> None:
    assert render.PAGE.read_text() == render.variants_page(), "stale: run `make docs`"


def budget(**changes: Any) -> bud.Budget:
    """A CTA that fits, then changed."""
    fields: dict[str, Any] = {
        "groups": (bud.WarpGroup("load", 24), bud.WarpGroup("math", 240, count=2)),
        "smem": 200_000,
        "barriers": (bud.Barrier("full", 1, {"load": 1}, 4), bud.Barrier("empty", 8, {"math": 8})),
        "mmas": (bud.Mma("S", 64, 64, 256, "e4m3"), bud.Mma("R", 64, 64, 64, "bf16")),
    }
    return bud.Budget(**fields | changes)


def test_a_cta_that_fits() -> None:
    fits = budget()
    assert bud.check(fits) is None
    assert (fits.threads, fits.registers, fits.at_launch) == (384, 64512, 168)
    assert fits.barrier_counts() == {1: 4, 8: 1}
    assert bud.check(budget(groups=(bud.WarpGroup("all", count=8),))) is None  # no setmaxnreg


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"groups": (bud.WarpGroup("a", 24), bud.WarpGroup("b", 248, count=2))}, "66560 registers"),
        ({"groups": (bud.WarpGroup("a", 24), bud.WarpGroup("b", 248, count=2))}, "wait forever"),
        ({"groups": (bud.WarpGroup("a", 100),)}, "multiples of 8 from 24 to 256, got 100"),
        ({"groups": (bud.WarpGroup("a", 264),)}, "multiples of 8 from 24 to 256, got 264"),
        ({"groups": (bud.WarpGroup("a", 40), bud.WarpGroup("b"))}, "warpgroup b: no register"),
        ({"groups": (bud.WarpGroup("a", count=9),)}, "1152 threads"),
        ({"smem": 232_449}, "232449 bytes of shared memory"),
        ({"barriers": (bud.Barrier("p", 8, {"a": 4, "b": 3}),)}, "8 arrivals, gets 7"),
        ({"barriers": (bud.Barrier("p", 0, {}),)}, "0 arrivals"),
        ({"mmas": (bud.Mma("S", 32, 64, 64, "e4m3"),)}, "M = 32"),
        ({"mmas": (bud.Mma("S", 64, 20, 64, "e4m3"),)}, "N = 20"),
        ({"mmas": (bud.Mma("S", 64, 264, 64, "e4m3"),)}, "N = 264"),
        ({"mmas": (bud.Mma("S", 64, 64, 48, "e4m3"),)}, "K = 48 is no multiple of 32"),
        ({"mmas": (bud.Mma("S", 64, 64, 24, "bf16"),)}, "K = 24 is no multiple of 16"),
        ({"mmas": (bud.Mma("S", 64, 64, 64, "f64"),)}, "none of f64"),
    ],
)
def test_a_cta_that_does_not(changes: dict[str, Any], reason: str) -> None:
    assert reason in (bud.check(budget(**changes)) or "")


@pytest.mark.skipif(not toolchain.have_compiler(), reason="budgets import the kernel modules")
@pytest.mark.parametrize("arch", ARCHS)
def test_every_decode_variant_declares_a_budget_that_fits(arch: str) -> None:
    for spec in matrix.default_specs(arch, "decode_*,dense_decode_*"):
        declared = registry.budget(spec)
        assert declared is not None and bud.check(declared) is None
        assert declared.barriers and declared.mmas and declared.arch == arch
        assert bool(declared.tmem_columns) == (arch == "sm_100a")
    assert registry.budget(VariantSpec(op="merge")) is None


@pytest.mark.skipif(not toolchain.have_compiler(), reason="feasible() imports the compiler")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"row_tile": 64, "stages": 5}, "bytes of shared memory, an SM grants 232448"),
        ({"row_tile": 32, "stages": 5}, "bytes of shared memory"),
        ({"row_tile": 64, "stages": 1}, "at least 2 stages"),
        ({"row_tile": 128, "cluster": 1}, "a CTA holds 64 rows, 1 of a cluster do not hold"),
        ({"row_tile": 64, "cluster": 2}, "row_tile 64 needs one CTA, not a cluster"),
    ],
)
def test_infeasible_points(changes: dict[str, Any], reason: str) -> None:
    spec = VariantSpec(op="decode", pipeline="etap", **changes)
    assert reason in (matrix.exclusion(spec) or "")


@pytest.mark.skipif(not toolchain.have_compiler(), reason="feasible() imports the compiler")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stages": 4}, "bytes of shared memory, an SM grants 232448"),
        ({"stages": 1}, "at least 2 stages"),
        ({"row_tile": 64}, "pair puts 128 rows on M of two CTAs"),
        ({"cluster": 1}, "needs a cluster of 2"),
        ({"p_terms": 2}, "no registers for a second"),
    ],
)
def test_infeasible_points_of_sm100_pairs(changes: dict[str, Any], reason: str) -> None:
    given = {"row_tile": 128, **changes}
    spec = VariantSpec(op="decode", arch="sm_100a", pipeline="pair", **given)
    assert reason in (matrix.exclusion(spec) or "")


@pytest.mark.skipif(not toolchain.have_compiler(), reason="feasible() imports the compiler")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stages": 6}, "bytes of shared memory, an SM grants 232448"),
        ({"stages": 2}, "at least 3 stages"),
        ({"row_tile": 32}, "ws puts 64 rows on M"),
        ({"cluster": 2}, "needs one CTA, not a cluster"),
    ],
)
def test_infeasible_points_of_sm100(changes: dict[str, Any], reason: str) -> None:
    spec = VariantSpec(op="decode", arch="sm_100a", pipeline="ws", **changes)
    assert reason in (matrix.exclusion(spec) or "")


@pytest.mark.skipif(not toolchain.have_compiler(), reason="feasible() imports the compiler")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stages": 3}, "ws has 2 stages, got 3"),
        ({"row_tile": 128}, "ws puts 64 rows on M"),
        ({"cluster": 2}, "needs one CTA, not a cluster"),
        ({"stamps": 1}, "ws records no stamps so far"),
    ],
)
def test_infeasible_points_of_16_bit_decode_on_sm100(changes: dict[str, Any], reason: str) -> None:
    spec = VariantSpec(op="dense_decode", arch="sm_100a", pipeline="ws", **changes)
    assert reason in (matrix.exclusion(spec) or "")


@pytest.mark.skipif(not toolchain.have_compiler(), reason="feasible() imports the compiler")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stages": 3}, "no number of stages to choose, got 3"),
        ({"row_tile": 64}, "pair puts 128 rows on M of two CTAs"),
        ({"cluster": 1}, "needs a cluster of 2, got 1"),
        ({"stamps": 1}, "pair records no stamps so far"),
    ],
)
def test_infeasible_points_of_a_16_bit_pair(changes: dict[str, Any], reason: str) -> None:
    values: dict[str, Any] = {"row_tile": 128, **changes}
    spec = VariantSpec(op="dense_decode", arch="sm_100a", pipeline="pair", **values)
    assert reason in (matrix.exclusion(spec) or "")


# ---------------------------------------------------------------------------- the test set


@pytest.mark.skipif(not toolchain.have_compiler(), reason="feasible() imports the compiler")
@pytest.mark.parametrize("arch", ARCHS)
def test_the_test_set_shows_every_value_of_every_axis(arch: str) -> None:
    every, chosen = matrix.default_specs(arch), matrix.sample_specs(arch)
    shown = [s.family for s in every if arch == "sm_90a" or not s.family.helper]
    for op in {family.op for family in shown if family.everyday is None}:
        for axis in (a.name for a in FAMILIES[op].axes):
            values = {getattr(s, axis) for s in every if s.op == op}
            assert {getattr(s, axis) for s in chosen if s.op == op} == values, (op, axis)
    rows = {(s.pipeline, s.row_tile) for s in every if s.op == "decode"}
    rows -= {("f16", 32), ("f16", 64)}  # rarely
    assert {(s.pipeline, s.row_tile) for s in chosen if s.op == "decode"} == rows
    helpers = {s for s in every if s.family.helper}
    rotating = {s for s in helpers if dict(s.values).get("rope_style", "applied") != "applied"}
    if arch == "sm_100a":  # of the same sources
        assert sorted(s.op for s in chosen if s.family.helper) == sorted({s.op for s in helpers})
    else:
        declared = {s for s in helpers if s.family.everyday is not None}
        assert {s.name for s in declared & set(chosen)} == {
            "select_topk_t1024_e8_c1_sm90a",
            *(f"index_logits_{rows}_sm90a" for rows in ("h64_u2", "h32_u8")),
        }
        merge = {s for s in helpers if s.op == "merge_states" and s.d_v != 512}
        assert merge <= set(chosen)
        rows = {s for s in helpers if dict(s.values).get("cache_dtype", "fp8") != "fp8"}
        wide = {s for s in helpers if s.op == "fetch_dequant" and s.index_dtype == "i64"}
        assert helpers - rotating - rows - wide - declared <= set(chosen) and wide & set(chosen)
        assert len(rotating & set(chosen)) == 4 + 2, "dsa_prologue has no others"
        assert len(rows & set(chosen)) == 4 + 2 * 2 + 1, "of records of bytes one an op"
    assert len(helpers & set(chosen)) < len(helpers)
    assert chosen == [s for s in every if s in set(chosen)] == matrix.sample_specs(arch)


@pytest.mark.skipif(not toolchain.have_compiler(), reason="feasible() imports the compiler")
def test_the_test_set_is_small_and_what_most_calls_take() -> None:
    decodes = [s for s in matrix.sample_specs("sm_90a") if s.op == "decode"]
    rows = {(s.pipeline, s.row_tile) for s in decodes}
    assert {decode_spec(str(p), r, 64, "bf16") for p, r in rows} <= set(decodes)
    others = len(PAGE_SIZES) - 1 + len(OUT_DTYPE.values) - 1
    assert [s.row_tile for s in decodes if s.pipeline == "f16"] == [16], "a family may leave out"
    every = matrix.sample(matrix.default_specs("sm_90a"), thorough=True)
    rare = [s.row_tile for s in every if s.op == "decode" and s.pipeline == "f16"]
    assert rare == [16, 32, 64]
    assert not any(s.p_terms > 1 for s in decodes)
    assert len(decodes) <= len(rows) + others


def test_a_family_may_say_what_runs_every_day() -> None:
    every = [s for s in matrix.points("sm_90a") if s.op == "dense_decode"]
    assert len(every) == len(ROW_TILES) * len(PAGE_SIZES) * 2
    chosen = {s.name for s in matrix.sample(every)}
    assert chosen == {f"dense_decode_split_{x}_sm90a" for x in ("r16_p16_df16", "r64_p64_dbf16")}
    blackwell = [s for s in matrix.points("sm_100a") if s.op == "dense_decode"]
    chosen_there = {s.name for s in matrix.sample(blackwell)}
    assert chosen_there == {"dense_decode_ws_r64_p64_dbf16_sm100a"}
    others = [s for s in every if s.name not in chosen]
    assert {s.row_tile for s in matrix.sample(others)} == set(ROW_TILES), "a cover of what is there"


def test_a_sample_of_unusual_variants_is_a_cover_too() -> None:
    """Without any variant on 64-token pages with bf16 results."""
    pipelines = [name for name in pipelines_of("sm_90a") if name != "f16"]
    every = [
        decode_spec(pipeline, row_tile, page_size, "f32")
        for pipeline in pipelines
        for row_tile in ROW_TILES
        for page_size in (16, 128)
    ]
    chosen = matrix.sample(every)
    assert {(s.pipeline, s.row_tile) for s in chosen} == {(s.pipeline, s.row_tile) for s in every}
    assert {s.page_size for s in chosen} == {16, 128}
    assert len(chosen) == len(pipelines) * len(ROW_TILES), "no more than the pairs ask for"
    assert matrix.sample([]) == []


@pytest.mark.whole_matrix
@pytest.mark.skipif(not toolchain.have_compiler(), reason="feasible() imports the compiler")
def test_the_switch_takes_the_whole_matrix() -> None:
    """Without it the test set; tests that are marked so run with it only."""
    every = {s.name for arch in ARCHS for s in matrix.default_specs(arch, "decode_*")}
    sample = {s.name for s in variants.shipped(whole=False) if s.op == "decode"}
    sampled = {s.name for arch in ARCHS for s in matrix.sample_specs(arch) if s.op == "decode"}
    assert sampled - sample == set(variants.RARELY)
    for switch, names in (([], sample), (["--whole-matrix"], every)):
        done = subprocess.run(
            [
                sys.executable, "-m", "pytest", "--collect-only", "-q", *switch,
                "tests/kernels/test_variants.py", "tests/kernels/test_fp8_decode.py",
            ],
            capture_output=True, text=True, cwd=closure.ROOT.parent,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        found = re.findall(r"::test_clean_and_right\[(decode_\w+)\]", done.stdout)
        assert set(found) == names and len(found) == len(names)
        marked = "test_lengths_beyond_the_block_table_end_with_it[dual_wg-64-16-3-cpu]"
        assert (marked in done.stdout) == bool(switch)


@pytest.mark.parametrize("pipeline", ON_REQUEST)
def test_what_is_built_on_request(pipeline: str) -> None:
    """No default wheel has it; a filter that spells a variant out names it."""
    spec = decode_spec(pipeline, 64, 64, "bf16")
    assert spec not in matrix.default_specs(spec.arch, ask_kernels=False)
    assert matrix.selected(spec.arch, spec.name.removesuffix("_sm90a")) == ([spec], [])


@pytest.mark.skipif(not toolchain.have_compiler(), reason="feasible() imports the compiler")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sparse_decode_ws_r64_obf16_gather4_sm100a", None),
        ("sparse_decode_ws_r64_of32_gather4_sm100a", None),
        ("sparse_decode_etap_r64_obf16_gather4_sm90a", "no kernel module"),
        ("mha_fwd_d192_dbf16_turns_sm100a", None), ("mha_fwd_d128_df16_turns_sm100a", None),
        ("mha_fwd_d192_dbf16_turns_sm90a", "no kernel module"),
        ("mha_fwd_d192_dbf16_split_turns_sm100a", "no kernel module"),
        ("mha_fwd_d256_dbf16_turns_sm100a", "takes 192/128 or 128/128 channels"),
        ("mha_fwd_d192_dbf16_sm100a", "no kernel module"),
    ],
)  # fmt: skip
def test_what_sm100_has_when_it_is_asked_for(name: str, reason: str | None) -> None:
    """Kernels that no host takes by itself, and that the default matrix lacks."""
    spec = VariantSpec.from_name(name)
    assert spec.name == name and spec not in matrix.default_specs(spec.arch, ask_kernels=False)
    found = matrix.exclusion(spec)
    assert found is None if reason is None else found is not None and reason in found
