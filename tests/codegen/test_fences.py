"""Registers that are written between a wgmma.fence and the WGMMA that takes them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock, Timeout
from rich.console import Console

from codegen import artifacts, audit, fences, link, precompile, tryout
from codegen import compile as compiler
from codegen.artifacts import Record
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
FENCE = "	wgmma.fence.sync.aligned;\n"
PLANTED = CLEAN.replace(FENCE, f"{FENCE}	mov.b32 	%r1, %r2;\n")
MERGE = VariantSpec(op="merge")
Compiled = Callable[[str], None]


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
    (first, *_) = fences.late_writes(CLEAN.replace(FENCE, f"{FENCE}	{planted}\n"))
    assert named in first
    assert fences.late_writes(CLEAN.replace(FENCE, f"	{planted}\n{FENCE}")) == []


@pytest.mark.parametrize(
    "planted", [
        "", "mov.b32 	%r20, %r1;", "st.shared.b32 	[%r9], %r1;", "add.s64 	%rd1, %rd1, 2;",
        "bar.sync 	%r1, 256;", "mov.b32 	%r1, %r2;\n	wgmma.fence.sync.aligned;",
    ]
)  # fmt: skip
def test_what_a_wgmma_does_not_take_may_be_written(planted: str) -> None:
    assert fences.late_writes(CLEAN.replace(FENCE, f"{FENCE}	{planted}\n")) == []


def test_a_wgmma_of_another_form_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match="line 2: a WGMMA that is not understood"):
        fences.late_writes(f"\n[{MMA} ]\n")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Builds without the compiler, of the PTX that one calls this with; all but PTX is unread."""
    obj = tmp_path_factory.mktemp("compiled") / "variant.o"
    obj.write_bytes(b"object")
    for name in ("ptxas", "counts", "host", "host_module", "target", "sass"):
        monkeypatch.setattr(audit, f"read_{name}", lambda record, _: None)
    monkeypatch.setattr(link, "link", lambda *_: None)
    monkeypatch.setenv("CUTE_DSL_ARCH", MERGE.arch)

    def of(ptx: str) -> None:
        made = compiler._Made(obj, ptx, b"", "", [], None)
        monkeypatch.setattr(compiler, "_compile", lambda spec, tmp: made)

    return of


@pytest.mark.parametrize("ptx", [PLANTED, f"[{MMA} ]"])
def test_such_a_build_fails(compiled: Compiled, ptx: str, tmp_path: Path) -> None:
    """It leaves no record and no kernel, only the log."""
    compiled(ptx)
    with pytest.raises(compiler.BuildError, match=r"behind the wgmma.fence|not understood"):
        compiler.ensure(MERGE, tmp_path, linked=False)
    left = {path.suffix for path in tmp_path.glob(f"{MERGE.name}.*")}
    assert left == {".log"}
    outcome = precompile._build_one(MERGE, tmp_path, False, False)
    assert isinstance(outcome, list) and outcome


def test_such_a_build_is_tried(compiled: Compiled, tmp_path: Path) -> None:
    """``make try`` prints it and fails; what it leaves is not up to date, nor may it ship."""
    compiled(PLANTED)
    told = io.StringIO()
    assert tryout.run(MERGE, tmp_path, Console(file=told, width=200)) is False
    assert "behind the wgmma.fence" in told.getvalue()
    assert compiler.up_to_date(MERGE, tmp_path, False) is None
    files = artifacts.paths(tmp_path, MERGE)
    family = FamilyAudit()
    family.add(MERGE, Record.read(files["json"]), files["so"])
    assert any("behind the wgmma.fence" in text for text in family.problems[MERGE.name])


def test_a_build_is_audited_once(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In front of its record, inside its lock; not where it is found built."""
    files, read = artifacts.paths(tmp_path, MERGE), list[str]()

    def late_writes(ptx: str) -> list[str]:
        with pytest.raises(Timeout):
            FileLock(tmp_path / ".locks" / f"{MERGE.name}.lock").acquire(timeout=0)
        assert not files["json"].exists()
        read.append(ptx)
        return []

    monkeypatch.setattr(fences, "late_writes", late_writes)
    compiled(CLEAN)
    assert [compiler.ensure(MERGE, tmp_path, linked=False)[1] for _ in range(3)] == [True, 0, 0]
    assert read == [CLEAN]


@needs_compiler
def test_a_planted_write_is_found_in_a_variant(built: Report, variant_dir: Path) -> None:
    """A copy of an accumulator; the variant itself has none, as every one that is built."""
    assert not any(record.late_writes for record in built.records.values())
    (name, *_) = (n for n, record in built.records.items() if record.sass.get("QGMMA"))
    ptx = (variant_dir / f"{name}.ptx").read_text()
    assert fences.late_writes(ptx) == []
    taken = re.search(r"wgmma\.mma_async[^{]*\{(%\w+)", ptx)
    assert taken is not None
    at = ptx.rindex("wgmma.fence", 0, taken.start())
    end = ptx.index("\n", at) + 1
    assert fences.late_writes(f"{ptx[:end]}	mov.b32 	{taken[1]}, %r0;\n{ptx[end:]}")
