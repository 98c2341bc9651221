"""Parts of transformers on which the integration relies, read from its source without an import.

    python -m snapmla.integrations.transformers.surface            prints what differs here
    python -m snapmla.integrations.transformers.surface record     adds this release to the record

``surface.json`` has them for the releases that it was run with: parameters of functions that we
call or replace, or whose signature ours must have, and the arguments with which layers call ours.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import sys
from pathlib import Path

from snapmla.integrations import source

RECORD = Path(__file__).with_name("surface.json")
_LAYER = (
    "lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length",
    "offload", "prefetch", "reset", "reorder_cache",
)  # fmt: skip
_DYNAMIC = ("crop", "batch_repeat_interleave", "batch_select_indices")
MODELS = {
    "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "deepseek_v32": "DeepseekV32",
    "glm4_moe_lite": "Glm4MoeLite", "glm_moe_dsa": "GlmMoeDsa",
}  # fmt: skip
DSA = ("deepseek_v32", "glm_moe_dsa")


def _model(kind: str, name: str) -> tuple[str, ...]:
    """Functions of a model, and calls in them: ``function@what is called``."""
    at = f"transformers.models.{kind}.modeling_{kind}:{name}"
    attention = f"{at}Attention"
    found = (
        f"{attention}.expand_kv", f"{attention}.forward", f"{attention}.forward@cache.update",
        f"{attention}.forward@past_key_values.update", f"{attention}.forward@self.expand_kv",
        f"{attention}.forward@attention_interface", f"{at}Model.forward",
        f"{at}Model.forward@create_causal_mask", f"{at}ForCausalLM.forward",
        f"{at}ForCausalLM.forward@self.model",
    )  # fmt: skip
    indexer = f"{at}Indexer.forward"
    more = (indexer, f"{indexer}@cache.update_indexer", f"{indexer}@past_key_values.update_indexer")
    return (*found, *more) if kind in DSA else found


RELIED = (
    *(f"transformers.cache_utils:CacheLayerMixin.{name}" for name in _LAYER),
    *(f"transformers.cache_utils:DynamicLayer.{name}" for name in _DYNAMIC),
    "transformers.cache_utils:DynamicIndexedLayer.update_indexer",
    *(
        f"transformers.cache_utils:Cache.{name}"
        for name in ("__init__", "update", "update_indexer", "get_seq_length", "get_mask_sizes",
                     "get_query_offset", "reset", "crop")
    ),
    "transformers.masking_utils:eager_mask",
    "transformers.masking_utils:create_causal_mask",
    "transformers.masking_utils:create_causal_mask@mask_interface",
    "transformers.masking_utils:AttentionMaskInterface",
    "transformers.modeling_utils:AttentionInterface",
    "transformers.modeling_utils:PreTrainedModel.set_attn_implementation",
    "transformers.utils.generic:GeneralInterface.register",
    *(name for kind in MODELS.items() for name in _model(*kind)),
)  # fmt: skip
Surface = dict[str, list[str] | bool]


def read() -> Surface:
    """Name -> parameters, or arguments of a call; True for what has none, False for what is not
    there."""
    return {name: _described(name) for name in RELIED}


def _described(name: str) -> list[str] | bool:
    name, _, called = name.partition("@")
    node = source.definition(name)
    if node is None:
        return False
    if not isinstance(node, source.Function):
        return True
    return _call(node, called) if called else source.parameters(node)


def _call(function: ast.AST, called: str) -> list[str] | bool:
    """Arguments of the first call of ``called``: texts by position, names of keywords behind."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == called:
            words = [f"{each.arg}=" if each.arg else "**" for each in node.keywords]
            return [*map(ast.unparse, node.args), *words]
    return False


def recorded() -> dict[str, Surface]:
    """Release -> its surface."""
    return json.loads(RECORD.read_text())


def differences(found: Surface, known: Surface) -> list[str]:
    """A sentence for each name that is otherwise in ``found``."""
    text = lambda value: f"({', '.join(value)})" if isinstance(value, list) else str(value)
    return [
        f"{name}: {text(wanted)} is {text(found.get(name, False))} here"
        for name, wanted in known.items()
        if found.get(name, False) != wanted
    ]


def main(words: list[str]) -> int:
    release, known = importlib.metadata.version("transformers"), recorded()
    if words == ["record"]:
        known[release] = read()
        RECORD.write_text(json.dumps(dict(sorted(known.items())), indent=1, sort_keys=True) + "\n")
        return 0
    nearest = known.get(release) or known[max(known)]
    said = differences(read(), nearest)
    print("\n".join([f"transformers {release}: {len(said)} differences", *said]))
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
