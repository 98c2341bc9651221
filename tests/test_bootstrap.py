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
        done.append("install")
        return subprocess.CompletedProcess(command, 0)

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
