"""The PTX of the backward's kernels: sums without atomics, launches that overlap."""

from __future__ import annotations

import re

import pytest

from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants as runtime
from snapmla.testing.mha_grad_job import variants
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
LISTS = VariantSpec(op="mha_items", lists="backward")
ATOMIC = re.compile(r"\b(?:atom|red|cp\.reduce)\.[\w.:]+")
INTEGER = re.compile(r"\.[busi](?:32|64)\b")


def ptx_of(spec: VariantSpec) -> str:
    artifacts = runtime.find_or_build(spec, need_library=False)
    return (artifacts.directory / f"{spec.name}.ptx").read_text()


def kernels(d_qk: int, dtype: str) -> list[VariantSpec]:
    """All that a backward launches."""
    return [LISTS, *variants(VariantSpec(op="mha_dq", d_qk=d_qk, dtype=dtype)).values()]


def assert_form(spec: VariantSpec) -> None:
    """No sum of floating-point numbers is atomic, so that its order is the code's; integers, which
    are counts, may be.  The kernel waits for the grid before it and lets the next one begin."""
    text = ptx_of(spec)
    assert [x for x in ATOMIC.findall(text) if not INTEGER.search(x)] == [], spec.name
    assert "griddepcontrol.wait" in text, spec.name
    assert "griddepcontrol.launch_dependents" in text, spec.name


def test_sums_are_not_atomic() -> None:
    for spec in kernels(192, "bf16"):
        assert_form(spec)


@pytest.mark.whole_matrix
def test_sums_of_no_variant_are_atomic() -> None:
    """All of them: 12, and that of the lists."""
    found = {spec.name: spec for d in (192, 128) for t in ("bf16", "f16") for spec in kernels(d, t)}
    assert len(found) == 12 + 1
    for spec in found.values():
        assert_form(spec)


@pytest.mark.parametrize(("code", "finds"), [
    ("red.global.add.f32 [%rd1], %f1;", True),
    ("atom.global.add.noftz.bf16x2 %r1, [%rd1], %r2;", True),
    ("red.global.add.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};", True),
    ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], 16;", True),
    ("atom.global.add.u32 %r1, [%rd1], 1;", False), ("atom.shared.add.u32 %r1, [%r2], 1;", False),
])  # fmt: skip
def test_what_counts_as_a_sum(code: str, finds: bool) -> None:
    found = [x for x in ATOMIC.findall(code) if not INTEGER.search(x)]
    assert bool(found) == finds
