"""VariantSpec: names are unique, reversible, and refuse nonsense."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen import matrix
from dsl_kernels.families.fp8_decode import PAGE_SIZES, PIPELINES, ROW_TILES
from dsl_kernels.spec import AXES, OPS, PREFIX, VariantSpec

decode_specs = st.builds(
    VariantSpec,
    op=st.just("decode"),
    arch=st.sampled_from(["sm_90a", "sm_100a"]),
    pipeline=st.sampled_from(PIPELINES),
    row_tile=st.sampled_from(ROW_TILES),
    page_size=st.sampled_from(PAGE_SIZES),
    out_dtype=st.sampled_from(["bf16", "f32"]),
    token_tile=st.sampled_from([64, 128]),
    stages=st.integers(0, 8),
    cluster=st.sampled_from([1, 2]),
    kv_scale_groups=st.sampled_from([1, 4]),
    p_scale=st.sampled_from(["tile", "running", "static"]),
    p_terms=st.sampled_from([1, 2]),
    promote_tokens=st.sampled_from([64, 128, 256]),
    num_heads=st.none() | st.integers(1, 128),
    s_q=st.none() | st.integers(1, 8),
    ragged=st.booleans(),
    sparse=st.booleans(),
)


@given(decode_specs)
def test_name_round_trip(spec: VariantSpec) -> None:
    assert VariantSpec.from_name(spec.name) == spec


@given(decode_specs, decode_specs)
def test_names_are_unique(a: VariantSpec, b: VariantSpec) -> None:
    assert (a.name == b.name) == (a == b)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_matrix_names(arch: str) -> None:
    specs = list(matrix.points(arch))
    assert len({s.name for s in specs}) == len(specs)
    for spec in specs:
        assert VariantSpec.from_name(spec.name) == spec
        assert spec.symbol == PREFIX + spec.name
        assert spec.symbol.isidentifier()


def test_readme_names() -> None:
    spec = VariantSpec(op="decode", pipeline="etap", row_tile=64)
    assert spec.name == "decode_etap_r64_p64_obf16_sm90a"
    assert dataclasses.replace(spec, row_tile=128, cluster=2).name.endswith("_c2_sm90a")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"op": "attend"}, "op"),
        ({"op": "decode", "arch": "sm_80"}, "arch"),
        ({"op": "merge", "row_tile": 128}, "row_tile"),
        ({"op": "plan_decode", "page_size": 16}, "page_size"),
    ],
)
def test_bad_fields(fields: dict, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: .*got"):
        VariantSpec(**fields)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "decode",
        "prefill_r64_sm90a",
        "decode_etap_r64_zz3_sm90a",
        "merge_obf16_sm80",
        "decode_r64",
    ],
)
def test_bad_names(name: str) -> None:
    with pytest.raises(ValueError):
        VariantSpec.from_name(name)


def test_every_op_has_axes() -> None:
    assert set(AXES) == set(OPS)
