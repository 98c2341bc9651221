"""Heads of queries as they are, where vLLM pads them for FlashMLA.

FlashMLA's sparse decode takes 64 or 128 heads, so vLLM's layers pad the 16 that a card of eight has
of a model's 128, and three quarters of its products are with zeros.  Ours takes any number.

A layer asks a function of its class (``surface.PADDING``) for the padded number when it is made.
``install`` puts ours in the place of those functions: of modules that are there now, and of others
behind their import.  Ours answers with the heads themselves where our kernels serve them, else with
what vLLM's answers.  Prompts' queries, which a backend of V3.2 pads by itself, stay padded: the
kernel's tile has 64 rows of heads in any case.

A call of unpadded heads that ours does not serve after all is padded here (``padded``), for
vLLM's kernel, unless that takes as many: of prompts 0.33's does from 8 on.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dsl_kernels.formats import ds_mla, v4
from snapmla.errors import SnapMLAError
from snapmla.integrations import flashmla_switch
from snapmla.integrations.vllm import surface
from snapmla.rank.calls import choose_sparse
from snapmla.rank.cards import Card, card_of
from snapmla.runtime import variants

# of queries that vLLM's own kernel in front of V4's attention writes
WRITTEN = (8, 16, 32, 64, 128)
TAKEN = (64, 128)  # by FlashMLA's kernels
# by a release's kernel of prompts on Hopper, where heads come so: read in its text, never run
OF_PROMPTS = {"0.33.0": WRITTEN}
_OWNERS = {
    module: (owner, name, v4.FORMAT.name if "deepseek_v4" in module else ds_mla.NAME)
    for module, owner, name in surface.PADDING
}


def install() -> None:
    """Layers that are made from now on have their heads as they are.  May be called again."""
    for name in _OWNERS:
        if (there := sys.modules.get(name)) is not None:
            _replace(there)
    if not any(isinstance(each, _AfterImport) for each in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules of ``_OWNERS`` as others do, and replaces behind their execution."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _OWNERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _replace(module)

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec


def _replace(module: ModuleType) -> None:
    owner, name, cache = _OWNERS[module.__name__]
    layer = getattr(module, owner, None)
    there = vars(layer).get(name) if isinstance(layer, type) else None
    if not isinstance(there, staticmethod | classmethod) or hasattr(there.__func__, "theirs"):
        return
    theirs = there.__func__

    def heads(*given: Any) -> int:
        """Heads as vLLM's; a class stands before the number where it is a method of the class."""
        *classes, count = given
        padding = int(theirs(*given))
        ours = count < padding and classes in ([], [layer]) and served(count, cache)
        return int(count) if ours else padding

    heads.theirs = theirs  # type: ignore[attr-defined]
    setattr(layer, name, type(there)(heads))


def served(heads: int, cache: str) -> bool:
    """True if our kernels take these heads here, in layers that are made now.

    Not in batch-invariant mode, where vLLM's kernel runs, and not where ranks of a context-parallel
    group hold parts of a sequence: vLLM gathers heads there and compares what both pad to.

    Args:
        cache: name of its format.
    """
    from vllm import envs

    if heads not in WRITTEN or envs.VLLM_BATCH_INVARIANT or _shards() > 1:
        return False
    card = _card()
    if card is None or card.arch != flashmla_switch.SERVED:
        return False
    spec = choose_sparse(card, heads, cache=cache)
    return variants.find(spec) is not None or variants.jit_refusal() is None


def _card() -> Card | None:
    if not torch.cuda.is_available():
        return None
    try:
        return card_of(torch.device("cuda", torch.cuda.current_device()))
    except SnapMLAError:  # of another architecture
        return None


def _shards() -> int:
    """Ranks of this process's group of decode context parallelism."""
    from vllm.distributed import get_dcp_group

    try:
        return int(get_dcp_group().world_size)
    except AssertionError:  # not made: no layer runs in this process
        return 1


@functools.cache
def _release() -> str | None:
    """The recorded release that runs; looked up once, as calls of prompts ask for it."""
    return surface.known_release()


def taken(told: Mapping[str, Any]) -> tuple[int, ...]:
    """Heads that vLLM's kernel of a sparse call takes."""
    release = _release() if "kv" in told else None
    return TAKEN if release is None else OF_PROMPTS.get(release, TAKEN)


def fits(told: Mapping[str, Any]) -> bool:
    """True if a call's heads are such that vLLM's kernel takes them; dense ones' always are."""
    q = told.get("q")
    sparse = "kv" in told or told.get("indices") is not None
    return not (isinstance(q, Tensor) and q.ndim > 1 and sparse) or q.shape[-2] in taken(told)


def padded(theirs: Callable[..., Any], told: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """vLLM's results of queries with as many heads as its kernel takes, cut to the call's own.

    Args:
        theirs: vLLM's ``flash_mla_with_kvcache`` or ``flash_mla_sparse_fwd``.
        told: a call's arguments by name; ``q`` (..., h, channels), ``out`` (..., h, 512) or None.
    """
    named = dict(told)
    q, out, sink = named["q"], named.pop("out", None), named.get("attn_sink")
    heads = q.shape[-2]
    count = next(each for each in taken(told) if heads <= each)
    named["q"] = functional.pad(q, (0, 0, 0, count - heads))
    if sink is not None:
        named["attn_sink"] = functional.pad(sink[:heads], (0, count - heads), value=-math.inf)
    found, *statistics = theirs(**named)
    # LSE and largest logits: (b, h, s_q) of a decode, (tokens, h) of prompts
    result = [found[..., :heads, :], *(each[:, :heads] for each in statistics)]
    if out is not None:
        result[0] = out.copy_(result[0])
    return tuple(result)
