"""Packs a release of vLLM, and what it imports, for a GPU machine without network.

A fat binary holds a kernel for every architecture; what is not sm_90 is overwritten with zeros,
which xz packs to nothing: 300 MB become 31.  Offsets and sizes stay, so the libraries load as they
were.  Libraries that this study never calls stay out.
"""

from __future__ import annotations

import mmap
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from codegen.artifacts import ROOT, write_atomic

RELEASE = "0.26.0"
PYTHON = "3.12"
PLATFORMS = tuple(
    f"{name}_x86_64" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
)
NEEDS = ROOT / "constraints" / "vllm-gpu.txt"
KEEP = 90  # compute capability * 10
GROUP = "vllm.general_plugins"
# Headers of DeepGEMM stay: it compiles its kernels where they run.
LEFT_OUT = ("vllm-rs", "fmha_sm100/cutlass", "_qutlass_C", "_rust_tool_parser.abi3")
OF_A_PYTHON = re.compile(r"\.cpython-(\d)(\d+)")

# The driver's container format: a wrapper's magic, then entries of code.
MAGIC, HEADER = struct.pack("<I", 0xBA55ED50), struct.Struct("<HHQ")  # version, bytes, bytes behind
ENTRY, ARCH_AT = struct.Struct("<HHIQ"), 0x1C  # kind, attributes, header bytes, code bytes
CUBIN = 2  # kind: machine code


@dataclass(frozen=True)
class Code:
    """Kernels of one architecture in a fat binary.

    Attributes:
        begin, size: bytes of the library.
        arch: compute capability * 10.
        machine_code: and not PTX.
    """

    begin: int
    size: int
    arch: int
    machine_code: bool


def code_of(library: mmap.mmap) -> Iterator[Code]:
    """All device code in a library."""
    at = library.find(MAGIC)
    while at >= 0:
        version, header, behind = HEADER.unpack_from(library, at + len(MAGIC))
        entry, end = at + header, at + header + behind
        if version != 1 or header != len(MAGIC) + HEADER.size or end > len(library):
            end = at + len(MAGIC)  # the same four bytes by chance
        else:
            while entry < end:
                kind, _, skipped, size = ENTRY.unpack_from(library, entry)
                if not skipped:
                    break
                (arch,) = struct.unpack_from("<I", library, entry + ARCH_AT)
                yield Code(entry + skipped, size, arch, kind == CUBIN)
                entry += skipped + size
        at = library.find(MAGIC, end)


def prune(path: Path, keep: int = KEEP) -> int:
    """Zeroes the code of other architectures, in place; returns how many bytes stay."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as library:
        found = list(code_of(library))
        kept = [c for c in found if c.arch == keep and c.machine_code]
        for code in found:
            if code not in kept:
                library[code.begin : code.begin + code.size] = bytes(code.size)
        return sum(code.size for code in kept)


def wanted(name: str) -> bool:
    """True if a file of the release is brought."""
    version = OF_A_PYTHON.search(name)
    other = version is not None and ".".join(version.groups()) != PYTHON
    return not other and not any(word in name for word in LEFT_OUT)


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *words], check=True)


def download(folder: Path, *what: str) -> None:
    """Wheels for the GPU machine's Python."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    pip(
        "download", *what, "--no-deps", "--only-binary=:all:", "--python-version", PYTHON,
        *platforms, "-d", str(folder),
    )  # fmt: skip


def pack(wheel: Path, out: Path) -> None:
    """The release's package as ``out``, an xz-packed tar."""
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch, filter(wanted, archive.namelist()))
        for library in sorted(Path(scratch).rglob("*.so")):
            print(f"{library.name}: {prune(library) / 1e6:.1f} MB of kernels are kept")
        partial = out.with_name(out.name + ".partial")
        with tarfile.open(partial, "w:xz", preset=6) as archive:
            for each in sorted(Path(scratch).iterdir()):
                archive.add(each, each.name)
        partial.replace(out)


def bring(to: Path) -> None:
    """``to/vllm.tar.xz``, ``to/whl``, and what tells vLLM of the plugin in a checkout.

    The first two are left as they are if they are there.
    """
    whl, packed = to / "whl", to / "vllm.tar.xz"
    to.mkdir(parents=True, exist_ok=True)
    if not packed.exists():
        downloads = to / "download"
        if not list(downloads.glob("*.whl")):
            download(downloads, f"vllm=={RELEASE}")
        (wheel,) = downloads.glob("*.whl")
        pack(wheel, packed)
        shutil.rmtree(downloads)
    if not whl.exists():
        with tempfile.TemporaryDirectory(dir=to) as scratch:
            download(Path(scratch) / "whl", "-r", str(NEEDS))
            (Path(scratch) / "whl").replace(whl)
    described = to / "snapmla-0.dist-info"
    described.mkdir(exist_ok=True)
    write_atomic(described / "METADATA", "Metadata-Version: 2.1\nName: snapmla\nVersion: 0\n")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in points.items())]
    write_atomic(described / "entry_points.txt", "\n".join(lines) + "\n")
    total = sum(p.stat().st_size for p in to.rglob("*") if p.is_file())
    print(f"{to}: {total / 2**20:.1f} MiB")
