"""The demo's words: its table of times and its refusals."""

from __future__ import annotations

import io
import re

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from dsl_kernels.spec import VariantSpec
from profiles import demo
from snapmla.errors import VariantError
from snapmla.runtime import variants

MEASURED = {"decode + merge": 100.0, "plan.update_": 3.0}


def shown(card: str) -> str:
    console = Console(file=io.StringIO(), width=120)
    demo.show_roofs(demo.gpu_job(torch.device("cpu")), card, 1000, MEASURED, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_times_on_an_unknown_card() -> None:
    text = shown("Some Card 1")
    assert "decode + merge" in text and "100.0" in text and "no roof" in text


def test_roof_of_a_known_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiles.ceilings.probe", lambda nvml, quick: (None, [], ["no device"]))
    text = shown("NVIDIA H200")
    assert "of the roof" in text and "GB/s read" in text and "not measured: no device" in text


def test_a_missing_variant_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(spec: VariantSpec, device_type: str) -> None:
        try:
            raise RuntimeError("the compiler's")
        except RuntimeError as error:
            raise VariantError(f"variant {spec.name} did not compile: [red]") from error

    variants.forget()
    monkeypatch.setattr(variants, "kernel", missing)
    result = CliRunner().invoke(app(), ["--device", "cpu"])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    last = result.output.splitlines()[-1]
    assert re.fullmatch(r"variant append_kv_\w+ did not compile: \[red\]", last), result.output


@pytest.mark.parametrize("words", [["--device", "gpu"], ["--layout", "pagd"]])
def test_a_wrong_option_is_one_sentence(words: list[str]) -> None:
    result = CliRunner().invoke(app(), words)
    assert result.exit_code == 2 and result.output.count("\n") == 1
    assert result.output.startswith(f"{words[0].removeprefix('--')}: expected ")


def app() -> typer.Typer:
    """The demo as a command."""
    command = typer.Typer()
    command.command()(demo.main)
    return command
