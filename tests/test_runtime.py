"""Which variant is loaded, and what is said when none can be."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from codegen import artifacts, closure, toolchain
from dsl_kernels.spec import VariantSpec, decode_spec
from snapmla import env, runtime
from snapmla.errors import VariantError

SPEC = decode_spec("etap", 64, 64, "bf16")


def place(folder: Path, spec: VariantSpec, flavour: str = "cu13") -> None:
    """Files of a built variant, empty."""
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in ("o", "ptx", "so"):
        (folder / f"{spec.name}.{suffix}").touch()
    record = {"name": spec.name, "flavour": flavour, "source_hash": "abc"}
    (folder / f"{spec.name}.json").write_text(json.dumps(record))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty directory of variants, the only one."""
    monkeypatch.setattr(env, "variant_dirs", lambda: [tmp_path])
    monkeypatch.setattr(env, "compile_dir", lambda: tmp_path)
    monkeypatch.setattr(runtime, "_outdated", lambda spec, artifact: False)
    return tmp_path


@pytest.mark.parametrize(("driver", "loads"), [((13, 0), True), ((12, 4), False), (None, True)])
def test_newer_cuda_than_the_driver(
    folder: Path, monkeypatch: pytest.MonkeyPatch, no_jit: None, driver: tuple | None, loads: bool
) -> None:
    place(folder, SPEC)
    monkeypatch.setattr(runtime, "driver_version", lambda: driver)
    if loads:
        assert runtime.find_or_build(SPEC, need_library=True).cuda == 13
        return
    with pytest.raises(VariantError) as caught:
        runtime.find_or_build(SPEC, need_library=True)
    assert str(caught.value) == (
        f"variant {SPEC.name} in {folder} was built with CUDA 13 and the driver supports CUDA "
        "12.4: update the driver, or build with `make precompile CUDA=12`"
    )
    artifact = runtime.find_or_build(SPEC, need_library=False)  # the software GPU has no driver
    with pytest.raises(VariantError, match="update the driver"):
        runtime.load(artifact, "cuda")


def test_newer_cuda_is_compiled_anew_where_allowed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(folder, SPEC)
    monkeypatch.setattr(runtime, "driver_version", lambda: (12, 4))
    monkeypatch.setattr(runtime, "_jit_refusal", lambda: None)
    monkeypatch.setattr(runtime, "compile_variant", lambda spec: "compiled")
    assert runtime.find_or_build(SPEC, need_library=True) == "compiled"


def test_other_arch(folder: Path, no_jit: None) -> None:
    place(folder, VariantSpec(op="merge", arch="sm_100a"))
    with pytest.raises(VariantError, match="all variants there are for sm_100a, not for sm_90a"):
        runtime.find_or_build(SPEC, need_library=True)


def test_a_manifest_does_not_stand_in_for_a_record(folder: Path, no_jit: None) -> None:
    """It outlives a rebuild that was killed after it had removed the record."""
    place(folder, SPEC)
    record = (folder / f"{SPEC.name}.json").read_text()
    (folder / artifacts.MANIFEST).write_text(f'{{"variants": [{record}]}}')
    assert runtime.find(SPEC) is not None
    (folder / f"{SPEC.name}.json").unlink()
    assert runtime.find(SPEC) is None and runtime.available() == []
    (folder / runtime.BUNDLE).write_text(f'{{"variants": [{record}]}}')
    assert runtime.find(SPEC) is not None and runtime.available() == [SPEC]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"variants": 3}', '{"variants": [{}]}'])
def test_a_broken_bundle_file_is_no_bundle(folder: Path, text: str) -> None:
    (folder / runtime.BUNDLE).write_text(text)
    assert runtime.available() == []


def test_available_names_each_variant_once(tmp_path: Path) -> None:
    other = VariantSpec(op="merge")
    for name in ("a", "b"):
        place(tmp_path / name, SPEC)
    place(tmp_path / "b", other)
    (tmp_path / "b" / "no_variant_sm90a.json").write_text("{}")
    found = runtime.available([tmp_path / "a", tmp_path / "b", tmp_path / "none"])
    assert found == [SPEC, other]


def test_cache_belongs_to_one_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another version's kernels may have another argument list."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SNAPMLA_VARIANT_DIR", raising=False)
    monkeypatch.setattr(env, "is_checkout", lambda: False)
    packed = Path(env.__file__).parent / "variants"
    cache = tmp_path / "snapmla" / env.__version__ / "variants"
    assert env.variant_dirs() == [packed, cache]  # a bundle's own come first
    assert env.compile_dir() == cache
    monkeypatch.setenv("SNAPMLA_VARIANT_DIR", str(tmp_path / "mine"))
    assert env.variant_dirs() == [tmp_path / "mine", packed, cache]
    assert env.compile_dir() == tmp_path / "mine"


def test_compiling_is_announced_and_its_failure_told(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = VariantSpec(op="decode", pipeline="etap", stages=7)
    monkeypatch.setattr(runtime, "_jit_refusal", lambda: None)
    with (
        caplog.at_level(logging.WARNING, logger="snapmla"),
        pytest.raises(VariantError, match=r"did not compile: .*bytes of shared memory"),
    ):
        runtime.find_or_build(bad, need_library=False)
    assert f"compiling variant {bad.name} into {folder}" in caplog.text
    assert runtime.find(bad) is None


needs_compiler = pytest.mark.skipif(
    not toolchain.have_compiler(), reason="needs nvidia-cutlass-dsl"
)


@pytest.mark.parametrize("checkout", [True, False])
def test_kernels_of_other_sources_are_outdated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkout: bool
) -> None:
    """Also where pip put the package: installed again from an edited tree, its version stays."""
    monkeypatch.setattr(env, "is_checkout", lambda: checkout)
    place(tmp_path, SPEC)
    artifact = runtime.find(SPEC, [tmp_path])
    assert artifact is not None and runtime._outdated(SPEC, artifact)
    record = json.loads((tmp_path / f"{SPEC.name}.json").read_text())
    record["source_hash"] = closure.sources(SPEC)[0]
    (tmp_path / f"{SPEC.name}.json").write_text(json.dumps(record))
    artifact = runtime.find(SPEC, [tmp_path])
    assert artifact is not None and not runtime._outdated(SPEC, artifact)


@needs_compiler
@pytest.mark.parametrize("stale", [False, True])
def test_an_application_may_have_a_codegen_of_its_own(tmp_path: Path, stale: bool) -> None:
    """In the directory it is started from, which Python puts first on its path."""
    (tmp_path / "codegen").mkdir()
    (tmp_path / "codegen" / "__init__.py").write_text("raise SystemExit('the application s')")
    if stale:
        place(tmp_path / "variants", VariantSpec(op="merge"))
    code = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "from snapmla import env, runtime\n"
        "from dsl_kernels.spec import VariantSpec\n"
        "env.variant_dirs = lambda: [env.compile_dir()]\n"
        "print(runtime.find_or_build(VariantSpec(op='merge'), need_library=False).ptx)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(env.ROOT)], capture_output=True, text=True, cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        | {"SNAPMLA_VARIANT_DIR": str(tmp_path / "variants")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == str(tmp_path / "variants" / "merge_obf16_sm90a.ptx")


def test_no_home_directory(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A container's user may have none: what is packed is found, compiling says what to set."""
    monkeypatch.undo()
    monkeypatch.setattr(env, "is_checkout", lambda: False)
    monkeypatch.setattr(artifacts, "is_checkout", lambda: False)
    for name in ("SNAPMLA_VARIANT_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert env.variant_dirs() == [Path(env.__file__).parent / "variants"]
    with pytest.raises(VariantError, match="no home directory: set SNAPMLA_VARIANT_DIR"):
        runtime.compile_variant(SPEC)
    with pytest.raises(RuntimeError, match="no home directory: set SNAPMLA_VARIANT_DIR"):
        artifacts.default_dir()
    monkeypatch.setenv("SNAPMLA_VARIANT_DIR", str(folder))
    assert env.compile_dir() == artifacts.default_dir() == folder


@needs_compiler
@pytest.mark.parametrize("where", ["file/variants", "variants"])
def test_a_directory_that_takes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    """Neither when it is made nor when it is written to: one sentence, no traceback."""
    (tmp_path / "file").touch()
    (tmp_path / "variants").mkdir()
    (tmp_path / "variants" / ".locks").touch()  # in place of the directory of locks
    monkeypatch.setattr(env, "compile_dir", lambda: tmp_path / where)
    with pytest.raises(VariantError) as caught:
        runtime.compile_variant(SPEC)
    assert str(tmp_path / where) in str(caught.value) and "SNAPMLA_VARIANT_DIR" in str(caught.value)
    assert "Traceback" not in str(caught.value) and str(caught.value).count("\n") == 0


def test_an_old_driver_is_told_a_flavour_that_exists(
    folder: Path, monkeypatch: pytest.MonkeyPatch, no_jit: None
) -> None:
    place(folder, SPEC, "cu12")
    monkeypatch.setattr(runtime, "driver_version", lambda: (11, 8))
    with pytest.raises(VariantError, match=r"supports CUDA 11\.8: update the driver$"):
        runtime.find_or_build(SPEC, need_library=True)


@pytest.mark.parametrize("text", ["[]", "3", "{", ""])
def test_a_broken_record_is_no_record(folder: Path, text: str) -> None:
    place(folder, SPEC)
    (folder / f"{SPEC.name}.json").write_text(text)
    assert runtime.find(SPEC) is None and runtime.available() == []


@pytest.mark.parametrize("checkout", [True, False])
@pytest.mark.parametrize("chosen", ["", "mine"])
def test_codegen_writes_where_the_runtime_looks_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkout: bool, chosen: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SNAPMLA_VARIANT_DIR", str(tmp_path / chosen) if chosen else "")
    monkeypatch.setattr(env, "is_checkout", lambda: checkout)
    monkeypatch.setattr(artifacts, "is_checkout", lambda: checkout)
    assert artifacts.default_dir() == env.compile_dir()


def test_the_nearest_variant_is_of_the_same_op(folder: Path) -> None:
    """Of the same architecture too; then the one that differs in the fewest axes."""
    other_op, other_arch = VariantSpec(op="merge"), decode_spec("etap", 64, 64, "bf16", "sm_100a")
    for spec in (other_op, other_arch):
        place(folder, spec)
    assert runtime.nearest(SPEC) is None
    far, near = decode_spec("etap", 16, 16, "bf16"), decode_spec("etap", 64, 128, "bf16")
    for spec in (far, near):
        place(folder, spec)
    assert runtime.nearest(SPEC) == near.name
