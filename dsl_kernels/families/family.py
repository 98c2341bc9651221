"""What a family of kernels declares."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

REQUIRED: Any = object()  # "default" of an axis that every spec must give

Values = Mapping[str, Any]  # axis name -> value


@dataclass(frozen=True)
class Axis:
    """One thing in which variants of an op differ.

    Attributes:
        name: attribute of the spec.
        letters: what stands before the value in a variant's name; words need none.
        values: all that may be asked for; what is built by default is for the family to say.
        default: of specs that do not give it; a function is asked with the values of the axes
            before it; ``REQUIRED``: there is none.
        named: stands in every name; else only where it differs from the default, so that adding
            such an axis renames nothing.
    """

    name: str
    letters: str
    values: tuple[Any, ...]
    default: Any = REQUIRED
    named: bool = True

    def text(self, value: Any) -> str:
        """``value`` as it stands in a name."""
        return f"{self.letters}{value}"

    def default_of(self, values: Values) -> Any:
        """The default beside these values."""
        return self.default(values) if callable(self.default) else self.default

    def shown(self, values: Values) -> bool:
        """Whether a spec with these values names this one."""
        return self.named or values[self.name] != self.default_of(values)


@dataclass(frozen=True)
class Family:
    """All variants of one op.

    Attributes:
        op: first word of their names.
        axes: in the order of names.
        module: (arch, values) -> kernel module that builds it, None if there is none.
        points: arch -> values of the default matrix, module or not.
        helper: prepares or finishes what the attention kernels do; runs on every arch.
        token_tile: (arch, values) -> tokens of a KV tile, the unit of its work list; None of an op
            that walks no work list.
        everyday: values of the variants that everyday tests run; None: few that show each value of
            each axis (``codegen.matrix.sample``).
    """

    op: str
    axes: tuple[Axis, ...]
    module: Callable[[str, Values], str | None]
    points: Callable[[str], Iterator[Values]]
    helper: bool = True
    token_tile: Callable[[str, Values], int] | None = None
    everyday: tuple[Values, ...] | None = None

    def axis(self, name: str) -> Axis | None:
        """The axis of that name, None if the op has none."""
        return next((a for a in self.axes if a.name == name), None)


def every(axes: tuple[Axis, ...]) -> Callable[[str], Iterator[Values]]:
    """Points of a family that builds every combination of its named axes, on every arch."""
    named = [a for a in axes if a.named]

    def points(_arch: str) -> Iterator[Values]:
        for values in itertools.product(*(a.values for a in named)):
            yield dict(zip((a.name for a in named), values))

    return points


def helper(op: str, *axes: Axis, points: Callable[[str], Iterator[Values]] | None = None) -> Family:
    """An op that one module in ``smxx`` builds, for every arch; all combinations if not told."""
    module = f"dsl_kernels.smxx.{op}"
    return Family(op, axes, lambda _arch, _values: module, points or every(axes))


OUT_DTYPE = Axis("out_dtype", "o", ("bf16", "f32"), "bf16")
IN_DTYPE = Axis("in_dtype", "x", ("bf16", "f16", "f32"), "bf16")
# Of rows that append_kv and quantize_q are given; "applied": their RoPE is.
ROPE_STYLE = Axis("rope_style", "", ("applied", "interleaved", "neox"), "applied", named=False)
COS_SIN_DTYPE = Axis("cos_sin_dtype", "cs", ("f32", "bf16", "f16"), "f32", named=False)
# What a paged cache holds: e4m3 content with a scale a token, or rows of 16 bits as they are.
CACHE_DTYPE = Axis("cache_dtype", "kv", ("fp8", "bf16", "f16"), "fp8", named=False)
ROWS = ("bf16", "f16")  # the values of ``CACHE_DTYPE`` that are rows of 16 bits
