"""``snapmla info``: what this machine can run, and what is missing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from codegen import closure, toolchain
from dsl_kernels.spec import VariantSpec, decode_spec
from snapmla.runtime import env, variants
from snapmla.tools import info
from snapmla_cli import app
from softgpu import runtime as softgpu_runtime

DECODE_32 = decode_spec("etap", 32, 64, "bf16")


def card(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str = "a card"
) -> None:
    """Lets torch see one GPU."""
    variants.arch_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty directory of variants, the only one; no compiler."""
    place = env.Place("`here`", tmp_path, True)
    monkeypatch.setattr(env, "places", lambda: [place])
    monkeypatch.setattr(variants, "jit_refusal", lambda: "there is no compiler")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(variants, "driver_version", lambda: None)
    yield tmp_path
    variants.arch_of.cache_clear()


def place(folder: Path, spec: VariantSpec, flavour: str = "cu13", target: str = "") -> None:
    for suffix in ("o", "ptx", "so"):
        (folder / f"{spec.name}.{suffix}").touch()
    record = {"name": spec.name, "flavour": flavour, "target": target}
    (folder / f"{spec.name}.json").write_text(json.dumps(record))


def step(folder: Path, flavour: str = "cu13") -> None:
    """Variants of a decode step on SM90."""
    place(folder, VariantSpec(op="plan_decode"), flavour)
    place(folder, VariantSpec(op="append_kv"), flavour)
    place(folder, VariantSpec(op="quantize_q", mode="token_head"), flavour)
    for rows in (16, 32, 64, 128):
        place(folder, decode_spec("etap", rows, 64, "bf16"), flavour)


def test_a_card_that_decodes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    step(folder)
    card(monkeypatch, (9, 0), "NVIDIA H200")
    found = info.collect()
    assert found.good and found.decodes == [True] and not found.missing
    assert found.cards == [info.Card("NVIDIA H200", "sm_90", "sm_90a")]
    (where,) = found.folders
    assert (where.what, where.path) == ("here", str(folder))
    assert where.variants == {
        "sm_90a plan_decode": 1, "sm_90a append_kv": 1, "sm_90a quantize_q": 1,
        "sm_90a decode etap": 4,
    }  # fmt: skip


def test_kinds_that_are_not_built_are_told_with_how(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Of a card's arch alone, and only where nothing is compiled when it is called."""
    step(folder)
    place(folder, VariantSpec(op="mha_items"))
    card(monkeypatch, (9, 0), "NVIDIA H200")
    found = info.collect()
    assert found.good and not found.missing
    by_kind = {text.split(": ")[0]: text for text in found.absent}
    assert list(by_kind) == [
        f"sm_90a, kind {kind}" for kind in ("helper", "decode", "mha", "prefill")
    ]
    mha = by_kind["sm_90a, kind mha"]
    assert "no variant of mha_fwd: in a checkout `make wheels ARCH=sm_90a KIND=mha`" in mha
    helpers = by_kind["sm_90a, kind helper"]
    assert " merge, " in helpers and "plan_decode" not in helpers and "append_kv" not in helpers
    assert "no variant of dense_decode, sparse_decode" in by_kind["sm_90a, kind decode"]
    done = CliRunner().invoke(app, ["info"])
    assert (
        done.exit_code == 0 and "not built here, so that calls of them are refused:" in done.output
    )
    monkeypatch.setattr(variants, "jit_refusal", lambda: None)
    assert info.collect().absent == []


def test_what_a_card_lacks(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    step(folder)
    card(monkeypatch, (9, 0))
    spec = decode_spec("etap", 32, 64, "bf16")
    (folder / f"{spec.name}.json").unlink()
    found = info.collect()
    assert not found.good
    (text,) = found.missing
    assert text.startswith(f"1 of 7 kernels of a decode step are not built for sm_90a ({spec.name}")
    assert (
        "and there is no compiler: install the wheel of kernels that `make wheels ARCH=sm_90a` "
        "builds in a checkout, run `make precompile ARCH=sm_90a` there" in text
    )
    assert "pip install" not in text, "no index has these wheels: the name is anybody's there"
    monkeypatch.setattr(variants, "jit_refusal", lambda: None)
    assert info.collect().good, "it would be compiled"


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    step(folder)
    card(monkeypatch, (9, 0))
    monkeypatch.setattr(variants, "driver_version", lambda: (12, 4))
    found = info.collect()
    assert found.driver == "12.4" and not found.good
    (text,) = found.missing
    assert "was built with CUDA 13 and the driver supports CUDA 12.4: update the driver" in text


def test_damage_and_a_missing_library(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    step(folder)
    card(monkeypatch, (9, 0))
    (folder / "plan_decode_sm90a.so").unlink()
    (text,) = info.collect().missing
    assert text == f"plan_decode_sm90a in {folder} has no .so: build it with a C compiler"
    (folder / "plan_decode_sm90a.so").touch()
    (folder / "plan_decode_sm90a.json").write_text(
        json.dumps({"name": "plan_decode_sm90a", "flavour": "cu13", "checksums": {"so": "0"}})
    )
    found = info.collect()
    first, text = found.missing
    assert "plan_decode_sm90a.so is damaged" in text
    assert first == (
        f"1 file of {folder} damaged (plan_decode_sm90a.so): put back what was built there: there "
        "is no compiler"
    )
    (where,) = found.folders
    assert where.damaged == ["plan_decode_sm90a.so"] and "sm_90a plan_decode" not in where.variants


@pytest.mark.parametrize("suffix", ["o", "ptx"])
def test_damage_counts_for_the_software_gpu(
    monkeypatch: pytest.MonkeyPatch, folder: Path, suffix: str
) -> None:
    step(folder)
    path = folder / f"plan_decode_sm90a.{suffix}"
    sums = {other: hashlib.sha256(b"").hexdigest() for other in ("o", "ptx", "so")}
    record = {"name": "plan_decode_sm90a", "checksums": sums}
    (folder / "plan_decode_sm90a.json").write_text(json.dumps(record))
    assert info.collect().good
    path.write_bytes(b"half")
    found = info.collect()
    assert not found.good and found.folders[0].damaged == [path.name]
    assert f"{path} is damaged: its 4 bytes are not those that were built" in found.missing
    monkeypatch.setattr(variants, "jit_refusal", lambda: None)
    found = info.collect()
    assert found.good, "it would be compiled"
    assert found.missing[0].endswith("their variants are compiled anew when they are called")


def test_outdated_variants_that_run_are_told(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    step(folder)
    for spec, digest in ((DECODE_32, "0"), (VariantSpec(op="plan_decode"), None)):
        digest = digest or closure.sources(spec)[0]
        record = {"name": spec.name, "source_hash": digest}
        (folder / f"{spec.name}.json").write_text(json.dumps(record))
    found = info.collect()
    assert found.good and found.folders[0].outdated == [DECODE_32.name]
    (text,) = found.missing
    assert text.startswith(f"1 of 7 variants in {folder} are outdated ({DECODE_32.name}): ")
    assert "run as they are, as there is no compiler" in text
    monkeypatch.setattr(variants, "jit_refusal", lambda: None)
    assert not info.collect().folders[0].outdated, "they would be compiled"


def test_another_card(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    card(monkeypatch, (8, 0), "NVIDIA A100")
    found = info.collect()
    assert not found.good and found.cards[0].arch is None
    assert found.missing == [
        "NVIDIA A100 is sm_80: kernels are built for sm_90 (Hopper), sm_100 and sm_103 "
        "(Blackwell); snapmla.reference runs anywhere"
    ]


@pytest.mark.parametrize(("target", "good"), [("sm_100a", False), ("sm_100f", True)])
def test_a_b300_and_what_a_build_is_for(
    monkeypatch: pytest.MonkeyPatch, folder: Path, target: str, good: bool
) -> None:
    """By what each record says; the report tells it on any machine."""
    for spec in info.needed("sm_100a"):
        place(folder, spec, target=target)
    narrow = 0 if good else len(info.needed("sm_100a"))
    card(monkeypatch, (10, 3), "NVIDIA B300")
    found = info.collect()
    assert found.good == good and found.cards == [info.Card("NVIDIA B300", "sm_103", "sm_100a")]
    assert len(found.folders[0].narrow) == narrow
    texts = [text for text in found.absent if text.startswith("sm_103 (B300) is not served by")]
    assert len(texts) == len(found.missing) == (not good)
    if not good:
        assert "was assembled for sm_100a, which sm_103 does not load" in found.missing[0]
    card(monkeypatch, (10, 0), "NVIDIA B200")
    assert info.collect().good


def test_no_card_but_the_software_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    step(folder)
    found = info.collect()
    assert found.good and found.software_gpu and not found.missing
    (folder / "append_kv_xbf16_ii32_sm90a.ptx").unlink()
    found = info.collect()
    assert not found.good
    assert found.missing[0].startswith("the software GPU, which CPU tensors run on, has no kernels")


@pytest.mark.parametrize(
    ("there", "cc", "good"),
    [
        ("cc", None, True), ("gcc", "", True), ("clang", None, True), ("clang", "nonsense", True),
        ("mine", "mine", True), ("mine", None, False), ("", "nonsense", False),
    ],
)  # fmt: skip
def test_any_c_compiler_will_do(
    monkeypatch: pytest.MonkeyPatch, folder: Path, there: str, cc: str | None, good: bool
) -> None:
    """All three that look for one agree: this report, the software GPU, codegen."""
    step(folder)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name == there else None)
    if cc is None:
        monkeypatch.delenv("CC", raising=False)
    else:
        monkeypatch.setenv("CC", cc)
    path = f"/bin/{there}" if good else None
    assert toolchain.c_compiler.__wrapped__() == softgpu_runtime.c_compiler() == path
    found = info.collect()
    assert found.good == good
    words = ["the software GPU needs a C compiler: install gcc or clang, or let CC name one"]
    assert found.missing == ([] if good else words)
    card(monkeypatch, (9, 0))
    monkeypatch.setattr(variants, "jit_refusal", lambda: None)
    (folder / f"{DECODE_32.name}.so").unlink()
    found = info.collect()
    assert found.decodes == [good]
    assert good or found.missing[0].startswith("kernels for a GPU need a C compiler: install gcc")


def test_a_driver_without_a_card(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(variants, "driver_version", lambda: (13, 0))
    for built, words in ((None, "install a CUDA build of torch"), ("13.0", "CUDA_VISIBLE_DEVICES")):
        monkeypatch.setattr(torch.version, "cuda", built)
        assert words in info.collect().missing[0]


def test_a_refused_package_is_told(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    step(folder)
    refused = env.Place("an installed `x`", folder, False, "x is of another release")
    monkeypatch.setattr(env, "places", lambda: [refused])
    found = info.collect()
    assert found.missing[0] == "x is of another release" and found.folders[0].variants == {}


def test_the_command(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    step(folder)
    card(monkeypatch, (9, 0), "NVIDIA H200 [a]")
    monkeypatch.setenv("SNAPMLA_NO_JIT", "1")
    done = CliRunner().invoke(app, ["info"])
    assert done.exit_code == 0, done.output
    for words in (
        f"snapmla             {env.__version__}, commit ", "NVIDIA H200 [a], sm_90: decodes",
        "here: 7 variants", "sm_90a decode etap           4", "SNAPMLA_NO_JIT      1",
    ):  # fmt: skip
        assert words in done.output, done.output
    assert "missing" not in done.output
    as_json = json.loads(CliRunner().invoke(app, ["info", "--json"]).output)
    assert as_json == dataclasses.asdict(info.collect()) | {"good": True}
    card(monkeypatch, (8, 0), "NVIDIA A100")
    done = CliRunner().invoke(app, ["info"])
    assert done.exit_code == 1 and "NVIDIA A100, sm_80: CANNOT DECODE" in done.output
    assert "missing:\n  NVIDIA A100 is sm_80" in done.output


def test_a_word_without_meaning_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(variants, "jit_refusal", env.NO_JIT.enabled)
    monkeypatch.setenv("SNAPMLA_NO_JIT", "disabled")
    done = CliRunner().invoke(app, ["info"])
    assert done.exit_code == 1 and done.output.startswith("SNAPMLA_NO_JIT: expected one of 1, true")
    assert done.output.count("\n") == 1
