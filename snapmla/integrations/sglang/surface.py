"""Parts of SGLang on which the plugin relies, from an installation or from the record of releases.

``surface.json`` has them for the releases that the plugin was run with.  Source text is read:
SGLang is not imported, as that needs a GPU's libraries.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

from snapmla.integrations import surfaces
from snapmla.integrations.sglang import refuse
from snapmla.integrations.surfaces import Surface, Value, read_source

RECORD = Path(__file__).with_name("surface.json")
_SRT = "sglang.srt"
_MEMORY = f"{_SRT}.mem_cache.memory_pool"
_CACHE = f"{_SRT}.mem_cache.kv_cache_configurator"
_BACKEND = f"{_SRT}.layers.attention.base_attn_backend:AttentionBackend"
_REGISTRY = f"{_SRT}.layers.attention.attention_registry"
_FLASH = f"{_SRT}.layers.attention.flashattention_backend:FlashAttentionBackend"
_BATCH = f"{_SRT}.model_executor.forward_batch_info"
_CONTEXT = f"{_SRT}.runtime_context"
_DEEPSEEK = f"{_SRT}.models.deepseek_common"
_HANDLERS = f"{_DEEPSEEK}.attention_backend_handler"
_ARGUMENTS = f"{_SRT}.arg_groups"
HOOKS = f"{_SRT}.plugins.hook_registry"
# FlashMLA inside of SGLang: the module that has its names, who binds them before they are called
FLASHMLA = "sglang.kernels.ops.attention.flash_mla_interface"
FLASHMLA_NAMES = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
BINDING = (f"{_SRT}.layers.attention.flashmla_backend",)
BOUND = tuple(f"{module}:{name}" for module in BINDING for name in FLASHMLA_NAMES)
_RUNNER = f"{_SRT}.model_executor.model_runner:ModelRunner"
RELIED_FLASHMLA = (
    *(f"{FLASHMLA}:{name}" for name in (*FLASHMLA_NAMES, "get_mla_metadata", "FlashMLASchedMeta")),
    f"{HOOKS}:_propagate_patch",
    f"{_RUNNER}.forward",
)
# Where ServerArgs' fields are declared: of the settings that are refused, each in one of these.
FIELDS = tuple(
    f"{_ARGUMENTS}.fields.{module}:{name}"
    for module, name in (
        ("model", "Model"), ("schedule", "Schedule"), ("disagg", "Disagg"), ("memory", "Memory"),
        ("parallel", "Parallel"), ("observability", "Observability"), ("spec", "Spec"),
        ("exec_", "ExecKernel"),
    )
)  # fmt: skip
# module:name, in the order of the plugin's text
RELIED = (
    f"{_REGISTRY}:ATTENTION_BACKENDS",
    f"{_REGISTRY}:register_attention_backend",
    f"{_ARGUMENTS}.choices:add_attention_backend_choices",
    f"{_ARGUMENTS}.choices:add_chunked_prefix_cache_attention_backend",
    f"{_ARGUMENTS}.choices:add_deterministic_attention_backend_choices",
    f"{_ARGUMENTS}.choices:add_radix_supported_deterministic_attention_backend_choices",
    f"{_ARGUMENTS}.model_override_base:resolved_view",
    f"{_ARGUMENTS}.validation_hook:check_server_args",
    f"{_ARGUMENTS}.overrides:_mla_backend_page_constraints",
    f"{_SRT}.configs.model_config:is_deepseek_dsa",
    f"{_HANDLERS}:AttentionBackendRegistry.register",
    f"{_HANDLERS}:MHA_ONE_SHOT_SUPPORTED_BACKENDS",
    f"{_HANDLERS}:_dispatch_mla_subtype",
    f"{_HANDLERS}:_handle_attention_backend",
    f"{_DEEPSEEK}.utils:FORWARD_ABSORB_CORE_ATTENTION_BACKENDS",
    f"{HOOKS}:HookRegistry.register",
    f"{HOOKS}:HookType.AFTER",
    f"{HOOKS}:HookType.AROUND",
    f"{_CACHE}:calculate_mla_kv_cache_dim",
    f"{_CACHE}:KVCacheConfigurator._resolve_kv_pool_class",
    f"{_SRT}.speculative.draft_utils:DraftBackendFactory._create_backend",
    f"{_CONTEXT}:attention_backends",
    f"{_CONTEXT}:get_exec",
    f"{_CONTEXT}:get_parallel",
    f"{_CONTEXT}:get_spec",
    f"{_SRT}.constants:GPU_MEMORY_TYPE_KV_CACHE",
    f"{_MEMORY}:unwrap_write_loc",
    f"{_MEMORY}:KVWriteLoc.for_batch",
    f"{_MEMORY}:KVCache.get_kv_buffer_shape",
    f"{_MEMORY}:KVCache.host_pool_decls",
    *(
        f"{_MEMORY}:MLATokenToKVPool.{name}"
        for name in (
            "__init__", "_create_buffers", "_clear_buffers", "get_kv_size_bytes",
            "set_mla_kv_buffer", "set_kv_buffer", "get_mla_kv_buffer", "move_kv_cache",
            "get_cpu_copy", "load_cpu_copy", "get_key_buffer", "get_value_buffer",
            "get_contiguous_buf_infos", "get_device_pool_infos",
        )
    ),
    *(
        f"{_BACKEND}.{name}"
        for name in (
            "needs_cpu_seq_lens", "init_cuda_graph_state", "get_cuda_graph_seq_len_fill_value",
            "init_forward_metadata", "init_forward_metadata_out_graph",
            "init_forward_metadata_in_graph", "forward_decode", "forward_extend",
        )
    ),
    f"{_FLASH}.init_forward_metadata",
    f"{_FLASH}.forward_extend",
    f"{_FLASH}.prepare_paged_mha_query",
    f"{_BATCH}:build_inner_fb_view",
    f"{_BATCH}:ForwardMode.DECODE",
    *(
        f"{_BATCH}:ForwardMode.{name}"
        for name in (
            "is_extend_without_speculative", "is_target_verify", "is_draft_extend_v2", "is_decode",
        )
    ),
    *(
        f"{_BATCH}:ForwardBatch.{name}"
        for name in (
            "forward_mode", "batch_size", "input_ids", "req_pool_indices", "seq_lens",
            "out_cache_loc", "extend_seq_lens",
        )
    ),
)  # fmt: skip
SETTINGS = tuple(
    dict.fromkeys((
        "attention_backend", "prefill_attention_backend", "decode_attention_backend",
        "dsa_decode_backend", *(setting.name for setting in refuse.SETTINGS),
    ))
)  # fmt: skip


def read() -> Surface:
    """Name -> parameters, True for what has none, False for what is not there; settings by name."""
    found = {name: read_source(name) for name in (*RELIED, *RELIED_FLASHMLA, *BOUND)}
    return found | {name: _is_setting(name) for name in SETTINGS}


def _is_setting(name: str) -> bool:
    return any(bool(read_source(f"{group}.{name}")) for group in FIELDS)


def recorded() -> dict[str, Surface]:
    """Release -> its surface."""
    return json.loads(RECORD.read_text())


def installed() -> str | None:
    """Release of SGLang that is installed."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def known_release() -> str | None:
    """The recorded release that is installed, or whose later build is; None: nobody looked."""
    found = (installed() or "").partition("+")[0].partition(".post")[0]
    return found if found in recorded() else None


def differences(found: Surface, known: Surface) -> list[tuple[bool | None, str]]:
    """Differences of ``found`` from ``known``: (None if it may still work, else False; text)."""
    return surfaces.differences(found, known, _may_do)


def _may_do(name: str, got: Value, wanted: Value) -> bool:
    """A setting, a name that nobody may have bound, or parameters in another order."""
    if name in (*SETTINGS, *BOUND):
        return True
    return isinstance(got, list) and isinstance(wanted, list) and set(wanted) <= set(got)
