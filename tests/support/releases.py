"""Releases of an engine in the user's cache folder: fetched by its script, found by its tests.

A release is there when its folder is, beside the folder of what it imports but torch, if that is
fetched; a run that was stopped leaves none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from snapmla.runtime import env

DEPENDENCIES = "dependencies"


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)


@dataclass(frozen=True)
class Engine:
    """An engine whose wheels are unpacked.

    Attributes:
        name: of its distribution and its folder.
        variable: of the environment, which may name another folder.
        needs: file of what it imports, at the releases that were tried; None: its text is enough.
        wanted: which files of a wheel are unpacked.
    """

    name: str
    variable: str
    needs: Path | None
    wanted: Callable[[str], bool] = lambda _: True

    def home(self) -> Path:
        """Folder that releases are kept in."""
        if os.environ.get(self.variable):
            return Path(os.environ[self.variable])
        return (env.cache_home() or Path(tempfile.gettempdir())) / "snapmla" / self.name

    def path_of(self, release: str) -> list[Path] | None:
        """Folders for the module path, None if the release is not there."""
        found = [self.home() / release]
        if self.needs is not None:
            found.append(self.home() / DEPENDENCIES)
        return found if all(folder.is_dir() for folder in found) else None

    def fetch(self, release: str) -> None:
        """Unpacks one release."""
        with tempfile.TemporaryDirectory(dir=self.home()) as scratch:
            wheel = f"{self.name}=={release}"
            pip("download", wheel, "--no-deps", "--only-binary=:all:", "-d", scratch)
            (file,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(file) as archive:
                names = [name for name in archive.namelist() if self.wanted(name)]
                archive.extractall(Path(scratch) / release, names)
            os.replace(Path(scratch) / release, self.home() / release)

    def dependencies(self) -> None:
        """Installs the packages that it imports, as ``needs`` lists them."""
        with tempfile.TemporaryDirectory(dir=self.home()) as scratch:
            target = Path(scratch) / DEPENDENCIES
            pip("install", "--no-deps", "--target", str(target), "-r", str(self.needs))
            os.replace(target, self.home() / DEPENDENCIES)

    def main(self, releases: list[str]) -> None:
        """Fetches what is not there."""
        self.home().mkdir(parents=True, exist_ok=True)
        if self.needs is not None and not (self.home() / DEPENDENCIES).is_dir():
            self.dependencies()
        for release in releases:
            if not (self.home() / release).is_dir():
                self.fetch(release)
            print(self.home() / release)
        print(f"{shutil.disk_usage(self.home()).free / 1e9:.0f} GB are left there")
