"""codegen.cross: variants for aarch64.

What needs no compiler for aarch64 runs always; the rest with ``--whole-matrix``, where there is one
(``pip install ziglang``), and programs by qemu, after ``python -m tests.support.fetch_aarch64``.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest

from codegen import artifacts, bundle, cross, link, render, same_sass, toolchain, wheels
from codegen import compile as compiler
from codegen.artifacts import Record
from codegen.precompile import precompile
from dsl_kernels.spec import VariantSpec, decode_spec
from tests.support import ROOT, fetch_aarch64
from tests.support.libcuda import DRIVER

AARCH64 = cross.TARGETS["aarch64"]
EM_AARCH64 = 183
SPECS = [
    VariantSpec(op="append_kv"), VariantSpec(op="plan_decode"),
    decode_spec("etap", 16, 64, "bf16"),
]  # fmt: skip
pytestmark = pytest.mark.skipif(
    not toolchain.have_compiler() or link.identity() is None or not shutil.which("objdump"),
    reason="needs DSL, C compiler and objdump",
)
whole = pytest.mark.whole_matrix


def test_callers_names_are_those_of_the_library_here() -> None:
    names = cross.exported_names()
    assert {"TVMFFIEnvGetStream", "TVMFFIErrorSetRaisedFromCStr"} <= set(names)
    assert all(re.fullmatch(r"TVMFFI\w+", name) for name in names)


def test_without_a_compiler_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if "aarch64" in name else found(name))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cross.refusal(AARCH64) == (
        "no C compiler for aarch64 here: install aarch64-linux-gnu-gcc (Debian: "
        "gcc-aarch64-linux-gnu), or pip install ziglang"
    )
    monkeypatch.setattr(cross, "compiler_of", lambda target: ["cc"])
    assert cross.refusal(AARCH64) is None


def test_a_build_of_other_sources_is_not_taken(tmp_path: Path) -> None:
    """Neither where this machine's build is missing or old, nor where the other half is."""
    with pytest.raises(RuntimeError, match="precompile|no C compiler"):
        cross.build(SPECS[0], tmp_path, tmp_path / "out", AARCH64)
    assert cross.up_to_date(SPECS[0], tmp_path, tmp_path, AARCH64) is None
    record = compiler.draft(SPECS[0])
    other = cross.key(record, AARCH64)
    record.key = "other sources"
    assert cross.key(record, AARCH64) != other != record.key


def test_records_tell_their_machine() -> None:
    record = compiler.draft(SPECS[0])
    assert cross.machine_of(record) == ""
    record.host_cpu = AARCH64.cpu
    assert cross.machine_of(record) == "aarch64"


# --------------------------------------------------------------- with a compiler for aarch64


@pytest.fixture(scope="module")
def built(variant_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``SPECS`` for aarch64."""
    if (reason := cross.refusal(AARCH64)) is not None:
        pytest.skip(reason)
    precompile(SPECS, variant_dir)
    folder = tmp_path_factory.mktemp("aarch64")
    report = cross.build_all(SPECS, variant_dir, folder, AARCH64, 1, lambda _: None)
    assert not report.failed and len(report.built) == len(SPECS)
    return folder


def records(built: Path) -> list[Record]:
    return [r for s in SPECS if (r := Record.read(artifacts.paths(built, s)["json"])) is not None]


@whole
def test_libraries_are_of_that_machine_with_this_ones_device_code(
    built: Path, variant_dir: Path
) -> None:
    for spec in SPECS:
        mine, theirs = (artifacts.paths(folder, spec) for folder in (variant_dir, built))
        for suffix in ("o", "so"):
            data = theirs[suffix].read_bytes()
            assert struct.unpack_from("<H", data, 18) == (EM_AARCH64,)
            assert same_sass.cubins(theirs[suffix]) == same_sass.cubins(mine[suffix])
        done = subprocess.run(
            ["objdump", "-T", "-p", theirs["so"]], capture_output=True, text=True, check=True
        )
        needed = re.findall(r"NEEDED\s+(\S+)", done.stdout)
        assert set(needed) == {"libtvm_ffi.so", "libc.so.6", "libdl.so.2"}, needed
        exported = [line.split()[-1] for line in done.stdout.splitlines() if " g  " in line]
        assert exported == [f"__tvm_ffi_{spec.symbol}"]
        assert wheels.glibc_of([theirs["so"]]) <= (2, 28)


@whole
def test_what_is_up_to_date_is_left(built: Path, variant_dir: Path) -> None:
    report = cross.build_all(SPECS[:1], variant_dir, built, AARCH64, 1, lambda _: None)
    assert list(report.reused) == [SPECS[0].name]
    assert compiler.up_to_date(SPECS[0], built, linked=False) is None, "not for this machine"


@whole
def test_other_device_code_is_refused(
    built: Path, variant_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_sass, "cubins", lambda path: [bytes(str(path), "utf8")])
    with pytest.raises(compiler.BuildError, match="not that of this machine's build"):
        cross.build(SPECS[0], variant_dir, built, AARCH64)
    assert cross.up_to_date(SPECS[0], variant_dir, built, AARCH64) is not None, "nothing was lost"


@whole
def test_wheel_names_the_machine(built: Path, variant_dir: Path, tmp_path: Path) -> None:
    made = wheels.make(SPECS, built, tmp_path, "", "aarch64", variant_dir)
    assert re.search(r"-py3-none-manylinux_2_\d+_aarch64\.whl$", made.kernels.name)
    assert made.host.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(made.kernels) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        assert len(libraries) == len(SPECS)
        assert struct.unpack_from("<H", archive.read(libraries[0]), 18) == (EM_AARCH64,)
    with pytest.raises(bundle.BundleError, match="codegen cross --arch sm_90a"):
        wheels.make(SPECS, tmp_path, tmp_path, "", "aarch64", variant_dir)


@whole
def test_the_c_example_runs_as_here(built: Path, variant_dir: Path, tmp_path: Path) -> None:
    """By qemu with a stand-in for the driver: arguments are checked, kernels launched alike."""
    ffi, qemu = fetch_aarch64.library_dir(), shutil.which("qemu-aarch64")
    if ffi is None or qemu is None or not fetch_aarch64.SYSROOT.is_dir():
        pytest.skip("needs qemu-aarch64, its C library and tests.support.fetch_aarch64")
    mine = toolchain.tvm_ffi_lib_dir()
    assert mine is not None
    (tmp_path / "driver.c").write_text(DRIVER)
    command, here = cross.compiler_of(AARCH64), [str(toolchain.c_compiler())]
    assert command is not None
    outputs = []
    for name, cc, lib, folder, prefix in (
        ("aarch64", command, ffi, built, [qemu, "-L", str(fetch_aarch64.SYSROOT)]),
        ("here", here, mine, variant_dir, []),
    ):
        root = tmp_path / name
        root.mkdir()
        for record in records(built):
            (root / f"{record.name}.h").write_text(render.header(record))
        driver = [*cc, "-shared", "-fPIC", str(tmp_path / "driver.c"), "-o", "libcuda.so.1"]
        subprocess.run(driver, cwd=root, check=True)
        subprocess.run(
            [*cc, "-std=c99", "-O2", "-o", "decode", str(ROOT / "examples" / "c" / "decode.c"),
             f"-I{root}", f"-I{mine.parent / 'include'}",
             *(str(artifacts.paths(folder, spec)["so"]) for spec in SPECS),
             f"-L{lib}", "-Wl,--no-as-needed", "-ltvm_ffi", "-ldl", "-lm",
             f"-Wl,-rpath,{folder}", f"-Wl,-rpath,{lib}"],
            cwd=root, check=True,
        )  # fmt: skip
        done = subprocess.run(
            [*prefix, "./decode"], cwd=root, capture_output=True, text=True,
            env={"LD_LIBRARY_PATH": "", "PATH": "", **_path_of_driver(prefix, root)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(re.sub(r"0x[0-9a-f]+", "ADDRESS", done.stdout))
    assert outputs[0] == outputs[1] and outputs[0].count("launch ") == 4


def _path_of_driver(prefix: list[str], root: Path) -> dict[str, str]:
    """Of the stand-in: emulated programs have an environment of their own."""
    name = "QEMU_SET_ENV" if prefix else "LD_LIBRARY_PATH"
    return {name: f"LD_LIBRARY_PATH={root}" if prefix else str(root)}
