"""Keys of ``make prove``'s steps: what is executed, and the sources that it comes from.

A step's *source key* is a digest of syntax trees without docstrings: of its kernels' sources, of
the packages that it runs, with its kind, seeds and counts.  It needs no object, and no edit of a
docstring, a comment or a command line changes it.  Where it did change, the outcome still counts
if what is *executed* is equal: the variants' stripped PTX (``codegen.digests``), the software GPU,
seeds and counts, and the launches that the software GPU receives (``snapmla.testing.launches``), in
place of the host's code.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from codegen import compile as compiler
from codegen import digests
from codegen.artifacts import ROOT
from dsl_kernels.spec import VariantSpec

RESULTS = ROOT / "profiles" / "results"
SUFFIXES = (".py", ".c", ".h", ".j2", ".npz", ".json")
# Packages of which what runs counts; of others, tests and scripts, every byte does.
STRIPPED = ("dsl_kernels", "snapmla", "softgpu")
BUILDERS = tuple(f"codegen/{name}.py" for name in ("compile", "abi", "audit", "fences"))
# Survivors are judged by these when a record is read.
EXPLANATIONS = "profiles/explained.py"
ROLES = "snapmla/testing/explanations.py"

Command = tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """A unit of work that passes or fails as a whole.

    Attributes:
        kind, what: of ``prove.KINDS``; a variant, a family of them, a test file.
        commands: arguments of this Python, run in turn at the checkout's root; all must return 0.
        key: its source key; an outcome of another key does not count.
        specs: names of the variants that it takes.
        counts: seeds and counts.
        reads: digest of the code that runs beside the variants and for which no launches stand.
        recorded: the last command takes ``--record`` and tells its launches.
        explained: of mutants, what may survive.
    """

    kind: str
    what: str
    commands: tuple[Command, ...]
    key: str
    specs: tuple[str, ...] = ()
    counts: str = ""
    reads: str = ""
    recorded: bool = False
    explained: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.what}"


def contents(path: Path) -> bytes:
    return path.read_bytes()


def _file(path: Path) -> str:
    """Digest of a file: of what runs, or of its bytes."""
    inside = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else ("",)
    suffix = path.suffix if inside[0] in STRIPPED else ""
    return digests.source_of(suffix, contents(path))


@functools.cache
def digest(*places: str, without: tuple[str, ...] = ()) -> str:
    """Of the names and contents of ``places``: files, and the code and data in folders, but for
    some files."""
    found: list[str] = []
    for place in map(ROOT.joinpath, places):
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.suffix not in SUFFIXES or RESULTS in path.parents:
                continue
            if all(path != ROOT / name for name in without):
                found += [str(path.relative_to(ROOT)), _file(path)]
    return digests.digest_of(*found)


@functools.cache
def source_key(spec: VariantSpec) -> str:
    """Of what a build of the variant is made from, docstrings and comments left out."""
    record = compiler.draft(spec)
    ours = [name for name in record.sources if (ROOT / name).is_file()]
    foreign = "" if ours == record.sources else record.source_hash  # somebody else's family
    identity = [record.spec, record.dsl_version, record.flavour, record.options, record.host_cpu]
    code = digest(*ours), _builders()
    return digests.digest_of(json.dumps(identity, sort_keys=True), *code, foreign)


def _builders() -> str:
    return digests.digest_of(*(digests.source(ROOT / name) for name in BUILDERS))


def forget() -> None:
    """Sources, and what is built of them, may have changed."""
    for kept in (digest, source_key, _fresh, _launches):
        kept.cache_clear()


def step(
    kind: str, what: str, *commands: Command, reads: Sequence[str], specs: Iterable[VariantSpec],
    without: tuple[str, ...] = (), host: Sequence[str] = (), counts: str = "",
    explained: tuple[str, ...] = (),
) -> Step:  # fmt: skip
    """A step.

    Args:
        reads, without: files and folders that it runs, but for some files.
        specs: variants that it takes.
        host: files and folders for which the launches that it records stand.
    """
    specs = list(specs)
    read = digest(*reads, without=without)
    beside = digest(*host, without=without)
    text = json.dumps([kind, what, counts, [source_key(spec) for spec in specs], read, beside])
    return Step(
        kind, what, commands, digests.digest_of(text), tuple(spec.name for spec in specs), counts,
        read, bool(host), explained,
    )  # fmt: skip


# ---------------------------------------------------------------------------- what is executed


def objects(step: Step, folder: Path) -> str | None:
    """Digest of the variants' PTX in a folder; None if one is missing."""
    try:
        found = [_ptx(path, path.stat().st_mtime_ns) for path in _ptx_files(step, folder)]
    except OSError:
        return None
    return digests.digest_of(*found)


def _ptx_files(step: Step, folder: Path) -> list[Path]:
    return [folder / f"{name}.ptx" for name in step.specs]


@functools.lru_cache(maxsize=4096)
def _ptx(path: Path, _stamp: int) -> str:
    return digests.ptx(path)


def fresh(step: Step, folder: Path) -> bool:
    """True if a folder has all of a step's variants, built from the sources and fit to ship."""
    return all(_fresh(name, folder) for name in step.specs)


@functools.lru_cache(maxsize=4096)
def _fresh(name: str, folder: Path) -> bool:
    return compiler.up_to_date(VariantSpec.from_name(name), folder, False) is not None


def executed(step: Step, folder: Path, launches: str = "") -> dict[str, str]:
    """What the step executes, as an outcome keeps it; without ``objects`` if they are missing.

    Args:
        launches: digest of what the software GPU received, of a step that records it.
    """
    found = {"counts": step.counts, "reads": step.reads}
    ptx = objects(step, folder)
    if ptx is not None:
        found["objects"] = ptx
    if launches:
        found["launches"] = launches
    return found


def launches(step: Step, folder: Path) -> str:
    """Digest of what the software GPU receives of a step now; empty if none is recorded.

    Raises VariantError if a variant is missing.
    """
    return _launches(step.what, folder) if step.recorded else ""


@functools.lru_cache(maxsize=4096)
def _launches(name: str, folder: Path) -> str:
    from snapmla.testing import launches as received  # torch, which listing does not need

    return received.digest(VariantSpec.from_name(name), folder)


def same(step: Step, before: dict[str, str], folder: Path) -> str:
    """Reason why an outcome that executed ``before`` does not count; empty if it does."""
    if not fresh(step, folder):
        return "not built from these sources"
    now = executed(step, folder)
    words = {"counts": "seeds or counts", "reads": "code beside it", "objects": "PTX"}
    for part, word in words.items():
        if part not in before:
            return f"{word}: not recorded"
        if now.get(part) != before[part]:
            return f"other {word}"
    if step.recorded and launches(step, folder) != before.get("launches"):
        return "other launches"
    return ""
