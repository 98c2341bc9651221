"""Libraries: what they need and export, and when they are linked again."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from codegen import artifacts, link, toolchain
from codegen import compile as compiler
from codegen.__main__ import app
from codegen.artifacts import Record
from codegen.precompile import Report
from dsl_kernels.spec import VariantSpec
from tests.support.builds import CHEAP, borrow, codegen
from tests.support.needs import needs_compiler

pytestmark = needs_compiler


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


@pytest.mark.parametrize("command", ["build", "try"])
def test_single_builds_say_too_that_nothing_was_linked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    record = Record(CHEAP.name, CHEAP.symbol, {}, "", "", [], "", "", "")
    artifacts.paths(tmp_path, CHEAP)["ptx"].write_text("")  # which a build leaves, to be audited
    monkeypatch.setattr(compiler, "ensure", lambda *a, **k: (record, True))
    monkeypatch.setattr(compiler, "build", lambda *a, **k: record)
    arguments = [command, CHEAP.name, "--out", str(tmp_path)]
    words = "no C compiler here ($CC, cc, gcc, clang): objects, but no libraries for a GPU\n"
    assert words not in CliRunner().invoke(app, arguments).output
    monkeypatch.setattr(link, "identity", lambda: None)
    monkeypatch.setattr(toolchain, "c_compiler", lambda: None)
    assert words in CliRunner().invoke(app, arguments).output
    monkeypatch.setattr(toolchain, "c_compiler", lambda: "/bin/cc")
    assert "no libtvm_ffi.so here" in CliRunner().invoke(app, arguments).output


@pytest.mark.whole_matrix
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
