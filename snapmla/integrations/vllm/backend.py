"""The backend's classes, over those of vLLM's MLA layer (0.26 to 0.33).

Where a step goes::

    build          once a step, outside of graphs   SnapMLAMetadataBuilder: the plan of this shape,
                                                    updated for these lengths
    each layer     do_kv_cache_update               append_kv
                   forward_mqa                      quantize_q, decode
                   forward_mha (vLLM's own)         prefill in BF16 by the prefill backend; of a
                                                    prefix that is cached, chunks are fetched by
                                                    fetch_dequant

A request with at most ``reorder_batch_threshold`` new tokens goes through ``forward_mqa``; those
numbers may differ within a batch (speculative decoding), which makes queries ragged.  Graphs see
even ones only.

Decode context parallelism: each rank holds tokens in turns and sees all heads; what query token j
sees of a rank's tokens is in ``row_seqlens``, and vLLM merges by the LSE.

Bytes: a page of 64 tokens is 64 * 644 bytes, in the order of layout ``paged``.  A release without
``customize_spec`` allots 656 bytes a token (cache dtype ``fp8_ds_mla``); the rest of its pages is
left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_group
from vllm.model_executor.layers.attention import mla_attention as mla
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from snapmla import api
from snapmla.cache import fetch, layouts, paged, quant
from snapmla.dense import DecodePlan, plan_cache
from snapmla.integrations import vllm as plugin
from snapmla.integrations.vllm import invariant, refuse
from snapmla.integrations.vllm.prefill import KeyParts, SnapMLAPrefillBackend
from snapmla.runtime import variants

PAGE = 64
TOKEN_BYTES = layouts.TOKEN_BYTES
ALLOTTED_BYTES = 656  # a token of fp8_ds_mla
MOST_QUERY_TOKENS = 8  # of a request that is no prefill; speculative decoding raises it
SPLIT_TOKENS = 1024  # pieces of a sequence in batch-invariant mode
HAS_SPECS = hasattr(mla.MLACommonBackend, "customize_spec")


class SnapMLABackend(mla.MLACommonBackend):
    """Properties that vLLM asks of the backend.

    Its selector asks whether the backend serves a model; the engine then asks for the classes and
    the cache's shape.
    """

    supported_dtypes: ClassVar = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar = [plugin.CACHE_DTYPE if HAS_SPECS else "fp8_ds_mla"]

    @staticmethod
    def get_name() -> str:
        return plugin.BACKEND

    @staticmethod
    def get_builder_cls() -> type[SnapMLAMetadataBuilder]:
        return SnapMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[SnapMLAImpl]:
        return SnapMLAImpl

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [PAGE]  # with others declared beside it vLLM would choose the smallest

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return num_blocks, block_size, ALLOTTED_BYTES

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return replace(spec, state_content_bytes=TOKEN_BYTES, block_stride_alignment=16)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [HEAD_DIM_QK]

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        if use_sparse:
            return refuse.SPARSE  # vLLM's own reason does not say what to do
        return refuse.cache_dtype(kv_cache_dtype, cls.supported_kv_cache_dtypes)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return variants.arch_of_capability(capability.major, capability.minor) is not None

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True  # fixed splits: see SnapMLAMetadataBuilder

    @classmethod
    def supports_dcp(cls) -> bool:
        return True


@dataclass
class SnapMLADecodeMetadata(mla.MLACommonDecodeMetadata):
    """Plan and query tokens of the requests that decode.

    Attributes:
        s_q: query tokens of each request; None if they differ.
        cu_seqlens_q: first query token of each request, given if they differ.
        row_seqlens: tokens that each query token sees, given for drafts whose cache is sharded over
            ranks.
    """

    plan: DecodePlan
    s_q: int | None
    cu_seqlens_q: torch.Tensor | None = None
    row_seqlens: torch.Tensor | None = None


@dataclass
class SnapMLAMetadata(mla.MLACommonMetadata[SnapMLADecodeMetadata]):
    """vLLM's, with our decode part."""


class SnapMLAMetadataBuilder(mla.MLACommonMetadataBuilder[SnapMLAMetadata]):
    """Plans a step; all layers of a cache group share the plan.

    ``VLLM_BATCH_INVARIANT``: sequences are cut at fixed places, and a prompt is prefill however
    short it is, so that a request's results do not depend on the others of its batch.
    """

    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar = mla.QueryLenSupport.VARLEN
    reorder_batch_threshold: int = MOST_QUERY_TOKENS

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        context = vllm_config.compilation_config.static_forward_context
        # Before vLLM's own: that reads attributes which a layer of another class may not have.
        refuse.settings(vllm_config)
        refuse.layers(((name, context[name]) for name in layer_names), mla.MLAAttention)
        super().__init__(
            kv_cache_spec, layer_names, vllm_config, device, SnapMLAMetadata,
            supports_dcp_with_varlen=True,
        )  # fmt: skip
        refuse.prefill(self.q_data_type)
        if envs.VLLM_BATCH_INVARIANT:
            # Else a prompt of few tokens is decode where it comes first in its batch.  The builder
            # reads this for nothing else.
            self.use_pcp = True
            invariant.serve(device)
        self._pin = False
        self._limits_of_graphs: dict[torch.Size, torch.Tensor] = {}
        self.plans = plan_cache.PlanCache(
            self.num_heads * self.dcp_world_size,  # decode gathers the heads of all ranks
            page_size=self.page_size,
            device=device,
            fixed_split_tokens=SPLIT_TOKENS if envs.VLLM_BATCH_INVARIANT else None,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> SnapMLAMetadata:
        """The graph will read the plan's tables and its limits: they keep their place."""
        self._pin = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._pin = False

    def _build_decode(
        self,
        *,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
        **_: Any,
    ) -> SnapMLADecodeMetadata:
        b, width = block_table_tensor.shape
        longest = int((query_start_loc_cpu[1:] - query_start_loc_cpu[:-1]).max())
        even = num_decode_tokens == b * longest  # slots that pad a graph's batch count as even
        limits = None
        if dcp_tot_seq_lens_device is not None and longest > 1:
            limits = self._local_limits(
                dcp_tot_seq_lens_device, query_start_loc_device, num_decode_tokens
            )
            limits = self._kept(limits.view(b, longest) if even else limits)
        plan = self.plans.get(
            seq_lens_device,
            longest if even else None,
            max_pages=width,
            cu_seqlens_q=None if even else query_start_loc_device,
            total_q=None if even else num_decode_tokens,
            row_seqlens=limits,
            pin=self._pin,
        )
        return SnapMLADecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            plan=plan,
            s_q=longest if even else None,
            cu_seqlens_q=None if even else query_start_loc_device,
            row_seqlens=limits,
        )

    def _kept(self, limits: torch.Tensor) -> torch.Tensor:
        """The same limits, in the memory that a graph of this shape reads, if one was captured."""
        if self._pin:
            self._limits_of_graphs.setdefault(limits.shape, limits)
        kept = self._limits_of_graphs.get(limits.shape)
        return limits if kept is None else kept.copy_(limits)

    def _local_limits(
        self, total: torch.Tensor, query_start: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        """Number of this rank's cached tokens that each query token sees, int32 (tokens,).

        Query token j of n sees the first L - (n - 1 - j) of a request's L tokens, of which this
        rank holds those of its turns.
        """
        token = torch.arange(tokens, dtype=torch.int32, device=total.device)
        request = torch.searchsorted(query_start[1:], token, right=True)
        request.clamp_(max=total.shape[0] - 1)  # tokens that pad a graph's batch
        seen = total[request] - (query_start[request + 1] - 1 - token)
        return get_dcp_local_seq_lens(
            seen.clamp_(min=0),
            self.dcp_world_size,
            get_dcp_group().rank_in_group,
            self.cp_kv_cache_interleave_size,
        )


class SnapMLAImpl(mla.MLACommonImpl[SnapMLAMetadata]):
    """One layer's attention; prefill is vLLM's own."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True

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
        **mla_options: Any,
    ) -> None:
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
            kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name,
            **mla_options,
        )  # fmt: skip
        if alibi_slopes or sliding_window or logits_soft_cap or attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                "snapmla: decoder attention only, without alibi_slopes, sliding_window, "
                "logits_soft_cap"
            )
        config = get_current_vllm_config_or_none()  # of the model that is being built
        if config is not None:
            refuse.model(config)  # here before weights are loaded
            refuse.draft(config)
        self._layer_is_known = False
        self._keys_apart = False  # whether the prefill backend takes K as two tensors
        self.supports_quant_query_input = False  # the layer then hands over (q_nope, q_rope)
        self._caches: dict[tuple[Any, ...], paged.PagedKVCache] = {}

    def _cache(self, raw: torch.Tensor) -> paged.PagedKVCache:
        """The layer's pages (pages, 64, bytes of a token) as a cache; made once."""
        key = (raw.data_ptr(), raw.shape, raw.stride())
        known = self._caches.get(key)
        if known is None:
            size = raw.shape[1]
            block = raw.view(torch.uint8).flatten(1)[:, : size * TOKEN_BYTES]
            views = layouts.paged_views(block, size)
            known = self._caches[key] = paged.PagedKVCache.from_tensors(*views)
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
            slots = slot_mapping.flatten()
            quant.append_kv(self._cache(kv_cache), kv_c_normed, k_pe.squeeze(1), slots)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SnapMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q (tokens, h, 576), or its two parts -> out (tokens, h, 512), LSE (tokens, h)."""
        if not self._layer_is_known:  # an impl has one layer, and meets it here
            name = getattr(layer, "layer_name", "without a name")
            refuse.layer(name, layer, mla.MLAAttention)
            self._layer_is_known = True
        parts = q if isinstance(q, tuple) else q.split([KV_LORA_RANK, QK_ROPE_HEAD_DIM], -1)
        step = attn_metadata.decode
        if step.s_q is not None:
            parts = tuple(part.unflatten(0, (-1, step.s_q)) for part in parts)
        out, lse = api.decode(
            quant.quantize_q(*parts), self._cache(kv_c_and_k_pe_cache), step.block_table,
            step.seq_lens, softmax_scale=self.scale, plan=step.plan,
            cu_seqlens_q=step.cu_seqlens_q, row_seqlens=step.row_seqlens,
        )  # fmt: skip
        if step.s_q is None:
            return out, lse.mT.contiguous()
        return out.flatten(0, 1), lse.mT.flatten(0, 1)

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SnapMLAMetadata,
        *rest: Any,
        **options: Any,
    ) -> Any:
        step = attn_metadata.prefill
        self._keys_apart = isinstance(step.prefill_backend, SnapMLAPrefillBackend)
        return super().forward_mha(
            q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, *rest, **options
        )

    def _concat_k_nope_k_pe(self, k_nope: torch.Tensor, k_pe: torch.Tensor) -> Any:
        if not self._keys_apart:
            return super()._concat_k_nope_k_pe(k_nope, k_pe)
        return KeyParts(k_nope, k_pe if k_pe.ndim == k_nope.ndim else k_pe.unsqueeze(1))

    def _compute_prefill_context(
        self, q: torch.Tensor, kv_c_and_k_pe_cache: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        with operators().fetching_from(self._cache(kv_c_and_k_pe_cache)):
            return super()._compute_prefill_context(q, kv_c_and_k_pe_cache, *rest, **options)

    def _context_parallel_compute_prefill_context(
        self, q: torch.Tensor, kv_c_and_k_pe_cache: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        compute = super()._context_parallel_compute_prefill_context
        with operators().fetching_from(self._cache(kv_c_and_k_pe_cache)):
            return compute(q, kv_c_and_k_pe_cache, *rest, **options)


class _Operators:
    """vLLM's operators as its MLA layer sees them, of which two read a paged cache.

    Both take rows of a cached prefix to a workspace.  While a thread computes attention over one of
    our caches, ours does it; all else, and all other caches, are vLLM's.
    """

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self._thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    @contextmanager
    def fetching_from(self, source: paged.PagedKVCache) -> Iterator[None]:
        self._thread.source = source
        try:
            yield
        finally:
            self._thread.source = None

    def _fetch(self, begins: str, named: dict[str, Any]) -> bool:
        """True if the rows were ours to fetch; ``begins``: what the operator calls cu_seqlens."""
        source = getattr(self._thread, "source", None)
        if source is not None:
            fetch.fetch_dequant(
                source,
                named["block_table"],
                cu_seqlens=named[begins],
                seq_starts=named["seq_starts"],
                out=named["dst"][: named.get("num_tokens")],
            )
        return source is not None

    def cp_gather_and_upconvert_fp8_kv_cache(self, *given: Any, **named: Any) -> None:
        if not self._fetch("workspace_starts", named):
            self._theirs.cp_gather_and_upconvert_fp8_kv_cache(*given, **named)

    def gather_and_maybe_dequant_cache(self, *given: Any, **named: Any) -> None:
        if not self._fetch("cu_seq_lens", named):
            self._theirs.gather_and_maybe_dequant_cache(*given, **named)


def operators() -> _Operators:
    """Ours, in the place of vLLM's."""
    if not isinstance(mla.ops, _Operators):
        mla.ops = _Operators(mla.ops)
    return mla.ops
