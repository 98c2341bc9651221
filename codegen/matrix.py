"""The variant matrix: what the families build by default, exclusion rules, count.

``points`` enumerates; ``exclusion`` gives the reason a point is not built, or None.  Rules that
need the compiler (``feasible`` of the kernel modules) come after those that do not, so that the
matrix can be listed on any machine.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

from codegen import closure
from dsl_kernels import registry
from dsl_kernels.families import FAMILIES
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
