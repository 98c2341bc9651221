"""The variant matrix: axes, exclusion rules, count.

``points`` enumerates; ``exclusion`` gives the reason a point is not built, or None.  Rules that
need the compiler (``feasible`` of the kernel modules) come after those that do not, so that the
matrix can be listed on any machine.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from codegen import closure
from dsl_kernels import registry
from dsl_kernels.spec import ARCHS, OPS, PAGE_SIZES, PIPELINES, ROW_TILES, VariantSpec, decode_spec

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
