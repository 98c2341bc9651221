"""Fetches releases of transformers for ``tests/host/test_transformers.py``, which skips without.

    python -m tests.support.fetch_transformers [RELEASE...]

Installs each release with what it imports, but torch, into a folder of its own in the user's cache
(100 MB a release).  A release is there when its folder is; a run that was stopped leaves none.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from snapmla.runtime import env
from tests.support import ROOT
from tests.support.releases import pip

# The first that is served, the first whose DeepSeek-V3.2 caches latents, the last two.
RELEASES = ("5.17.0", "5.18.0", "5.23.0", "5.24.0")
NEEDS = ROOT / "constraints" / "transformers.txt"
OLDER_HUB = ("5.17.0", "5.18.0")  # want huggingface_hub 1


def home() -> Path:
    """Folder that releases are kept in; ``SNAPMLA_TRANSFORMERS`` names another folder."""
    if os.environ.get("SNAPMLA_TRANSFORMERS"):
        return Path(os.environ["SNAPMLA_TRANSFORMERS"])
    return (env.cache_home() or Path(tempfile.gettempdir())) / "snapmla" / "transformers"


def path_of(release: str) -> Path | None:
    """A folder for the module path, None if the release is not there."""
    found = home() / release
    return found if found.is_dir() else None


def fetch(release: str) -> None:
    """Installs one release."""
    with tempfile.TemporaryDirectory(dir=home()) as scratch:
        target = Path(scratch) / release
        hub = "huggingface_hub<2" if release in OLDER_HUB else "huggingface_hub<3"
        pip("install", "--no-deps", "--target", str(target), "-r", str(NEEDS), hub,
            f"transformers=={release}")  # fmt: skip
        os.replace(target, home() / release)


def main(releases: list[str]) -> None:
    home().mkdir(parents=True, exist_ok=True)
    for release in releases:
        if not (home() / release).is_dir():
            fetch(release)
        print(home() / release)


if __name__ == "__main__":
    main(sys.argv[1:] or list(RELEASES))
