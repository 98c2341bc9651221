"""Calls of every public op whose extents are 1 wherever that is legal, on real kernels.

A call is a function of plain tensors: caches, queries and plans are made of them inside, so that
tests can give each tensor other strides, or one tensor in two places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

import snapmla
from snapmla import PagedKVCache, QuantizedQuery, dsa
from snapmla.compat import deep_gemm, flash_attention, flash_mla, flash_mla_fp8, vllm
from snapmla.compat.flash_mla import mha
from snapmla.parallel import ContextGroup

Tensors = dict[str, Tensor]
Made = tuple[Callable[..., Any], Tensors]
BF16, I32, I64, U8, E4M3 = (
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.float8_e4m3fn,
)
P, SCALE = 64, 0.1
TOKENS = 9  # of the one sequence


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return (0.3 * torch.randn(shape)).to(dtype)


def numbers(*values: int, dtype: torch.dtype = I32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def pages(fmt: str | torch.dtype = "fp8", page_size: int = P) -> Tensors:
    """The tensors of a cache of one page that is full."""
    cache = PagedKVCache.allocate(1, page_size, device="cpu", dtype=fmt)
    channels = 512 if fmt in ("fp8_v4", "fp8_nope", "fp8_v41_rows") else None
    latent = normal(page_size, 512 if channels else 576)
    slots = torch.arange(page_size)
    rope = latent[:, 448:] if channels and fmt == "fp8_v4" else latent[:, 512:]
    content = latent[:, :448] if fmt == "fp8_v4" else latent[:, :512]
    dtype = fmt if isinstance(fmt, torch.dtype) else BF16
    snapmla.append_kv(cache, content.to(dtype), rope.to(dtype), slots.int())
    return dict(cache.named_tensors)


def fp8_cache(t: Tensors) -> PagedKVCache:
    return PagedKVCache.from_tensors(t["content"], t["rope"], t["scale"])


def query(heads: int = 1) -> Tensors:
    made = snapmla.quantize_q(normal(1, 1, heads, 512), normal(1, 1, heads, 64))
    return {"nope": made.nope, "q_rope": made.rope, "q_scale": made.scale}


def quantised(t: Tensors) -> QuantizedQuery:
    return QuantizedQuery(t["nope"], t["q_rope"], t["q_scale"])


def step() -> Tensors:
    return {"block_table": numbers(0).view(1, 1), "cache_seqlens": numbers(TOKENS)}


def results(*shape: int, lse: tuple[int, ...] = (1, 1, 1), dtype: torch.dtype = BF16) -> Tensors:
    return {"out": torch.zeros(*shape, dtype=dtype), "lse": torch.zeros(lse)}


# ------------------------------------------------------------------------------- the caches' ops


def append_kv() -> Made:
    def call(**t: Tensor) -> None:
        snapmla.append_kv(fp8_cache(t), t["c_kv"], t["k_rope"], t["slot_mapping"])

    return call, {
        **pages(), "c_kv": normal(1, 512), "k_rope": normal(1, 64), "slot_mapping": numbers(5),
    }  # fmt: skip


def append_rows() -> Made:
    def call(kv: Tensor, **t: Tensor) -> None:
        snapmla.append_kv(PagedKVCache.from_tensors(kv), **t)

    return call, {
        "kv": normal(1, P, 1, 576), "c_kv": normal(1, 512), "k_rope": normal(1, 64),
        "slot_mapping": numbers(5),
    }  # fmt: skip


def append_bytes() -> Made:
    def call(kv: Tensor, **t: Tensor) -> None:
        snapmla.append_kv(PagedKVCache.from_tensors(kv, format="fp8_ds_mla"), **t)

    return call, {
        "kv": torch.zeros(1, P, 1, 656, dtype=U8), "c_kv": normal(1, 512),
        "k_rope": normal(1, 64), "slot_mapping": numbers(5),
    }  # fmt: skip


def rope_append_kv() -> Made:
    def call(content: Tensor, rope: Tensor, scale: Tensor, **t: Tensor) -> None:
        cache = PagedKVCache.from_tensors(content, rope, scale)
        snapmla.rope_append_kv(cache, **t, is_neox=False)

    return call, {
        **pages(), "c_kv": normal(1, 512), "k_rope": normal(1, 64),
        "slot_mapping": numbers(0, dtype=I64), "positions": numbers(0, dtype=I64),
        "cos_sin_cache": normal(1, 64, dtype=torch.float32),
        "norm_weight": normal(512),
    }  # fmt: skip


def quantize_q() -> Made:
    def call(q_nope: Tensor, q_rope: Tensor, nope: Tensor, rope: Tensor, scale: Tensor) -> None:
        snapmla.quantize_q(q_nope, q_rope, out=QuantizedQuery(nope, rope, scale))

    return call, {
        "q_nope": normal(1, 1, 1, 512), "q_rope": normal(1, 1, 1, 64),
        "nope": torch.zeros(1, 1, 1, 512, dtype=U8).view(E4M3),
        "rope": torch.zeros(1, 1, 1, 64, dtype=BF16), "scale": torch.zeros(1, 1, 1),
    }  # fmt: skip


def rope_quantize_q() -> Made:
    def call(**t: Tensor) -> Any:
        return snapmla.rope_quantize_q(**t, is_neox=True)

    return call, {
        "q_nope": normal(1, 1, 1, 512), "q_rope": normal(1, 1, 1, 64),
        "positions": numbers(0, dtype=I64).view(1, 1), "cos_sin_cache": normal(1, 64),
    }  # fmt: skip


def fetch_pages() -> Made:
    def call(where: Tensor, cache_seqlens: Tensor, out: Tensor, **t: Tensor) -> None:
        snapmla.fetch_dequant(fp8_cache(t), where, cache_seqlens, out=out)

    return call, {
        **pages(), "where": numbers(0).view(1, 1), "cache_seqlens": numbers(1),
        "out": torch.zeros(1, 1, 576, dtype=BF16),
    }  # fmt: skip


def fetch_slots() -> Made:
    def call(where: Tensor, latent: Tensor, roped: Tensor, **t: Tensor) -> None:
        snapmla.fetch_dequant(fp8_cache(t), where, out=(latent, roped))

    return call, {
        **pages(), "where": numbers(7), "latent": torch.zeros(1, 512, dtype=BF16),
        "roped": torch.zeros(1, 64, dtype=BF16),
    }  # fmt: skip


def fetch_chunks() -> Made:
    def call(
        where: Tensor, cu_seqlens: Tensor, seq_starts: Tensor, out: Tensor, **t: Tensor
    ) -> None:
        snapmla.fetch_dequant(
            fp8_cache(t), where, cu_seqlens=cu_seqlens, seq_starts=seq_starts, out=out
        )

    return call, {
        **pages(), "where": numbers(0).view(1, 1), "cu_seqlens": numbers(0, 1),
        "seq_starts": numbers(3), "out": torch.zeros(1, 576, dtype=BF16),
    }  # fmt: skip


def convert_cache() -> Made:
    def call(kv: Tensor, pages: Tensor, out_pages: Tensor, **t: Tensor) -> None:
        source = PagedKVCache.from_tensors(kv, format="fp8_ds_mla")
        snapmla.convert_cache(source, fp8_cache(t), pages=pages, out_pages=out_pages)

    return call, {
        "kv": pages("fp8_ds_mla")["kv"], **pages(), "pages": numbers(0, dtype=I64),
        "out_pages": numbers(0),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------- decode


def decode() -> Made:
    def call(
        block_table: Tensor, cache_seqlens: Tensor, out: Tensor, lse: Tensor, **t: Tensor
    ) -> None:
        plan = snapmla.plan_decode(cache_seqlens, 1, 1, page_size=P, max_pages=1, row_tile=16)
        plan.update_(cache_seqlens)
        snapmla.decode(
            quantised(t), fp8_cache(t), block_table, cache_seqlens, softmax_scale=SCALE, plan=plan,
            out=out, lse=lse,
        )  # fmt: skip

    return call, {**query(), **pages(), **step(), **results(1, 1, 1, 512)}


def decode_rows() -> Made:
    def call(q: Tensor, kv: Tensor, cache_seqlens: Tensor, **t: Tensor) -> None:
        plan = snapmla.plan_decode(
            cache_seqlens, 1, 1, page_size=16, max_pages=1, cache_dtype=torch.float16, row_tile=16
        )
        snapmla.decode(
            q, PagedKVCache.from_tensors(kv), cache_seqlens=cache_seqlens, softmax_scale=SCALE,
            plan=plan, **t,
        )  # fmt: skip

    half = torch.float16
    return call, {
        "q": normal(1, 1, 1, 576, dtype=half), "kv": normal(1, 16, 1, 576, dtype=half), **step(),
        **results(1, 1, 1, 512, dtype=half),
    }  # fmt: skip


def decode_bytes() -> Made:
    def call(q: Tensor, kv: Tensor, cache_seqlens: Tensor, **t: Tensor) -> None:
        plan = snapmla.plan_decode(
            cache_seqlens, 1, 1, page_size=P, max_pages=1, cache_dtype="fp8_ds_mla", row_tile=16
        )
        cache = PagedKVCache.from_tensors(kv, format="fp8_ds_mla")
        snapmla.decode(q, cache, cache_seqlens=cache_seqlens, softmax_scale=SCALE, plan=plan, **t)

    return call, {
        "q": normal(1, 1, 1, 576), "kv": pages("fp8_ds_mla")["kv"], **step(),
        **results(1, 1, 1, 512),
    }  # fmt: skip


def ragged() -> Tensors:
    """Offsets and limits of one query token, those of a plan and a call's own."""
    made = {"planned_offsets": numbers(0, 1), "planned_limits": numbers(TOKENS)}
    return {**made, "cu_seqlens_q": numbers(0, 1), "row_seqlens": numbers(TOKENS)}


def decode_witness() -> Made:
    """Ragged queries, limits, and a witness of both."""

    def call(
        cu_seqlens_q: Tensor, row_seqlens: Tensor, out: Tensor, lse: Tensor, **t: Tensor
    ) -> None:  # fmt: skip
        plan = snapmla.plan_decode(
            t["cache_seqlens"], 1, cu_seqlens_q=t["planned_offsets"], total_q=1, page_size=P,
            max_pages=1, row_tile=16, row_seqlens=t["planned_limits"],
        )  # fmt: skip
        query = QuantizedQuery(*(t[n][0] for n in ("nope", "q_rope", "q_scale")))
        snapmla.decode(
            query, fp8_cache(t), t["block_table"], t["cache_seqlens"], softmax_scale=SCALE,
            plan=plan, out=out, lse=lse, cu_seqlens_q=cu_seqlens_q, row_seqlens=row_seqlens,
        )  # fmt: skip

    return call, {**query(), **pages(), **step(), **ragged(), **results(1, 1, 512, lse=(1, 1))}


def plan_cache() -> Made:
    """A ``PlanCache`` that plans, and plans anew, a ragged step with limits."""
    plans = snapmla.PlanCache(1, page_size=P, device="cpu", row_tile=16)

    def call(out: Tensor, lse: Tensor, **t: Tensor) -> None:
        plan = plans.get(
            t["cache_seqlens"], max_pages=1, cu_seqlens_q=t["cu_seqlens_q"], total_q=1,
            row_seqlens=t["row_seqlens"],
        )  # fmt: skip
        query = QuantizedQuery(*(t[n][0] for n in ("nope", "q_rope", "q_scale")))
        snapmla.decode(
            query, fp8_cache(t), t["block_table"], t["cache_seqlens"], softmax_scale=SCALE,
            plan=plan, out=out, lse=lse,
        )  # fmt: skip

    own = {"cu_seqlens_q": numbers(0, 1), "row_seqlens": numbers(TOKENS)}
    return call, {**query(), **pages(), **step(), **own, **results(1, 1, 512, lse=(1, 1))}


def context_group() -> Made:
    """A rank alone; its plan is made once and updated with each call's lengths and offsets."""
    kept: list[tuple[Any, Any]] = []

    def call(
        cache_seqlens: Tensor, planned_offsets: Tensor, q_nope: Tensor, q_rope: Tensor,
        block_table: Tensor, cu_seqlens_q: Tensor, out: Tensor, lse: Tensor, **t: Tensor,
    ) -> None:  # fmt: skip
        if not kept:
            group = lone_group()
            options: dict[str, Any] = {"page_size": P, "max_pages": 1, "row_tile": 16}
            options |= {"cu_seqlens_q": planned_offsets, "total_q": 1}
            kept.append((group, group.plan_decode(cache_seqlens, **options)))
        group, plan = kept[0]
        plan.update_(cache_seqlens, planned_offsets)
        group.decode(
            q_nope, q_rope, fp8_cache(t), block_table, plan, softmax_scale=SCALE, out=out, lse=lse,
            cu_seqlens_q=cu_seqlens_q,
        )  # fmt: skip

    offsets = {"planned_offsets": numbers(0, 1), "cu_seqlens_q": numbers(0, 1)}
    return call, {
        "q_nope": normal(1, 1, 512), "q_rope": normal(1, 1, 64), **pages(), **step(), **offsets,
        **results(1, 1, 512, lse=(1, 1)),
    }  # fmt: skip


def lone_group() -> Any:
    """Context parallelism of this process alone; whoever asks ends the process group."""
    if not distributed.is_initialized():
        store = distributed.HashStore()
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return ContextGroup(num_heads=1, transport=BF16)


def listed(topk: int = 1) -> Tensors:
    return {"indices": torch.full((1, 1, topk), 5, dtype=I32), "topk_length": numbers(1)}


def sparse_decode() -> Made:
    def call(
        indices: Tensor,
        topk_length: Tensor,
        attn_sink: Tensor,
        out: Tensor,
        lse: Tensor,
        **t: Tensor,
    ) -> None:
        plan = snapmla.plan_sparse_decode(1, 1, topk=1, topk_length=topk_length, row_tile=16)
        snapmla.decode(
            quantised(t), fp8_cache(t), softmax_scale=SCALE, plan=plan, indices=indices,
            topk_length=topk_length, attn_sink=attn_sink, out=out, lse=lse,
        )  # fmt: skip

    return call, {
        **query(), **pages(), **listed(), "attn_sink": torch.zeros(1), **results(1, 1, 1, 512),
    }  # fmt: skip


def sparse_decode_bytes() -> Made:
    def call(q: Tensor, kv: Tensor, topk_length: Tensor, **t: Tensor) -> None:
        plan = snapmla.plan_sparse_decode(
            1, 1, topk=1, topk_length=topk_length, row_tile=16, cache_dtype="fp8_ds_mla"
        )
        cache = PagedKVCache.from_tensors(kv, format="fp8_ds_mla")
        snapmla.decode(q, cache, softmax_scale=SCALE, plan=plan, topk_length=topk_length, **t)

    return call, {
        "q": normal(1, 1, 1, 576), "kv": pages("fp8_ds_mla")["kv"], **listed(),
        "attn_sink": torch.zeros(1), **results(1, 1, 1, 512),
    }  # fmt: skip


def sparse_decode_apart() -> Made:
    """Queries as two tensors, a witness of lengths of query tokens."""
    plans = snapmla.SparsePlanCache(1, device="cpu", row_tile=16, cache_dtype="fp8_ds_mla")

    def call(q_nope: Tensor, q_rope: Tensor, kv: Tensor, row_lengths: Tensor, **t: Tensor) -> None:
        plan = plans.get(None, 1, topk=1, batch=1, row_lengths=row_lengths)
        cache = PagedKVCache.from_tensors(kv, format="fp8_ds_mla")
        snapmla.decode((q_nope, q_rope), cache, softmax_scale=SCALE, plan=plan, **t)

    return call, {
        "q_nope": normal(1, 1, 1, 512), "q_rope": normal(1, 1, 1, 64),
        "kv": pages("fp8_ds_mla")["kv"], "indices": listed()["indices"],
        "row_lengths": numbers(1).view(1, 1), "row_seqlens": numbers(1).view(1, 1),
        "attn_sink": torch.zeros(1), **results(1, 1, 1, 512),
    }  # fmt: skip


def sparse_decode_rows() -> Made:
    def call(q: Tensor, kv: Tensor, topk_length: Tensor, **t: Tensor) -> None:
        plan = snapmla.plan_sparse_decode(1, 1, topk=1, topk_length=topk_length, cache_dtype="bf16")
        cache = PagedKVCache.from_tensors(kv)
        snapmla.decode(q, cache, softmax_scale=SCALE, plan=plan, topk_length=topk_length, **t)

    return call, {
        "q": normal(1, 1, 1, 576), "kv": normal(1, P, 1, 576), **listed(),
        "attn_sink": torch.zeros(1), **results(1, 1, 1, 512),
    }  # fmt: skip


def two_lists() -> Made:
    """FlashMLA's name over V4's pages, of which one cache serves both lists."""

    def call(**t: Tensor) -> Any:
        metadata, _ = flash_mla.get_mla_metadata()
        return flash_mla.flash_mla_with_kvcache(
            block_table=None, cache_seqlens=None, head_dim_v=512, tile_scheduler_metadata=metadata,
            is_fp8_kvcache=True, softmax_scale=SCALE, **t,
        )  # fmt: skip

    more = {f"extra_{n}": x for n, x in listed().items()}
    return call, {
        "q": normal(1, 1, 1, 512), "k_cache": pages("fp8_v4")["kv"],
        "extra_k_cache": pages("fp8_v4")["kv"], "indices": listed()["indices"],
        "topk_length": listed()["topk_length"], "attn_sink": torch.zeros(1),
        "extra_indices_in_kvcache": more["extra_indices"],
        "extra_topk_length": more["extra_topk_length"],
    }  # fmt: skip


def flash_mla_dense() -> Made:
    def call(**t: Tensor) -> Any:
        metadata, _ = flash_mla.get_mla_metadata()
        return flash_mla.flash_mla_with_kvcache(
            head_dim_v=512, tile_scheduler_metadata=metadata, softmax_scale=SCALE, **t
        )

    half = torch.float16
    return call, {
        "q": normal(1, 1, 1, 576, dtype=half), "k_cache": normal(1, 16, 1, 576, dtype=half),
        **step(),
    }  # fmt: skip


def flash_mla_records() -> Made:
    def call(cache_seqlens: Tensor, **t: Tensor) -> Any:
        metadata, splits = flash_mla.get_mla_metadata(cache_seqlens, 1, 1)
        return flash_mla.flash_mla_with_kvcache(
            cache_seqlens=cache_seqlens, head_dim_v=512, tile_scheduler_metadata=metadata,
            num_splits=splits, softmax_scale=SCALE, **t,
        )  # fmt: skip

    half = torch.float16
    return call, {
        "q": normal(1, 1, 1, 576, dtype=half), "k_cache": normal(1, 16, 1, 576, dtype=half),
        **step(),
    }  # fmt: skip


def snapmla_names() -> Made:
    def call(cache_seqlens: Tensor, **t: Tensor) -> Any:
        metadata, splits = flash_mla_fp8.get_mla_metadata(cache_seqlens, 1, 1)
        return flash_mla_fp8.flash_mla_ckv_fp8_per_token(
            cache_seqlens=cache_seqlens, head_dim_v=512, tile_scheduler_metadata=metadata,
            num_splits=splits, **t,
        )  # fmt: skip

    made, cache = query(), pages()
    return call, {
        "q_nope": made["nope"], "q_rope": made["q_rope"], "q_scale": made["q_scale"][..., None],
        "k_cache_lora": cache["content"][:, :, None], "k_cache_rope": cache["rope"][:, :, None],
        "k_scale": cache["scale"][..., None, None], **step(),
    }  # fmt: skip


def snapmla_pool() -> Made:
    def call(**t: Tensor) -> Any:
        return flash_mla_fp8.quantize_and_cache_k(head_dim_v=512, **t)

    return call, {
        "key": normal(1, 1, 576), "k_lora_cache": torch.zeros(16, 1, 512, dtype=U8),
        "k_lora_scale_cache": torch.zeros(16, 1, 1), "indices": numbers(0),
        "k_rope_cache": torch.zeros(16, 1, 64, dtype=BF16),
    }  # fmt: skip


def snapmla_fetch() -> Made:
    def call(**t: Tensor) -> Any:
        return flash_mla_fp8.dequantize_ckv_fused_indexed(**t)

    return call, {
        "k_lora": normal(16, 1, 512).to(E4M3), "k_rope": normal(16, 1, 64),
        "k_scale": torch.ones(16, 1, 1), "indices": numbers(0),
    }  # fmt: skip


# ----------------------------------------------------------------------------- merge and prefill


def merge_state() -> Made:
    def call(**t: Tensor) -> Any:
        return snapmla.merge_state(**t)

    return call, {
        "out_a": normal(1, 1, 1, 512), "lse_a": torch.randn(1, 1, 1),
        "out_b": normal(1, 1, 1, 512), "lse_b": torch.randn(1, 1, 1), **results(1, 1, 1, 512),
    }  # fmt: skip


def merge_stack() -> Made:
    def call(**t: Tensor) -> Any:
        return snapmla.merge_states(**t)

    return call, {
        "outs": normal(1, 1, 1, 1, 512),
        "lses": torch.randn(1, 1, 1, 1),
        **results(1, 1, 1, 512),
    }


def mha_prefill() -> Made:
    def call(**t: Tensor) -> Any:
        return snapmla.mha_prefill(max_seqlen_q=1, max_seqlen_k=1, **t)

    return call, {
        "q": normal(1, 1, 192), "k_nope": normal(1, 1, 128), "k_rope": normal(1, 1, 64),
        "v": normal(1, 1, 128), "cu_seqlens_q": numbers(0, 1), "cu_seqlens_k": numbers(0, 1),
        **results(1, 1, 128, lse=(1, 1)),
    }  # fmt: skip


def mha_whole_keys() -> Made:
    def call(**t: Tensor) -> Any:
        return snapmla.mha_prefill(max_seqlen_q=1, max_seqlen_k=1, **t)

    return call, {
        "q": normal(1, 1, 128), "k_nope": normal(1, 1, 128), "v": normal(1, 1, 128),
        "cu_seqlens_q": numbers(0, 1), "cu_seqlens_k": numbers(0, 1),
    }  # fmt: skip


def mha_prefill_backward() -> Made:
    def call(**t: Tensor) -> Any:
        return snapmla.mha_prefill_backward(max_seqlen_q=1, max_seqlen_k=1, **t)

    return call, {
        "dout": normal(1, 1, 128), "q": normal(1, 1, 192), "k_nope": normal(1, 1, 128),
        "k_rope": normal(1, 1, 64), "v": normal(1, 1, 128), "out": normal(1, 1, 128),
        "lse": torch.ones(1, 1), "dlse": torch.randn(1, 1), "cu_seqlens_q": numbers(0, 1),
        "cu_seqlens_k": numbers(0, 1), "dq": normal(1, 1, 192), "dk_nope": normal(1, 1, 128),
        "dk_rope": normal(1, 1, 64), "dv": normal(1, 1, 128),
    }  # fmt: skip


def flash_mla_varlen() -> Made:
    def call(**t: Tensor) -> Any:
        return mha.flash_attn_varlen_func(max_seqlen_qo=1, max_seqlen_kv=1, **t)

    return call, {
        "q": normal(1, 1, 192), "k": normal(1, 1, 192), "v": normal(1, 1, 128),
        "cu_seqlens_qo": numbers(0, 1), "cu_seqlens_kv": numbers(0, 1),
    }  # fmt: skip


def flash_attention_varlen() -> Made:
    def call(**t: Tensor) -> Any:
        return flash_attention.flash_attn_varlen_func(max_seqlen_q=1, max_seqlen_k=1, **t)

    return call, {
        "q": normal(1, 1, 192), "k": normal(1, 1, 192), "v": normal(1, 1, 128),
        "cu_seqlens_q": numbers(0, 1), "cu_seqlens_k": numbers(0, 1),
    }  # fmt: skip


def sparse_prefill() -> Made:
    def call(**t: Tensor) -> Any:
        return snapmla.sparse_prefill(softmax_scale=SCALE, **t)

    return call, {
        "q": normal(1, 1, 576), "kv": normal(1, 1, 576), "indices": numbers(0).view(1, 1, 1),
        "topk_length": numbers(1), "attn_sink": torch.zeros(1),
        **results(1, 1, 512, lse=(1, 1)), "max_logits": torch.zeros(1, 1),
    }  # fmt: skip


def sparse_prefill_fp8() -> Made:
    def call(indices: Tensor, topk_length: Tensor, out: Tensor, lse: Tensor, **t: Tensor) -> None:
        plan = snapmla.plan_sparse_prefill(1, topk=1, topk_length=topk_length, row_tile=16)
        snapmla.sparse_prefill(
            QuantizedQuery(t["nope"], t["q_rope"], t["q_scale"]), fp8_cache(t), indices, SCALE,
            topk_length=topk_length, out=out, lse=lse, plan=plan,
        )  # fmt: skip

    made = {name: x[0] for name, x in query().items()}
    return call, {
        **made, **pages(), "indices": numbers(5).view(1, 1, 1), "topk_length": numbers(1),
        **results(1, 1, 512, lse=(1, 1)),
    }  # fmt: skip


# ---------------------------------------------------------------------------------- the indexer


def index_pages() -> Tensor:
    cache = torch.zeros(1, P, 132, dtype=U8)
    dsa.append_index_k(cache, normal(P, 128), torch.arange(P))
    return cache


def scored() -> Tensors:
    return {
        "q": torch.randn(1, 1, 64, 128).to(E4M3), "w": torch.rand(1, 1, 64),
        "cache": index_pages(), **step(),
    }  # fmt: skip


def append_index_k() -> Made:
    return dsa.append_index_k, {
        "cache": torch.zeros(1, P, 132, dtype=U8), "k": normal(1, 128),
        "slot_mapping": numbers(0, dtype=I64),
    }  # fmt: skip


def dsa_prologue() -> Made:
    def call(
        kv: Tensor, index_q_out: Tensor, weights_out: Tensor, rope_out: Tensor, **t: Tensor
    ) -> None:  # fmt: skip
        out = dsa.Prologue(index_q_out, weights_out, rope_out)
        dsa.prologue(PagedKVCache.from_tensors(kv, format="fp8_ds_mla"), **t, out=out)

    return call, {
        "kv": torch.zeros(1, P, 1, 656, dtype=U8), "c_kv": normal(1, 512),
        "k_rope": normal(1, 64), "slot_mapping": numbers(0, dtype=I64),
        "index_cache": torch.zeros(1, P, 132, dtype=U8), "index_k": normal(1, 128),
        "index_q": normal(1, 32, 128), "index_weights": normal(1, 32),
        "positions": numbers(0, dtype=I64), "cos_sin_cache": normal(1, 64, dtype=torch.float32),
        "norm_weight": normal(512), "index_norm_weight": torch.rand(128),
        "index_norm_bias": torch.rand(128), "q_rope": normal(1, 1, 64),
        "index_q_out": torch.zeros(1, 32, 128, dtype=U8).view(E4M3),
        "weights_out": torch.zeros(1, 32), "rope_out": normal(1, 1, 64),
    }  # fmt: skip


def index_logits() -> Made:
    def call(**t: Tensor) -> None:
        dsa.index_logits(**t, unit_rows=2)

    return call, {**scored(), "out": torch.zeros(1, 1)}


def index_topk() -> Made:
    def call(**t: Tensor) -> None:
        dsa.index_topk(**t, k=1, unit_rows=2)

    size = dsa.index_topk_workspace(1, P)
    return call, {
        **scored(), "out": torch.zeros(1, 1, dtype=I32), "counts": torch.zeros(1, dtype=I32),
        "workspace": torch.zeros(size, dtype=U8),
    }  # fmt: skip


def index_topk_ragged() -> Made:
    def call(q: Tensor, w: Tensor, **t: Tensor) -> Any:
        return dsa.index_topk(q[0], w[0], **t, k=1, unit_rows=2)

    return call, {**scored(), "cu_seqlens_q": numbers(0, 1)}


def select_topk() -> Made:
    def call(**t: Tensor) -> None:
        dsa.select_topk(**t, k=1)

    return call, {
        "logits": torch.randn(1, 1), "lengths": numbers(1), "block_table": numbers(3).view(1, 1),
        "row_starts": numbers(0), "out": torch.zeros(1, 1, dtype=I32),
        "counts": torch.zeros(1, dtype=I32),
    }  # fmt: skip


def fetch_index_k() -> Made:
    def call(
        cache: Tensor, where: Tensor, cu_seqlens: Tensor, keys: Tensor, scales: Tensor
    ) -> None:
        dsa.fetch_index_k(cache, where, cu_seqlens=cu_seqlens, out=(keys, scales))

    return call, {
        "cache": index_pages(), "where": numbers(0).view(1, 1), "cu_seqlens": numbers(0, 1),
        "keys": torch.zeros(1, 128, dtype=U8).view(E4M3), "scales": torch.zeros(1),
    }  # fmt: skip


def deep_gemm_paged() -> Made:
    def call(**t: Tensor) -> Any:
        return deep_gemm.fp8_paged_mqa_logits(
            **t, schedule_meta=None, max_context_len=TOKENS, clean_logits=True
        )

    made = scored()
    return call, {
        "q": made["q"], "kv_cache": made["cache"].view(1, P, 1, 132), "weights": made["w"][0],
        "context_lens": numbers(TOKENS).view(1, 1), "block_table": made["block_table"],
    }  # fmt: skip


def deep_gemm_prompt() -> Made:
    def call(keys: Tensor, scales: Tensor, **t: Tensor) -> Any:
        return deep_gemm.fp8_mqa_logits(kv=(keys, scales), **t)

    return call, {
        "q": torch.randn(1, 64, 128).to(E4M3), "keys": torch.randn(1, 128).to(E4M3),
        "scales": torch.ones(1), "weights": torch.rand(1, 64), "cu_seq_len_k_start": numbers(0),
        "cu_seq_len_k_end": numbers(1),
    }  # fmt: skip


def vllm_topk(*lengths: str) -> Made:
    def decode(logits: Tensor, **t: Tensor) -> None:
        vllm.top_k_per_row_decode(logits, 1, num_rows=1, stride0=1, stride1=1, topk_tokens=1, **t)

    def prefill(logits: Tensor, **t: Tensor) -> None:
        vllm.top_k_per_row_prefill(logits, num_rows=1, stride0=1, stride1=1, topk_tokens=1, **t)

    out = torch.full((1, 1), -7, dtype=I32)
    given = {"logits": torch.randn(1, 1), "raw_topk_indices": out}
    bounds = {name: numbers(i if len(lengths) > 1 else 1) for i, name in enumerate(lengths)}
    return decode if len(lengths) == 1 else prefill, {**given, **bounds}


def vllm_persistent() -> Made:
    def call(**t: Tensor) -> None:
        vllm.persistent_topk(workspace=None, k=1, max_seq_len=1, **t)

    return call, {
        "logits": torch.randn(1, 1), "lengths": numbers(1).view(1, 1),
        "output": torch.full((1, 1), -7, dtype=I32),
    }  # fmt: skip


def vllm_gather() -> Made:
    return vllm.cp_gather_indexer_k_quant_cache, {
        "kv_cache": index_pages(), "dst_k": torch.zeros(1, 128, dtype=U8),
        "dst_scale": torch.zeros(1, 4, dtype=U8), "block_table": numbers(0).view(1, 1),
        "cu_seq_lens": numbers(0, 1),
    }  # fmt: skip


def vllm_append() -> Made:
    def call(**t: Tensor) -> None:
        vllm.indexer_k_quant_and_cache(quant_block_size=128, kv_cache_dtype="ue8m0", **t)

    return call, {
        "k": normal(1, 128), "kv_cache": torch.zeros(1, P, 132, dtype=U8),
        "slot_mapping": numbers(0, dtype=I64),
    }  # fmt: skip


CALLS: dict[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (
        append_kv, append_rows, append_bytes, rope_append_kv, quantize_q, rope_quantize_q,
        fetch_pages, fetch_slots, fetch_chunks, convert_cache, decode, decode_rows, decode_bytes,
        sparse_decode, sparse_decode_bytes, sparse_decode_rows, two_lists, flash_mla_dense,
        flash_mla_records, snapmla_names, snapmla_pool, snapmla_fetch, merge_state, merge_stack,
        mha_prefill, mha_whole_keys, mha_prefill_backward, flash_mla_varlen,
        flash_attention_varlen, sparse_prefill,
        sparse_prefill_fp8, append_index_k, dsa_prologue, index_logits, index_topk,
        index_topk_ragged, select_topk, fetch_index_k, deep_gemm_paged, deep_gemm_prompt,
        vllm_persistent, vllm_gather, vllm_append, decode_witness, plan_cache, context_group,
        sparse_decode_apart,
    )
} | {
    "vllm_decode": lambda: vllm_topk("seq_lens"),
    "vllm_prefill": lambda: vllm_topk("cu_seqlen_ks", "cu_seqlen_ke"),
}  # fmt: skip


def values_of(made: Any) -> list[Tensor]:
    """Tensors of a result, whatever holds them."""
    if isinstance(made, Tensor):
        return [made]
    if isinstance(made, QuantizedQuery):
        return [made.nope, made.rope, made.scale]
    return [x for each in made for x in values_of(each)] if isinstance(made, (tuple, list)) else []
