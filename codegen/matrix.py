"""The variant matrix: axes, exclusion rules, count.

``points`` enumerates; ``exclusion`` gives the reason a point is not built, or None.  Rules that
need the compiler (``feasible`` of the kernel modules) come after those that do not, so that the
matrix can be listed on any machine.  ``sample_specs`` is the part of it that everyday tests run.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from codegen import closure
from dsl_kernels import registry
from dsl_kernels.spec import (
    ARCHS,
    AXES,
    OPS,
    PAGE_SIZES,
    PIPELINES,
    ROW_TILES,
    VariantSpec,
    decode_spec,
)

OUT_DTYPES = ("bf16", "f32")
IN_DTYPES = ("bf16", "f16", "f32")
INDEX_DTYPES = ("i32", "i64")
Q_MODES = ("token_head", "token")
FETCH_MODES = ("pages", "indices")


@dataclass(frozen=True)
class Point:
    """One point of the matrix; ``reason`` says why it is not built, None if it is."""

    spec: VariantSpec
    reason: str | None


def _helpers(arch: str) -> Iterator[VariantSpec]:
    """Everything that is not decode."""
    yield VariantSpec(op="plan_decode", arch=arch)
    for out in OUT_DTYPES:
        yield VariantSpec(op="merge", arch=arch, out_dtype=out)
    for dtype in IN_DTYPES:
        for index in INDEX_DTYPES:
            yield VariantSpec(op="append_kv", arch=arch, in_dtype=dtype, index_dtype=index)
        for mode in Q_MODES:
            yield VariantSpec(op="quantize_q", arch=arch, in_dtype=dtype, mode=mode)
        for mode in FETCH_MODES:
            yield VariantSpec(op="fetch_dequant", arch=arch, in_dtype=dtype, mode=mode)


def points(arch: str) -> Iterator[VariantSpec]:
    """All points of the default matrix for one arch, helpers first."""
    yield from _helpers(arch)
    for pipeline in PIPELINES:
        for row_tile in ROW_TILES:
            for page_size in PAGE_SIZES:
                for out in OUT_DTYPES:
                    yield decode_spec(pipeline, row_tile, page_size, out, arch)


def exclusion(spec: VariantSpec, *, ask_kernels: bool = True) -> str | None:
    """Reason that ``spec`` is left out of the default matrix, or None.

    Args:
        ask_kernels: also ask the kernel module's ``feasible``, which imports the compiler.
    """
    if not closure.has_source(spec):
        what = f"pipeline {spec.pipeline}" if spec.pipeline else spec.op
        return f"no kernel module for {what} on {spec.arch} yet"
    return registry.feasible(spec) if ask_kernels else None


def matrix(arch: str, pattern: str = "*", *, ask_kernels: bool = True) -> list[Point]:
    """Points whose name matches the glob ``pattern``, with their reasons."""
    return [
        Point(spec, exclusion(spec, ask_kernels=ask_kernels))
        for spec in points(arch)
        if fnmatch.fnmatchcase(spec.name, pattern)
    ]


def default_specs(arch: str, pattern: str = "*", *, ask_kernels: bool = True) -> list[VariantSpec]:
    """The variants that ``make precompile`` builds."""
    return [p.spec for p in matrix(arch, pattern, ask_kernels=ask_kernels) if p.reason is None]


def named(name: str) -> VariantSpec:
    """The variant of that name, whether the default matrix has it or not.

    Raises ValueError in one sentence: what is wrong with the name, and which names are close.
    """
    try:
        return VariantSpec.from_name(name)
    except ValueError as error:
        reason = str(error)
    targets = [arch.replace("_", "") for arch in ARCHS]
    begins = any(name == op or name.startswith(f"{op}_") for op in OPS)
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
ROW_AXES = ("pipeline", "row_tile", "cluster")  # which kernel, and its rows


def traits(spec: VariantSpec) -> set[Trait]:
    """What a test set must show of a variant: each axis' value, its pipeline with its rows."""
    found: set[Trait] = {(axis, getattr(spec, axis)) for axis in AXES[spec.op]}
    return found | {("pipeline and row_tile", spec.pipeline, spec.row_tile)}


def sample(specs: Iterable[VariantSpec]) -> list[VariantSpec]:
    """The test set of ``specs``, in their order: few variants, and every trait.

    All helper kernels, which compile in a second.  Of the decodes a greedy cover: first from those
    on 64-token pages with bf16 results, which most calls take, then from those that differ from
    that in one axis, then from all; of equals the first.
    """
    specs = list(specs)
    decodes = [spec for spec in specs if spec.op == "decode"]
    chosen = {spec for spec in specs if spec.op != "decode"}
    missing: set[Trait] = set().union(*map(traits, decodes))
    for most in (0, 1, len(AXES["decode"])):
        pool = [spec for spec in decodes if changed(spec) <= most]
        while pool and traits(best := max(pool, key=lambda s: len(traits(s) & missing))) & missing:
            chosen.add(best)
            missing -= traits(best)
    return [spec for spec in specs if spec in chosen]


def changed(spec: VariantSpec) -> int:
    """How many axes, beside those of the rows, have another value than their default."""
    default = {field.name: field.default for field in dataclasses.fields(spec)}
    axes = (axis for axis in AXES[spec.op] if axis not in ROW_AXES)
    return sum(getattr(spec, axis) != default[axis] for axis in axes)


def sample_specs(arch: str, *, ask_kernels: bool = True) -> list[VariantSpec]:
    """What ``make test`` builds and runs of one arch; ``make prove`` takes all."""
    return sample(default_specs(arch, ask_kernels=ask_kernels))
