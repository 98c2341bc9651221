"""Fetches releases of SGLang for ``tests/host/test_sglang.py``, which skips without them.

    python -m tests.support.fetch_sglang [RELEASE...]

As ``fetch_vllm`` does: a wheel (40 MB a release) is unpacked into the user's cache folder, beside
what SGLang imports but torch (of which 1 GB is triton); a run that was stopped leaves none.  What
SGLang imports for a GPU is not fetched: ``tests/support/shells.py`` stands for it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from snapmla import env
from tests.support import ROOT
from tests.support.fetch_vllm import pip

RELEASES = ("0.5.23",)
NEEDS = ROOT / "constraints" / "sglang.txt"
DEPENDENCIES = "dependencies"
# imported at the top of SGLang's modules, and only run on a GPU or by a server
ABSENT = (
    "IPython", "anthropic", "av", "blobfile", "compressed_tensors", "cutlass", "datasets",
    "decord", "deep_ep", "deep_gemm", "easydict", "flash_attn", "flash_mla", "flashinfer", "gguf",
    "humming", "interegular", "kernels", "mistral_common", "modelscope", "mooncake", "numba",
    "outlines", "pynvml", "quack", "sgl_kernel", "soundfile", "tiktoken", "tilelang", "timm",
    "torch_memory_saver", "torchao", "torchaudio", "torchvision", "xgrammar", "xxhash", "zstandard",
)  # fmt: skip


def home() -> Path:
    """Where releases are kept; ``SNAPMLA_SGLANG`` names another folder."""
    if os.environ.get("SNAPMLA_SGLANG"):
        return Path(os.environ["SNAPMLA_SGLANG"])
    return (env.cache_home() or Path(tempfile.gettempdir())) / "snapmla" / "sglang"


def path_of(release: str) -> list[Path] | None:
    """Folders for the module path, None if the release is not there."""
    found = [home() / release, home() / DEPENDENCIES]
    return found if all(folder.is_dir() for folder in found) else None


def fetch(release: str) -> None:
    """Unpacks one release."""
    with tempfile.TemporaryDirectory(dir=home()) as scratch:
        pip("download", f"sglang=={release}", "--no-deps", "--only-binary=:all:", "-d", scratch)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(scratch) / release)
        os.replace(Path(scratch) / release, home() / release)


def dependencies() -> None:
    """What SGLang imports, at the releases that were tried."""
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
