"""``precompile``: the real matrix is built and sound, and runs that are killed, share or repeat."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from codegen import artifacts, audit, closure, matrix
from codegen import compile as compiler
from codegen.__main__ import app
from codegen.precompile import Report, precompile
from dsl_kernels.families import ARCHS, FAMILIES
from dsl_kernels.spec import VariantSpec
from profiles import prove
from tests.support.builds import borrow, codegen, entries
from tests.support.needs import needs_compiler
from tests.support.variants import RARELY, shipped

pytestmark = needs_compiler
SIX = "append_kv_x*_ii??_sm90a"  # a pattern of as many variants


@pytest.mark.variants("*")
def test_variant(spec: VariantSpec, built: Report, variant_dir: Path) -> None:
    assert spec.name not in built.failed, built.failed[spec.name]
    record = built.records[spec.name]
    assert audit.problems(record) == []
    assert (record.spill_stores, record.spill_loads, record.stack_frame) == (0, 0, 0)
    assert record.sass.get("LDL", 0) == record.sass.get("STL", 0) == 0
    assert record.notes == []
    assert 0 < record.registers * record.threads <= 65536
    assert record.host_beyond in (0, None), "host code that other servers may not run"
    assert record.dynamic_smem is not None
    assert record.static_smem + record.dynamic_smem <= audit.SMEM_LIMIT
    if spec.op == "decode":
        mmas = {"sm_90a": ("QGMMA", "HGMMA"), "sm_100a": ("UTCQMMA", "UTCHMMA")}[spec.arch]
        if spec.pipeline == "f16":
            mmas = mmas[1:]
            assert "QGMMA" not in record.sass
        assert all(record.sass[opcode] > 0 for opcode in (*mmas, "UTMALDG"))
        assert bool(record.tmem_columns) == (spec.arch == "sm_100a")
    if spec.op == "dense_decode" and spec.arch == "sm_100a":
        # 36 steps of Q.K, 8 of P.V, in a pair 16; 8 copies of 16 bytes a row, in a loop over Q's
        # chunks
        products = {"ws": 8, "pair": 16}[spec.pipeline]
        assert (record.sass["UTCHMMA"], record.sass["UTCCP"]) == (36 + products, 8)
        assert record.tmem_columns == 512
    files = artifacts.paths(variant_dir, spec)
    ptx = files["ptx"].read_text()
    assert record.target in {"sm_90a": ("sm_90a",), "sm_100a": ("sm_100a", "sm_100f")}[spec.arch]
    assert f".target {record.target}" in ptx
    assert ".loc" in ptx, "line info is missing"
    assert spec.symbol.encode() in files["o"].read_bytes()


def test_run_covers_both_archs(built: Report, specs: list[VariantSpec]) -> None:
    ops: dict[str, set[str]] = {}
    for arch in ARCHS:
        ops[arch] = {s.op for s in matrix.default_specs(arch)}
        seen = {*specs, *map(VariantSpec.from_name, RARELY)}
        assert {s.op for s in seen if s.arch == arch} == ops[arch]
    # built when they are asked for, and studied all the same
    asked = {VariantSpec.from_name(name).op for name in prove.ASKED}
    assert asked.union(*ops.values()) == set(FAMILIES)
    assert not built.failed


def test_manifest(built: Report, variant_dir: Path) -> None:
    listed = entries(variant_dir)
    for name, record in built.records.items():
        assert listed[name]["key"] == record.key
        assert listed[name]["source_hash"] and listed[name]["dsl_version"]
        assert listed[name]["arguments"] and listed[name]["flavour"].startswith("cu")


def test_second_run_builds_nothing(
    built: Report, specs: list[VariantSpec], variant_dir: Path
) -> None:
    again = precompile(specs, variant_dir)
    assert not again.built and not again.failed
    known = "*" if specs == shipped(whole=True) else "merge*"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = codegen("precompile", "--filter", known, "--out", str(variant_dir))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "0 built" in done.stdout and done.returncode == 0, done.stdout
    # processor time: the wall clock of a busy machine says nothing
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5


@pytest.mark.whole_matrix
def test_edit_rebuilds_only_its_variants_in_a_real_tree(
    built: Report, variant_dir: Path, tmp_path: Path
) -> None:
    tree, out = tmp_path / "tree", tmp_path / "out"
    for package in ("codegen", "dsl_kernels"):
        shutil.copytree(artifacts.ROOT / package, tree / package)
    (tree / "snapmla").mkdir()
    shutil.copy(artifacts.ROOT / "snapmla" / "_version.py", tree / "snapmla")
    names = [*borrow("merge*", variant_dir, out), *borrow("plan_decode*", variant_dir, out)]
    assert len(set(names)) == 15
    done = codegen("precompile", "--filter", "[mp]*e_[os]*", "--out", str(out), cwd=tree)
    assert "0 built, 15 up to date" in done.stdout, done.stdout + done.stderr
    with (tree / "dsl_kernels" / "combine" / "merge.py").open("a") as file:
        file.write("\n# edited\n")
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.o")}
    done = codegen("precompile", "--filter", "[mp]*e_[os]*", "--out", str(out), cwd=tree)
    assert "2 built, 13 up to date" in done.stdout, done.stdout + done.stderr
    touched = {p.name for p in out.glob("*.o") if p.stat().st_mtime_ns != before[p.name]}
    assert touched == {"merge_obf16_sm90a.o", "merge_of32_sm90a.o"}


@pytest.mark.whole_matrix
def test_killed_precompile_goes_on_and_ends_in_the_same_manifest(
    built: Report, variant_dir: Path, tmp_path: Path
) -> None:
    arguments = ["precompile", "--filter", SIX, "--out", str(tmp_path), "--jobs", "1"]
    third = matrix.default_specs("sm_90a", SIX)[2]
    with artifacts.lock(tmp_path, third.name):  # where the worker is killed
        process = subprocess.Popen(
            [sys.executable, "-m", "codegen", *arguments], cwd=artifacts.ROOT,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        wait_for_records(process, tmp_path, 2)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert len(list(tmp_path.glob("*.json"))) == 2
    assert not (tmp_path / artifacts.MANIFEST).exists()
    done = codegen(*arguments)
    assert "4 built, 2 up to date" in done.stdout, done.stdout
    ours, shared = entries(tmp_path), entries(variant_dir)
    both = ours.keys() & shared.keys()
    assert len(ours) == 6 and len(both) >= 3
    assert {name: ours[name] for name in both} == {name: shared[name] for name in both}
    again = tmp_path / artifacts.MANIFEST
    text = again.read_text()
    again.unlink()  # killed after the last build, before the manifest
    assert codegen(*arguments).returncode == 0 and again.read_text() == text


def wait_for_records(process: subprocess.Popen[Any], out: Path, count: int) -> None:
    """Waits, as long as it takes, until a precompile has built ``count`` variants."""
    while len(list(out.glob("*.json"))) < count:
        assert process.poll() is None, "it ended before"
        time.sleep(0.02)


def start(
    out: Path, pattern: str = "[aqf]*", program: tuple[str, str] = ("-m", "codegen")
) -> tuple[subprocess.Popen[str], list[int]]:
    """A precompile (of 30 variants) that has built the first; its child processes."""
    arguments = ["precompile", "--filter", pattern, "--out", str(out), "--jobs", "1"]
    process = subprocess.Popen(
        [sys.executable, *program, *arguments], cwd=artifacts.ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    wait_for_records(process, out, 1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    assert children, "no worker process"
    return process, [int(pid) for pid in children.split()]


# The command, with the second variant waiting until the interrupt is there: no race.
HELD = """
import signal, sys
from pathlib import Path
from codegen import artifacts, matrix
from codegen.__main__ import app

_, _, pattern, _, out, *_ = arguments = sys.argv[1:]
second = artifacts.lock(Path(out), matrix.default_specs("sm_90a", pattern)[1].name)

def interrupted(*_):
    second.__exit__(None, None, None)
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupted)
second.__enter__()
app(arguments)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
@pytest.mark.whole_matrix
def test_interrupt_stops_after_the_variant_in_work(tmp_path: Path) -> None:
    process, _ = start(tmp_path, program=("-c", HELD))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in out, out
    assert "interrupted: the next run goes on from here" in out
    # the first, the one in work, and no more than the two that the pool had handed to the worker
    assert 2 <= len(list(tmp_path.glob("*.json"))) <= 4
    for path in tmp_path.glob("*.json"):
        spec = VariantSpec.from_name(path.stem)
        assert compiler.up_to_date(spec, tmp_path, True) is not None


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
@pytest.mark.whole_matrix
def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    process, workers = start(tmp_path)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 300  # a hang; they need a second
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [pid for pid in workers if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
@pytest.mark.whole_matrix
def test_a_worker_that_dies_fails_nothing(tmp_path: Path) -> None:
    last = matrix.default_specs("sm_90a", SIX)[-1]
    with artifacts.lock(tmp_path, last.name):  # the worker does not come further than that
        process, children = start(tmp_path, SIX)
        workers = [
            pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        for pid in workers:
            os.kill(pid, signal.SIGKILL)  # as the system does when memory is short
    out, _ = process.communicate(timeout=300)
    counts = re.search(r"(\d+) built, (\d+) up to date, 0 failed", out)
    assert process.returncode == 0 and counts, out
    built, written = map(int, counts.groups())
    # a worker tells of a variant before it takes the next: at most one each is written and not told
    assert built + written == 6 and written <= len(workers), out
    assert len(entries(tmp_path)) == 6


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.whole_matrix
def test_two_precompiles_share_a_directory(tmp_path: Path) -> None:
    arguments = ["precompile", "--filter", "merge_o*", "--out", str(tmp_path), "--jobs", "1"]
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "codegen", *arguments], cwd=artifacts.ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    made = 0
    for process in both:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out + err
        made += int(re.search(r"(\d+) built", out)[1])
    assert made == 2, "each variant is built by one of the two"
    assert sorted(entries(tmp_path)) == ["merge_obf16_sm90a", "merge_of32_sm90a"]
    left = {p.name for p in tmp_path.iterdir() if p.suffix not in (".o", ".ptx", ".json", ".log")}
    assert left - {p.name for p in tmp_path.glob("*.so")} == {".locks"}
    for name in entries(tmp_path):
        assert compiler.up_to_date(VariantSpec.from_name(name), tmp_path, True) is not None


@pytest.mark.parametrize("command", ["precompile --filter merge_ob*", "try merge_obf16_sm90a"])
def test_a_directory_that_takes_nothing_is_one_sentence(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").touch()
    done = codegen(*command.split(), "--out", str(tmp_path / "file"))
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert f"{tmp_path / 'file'} cannot be written: " in done.stdout.splitlines()[-1]


def test_edit_rebuilds_only_its_variants(
    built: Report,
    specs: list[VariantSpec],
    variant_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = closure.ROOT / "combine" / "merge.py"
    digest = closure._digest

    def edited(which: Path, mtime: int) -> bytes:
        return b"edited" if which == path else digest(which, mtime)

    monkeypatch.setattr(closure, "_digest", edited)
    stale = {s.op for s in specs if not compiler.up_to_date(s, variant_dir, True)}
    assert stale == {"merge", "decode", "dense_decode", "sparse_decode"}, "decodes launch merge"


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


def test_builds_name_no_place_of_this_machine(built: Report, variant_dir: Path) -> None:
    for record in built.records.values():
        files = [variant_dir / f"{record.name}.{suffix}" for suffix in ("o", "ptx", "json")]
        for path in filter(Path.is_file, files):
            assert str(artifacts.ROOT).encode() not in path.read_bytes(), path.name
        assert '"dsl_kernels/' in files[1].read_text(), "line info stays"


def test_build_command_names_an_unknown_variant() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "codegen", "build", "prefill_r64_sm90a"],
        capture_output=True, text=True, cwd=artifacts.ROOT,
    )  # fmt: skip
    assert done.returncode == 1 and "variant name" in done.stdout
