"""op -> kernel module, imported lazily.

Every kernel module offers

    build(spec) -> (fn, fakes)       a ``@cute.jit`` callable and fake arguments for it by name, in
                                     ABI order; the stream is the callable's last parameter and not
                                     among the fakes
    feasible(spec) -> str | None     optional: why this variant cannot be built, or None
    budget(spec) -> Budget           optional: what a CTA needs of an SM (blocks/budget.py)

so codegen, dispatch and tests treat all ops alike.  Which module builds a spec is declared by its
family.  Importing this module does not import the compiler; asking for a module does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .blocks.budget import Budget
from .spec import VariantSpec


def named(what: str) -> Any:
    """Import and return the object that a family gives as ``module:name``."""
    module_, _, name = what.partition(":")
    return getattr(importlib.import_module(module_), name)


def module_name(spec: VariantSpec) -> str | None:
    """Dotted name of the module that builds ``spec``; None if no module does."""
    return spec.family.module(spec.arch, dict(spec.values))


def module(spec: VariantSpec) -> ModuleType:
    """Imports the module that builds ``spec``.  Raises ValueError if there is none."""
    name = module_name(spec)
    if name is None:
        raise ValueError(f"spec: no kernel module builds {spec.name}")
    return importlib.import_module(name)


def feasible(spec: VariantSpec) -> str | None:
    """Reason that ``spec`` cannot be built, or None."""
    if module_name(spec) is None:
        return f"no kernel module for {spec.name} on {spec.arch}"
    asked = getattr(module(spec), "feasible", None)
    return None if asked is None else asked(spec)


def budget(spec: VariantSpec) -> Budget | None:
    """Return the SM resources that one CTA of ``spec`` needs, as its module declares them; None if
    the module declares none.

    Raises ValueError if no kernel module builds ``spec``.
    """
    declared = getattr(module(spec), "budget", None)
    return None if declared is None else declared(spec)


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name, without the stream) of one variant.

    Raises ValueError with the reason if the variant is not feasible.
    """
    reason = feasible(spec)
    if reason is not None:
        raise ValueError(f"{spec.name}: {reason}")
    return module(spec).build(spec)
