"""transformers' models with latent attention (MLA) over snapmla's paged FP8 cache.

    from snapmla.integrations.transformers import SnapMLACache, patch

    patch(model)
    cache = SnapMLACache(model.config, batch_size=2, max_tokens=4096)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=100)

Served: DeepSeek V2, V3 and V3.2, GLM-4 MoE Lite and GLM-5 (``glm_moe_dsa``), of transformers 5.17
to 5.24; those with an indexer (DSA) from 5.18 on.  A model's ``forward`` stays transformers' own:

    pool.py       tokens, slots and plans of a cache, shared by its layers; torch only
    cache.py      ``SnapMLACache``: the layers that ``Cache.update`` asks
    attention.py  the attention function: decode of a few query tokens
    absorbed.py   queries into the latent space, results out of it
    prefill.py    attention of prompts, over what is cached and what is new
    patching.py   ``patch`` and ``unpatch``: the three places where a model meets the above
    graph.py      ``DecodeGraph``: a decode step as a CUDA graph
    surface.py    what all of it relies on in transformers

transformers is imported when one of the names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snapmla.integrations.transformers.cache import SnapMLACache
    from snapmla.integrations.transformers.graph import DecodeGraph
    from snapmla.integrations.transformers.patching import patch, unpatch

__all__ = ["DecodeGraph", "SnapMLACache", "patch", "unpatch"]
_HOMES = {"DecodeGraph": "graph", "SnapMLACache": "cache", "patch": "patching"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'patching')}"), name)
