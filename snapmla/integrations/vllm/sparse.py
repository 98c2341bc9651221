"""The sparse backend's classes, for DSA models (DeepSeek-V3.2, GLM-5; vLLM 0.26, 0.33).

Where a step goes::

    build          once a step      SnapMLASparseMetadataBuilder: vLLM's metadata; plans wait in it
    each layer     do_kv_cache_update       append_kv into rows of 656 bytes
                   the layer's indexer      ours (indexer.py), into vLLM's buffer: slots, and how
                                            many, where attention's pages are the indexer's
                   forward_mqa              decode(..., indices=) over them, with queries in two
                                            tensors (absorbed.py)
                   forward_mha              vLLM's own, of short prompts; of a prefix that is cached
                                            chunks are fetched by fetch_dequant

Decode, drafts and prompts are one call: each query token is a sequence of its own, with a list of
rows and their number.  So plans depend on the number of query tokens alone, no length of a step is
read, and slots that pad a graph are lists of nothing.  Heads are taken as they are.

Choices stay positions, which vLLM turns into rows once an index group, with context parallelism and
with speculative decoding: a draft may read the buffer that the target's indexer wrote, with another
backend than this one.

The bytes are vLLM's ``fp8_ds_mla``, whoever writes them: the layer that CUDA builds use for
DeepSeek-V3.2 appends in an operator of its own (``fused_norm_rope``), which rounds scales up to
powers of two, and ours is not called.

Context parallelism (0.33): lists hold what of the choice this rank has; one without entries gives
output 0 and LSE -inf, which vLLM merges by the LSE.

``VLLM_BATCH_INVARIANT``: lists are cut at fixed places, and all prompts go through ``forward_mqa``
(``sparse_mla_force_mqa``), since vLLM's choice between the two depends on the batch.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention import sparse_mla_attention as sparse
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionType,
)
from vllm.v1.attention.backends.mla import sparse_utils

from dsl_kernels.formats.dims import HEAD_DIM_QK
from dsl_kernels.formats.ds_mla import NAME as FORMAT
from dsl_kernels.formats.ds_mla import ROW_BYTES
from snapmla.cache import paged, quant
from snapmla.integrations import vllm as plugin
from snapmla.integrations.vllm import absorbed, invariant, refuse, surface
from snapmla.integrations.vllm import indexer as choosing
from snapmla.integrations.vllm.backend import operators
from snapmla.sparse.decode import sparse_decode
from snapmla.sparse.plan_cache import SparsePlanCache
from snapmla.sparse.query import row_stride

PAGE = 64
MOST_DECODED = 128  # new tokens of a request that is no prompt; both go the same way here
SPLIT_ENTRIES = 512  # pieces of a list in batch-invariant mode
PIECE_ROWS = 16384  # query tokens times heads of one call there: all pieces leave partial rows
# A release whose base class turns positions into rows and asks for a kernel alone.
ASKS_FOR_KERNEL = hasattr(sparse.SparseMLACommonImpl, "_forward_mqa_kernel")


@functools.cache
def _tell(sentence: str) -> None:
    """Once a process."""
    logging.getLogger(surface.LOGGER).warning(sentence)


class SnapMLASparseBackend(AttentionBackend):
    """Properties of the sparse backend that vLLM's selector reads before it chooses."""

    supported_dtypes: ClassVar = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar = [FORMAT]

    @staticmethod
    def get_name() -> str:
        return plugin.SPARSE_BACKEND if ASKS_FOR_KERNEL else plugin.OVERRIDDEN

    @staticmethod
    def get_builder_cls() -> type[SnapMLASparseMetadataBuilder]:
        return SnapMLASparseMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[SnapMLASparseImpl]:
        return SnapMLASparseImpl

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [PAGE]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return num_blocks, block_size, ROW_BYTES

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return sparse_utils.align_blocks_to_rows(spec)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [HEAD_DIM_QK]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        *_: Any,
    ) -> str | None:
        return refuse.cache_dtype(kv_cache_dtype, cls.supported_kv_cache_dtypes)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major == 9  # kernels for rows of 656 bytes; FlashMLA's serve elsewhere

    @classmethod
    def supports_sink(cls) -> bool:
        return True  # a logit a head that weighs in results, as HY-V4 has it

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True  # the indexer is ours, too: exact, and the same in any batch

    @classmethod
    def supports_dcp(cls) -> bool:
        return ASKS_FOR_KERNEL


@dataclass(kw_only=True)
class _OlderMetadata(AttentionMetadata):
    """Metadata fields that 0.26's builder passes to the class that a backend names."""

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    req_id_per_token: torch.Tensor
    seq_lens: torch.Tensor | None = None
    block_size: int = PAGE
    topk_tokens: int = refuse.MOST_CHOSEN
    num_decodes: int = 0
    num_prefills: int = 0
    num_decode_tokens: int = 0
    prefill_max_seq_len: int = 0
    prefill: Any = None
    cp_kv_cache_interleave_size: int = 1


_Metadata: Any = getattr(sparse, "SparseMLACommonMetadata", _OlderMetadata)


@dataclass(kw_only=True)
class SnapMLASparseMetadata(_Metadata):
    """vLLM's, with the plans of its builder.

    Attributes:
        plans: of its builder.
        slots: whether choices may be slots.
        chosen: int32 (tokens,) or more, how many slots each query token has in vLLM's buffer; None
            where positions are in it.  The step's indexers set it.
    """

    plans: Plans | None = None
    slots: bool = False
    chosen: torch.Tensor | None = None


class Plans:
    """Plans by the number of query tokens, over one workspace.

    Args:
        heads: of a call; with context parallelism those of all ranks.
        topk: width of a list.
        invariant: whether lists are cut at fixed places.
        tokens: the most query tokens of a step; 0: their choices are positions.

    Attributes:
        counts: int32 (tokens,), how many slots each query token has: memory of the layer that is
            at work.
    """

    def __init__(
        self, heads: int, topk: int, device: torch.device, invariant: bool, tokens: int = 0
    ) -> None:
        self.topk, self.invariant = topk, invariant
        self.counts = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.piece = max(1, PIECE_ROWS // heads) if invariant else None
        self._cache = SparsePlanCache(
            heads, device=device, cache_dtype=FORMAT, check_stale=False,
            fixed_split_tokens=SPLIT_ENTRIES if invariant else None,
        )  # fmt: skip

    def pieces(self, tokens: int) -> Iterator[slice]:
        """The calls of so many query tokens."""
        size = self.piece or max(tokens, 1)
        yield from (slice(at, min(at + size, tokens)) for at in range(0, tokens, size))

    def get(self, tokens: int, pin: bool = False) -> Any:
        """The plan of one call."""
        return self._cache.get(None, 1, topk=self.topk, batch=tokens, pin=pin)

    def pin(self, tokens: int) -> None:
        """Keeps what a graph of so many query tokens will call."""
        for part in self.pieces(tokens):
            self.get(part.stop - part.start, pin=True)

    @property
    def pinned(self) -> int:
        return self._cache.stats().pinned


class SnapMLASparseMetadataBuilder(sparse.SparseMLACommonMetadataBuilder[SnapMLASparseMetadata]):
    """vLLM's metadata of a step; plans need nothing of it but the number of query tokens."""

    metadata_cls = SnapMLASparseMetadata
    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        refuse.sparse_settings(vllm_config, ASKS_FOR_KERNEL)
        if envs.VLLM_BATCH_INVARIANT:  # before layers ask for it, at their first step
            vllm_config.attention_config.sparse_mla_force_mqa = True
            invariant.serve(device)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(
            MOST_DECODED, supports_spec_as_decode=True, supports_dcp_with_varlen=True
        )
        heads = self.model_config.get_num_attention_heads(vllm_config.parallel_config)
        alone = self.dcp_world_size == 1 and vllm_config.speculative_config is None
        self.plans = Plans(
            heads * self.dcp_world_size, self.topk_tokens, device, bool(envs.VLLM_BATCH_INVARIANT),
            vllm_config.scheduler_config.max_num_batched_tokens if alone else 0,
        )  # fmt: skip
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> SnapMLASparseMetadata:
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        step.plans = self.plans
        step.slots = step.num_actual_tokens <= self.plans.counts.shape[0]
        return step

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> SnapMLASparseMetadata:
        """The graph will read the plan's tables: they keep their place."""
        step = super().build_for_cudagraph_capture(common_attn_metadata)
        self.plans.pin(step.num_actual_tokens)
        return step

    def update_draft_decode_metadata(self, metadata: SnapMLASparseMetadata) -> None:
        """The next draft of the same requests: whose each query token is, as vLLM's own do."""
        from vllm.v1.attention.ops.metadata import compute_token_to_req_indices

        tokens = metadata.num_decode_tokens
        if tokens:
            compute_token_to_req_indices(
                metadata.query_start_loc, metadata.req_id_per_token, tokens, tokens
            )


class _OlderImpl(sparse.SparseMLACommonImpl[SnapMLASparseMetadata]):
    """Converts chosen positions to cache rows, for 0.26; newer base classes do it themselves."""

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = (q[0] if isinstance(q, tuple) else q).shape[0]
        chosen = self.topk_indices_buffer[:tokens]
        rows, counts = sparse_utils.triton_convert_req_index_to_global_index(
            attn_metadata.req_id_per_token[:tokens], attn_metadata.block_table, chosen,
            BLOCK_SIZE=attn_metadata.block_size, NUM_TOPK_TOKENS=chosen.shape[1],
            return_valid_counts=True,
        )  # fmt: skip
        return self._forward_mqa_kernel(
            q, kv_c_and_k_pe_cache, rows, counts, layer=layer,
            block_size=attn_metadata.block_size, is_decode=True,
        )  # fmt: skip


_Impl: Any = sparse.SparseMLACommonImpl[SnapMLASparseMetadata] if ASKS_FOR_KERNEL else _OlderImpl


class SnapMLASparseImpl(_Impl):
    """One layer's attention."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = ASKS_FOR_KERNEL
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    group_conversion_decode_only: ClassVar[bool] = True  # layers of a group share decode's rows

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        indexer: Any = None,
        **mla_options: Any,
    ) -> None:
        if alibi_slopes or sliding_window or logits_soft_cap or attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                "snapmla: decoder attention only, without alibi_slopes, sliding_window, "
                "logits_soft_cap"
            )
        sinks = mla_options.pop("sinks", None)  # of models that have them; vLLM's base has not
        refuse.sparse_layer(head_size, kv_cache_dtype)
        config = get_current_vllm_config_or_none()
        refuse.sinks(sinks, num_heads, config)
        if ASKS_FOR_KERNEL and refuse.drafts_on_vllms(config):  # 0.26 has one name for both
            _tell(refuse.draft_elsewhere(config))
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
            kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name,
            indexer=indexer, **mla_options,
        )  # fmt: skip
        self.sinks = sinks
        self.supports_quant_query_input = False  # the layer then hands over (q_nope, q_rope)
        self._caches: dict[tuple[Any, ...], paged.PagedKVCache] = {}
        self._thread = threading.local()  # batches in two halves run in two threads
        if indexer is not None:  # layers without one read what the one before has chosen
            choosing.serve(indexer)

    def _cache(self, raw: torch.Tensor, rows: bool) -> paged.PagedKVCache:
        """The layer's memory (pages, 64, 656) as a cache of pages or of rows; made once.

        Rows are numbered through the pool as vLLM does, and those between a layer's pages are other
        layers': a page of one token, so that lists name rows.
        """
        key = (raw.data_ptr(), raw.shape, raw.stride(), rows)
        known = self._caches.get(key)
        if known is None:
            memory = raw.view(torch.uint8)
            if rows:
                apart, left = divmod(memory.stride(0), ROW_BYTES)
                if left:
                    raise ValueError(
                        f"snapmla: pages of the cache lie {memory.stride(0)} bytes apart, which is "
                        f"no multiple of {ROW_BYTES}: rows of it cannot be numbered"
                    )
                count = (memory.shape[0] - 1) * apart + memory.shape[1]
                memory = memory.as_strided((count, 1, ROW_BYTES), (ROW_BYTES, ROW_BYTES, 1))
            known = paged.PagedKVCache.from_tensors(memory, format=FORMAT)
            self._caches[key] = known
        return known

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        *_: Any,
    ) -> None:
        if kv_cache.numel():  # none yet while memory is profiled
            pages = self._cache(kv_cache, rows=False)
            quant.append_kv(pages, kv_c_normed, k_pe.squeeze(1), slot_mapping.flatten())

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SnapMLASparseMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q (tokens, h, 576), or its two parts -> out (tokens, h, 512), LSE (tokens, h) or None."""
        plans, counts = attn_metadata.plans, attn_metadata.chosen
        assert plans is not None  # of our builder
        if isinstance(q, tuple) and not plans.invariant:
            absorbed.keep(layer)
        self._thread.plans = plans
        if counts is None:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        n = (q[0] if isinstance(q, tuple) else q).shape[0]
        slots = self.topk_indices_buffer[:n, : plans.topk]
        return self._attend(q, self._cache(kv_c_and_k_pe_cache, rows=False), slots, counts[:n])

    def _forward_mqa_kernel(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        *,
        layer: Any,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of query tokens to rows ``topk_indices`` (tokens, topk), the first
        ``valid_counts`` (tokens,) of each."""
        # 0.26 numbers slots, newer releases rows of a pool that layers may share
        rows = self._cache(kv_cache, rows=ASKS_FOR_KERNEL)
        return self._attend(q, rows, topk_indices, valid_counts)

    def _attend(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        pages: paged.PagedKVCache,
        indices: torch.Tensor,
        counts: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention to tokens of ``pages`` that lists (tokens, topk) name, the first ``counts``
        (tokens,) entries of each."""
        if isinstance(q, tuple) and any(row_stride(part) is None for part in q):
            q = torch.cat(q, dim=-1)  # by head
        parts = q if isinstance(q, tuple) else (q,)
        first, plans = parts[0], self._thread.plans
        out = first.new_empty((*first.shape[:2], self.kv_lora_rank))
        lse = first.new_empty(first.shape[:2], dtype=torch.float32)
        for piece in plans.pieces(first.shape[0]):
            query = tuple(part[piece].unsqueeze(1) for part in parts)
            sparse_decode(
                query if len(query) > 1 else query[0], pages, indices[piece].unsqueeze(1),
                softmax_scale=self.scale, topk_length=counts[piece],
                attn_sink=self.sinks, plan=plans.get(piece.stop - piece.start),
                out=out[piece].unsqueeze(1), lse=lse[piece].unsqueeze(2),
            )  # fmt: skip
        return out, lse if self.need_to_return_lse_for_decode else None

    def _compute_prefill_context(
        self, q: torch.Tensor, kv_c_and_k_pe_cache: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        with operators().fetching_from(self._cache(kv_c_and_k_pe_cache, rows=False)):
            return super()._compute_prefill_context(q, kv_c_and_k_pe_cache, *rest, **options)

    def _context_parallel_compute_prefill_context(
        self, q: torch.Tensor, kv_c_and_k_pe_cache: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        compute = super()._context_parallel_compute_prefill_context
        with operators().fetching_from(self._cache(kv_c_and_k_pe_cache, rows=False)):
            return compute(q, kv_c_and_k_pe_cache, *rest, **options)
