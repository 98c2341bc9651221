"""FlashMLA's functions in the module ``flash_mla`` that an engine imports, with a line in the log
at the first call of a layer's method and format."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

from snapmla.call import tracing
from snapmla.compat.flash_mla import name as naming
from snapmla.integrations import flashmla_switch

LOGGER = "lmdeploy.snapmla"  # below LMDeploy's own, whose handlers and level it has
_log = logging.getLogger(LOGGER)


class Name(flashmla_switch.Name):
    """One of our functions; what it does not serve raises its sentence."""

    engine, log = "LMDeploy", _log

    def __call__(self, *given: Any, **named: Any) -> Any:
        result = self.theirs(*given, **named)
        if not tracing.by_dynamo():
            self.calls += 1
            self._first(dict(zip(self.names, given), **named), sys._getframe(1))
        return result


class Decode(Name, flashmla_switch.Decode):
    """``flash_mla_with_kvcache``."""


class Sparse(Name, flashmla_switch.Prefill):
    """``flash_mla_sparse_fwd``, which computes prompts, and decode over a BF16 cache."""

    def what(self, *kind: Any) -> str:
        heads, channels = kind
        return f"sparse attention over rows of {channels} channels in bfloat16, {heads} heads"


KINDS: tuple[type[Name], ...] = (Decode, Sparse)


def install(tensors: bool) -> types.ModuleType:
    """The module, made if it is not there.

    Args:
        tensors: as ``snapmla.install_as_flash_mla`` has it.
    """
    module = naming.install_as_flash_mla(tensors=tensors)
    for kind in KINDS:
        there = getattr(module, kind.ours_is)
        ours = there if isinstance(there, Name) else kind(there)
        for each in (module, sys.modules[naming.INTERFACE]):
            setattr(each, kind.ours_is, ours)
    return module


def calls() -> int:
    """Number of calls that ours has computed in this process."""
    module = sys.modules.get(naming.NAME)
    found = [getattr(module, kind.ours_is, None) for kind in KINDS]
    return sum(each.calls for each in found if isinstance(each, Name))
