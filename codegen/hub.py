"""``python -m codegen hub``: a folder that Hugging Face's ``kernels`` loads.

    snapmla/build/tvm-ffi01-cu130-x86_64-linux/      what ``kernels`` finds
        metadata.json        id, version, what it needs, SHA-256 of every other file
        __init__.py, ...     the host package
        dsl_kernels/         names of variants, as in a bundle
        variants/            <name>.so of every variant, bundle.json
        LICENSE

Several versions of a kernel may be loaded into one process, under the names of their ids.  So
modules import one another relatively there, and operators and pytrees have the id as their
namespace: sources are rewritten on the way.  Adapters of engines, which engines import by name, and
the software GPU stay out.

The libraries know nothing of torch, so there is one folder for a CUDA major and a CPU, whatever
torch is there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path

from codegen import bundle, cross, wheels
from codegen.artifacts import ROOT
from dsl_kernels.spec import VariantSpec

NAME = "snapmla"
FRAMEWORK = "tvm-ffi01"  # of apache-tvm-ffi 0.1
CUDA = {"cu12": "cu126", "cu13": "cu130"}  # the first of a major that the folder's name may ask for
PACKAGES = (NAME, "dsl_kernels")
LEFT_OUT = ("integrations", "__main__.py", "selfcheck.py", "repro.py", "bundle.py")  # of snapmla/
_FROM = re.compile(rf"^(\s*)from ({'|'.join(PACKAGES)})((?:\.\w+)*) import ", re.MULTILINE)
_IMPORT = re.compile(rf"^(\s*)import {NAME}$", re.MULTILINE)
_NAMESPACES = (
    (re.compile(rf"\btorch\.ops\.{NAME}\b"), "torch.ops.{id}"),
    (re.compile(rf'^NAMESPACE = "{NAME}"$', re.MULTILINE), 'NAMESPACE = "{id}"'),
    (re.compile(rf'resources\.files\("{NAME}"\)'), 'resources.files("{id}")'),
    (re.compile(rf'serialized_type_name=f"{NAME}\.'), 'serialized_type_name=f"{id}.'),
)


def folder_name(flavour: str, machine: str) -> str:
    """Name of the folder where ``kernels`` looks for a build of a CUDA major for a CPU."""
    return f"{FRAMEWORK}-{CUDA[flavour]}-{machine}-linux"


def rewritten(source: str, depth: int, identity: str) -> str:
    """A module's text with relative imports, and operators in a namespace of their own.

    Args:
        depth: folders between the module and the package's root.
        identity: the kernel's id.
    """
    dots = "." * (depth + 1)

    def relative(match: re.Match[str]) -> str:
        indent, package, rest = match.groups()
        inner = "" if package == NAME else package
        return f"{indent}from {dots}{inner}{rest if inner else rest.removeprefix('.')} import "

    text = _FROM.sub(relative, source)
    root = f'{NAME} = __import__("sys").modules[__name__.partition(".")[0]]'
    text = _IMPORT.sub(lambda match: f"{match[1]}{root}", text)
    for pattern, wanted in _NAMESPACES:
        text = pattern.sub(wanted.format(id=identity), text)
    return text


def make(
    specs: list[VariantSpec], variant_dir: Path, out_dir: Path, version: int = 1,
    machine: str = "", native_dir: Path | None = None,
) -> Path:  # fmt: skip
    """Writes the folder of one build below ``out_dir/snapmla/build``, over an older one.

    Args:
        version: of the kernel on the Hub, 1 and up.
        machine, native_dir: as ``bundle.collect``.

    Raises:
        BundleError: variants missing, stale or of several targets; this is no checkout.
    """
    bundle.requirements()  # in a checkout only
    records = bundle.collect(specs, variant_dir, machine, native_dir)
    arch, flavour = bundle.target(records)
    cpu = cross.machine_of(records[0]) or wheels.platform.machine()
    digest = hashlib.sha256(wheels.sources_digest().encode())
    digest.update("\n".join(record.name for record in records).encode())
    identity = f"_{NAME}_{flavour}_{digest.hexdigest()[:10]}"
    builds = out_dir / NAME / "build"
    builds.mkdir(parents=True, exist_ok=True)
    final = builds / folder_name(flavour, cpu)
    with tempfile.TemporaryDirectory(dir=builds, prefix=".hub.") as tmp:
        root = Path(tmp, "build")
        _host(root, identity)
        bundle.copy_variants(root / "variants", Path(tmp, "include"), records, variant_dir)
        shutil.copyfile(ROOT / "LICENSE", root / "LICENSE")
        text = json.dumps(_metadata(root, identity, version, records[0].target or arch), indent=1)
        (root / "metadata.json").write_text(text + "\n")
        shutil.rmtree(final, ignore_errors=True)
        root.rename(final)
    return final


def _host(root: Path, identity: str) -> None:
    """The host package at ``root`` and names of variants below it, rewritten."""
    with tempfile.TemporaryDirectory() as tmp:
        bundle.copy_host(Path(tmp))
        shutil.copytree(Path(tmp, NAME), root)
        shutil.copytree(Path(tmp, "dsl_kernels"), root / "dsl_kernels")
    for name in LEFT_OUT:
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for path in root.rglob("*.py"):
        depth = len(path.relative_to(root).parts) - 1
        path.write_text(rewritten(path.read_text(), depth, identity))


def _metadata(root: Path, identity: str, version: int, arch: str) -> dict[str, object]:
    """Content of ``metadata.json``, which ``kernels`` reads first."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {
        "id": identity, "name": NAME, "version": version, "license": "Apache-2.0",
        "python-depends": ["tvm-ffi"],
        "backend": {"type": "cuda", "archs": [f"{arch[3:-2]}.{arch[-2:]}"]},
        "digest": {
            "algorithm": "sha256",
            "files": {
                path.relative_to(root).as_posix(): _sha256(path) for path in files
            },
        },
    }  # fmt: skip


def _sha256(path: Path) -> str:
    """Digest in base64, as ``kernels`` writes it."""
    return base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
