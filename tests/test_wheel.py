"""What ``pip install .`` installs: every file of the packages, sources of the compiler included.

A run-time compile from an installed package needs them all: kernels, ``launch.c``, templates.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGES = ("snapmla", "snapmla_cli", "codegen", "dsl_kernels", "softgpu")


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in a folder of the project's name; building leaves files in it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (needs,) = project["build-system"]["requires"]
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip(f"needs {needs}")
    import setuptools

    if version(setuptools.__version__) < version(needs.partition(">=")[2]):
        pytest.skip(f"needs {needs}")
    tree = tmp_path_factory.mktemp("wheel") / "snapmla"
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "variants")
        shutil.copytree(ROOT / package, tree / package, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    return tree


@pytest.fixture(scope="module")
def built(tree: Path) -> tuple[Path, set[str]]:
    """A wheel, and the files of the packages that it was made of."""
    tmp_path = tree.parent
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
    return wheel, wanted


def test_wheel_holds_every_file(built: tuple[Path, set[str]]) -> None:
    wheel, wanted = built
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert not wanted - packed, "add them to package-data in pyproject.toml"
    others = {name for name in packed - wanted if ".dist-info/" not in name}
    assert not others
    (metadata,) = (name for name in packed if name.endswith("/METADATA"))
    assert "License-Expression: Apache-2.0" in zipfile.ZipFile(wheel).read(metadata).decode()


def test_an_editable_install_is_found_beside_the_clone(tree: Path, tmp_path: Path) -> None:
    """In the clone's parent folder, where the clone itself is a namespace package of that name.

    An import hook, setuptools' other way, comes behind it; ``-S`` leaves out what is installed.
    """
    code = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=tree
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import importlib.util, site, sys; site.addsitedir(sys.argv[1])\n"
        "print(*(importlib.util.find_spec(name).origin for name in sys.argv[2:]))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(tmp_path), *PACKAGES], capture_output=True,
        text=True, cwd=tree.parent, env=environment,
    )  # fmt: skip
    wanted = [str(tree / package / "__init__.py") for package in PACKAGES]
    assert done.stdout.split() == wanted, done.stdout + done.stderr


USER = """
import codegen, dsl_kernels, snapmla, softgpu
from dsl_kernels.spec import VariantSpec
from softgpu.options import Options

reveal_type(snapmla.decode)
snapmla.decode(1)
Options(seed="x")
VariantSpec(op=1)
"""


def test_mypy_in_a_users_project_sees_the_types(
    built: tuple[Path, set[str]], tmp_path: Path
) -> None:
    """... of all packages, from the installed wheel; torch is left out, which only costs time."""
    python = install(built[0], tmp_path / "venv")
    (tmp_path / "use.py").write_text(USER)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--python-executable", str(python),
         "--cache-dir", str(tmp_path / "cache"), "use.py"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    found = done.stdout.splitlines()
    assert "import-untyped" not in done.stdout, done.stdout
    queries = (
        "q: snapmla.cache.quant.QuantizedQuery | Any | tuple[Any, Any], "  # or content and RoPE
    )
    assert f'use.py:6: note: Revealed type is "def ({queries}' in found[0]
    assert "cache: snapmla.cache.paged.PagedKVCache, block_table: " in found[0]
    errors = {int(line.split(":")[1]) for line in found if ": error: " in line}
    assert errors == {7, 8, 9}, done.stdout


def install(wheel: Path, environment: Path) -> Path:
    """The interpreter of a new environment that holds the wheel and nothing else."""
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    purelib = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True)
    zipfile.ZipFile(wheel).extractall(purelib.stdout.strip())
    return python
