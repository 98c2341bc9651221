"""Which variant is loaded, and what is said when none can be."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from codegen import artifacts, closure
from codegen import compile as compiler
from codegen.precompile import precompile
from dsl_kernels.spec import VariantSpec, decode_spec
from snapmla import rank
from snapmla.errors import UnsupportedDeviceError, VariantError
from snapmla.runtime import env, variants
from tests.support.needs import needs_compiler

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
    monkeypatch.setattr(variants, "_outdated", lambda spec, artifact: False)
    return tmp_path


def test_a_decode_of_an_older_release_is_not_loaded(folder: Path, no_jit: None) -> None:
    """It takes the same arguments, but does not ask whether tables from outside fit."""
    place(folder, SPEC)
    path = folder / f"{SPEC.name}.json"
    record = json.loads(path.read_text())
    for sources in (["dsl_kernels/combine/merge.py"], []):
        path.write_text(json.dumps({**record, "sources": sources}))
        artifact = variants.find_or_build(SPEC, need_library=True)
        with pytest.raises(VariantError, match=rf"^{SPEC.name} in .* is of an older release"):
            variants.load(artifact, "cuda")


@pytest.mark.parametrize(("driver", "loads"), [((13, 0), True), ((12, 4), False), (None, True)])
def test_newer_cuda_than_the_driver(
    folder: Path, monkeypatch: pytest.MonkeyPatch, no_jit: None, driver: tuple | None, loads: bool
) -> None:
    place(folder, SPEC)
    monkeypatch.setattr(variants, "driver_version", lambda: driver)
    if loads:
        assert variants.find_or_build(SPEC, need_library=True).cuda == 13
        return
    with pytest.raises(VariantError) as caught:
        variants.find_or_build(SPEC, need_library=True)
    assert str(caught.value) == (
        f"variant {SPEC.name} in {folder} was built with CUDA 13 and the driver supports CUDA "
        "12.4: update the driver, or build with `make precompile CUDA=12`"
    )
    artifact = variants.find_or_build(SPEC, need_library=False)  # the software GPU has no driver
    with pytest.raises(VariantError, match="update the driver"):
        variants.load(artifact, "cuda")


def test_newer_cuda_is_compiled_anew_where_allowed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(folder, SPEC)
    monkeypatch.setattr(variants, "driver_version", lambda: (12, 4))
    monkeypatch.setattr(variants, "jit_refusal", lambda: None)
    monkeypatch.setattr(variants, "compile_variant", lambda spec: "compiled")
    assert variants.find_or_build(SPEC, need_library=True) == "compiled"


def test_other_arch(folder: Path, no_jit: None) -> None:
    place(folder, VariantSpec(op="merge", arch="sm_100a"))
    with pytest.raises(VariantError, match="all variants there are for sm_100a, not for sm_90a"):
        variants.find_or_build(SPEC, need_library=True)


def test_a_manifest_does_not_stand_in_for_a_record(folder: Path, no_jit: None) -> None:
    """It outlives a rebuild that was killed after it had removed the record."""
    place(folder, SPEC)
    record = (folder / f"{SPEC.name}.json").read_text()
    (folder / artifacts.MANIFEST).write_text(f'{{"variants": [{record}]}}')
    assert variants.find(SPEC) is not None
    (folder / f"{SPEC.name}.json").unlink()
    assert variants.find(SPEC) is None and variants.available() == []
    (folder / variants.BUNDLE).write_text(f'{{"variants": [{record}]}}')
    assert variants.find(SPEC) is not None and variants.available() == [SPEC]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"variants": 3}', '{"variants": [{}]}'])
def test_a_broken_bundle_file_is_no_bundle(folder: Path, text: str) -> None:
    (folder / variants.BUNDLE).write_text(text)
    assert variants.available() == []


def test_available_names_each_variant_once(tmp_path: Path) -> None:
    other = VariantSpec(op="merge")
    for name in ("a", "b"):
        place(tmp_path / name, SPEC)
    place(tmp_path / "b", other)
    (tmp_path / "b" / "no_variant_sm90a.json").write_text("{}")
    found = variants.available([tmp_path / "a", tmp_path / "b", tmp_path / "none"])
    assert found == [SPEC, other]


def test_cache_belongs_to_one_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another version's kernels may have another argument list."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SNAPMLA_VARIANT_DIR", raising=False)
    monkeypatch.setattr(env, "is_checkout", lambda: False)
    packed = env.PACKAGE / "variants"
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
    monkeypatch.setattr(variants, "jit_refusal", lambda: None)
    with (
        caplog.at_level(logging.WARNING, logger="snapmla"),
        pytest.raises(VariantError, match=r"did not compile: .*bytes of shared memory"),
    ):
        variants.find_or_build(bad, need_library=False)
    assert f"compiling variant {bad.name} into {folder}" in caplog.text
    assert variants.find(bad) is None


@pytest.mark.parametrize("checkout", [True, False])
def test_kernels_of_other_sources_are_outdated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkout: bool
) -> None:
    """Also where pip put the package: installed again from an edited tree, its version stays."""
    monkeypatch.setattr(env, "is_checkout", lambda: checkout)
    place(tmp_path, SPEC)
    artifact = variants.find(SPEC, [tmp_path])
    assert artifact is not None and variants._outdated(SPEC, artifact)
    record = json.loads((tmp_path / f"{SPEC.name}.json").read_text())
    record["source_hash"] = closure.sources(SPEC)[0]
    (tmp_path / f"{SPEC.name}.json").write_text(json.dumps(record))
    artifact = variants.find(SPEC, [tmp_path])
    assert artifact is not None and not variants._outdated(SPEC, artifact)


@pytest.mark.parametrize("why", ["SNAPMLA_NO_JIT forbids compiling", "the compiler is missing"])
def test_an_outdated_variant_that_runs_is_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    """One of the sources here, and one whose record names none, are not."""
    monkeypatch.setattr(env, "variant_dirs", lambda: [tmp_path])
    monkeypatch.setattr(variants, "jit_refusal", lambda: why)
    monkeypatch.setattr(variants, "_told", set())
    fresh, unknown = VariantSpec(op="merge"), VariantSpec(op="plan_decode")
    for spec, digest in ((SPEC, "abc"), (fresh, closure.sources(fresh)[0]), (unknown, "")):
        place(tmp_path, spec)
        record = {"name": spec.name, "source_hash": digest}
        (tmp_path / f"{spec.name}.json").write_text(json.dumps(record))
    for _ in range(2):
        for spec in (fresh, unknown, SPEC):
            assert variants.find_or_build(spec, need_library=True).name == spec.name
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"variant {SPEC.name} in {tmp_path} is outdated and runs as it is")
    assert f", as {why}: " in message


def test_sources_are_not_read_where_none_are(
    monkeypatch: pytest.MonkeyPatch, folder: Path, no_jit: None, caplog: pytest.LogCaptureFixture
) -> None:
    """In a bundle, and beside an application's own ``codegen``."""
    place(folder, SPEC)
    monkeypatch.setattr(variants, "_told", set())
    monkeypatch.setattr(variants, "_codegen_is_ours", lambda: False)
    monkeypatch.setattr(closure, "sources", lambda spec: pytest.fail("read"))
    assert variants.find_or_build(SPEC, need_library=True) and not caplog.records


def test_a_source_that_is_half_written_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(spec: VariantSpec) -> Any:
        raise SyntaxError("'(' was never closed")

    monkeypatch.setattr(closure, "sources", broken)
    assert variants.other_sources(SPEC, variants.Artifact(Path(), SPEC.name, "", "abc"))


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        ("kill -KILL $$", "the compiler was ended by SIGKILL (memory that runs out is the usual "
         "cause)"),
        ("echo at a; kill -TERM $$", "the compiler was ended by SIGTERM: at a"),
        ("echo wrong; exit 3", "wrong"),
    ],
)  # fmt: skip
def test_a_compiler_that_is_killed_leaves_a_reason(
    monkeypatch: pytest.MonkeyPatch, folder: Path, ended: str, told: str
) -> None:
    run = subprocess.run

    def ending(command: list[str], **options: Any) -> Any:
        return run(["sh", "-c", ended], capture_output=True, text=True)

    monkeypatch.setattr(subprocess, "run", ending)
    with pytest.raises(VariantError) as caught:
        variants.compile_variant(SPEC)
    assert str(caught.value) == f"variant {SPEC.name} did not compile: {told}"


def test_compiling_without_a_c_compiler_is_told_once(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place(folder, SPEC)
    library = folder / f"{SPEC.name}.so"
    monkeypatch.setattr(variants, "_told", set())
    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: done)
    variants.compile_variant(SPEC)
    assert "C compiler" not in caplog.text
    library.unlink()
    for _ in range(2):
        variants.compile_variant(SPEC)
    assert caplog.text.count("no C compiler was found ($CC, cc, gcc, clang)") == 1


@needs_compiler
@pytest.mark.parametrize("stale", [pytest.param(False, marks=pytest.mark.whole_matrix), True])
def test_an_application_may_have_a_codegen_of_its_own(tmp_path: Path, stale: bool) -> None:
    """In the directory it is started from, which Python puts first on its path."""
    (tmp_path / "codegen").mkdir()
    (tmp_path / "codegen" / "__init__.py").write_text("raise SystemExit('the application s')")
    if stale:
        place(tmp_path / "variants", VariantSpec(op="merge"))
    code = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "from snapmla.runtime import env, variants as runtime\n"
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
    assert env.variant_dirs() == [env.PACKAGE / "variants"]
    with pytest.raises(VariantError, match="no home directory: set SNAPMLA_VARIANT_DIR"):
        variants.compile_variant(SPEC)
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
        variants.compile_variant(SPEC)
    assert str(tmp_path / where) in str(caught.value) and "SNAPMLA_VARIANT_DIR" in str(caught.value)
    assert "Traceback" not in str(caught.value) and str(caught.value).count("\n") == 0


def test_an_old_driver_is_told_a_flavour_that_exists(
    folder: Path, monkeypatch: pytest.MonkeyPatch, no_jit: None
) -> None:
    place(folder, SPEC, "cu12")
    monkeypatch.setattr(variants, "driver_version", lambda: (11, 8))
    with pytest.raises(VariantError, match=r"supports CUDA 11\.8: update the driver$"):
        variants.find_or_build(SPEC, need_library=True)


@pytest.mark.parametrize("text", ["[]", "3", "{", ""])
def test_a_broken_record_is_no_record(folder: Path, text: str) -> None:
    place(folder, SPEC)
    (folder / f"{SPEC.name}.json").write_text(text)
    assert variants.find(SPEC) is None and variants.available() == []


MERGE = VariantSpec(op="merge")
DAMAGE = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "random": lambda data: random.Random(0).randbytes(len(data)),
    "one bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, variant_dir: Path) -> Path:
    """A directory with one variant of each of two ops, as built."""
    target = tmp_path_factory.mktemp("sound")
    specs = [MERGE, VariantSpec(op="plan_decode")]
    precompile(specs, variant_dir, jobs=1)
    for spec in specs:
        for path in variant_dir.glob(f"{spec.name}.*"):
            shutil.copy(path, target / path.name)
    return target


@pytest.fixture
def copied(sound: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The same, to be damaged; the only directory of variants."""
    shutil.copytree(sound, tmp_path / "variants")
    monkeypatch.setattr(env, "variant_dirs", lambda: [tmp_path / "variants"])
    monkeypatch.setattr(env, "compile_dir", lambda: tmp_path / "variants")
    return tmp_path / "variants"


def read(suffix: str) -> bool:
    """Whether the GPU's side reads a file with this suffix; the software GPU reads the others."""
    return suffix in ("so", "json")


@needs_compiler
@pytest.mark.parametrize("suffix", ["o", "ptx", "so", "json"])
@pytest.mark.parametrize("how", [*DAMAGE, "of another variant"])
def test_a_damaged_file_is_named(copied: Path, no_jit: None, how: str, suffix: str) -> None:
    path = copied / f"{MERGE.name}.{suffix}"
    sound = variants.find(MERGE)
    if not path.exists():
        pytest.skip("nothing can be linked here")
    if how == "of another variant":
        shutil.copy(copied / f"plan_decode_sm90a.{suffix}", path)
    else:
        path.write_bytes(DAMAGE[how](path.read_bytes()))
    with pytest.raises(VariantError) as caught:
        variants.find_or_build(MERGE, need_library=read(suffix))
    text = str(caught.value)
    assert text.startswith(f"{path} is damaged: ") and "\n" not in text
    assert "SNAPMLA_NO_JIT forbids compiling" in text
    assert f"`python -m codegen build {MERGE.name} --out {copied}`" in text
    if suffix != "json":
        assert sound is not None
        with pytest.raises(VariantError, match=f"^{re.escape(str(path))} is damaged: "):
            variants.load(sound, "cuda" if read(suffix) else "cpu")


@needs_compiler
@pytest.mark.parametrize(
    "suffix", ["so", *(pytest.param(x, marks=pytest.mark.whole_matrix) for x in ("ptx", "json"))]
)
def test_a_damaged_file_is_built_anew(
    copied: Path, sound: Path, caplog: pytest.LogCaptureFixture, suffix: str
) -> None:
    """... by what the error advises, too, which is the command that the run-time compiler calls."""
    path = copied / f"{MERGE.name}.{suffix}"
    if not path.exists():
        pytest.skip("nothing can be linked here")
    path.write_bytes(path.read_bytes()[:100])
    with caplog.at_level(logging.WARNING, logger="snapmla"):
        found = variants.find_or_build(MERGE, need_library=read(suffix))
    assert f"{path} is damaged: " in caplog.text
    assert variants.damage(found, True) is variants.damage(found, False) is None
    for file in (f"{MERGE.name}.{kind}" for kind in ("o", "ptx", "so")):
        assert (copied / file).read_bytes() == (sound / file).read_bytes(), file


@needs_compiler
@pytest.mark.parametrize("change", [{"arguments": None}, {"shared_plan": 3}, {"flavour": None}])
def test_an_edited_record_is_damaged(copied: Path, no_jit: None, change: dict) -> None:
    path = copied / f"{MERGE.name}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(VariantError, match=f"^{re.escape(str(path))} is damaged: "):
        variants.find_or_build(MERGE, need_library=False)


@needs_compiler
def test_a_build_without_checksums_is_taken_as_it_is(copied: Path, no_jit: None) -> None:
    """Of an older version, whose record has none; ``precompile`` builds it anew."""
    path = copied / f"{MERGE.name}.json"
    record = json.loads(path.read_text())
    del record["checksums"], record["digest"]
    record["arguments"] = None
    path.write_text(json.dumps(record))
    found = variants.find_or_build(MERGE, need_library=False)
    assert found.checksums == {} and variants.load(found, "cpu").names.arguments == ()
    assert compiler.up_to_date(MERGE, copied, False) is None


@needs_compiler
def test_a_damaged_library_of_a_bundle_is_not_loaded(copied: Path, no_jit: None) -> None:
    record = json.loads((copied / f"{MERGE.name}.json").read_text())
    library = copied / f"{MERGE.name}.so"
    if not library.exists():
        pytest.skip("nothing can be linked here")
    record["sha256"] = record.pop("checksums")["so"]
    (copied / f"{MERGE.name}.json").unlink()
    (copied / variants.BUNDLE).write_text(json.dumps({"variants": [record]}))
    assert variants.find_or_build(MERGE, need_library=True).library == library
    library.write_bytes(library.read_bytes()[:-1])
    with pytest.raises(VariantError, match=r"is damaged: .*: unpack the bundle again$"):
        variants.find_or_build(MERGE, need_library=True)


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
    assert variants.nearest(SPEC) is None
    far, near = decode_spec("etap", 16, 16, "bf16"), decode_spec("etap", 64, 128, "bf16")
    for spec in (far, near):
        place(folder, spec)
    assert variants.nearest(SPEC) == near.name


def test_other_devices_are_refused() -> None:
    with pytest.raises(UnsupportedDeviceError, match="device meta: kernels are built for cuda"):
        variants.arch_of(torch.device("meta"))


def test_other_architectures_get_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    with pytest.raises(UnsupportedDeviceError) as caught:
        variants.arch_of(torch.device("cuda", 7))
    assert str(caught.value) == (
        "NVIDIA A100-SXM4-80GB is sm_80: kernels are built for sm_90 (Hopper), sm_100 and sm_103 "
        "(Blackwell); snapmla.reference runs anywhere"
    )


@pytest.mark.parametrize(("capability", "said"), [((9, 0), 0), ((10, 0), 1)])
def test_kernels_that_no_hardware_has_run_say_so(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    said: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    variants.arch_of.cache_clear()
    try:
        for _ in range(2):
            variants.arch_of(torch.device("cuda", 7))
    finally:
        variants.arch_of.cache_clear()
    texts = [r.getMessage() for r in caplog.records if r.name == "snapmla"]
    assert len(texts) == said and all("never on hardware" in text for text in texts)


def test_missing_variant_names_the_nearest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, no_jit: None
) -> None:
    monkeypatch.setattr("snapmla.runtime.env.variant_dirs", lambda: [tmp_path])
    wanted = VariantSpec(op="decode", pipeline="etap", row_tile=32, page_size=32)
    with pytest.raises(VariantError, match="no variant of this op is there"):
        variants.find_or_build(wanted, need_library=False)
    for row_tile in (16, 64):
        name = VariantSpec(op="decode", pipeline="etap", row_tile=row_tile, page_size=32).name
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name}))
    how = "SNAPMLA_NO_JIT.*nearest.*decode_etap_r16_p32_obf16.*; `python -m codegen build decode_e"
    with pytest.raises(VariantError, match=how):
        variants.find_or_build(wanted, need_library=False)


def test_high_accuracy_that_is_not_built_says_how(folder: Path, no_jit: None) -> None:
    spec = rank.choose(torch.device("cpu"), 16, 1, 64, accuracy="high")
    place(folder, SPEC)
    name = "decode_f16_r16_p64_obf16_sm90a"
    with pytest.raises(VariantError, match=f"^variant {name} is not built .*codegen build {name}`"):
        variants.find_or_build(spec, need_library=True)


@pytest.mark.parametrize("pipeline", ["etap", "dual_wg"])
def test_what_is_built_on_request_names_its_filter(
    folder: Path, no_jit: None, pipeline: str
) -> None:
    """And only that: a filter for what every wheel has would help nobody."""
    spec = rank.choose(torch.device("cpu"), 64, 1, 64, pipeline=pipeline)
    with pytest.raises(VariantError) as caught:
        variants.find_or_build(spec, need_library=True)
    wheel = "make wheels ARCH=sm_90a FILTER='*,decode_dual_wg_r64_p64_obf16'"
    asked = f"no default wheel has it: {wheel}"
    assert str(caught.value).endswith(asked) == (pipeline == "dual_wg")
    assert ("FILTER" in str(caught.value)) == (pipeline == "dual_wg")


def test_no_architecture_of_the_software_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPMLA_SOFTGPU_ARCH", "sm90")
    variants.arch_of.cache_clear()
    words = "SNAPMLA_SOFTGPU_ARCH: expected one of 'sm_90a', 'sm_100a', got 'sm90'"
    try:
        with pytest.raises(ValueError, match=f"^{words}"):
            variants.arch_of(torch.device("cpu"))
    finally:
        variants.arch_of.cache_clear()


@pytest.mark.parametrize("forbidden", ["0", "1"])
def test_unwritten_kernel_is_one_sentence(monkeypatch: pytest.MonkeyPatch, forbidden: str) -> None:
    monkeypatch.setenv("SNAPMLA_NO_JIT", forbidden)
    monkeypatch.setattr(variants, "compile_variant", lambda spec: pytest.fail("compiled"))
    spec = VariantSpec(op="decode", arch="sm_100a", pipeline="etap")
    with pytest.raises(VariantError) as caught:
        variants.find_or_build(spec, need_library=False)
    assert str(caught.value) == (
        "variant decode_etap_r64_p64_obf16_sm100a: no sm_100a decode kernel of pipeline etap "
        "exists yet; the nearest one that can be built is decode_etap_r64_p64_obf16_sm90a"
    )
