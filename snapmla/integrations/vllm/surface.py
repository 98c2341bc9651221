"""Parts of vLLM on which the backend relies, from an installation or from the record of releases.

``surface.json`` has them for the releases that the backend was run with: parameters of functions
and methods, fields of dataclasses, names that exist, and enumeration members that are aliases of
older ones.  It also has the layers that write the cache themselves, which the backend refuses
(``refuse.py``); one whose name changes must be looked at.  And it has the modules that bind
FlashMLA's names (``flashmla.py``).
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

from snapmla.integrations import surfaces
from snapmla.integrations.surfaces import Surface, Value, described, read_source

LOGGER = "vllm.snapmla"  # below vLLM's own, whose handlers and level it has
RECORD = Path(__file__).with_name("surface.json")
_MLA = "vllm.model_executor.layers.attention.mla_attention"
_BACKEND = "vllm.v1.attention.backend"
_BACKENDS = "vllm.v1.attention.backends"
_PREFILL = f"{_BACKENDS}.mla.prefill"
QUANT_MODE = "vllm.v1.kv_cache_interface:KVQuantMode.CUSTOM"  # what our cache dtype counts as
# module:name, in the order of the backend's text; name@attribute: what the function's text mentions
RELIED = (
    f"{_BACKENDS}.registry:AttentionBackendEnum.CUSTOM",
    f"{_BACKENDS}.registry:register_backend",
    "vllm.config.cache:register_kv_cache_dtype",
    "vllm.config.cache:KV_CACHE_DTYPES",
    "vllm.v1.kv_cache_interface:KVQuantMode",
    QUANT_MODE,
    "vllm.envs:VLLM_BATCH_INVARIANT",
    "vllm._custom_ops:fused_add_rms_norm",
    "vllm.model_executor.layers.layernorm:rms_norm_batch_invariant",
    "vllm.config:get_current_vllm_config_or_none",
    "vllm.distributed.parallel_state:get_dcp_group",
    f"{_BACKEND}:AttentionCGSupport.UNIFORM_BATCH",
    f"{_BACKEND}:AttentionType.DECODER",
    f"{_BACKENDS}.registry:AttentionBackendEnum.get_path",
    "vllm.forward_context:create_forward_context",
    "vllm.forward_context:is_forward_context_available",
    f"{_BACKENDS}.utils:get_dcp_local_seq_lens",
    f"{_MLA}:MLACommonBackend.customize_spec",
    f"{_MLA}:MLACommonBackend.get_supported_head_sizes",
    f"{_MLA}:MLACommonBackend.supports_combination",
    f"{_MLA}:MLACommonDecodeMetadata",
    f"{_MLA}:MLACommonMetadata",
    f"{_MLA}:QueryLenSupport.VARLEN",
    f"{_MLA}:MLACommonMetadataBuilder.__init__",
    f"{_MLA}:MLACommonMetadataBuilder.__init__@use_pcp",
    f"{_MLA}:MLACommonMetadataBuilder.build@use_pcp",
    f"{_MLA}:MLACommonMetadataBuilder.build_for_cudagraph_capture",
    f"{_MLA}:MLACommonMetadataBuilder._build_decode",
    f"{_MLA}:MLACommonImpl.__init__",
    f"{_MLA}:MLACommonImpl.forward_mqa",
    f"{_MLA}:MLACommonImpl.do_kv_cache_update",
    f"{_MLA}:MLACommonImpl.forward_mha",
    f"{_MLA}:MLACommonImpl._concat_k_nope_k_pe",
    f"{_MLA}:MLACommonImpl._compute_prefill_context",
    f"{_MLA}:MLACommonImpl._context_parallel_compute_prefill_context",
    f"{_MLA}:ops.cp_gather_and_upconvert_fp8_kv_cache",
    f"{_MLA}:ops.gather_and_maybe_dequant_cache",
    f"{_MLA}:MLACommonPrefillMetadata",
    f"{_PREFILL}.registry:MLAPrefillBackendEnum.CUSTOM",
    f"{_PREFILL}.registry:register_mla_prefill_backend",
    f"{_PREFILL}.base:MLADimensions",
    f"{_PREFILL}.base:MLAPrefillBackend.supports_compute_capability",
    f"{_PREFILL}.base:MLAPrefillBackend.prepare_metadata",
    f"{_PREFILL}.base:MLAPrefillBackend.supports_out",
    f"{_PREFILL}.base:MLAPrefillBackend.run_prefill_new_tokens",
    f"{_PREFILL}.base:MLAPrefillBackend.run_prefill_context_chunk",
    "vllm.config.compilation:PassConfig.fuse_rope_kvcache_cat_mla",
    "vllm.config.compilation:CompilationConfig.static_forward_context",
    "vllm.config.model:ModelConfig.hf_text_config",
    f"{_MLA}:MLAAttention.forward",
    f"{_MLA}:MLAAttention.forward@unified_mla_kv_cache_update",
    f"{_MLA}:MLAAttention.forward_impl",
    f"{_MLA}:MLAAttention.update_kv_cache",
    f"{_MLA}:MLAAttention.update_kv_cache@do_kv_cache_update",
)
# FlashMLA inside of vLLM: the module that gives its names, where they are from, who binds them.
FLASHMLA = "vllm.v1.attention.ops.flashmla"
FLASHMLA_NAMES = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
_THIRD = "vllm.third_party.flashmla.flash_mla_interface"
BINDING = (
    f"{_BACKENDS}.mla.flashmla",
    f"{_BACKENDS}.mla.flashmla_sparse",
    "vllm.models.deepseek_v4.nvidia.flashmla",
    "vllm.models.deepseek_v41.nvidia.flashmla",
    "vllm.models.hy_v4.nvidia.flashmla_sparse",
)
BOUND = tuple(f"{module}:{name}" for module in BINDING for name in FLASHMLA_NAMES)
# Where a layer asks how many heads to pad queries to: module, class, function.
PADDING = (
    (f"{_BACKENDS}.mla.flashmla_sparse", "FlashMLASparseImpl", "_compute_fp8_decode_padded_heads"),
    *(
        (f"vllm.models.{model}.nvidia.flashmla", "DeepseekV4FlashMLAAttention",
         "get_padded_num_q_heads")
        for model in ("deepseek_v4", "deepseek_v41")
    ),
)  # fmt: skip
PADDED = tuple(f"{module}:{owner}.{name}" for module, owner, name in PADDING)
# Read from the source, as its module wants a library of a GPU.
RELIED_FLASHMLA = (
    *(f"{_THIRD}:{name}" for name in (*FLASHMLA_NAMES, "get_mla_metadata", "FlashMLASchedMeta")),
    f"{FLASHMLA}:is_flashmla_sparse_supported",
    *PADDED,
)
_SPARSE = "vllm.model_executor.layers.attention.sparse_mla_attention"
_IMPL, _BUILDER = f"{_SPARSE}:SparseMLACommonImpl", f"{_SPARSE}:SparseMLACommonMetadataBuilder"
_INDEXER = f"{_BACKENDS}.mla.indexer"
# What the sparse backend and the indexer behind it rely on, in the same way.
RELIED_SPARSE = (
    f"{_BACKENDS}.registry:AttentionBackendEnum.FLASHMLA_SPARSE",
    f"{_BACKEND}:AttentionBackend.validate_configuration",
    f"{_BACKEND}:AttentionMetadata",
    f"{_BUILDER}.__init__",
    f"{_BUILDER}.build",
    f"{_BUILDER}.build_for_cudagraph_capture",
    f"{_BUILDER}._init_reorder_batch_threshold",
    f"{_BUILDER}.update_draft_decode_metadata",
    f"{_IMPL}.__init__",
    f"{_IMPL}.forward_mqa",
    f"{_IMPL}._forward_mqa_kernel",
    f"{_IMPL}.group_conversion_decode_only",
    f"{_IMPL}.need_to_return_lse_for_decode",
    f"{_IMPL}.do_kv_cache_update",
    f"{_IMPL}._compute_prefill_context",
    f"{_IMPL}._context_parallel_compute_prefill_context",
    f"{_SPARSE}:SparseMLACommonMetadata",
    f"{_BACKENDS}.mla.sparse_utils:triton_convert_req_index_to_global_index",
    f"{_BACKENDS}.mla.sparse_utils:align_blocks_to_rows",
    "vllm.v1.attention.ops.metadata:compute_token_to_req_indices",
    "vllm.config.attention:AttentionConfig.sparse_mla_force_mqa",
    "vllm.config.parallel:ParallelConfig.prefill_context_parallel_size",
    "vllm.config.parallel:ParallelConfig.decode_context_parallel_size",
    "vllm.model_executor.layers.sparse_attn_indexer:sparse_attn_indexer",
    f"{_INDEXER}:DeepseekV32IndexerMetadata",
    f"{_INDEXER}:DeepSeekV32IndexerDecodeMetadata",
    f"{_INDEXER}:DeepseekV32IndexerPrefillMetadata",
    f"{_INDEXER}:DeepseekV32IndexerPrefillChunkMetadata",
    "vllm.compilation.breakable_cudagraph:eager_break_during_capture",
    "vllm.distributed:get_dcp_group",
    "vllm.envs:VLLM_SPARSE_INDEXER_MAX_LOGITS_MB",
    "vllm.forward_context:get_forward_context",
    "vllm.platforms:current_platform",
    "vllm.utils.torch_utils:_resolve_layer_name",
)
# of newer releases only; without them the backend takes the older way
OPTIONAL = frozenset({
    "vllm.config.cache:register_kv_cache_dtype",
    "vllm.config.cache:KV_CACHE_DTYPES",
    f"{_MLA}:MLACommonBackend.customize_spec",
    f"{_MLA}:MLAAttention.update_kv_cache",
    f"{_MLA}:MLAAttention.update_kv_cache@do_kv_cache_update",
    f"{_PREFILL}.base:MLAPrefillBackend.supports_out",
    QUANT_MODE,
    f"{_BUILDER}.update_draft_decode_metadata",
    f"{_IMPL}._forward_mqa_kernel",
    f"{_IMPL}.group_conversion_decode_only",
    f"{_SPARSE}:SparseMLACommonMetadata",
    f"{_BACKENDS}.mla.sparse_utils:align_blocks_to_rows",
    "vllm.v1.attention.ops.metadata:compute_token_to_req_indices",
    PADDED[-1],
})  # fmt: skip
_K3 = "vllm.models.kimi_k3.nvidia.mla:MultiHeadLatentAttention"
_V32 = ("vllm.models.deepseek_v32.attention", "vllm.models.deepseek_v32.nvidia.attention")
# Layers that write the cache themselves, and the names by which they do it.  A release has some.
# Only the dense backend refuses them: its cache's format is its own.
REFUSED = (
    _K3,
    f"{_K3}._decode_concat_cache",
    f"{_K3}._forward_prefill_fused",
    f"{_K3}._gather_context_latent",
    *(
        f"{module}:{name}"
        for module in _V32
        for name in (
            "DeepseekV32Attention.forward", "fused_norm_rope", "fused_q", "sparse_attn_indexer",
        )
    ),
)  # fmt: skip


def read() -> Surface:
    """Name -> parameters or fields, True for what has none, False for what is not there."""
    found = {name: described(name) for name in (*RELIED, *RELIED_SPARSE)}
    return found | {name: read_source(name) for name in (*REFUSED, *RELIED_FLASHMLA, *BOUND)}


def recorded() -> dict[str, Surface]:
    """Release -> its surface."""
    return json.loads(RECORD.read_text())


def installed() -> str | None:
    """Release of vLLM that is installed."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def known_release() -> str | None:
    """The recorded release that the installed one is, or is a patch of; None: nobody looked."""
    found = (installed() or "").split(".")[:2]
    return next((known for known in recorded() if known.split(".")[:2] == found), None)


def differences(found: Surface, known: Surface) -> list[tuple[bool | None, str]]:
    """Differences of ``found`` from ``known``: (None if it may still work, else False; text)."""
    return surfaces.differences(found, known, _may_do)


def _may_do(name: str, got: Value, wanted: Value) -> bool:
    """True if the backend may do nevertheless."""
    if name in BOUND or name in PADDED:
        return True  # its layers call vLLM's own kernel, or another module does; heads are padded
    if name in REFUSED:
        return True  # by whatever name: it is none that ``refuse`` knows
    if name == QUANT_MODE and got is not False:
        return True  # a mode of its own, or another one's
    return isinstance(got, list) and isinstance(wanted, list) and set(wanted) <= set(got)
