"""Calls of the module ``flash_mla`` by engines: their forms, as they stand in named commits.

A form is a function, what is given by place and what by name.  Values are of the step that replays
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Form:
    """One call.

    Attributes:
        who: project and commit. function: of ``flash_mla``.
        places, names: arguments by place and by name; those of ``constants`` have that value, all
            others are the step's.
    """

    who: str
    function: str
    places: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()

    def arguments(self, step: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """(arguments by place, arguments by name), with a step's values."""
        values = {**step, **dict(self.constants)}
        return [values[name] for name in self.places], {name: values[name] for name in self.names}


LMDEPLOY, XTUNER = "LMDeploy 1263d5c", "xtuner b934f46"
AUTOMODEL = "Automodel 36044ad"
_DECODE = (
    "k_cache", "block_table", "cache_seqlens", "head_dim_v", "softmax_scale",
    "tile_scheduler_metadata", "num_splits", "causal", "is_fp8_kvcache", "indices",
)  # fmt: skip
METADATA = {
    "LMDeploy": Form(
        LMDEPLOY, "get_mla_metadata", ("cache_seqlens", "num_q_tokens_per_head_k"),
        ("num_heads_k", "num_heads_q", "is_fp8_kvcache", "topk"),
        (("is_fp8_kvcache", False), ("topk", None)),
    ),
    "LMDeploy, sparse": Form(
        LMDEPLOY, "get_mla_metadata", ("cache_seqlens", "num_q_tokens_per_head_k"),
        ("num_heads_k", "num_heads_q", "is_fp8_kvcache", "topk"), (("is_fp8_kvcache", True),),
    ),
    "LMDeploy, object": Form(LMDEPLOY, "get_mla_metadata"),
    "xtuner": Form(
        XTUNER, "get_mla_metadata", ("cache_seqlens", "num_q_tokens_per_head_k", "num_heads_k")
    ),
}  # fmt: skip
DENSE = {
    "LMDeploy": Form(
        LMDEPLOY, "flash_mla_with_kvcache", ("q",), _DECODE,
        (("causal", True), ("is_fp8_kvcache", False), ("indices", None)),
    ),
    "xtuner": Form(
        XTUNER, "flash_mla_with_kvcache",
        ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata",
         "num_splits"),
        ("causal",), (("causal", True),),
    ),
}  # fmt: skip
SPARSE = Form(
    LMDEPLOY, "flash_mla_with_kvcache", ("q",), _DECODE,
    (("causal", False), ("is_fp8_kvcache", True)),
)  # fmt: skip
PREFILL = (
    Form(LMDEPLOY, "flash_mla_sparse_fwd", ("q", "k_cache", "indices"), ("sm_scale",)),
    Form(
        AUTOMODEL, "flash_mla_sparse_fwd", ("q", "k_cache", "indices", "sm_scale"),
        ("d_v", "attn_sink", "topk_length", "indexer_topk"),
        (("d_v", 512), ("attn_sink", None), ("topk_length", None), ("indexer_topk", 0)),
    ),
)  # fmt: skip
