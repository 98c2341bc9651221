"""``snapmla selfcheck``, what ``snapmla info`` says next, and commands that wait for no torch."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from codegen import artifacts
from codegen.precompile import precompile
from dsl_kernels.spec import VariantSpec, decode_spec
from snapmla import rank
from snapmla.runtime import env, variants
from snapmla.tools import info, installed
from snapmla_cli import app, needs
from tests.support import ROOT
from tests.support.needs import needs_compiler

APPEND = VariantSpec(op="append_kv")
QUANTIZE = VariantSpec(op="quantize_q", mode="token_head")


def command(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, words)
    return done.exit_code, done.output


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty directory of variants, the only one, on a machine without a GPU."""
    monkeypatch.setattr(env, "places", lambda: [env.Place("`here`", tmp_path, True)])
    monkeypatch.setattr(env, "variant_dirs", lambda: [tmp_path])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(variants, "driver_version", lambda: None)
    return tmp_path


@pytest.fixture
def two(folder: Path, variant_dir: Path) -> Path:
    """That directory with two variants."""
    precompile([APPEND, QUANTIZE], variant_dir)
    for spec in (APPEND, QUANTIZE):
        for path in artifacts.paths(variant_dir, spec).values():
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
    return folder


# ---------------------------------------------------------------- selfcheck


@needs_compiler
def test_each_op_that_is_there_is_checked(two: Path) -> None:
    code, output = command("selfcheck")
    assert code == 0, output
    rows = [line.split()[:3] for line in output.splitlines()[-3:-1]]
    assert rows == [[spec.op, spec.name, "right"] for spec in (APPEND, QUANTIZE)]
    assert "2 of 2 ops are right on the software GPU, sm_90a; " in output


@needs_compiler
def test_a_wrong_result_and_an_error_are_told(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that writes nothing, and one that raises: the check goes on behind either."""
    real = variants.load

    def load(artifact: Any, device_type: str) -> Callable[..., Any]:
        kernel = real(artifact, device_type)
        return (lambda *_: None) if artifact.name == APPEND.name else kernel

    monkeypatch.setattr(variants, "load", load)
    code, output = command("selfcheck")
    assert code == 1 and f"{APPEND.name} FAILED: " in output and "values of content" in output
    assert "1 of 2 ops are right" in output
    (two / f"{QUANTIZE.name}.ptx").write_text("nothing")
    code, output = command("selfcheck", "--software")
    assert code == 1 and f"{QUANTIZE.name} FAILED: VariantError: " in output
    assert "quantize_q_xbf16_token_head_sm90a.ptx is damaged" in output and "0 of 2 ops" in output


def test_nothing_that_could_run_is_one_sentence(folder: Path) -> None:
    code, output = command("selfcheck")
    assert code == 2 and output == (
        "no variant for sm_90a with PTX is installed, so nothing was run on the software GPU: "
        "`snapmla info` says what is there and what is missing\n"
    )
    place(folder, APPEND, "so")  # as a wheel has it
    assert command("selfcheck") == (code, output)
    assert list(info.installed("sm_90a", "cuda")) == ["append_kv"]


def place(folder: Path, spec: VariantSpec, *suffixes: str) -> None:
    for suffix in suffixes:
        (folder / f"{spec.name}.{suffix}").touch()
    (folder / f"{spec.name}.json").write_text(f'{{"name": "{spec.name}", "flavour": "cu13"}}')


def test_the_plainest_variant_of_an_op_is_taken(folder: Path) -> None:
    """64-token pages and bf16 results before others, few rows before many."""
    specs = [decode_spec("etap", 128, 64, "bf16"), decode_spec("etap", 16, 32, "bf16"),
             decode_spec("etap", 16, 64, "f32"), decode_spec("etap", 64, 64, "bf16")]  # fmt: skip
    for spec in specs:
        place(folder, spec, "o", "ptx")
    assert info.installed("sm_90a", "cpu") == {"decode": specs[3]}
    assert info.installed("sm_90a", "cuda") == info.installed("sm_100a", "cpu") == {}
    with pytest.raises(variants.VariantError, match="merge_obf16_sm90a is not installed"):
        installed.check(VariantSpec(op="merge"), "cpu")


# ---------------------------------------------------------------- what is next, what is untested


def test_info_ends_with_the_next_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def last() -> str:
        return command("info")[1].splitlines()[-1]

    monkeypatch.setattr(variants, "jit_refusal", lambda: "there is no compiler")
    assert last() == "next: snapmla info, once what is missing is there"
    monkeypatch.setattr(variants, "jit_refusal", lambda: None)
    assert last() == (
        "next: python -m codegen build plan_decode_sm90a append_kv_xbf16_ii32_sm90a "
        "quantize_q_xbf16_token_head_sm90a decode_etap_r16_p64_obf16_sm90a && snapmla selfcheck"
    )
    place(folder, APPEND, "o", "ptx")
    assert last() == "next: snapmla selfcheck"


def test_what_never_ran_on_hardware_is_marked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "sm_100a: untested on hardware; its kernels ran on the software GPU only"
    place(folder, APPEND, "so")
    assert said not in command("info")[1]
    place(folder, APPEND.replace(arch="sm_100a"), "so")
    assert said in command("info")[1]
    variants.arch_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    output = command("info")[1]
    variants.arch_of.cache_clear()
    assert "NVIDIA B200, sm_100: " in output and output.count("untested on hardware") == 2


# ---------------------------------------------------------------- commands without torch


@pytest.mark.parametrize("words", [[], ["needs"], ["selfcheck"]])
def test_help_imports_no_torch(words: list[str]) -> None:
    code = (
        "import sys\n"
        "from snapmla_cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as leave: assert not leave.code\n"
        "assert not {'torch', 'numpy', 'snapmla'} & set(sys.modules), 'imported'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0 and "Usage: " in done.stdout, done.stdout + done.stderr


def test_the_package_runs_the_same_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["snapmla", "--help"])
    for package in ("snapmla", "snapmla_cli"):
        with pytest.raises(SystemExit) as left:
            runpy.run_module(package, run_name="__main__")
        assert not left.value.code and "selfcheck" in capsys.readouterr().out


def test_words_that_help_has_without_torch_are_the_dispatchers() -> None:
    assert set(needs.DENSE) == set(rank.DENSE_FORMATS)
    assert set(needs.SPARSE) == set(rank.SPARSE_FORMATS)
    assert needs.UNROTATED == rank.PLAIN
