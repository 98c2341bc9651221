"""What the backend relies on in vLLM, read from an installation or from the record of releases.

``surface.json`` holds it for the releases that the backend was run with: parameters of functions
and methods, fields of dataclasses, and which names are there.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("surface.json")
_MLA = "vllm.model_executor.layers.attention.mla_attention"
_BACKEND = "vllm.v1.attention.backend"
_BACKENDS = "vllm.v1.attention.backends"
# module:name, in the order of the backend's text; name@attribute: what the function's text mentions
RELIED = (
    f"{_BACKENDS}.registry:AttentionBackendEnum.CUSTOM",
    f"{_BACKENDS}.registry:register_backend",
    "vllm.config.cache:register_kv_cache_dtype",
    "vllm.config.cache:KV_CACHE_DTYPES",
    "vllm.v1.kv_cache_interface:KVQuantMode",
    "vllm.envs:VLLM_BATCH_INVARIANT",
    "vllm.distributed.parallel_state:get_dcp_group",
    f"{_BACKEND}:AttentionCGSupport.UNIFORM_BATCH",
    f"{_BACKEND}:AttentionType.DECODER",
    f"{_BACKENDS}.utils:get_dcp_local_seq_lens",
    f"{_MLA}:MLACommonBackend.customize_spec",
    f"{_MLA}:MLACommonBackend.get_supported_head_sizes",
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
    f"{_MLA}:MLACommonImpl._compute_prefill_context",
    f"{_MLA}:MLACommonImpl._context_parallel_compute_prefill_context",
    f"{_MLA}:ops.cp_gather_and_upconvert_fp8_kv_cache",
    f"{_MLA}:ops.gather_and_maybe_dequant_cache",
    "vllm.config.compilation:PassConfig.fuse_rope_kvcache_cat_mla",
)
# of newer releases only; without them the backend takes the older way
OPTIONAL = frozenset({
    "vllm.config.cache:register_kv_cache_dtype",
    "vllm.config.cache:KV_CACHE_DTYPES",
    f"{_MLA}:MLACommonBackend.customize_spec",
})  # fmt: skip
Surface = dict[str, list[str] | bool]


def read() -> Surface:
    """Name -> parameters or fields, True for what has none, False for what is not there."""
    return {name: _described(name) for name in RELIED}


def _described(name: str) -> list[str] | bool:
    module, _, path = name.partition(":")
    path, _, mentioned = path.partition("@")
    try:
        value: Any = importlib.import_module(module)
        *owners, last = path.split(".")
        for owner in owners:
            value = getattr(value, owner)
        if last in getattr(value, "__dataclass_fields__", ()):
            return True  # a field, of a default or not
        value = getattr(value, last)
    except (ImportError, AttributeError):
        return False
    if mentioned:
        return mentioned in value.__code__.co_names
    if isinstance(value, type):
        if dataclasses.is_dataclass(value):
            return [field.name for field in dataclasses.fields(value)]
        return True
    return list(inspect.signature(value).parameters) if callable(value) else True


def recorded() -> dict[str, Surface]:
    """Release -> its surface."""
    return json.loads(RECORD.read_text())


def differences(found: Surface, known: Surface) -> list[tuple[bool | None, str]]:
    """What of ``known`` is otherwise in ``found``: (None if it may do, else False; a sentence)."""
    said: list[tuple[bool | None, str]] = []
    for name, wanted in known.items():
        got = found.get(name, False)
        if got == wanted or _adds(got, wanted):
            continue
        lists = isinstance(got, list) and isinstance(wanted, list)
        ok = None if lists and set(wanted) <= set(got) else False  # type: ignore[arg-type]
        said.append((ok, f"{name}: {_text(wanted)} is {_text(got)} here"))
    return said


def _adds(got: list[str] | bool, wanted: list[str] | bool) -> bool:
    """Whether parameters are those that are known and others behind them, or nothing was needed."""
    if isinstance(got, list) and isinstance(wanted, list):
        return got[: len(wanted)] == wanted
    return wanted is False


def _text(value: list[str] | bool) -> str:
    if isinstance(value, list):
        return f"({', '.join(value)})"
    return "there" if value else "missing"
