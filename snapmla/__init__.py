"""FP8 Multi-head Latent Attention kernels (Hopper, Blackwell) behind one small API.

    cache = snapmla.PagedKVCache.allocate(num_pages, device="cuda")
    snapmla.append_kv(cache, c_kv, k_rope, slot_mapping)
    q = snapmla.quantize_q(q_nope, q_rope)
    plan = snapmla.plan_decode(cache_seqlens, num_heads, s_q, page_size=64, max_pages=width)
    out, lse = snapmla.decode(q, cache, block_table, cache_seqlens, softmax_scale=s, plan=plan)

CUDA tensors run on the GPU; CPU tensors run the same compiled kernels on the software GPU.
"""

import sys as _sys

from snapmla import torch_ops as _torch_ops  # noqa: F401 (registers operators and pytrees)
from snapmla._version import __version__
from snapmla.api import decode
from snapmla.cache.convert import convert_cache
from snapmla.cache.fetch import fetch_dequant
from snapmla.cache.paged import PagedKVCache
from snapmla.cache.quant import QuantizedQuery, append_kv, quantize_q
from snapmla.cache.rope import rope_append_kv, rope_quantize_q
from snapmla.compat.flash_mla.name import install_as_flash_mla
from snapmla.dense import DecodePlan
from snapmla.dense.merge import merge_state, merge_states
from snapmla.dense.plan_cache import PlanCache
from snapmla.dense.plan_decode import plan_decode
from snapmla.errors import SnapMLAError, UnsupportedDeviceError, VariantError
from snapmla.mha import mha_prefill, mha_prefill_backward
from snapmla.rank import explain
from snapmla.runtime import env as _env
from snapmla.sparse import SparsePlan, SparsePlanCache, SparseRowsPlan, plan_sparse_decode
from snapmla.sparse.explain import explain_prefill
from snapmla.sparse.prefill import sparse_prefill
from snapmla.sparse.prefill_fp8 import plan_sparse_prefill

__all__ = [
    "DecodePlan",
    "PagedKVCache",
    "PlanCache",
    "QuantizedQuery",
    "SnapMLAError",
    "SparsePlan",
    "SparsePlanCache",
    "SparseRowsPlan",
    "UnsupportedDeviceError",
    "VariantError",
    "__version__",
    "append_kv",
    "convert_cache",
    "decode",
    "explain",
    "explain_prefill",
    "fetch_dequant",
    "install_as_flash_mla",
    "merge_state",
    "merge_states",
    "mha_prefill",
    "mha_prefill_backward",
    "plan_decode",
    "plan_sparse_decode",
    "plan_sparse_prefill",
    "quantize_q",
    "rope_append_kv",
    "rope_quantize_q",
    "sparse_prefill",
]

if _env.PROFILE_NAMES.enabled():
    from snapmla.compat import flash_mla as _flash_mla
    from snapmla.compat import flash_mla_fp8 as _flash_mla_fp8
    from snapmla.runtime import profiler as _profiler

    _profiler.name_calls(_sys.modules[__name__], __all__)
    _profiler.name_calls(_flash_mla, _flash_mla.__all__)
    _profiler.name_calls(_flash_mla_fp8, _flash_mla_fp8.__all__)
    _profiler.name_calls(DecodePlan, ["update_"], "snapmla::plan.")

# Public paths, as attributes; behind the names that a profiler sees.
from snapmla import dsa, flash_mla, layouts, mha  # noqa: F401
