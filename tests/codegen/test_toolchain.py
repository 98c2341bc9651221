"""Which CUDA is built for."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen import compile as compiler
from codegen import toolchain
from codegen.artifacts import Record
from tests.support.builds import CHEAP, codegen
from tests.support.needs import needs_compiler

pytestmark = needs_compiler


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


@pytest.mark.whole_matrix
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
