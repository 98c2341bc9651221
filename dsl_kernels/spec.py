"""``VariantSpec``: the one noun of the project.

A spec names one compiled kernel.  Object files, exported symbols, test ids, benchmark labels,
compile keys and ncu scripts all derive from it, so a name seen in one place can be pasted into any
other.  The op's family (``families/``) declares in what its variants may differ; this module turns
declarations into specs and names.  It needs the standard library alone: hosts without the compiler
read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .families import ARCHS, FAMILIES, FORMATS, Axis, Family
from .families.family import CACHE_DTYPE, REQUIRED
from .formats.format import Format

PREFIX = "snapmla_"


@dataclass(frozen=True, init=False, repr=False)
class VariantSpec:
    """One kernel instance: an op, an arch, and a value of each axis of the op's family.

    Values are attributes: ``VariantSpec(op="decode", pipeline="etap").row_tile`` is 64.

    Attributes:
        op: which family.
        arch: compilation target.
        values: (axis, value) of all the family's axes, in the family's order.

    Raises:
        ValueError: an unknown op, arch or axis, a value that the axis does not have, or none where
            the axis needs one.
    """

    op: str
    arch: str
    values: tuple[tuple[str, Any], ...]
    _by_name: dict[str, Any] = field(compare=False)

    def __init__(self, *, op: str, arch: str = "sm_90a", **given: Any) -> None:
        if op not in FAMILIES:
            raise ValueError(f"op: expected one of {tuple(FAMILIES)}, got {op!r}")
        if arch not in ARCHS:
            raise ValueError(f"arch: expected one of {ARCHS}, got {arch!r}")
        family = FAMILIES[op]
        for name, value in given.items():
            if family.axis(name) is None:
                raise ValueError(f"{name}: op {op!r} has no such axis, got {value!r}")
        values: dict[str, Any] = {}
        for axis in family.axes:
            values[axis.name] = _value(op, axis, given.get(axis.name, axis.default_of(values)))
        for name, value in (
            ("op", op), ("arch", arch), ("values", tuple(values.items())), ("_by_name", values),
        ):  # fmt: skip
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._by_name:
            raise AttributeError(f"op {self.op!r} has no axis {name!r}")
        return self._by_name[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return VariantSpec.from_name, (self.name,)

    def __repr__(self) -> str:
        return f"VariantSpec({self.name})"

    @property
    def family(self) -> Family:
        """Declaration of the op's variants: axes, modules and the rest that they share."""
        return FAMILIES[self.op]

    @property
    def name(self) -> str:
        """Short unique name, such as ``decode_etap_r64_p64_obf16_sm90a``.

        Always-named axes stand in it; the others where they differ from the default.
        """
        axes = (a.text(self._by_name[a.name]) for a in self.family.axes if a.shown(self._by_name))
        return "_".join([self.op, *axes, self.arch.replace("_", "")])

    @property
    def symbol(self) -> str:
        """The exported function's C name."""
        return PREFIX + self.name

    @property
    def token_tile(self) -> int:
        """Tokens of a KV tile, in which plans for this kernel count.

        Raises:
            ValueError: the op walks no work list, or no kernel of these values exists.
        """
        family, values = FAMILIES[self.op], self._by_name
        if family.token_tile is None or family.module(self.arch, values) is None:
            raise ValueError(f"{self.name}: no kernel that walks a work list")
        return family.token_tile(self.arch, values)

    @property
    def result_dtype(self) -> str:
        """Dtype of results, an axis of its own or that of everything; AttributeError without."""
        return getattr(self, self.family.result_axis)

    @property
    def format(self) -> Format | None:
        """Format of the cache that the op reads or writes; None if the op has no axis for that.

        The format's source counts as one of the kernel's: kernel modules take the format from here.
        """
        return FORMATS.get(self._by_name.get(CACHE_DTYPE.name, ""))

    def fields(self) -> dict[str, Any]:
        """op, arch and the values, for records; a default that no name shows is left out, so that a
        new axis changes no record."""
        shown = [a.name for a in self.family.axes if a.shown(self._by_name)]
        return {"op": self.op, "arch": self.arch, **{n: self._by_name[n] for n in shown}}

    def replace(self, **changes: Any) -> VariantSpec:
        """The same spec with other values (or arch); what was a default stays one."""
        return VariantSpec(**{**self.fields(), **changes})

    @classmethod
    def from_name(cls, name: str) -> VariantSpec:
        """Inverse of ``name``.  Raises ValueError that says which part was not understood."""
        ops = sorted(FAMILIES, key=len, reverse=True)
        op = next((o for o in ops if name.startswith(o + "_")), None)
        if op is None:
            known = ", ".join(sorted(FAMILIES))
            raise ValueError(f"variant name {name!r}: expected to start with one of {known}")
        rest = name[len(op) + 1 :]
        given: dict[str, Any] = {"op": op}
        for axis in FAMILIES[op].axes:
            found = next((v for v in _longest_first(axis) if _leads(rest, axis.text(v))), None)
            if found is not None:
                given[axis.name] = found
                rest = rest[len(axis.text(found)) + 1 :]
            elif axis.named:
                known = ", ".join(axis.text(v) for v in axis.values)
                raise ValueError(
                    f"variant name {name!r}: {axis.name}: expected one of {known} at {rest!r}"
                )
        arch = next((a for a in ARCHS if a.replace("_", "") == rest), None)
        if arch is None:
            known = ", ".join(a.replace("_", "") for a in ARCHS)
            raise ValueError(f"variant name {name!r}: expected {known} at its end, got {rest!r}")
        return cls(**given, arch=arch)


def _value(op: str, axis: Axis, value: Any) -> Any:
    """The value of one axis, checked."""
    if value is REQUIRED:
        raise ValueError(f"{axis.name}: op {op!r} needs one of {axis.values}, got none")
    if value not in axis.values:
        raise ValueError(f"{axis.name}: expected one of {axis.values}, got {value!r}")
    return value


def _longest_first(axis: Axis) -> list[Any]:
    """Values by the length of their text: ``token_head`` before ``token``."""
    return sorted(axis.values, key=lambda v: -len(axis.text(v)))


def _leads(rest: str, text: str) -> bool:
    """Return True if ``rest`` of a name begins with ``text`` as a whole word."""
    return rest == text or rest.startswith(text + "_")


def decode_spec(
    pipeline: str, row_tile: int, page_size: int, out_dtype: str, arch: str = "sm_90a"
) -> VariantSpec:
    """The decode variant of the default matrix, and of the dispatcher, for these choices."""
    return VariantSpec(
        op="decode", arch=arch, pipeline=pipeline, row_tile=row_tile, page_size=page_size,
        out_dtype=out_dtype,
    )  # fmt: skip
