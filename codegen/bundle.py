"""``make bundle``: what a server without the compiler needs, in one directory and one archive.

    snapmla-<version>-<arch>-<flavour>/
        README.md, LICENSE, requirements.txt
        snapmla/                the host package, the reference included
        snapmla/variants/       <name>.so of every variant, bundle.json (all records)
        dsl_kernels/            spec, families, registry, records of caches; no device code
        include/snapmla/        a C header for each variant

PyTorch and apache-tvm-ffi are dependencies the server installs; nothing else comes from NVIDIA but
the driver.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import shutil
import tarfile
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from codegen import artifacts, cross, link, render
from codegen import compile as compiler
from codegen.artifacts import ROOT, VERSION, Record
from dsl_kernels.spec import VariantSpec

LIMIT = 75_000_000  # bytes, unpacked
RECORDS = "bundle.json"  # as snapmla.runtime.variants reads it
HOST_FILES = ("**/*.py", "data/*.json", "py.typed")  # of snapmla/
# what runs variants on the software GPU
NOT_PACKED = ("selfcheck.py", "installed.py", "on_card.py", "__main__.py")
SPEC_FILES = (
    "__init__.py",
    "py.typed",
    "arguments.py",
    "spec.py",
    "registry.py",
    "families/*.py",
    "formats/*.py",
    "blocks/__init__.py",
    "blocks/budget.py",
)
RUNTIME_NEEDS = ("torch", "apache-tvm-ffi", "numpy")


class BundleError(RuntimeError):
    """The bundle cannot be made; the message says what to do."""


@dataclass(frozen=True)
class Bundle:
    """A finished bundle: its directory, its archive, bytes unpacked, number of variants."""

    directory: Path
    archive: Path
    size: int
    variants: int


def requirements() -> list[str]:
    """Lines of requirements.txt: the project's own bounds for what the host package imports.

    Raises BundleError outside a checkout.
    """
    if not artifacts.is_checkout():
        raise BundleError(f"bundles are made from a source checkout, {ROOT} is none")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [d for d in project["dependencies"] if d.split(">")[0].split("=")[0] in RUNTIME_NEEDS]
    if len(found) != len(RUNTIME_NEEDS):
        raise BundleError(f"pyproject.toml: expected dependencies {RUNTIME_NEEDS}, found {found}")
    return found


def collect(
    specs: list[VariantSpec], variant_dir: Path, machine: str = "", native_dir: Path | None = None
) -> list[Record]:
    """Records of ``specs``, all up to date and linked.

    Args:
        machine: a key of ``cross.TARGETS``, for which ``variant_dir`` is; empty: this one.
        native_dir: the same variants of this machine, which those are held against.

    Raises BundleError that counts those that are not.
    """
    if link.identity() is None:
        raise BundleError(f"variants cannot be linked here: {link.refusal()}")
    if machine and native_dir is not None:
        target, native = cross.TARGETS[machine], native_dir
        found = {s.name: cross.up_to_date(s, native, variant_dir, target) for s in specs}
    else:
        found = {s.name: compiler.up_to_date(s, variant_dir, linked=True) for s in specs}
    stale = [name for name, record in found.items() if record is None]
    if stale or not found:
        arch = specs[0].arch if specs else "sm_90a"
        some = ", ".join(stale[:3]) + (", ..." if len(stale) > 3 else "")
        make = (
            f"python -m codegen cross --arch {arch}" if machine else f"make precompile ARCH={arch}"
        )
        raise BundleError(
            f"{len(stale)} of {len(found)} variants are missing or outdated in {variant_dir}"
            f"{' (' + some + ')' if some else ''}: run `{make}`"
        )
    return [record for record in found.values() if record is not None]


def make(specs: list[VariantSpec], variant_dir: Path, out_dir: Path) -> Bundle:
    """Packs ``specs`` from ``variant_dir`` into a directory and a .tar.gz under ``out_dir``.

    Both replace older ones of the same name only when they are complete.  Equal contents make equal
    archives, whenever and by whomever they are packed.

    Raises:
        BundleError: variants missing, stale, of several targets, or more than 75 MB in all; this is
            no checkout.
    """
    requirements()
    records = collect(specs, variant_dir)
    arch, flavour = target(records)
    name = f"snapmla-{VERSION}-{arch.replace('_', '')}-{flavour}"
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir, prefix=".bundle.") as tmp:
        root = Path(tmp, name)
        copy_host(root)
        variants, include = root / "snapmla" / "variants", root / "include" / "snapmla"
        copy_variants(variants, include, records, variant_dir)
        _papers(root, records, arch, flavour)
        size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        if size > LIMIT:
            raise BundleError(
                f"the bundle has {size:,} bytes, the limit is {LIMIT:,}: leave variants out with "
                "--filter"
            )
        packed = Path(tmp, f"{name}.tar.gz")
        _pack(root, packed)
        directory, archive = out_dir / name, out_dir / packed.name
        shutil.rmtree(directory, ignore_errors=True)
        root.rename(directory)
        packed.rename(archive)
    return Bundle(directory, archive, size, len(records))


def target(records: list[Record]) -> tuple[str, str]:
    """Arch and toolkit flavour of the records; BundleError if they are of several."""
    targets = {(r.spec["arch"], r.flavour) for r in records}
    if len(targets) != 1:
        raise BundleError(f"a bundle has one arch and toolkit, got {sorted(targets)}")
    return targets.pop()


def _pack(root: Path, archive: Path) -> None:
    """``root`` as .tar.gz, without times, owners and the packing machine's umask."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        member.mode = 0o755 if member.isdir() else 0o644
        return member

    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed,
        tarfile.open(mode="w", fileobj=packed) as tar,
    ):
        for path in sorted([root, *root.rglob("*")]):
            tar.add(path, path.relative_to(root.parent).as_posix(), recursive=False, filter=plain)


def copy_host(root: Path) -> None:
    """The host package below ``root``, and the names of variants without device code."""
    _copy(root, "snapmla", HOST_FILES)
    copy_names(root)


def copy_names(root: Path) -> None:
    """``dsl_kernels`` below ``root``, without device code: names of variants only."""
    _copy(root, "dsl_kernels", SPEC_FILES)


def _copy(root: Path, source: str, patterns: tuple[str, ...]) -> None:
    """Copies a package's files that match ``patterns`` to ``root``, but for ``NOT_PACKED``."""
    for pattern in patterns:
        for path in sorted((ROOT / source).glob(pattern)):
            if path.name not in NOT_PACKED:
                copied = root / path.relative_to(ROOT)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copied)


def copy_variants(folder: Path, include: Path, records: list[Record], variant_dir: Path) -> None:
    """Libraries and their records with checksums into ``folder``, headers into ``include``."""
    folder.mkdir(parents=True)
    include.mkdir(parents=True)
    listed = []
    for record in records:
        library = f"{record.name}.so"
        shutil.copyfile(variant_dir / library, folder / library)
        (include / f"{record.name}.h").write_text(render.header(record))
        entry = {k: v for k, v in dataclasses.asdict(record).items() if k not in artifacts.VOLATILE}
        entry["sha256"] = hashlib.sha256((folder / library).read_bytes()).hexdigest()
        listed.append(entry)
    text = json.dumps({"format": artifacts.FORMAT, "version": VERSION, "variants": listed})
    (folder / RECORDS).write_text(text + "\n")


def _papers(root: Path, records: list[Record], arch: str, flavour: str) -> None:
    """README, licence, requirements."""
    lines = requirements()
    (root / "requirements.txt").write_text("\n".join(lines) + "\n")
    shutil.copyfile(ROOT / "LICENSE", root / "LICENSE")
    ops: dict[str, int] = {}
    for record in records:
        ops[record.spec["op"]] = ops.get(record.spec["op"], 0) + 1
    (root / "README.md").write_text(
        render.text(
            "bundle.md.j2",
            version=VERSION,
            arch=arch,
            cuda=flavour.removeprefix("cu"),
            ops=ops,
            requirements=lines,
            dsl=records[0].dsl_version,
        )
    )
