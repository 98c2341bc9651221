"""The audit: what it reads of a build, and what it refuses."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from codegen import __main__ as cli
from codegen import audit, toolchain
from codegen import compile as compiler
from codegen.artifacts import Record
from codegen.precompile import Report
from dsl_kernels.spec import VariantSpec, decode_spec
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
DECLARED = {
    "threads": 512, "warpgroup_registers": [24, 88, 200], "barrier_counts": {"1": 9, "4": 4},
    "smem": 200_000, "tmem_columns": 0, "opcodes": ["HGMMA", "QGMMA"],
    "under_softmax": ["HGMMA", "QGMMA"],
}  # fmt: skip
SASS = {"QGMMA": 1, "HGMMA": 1, "USETMAXREG": 3}
AMID = {"FMNMX": 25, "HGMMA": 4, "MUFU": 36, "QGMMA": 16, "STSM": 2}


def test_host_code_of_the_building_cpu_is_seen(tmp_path: Path) -> None:
    compiler_path = toolchain.c_compiler()
    if compiler_path is None or shutil.which("objdump") is None:
        pytest.skip("needs a C compiler and objdump")
    source = tmp_path / "a.c"
    source.write_text("void f(float *a) { for (int i = 0; i < 64; ++i) a[i] *= 3; }\n")
    for flags, clean in ((["-march=x86-64-v2"], True), (["-mavx2"], False)):
        obj = tmp_path / "a.o"
        subprocess.run([compiler_path, "-O3", *flags, "-c", source, "-o", obj], check=True)
        record = sample()
        audit.read_host(record, obj)
        assert (record.host_beyond == 0) is clean
        assert any("SIGILL" in problem for problem in audit.problems(record)) is not clean


def sample(**changes: object) -> Record:
    """A record without problems, then changed."""
    spec = decode_spec("etap", 64, 64, "bf16")
    record = compiler.draft(spec)
    record.threads, record.registers, record.launch_registers = 512, 128, 65536
    record.warpgroup_registers = [24, 88, 200]
    record.dynamic_smem = 200_000
    record.sass = dict(SASS)
    record.amid_mmas = dict(AMID)
    record.barrier_counts, record.declared = {"1": 9, "4": 4}, dict(DECLARED)
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def test_clean_record_passes() -> None:
    assert audit.problems(sample()) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"spill_stores": 8}, "spill"),
        ({"spill_loads": 4}, "spill"),
        ({"stack_frame": 144}, "local memory"),
        ({"sass": {**SASS, "LDL": 2}}, "local memory"),
        ({"notes": ["ptxas info : (C7510) Potential Performance Loss"]}, "C7510"),
        ({"warpgroup_registers": [40, 120, 200]}, "setmaxnreg"),
        ({"sass": {**SASS, "USETMAXREG": 2}}, "3 in the PTX, 2 USETMAXREG in the SASS"),
        ({"warpgroup_registers": []}, "0 in the PTX, 3 USETMAXREG"),
        ({"declared": {**DECLARED, "mma_counts": {"QGMMA": 2}}}, "1 QGMMA in the SASS, declared"),
        ({"wrong_way": ["setmaxnreg.inc 120"]}, "illegal instruction"),
        ({"launch_registers": 86016}, "65536"),
        ({"dynamic_smem": 232_449}, "shared memory"),
        ({"sass": {**SASS, "QGMMA": 0}}, "QGMMA"),
        ({"sass": {**SASS, "HGMMA": 0}}, "HGMMA"),
        ({"host_beyond": 3, "host_cpu": "x86-64-v2"}, "SIGILL"),
        ({"amid_mmas": {}}, "no HGMMA, no QGMMA, no FMNMX (maxima)"),
        ({"amid_mmas": {**AMID, "HGMMA": 0}}, "MMA of the loop there is no HGMMA"),
        ({"amid_mmas": {**AMID, "FMNMX": 0}}, "MMA of the loop there is no FMNMX (maxima)"),
        ({"amid_mmas": {**AMID, "STSM": 0}}, "MMA of the loop there is no STSM (stores of P)"),
        ({"amid_mmas": {**AMID, "BRA": 2}}, "2 branches or waits amid"),
        ({"declared": {**DECLARED, "threads": 384}}, "budget: threads"),
        ({"declared": {**DECLARED, "warpgroup_registers": [24, 200]}}, "warpgroup_registers"),
        ({"declared": {**DECLARED, "barrier_counts": {"1": 9}}}, "barrier_counts"),
        ({"declared": {**DECLARED, "tmem_columns": 512}}, "tmem_columns is declared 512, built 0"),
        ({"declared": {**DECLARED, "smem": 199_999}}, "199999 bytes of shared memory declared"),
        ({"late_writes": ["PTX line 7: takes %r1"]}, "PTX line 7"),
    ],
)
def test_audit_refuses(changes: dict, word: str) -> None:
    found = audit.problems(sample(**changes))
    assert any(word in problem for problem in found), found


LOOPS = """
.L_x_0:
        /*0010*/                   QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], RZ, !UPT ;
        /*0020*/              @!P0 FMNMX R1, R2, R3, !PT ;
.L_x_1:
        /*0030*/                   FMNMX R1, R2, R3, !PT ;
        /*0040*/                   QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24 ;
        /*0050*/              @!P1 BRA `(.L_x_2) ;
        /*0060*/                   MUFU.EX2 R4, R5 ;
        /*0070*/                   STSM.16.M88.4 [R6], R8 ;
.L_x_2:
        /*0080*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0090*/                   STSM.16.M88.4 [R6], R8 ;
        /*00a0*/               @P2 BRA `(.L_x_1) ;
        /*00b0*/               @P3 BRA `(.L_x_0) ;
        /*00c0*/                   BRA `(.L_x_3) ;
.L_x_3:
"""


def test_instructions_amid_the_mmas_are_read() -> None:
    """Of the inner loop, from its first MMA to its last."""
    found = {"BRA": 1, "HGMMA": 1, "MUFU": 1, "QGMMA": 1, "STSM": 1}
    assert audit.amid_mmas(LOOPS) == found
    assert audit.amid_mmas(LOOPS.replace("EX2", "RCP")) == {}
    assert audit.amid_mmas(LOOPS.replace("GMMA", "MMA")) == {}


def test_counts_are_read() -> None:
    """Operands of mbarrier.init and tcgen05.alloc, immediate or in a register."""
    record = sample()
    audit.read_counts(
        record,
        "mov.b32 %r7, 512;\nmov.b32 %r8, 4;\n"
        "mbarrier.init.shared.b64 [%r1+8], %r8;\nmbarrier.init.shared.b64 [%r1], 1;\n"
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+192], %r7;\n",
    )
    assert (record.barrier_counts, record.tmem_columns) == ({"1": 1, "4": 1}, 512)


def test_setmaxnreg_the_wrong_way_is_read() -> None:
    record, lines = sample(registers=128, kernel_registers={}), []
    for way, count in (("dec", 40), ("inc", 120), ("inc", 128), ("dec", 160), ("inc", 160)):
        lines.append(f"setmaxnreg.{way}.sync.aligned.u32 \t{count};")
    audit.read_ptx(record, "\n".join(lines))
    assert record.wrong_way == ["setmaxnreg.inc 120", "setmaxnreg.dec 160"]


def test_ptxas_remarks_are_read() -> None:
    record = sample()
    text = (
        "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async serialized\n"
        "ptxas         .     16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 3 barriers, 1024 bytes smem\n"
    )
    audit.read_ptxas(record, text)
    assert (record.registers, record.barriers, record.static_smem) == (168, 3, 1024)
    assert (record.stack_frame, record.spill_stores, record.spill_loads) == (16, 8, 4)
    assert len(record.notes) == 1 and "C7512" in record.notes[0]


def test_registers_are_counted_by_kernel() -> None:
    """Not the most registers of one kernel times the threads of another."""
    record = sample()
    audit.read_ptxas(
        record,
        "ptxas info    : Compiling entry function 'big' for 'sm_90a'\n"
        "ptxas info    : Used 128 registers, used 16 barriers\n"
        "ptxas info    : Compiling entry function\n          'wide'\n          for 'sm_90a'\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n",
    )
    entry = ".visible .entry {}(\n.param .u64 p\n)\n.reqntid {}, 1, 1\n{{\nret;\n}}\n"
    audit.read_ptx(record, ".version 8.7\n" + entry.format("wide", 256) + entry.format("big", 512))
    assert (record.registers, record.threads, record.launch_registers) == (168, 512, 65536)
    assert record.kernel_registers == {"big": 128, "wide": 168}


def test_missing_remarks_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="ptxas"):
        audit.read_ptxas(sample(), "nothing to see")


def test_dynamic_smem_is_read_from_the_launch(built: Report) -> None:
    for record in built.records.values():
        if record.spec["op"] == "decode":  # two 64-token tiles of 41,216 B at the very least
            assert (record.dynamic_smem or 0) > 82_000, record.name


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({}, 0, "0.50"),
        ({"spill_stores": 8}, 1, "registers spill (8 B stored, 0 B loaded)\n  merge_obf16_sm90a"),
        ({"key": "of other sources"}, 1, "1 not built from these sources (merge_obf16_sm90a)"),
    ],
)
def test_families_are_audited(
    tmp_path: Path, changes: dict[str, object], code: int, words: str
) -> None:
    """Two variants, of which one is good, spills or is of other sources."""
    for name in ("merge_obf16_sm90a", "merge_of32_sm90a"):
        record = compiler.draft(VariantSpec.from_name(name))
        record.registers, record.static_smem = 40, 6100
        if name == "merge_obf16_sm90a":
            record.registers = 50
            for key, value in changes.items():
                setattr(record, key, value)
        (tmp_path / f"{name}.json").write_text(record.to_json())
        (tmp_path / f"{name}.so").write_bytes(bytes(250_000))
    result = CliRunner().invoke(cli.app, ["audit", "--filter", "merge_o*", "--out", str(tmp_path)])
    assert result.exit_code == code and words in result.output, result.output
    built = 1 if "key" in changes else 2
    registers, megabytes = (50, "0.50") if built == 2 else (40, "0.25")
    cells = ["merge", 2, built, 2 - code, registers, "6.1", megabytes]
    row = "│ " + " *│ ".join(re.escape(str(cell)) for cell in cells) + " *│"
    assert re.search(row, result.output), result.output


def test_an_audit_of_nothing_is_refused() -> None:
    result = CliRunner().invoke(cli.app, ["audit", "--filter", "nonsense"])
    assert result.exit_code == 1 and "no variant of sm_90a matches 'nonsense'" in result.output
