"""Fetches what ``tests/codegen/test_cross.py`` runs aarch64 libraries with; it skips without.

    python -m tests.support.fetch_aarch64

Downloads apache-tvm-ffi's wheel for aarch64 with pip, of the release that is installed here, into
the user's cache folder.  Programs for aarch64 run by ``qemu-aarch64``, whose C library is Debian's
``libc6-arm64-cross`` and ``libstdc++6-arm64-cross``.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
import zipfile
from pathlib import Path

from snapmla.runtime import env
from tests.support.releases import pip

FFI = "apache-tvm-ffi"
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_24_aarch64", "manylinux2014_aarch64")
SYSROOT = Path("/usr/aarch64-linux-gnu")


def home() -> Path:
    """Folder that the wheel is unpacked in."""
    version = importlib.metadata.version(FFI)
    cache = env.cache_home() or Path(tempfile.gettempdir())
    return cache / "snapmla" / "aarch64" / f"{FFI}-{version}"


def library_dir() -> Path | None:
    """Folder of libtvm_ffi.so for aarch64, None if it has not been fetched."""
    found = home() / "tvm_ffi" / "lib"
    return found if (found / "libtvm_ffi.so").is_file() else None


def main() -> None:
    """Fetches it if it is not there."""
    if library_dir() is None:
        home().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home().parent) as scratch:
            platforms = [word for name in PLATFORMS for word in ("--platform", name)]
            wanted = f"{FFI}=={importlib.metadata.version(FFI)}"
            pip("download", wanted, "--no-deps", "--only-binary=:all:", "--python-version", "3.12",
                *platforms, "-d", scratch)  # fmt: skip
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(Path(scratch) / "unpacked")
            os.replace(Path(scratch) / "unpacked", home())
    print(home())


if __name__ == "__main__":
    main()
