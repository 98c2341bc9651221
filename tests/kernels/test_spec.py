"""VariantSpec: names are unique, reversible, and refuse nonsense; families say what they hold."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen import matrix
from dsl_kernels.families import ARCHS, FAMILIES, Axis
from dsl_kernels.families.family import REQUIRED
from dsl_kernels.spec import PREFIX, VariantSpec


@st.composite
def any_spec(draw: st.DrawFn) -> VariantSpec:
    """Any op with any values of its axes, those that no default matrix holds among them."""
    op = draw(st.sampled_from(sorted(FAMILIES)))
    values = {axis.name: draw(st.sampled_from(axis.values)) for axis in FAMILIES[op].axes}
    return VariantSpec(op=op, arch=draw(st.sampled_from(ARCHS)), **values)


@given(any_spec())
def test_name_round_trip(spec: VariantSpec) -> None:
    assert VariantSpec.from_name(spec.name) == spec
    assert spec.symbol.isidentifier()


@given(any_spec())
def test_what_a_spec_is_made_of_makes_it_again(spec: VariantSpec) -> None:
    assert VariantSpec(**spec.fields()) == spec == spec.replace()
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(spec) == hash(spec.replace())


@given(any_spec(), any_spec())
def test_names_are_unique(a: VariantSpec, b: VariantSpec) -> None:
    assert (a.name == b.name) == (a == b)


@pytest.mark.parametrize("arch", ARCHS)
def test_matrix_names(arch: str) -> None:
    specs = list(matrix.points(arch))
    assert len({s.name for s in specs}) == len(specs)
    for spec in specs:
        assert VariantSpec.from_name(spec.name) == spec
        assert spec.symbol == PREFIX + spec.name


def test_readme_names() -> None:
    spec = VariantSpec(op="decode", pipeline="etap", row_tile=64)
    assert spec.name == "decode_etap_r64_p64_obf16_sm90a"
    assert spec.replace(out_dtype="f32").name == "decode_etap_r64_p64_of32_sm90a"
    assert VariantSpec(op="quantize_q", mode="token").name == "quantize_q_xbf16_token_sm90a"


def test_a_default_that_follows_stands_in_no_name() -> None:
    """128 rows are a cluster of two unless said otherwise; so are 64 if said so."""
    spec = VariantSpec(op="decode", pipeline="etap", row_tile=128)
    assert (spec.cluster, spec.name) == (2, "decode_etap_r128_p64_obf16_sm90a")
    assert spec.replace(row_tile=64).cluster == 1
    pair = spec.replace(row_tile=64, cluster=2)
    assert pair.name == "decode_etap_r64_p64_obf16_c2_sm90a"
    assert VariantSpec.from_name(pair.name) == pair


def test_a_new_axis_with_a_default_renames_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it change what records of existing variants hold."""
    before = {spec.name: spec.fields() for spec in matrix.points("sm_90a")}
    decode = FAMILIES["decode"]
    grown = dataclasses.replace(
        decode, axes=(*decode.axes, Axis("sink", "s", (0, 1), 0, named=False))
    )
    monkeypatch.setitem(FAMILIES, "decode", grown)
    after = {spec.name: spec.fields() for spec in matrix.points("sm_90a")}
    assert after == before
    spec = VariantSpec(op="decode", pipeline="etap", sink=1)
    assert spec.name == "decode_etap_r64_p64_obf16_s1_sm90a"
    assert VariantSpec.from_name(spec.name) == spec


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"op": "attend"}, "op"),
        ({"op": "decode", "arch": "sm_80"}, "arch"),
        ({"op": "decode", "pipeline": "etap", "row_tile": 48}, "row_tile"),
        ({"op": "decode", "pipeline": "fast"}, "pipeline"),
        ({"op": "decode"}, "pipeline"),
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
        "decode_etap_r640_p64_obf16_sm90a",
        "decode_etap_r64_p64_obf16_r64_sm90a",
        "decode_etap_r64_p64_obf16_",
        "merge_obf16_sm80",
        "decode_r64",
    ],
)
def test_bad_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"^variant name .*expected"):
        VariantSpec.from_name(name)


@pytest.mark.parametrize("op", sorted(FAMILIES))
def test_axes_can_be_told_apart(op: str) -> None:
    """In a name, a value of one axis is never read as another's that may stand at its place."""
    axes = FAMILIES[op].axes
    assert len({axis.name for axis in axes}) == len(axes)
    for i, axis in enumerate(axes):
        assert axis.default is REQUIRED or axis.default_of(defaults(op)) in axis.values
        for later in axes[i + 1 :]:
            assert not {axis.text(v) for v in axis.values} & {later.text(v) for v in later.values}


def defaults(op: str) -> dict:
    """Some value of every axis."""
    return {axis.name: axis.values[0] for axis in FAMILIES[op].axes}


def test_unknown_attributes_are_refused() -> None:
    with pytest.raises(AttributeError, match="op 'merge' has no axis 'row_tile'"):
        VariantSpec(op="merge").row_tile  # noqa: B018
