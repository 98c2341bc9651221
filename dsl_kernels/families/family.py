"""The declaration of a family of kernels: ``Axis`` and ``Family``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..formats.registered import DEFAULT, EVERY, IN_16_BITS

REQUIRED: Any = object()  # "default" of an axis that every spec must give

Values = Mapping[str, Any]  # axis name -> value


@dataclass(frozen=True)
class Axis:
    """One thing in which variants of an op differ.

    Attributes:
        name: attribute of the spec.
        letters: what stands before the value in a variant's name; words need none.
        values: all that may be asked for; what is built by default is for the family to say.
        default: of specs that do not give it, or a function of the values of the axes before it;
            ``REQUIRED``: there is none.
        named: stands in every name; else only where it differs from the default, so that adding
            such an axis renames nothing.
    """

    name: str
    letters: str
    values: Sequence[Any]
    default: Any = REQUIRED
    named: bool = True

    def text(self, value: Any) -> str:
        """``value`` as it stands in a name."""
        return f"{self.letters}{value}"

    def default_of(self, values: Values) -> Any:
        """The default beside these values."""
        return self.default(values) if callable(self.default) else self.default

    def shown(self, values: Values) -> bool:
        """Return True if the name of a spec with these values shows this axis."""
        return self.named or values[self.name] != self.default_of(values)


ROW_AXES = ("pipeline", "row_tile", "cluster")  # which kernel, and its rows
HELPER, DECODE, MHA, PREFILL = "helper", "decode", "mha", "prefill"  # kinds that there are
ITEM_OVERHEAD = 6  # token tiles: prologue, epilogue and merge of what decodes


@dataclass(frozen=True)
class Family:
    """All variants of one op, and what hosts must know of it.

    Other packages read these attributes; they do not compare the op's name.  An object that is
    given as ``module:name`` lies in a package above this one, and is imported when it is wanted
    (``registry.named``).

    Attributes:
        op: first word of their names.
        axes: in the order of names.
        module: (arch, values) -> kernel module that builds it, None if there is none.
        points: arch -> values of the default matrix, module or not.
        kind: what the op is for: ``helper`` prepares or finishes what attention does and runs on
            every arch; ``decode``; ``mha``, dense prefill; ``prefill``, sparse; others are named
            alike.  Wheels can be made by kind.
        formats: cache formats that attention reads (``formats``); of helpers axis ``cache_dtype``
            has them.
        token_tile: (arch, values) -> tokens of a KV tile, the unit of its work list; None of an op
            that walks no work list.
        item_overhead: what a work tile of its work list costs beside its tiles, in tiles.
        everyday: values of the variants that everyday tests run; None: few that show each value of
            each axis (``codegen.matrix.sample``).
        rarely: values of variants that everyday tests leave to ``make prove``, where that is None.
        result_axis: axis that is the dtype of results, where there is such.
        counted_by: axes that part the op where built variants are counted (``snapmla info``).
        shown: arguments whose shapes a line of the log has; those that a variant lacks are left
            out.
        results: arguments that a call writes, which dumps keep; as ``shown``.
        workload: ``module:name`` of a ``snapmla.testing.workloads.call.Workload``, which knows how
            the op is called and what is right; empty: ``WORKLOAD`` of the file named after the op
            in ``snapmla/testing/workloads/``.
        reference: ``module:name`` of (spec, dumped call) -> (figures, whether they are right);
            empty where a repeated call is compared with its dump alone.
        relies_on: end of a source's name without which a variant is one of an older release, which
            takes the same arguments and does not do what hosts rely on; empty: any will do.
    """

    op: str
    axes: tuple[Axis, ...]
    module: Callable[[str, Values], str | None]
    points: Callable[[str], Iterator[Values]]
    kind: str = HELPER
    formats: Sequence[str] = ()
    token_tile: Callable[[str, Values], int] | None = None
    item_overhead: int = ITEM_OVERHEAD
    everyday: tuple[Values, ...] | None = None
    rarely: tuple[Values, ...] = ()
    result_axis: str = "out_dtype"
    counted_by: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    workload: str = ""
    reference: str = ""
    relies_on: str = ""

    @property
    def helper(self) -> bool:
        """True if the family is of kind ``helper``."""
        return self.kind == HELPER

    def axis(self, name: str) -> Axis | None:
        """The axis of that name, None if the op has none."""
        return next((a for a in self.axes if a.name == name), None)

    def changed(self, values: Values) -> int:
        """Number of axes, beside those of the rows, that have another value than their default."""
        axes = (axis for axis in self.axes if axis.name not in ROW_AXES)
        return sum(values[axis.name] != axis.default_of(values) for axis in axes)


def every(axes: tuple[Axis, ...]) -> Callable[[str], Iterator[Values]]:
    """Points of a family that builds every combination of its named axes, on every arch."""
    named = [a for a in axes if a.named]

    def points(_arch: str) -> Iterator[Values]:
        for values in itertools.product(*(a.values for a in named)):
            yield dict(zip((a.name for a in named), values))

    return points


def helper(
    op: str,
    folder: str,
    *axes: Axis,
    points: Callable[[str], Iterator[Values]] | None = None,
    **attributes: Any,
) -> Family:
    """``Family`` of an op that one module, named after the op, builds for every arch.

    Args:
        folder: folder of ``dsl_kernels`` that the module is in.
        points: default matrix, as in ``Family``; None: all combinations of the axes.
        attributes: others of ``Family``.
    """
    module = f"dsl_kernels.{folder}.{op}"
    return Family(op, axes, lambda _arch, _values: module, points or every(axes), **attributes)


OUT_DTYPE = Axis("out_dtype", "o", ("bf16", "f32"), "bf16")
IN_DTYPE = Axis("in_dtype", "x", ("bf16", "f16", "f32"), "bf16")
# Of rows that append_kv and quantize_q are given; "applied": their RoPE is.
ROPE_STYLE = Axis("rope_style", "", ("applied", "interleaved", "neox"), "applied", named=False)
COS_SIN_DTYPE = Axis("cos_sin_dtype", "cs", ("f32", "bf16", "f16"), "f32", named=False)
# How a paged cache stores tokens: a helper that takes not all formats has an axis of its own.
CACHE_DTYPE = Axis("cache_dtype", "kv", EVERY, DEFAULT, named=False)
ROWS = IN_16_BITS
