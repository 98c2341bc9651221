"""Which variant is loaded, and what is said when none can be."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from codegen import artifacts
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
