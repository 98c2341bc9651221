"""``codegen/bootstrap.py``: when the environment is made, mended and left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from codegen import bootstrap


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is made and installed, without doing either; pip is there where it was made."""
    done: list[str] = []

    def create(target: Path, **options: Any) -> None:
        assert not options["clear"]
        done.append("create")
        (target / "bin").mkdir(parents=True, exist_ok=True)
        (target / "bin" / "python").touch()
        (target / "pip").touch()

    def run(command: list[str], **options: Any) -> Any:
        target = Path(command[0]).parent.parent
        if "--version" in command:
            return subprocess.CompletedProcess(command, 0 if (target / "pip").exists() else 1)
        if "index" in command or "-c" in command[:2]:  # what pip would find; whether torch is there
            return subprocess.CompletedProcess(command, 1, stdout="")
        done.append("install")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.delenv("TORCH_INDEX", raising=False)
    monkeypatch.setattr(bootstrap.venv, "create", create)
    monkeypatch.setattr(bootstrap.subprocess, "run", run)
    monkeypatch.setattr(bootstrap, "have_gpu", lambda: False)
    return done


def test_made_once(calls: list[str], tmp_path: Path) -> None:
    bootstrap.main(tmp_path / "venv")
    assert calls == ["create", "install"]
    bootstrap.main(tmp_path / "venv")
    assert calls == ["create", "install"]


def test_killed_while_installing(
    calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: Any, **options: Any) -> Any:
        if "--version" in args[0]:
            return subprocess.CompletedProcess(args[0], 0)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(bootstrap.subprocess, "run", killed)
        with pytest.raises(KeyboardInterrupt):
            bootstrap.main(tmp_path / "venv")
    bootstrap.main(tmp_path / "venv")
    assert calls == ["create", "install"]


def test_killed_before_pip_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real environment: one cannot be created over another."""
    run, installed = subprocess.run, []

    def without_network(command: list[str], **options: Any) -> Any:
        if "index" in command:
            return subprocess.CompletedProcess(command, 1, stdout="")
        if "install" not in command:
            return run(command, **options)
        installed.append(command[0])
        return subprocess.CompletedProcess(command, 0)

    python = tmp_path / "venv" / "bin" / "python"
    run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    assert not bootstrap.has_pip(python)
    monkeypatch.setattr(bootstrap, "have_gpu", lambda: False)
    monkeypatch.setattr(bootstrap.subprocess, "run", without_network)
    bootstrap.main(tmp_path / "venv")
    assert bootstrap.has_pip(python) and installed == [str(python)]


def test_what_is_no_environment_is_not_cleared(calls: list[str], tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    bootstrap.main(tmp_path)
    assert calls == ["create", "install"] and (tmp_path / "notes").read_text() == "mine"


def test_moved_checkout_is_installed_anew(
    calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install names the place of the checkout."""
    bootstrap.main(tmp_path / "venv")
    calls.clear()
    (tmp_path / "moved").mkdir()
    for name in ("pyproject.toml", "constraints"):
        (tmp_path / "moved" / name).symlink_to(bootstrap.ROOT / name)
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path / "moved")
    bootstrap.main(tmp_path / "venv")
    assert calls == ["install"]


def test_old_python_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    with pytest.raises(SystemExit, match=r"Python 3\.11 or newer is needed, this is .*set PYTHON="):
        bootstrap.main(tmp_path / "venv")


PIN = bootstrap.pinned_torch()
FOUND = "torch (9.1.0)\nAvailable versions: 9.1.0, {}, 9.0.0\n  INSTALLED: {}\n"
HUGE = "about 5 GB"


class Pip:
    """Stands in for the commands that bootstrap runs; pip finds ``versions`` of torch."""

    def __init__(self, versions: str, has_torch: bool = False):
        self.answer = FOUND.format(versions, f"{PIN}+cpu")  # what is installed must not count
        self.has_torch = has_torch
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **options: Any) -> Any:
        self.commands.append(command[1:])
        if "find_spec" in command[-1]:
            return subprocess.CompletedProcess(command, 0 if self.has_torch else 1)
        return subprocess.CompletedProcess(command, 0, stdout=self.answer)

    def told(self) -> list[list[str]]:
        """What pip was told to do: to look torch up, to install."""
        verbs = ("index", "install")
        return [c for c in self.commands if len(c) > 2 and c[2] in verbs]


@pytest.fixture
def setup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Runs bootstrap with a pip and a machine; returns what it printed before it installed."""

    def run(pip: Pip, *, gpu: bool = False, platform: str = "linux", index: str = "") -> str:
        monkeypatch.setattr(bootstrap.subprocess, "run", pip)
        monkeypatch.setattr(bootstrap.venv, "create", lambda *a, **k: None)
        monkeypatch.setattr(bootstrap, "have_gpu", lambda: gpu)
        monkeypatch.setattr(bootstrap.sys, "platform", platform)
        monkeypatch.setenv("TORCH_INDEX", index)
        (tmp_path / "venv").mkdir()
        bootstrap.main(tmp_path / "venv")
        assert pip.told()[-1][2] == "install"
        return capsys.readouterr().out

    return run


def test_a_cpu_build_comes_without_a_word(setup: Any) -> None:
    pip = Pip(f"{PIN}+cpu, {PIN}")
    assert HUGE not in setup(pip)
    assert [c[2:4] for c in pip.told()] == [["index", "versions"], ["install", "-q"]]
    assert "cpu.txt" in " ".join(pip.told()[1])


def test_gigabytes_of_cuda_are_announced_where_no_gpu_is(setup: Any) -> None:
    text = setup(Pip(PIN))
    assert HUGE in text and "make setup TORCH_INDEX=" in text
    assert text.index(HUGE) < text.index("installing into")


def test_another_versions_cpu_build_does_not_count(setup: Any) -> None:
    assert HUGE in setup(Pip(f"{PIN}, {PIN}0+cpu"))


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_have_builds_without_cuda(setup: Any, platform: str) -> None:
    assert HUGE not in setup(Pip(PIN), platform=platform)


def test_a_gpu_machine_hears_the_size_and_no_advice(setup: Any) -> None:
    text = setup(pip := Pip(PIN), gpu=True)
    assert HUGE in text and "TORCH_INDEX" not in text
    assert "test.txt" in " ".join(pip.told()[-1])


@pytest.mark.parametrize("gpu", [False, True])
def test_nothing_is_announced_that_is_there_already(setup: Any, gpu: bool) -> None:
    text = setup(pip := Pip(PIN, has_torch=True), gpu=gpu)
    assert HUGE not in text and [c[2] for c in pip.told()] == ["install"]


def test_an_index_for_torch_is_looked_at_too(setup: Any) -> None:
    text = setup(pip := Pip(f"{PIN}+cpu"), index="https://index.example/cpu")
    assert HUGE not in text
    for command in pip.told():
        at = command.index("--extra-index-url")
        assert command[at + 1] == "https://index.example/cpu"


def test_a_pip_that_cannot_tell_changes_nothing(setup: Any) -> None:
    """An older one, or no network: installing says what is wrong."""
    pip = Pip(PIN)
    pip.answer = ""
    assert HUGE not in setup(pip)


def test_the_pin_is_that_of_the_constraints() -> None:
    assert f"torch=={PIN}\n" in (bootstrap.CONSTRAINTS / "cpu.txt").read_text()
