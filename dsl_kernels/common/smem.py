"""Shared-memory plans as data: a struct from a list of named arrays."""

from __future__ import annotations

import cutlass.cute as cute


def array(dtype, count: int, align: int | None = None):
    """Field type: ``count`` elements of ``dtype``, ``align`` bytes aligned."""
    field = cute.struct.MemRange[dtype, count]
    return field if align is None else cute.struct.Align[field, align]


def struct_of(**fields):
    """A ``cute.struct`` whose fields lie in the order given."""
    return cute.struct(type("Storage", (), {"__annotations__": fields}))
