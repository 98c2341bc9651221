"""The variant matrix: axes, exclusion rules, count.

``points`` enumerates; ``exclusion`` gives the reason a point is not built, or None.  Rules that
need the compiler (``feasible`` of the kernel modules) come after those that do not, so that the
matrix can be listed on any machine.  ``sample_specs`` is the part of it that everyday tests run.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from codegen import closure
from dsl_kernels import registry
from dsl_kernels.families import ARCHS, FAMILIES
from dsl_kernels.families.family import ROW_AXES, Values
from dsl_kernels.spec import VariantSpec


@dataclass(frozen=True)
class Point:
    """One point of the matrix; ``reason`` says why it is not built, None if it is."""

    spec: VariantSpec
    reason: str | None


def points(arch: str) -> Iterator[VariantSpec]:
    """All points of the default matrix for one arch, family by family."""
    for op, family in FAMILIES.items():
        for values in family.points(arch):
            yield VariantSpec(op=op, arch=arch, **values)


def exclusion(spec: VariantSpec, *, ask_kernels: bool = True) -> str | None:
    """Reason that ``spec`` is left out of the default matrix, or None.

    Args:
        ask_kernels: also ask the kernel module's ``feasible``, which imports the compiler.
    """
    if not closure.has_source(spec):
        what = dict(spec.values).get("pipeline", spec.op)
        return f"no kernel module for {what} on {spec.arch} yet"
    return registry.feasible(spec) if ask_kernels else None


def globs(pattern: str) -> list[str]:
    """The parts of a filter: globs over variant names, separated by commas or spaces."""
    return [part for part in re.split(r"[,\s]+", pattern) if part]


def _fits(spec: VariantSpec, glob: str) -> bool:
    """True if a name matches, with its architecture at the end or without."""
    return any(fnmatch.fnmatchcase(n, glob) for n in (spec.name, spec.name.rpartition("_")[0]))


def _whole(arch: str, name: str) -> VariantSpec | None:
    """The variant of an architecture that a part of a filter spells out, None if it is a glob."""
    for text in (name, f"{name}_{arch.replace('_', '')}"):
        try:
            spec = VariantSpec.from_name(text)
        except ValueError:
            continue
        return spec if spec.arch == arch else None
    return None


def selected(arch: str, pattern: str) -> tuple[list[VariantSpec], list[str]]:
    """(variants that a filter names, parts of it that name nothing).

    A name that is spelled out counts whether the default matrix has it or not.
    """
    parts, known = globs(pattern), list(points(arch))
    found = [spec for spec in known if any(_fits(spec, part) for part in parts)]
    idle = [part for part in parts if not any(_fits(spec, part) for spec in known)]
    more = {part: spec for part in idle if (spec := _whole(arch, part)) is not None}
    return [*found, *dict.fromkeys(more.values())], [part for part in idle if part not in more]


def no_match(arch: str, pattern: str) -> str | None:
    """Sentence about parts of a filter that match nothing, with close names; None if all match.

    A filter without parts gets a sentence, too.
    """
    _, idle = selected(arch, pattern)
    if globs(pattern) and not idle:
        return None
    close = did_you_mean(idle[0], [spec.name for spec in points(arch)]) if idle else ""
    names = " or ".join(map(repr, idle or [pattern]))
    return f"no variant of {arch} matches {names} (`make matrix` lists them){close}"


def kinds() -> tuple[str, ...]:
    """Kinds of the families that there are (``Family.kind``)."""
    return tuple(dict.fromkeys(family.kind for family in FAMILIES.values()))


def matrix(
    arch: str, pattern: str = "*", *, kind: str = "", ask_kernels: bool = True
) -> list[Point]:
    """Points that a filter names, with their reasons.

    Args:
        pattern: globs over names, separated by commas or spaces (see ``selected``).
        kind: of families that count; empty: all.
    """
    specs, _ = selected(arch, pattern)
    specs = [spec for spec in specs if kind in ("", spec.family.kind)]
    return [Point(spec, exclusion(spec, ask_kernels=ask_kernels)) for spec in specs]


def default_specs(
    arch: str, pattern: str = "*", *, kind: str = "", ask_kernels: bool = True
) -> list[VariantSpec]:
    """The variants that ``make precompile`` builds, of one kind or of all."""
    found = matrix(arch, pattern, kind=kind, ask_kernels=ask_kernels)
    return [p.spec for p in found if p.reason is None]


def named(name: str) -> VariantSpec:
    """The variant of that name, whether the default matrix has it or not.

    Raises ValueError in one sentence: what is wrong with the name, and which names are close.
    """
    try:
        return VariantSpec.from_name(name)
    except ValueError as error:
        reason = str(error)
    targets = [arch.replace("_", "") for arch in ARCHS]
    begins = any(name == op or name.startswith(f"{op}_") for op in FAMILIES)
    if begins and name.rpartition("_")[2] not in targets:
        reason = f"variant name {name!r}: expected a target at its end, _{' or _'.join(targets)}"
    if "did you mean" in reason:
        raise ValueError(reason)
    known = [s.name for arch in ARCHS for s in default_specs(arch, ask_kernels=False)]
    raise ValueError(reason + did_you_mean(name, known))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean A or B?`` of the known variant names that are close, or nothing."""
    known = list(known)
    whole = [k for k in known if k.rpartition("_")[0] == name]  # only the target is missing
    close = whole or difflib.get_close_matches(name, known, 3)
    close = close or [k for k in known if name and k.startswith(f"{name}_")][:3]
    return f"; did you mean {' or '.join(close)}?" if close else ""


# ---------------------------------------------------------------------------- the test set

Trait = tuple[object, ...]


def traits(spec: VariantSpec) -> set[Trait]:
    """Traits of a variant that a test set covers: each axis' value, its pipeline with its rows."""
    rows = tuple(value for axis, value in spec.values if axis in ROW_AXES)
    return {*spec.values, ("rows", *rows)}


def sample(specs: Iterable[VariantSpec], *, thorough: bool = False) -> list[VariantSpec]:
    """The test set of ``specs``, in their order: few variants, and every trait.

    All helper kernels of SM90 whose unnamed axes have their defaults, which compile in a second,
    of families that declare no ``everyday``.  Of its others (those with RoPE), and of each other
    family, a greedy cover: first from variants of default values (64-token pages, bf16 results),
    which most calls take, then from those that differ from that in one axis, then from all; of
    equals the first.  A family that declares its ``everyday`` variants has those instead, and those
    are left out that it declares as ``rarely``.  SM100's helper kernels are of the same sources, or
    differ in their MMAs alone: one an op.  If the set is to be ``thorough``, the last three rules
    do not hold.
    """
    specs = list(specs)
    chosen = {
        spec
        for spec in specs
        if spec.family.helper and spec.arch == "sm_90a" and not _unusual(spec)
        if spec.family.everyday is None
    }
    rest = [spec for spec in specs if spec not in chosen]
    for op in dict.fromkeys(spec.op for spec in rest):
        of_op = [spec for spec in rest if spec.op == op]
        chosen |= _cover(of_op) if thorough else _everyday(of_op)
    return [spec for spec in specs if spec in chosen]


def _everyday(specs: list[VariantSpec]) -> set[VariantSpec]:
    """Chooses the variants of one op that everyday tests run."""
    family = specs[0].family
    declared = [] if family.everyday is None else _declared(specs, family.everyday)
    if family.helper and specs[0].arch != "sm_90a":
        return {min(declared or specs, key=changed)}
    if declared:
        return set(declared)
    return _cover([spec for spec in specs if not _has(spec, family.rarely)])


def _declared(specs: list[VariantSpec], everyday: tuple[Values, ...]) -> list[VariantSpec]:
    """Variants that have the values of an entry of ``everyday``; a cover if there are none."""
    found = [spec for spec in specs if _has(spec, everyday)]
    cover = set() if found else _cover(specs)
    return found or [spec for spec in specs if spec in cover]


def _has(spec: VariantSpec, some: tuple[Values, ...]) -> bool:
    """True if a variant has the values of one of ``some``."""
    return any(values.items() <= dict(spec.values).items() for values in some)


def _unusual(spec: VariantSpec) -> bool:
    """True if a name spells an axis that most leave out."""
    values = dict(spec.values)
    return any(axis.shown(values) for axis in spec.family.axes if not axis.named)


def _cover(specs: list[VariantSpec]) -> set[VariantSpec]:
    """Few variants of one family with all its traits."""
    chosen: set[VariantSpec] = set()
    missing: set[Trait] = set().union(*map(traits, specs))
    for most in (0, 1, len(specs[0].values)):
        pool = [spec for spec in specs if changed(spec) <= most]
        while pool and traits(best := max(pool, key=lambda s: len(traits(s) & missing))) & missing:
            chosen.add(best)
            missing -= traits(best)
    return chosen


def changed(spec: VariantSpec) -> int:
    """Number of axes, beside those of the rows, that have another value than their default."""
    return spec.family.changed(dict(spec.values))


def sample_specs(arch: str, *, ask_kernels: bool = True) -> list[VariantSpec]:
    """Variants of one arch that ``make test`` builds and runs; ``make prove`` takes all."""
    return sample(default_specs(arch, ask_kernels=ask_kernels))
