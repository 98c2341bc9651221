"""``make wheels``: the host package as a wheel, and the built variants of one architecture as one.

    snapmla-<version>+host-py3-none-any.whl
        snapmla/                    but for ``python -m snapmla.testing``, which needs this package
        snapmla_cli/                the command ``snapmla``
        snapmla/build.json          version, commit, digest of the kernels' sources
        dsl_kernels/                names of variants only: spec, families, registry; no device code
        softgpu/                    the software GPU
    snapmla_kernels_sm90_cu13-<version>+full-py3-none-manylinux_<glibc>_<machine>.whl
        snapmla_kernels_sm90_cu13/variants/   <name>.so of every variant, bundle.json (all records)
        snapmla_kernels_sm90_cu13/include/    a C header for each
        snapmla_kernels_sm90_cu13/build.json

Architecture and CUDA's major are in the name: an index tells wheels of one name apart by CPU and
version alone.  A wheel of one kind (``Family.kind``) is ``snapmla_kernels_sm90_cu13_decode``
and the like.
``snapmla-as-flash-mla`` is a wheel apart (``make_name_wheel``): a path file and a module, by which
``import flash_mla`` finds snapmla where SNAPMLA_AS_FLASH_MLA=1 asks for it.

The host finds the variants by an entry point (``snapmla.runtime.env.kernel_wheels``) and compares
the digests.  setuptools writes both; nothing is fetched.

What stands behind ``+`` tells wheels of one version apart: ``pip wheel .`` makes a host package
with the compiler's part, without a label; kernels' wheels differ in what they hold, ``full``, or
``4of134.s1a2b3c4d``: how many of the default matrix, and a digest of which.  pip leaves labels out
of account where a requirement has none (``snapmla==<version>``), and takes the greater of two:
``full`` before a part, as letters are greater than digits.  An index takes no labels: whole wheels
of a release (``codegen.release``) have none.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen import bundle, cross, matrix, render
from codegen.artifacts import ROOT, VERSION, Record
from dsl_kernels.families import UNTESTED
from dsl_kernels.spec import VariantSpec

# Packages of the host wheel, beside the names of variants.
HOST = ("snapmla", "snapmla_cli", "softgpu")
NOT_PACKED = ("testing/__main__.py",)  # of snapmla/: needs codegen
EPOCH = "315532800"  # 1980, as early as a zip file goes: equal contents make equal wheels
OLDEST = (2, 17)  # glibc that a manylinux tag may name
FULL = "full"  # behind the version of kernels' wheels with the whole default matrix
HOST_LABEL = "host"  # behind the version of a host package without the compiler's part
NAME_MODULE = "snapmla_as_flash_mla"  # of the wheel for the name flash_mla
LEFT_OUT = ("filelock",)  # dependencies of codegen alone


class WheelError(RuntimeError):
    """A wheel cannot be made; the message says what to do."""


@dataclass(frozen=True)
class Wheels:
    """Both wheels that were made; ``variants`` counts those in the second, ``total`` those of the
    default matrix."""

    host: Path
    kernels: Path
    variants: int
    total: int


def make(
    specs: list[VariantSpec], variant_dir: Path, out_dir: Path, kind: str = "", machine: str = "",
    native_dir: Path | None = None,
) -> Wheels:  # fmt: skip
    """Builds both wheels into ``out_dir``, over older ones of the same name (and label).

    Args:
        machine, native_dir: as ``bundle.collect``; the wheel's tag names the machine.
        kind: of the families of ``specs``, whose wheel has a name of its own, so that wheels of
            several kinds are installed side by side; empty: one wheel for all kinds.

    Raises:
        BundleError: variants missing, stale or of several targets; this is no checkout.
        WheelError: setuptools is missing or too old, or fails.
    """
    kernels, variants, total = make_kernels(specs, variant_dir, out_dir, kind, machine, native_dir)
    with tempfile.TemporaryDirectory(prefix="snapmla-wheels-") as tmp:
        host = build(_host(Path(tmp, "host")), out_dir)
    return Wheels(host, kernels, variants, total)


def make_kernels(
    specs: list[VariantSpec], variant_dir: Path, out_dir: Path, kind: str = "", machine: str = "",
    native_dir: Path | None = None, *, for_index: bool = False,
) -> tuple[Path, int, int]:  # fmt: skip
    """Builds the wheel of variants alone: as ``make``.

    Args:
        for_index: leaves out the label of a whole wheel, as an index takes none.

    Returns:
        the wheel, how many variants it has, and how many the default matrix has.
    """
    bundle.requirements()  # in a checkout only
    check_setuptools()
    records = bundle.collect(specs, variant_dir, machine, native_dir)
    arch, flavour = bundle.target(records)
    out_dir.mkdir(parents=True, exist_ok=True)
    total = [spec.name for spec in matrix.default_specs(arch, kind=kind)]
    held = label([record.name for record in records], total)
    if for_index and held == FULL:
        held = ""
    with tempfile.TemporaryDirectory(prefix="snapmla-wheels-") as tmp:
        tree = _kernels(
            Path(tmp, "kernels"), records, variant_dir, name_of(arch, flavour, kind), held
        )
        return build(tree, out_dir), len(records), len(total)


def note() -> dict[str, str]:
    """Note that packages carry (``snapmla.runtime.env.NOTE``)."""
    return {"version": VERSION, "commit": commit(), "sources": sources_digest()}


def make_name_wheel(out_dir: Path) -> Path:
    """Builds ``snapmla-as-flash-mla`` into ``out_dir``: for engines that are started by a command
    and import ``flash_mla``.

    Raises:
        WheelError: as ``make``.
    """
    check_setuptools()
    about = "Lets `import flash_mla` find snapmla where SNAPMLA_AS_FLASH_MLA=1 is set"
    project = {
        **_project()["project"], "name": NAME_MODULE.replace("_", "-"), "description": about,
        "scripts": {}, "dependencies": [f"snapmla=={VERSION}"],
    }  # fmt: skip
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="snapmla-wheels-") as tmp:
        root, name = Path(tmp), f"{NAME_MODULE}.pth"
        package = root / NAME_MODULE
        package.mkdir()
        (package / "__init__.py").write_text(render.text("as_flash_mla.py.j2"))
        _describe(
            root, project, packages=[NAME_MODULE], module=NAME_MODULE, entry_points={},
            label="",
        )  # fmt: skip
        # site runs a path file's lines that begin with import, when Python starts
        (root / name).write_text(f"import {NAME_MODULE}; {NAME_MODULE}.watch()\n")
        (root / "setup.py").write_text(render.text("path_file_setup.py.j2", name=name))
        return build(root, out_dir)


def label(names: list[str], total: list[str]) -> str:
    """Label in a kernels' wheel's version: ``full``, or how many variants it has of the default
    matrix and a digest of which (PEP 440: letters, digits, dots)."""
    if set(total) <= set(names):
        return FULL
    digest = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:8]
    return f"{len(names)}of{len(total)}.s{digest}"  # digits alone would be a number


def sources_digest() -> str:
    """Digest of all device code and of what is linked to it: equal digests are equal functions."""
    digest = hashlib.sha256()
    paths = sorted((ROOT / "dsl_kernels").rglob("*.py"))
    for path in (*paths, ROOT / "codegen" / "launch.c"):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def commit() -> str:
    """The checkout's commit, ``+`` behind it if files differ from it; empty without git."""
    try:
        found = [
            subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno"))
        ]
    except OSError:
        return ""
    return found[0].stdout.strip() + ("+" if found[1].stdout.strip() else "")


def write_note(package: Path) -> None:
    """Puts that note into a package."""
    (package / "build.json").write_text(json.dumps(note()) + "\n")


def check_setuptools() -> None:
    """Raises WheelError without the backend that pyproject.toml asks for."""
    (needs,) = _project()["build-system"]["requires"]
    least = int(needs.partition(">=")[2])
    try:
        found = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        found = "0"
    if int(found.partition(".")[0]) < least:
        raise WheelError(f"wheels need {needs}: pip install '{needs}'")


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(arch: str, flavour: str, kind: str = "") -> str:
    """Name of the package with the variants for an architecture and a CUDA major, of a kind or all:
    ``snapmla-kernels-sm90-cu13``, ``snapmla-kernels-sm90-cu13-decode``."""
    short = arch.replace("_", "").rstrip("a")
    return "-".join(filter(None, ("snapmla-kernels", short, flavour, kind)))


def _host(root: Path) -> Path:
    """The tree of the host wheel."""
    skip = shutil.ignore_patterns("__pycache__", "variants")
    for package in HOST:
        shutil.copytree(ROOT / package, root / package, ignore=skip)
    for name in NOT_PACKED:
        (root / "snapmla" / name).unlink()
    bundle.copy_names(root)
    project = _project()["project"]
    scripts = {k: v for k, v in project["scripts"].items() if not v.startswith("codegen")}
    kept = [d for d in project["dependencies"] if not d.startswith(LEFT_OUT)]
    _describe(
        root, {**project, "scripts": scripts, "dependencies": kept},
        packages=[*HOST, "dsl_kernels"], entry_points=project["entry-points"],
        module="snapmla", label=HOST_LABEL,
    )  # fmt: skip
    return root


def _kernels(
    root: Path,
    records: list[Record],
    variant_dir: Path,
    name: str,
    label: str,
) -> Path:
    """The tree of the wheel with the variants."""
    module, arch = name.replace("-", "_"), records[0].spec["arch"]
    package = root / module
    bundle.copy_variants(package / "variants", package / "include", records, variant_dir)
    about = f"Compiled kernels of snapmla for {arch}, found by it when they are installed"
    if arch in UNTESTED:
        about += "; untested on hardware"
    (package / "__init__.py").write_text(f'"""{about}."""\n')
    project = {
        **_project()["project"], "name": name, "description": about, "scripts": {},
        "dependencies": [f"snapmla=={VERSION}"],
    }  # fmt: skip
    libraries = sorted((package / "variants").glob("*.so"))
    major, minor = max(OLDEST, glibc_of(libraries))
    _describe(
        root, project, packages=[module], module=module, label=label,
        entry_points={"snapmla.kernels": {module.removeprefix("snapmla_kernels_"): module}},
        platform=f"manylinux_{major}_{minor}_{cross.machine_of(records[0]) or platform.machine()}",
    )  # fmt: skip
    return root


def glibc_of(libraries: Iterable[Path]) -> tuple[int, int]:
    """The newest version of glibc whose symbols the libraries use; (0, 0) of none.

    Raises WheelError without objdump, which comes with the C compiler.
    """
    command = ["objdump", "-T", *map(str, libraries)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise WheelError(f"symbols' versions cannot be read: {error}") from None
    versions = re.findall(r"\bGLIBC_(\d+)\.(\d+)", done.stdout)
    return max(((int(a), int(b)) for a, b in versions), default=(0, 0))


def _describe(
    root: Path,
    project: dict[str, Any],
    *,
    packages: list[str],
    entry_points: dict[str, dict[str, str]],
    module: str,
    label: str,
    platform: str = "",
) -> None:
    """Writes the build backend's input: pyproject.toml, licence, README; and the package's note."""
    shutil.copyfile(ROOT / "LICENSE", root / "LICENSE")
    if module == "snapmla":
        shutil.copyfile(ROOT / "README.md", root / "README.md")
    else:
        (root / "README.md").write_text(f"{project['description']}\n")
    write_note(root / module)
    version = f"{VERSION}+{label}" if label else VERSION
    text = render.text(
        "wheel.toml.j2", project=project, version=version, packages=packages,
        entry_points=entry_points, needs=_project()["build-system"]["requires"],
    )  # fmt: skip
    (root / "pyproject.toml").write_text(text)
    if platform:
        (root / "setup.py").write_text(render.text("wheel_setup.py.j2", platform=platform))


def build(tree: Path, out_dir: Path, what: str = "build_wheel") -> Path:
    """Runs the build backend over a tree; returns the wheel, or what another hook makes."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.{what}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out_dir.resolve())], cwd=tree, capture_output=True,
        text=True, env={"SOURCE_DATE_EPOCH": EPOCH, **os.environ},
    )  # fmt: skip
    if done.returncode:
        raise WheelError(f"setuptools failed:\n{done.stderr.strip()[-2000:]}")
    return out_dir / done.stdout.split()[-1]
