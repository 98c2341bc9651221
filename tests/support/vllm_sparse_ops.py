"""Stand-ins, on CPU tensors, for what vLLM computes by CUDA and Triton for sparse attention.

``replacements`` lists them with the names that they stand for: the kernel that turns positions into
rows, the one that describes chunks of prompts, streams.  The two fused operators of the layer that
CUDA builds use are ``fused_norm_rope``, by our kernels, and ``fused_q``.  What our backend and
indexer do is not here.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import snapmla
from tests.support import vllm_engine as dense
from tests.support.vllm_engine import ROPE

CONVERTED: list[int] = []  # query tokens of each call that turned positions into rows
MLA = "vllm.model_executor.layers.attention.mla_attention"
SPARSE = "vllm.model_executor.layers.attention.sparse_mla_attention"
INDEX_BUILDER = "vllm.v1.attention.backends.mla.indexer"


# ---------------------------------------------------------------------- what vLLM does by Triton


def converted(
    req_id: Tensor, block_table: Tensor, token_indices: Tensor, *, BLOCK_SIZE: int = 64,
    BLOCK_STRIDE_ROWS: int | None = None, return_valid_counts: bool = False,
    out: Tensor | None = None, valid_counts_out: Tensor | None = None, dcp_size: int = 1,
    dcp_rank: int = 0, cp_kv_cache_interleave_size: int = 1, **_: Any,
) -> Any:  # fmt: skip
    """Positions as rows of the cache, this rank's in front."""
    CONVERTED.append(len(req_id))
    assert len(req_id) == len(token_indices)
    place, turn = token_indices.long(), cp_kv_cache_interleave_size
    local = place // (dcp_size * turn) * turn + place % turn
    block, width = local // BLOCK_SIZE, block_table.shape[1]
    mine = (place >= 0) & (place // turn % dcp_size == dcp_rank) & (block < width)
    page = block_table[req_id.long()].gather(1, block.clamp(0, width - 1))
    rows = page * (BLOCK_STRIDE_ROWS or BLOCK_SIZE) + local % BLOCK_SIZE
    order = (~mine).int().sort(dim=-1, stable=True).indices
    rows = torch.where(mine, rows, -1).gather(1, order).int()
    counts = mine.sum(-1, dtype=torch.int32)
    if out is not None:
        rows = out.copy_(rows)
        counts = counts if valid_counts_out is None else valid_counts_out.copy_(counts)
    return (rows, counts) if return_valid_counts else rows


class ChunkKernel:
    """The kernel that describes chunks of prompts, called with a grid or as it is."""

    def __getitem__(self, grid: Any) -> ChunkKernel:
        return self

    def __call__(
        self, begins: Tensor, lengths: Tensor, cu: Tensor, local_cu: Tensor, to_seq: Tensor,
        ks: Tensor, ke: Tensor, start: int, stop: int, rank: int, world: int, turn: int, **_: Any,
    ) -> None:  # fmt: skip
        for i in range(len(begins) - 1):
            a, b = int(begins[i]), int(begins[i + 1])
            at = torch.arange(max(a, start), min(b, stop))
            seen = lengths[i] - (b - a) + 1 + at - a
            whole = seen // (turn * world) * turn
            seen = whole + (seen - whole * world - rank * turn).clamp(0, turn)
            ks[at - start], ke[at - start] = local_cu[i], (local_cu[i] + seen).int()
            to_seq[int(cu[i]) : int(cu[i + 1])] = i


def group_quantised(x: Tensor, group: int, **_: Any) -> tuple[Tensor, Tensor]:
    """vLLM's ``per_token_group_quant_fp8`` with scales that are powers of two."""
    largest = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def requests_of(begins: Tensor, out: Tensor, tokens: int, *_: Any) -> Tensor:
    """vLLM's ``compute_token_to_req_indices``."""
    found = torch.searchsorted(begins[1:], torch.arange(tokens), right=True)
    out[:tokens] = found.clamp(max=len(begins) - 2).int()
    return out[:tokens]


def replacements() -> Iterator[tuple[str, str, Any]]:
    """(module, name, what stands for it) of those that this release has."""
    nothing = lambda *_: mock.MagicMock()
    plain = dense.prefill_backend()
    group = "vllm.v1.attention.backends.mla.index_group"
    utils = "vllm.v1.attention.backends.mla.sparse_utils"
    convert = "triton_convert_req_index_to_global_index"
    told: list[tuple[str, str, Any]] = [
        (MLA, "merge_attn_states", dense.merged),
        (MLA, "get_mla_prefill_backend", lambda *_: plain),
        *((module, convert, converted) for module in (SPARSE, group, utils)),
        *((module, "triton_filter_and_convert_dcp_index", converted) for module in (SPARSE, utils)),
        *((group, name, nothing) for name in ("_create_side_stream", "_create_event")),
        (group, "current_stream", mock.MagicMock()),
        *((module, "PIN_MEMORY", False) for module in (SPARSE, MLA, "vllm.utils.torch_utils")),
        ("vllm.v1.attention.ops.metadata", "compute_token_to_req_indices", requests_of),
        (INDEX_BUILDER, "_BUILD_PREFILL_CHUNK_METADATA_KERNEL", ChunkKernel()),
        (INDEX_BUILDER, "_build_prefill_chunk_metadata_kernel", ChunkKernel()),
        ("vllm.model_executor.models.deepseek_v2", "per_token_group_quant_fp8", group_quantised),
    ]
    for module, name, value in told:
        with contextlib.suppress(ImportError):
            if hasattr(importlib.import_module(module), name):
                yield module, name, value


# ------------------------------------------------------- operators of the layer of CUDA builds


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = (x.float().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return (x.float() * scale * weight.float()).to(x.dtype)


def rotated(x: Tensor, table: Tensor, positions: Tensor, neox: bool = False) -> Tensor:
    cos, sin = table[positions].float().chunk(2, -1)
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = x.float().chunk(2, -1) if neox else (x[..., ::2].float(), x[..., 1::2].float())
    pair = (a * cos - b * sin, b * cos + a * sin)
    return (torch.cat(pair, -1) if neox else torch.stack(pair, -1).flatten(-2)).to(x.dtype)


def fused_norm_rope(
    positions: Tensor, q_c: Tensor, q_weight: Tensor, q_eps: float, kv_c: Tensor, kv_weight: Tensor,
    kv_eps: float, k_pe: Tensor, table: Tensor, index_k: Tensor | None, index_weight: Tensor | None,
    index_bias: Tensor | None, index_eps: float, index_table: Tensor | None, topk: Tensor, *,
    slot_mapping: Tensor, indexer_k_cache: Tensor | None, mla_kv_cache: Tensor,
    mla_kv_cache_dtype: str, index_rope_interleave: bool, kv_c_out: Tensor, k_pe_out: Tensor,
    **_: Any,
) -> Tensor:  # fmt: skip
    """vLLM's fused operator by our kernels: norms, RoPE, and both caches' new tokens."""
    assert mla_kv_cache_dtype == "fp8_ds_mla"
    kv_c_out.copy_(rms(kv_c, kv_weight, kv_eps))
    k_pe_out.copy_(rotated(k_pe, table, positions))
    pages = snapmla.PagedKVCache.from_tensors(
        mla_kv_cache, format="fp8_ds_mla", scale_fmt="ue8m0"
    )  # fmt: skip
    snapmla.rope_append_kv(
        pages, kv_c, k_pe, slot_mapping, positions, table, norm_weight=kv_weight, norm_eps=kv_eps
    )
    if indexer_k_cache is not None:
        snapmla.indexer.append_index_k(
            indexer_k_cache, index_k.contiguous(), slot_mapping, positions=positions,
            cos_sin_cache=index_table, is_neox=not index_rope_interleave,
            norm_weight=index_weight, norm_bias=index_bias, norm_eps=index_eps,
        )  # fmt: skip
    return rms(q_c, q_weight, q_eps)


def fused_q(
    positions: Tensor, q_pe: Tensor, table: Tensor, index_q: Tensor | None,
    index_table: Tensor | None, ql_nope: Tensor, q_scale: Tensor, weights: Tensor | None,
    softmax_scale: float, head_scale: float, *, has_indexer: bool, index_rope_interleave: bool,
    quantize_mqa: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """vLLM's other one, by torch."""
    assert not quantize_mqa
    turned = rotated(q_pe, table, positions)
    if not has_indexer:
        return None, None, turned
    first = rotated(index_q[..., :ROPE], index_table, positions, not index_rope_interleave)
    whole = torch.cat([first, index_q[..., ROPE:]], -1).float()
    scale = torch.exp2(torch.ceil(torch.log2(whole.abs().amax(-1).clamp_min(1e-10) / 448)))
    quantised = (whole / scale[..., None]).to(torch.float8_e4m3fn)
    return quantised, weights.float() * scale * softmax_scale * head_scale, turned
