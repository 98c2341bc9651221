"""op -> kernel module, imported lazily.

Every kernel module offers

    feasible(spec) -> str | None     why this variant cannot be built, or None
    budget(spec) -> Budget           optional: what a CTA needs of an SM (common/budget.py)
    build(spec) -> (fn, fakes)       a ``@cute.jit`` callable and fake arguments for it; the stream
                                     is the callable's last parameter and not among the fakes

so codegen, dispatch and tests treat all ops alike.  Importing this module does not import the
compiler; asking for a module does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .common.budget import Budget
from .spec import VariantSpec

_MODULES: dict[str, str] = {
    "append_kv": "smxx.append_kv",
    "quantize_q": "smxx.quantize_q",
    "fetch_dequant": "smxx.fetch_dequant",
    "plan_decode": "smxx.plan_decode",
    "merge": "smxx.merge",
}
_DECODE: dict[tuple[str, str], str] = {
    ("sm_90a", "etap"): "sm90.decode_etap",
    ("sm_90a", "dual_wg"): "sm90.decode_dual_wg",
}


def module_name(spec: VariantSpec) -> str | None:
    """Module that builds ``spec``, relative to this package; None if no module does."""
    if spec.op == "decode":
        return _DECODE.get((spec.arch, spec.pipeline or ""))
    return _MODULES.get(spec.op)


def module(spec: VariantSpec) -> ModuleType:
    """Imports the module that builds ``spec``.  Raises ValueError if there is none."""
    name = module_name(spec)
    if name is None:
        known = sorted(p for a, p in _DECODE if a == spec.arch)
        raise ValueError(
            f"spec: no kernel for op {spec.op!r}, pipeline {spec.pipeline!r} on {spec.arch}; "
            f"pipelines built for {spec.arch}: {known or 'none'}"
        )
    return importlib.import_module(f".{name}", __package__)


def feasible(spec: VariantSpec) -> str | None:
    """Reason that ``spec`` cannot be built, or None."""
    if module_name(spec) is None:
        return f"no kernel module for op {spec.op}, pipeline {spec.pipeline} on {spec.arch}"
    return module(spec).feasible(spec)


def budget(spec: VariantSpec) -> Budget | None:
    """What one CTA of ``spec`` asks of an SM, as its module declares; None where it declares none.

    Raises ValueError if no kernel module builds ``spec``.
    """
    declared = getattr(module(spec), "budget", None)
    return None if declared is None else declared(spec)


def build(spec: VariantSpec) -> tuple[Callable[..., Any], list[Any]]:
    """(callable, fake arguments without the stream) of one variant.

    Raises ValueError with the reason if the variant is not feasible.
    """
    kernels = module(spec)
    reason = kernels.feasible(spec)
    if reason is not None:
        raise ValueError(f"{spec.name}: {reason}")
    return kernels.build(spec)
