"""The software GPU against the record of an H200 (``tests/data/softgpu_h200.npz``), bit for bit.

Here run: all 10^7 recorded accumulators of the wgmma forms, the run's variants (a decode variant of
each pipeline and row tile among them), and a few binades of the special functions.  The whole
record, which holds every variant and all 2^32 arguments of each special function, takes minutes:

    python -m profiles.record_softgpu replay --all
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen.precompile import Report
from dsl_kernels.spec import VariantSpec, decode_spec
from profiles import instructions, record_softgpu, vectors
from profiles.record_softgpu import COMMAND, Record, SoftGpu, Tally
from snapmla.testing.workloads.exact import Recorded
from softgpu import Options, exact, mufu, tensor_core
from softgpu.testing import aligned, launch
from tests.support.needs import needs_compiler


@pytest.fixture(scope="module")
def record() -> Record:
    return Record()


def assert_equal(tally: Tally) -> None:
    assert tally.results > 0
    assert not tally.different, "\n".join(
        [f"{tally.different} of {tally.results} differ", *tally.notes]
    )


def recorded(record: Record, name: str) -> str:
    if name not in record.variants:
        pytest.skip(f"{name} is newer than the record; on a GPU: {COMMAND}")
    return name


# ---------------------------------------------------------------------------- special functions


@pytest.mark.parametrize("name", list(instructions.MUFU_OPS))
def test_special_functions(record: Record, name: str) -> None:
    tally = record_softgpu.replay_mufu(record, name, list(record_softgpu.SAMPLE_BINADES[name]))
    assert tally.results >= 2 * instructions.BINADE
    assert_equal(tally)


@pytest.mark.parametrize("name", list(mufu.FUNCTIONS))
def test_interpreter_uses_the_unit_unless_told_to_be_exact(name: str) -> None:
    x = aligned(32, np.float32)
    x[:] = np.random.default_rng(0).uniform(0.3, 30, 32)
    out = aligned(32, np.float32)
    body = f"""
    mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd2, %rd3;
    ld.global.f32 %f1, [%rd4]; {instructions.MUFU_OPS[name]} %f2, %f1;
    add.s64 %rd5, %rd1, %rd3; st.global.f32 [%rd5], %f2;
    """
    launch(body, [out, x])
    np.testing.assert_array_equal(out, mufu.FUNCTIONS[name](x))
    launch(body, [out, x], options=Options(accumulate=exact))
    wide = x.astype(np.float64)
    best = {"ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal}[name](wide).astype(np.float32)
    np.testing.assert_array_equal(out, best)
    assert (mufu.FUNCTIONS[name](x) != best).any()


def test_special_functions_outside_the_normal_numbers() -> None:
    """The manual's tables of special values, and flushing."""
    tiny = np.float32(2.0**-127)
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, tiny, -tiny, -1.0], np.float32)
    inf, nan = np.inf, np.nan
    want = {
        "ex2": [nan, inf, 0, 1, 1, 1, 1, 0.5],
        "lg2": [nan, inf, nan, -inf, -inf, -inf, -inf, nan],
        "rcp": [nan, 0, -0.0, inf, -inf, inf, -inf, -1],
    }
    for name, values in want.items():
        got = mufu.FUNCTIONS[name](x)
        np.testing.assert_array_equal(got, np.array(values, np.float32))
        assert (got.view(np.uint32)[np.isnan(got)] == mufu.NAN).all()
        assert (np.signbit(got) == np.signbit(np.array(values)))[~np.isnan(got)].all()


# ---------------------------------------------------------------------------------------- wgmma


def forms_to_replay() -> Iterator[Any]:
    """Every day the narrowest form of each kind, source of A and majors: N changes no sum."""
    seen = set()
    for form in sorted(instructions.WGMMA_FORMS, key=lambda form: form.n):
        alike = dataclasses.replace(form, n=0)
        marks = (pytest.mark.whole_matrix,) if alike in seen else ()
        seen.add(alike)
        yield pytest.param(form, marks=marks, id=form.name)


@pytest.mark.parametrize("form", list(forms_to_replay()))
def test_wgmma(record: Record, form: instructions.WgmmaForm) -> None:
    if form not in record.forms:
        pytest.skip(f"{form.name} is newer than the record; on a GPU: {COMMAND}")
    tally = record_softgpu.replay_wgmma(record, form)
    assert tally.cases == len(form.classes)
    assert tally.results >= (3 * 10**5 if form.a_mn or form.b_mn else 10**6)
    assert_equal(tally)


@pytest.mark.parametrize("form", instructions.WGMMA_FORMS, ids=lambda form: form.name)
def test_images_and_fragments_are_those_of_the_form(form: instructions.WgmmaForm) -> None:
    """Wherever a form has its operands, it computes with the model's step on these very numbers."""
    case = next(c for c in instructions.wgmma_cases() if c.form == form and c.acc == "near")
    case = dataclasses.replace(case, share=1e-3)  # one tile
    (a, b), start = case.operands()[:2], case.operands()[2]
    got = case.run(SoftGpu()).rows["d"].view(np.uint32)
    assert len(got) == len(a) == instructions.STEPS
    for step, result in enumerate(got):
        x, y = (
            instructions.classes.decode(form.format, v[step]).astype(np.float32) for v in (a, b)
        )
        want = tensor_core.chain_numpy(
            start[step], x, y, fp8=form.kind == "e4m3", smallest=2.0 ** (1 - form.format.bias)
        )
        np.testing.assert_array_equal(
            result, instructions.to_fragments(want).view(np.uint32).ravel()
        )


def forms_in(ptx: str) -> set[instructions.WgmmaForm]:
    """The wgmma forms of a PTX text; fails where a sign is not 1 or two operands differ in kind."""
    found = set()
    for call in re.findall(r"wgmma\.mma_async[^;]*;", ptx):
        shape = re.match(r"wgmma\S*\.m64n(\d+)k\d+\.f32\.(\w+)\.(\w+)", call)
        assert shape and shape[2] == shape[3], call
        operands = re.sub(r"\s", "", call).split("}", 1)[1]
        signs, majors = (numbers := re.findall(r",(-?\d+)", operands))[:2], numbers[2:]
        registers = operands[1] == "{"
        assert signs == ["1", "1"], call
        assert len(majors) == (0 if shape[2] == "e4m3" else 1 if registers else 2), call
        b_mn, a_mn = ([x == "1" for x in reversed(majors)] + [False, False])[:2]
        found.add(instructions.WgmmaForm(int(shape[1]), shape[2], registers, a_mn, b_mn))
    return found


@needs_compiler
def test_every_form_in_use_is_recorded(record: Record, built: Report, variant_dir: Path) -> None:
    """wgmma and approximate functions in the PTX of the run's variants: those of variants that the
    record has are in the record, those of newer ones will be in the next."""
    approximate: set[str] = set()
    recorded_too, newer = set(), set()
    for name in built.records:
        text = (variant_dir / f"{name}.ptx").read_text()
        approximate.update(re.findall(r"\b\w+\.approx[\w.]*", text))
        (recorded_too if name in record.variants else newer).update(forms_in(text))
    missing = recorded_too - set(record.forms)
    assert recorded_too and not missing, f"{missing}; on a GPU: {COMMAND}"
    assert recorded_too | newer <= set(instructions.WGMMA_FORMS), newer - set(
        instructions.WGMMA_FORMS
    )
    assert approximate == set(instructions.MUFU_OPS.values())


def test_forms_are_told_apart() -> None:
    for form in instructions.WGMMA_FORMS:
        assert forms_in(form.ptx()) == {form}
    assert len({form.name for form in instructions.WGMMA_FORMS}) == len(instructions.WGMMA_FORMS)


def test_a_record_of_unknown_forms_is_refused(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "wgmma.m64n8k16_bf16_ss.any.zero/d"
    monkeypatch.setattr(record, "data", {**record.data, key: np.zeros(1, np.uint64)})
    with pytest.raises(ValueError, match="unknown wgmma forms: m64n8k16_bf16_ss"):
        _ = record.forms


def test_a_wrong_model_is_noticed(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_core, "HALF_FRACTION_BITS", 24)
    tally = record_softgpu.replay_wgmma(record, instructions.WgmmaForm(16, "bf16"))
    assert 0 < tally.different < tally.results
    assert any("recorded 0x" in note for note in tally.notes)


# -------------------------------------------------------------------------------------- kernels


@needs_compiler
@pytest.mark.variants("[!dms]*_sm90a,dsa_prologue_*_sm90a")
def test_helper_kernels(record: Record, spec: VariantSpec) -> None:
    assert_equal(record_softgpu.replay_variant(record, recorded(record, spec.name)))


@needs_compiler
@pytest.mark.variants("m*_sm90a", everyday="merge_[os][bt]*_sm90a")
def test_merges_and_dense_prefill(record: Record, spec: VariantSpec) -> None:
    assert_equal(record_softgpu.replay_variant(record, recorded(record, spec.name)))


@needs_compiler
@pytest.mark.variants("s*_sm90a", everyday="sparse_*_r16_*_sm90a")
def test_sparse_attention_and_its_index(record: Record, spec: VariantSpec) -> None:
    assert_equal(record_softgpu.replay_variant(record, recorded(record, spec.name)))


@needs_compiler
@pytest.mark.variants("decode_*_sm90a", everyday="decode_etap_r[16][64]_p64_obf16_sm90a")
def test_decode(record: Record, spec: VariantSpec) -> None:
    """No row is excepted: P never rounds another way."""
    tally = record_softgpu.replay_variant(record, recorded(record, spec.name))
    assert tally.results > 200
    assert_equal(tally)


@needs_compiler
@pytest.mark.variants("dense_decode_*_sm90a", everyday="dense_decode_split_r16_*_sm90a")
def test_dense_decode(record: Record, spec: VariantSpec) -> None:
    """Splits, two KV heads, fp16 and BF16, tokens of NaN and infinity."""
    assert_equal(record_softgpu.replay_variant(record, recorded(record, spec.name)))


@needs_compiler
def test_one_step_of_a_probability_is_noticed(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ex2 rounded correctly instead of as the unit does it: many rows change."""
    monkeypatch.setitem(
        mufu.FUNCTIONS, "ex2", lambda x: np.exp2(x.astype(np.float64)).astype(np.float32)
    )
    name = decode_spec("etap", 16, 64, "f32").name
    case = vectors.kernel_cases(recorded(record, name))[0]
    tally = record.compare(case, case.run(SoftGpu()))
    assert tally.different > 20


# --------------------------------------------------------------------------------------- record


def test_record_says_where_it_comes_from(record: Record) -> None:
    assert record.meta["gpu"] == "NVIDIA H200" and record.meta["command"] == COMMAND
    assert re.fullmatch(r"[0-9a-f]{40}", record.meta["commit"]) and record.meta["driver"]
    assert set(record.meta["ptx"]) == set(record.variants)
    folder = record_softgpu.RECORD.parent
    assert sum(p.stat().st_size for p in folder.glob("*.npz")) < 4e6


def test_inputs_of_another_generator_are_refused(record: Record) -> None:
    case = instructions.WgmmaCase(instructions.WGMMA_FORMS[0], "any", "zero", 1.0)
    result = Recorded(np.zeros(16, np.uint8), {})
    with pytest.raises(ValueError, match="inputs are not those of the record"):
        record.compare(case, result)


def test_other_code_is_mentioned_only_where_bits_differ(
    record: Record, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "merge_obf16_sm90a"
    case = vectors.kernel_cases(name)[0]
    spec = VariantSpec.from_name(name)
    (tmp_path / f"{name}.ptx").write_text("// edited since\nret;\n")
    (tmp_path / f"{name}.o").write_bytes(b"")
    (tmp_path / f"{name}.json").write_text(json.dumps({"name": name}))
    monkeypatch.setenv("SNAPMLA_VARIANT_DIR", str(tmp_path))
    data = record.data
    rows = {"lse": np.zeros((len(data[f"{case.name}/lse"]), 1), np.uint32)}
    tally = record.compare(case, Recorded(data[f"{case.name}/inputs"], rows))
    assert tally.different == tally.results
    assert any("recorded from other code" in n and spec.name in n for n in tally.notes)


def test_ptx_hash_ignores_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.ptx"
    path.write_text('.version 8.8\n.file 1 "a.py"\n  .loc 1 3 4\n  add.f32 %f1, %f2, %f3; // x\n')
    first = record_softgpu.ptx_hash(path)
    path.write_text('.version 8.8\n.file 1 "b.py"\n\tadd.f32 %f1, %f2, %f3;\n')
    assert record_softgpu.ptx_hash(path) == first
    path.write_text(".version 8.8\nadd.rn.f32 %f1, %f2, %f3;\n")
    assert record_softgpu.ptx_hash(path) != first
