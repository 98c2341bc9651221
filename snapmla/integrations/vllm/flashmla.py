"""FlashMLA's names inside of vLLM on our kernels: ``SNAPMLA_VLLM_FLASHMLA=1``.

vLLM calls FlashMLA through two names of one module, ``vllm.v1.attention.ops.flashmla``: sparse
decode of V3.2, GLM-5, V4, V4.1 (in V4's bytes on Hopper) and HY-V4, dense decode of 16 bits, and
sparse attention of prompts.  ``install`` puts ours in their place, there and in modules that have
bound them before (``surface.BINDING``, of each release in ``surface.json``).  Bytes, pages, lists
and backends stay vLLM's, so nothing else of an installation changes; V4's layers, which no backend
of a plugin reaches, have no other way in, and so this one is for all models.

``get_mla_metadata`` and ``FlashMLASchedMeta`` stay vLLM's own, too: our schedule is an attribute of
their object, made by the first call and with it inside of a graph where that is captured.

Queries' heads are not padded to FlashMLA's 64 or 128 where ours serves them (``heads.py``).

Ours computes what it serves.  Anything else goes to vLLM's kernel, whose cause is logged once
(``flashmla_switch.py``).
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from typing import Any

from snapmla.integrations import flashmla_switch
from snapmla.integrations.vllm import heads, surface
from snapmla.runtime import env

MODULE = surface.FLASHMLA
LOGGER = surface.LOGGER
_log = logging.getLogger(LOGGER)
_lock = threading.Lock()


def install() -> bool:
    """Puts ours in the place of FlashMLA's names, in this process.  May be called again.

    Returns:
        False, and a line in the log, if this is a release that nobody has looked at.
    """
    release = surface.known_release()
    if release is None:
        known = " and ".join(sorted(surface.recorded()))
        _log.warning(
            "snapmla: %s=1 is for vllm %s: FlashMLA's names stay vLLM's own",
            env.VLLM_FLASHMLA.name, known,
        )  # fmt: skip
        return False
    from vllm import envs

    module = importlib.import_module(MODULE)
    invariant = bool(envs.VLLM_BATCH_INVARIANT)
    with _lock:
        for name, kind in _KINDS.items():
            there = getattr(module, name)
            ours = there if isinstance(there, _OfVLLM) else kind(there, invariant)
            ours.invariant = invariant  # an engine before this one may have had another mode
            setattr(module, name, ours)
            for other in surface.BINDING:
                bound = sys.modules.get(other)
                if bound is not None and getattr(bound, name, ours) is ours.theirs:
                    setattr(bound, name, ours)
        heads.install()
    return True


def installed() -> bool:
    """True if FlashMLA's names are ours in this process."""
    module = sys.modules.get(MODULE)
    return any(isinstance(getattr(module, name, None), _OfVLLM) for name in _KINDS)


def calls() -> int:
    """Number of calls that ours has computed in this process."""
    module = sys.modules.get(MODULE)
    found = [getattr(module, name, None) for name in _KINDS]
    return sum(each.calls for each in found if isinstance(each, _OfVLLM))


class _OfVLLM(flashmla_switch.Name):
    """One of FlashMLA's functions: ours, and vLLM's for what that does not serve."""

    engine, log = "vLLM", _log

    def passed_on(self, *given: Any, **named: Any) -> Any:
        told = dict(zip(self.names, given), **named)
        if heads.fits(told):
            return self.theirs(*given, **named)
        return heads.padded(self.theirs, told)


class _Decode(_OfVLLM, flashmla_switch.Decode):
    """``flash_mla_with_kvcache``."""


class _Prefill(_OfVLLM, flashmla_switch.Prefill):
    """``flash_mla_sparse_fwd``."""


_KINDS: dict[str, type[_OfVLLM]] = dict(
    zip(surface.FLASHMLA_NAMES, (_Decode, _Prefill), strict=True)
)
