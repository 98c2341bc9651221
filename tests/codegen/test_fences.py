"""Registers that are written between a wgmma.fence and the WGMMA that takes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from codegen import artifacts, fences, precompile
from codegen import compile as compiler
from codegen.family_audit import FamilyAudit
from codegen.precompile import Report
from dsl_kernels.spec import VariantSpec
from tests.support.needs import needs_compiler

MMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
CLEAN = f"""
.entry kernel() {{
	mov.b32 	%r1, 0;
	mov.b32 	%r9, %r8;
	wgmma.fence.sync.aligned;
	add.s64 	%rd1, %rd2, 16;
	// begin inline asm
	{{
.reg .pred p;
	.loc	9 42 8
setp.ne.b32 p, %r30, 0;
{MMA} {{%r1, %r2, %r3, %r4}}, %rd1, %rd2, p, 1, 1, 0, 0;
}}
	{{ .reg .pred p; setp.ne.b32 p, %r30, 0; {MMA} {{%r1, %r2, %r3, %r4}}, {{%r9, %r10, %r11, %r12}}, %rd2, p, 1, 1, 0; }}
	wgmma.commit_group.sync.aligned;
	st.shared.b32 	[%r1], %r2;
	wgmma.wait_group.sync.aligned 	0;
	ret;
"""  # noqa: E501


@pytest.mark.parametrize(
    ("planted", "named"),
    [
        ("mov.b32 	%r2, %r40;", "takes %r2, which mov.b32 of line 6"),
        ("@%p1 mov.b32 	%r12, %r40;", "takes %r12, which mov.b32"),
        ("mov.b64 	{%r10, %r3}, %rd9;", "takes %r3, which mov.b64"),
        ("ld.shared.v2.b32 	{%r10, %r41}, [%r50];", "takes %r10, which ld.shared.v2.b32"),
        ("cvt.rn.bf16x2.f32 	%r11, %r51, %r52;", "takes %r11, which cvt.rn.bf16x2.f32"),
    ],
)
def test_a_write_behind_the_fence_is_named(planted: str, named: str) -> None:
    """Of an accumulator or of A in registers; nothing is said where it stands before the fence."""
    fence = "	wgmma.fence.sync.aligned;\n"
    (first, *_) = fences.late_writes(CLEAN.replace(fence, f"{fence}	{planted}\n"))
    assert named in first
    assert fences.late_writes(CLEAN.replace(fence, f"	{planted}\n{fence}")) == []


@pytest.mark.parametrize(
    "planted", [
        "", "mov.b32 	%r20, %r1;", "st.shared.b32 	[%r9], %r1;", "add.s64 	%rd1, %rd1, 2;",
        "bar.sync 	%r1, 256;", "mov.b32 	%r1, %r2;\n	wgmma.fence.sync.aligned;",
    ]
)  # fmt: skip
def test_what_a_wgmma_does_not_take_may_be_written(planted: str) -> None:
    fence = "	wgmma.fence.sync.aligned;\n"
    assert fences.late_writes(CLEAN.replace(fence, f"{fence}	{planted}\n")) == []


def test_a_wgmma_of_another_form_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match="line 2: a WGMMA that is not understood"):
        fences.late_writes(f"\n[{MMA} ]\n")


def test_such_a_build_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And leaves no record, by which it would be up to date; one without such a write passes."""
    spec = VariantSpec.from_name("mha_fwd_d192_dbf16_sm90a")
    files = artifacts.paths(tmp_path, spec)
    record = compiler.draft(spec)

    def made(*_args: object, **_options: object) -> tuple[artifacts.Record, bool]:
        files["json"].write_text("{}")
        files["ptx"].write_text(text)
        return record, True

    monkeypatch.setattr(compiler, "ensure", made)
    text = CLEAN
    assert precompile.ensure(spec, tmp_path) == (record, True)
    assert files["json"].exists()
    fence = "	wgmma.fence.sync.aligned;\n"
    text = CLEAN.replace(fence, f"{fence}	mov.b32 	%r1, %r2;\n")
    with pytest.raises(compiler.BuildError, match="behind the wgmma.fence"):
        precompile.ensure(spec, tmp_path)
    assert not files["json"].exists()
    family = FamilyAudit()
    family.add(spec, record, files["so"])
    assert any("behind the wgmma.fence" in text for text in family.problems[spec.name])


@needs_compiler
def test_no_variant_writes_behind_its_fence(built: Report, variant_dir: Path) -> None:
    """Of the run's variants; and a copy of an accumulator, planted in one, is found."""
    some = ""
    for name in built.records:
        ptx = (variant_dir / f"{name}.ptx").read_text()
        assert fences.late_writes(ptx) == [], name
        some = ptx if "wgmma.mma_async" in ptx else some
    taken = re.search(r"wgmma\.mma_async[^{]*\{(%\w+)", some)
    assert taken is not None
    at = some.rindex("wgmma.fence", 0, taken.start())
    end = some.index("\n", at) + 1
    assert fences.late_writes(f"{some[:end]}	mov.b32 	{taken[1]}, %r0;\n{some[end:]}")
