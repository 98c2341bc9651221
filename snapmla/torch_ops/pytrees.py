"""Values of tensors as pytrees, so that they may be arguments of compiled and saved functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from snapmla.runtime import launch

T = TypeVar("T")
# Modules by which programs saved by older releases name a class or function of today.
OLDER = {
    "DecodePlan": ("snapmla.decode_plan", "snapmla.decode_plan.plan"),
    "PagedKVCache": ("snapmla.cache",), "QuantizedQuery": ("snapmla.quant",),
    "_View": ("snapmla.launch",), "_made_again": ("snapmla.launch",),
}  # fmt: skip


def register(
    cls: type[T],
    children: Callable[[T], tuple[str, ...]],
    made: Callable[[list[Any], tuple[Any, ...]], T],
    static: tuple[str, ...] | Callable[[T], tuple[str, ...]] = (),
) -> None:
    """Makes a class a pytree.

    Args:
        children: names of a value's tensors.
        made: a value of its leaves, which may be stand-ins of tensors, and of its static fields.
        static: names of its other fields, or a value's.
    """

    def flatten(value: T) -> tuple[list[Any], tuple[Any, ...]]:
        leaves = [getattr(value, n) for n in children(value)]
        others = static(value) if callable(static) else static
        return leaves, tuple(getattr(value, n) for n in others)

    pytree.register_pytree_node(
        cls,
        flatten,
        lambda leaves, context: made(list(leaves), context),
        serialized_type_name=f"snapmla.{cls.__name__}",
        # JSON has no tuples: a loaded program would compare its list with a call's tuple
        to_dumpable_context=json.dumps,
        from_dumpable_context=lambda text: tuple(json.loads(text)),
        flatten_with_keys_fn=lambda value: (
            [(pytree.GetAttrKey(n), getattr(value, n)) for n in children(value)],
            flatten(value)[1],
        ),
    )
    # a saved program holds its example inputs, and torch loads what is known as mere data
    _loadable(cls)


def _loadable(named: Any) -> None:
    """Lets ``torch.load`` take a class or function, by its name and its older ones."""
    older = [(named, f"{module}.{named.__name__}") for module in OLDER.get(named.__name__, ())]
    torch.serialization.add_safe_globals([named, *older])


def put_together(cls: type[T], fields: dict[str, Any]) -> T:
    """A value of its fields; without its checks if one is a stand-in of a tensor."""
    if all(isinstance(leaf, Tensor) for leaf in fields.values()):
        return cls(**fields)
    return stand_in(cls, fields)


def stand_in(cls: type[T], fields: dict[str, Any]) -> T:
    """A value whose fields are whatever they are."""
    value = object.__new__(cls)
    for name, leaf in fields.items():
        object.__setattr__(value, name, leaf)
    return value


for _each in launch.PICKLED_WITH:
    _loadable(_each)
