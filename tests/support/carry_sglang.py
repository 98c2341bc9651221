"""Packs SGLang for ``tests/gpu/test_sglang.py`` on a GPU machine without network: ``build/sglang``.

    python -m tests.support.carry_sglang [RELEASE]

``build/sglang/RELEASE.tar.xz`` is the Python of a release that ``fetch_sglang`` has fetched, but
its diffusion models, its tests and its compiled kernels, for which ``shells`` stands.
``build/sglang/whl`` are wheels of what that imports (``constraints/sglang-gpu.txt``), for the GPU
machine's Python.  ``profiles/gpu_run.sh`` unpacks both, and names the folder in ``SNAPMLA_SGLANG``.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path

from profiles.engine.bring import download
from tests.support import ROOT, fetch_sglang

TO = ROOT / "build" / "sglang"
NEEDS = ROOT / "constraints" / "sglang-gpu.txt"
LEFT_OUT = ("multimodal_gen", "test", "benchmark", "cli")  # folders of the package
KINDS = (".py", ".json", ".yaml", "METADATA", "entry_points.txt", "top_level.txt")


def wanted(path: Path) -> bool:
    """Whether a file of the release is packed, by its path in the release."""
    return path.name.endswith(KINDS) and not (path.parts[1:] and path.parts[1] in LEFT_OUT)


def pack(release: Path, out: Path) -> None:
    """The files of an unpacked release as a tar."""
    partial = out.with_name(out.name + ".partial")
    with tarfile.open(partial, "w:xz", preset=6) as archive:
        for path in sorted(p for p in release.rglob("*") if p.is_file()):
            inside = path.relative_to(release)
            if wanted(inside):
                archive.add(path, str(inside))
    partial.replace(out)


def main(release: str, to: Path = TO) -> None:
    """Packs what is not there."""
    found = fetch_sglang.path_of(release)
    if found is None:
        sys.exit(f"SGLang {release} is not there: python -m tests.support.fetch_sglang {release}")
    to.mkdir(parents=True, exist_ok=True)
    packed = to / f"{release}.tar.xz"
    if not packed.exists():
        pack(found[0], packed)
    if not (to / "whl").exists():
        with tempfile.TemporaryDirectory(dir=to) as scratch:
            download(Path(scratch) / "whl", "-r", str(NEEDS))
            (Path(scratch) / "whl").replace(to / "whl")
    size = sum(p.stat().st_size for p in to.rglob("*") if p.is_file())
    print(f"{to}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main(*(sys.argv[1:] or fetch_sglang.RELEASES[-1:]))
