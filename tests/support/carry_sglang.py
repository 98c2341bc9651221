"""Packs SGLang for ``tests/gpu/test_sglang.py`` on a GPU machine without network: ``build/sglang``.

    python -m tests.support.carry_sglang [RELEASE]

``build/sglang/RELEASE.tar.xz`` is the Python of a release that ``fetch_sglang`` has fetched, but
its diffusion models, its tests and its compiled kernels, for which ``shells`` stands.
``dependencies.tar.xz`` is what that imports (``constraints/sglang-gpu.txt``), for the GPU machine's
Python.  ``profiles/gpu_run.sh`` unpacks both, and names the folder in ``SNAPMLA_SGLANG``.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from profiles.engine.bring import download
from tests.support import ROOT, fetch_sglang
from tests.support.releases import DEPENDENCIES

TO = ROOT / "build" / "sglang"
NEEDS = ROOT / "constraints" / "sglang-gpu.txt"
LEFT_OUT = ("multimodal_gen", "test", "benchmark", "cli")  # folders of the package


def of_release(path: Path) -> bool:
    """True if a file of the release is packed, by its path in the release."""
    return path.suffix != ".so" and not (path.parts[1:] and path.parts[1] in LEFT_OUT)


def pack(folder: Path, out: Path, wanted: Callable[[Path], bool]) -> None:
    """Files of a folder as a tar, those whose path in it is wanted."""
    partial = out.with_name(out.name + ".partial")
    with tarfile.open(partial, "w:xz", preset=6) as archive:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            inside = path.relative_to(folder)
            if wanted(inside):
                archive.add(path, str(inside))
    partial.replace(out)


def pack_dependencies(out: Path) -> None:
    """Packs what SGLang's modules import as one tar: a third smaller than the wheels."""
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        wheels, whole = Path(scratch) / "whl", Path(scratch) / DEPENDENCIES
        download(wheels, "-r", str(NEEDS))
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(whole)
        pack(whole, out, lambda _: True)


def main(release: str, to: Path = TO) -> None:
    """Packs what is not there."""
    found = fetch_sglang.path_of(release)
    if found is None:
        sys.exit(f"SGLang {release} is not there: python -m tests.support.fetch_sglang {release}")
    to.mkdir(parents=True, exist_ok=True)
    packed = to / f"{release}.tar.xz"
    if not packed.exists():
        pack(found[0], packed, of_release)
    beside = to / f"{DEPENDENCIES}.tar.xz"
    if not beside.exists():
        pack_dependencies(beside)
    size = packed.stat().st_size + beside.stat().st_size
    print(f"{to}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main(*(sys.argv[1:] or fetch_sglang.RELEASES[-1:]))
