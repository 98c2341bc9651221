"""What ``pip install .`` installs: every file of the packages, sources of the compiler included.

A run-time compile from an installed package needs them all: kernels, ``launch.c``, templates.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("snapmla", "codegen", "dsl_kernels", "softgpu")


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def test_wheel_holds_every_file(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (needs,) = project["build-system"]["requires"]
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip(f"needs {needs}")
    import setuptools

    if version(setuptools.__version__) < version(needs.partition(">=")[2]):
        pytest.skip(f"needs {needs}")
    tree = tmp_path / "tree"  # building leaves files in the tree
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "variants")
        shutil.copytree(ROOT / package, tree / package, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    wanted = {
        path.relative_to(tree).as_posix()
        for package in PACKAGES
        for path in (tree / package).rglob("*")
        if path.is_file()
    }
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
         "--no-index", "-w", str(tmp_path), str(tree)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert not wanted - packed, "add them to package-data in pyproject.toml"
    others = {name for name in packed - wanted if ".dist-info/" not in name}
    assert not others
    (metadata,) = (name for name in packed if name.endswith("/METADATA"))
    assert "License-Expression: Apache-2.0" in zipfile.ZipFile(wheel).read(metadata).decode()
