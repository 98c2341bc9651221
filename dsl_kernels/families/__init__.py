"""One family an op: in what its variants differ, which are built, which module builds them.

Standard library only, and one file an op: hosts without the compiler read them.  ``FAMILIES`` is
the list of ops; matrix, registry, names, docs and tests ask it.
"""

from __future__ import annotations

from ..formats.registered import FORMATS, Format
from . import (
    append_index_k,
    append_kv,
    dense_decode,
    dsa_prologue,
    fetch_dequant,
    fetch_index_k,
    fp8_decode,
    index_logits,
    index_rows,
    merge,
    merge_states,
    mha_bwd,
    mha_fwd,
    mha_items,
    mha_merge,
    plan_decode,
    plan_to_records,
    quantize_q,
    record_decode,
    records_to_plan,
    select_topk,
    sparse_decode,
    sparse_prefill,
)
from .family import DECODE, HELPER, MHA, PREFILL, Axis, Family

ARCHS: tuple[str, ...] = ("sm_90a", "sm_100a")
UNTESTED: tuple[str, ...] = ("sm_100a",)  # whose kernels ran on the software GPU only
# What a cubin is assembled for -> the compute capabilities that load it; variants of sm_100a are
# assembled for either of the last two, and named alike.
TARGETS: dict[str, tuple[tuple[int, int], ...]] = {
    "sm_90a": ((9, 0),),
    "sm_100a": ((10, 0),),
    "sm_100f": ((10, 0), (10, 3)),
}
_MODULES = (
    plan_decode,
    records_to_plan,
    plan_to_records,
    merge,
    merge_states,
    append_kv,
    quantize_q,
    fetch_dequant,
    select_topk,
    fp8_decode,
    dense_decode,
    sparse_decode,
    record_decode,
    mha_items,
    mha_merge,
    mha_fwd,
    append_index_k,
    index_logits,
    sparse_prefill,
    index_rows,
    fetch_index_k,
    dsa_prologue,
)
_BACKWARD = (mha_bwd.DELTA, mha_bwd.DQ, mha_bwd.DKV, mha_bwd.ROPE_SUM)
FAMILIES: dict[str, Family] = {
    family.op: family for family in (*(module.FAMILY for module in _MODULES), *_BACKWARD)
}

__all__ = [
    "ARCHS",
    "DECODE",
    "FAMILIES",
    "FORMATS",
    "HELPER",
    "MHA",
    "PREFILL",
    "TARGETS",
    "Axis",
    "Family",
    "Format",
]
