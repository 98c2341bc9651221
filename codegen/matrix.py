"""The variant matrix: axes, exclusion rules, count.

``points`` enumerates; ``exclusion`` gives the reason a point is not built, or None.  Rules that
need the compiler (``feasible`` of the kernel modules) come after those that do not, so that the
matrix can be listed on any machine.  ``sample_specs`` is the part of it that everyday tests run.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from codegen import closure
from dsl_kernels import registry
from dsl_kernels.spec import AXES, PAGE_SIZES, PIPELINES, ROW_TILES, VariantSpec, decode_spec

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


# ---------------------------------------------------------------------------- the test set


Trait = tuple[object, ...]


def traits(spec: VariantSpec) -> set[Trait]:
    """What a test set must show of a variant: its op, each axis' value, its pipeline and rows."""
    found: set[Trait] = {(spec.op,)}
    found |= {(spec.op, axis, getattr(spec, axis)) for axis in AXES[spec.op]}
    if spec.op == "decode":
        found.add((spec.op, "pipeline and row_tile", spec.pipeline, spec.row_tile))
    return found


def cover(specs: Iterable[VariantSpec]) -> list[VariantSpec]:
    """Few variants that show every trait of ``specs``, greedily, in the order of ``specs``.

    The one that shows most new traits comes next; of equals the one whose values are most often an
    axis' default (64-token pages, bf16), which is what most calls take, then the first.
    """
    left = list(specs)
    missing: set[Trait] = set().union(*map(traits, left))
    chosen: set[VariantSpec] = set()
    while missing:
        best = max(left, key=lambda s: (len(traits(s) & missing), _defaults(s)))
        chosen.add(best)
        missing -= traits(best)
    return [spec for spec in left if spec in chosen]


def _defaults(spec: VariantSpec) -> int:
    """How many axes have their default value."""
    fields = {f.name: f.default for f in dataclasses.fields(spec)}
    return sum(getattr(spec, axis) == fields[axis] for axis in AXES[spec.op])


def sample_specs(arch: str, pattern: str = "*", *, ask_kernels: bool = True) -> list[VariantSpec]:
    """The test set of one arch, what ``make test`` builds and runs: ``cover`` of the matrix."""
    return [
        spec
        for spec in cover(default_specs(arch, ask_kernels=ask_kernels))
        if fnmatch.fnmatchcase(spec.name, pattern)
    ]
