"""Built variants: the audit of the real matrix, and that the audit and the builder can say no."""

from __future__ import annotations

import json
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

from codegen import artifacts, audit, closure, link, matrix, toolchain
from codegen import compile as compiler
from codegen.__main__ import app
from codegen.artifacts import Record
from codegen.precompile import Report, precompile
from dsl_kernels.spec import VariantSpec, decode_spec
from snapmla import runtime
from tests.support.needs import needs_compiler
from tests.support.variants import HELPER_OPS, shipped

pytestmark = needs_compiler
CHEAP = VariantSpec(op="merge")
Done = subprocess.CompletedProcess[str]
DECLARED = {
    "threads": 512, "warpgroup_registers": [24, 88, 200], "barrier_counts": {"1": 9, "4": 4},
    "smem": 200_000,
}  # fmt: skip


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
        assert record.sass["QGMMA"] > 0 and record.sass["HGMMA"] > 0 and record.sass["UTMALDG"] > 0
    files = artifacts.paths(variant_dir, spec)
    ptx = files["ptx"].read_text()
    assert f".target {spec.arch}" in ptx
    assert ".loc" in ptx, "line info is missing"
    assert spec.symbol.encode() in files["o"].read_bytes()


def test_run_covers_both_archs(built: Report, specs: list[VariantSpec]) -> None:
    helpers = {s.op for s in specs if s.arch == "sm_100a"}
    assert helpers == set(HELPER_OPS)
    assert not built.failed


def test_manifest(built: Report, variant_dir: Path) -> None:
    listed = entries(variant_dir)
    for name, record in built.records.items():
        assert listed[name]["key"] == record.key
        assert listed[name]["source_hash"] and listed[name]["dsl_version"]
        assert listed[name]["arguments"] and listed[name]["flavour"].startswith("cu")


def entries(directory: Path) -> dict[str, dict]:
    """The manifest of a directory, by variant name."""
    manifest = json.loads((directory / artifacts.MANIFEST).read_text())
    return {v["name"]: v for v in manifest["variants"]}


def test_library_needs_tvm_ffi_only(built: Report, variant_dir: Path) -> None:
    """Neither CUDA's nor the DSL's runtime, and a C library of any age."""
    if link.identity() is None:
        pytest.skip("nothing can be linked here")
    library = artifacts.paths(variant_dir, CHEAP)["so"]
    text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
    needed = {line.split("[")[1].rstrip("]") for line in text.splitlines() if "NEEDED" in line}
    assert {n for n in needed if not n.startswith(("libc.", "ld-linux"))} == {"libtvm_ffi.so"}
    text = subprocess.run(["objdump", "-T", library], capture_output=True, text=True).stdout
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", text)}
    assert versions and max(versions) < (2, 18)
    exported = [x.split()[-1] for x in text.splitlines() if " g " in x and "UND" not in x]
    assert exported == [f"__tvm_ffi_{CHEAP.symbol}"]


def test_libraries_are_small(built: Report, specs: list[VariantSpec], variant_dir: Path) -> None:
    if link.identity() is None:
        pytest.skip("nothing can be linked here")
    for spec in specs:
        files = artifacts.paths(variant_dir, spec)
        assert files["so"].stat().st_size < files["o"].stat().st_size + 20_000, spec.name


def test_library_loads_and_checks_arguments(built: Report, variant_dir: Path) -> None:
    import tvm_ffi

    library = artifacts.paths(variant_dir, CHEAP)["so"]
    if not library.is_file():
        pytest.skip("not linked here")
    function = tvm_ffi.load_module(str(library))[CHEAP.symbol]
    with pytest.raises(TypeError, match="o_accum"):
        function(1)


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


def codegen(*arguments: str, cwd: Path = artifacts.ROOT, **environment: str) -> Done:
    """Runs ``python -m codegen`` of the tree in ``cwd``."""
    return subprocess.run(
        [sys.executable, "-m", "codegen", *arguments], capture_output=True, text=True, cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(cwd), **environment}, timeout=300,
    )  # fmt: skip


def borrow(pattern: str, source: Path, target: Path) -> list[str]:
    """Copies built variants into a directory of the test's own; returns their names."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.glob(f"{pattern}_sm90a.*"):
        shutil.copy(path, target / path.name)
    return sorted(path.stem for path in target.glob("*.json"))


def test_edit_rebuilds_only_its_variants_in_a_real_tree(
    built: Report, variant_dir: Path, tmp_path: Path
) -> None:
    tree, out = tmp_path / "tree", tmp_path / "out"
    for package in ("codegen", "dsl_kernels"):
        shutil.copytree(artifacts.ROOT / package, tree / package)
    (tree / "snapmla").mkdir()
    shutil.copy(artifacts.ROOT / "snapmla" / "_version.py", tree / "snapmla")
    names = [*borrow("merge*", variant_dir, out), *borrow("plan_decode*", variant_dir, out)]
    assert len(set(names)) == 3
    done = codegen("precompile", "--filter", "[mp]*", "--out", str(out), cwd=tree)
    assert "0 built, 3 up to date" in done.stdout, done.stdout + done.stderr
    with (tree / "dsl_kernels" / "smxx" / "merge.py").open("a") as file:
        file.write("\n# edited\n")
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.o")}
    done = codegen("precompile", "--filter", "[mp]*", "--out", str(out), cwd=tree)
    assert "2 built, 1 up to date" in done.stdout, done.stdout + done.stderr
    touched = {p.name for p in out.glob("*.o") if p.stat().st_mtime_ns != before[p.name]}
    assert touched == {"merge_obf16_sm90a.o", "merge_of32_sm90a.o"}


def test_killed_precompile_goes_on_and_ends_in_the_same_manifest(
    built: Report, variant_dir: Path, tmp_path: Path
) -> None:
    arguments = ["precompile", "--filter", "append_kv*", "--out", str(tmp_path), "--jobs", "1"]
    third = matrix.default_specs("sm_90a", "append_kv*")[2]
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
    """A precompile (of 18 variants) that has built the first; its child processes."""
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
def test_a_worker_that_dies_fails_nothing(tmp_path: Path) -> None:
    last = matrix.default_specs("sm_90a", "append_kv*")[-1]
    with artifacts.lock(tmp_path, last.name):  # the worker does not come further than that
        process, children = start(tmp_path, "append_kv*")
        for pid in children:
            if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)  # as the system does when memory is short
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "6 built, 0 up to date, 0 failed" in out, out
    assert len(entries(tmp_path)) == 6


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_two_precompiles_share_a_directory(tmp_path: Path) -> None:
    arguments = ["precompile", "--filter", "merge*", "--out", str(tmp_path), "--jobs", "1"]
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


def test_relinking_does_not_compile(
    built: Report, variant_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if link.identity() is None:
        pytest.skip("nothing can be linked here")
    borrow("merge_obf16", variant_dir, tmp_path)
    files = artifacts.paths(tmp_path, CHEAP)
    record = Record.read(files["json"])
    assert record is not None
    record.link = "of an older linker"
    files["json"].write_text(record.to_json())
    files["so"].write_bytes(b"of an older linker")
    assert compiler.up_to_date(CHEAP, tmp_path, True) is None
    assert compiler.up_to_date(CHEAP, tmp_path, False) is not None
    monkeypatch.setattr(compiler, "build", lambda *a, **k: pytest.fail("compiled"))
    assert compiler.ensure(CHEAP, tmp_path)[1]
    assert compiler.up_to_date(CHEAP, tmp_path, True) is not None
    assert not compiler.ensure(CHEAP, tmp_path)[1]
    assert files["so"].read_bytes() == artifacts.paths(variant_dir, CHEAP)["so"].read_bytes()


def test_linking_in_a_directory_with_an_unusual_name(
    built: Report, variant_dir: Path, tmp_path: Path
) -> None:
    if link.identity() is None:
        pytest.skip("nothing can be linked here")
    folder = tmp_path / "a, b'c $d"
    borrow("merge_obf16", variant_dir, folder)
    files = artifacts.paths(folder, CHEAP)
    link.link(files["o"], files["so"], CHEAP.arch, toolchain.flavour())
    assert files["so"].read_bytes() == artifacts.paths(variant_dir, CHEAP)["so"].read_bytes()


def test_without_a_c_compiler_it_says_so_and_links_later(tmp_path: Path) -> None:
    if link.identity() is None:
        pytest.skip("nothing can be linked here")
    arguments = ["precompile", "--filter", "merge_ob*", "--out", str(tmp_path)]
    done = codegen(*arguments, PATH=str(tmp_path / "none"), CC="")
    assert done.returncode == 0 and "1 built" in done.stdout, done.stdout
    assert "no C compiler here" in done.stdout and not list(tmp_path.glob("*.so"))
    before = artifacts.paths(tmp_path, CHEAP)["o"].stat().st_mtime_ns
    done = codegen(*arguments)
    assert "1 built" in done.stdout and "no C compiler" not in done.stdout
    files = artifacts.paths(tmp_path, CHEAP)
    assert files["so"].is_file() and files["o"].stat().st_mtime_ns == before, "linked only"


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


def test_flavours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "installed_majors", lambda: [12, 13])
    for driver, picked in ((None, "cu13"), (12, "cu12"), (13, "cu13"), (14, "cu13")):
        monkeypatch.setattr(toolchain, "driver_major", lambda driver=driver: driver)
        assert toolchain.flavour() == picked
        monkeypatch.setenv("SNAPMLA_CUDA", "12")
        assert toolchain.flavour() == "cu12"
        monkeypatch.delenv("SNAPMLA_CUDA")
    monkeypatch.setenv("SNAPMLA_CUDA", "11")
    with pytest.raises(ValueError, match="CUDA: expected one of 12, 13, got '11'"):
        toolchain.flavour()
    monkeypatch.setattr(toolchain, "installed_majors", lambda: [12])
    monkeypatch.setenv("SNAPMLA_CUDA", "13")
    with pytest.raises(ValueError, match="cu13 libraries are not installed: pip install 'nvidia-"):
        toolchain.flavour()


@pytest.mark.parametrize(
    ("installed", "driver", "words"),
    [
        (
            [13],
            12,
            r"supports CUDA 12 and the DSL's libraries are cu13: pip install 'nvidia-.*-cu12==",
        ),
        ([12, 13], 11, "supports CUDA 11 and the DSL's libraries are cu12 and cu13: update it"),
        ([], 13, r"libraries are not installed: pip install 'nvidia-cutlass-dsl==[\d.]+'"),
    ],
)
def test_no_usable_flavour_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: list, driver: int, words: str
) -> None:
    monkeypatch.delenv("SNAPMLA_CUDA", raising=False)
    monkeypatch.setattr(toolchain, "installed_majors", lambda: installed)
    monkeypatch.setattr(toolchain, "driver_major", lambda: driver)
    with pytest.raises(compiler.BuildError, match=words):
        compiler.build(CHEAP, tmp_path)


@pytest.mark.parametrize("command", ["precompile --filter merge_ob*", "try merge_obf16_sm90a"])
def test_a_directory_that_takes_nothing_is_one_sentence(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").touch()
    done = codegen(*command.split(), "--out", str(tmp_path / "file"))
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert f"{tmp_path / 'file'} cannot be written: " in done.stdout.splitlines()[-1]


def test_other_cuda_has_its_own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """... and its PTX and record say so; the DSL has no switch for it."""
    if toolchain.installed_majors() != [12, 13] or toolchain.driver_major() is not None:
        pytest.skip("needs both toolkit flavours and no driver")
    ours = tmp_path / "variants"
    done = codegen(
        "precompile", "--cuda", "12", "--filter", "merge_obf16*", SNAPMLA_VARIANT_DIR=str(ours)
    )
    assert done.returncode == 0 and not ours.exists(), done.stdout
    record = Record.read(tmp_path / "variants-cu12" / "merge_obf16_sm90a.json")
    assert record is not None and (record.flavour, record.ptx_version) == ("cu12", "8.8")
    done = codegen("precompile", "--cuda", "15", "--filter", "merge*", "--out", str(tmp_path))
    assert done.returncode == 1 and done.stdout.count("\n") == 1, done.stdout
    assert "CUDA: expected one of 12, 13, got '15'" in done.stdout


def test_flavour_that_was_not_asked_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.import_compiler()
    other = "12" if toolchain.flavour() == "cu13" else "13"
    if int(other) not in toolchain.installed_majors():
        pytest.skip("one flavour only")
    monkeypatch.setenv("SNAPMLA_CUDA", other)
    with pytest.raises(RuntimeError, match=rf"cu{other} was asked for"):
        toolchain.import_compiler()


def test_edit_rebuilds_only_its_variants(
    built: Report,
    specs: list[VariantSpec],
    variant_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = closure.ROOT / "smxx" / "merge.py"
    digest = closure._digest

    def edited(which: Path, mtime: int) -> bytes:
        return b"edited" if which == path else digest(which, mtime)

    monkeypatch.setattr(closure, "_digest", edited)
    stale = {s.op for s in specs if not compiler.up_to_date(s, variant_dir, True)}
    assert stale == {"merge", "decode"}, "decode launches merge"


def test_interrupted_build_is_redone(tmp_path: Path) -> None:
    files = artifacts.paths(tmp_path, CHEAP)
    files["o"].write_bytes(b"half")  # what a killed run leaves: no record
    assert compiler.up_to_date(CHEAP, tmp_path, False) is None
    report = precompile([CHEAP], tmp_path, jobs=1, linked=False)
    assert set(report.built) == {CHEAP.name}
    assert compiler.up_to_date(CHEAP, tmp_path, False) is not None
    files["ptx"].unlink()
    assert compiler.up_to_date(CHEAP, tmp_path, False) is None


@pytest.mark.parametrize("suffix", ["o", "ptx", "so", "json"])
def test_damage_is_seen(
    variant_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """So ``precompile`` repairs it without ``--force``; what a library needs is a link."""
    precompile([CHEAP], variant_dir, jobs=1)
    borrow("merge_obf16", variant_dir, tmp_path)
    files = artifacts.paths(tmp_path, CHEAP)
    if not files[suffix].exists():
        pytest.skip("nothing can be linked here")
    before = files[suffix].read_bytes()
    assert compiler.up_to_date(CHEAP, tmp_path, True) is not None
    files[suffix].write_bytes(before[:-3] + b"?" + before[-2:])
    assert compiler.up_to_date(CHEAP, tmp_path, True) is None
    assert (compiler.up_to_date(CHEAP, tmp_path, False) is None) is (suffix != "so")
    monkeypatch.setattr(compiler, "build", lambda spec, out, linked: "compiled")
    made, _ = compiler.ensure(CHEAP, tmp_path)
    assert (made != "compiled") is (suffix == "so")
    if suffix == "so":
        assert files["so"].read_bytes() == before
        assert compiler.up_to_date(CHEAP, tmp_path, True) is not None


def test_what_a_killed_build_left_is_removed(tmp_path: Path) -> None:
    theirs = ".merge_obf16_sm100a.o.abc"  # of another variant, which may be in work
    for name in (".merge_obf16_sm90a.o.abc", ".manifest.json.x1", theirs):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / ".merge_obf16_sm90a.so.def").mkdir()
    (tmp_path / ".merge_obf16_sm90a.so.def" / "launch.o").touch()
    with artifacts.lock(tmp_path, CHEAP.name):
        artifacts.write_manifest(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {".locks", artifacts.MANIFEST, theirs}


@pytest.fixture
def fake_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> dict[str, int]:
    """``build`` without the compiler; the dict's entries become fields of the record."""
    measured: dict[str, int] = {"registers": 32, "threads": 128}

    def read(record: Record, _: object) -> None:
        for name, value in measured.items():
            setattr(record, name, value)

    obj = tmp_path_factory.mktemp("fake") / "variant.o"
    obj.write_bytes(b"new")
    made = compiler._Made(obj, "new", b"", "", [], None)
    monkeypatch.setattr(compiler, "_compile", lambda spec, tmp: made)
    readers = ("read_ptxas", "read_ptx", "read_host_module", "read_sass", "read_barriers")
    for reader in (*readers, "read_host"):
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
    record.threads, record.registers, record.launch_registers = 512, 128, 65536
    record.warpgroup_registers = [24, 88, 200]
    record.dynamic_smem = 200_000
    record.sass = {"QGMMA": 1, "HGMMA": 1}
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
        ({"sass": {"QGMMA": 1, "HGMMA": 1, "LDL": 2}}, "local memory"),
        ({"notes": ["ptxas info : (C7510) Potential Performance Loss"]}, "C7510"),
        ({"warpgroup_registers": [40, 120, 200]}, "setmaxnreg"),
        ({"launch_registers": 86016}, "65536"),
        ({"dynamic_smem": 232_449}, "shared memory"),
        ({"sass": {"HGMMA": 1}}, "QGMMA"),
        ({"sass": {"QGMMA": 1}}, "HGMMA"),
        ({"host_beyond": 3, "host_cpu": "x86-64-v2"}, "SIGILL"),
        ({"declared": {**DECLARED, "threads": 384}}, "budget: threads"),
        ({"declared": {**DECLARED, "warpgroup_registers": [24, 200]}}, "warpgroup_registers"),
        ({"declared": {**DECLARED, "barrier_counts": {"1": 9}}}, "barrier_counts"),
        ({"declared": {**DECLARED, "smem": 199_999}}, "199999 bytes of shared memory declared"),
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


def test_registers_are_counted_by_kernel() -> None:
    """Not the most registers of one kernel times the threads of another."""
    record = sample()
    audit.read_ptxas(
        record,
        "ptxas info    : Compiling entry function 'big' for 'sm_90a'\n"
        "ptxas info    : Used 128 registers, used 16 barriers\n"
        "ptxas info    : Compiling entry function 'wide' for 'sm_90a'\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n",
    )
    entry = ".visible .entry {}(\n.param .u64 p\n)\n.reqntid {}, 1, 1\n{{\nret;\n}}\n"
    audit.read_ptx(record, ".version 8.7\n" + entry.format("wide", 256) + entry.format("big", 512))
    assert (record.registers, record.threads, record.launch_registers) == (168, 512, 65536)
    assert record.kernel_registers == {"big": 128, "wide": 168}


def test_builds_name_no_place_of_this_machine(built: Report, variant_dir: Path) -> None:
    for record in built.records.values():
        files = [variant_dir / f"{record.name}.{suffix}" for suffix in ("o", "ptx", "json")]
        for path in filter(Path.is_file, files):
            assert str(artifacts.ROOT).encode() not in path.read_bytes(), path.name
        assert '"dsl_kernels/' in files[1].read_text(), "line info stays"


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
        "env.compile_dir = lambda: pathlib.Path(sys.argv[1])\n"
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
