"""Fetches releases of vLLM for ``tests/host/test_vllm.py``, which skips without them.

    python -m tests.support.fetch_vllm [RELEASE...]

Downloads wheels with pip (300 MB a release) and unpacks them into the user's cache folder, beside
what vLLM imports but torch.  A release is there when its folder is; a run that was stopped leaves
none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from snapmla import env
from tests.support import ROOT

RELEASES = ("0.26.0", "0.33.0")
NEEDS = ROOT / "constraints" / "vllm.txt"
DEPENDENCIES = "dependencies"


def home() -> Path:
    """Where releases are kept; ``SNAPMLA_VLLM`` names another folder."""
    if os.environ.get("SNAPMLA_VLLM"):
        return Path(os.environ["SNAPMLA_VLLM"])
    return (env.cache_home() or Path(tempfile.gettempdir())) / "snapmla" / "vllm"


def path_of(release: str) -> list[Path] | None:
    """Folders for the module path, None if the release is not there."""
    found = [home() / release, home() / DEPENDENCIES]
    return found if all(folder.is_dir() for folder in found) else None


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)


def fetch(release: str) -> None:
    """Unpacks one release."""
    with tempfile.TemporaryDirectory(dir=home()) as scratch:
        pip("download", f"vllm=={release}", "--no-deps", "--only-binary=:all:", "-d", scratch)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            without = [n for n in archive.namelist() if not n.endswith(".so")]  # of a GPU's
            archive.extractall(Path(scratch) / release, without)
        os.replace(Path(scratch) / release, home() / release)


def dependencies() -> None:
    """What vLLM imports, at the releases that were tried."""
    with tempfile.TemporaryDirectory(dir=home()) as scratch:
        target = Path(scratch) / DEPENDENCIES
        pip("install", "--no-deps", "--target", str(target), "-r", str(NEEDS))
        os.replace(target, home() / DEPENDENCIES)


def main(releases: list[str]) -> None:
    home().mkdir(parents=True, exist_ok=True)
    if not (home() / DEPENDENCIES).is_dir():
        dependencies()
    for release in releases:
        if not (home() / release).is_dir():
            fetch(release)
        print(home() / release)
    print(f"{shutil.disk_usage(home()).free / 1e9:.0f} GB are left there")


if __name__ == "__main__":
    main(sys.argv[1:] or list(RELEASES))
