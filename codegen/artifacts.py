"""Built variants on disk: which files there are, and writing them.

A directory of variants holds, for each ``VariantSpec``,

    <name>.o      exported object: host stub (checks, TMA descriptors, launch) + embedded cubin
    <name>.ptx    the PTX of the same compile, with line info; softgpu interprets it
    <name>.so     the object linked so that tvm_ffi can load it (if a C compiler was there)
    <name>.json   the record below; written last, so its presence means the others are complete
    <name>.log    compiler output

and ``manifest.json``, all records in one file, without what differs from build to build.  A record
has the checksums of the other files and its own: damage is seen by whoever reads it.
``.locks`` holds lock files: one process at a time builds a variant, one writes the manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import runpy
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from dsl_kernels.spec import VariantSpec

FORMAT = 4
MANIFEST = "manifest.json"
ENV_DIR = "SNAPMLA_VARIANT_DIR"
VOLATILE = ("compile_seconds", "checksums")  # fields that the manifest leaves out
SUFFIXES = ("o", "ptx", "so")  # of the files that have a checksum in the record
ROOT = Path(__file__).resolve().parent.parent


VERSION: str = runpy.run_path(str(ROOT / "snapmla" / "_version.py"))["__version__"]


def is_checkout() -> bool:
    """True if this package runs from a source checkout, not from where pip put it."""
    return (ROOT / "pyproject.toml").is_file()


def default_dir() -> Path:
    """First folder that the runtime searches: ``snapmla.runtime.env.compile_dir()``, without torch.

    ``$SNAPMLA_VARIANT_DIR``, else ``build/variants`` of a checkout, else the user's cache.
    Raises RuntimeError that says what to set if there is none of these.
    """
    if os.environ.get(ENV_DIR):
        return Path(os.environ[ENV_DIR])
    if is_checkout():
        return ROOT / "build" / "variants"
    try:
        cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise RuntimeError(f"this user has no home directory: set {ENV_DIR}") from None
    return Path(cache_home) / "snapmla" / VERSION / "variants"


@dataclass
class Record:
    """Everything known about one built variant; ``<name>.json`` is this as JSON.

    Register counts are per thread, shared memory in bytes per CTA.

    Attributes:
        name, symbol: of the spec; ``symbol`` is the exported function.
        spec: the spec's fields.
        key: hash of spec, sources, compiler version and options; equal key means up to date.
        source_hash, sources: content hash of the kernel's import closure within dsl_kernels.
        dsl_version, flavour: nvidia-cutlass-dsl version; toolkit flavour (``cu12``, ``cu13``).
        options: compile options.
        target: what the cubin was assembled for; cards that load it: ``dsl_kernels.families``.
        host_cpu: what the host half's instructions are limited to, empty: the building machine's.
        arguments: of the exported function, see ``codegen.abi``.
        registers: at launch, as ptxas assigned them: of the kernel that has most.
        kernel_registers: the same by kernel; a decode variant has its merge beside it.
        launch_registers: of a CTA, all threads: of the kernel that wants most.
        warpgroup_registers: values of the setmaxnreg instructions, in program order.
        wrong_way: setmaxnreg that would raise a thread's registers to fewer, or lower them to more.
        late_writes: WGMMAs whose registers are written behind their fence, a sentence each.
        barrier_counts: arrivals of mbarrier.init -> number of barriers initialised so.
        tmem_columns: of tensor memory that are allocated.
        declared: the kernel module's budget (threads, registers per warpgroup, barrier_counts,
            smem, tmem_columns, opcodes, under_softmax), which the audit holds against the above;
            None where there is none.
        shared_plan: [name, offset] of the arrays in dynamic shared memory, in order of offset.
        sass: instruction count by base opcode.
        amid_mmas: the same between the first and the last MMA of the loop that computes softmax,
            and in that the MMAs; empty where no loop has both.
        host_beyond: instructions of the host half that ``host_cpu`` lacks; None: not looked.
        link: ``codegen.link.identity()`` of the library, None if it was not linked.
        checksums: SHA-256 of the files that there are, by suffix.
    """

    name: str
    symbol: str
    spec: dict[str, Any]
    key: str
    source_hash: str
    sources: list[str]
    dsl_version: str
    flavour: str
    options: str
    host_cpu: str = ""
    target: str = ""
    arguments: list[dict[str, Any]] = field(default_factory=list)
    ptx_version: str = ""
    threads: int = 0
    registers: int = 0
    kernel_registers: dict[str, int] = field(default_factory=dict)
    launch_registers: int = 0
    barriers: int = 0
    stack_frame: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    static_smem: int = 0
    dynamic_smem: int | None = None
    warpgroup_registers: list[int] = field(default_factory=list)
    wrong_way: list[str] = field(default_factory=list)
    late_writes: list[str] = field(default_factory=list)
    barrier_counts: dict[str, int] = field(default_factory=dict)
    tmem_columns: int = 0
    declared: dict[str, Any] | None = None
    shared_plan: list[list[Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sass: dict[str, int] = field(default_factory=dict)
    amid_mmas: dict[str, int] = field(default_factory=dict)
    host_beyond: int | None = None
    compile_seconds: float = 0.0
    link: str | None = None
    checksums: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def instructions(self) -> int:
        """SASS instructions in the kernel."""
        return sum(self.sass.values())

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """The record at ``path``; None if missing, damaged or of another format."""
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            return None
        if "digest" in data and data.pop("digest") != digest(data):
            return None
        names = {f.name for f in dataclasses.fields(cls)}
        try:
            return cls(**{k: v for k, v in data.items() if k in names})
        except TypeError:
            return None

    def to_json(self) -> str:
        data = dataclasses.asdict(self)
        return json.dumps({**data, "digest": digest(data)}, indent=1, sort_keys=True) + "\n"


def digest(record: dict[str, Any]) -> str:
    """SHA-256 of a record's contents.  ``snapmla.runtime.variants`` has a copy of this."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def paths(out_dir: Path, spec: VariantSpec) -> dict[str, Path]:
    """Suffix (without the dot) to path."""
    return {s: out_dir / f"{spec.name}.{s}" for s in ("o", "ptx", "so", "json", "log")}


def write_atomic(path: Path, data: bytes | str) -> None:
    """Writes ``path`` so that readers see the old content or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data.encode() if isinstance(data, str) else data)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(tmp, 0o644)
        os.replace(tmp, path)
    except BaseException:
        Path(tmp).unlink(missing_ok=True)
        raise


def _checksum(path: Path) -> str | None:
    """SHA-256 of a file, None where there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def finish(out_dir: Path, record: Record) -> None:
    """Writes the record of a variant whose other files are in place."""
    sums = {suffix: _checksum(out_dir / f"{record.name}.{suffix}") for suffix in SUFFIXES}
    record.checksums = {suffix: found for suffix, found in sums.items() if found is not None}
    write_atomic(out_dir / f"{record.name}.json", record.to_json())


def intact(out_dir: Path, record: Record, *suffixes: str) -> bool:
    """True if these files of a variant are there, and as they were built."""
    return all(
        suffix in record.checksums
        and _checksum(out_dir / f"{record.name}.{suffix}") == record.checksums[suffix]
        for suffix in suffixes
    )


def records(out_dir: Path) -> Iterator[Record]:
    """Readable records of a directory, by name."""
    for path in sorted(out_dir.glob("*.json")):
        if path.name != MANIFEST and (record := Record.read(path)) is not None:
            yield record


@contextlib.contextmanager
def lock(out_dir: Path, name: str) -> Iterator[None]:
    """Held by one process at a time; the system frees it when the process dies.

    What a process that died left of ``name``'s files (their temporary names begin so) is removed.
    """
    folder = out_dir / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{name}.lock"):
        for left in out_dir.glob(f".{name}.*"):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
        yield


def manifest_text(out_dir: Path) -> str:
    """Text of ``manifest.json`` for a directory; it depends on sources and options alone."""
    found = [dataclasses.asdict(r) for r in records(out_dir)]
    for record in found:
        for name in VOLATILE:
            del record[name]
    return json.dumps({"format": FORMAT, "variants": found}, indent=1, sort_keys=True) + "\n"


def write_manifest(out_dir: Path) -> None:
    """Rewrites ``manifest.json`` from the records."""
    with lock(out_dir, "manifest"):
        write_atomic(out_dir / MANIFEST, manifest_text(out_dir))
