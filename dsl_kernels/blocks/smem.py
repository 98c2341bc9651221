"""Shared memory: a struct from a list of named arrays, tensors of staged tiles."""

from __future__ import annotations

import cutlass.cute as cute


def array(dtype, count: int, align: int | None = None):
    """Field type: ``count`` elements of ``dtype``, ``align`` bytes aligned."""
    field = cute.struct.MemRange[dtype, count]
    return field if align is None else cute.struct.Align[field, align]


def struct_of(**fields):
    """A ``cute.struct`` whose fields lie in the order given."""
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def staged(field, layout):
    """The (rows, k, stage) tensor of a storage field with a swizzled layout."""
    return field.get_tensor(layout.outer, swizzle=layout.inner)


def one_stage(layout):
    return cute.slice_(layout, (None, None, 0))
