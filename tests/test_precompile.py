"""Built variants: the audit of the real matrix, and that the audit and the builder can say no."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HELPER_OPS, default_matrix
from typer.testing import CliRunner

from codegen import artifacts, audit, closure, link, toolchain
from codegen import compile as compiler
from codegen.__main__ import app
from codegen.artifacts import Record
from codegen.precompile import Report, precompile
from dsl_kernels.spec import VariantSpec, decode_spec
from snapmla import runtime

pytestmark = pytest.mark.skipif(not toolchain.have_compiler(), reason="needs nvidia-cutlass-dsl")
CHEAP = VariantSpec(op="merge")


def all_specs() -> list[VariantSpec]:
    return default_matrix() if toolchain.have_compiler() else []


@pytest.mark.parametrize("spec", all_specs(), ids=lambda s: s.name)
def test_variant(spec: VariantSpec, built: Report, variant_dir: Path) -> None:
    assert spec.name not in built.failed, built.failed[spec.name]
    record = built.records[spec.name]
    assert audit.problems(record) == []
    assert (record.spill_stores, record.spill_loads, record.stack_frame) == (0, 0, 0)
    assert record.sass.get("LDL", 0) == record.sass.get("STL", 0) == 0
    assert record.notes == []
    assert 0 < record.registers * record.threads <= 65536
    assert record.dynamic_smem is not None
    assert record.static_smem + record.dynamic_smem <= audit.SMEM_LIMIT
    if spec.op == "decode":
        assert record.sass["QGMMA"] > 0 and record.sass["HGMMA"] > 0 and record.sass["UTMALDG"] > 0
    files = artifacts.paths(variant_dir, spec)
    ptx = files["ptx"].read_text()
    assert f".target {spec.arch}" in ptx
    assert ".loc" in ptx, "line info is missing"
    assert spec.symbol.encode() in files["o"].read_bytes()


def test_matrix_covers_both_archs(built: Report) -> None:
    helpers = {s.op for s in all_specs() if s.arch == "sm_100a"}
    assert helpers == set(HELPER_OPS)
    assert not built.failed


def test_manifest(built: Report, variant_dir: Path) -> None:
    manifest = json.loads((variant_dir / artifacts.MANIFEST).read_text())
    listed = {v["name"]: v for v in manifest["variants"]}
    for name, record in built.records.items():
        assert listed[name]["key"] == record.key
        assert listed[name]["source_hash"] and listed[name]["dsl_version"]


def test_library_needs_tvm_ffi_only(built: Report, variant_dir: Path) -> None:
    if link.mode() != "static":
        pytest.skip("no libcudart_static.a here")
    library = artifacts.paths(variant_dir, CHEAP)["so"]
    text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
    needed = {line.split("[")[1].rstrip("]") for line in text.splitlines() if "NEEDED" in line}
    assert {n for n in needed if not n.startswith(("libc.", "ld-linux"))} == {"libtvm_ffi.so"}


def test_library_loads_and_checks_arguments(built: Report, variant_dir: Path) -> None:
    import tvm_ffi

    library = artifacts.paths(variant_dir, CHEAP)["so"]
    if not library.is_file():
        pytest.skip("not linked here")
    function = tvm_ffi.load_module(str(library))[CHEAP.symbol]
    with pytest.raises(TypeError, match="o_accum"):
        function(1)


def test_second_run_builds_nothing(built: Report, variant_dir: Path) -> None:
    again = precompile(all_specs(), variant_dir)
    assert not again.built and not again.failed


def test_edit_rebuilds_only_its_variants(
    built: Report, variant_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = closure.ROOT / "smxx" / "merge.py"
    digest = closure._digest

    def edited(which: Path, mtime: int) -> bytes:
        return b"edited" if which == path else digest(which, mtime)

    monkeypatch.setattr(closure, "_digest", edited)
    stale = {s.op for s in all_specs() if not compiler.up_to_date(s, variant_dir, True)}
    assert stale == {"merge"}


def test_interrupted_build_is_redone(tmp_path: Path) -> None:
    files = artifacts.paths(tmp_path, CHEAP)
    files["o"].write_bytes(b"half")  # what a killed run leaves: no record
    assert compiler.up_to_date(CHEAP, tmp_path, False) is None
    report = precompile([CHEAP], tmp_path, jobs=1, linked=False)
    assert set(report.built) == {CHEAP.name}
    assert compiler.up_to_date(CHEAP, tmp_path, False) is not None
    files["ptx"].unlink()
    assert compiler.up_to_date(CHEAP, tmp_path, False) is None


@pytest.fixture
def fake_compiler(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """``build`` without the compiler; the dict's entries become fields of the record."""
    measured: dict[str, int] = {"registers": 32, "threads": 128}

    def read(record: Record, _: object) -> None:
        for name, value in measured.items():
            setattr(record, name, value)

    monkeypatch.setattr(compiler, "_compile", lambda spec, tmp: (b"new", "new", b"", ""))
    for reader in ("read_ptxas", "read_ptx", "read_host_module", "read_sass"):
        monkeypatch.setattr(audit, reader, read)
    monkeypatch.setenv("CUTE_DSL_ARCH", CHEAP.arch)
    return measured


def test_build_with_problems_is_not_up_to_date(
    tmp_path: Path, fake_compiler: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``make try`` leaves what it built, for its own check only."""
    fake_compiler["spill_stores"] = 8
    assert audit.problems(compiler.build(CHEAP, tmp_path, linked=False, strict=False))
    assert compiler.up_to_date(CHEAP, tmp_path, False) is None
    monkeypatch.setattr("snapmla.env.variant_dirs", lambda: [tmp_path])
    monkeypatch.setenv("SNAPMLA_NO_JIT", "0")
    monkeypatch.setattr(runtime, "compile_variant", lambda spec: "compiled anew")
    assert runtime.find_or_build(CHEAP, need_library=False) == "compiled anew"
    fake_compiler["spill_stores"] = 0
    compiler.build(CHEAP, tmp_path, linked=False)
    assert compiler.up_to_date(CHEAP, tmp_path, False) is not None
    assert runtime.find_or_build(CHEAP, need_library=False) != "compiled anew"


def test_killed_rebuild_leaves_no_record(
    tmp_path: Path, fake_compiler: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.build(CHEAP, tmp_path, linked=False)
    files = artifacts.paths(tmp_path, CHEAP)
    write = artifacts.write_atomic

    def killed(path: Path, data: bytes | str) -> None:
        if path == files["ptx"]:
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(artifacts, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        compiler.build(CHEAP, tmp_path, linked=False)
    assert compiler.up_to_date(CHEAP, tmp_path, False) is None
    assert runtime.find(CHEAP, [tmp_path]) is None


def test_unlinked_rebuild_drops_the_old_library(
    tmp_path: Path, fake_compiler: dict[str, int]
) -> None:
    files = artifacts.paths(tmp_path, CHEAP)
    files["so"].write_bytes(b"of older sources")
    compiler.build(CHEAP, tmp_path, linked=False)
    found = runtime.find(CHEAP, [tmp_path])
    assert found is not None and found.library is None


@pytest.mark.parametrize("command", ["build", "try"])
def test_unwritten_kernel_is_one_sentence(tmp_path: Path, command: str) -> None:
    spec = VariantSpec(op="decode", arch="sm_100a", pipeline="etap")
    result = CliRunner().invoke(app, [command, spec.name, "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "no kernel module builds decode_etap" in result.output
    assert isinstance(result.exception, SystemExit) and len(result.output) < 200


def test_infeasible_spec_is_reported_not_raised(tmp_path: Path) -> None:
    bad = VariantSpec(op="decode", pipeline="etap", row_tile=128, cluster=1)
    report = precompile([bad], tmp_path, jobs=1)
    assert "cluster" in report.failed[bad.name][0]
    assert not artifacts.paths(tmp_path, bad)["json"].exists()


def sample(**changes: object) -> Record:
    """A record without problems, then changed."""
    spec = decode_spec("etap", 64, 64, "bf16")
    record = compiler.draft(spec)
    record.threads, record.registers = 512, 128
    record.warpgroup_registers = [24, 88, 200]
    record.dynamic_smem = 200_000
    record.sass = {"QGMMA": 1, "HGMMA": 1}
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
        ({"sass": {"QGMMA": 1, "HGMMA": 1, "LDL": 2}}, "local memory"),
        ({"notes": ["ptxas info : (C7510) Potential Performance Loss"]}, "C7510"),
        ({"warpgroup_registers": [40, 120, 200]}, "setmaxnreg"),
        ({"registers": 168}, "65536"),
        ({"dynamic_smem": 232_449}, "shared memory"),
        ({"sass": {"HGMMA": 1}}, "QGMMA"),
        ({"sass": {"QGMMA": 1}}, "HGMMA"),
    ],
)
def test_audit_refuses(changes: dict, word: str) -> None:
    found = audit.problems(sample(**changes))
    assert any(word in problem for problem in found), found


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


def test_missing_remarks_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="ptxas"):
        audit.read_ptxas(sample(), "nothing to see")


def test_dynamic_smem_is_read_from_the_launch(built: Report) -> None:
    for record in built.records.values():
        if record.spec["op"] == "decode":  # two 64-token tiles of 41,216 B at the very least
            assert (record.dynamic_smem or 0) > 82_000, record.name


def test_build_command_names_an_unknown_variant() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "codegen", "build", "prefill_r64_sm90a"],
        capture_output=True, text=True, cwd=artifacts.ROOT,
    )  # fmt: skip
    assert done.returncode == 1 and "variant name" in done.stdout


def test_two_processes_compile_a_missing_variant_once(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from dsl_kernels.spec import VariantSpec\n"
        "from snapmla import env, runtime\n"
        "env.variant_dirs = lambda: [pathlib.Path(sys.argv[1])]\n"
        "print(runtime.find_or_build(VariantSpec(op='merge'), need_library=False).ptx)"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], cwd=artifacts.ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in both:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert out.strip() == str(tmp_path / "merge_obf16_sm90a.ptx")
    assert compiler.up_to_date(CHEAP, tmp_path, False) is not None
    assert not list(tmp_path.glob(".*.o.*")), "temporary files are left"
