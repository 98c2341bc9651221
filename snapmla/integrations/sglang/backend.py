"""The backend, over SGLang's attention interface (0.5.23).

Where a step goes::

    decode, verify,    init_forward_metadata     once a step: lengths and block table from SGLang's
    draft extend                                 tables, and the plan of this shape, updated
                       each layer                set_mla_kv_buffer, quantize_q, decode
    extend, absorbed   the first layer of a step the same, with ragged queries
    extend, multi-head SGLang's own ``fa3``, or ``fa4`` on SM100, over K and V of the new tokens and
                       of a cached prefix that the model fetches from the pool

Which form an extend takes is up to SGLang (``hooks.forward_method``): multi-head for prompts
without a prefix and for long prefixes; absorbed, that is by this backend's kernels over the cache,
for short prefixes, in graphs of prefill, and where inference has to be deterministic.

CUDA graphs: what a graph of decode or verify holds the address of (lengths, block table, the plan's
tables) is made in ``init_cuda_graph_state`` or at the capture, stays, and is written by
``init_forward_metadata_out_graph`` before each replay.  Steps outside of graphs have tables of
their own.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardMode, build_inner_fb_view
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec

from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from snapmla import api
from snapmla.cache import quant
from snapmla.dense import DecodePlan, plan_cache
from snapmla.integrations.sglang import refuse
from snapmla.integrations.sglang.pool import SnapMLATokenToKVPool
from snapmla.integrations.sglang.refuse import PAGE
from snapmla.runtime import variants

SPLIT_TOKENS = 1024  # pieces of a sequence where inference has to be deterministic


class Tables:
    """Lengths int32 (b,) and block tables int32 (b, width) of a step, in memory that stays."""

    def __init__(self, batch: int, width: int, device: torch.device) -> None:
        self.batch = batch
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.block_table = torch.zeros((batch, width), dtype=torch.int32, device=device)


class Step:
    """Plan, lengths and block table of a step, which its layers share."""

    def __init__(
        self,
        plan: DecodePlan,
        lengths: torch.Tensor,
        block_table: torch.Tensor,
        s_q: int | None,
        cu_seqlens_q: torch.Tensor | None = None,
    ) -> None:
        self.plan, self.lengths, self.block_table = plan, lengths, block_table
        self.s_q = s_q  # query tokens of a sequence; None: they differ
        self.cu_seqlens_q = cu_seqlens_q  # where they begin, if they differ


class SnapMLABackend(AttentionBackend):
    """Attention of one model; of a draft model's step i with ``draft_step`` = i.

    Raises:
        ValueError: at construction, for a model that is not served.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any, draft_step: int | None = None) -> None:
        super().__init__()
        pool = model_runner.token_to_kv_pool
        if not isinstance(pool, SnapMLATokenToKVPool):
            raise ValueError(
                f"snapmla: a cache of class {type(pool).__name__} is not served: this backend is "
                "for models of multi-head latent attention"
            )
        refuse.queries(model_runner.dtype)
        self.token_to_kv_pool = pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.kv_index_translator = model_runner.kv_index_translator
        self.device = self.req_to_token.device
        self.draft_step = draft_step
        self.draft_tokens = get_spec().speculative_num_draft_tokens or 0
        self.deterministic = bool(get_exec().deterministic.enable_deterministic_inference)
        self.width = -(-self.req_to_token.shape[1] // PAGE)
        self.plans = plan_cache.PlanCache(
            model_runner.model_config.num_attention_heads // get_parallel().attn_tp_size,
            page_size=PAGE,
            device=self.device,
            fixed_split_tokens=SPLIT_TOKENS if self.deterministic else None,
        )
        self.multi_head = None
        if draft_step is None:
            name, _ = refuse.MULTI_HEAD[variants.arch_of(self.device)]
            self.multi_head = ATTENTION_BACKENDS[name](model_runner)
            # Else it would quantise Q, K and V to the cache's dtype, without scales.
            self.multi_head.kv_cache_dtype_str = "auto"
        self.forward_metadata: Step | None = None
        self._known_layers: set[int] = set()
        self._of_graphs = self._of_steps = Tables(0, self.width, self.device)

    # ------------------------------------------------------------------------------------- a step

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if self._of_graphs.batch < max_bs:
            self._of_graphs = Tables(max_bs, self.width, self.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 0  # a slot that pads a batch sees no token

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """A step outside of graphs."""
        batch = forward_batch.batch_size
        self.forward_metadata = None  # of an extend the first absorbed layer makes it
        if forward_batch.forward_mode.is_extend_without_speculative():
            if self.multi_head is not None:
                self.multi_head.init_forward_metadata(forward_batch)
            return
        if self._of_steps.batch < batch:
            self._of_steps = Tables(batch, self.width, self.device)
        if batch:
            self.forward_metadata = self._even(forward_batch, self._of_steps, pin=False)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """A step of a graph, before its capture and each replay."""
        if forward_batch.forward_mode.is_extend_without_speculative():
            raise NotImplementedError(
                "snapmla: full CUDA graphs of prefill are not served: set "
                "--cuda-graph-backend-prefill breakable"
            )
        if self._of_graphs.batch < forward_batch.batch_size:
            raise RuntimeError(
                f"snapmla: a graph of {forward_batch.batch_size} sequences, where "
                f"init_cuda_graph_state was told of at most {self._of_graphs.batch}"
            )
        self.forward_metadata = self._even(forward_batch, self._of_graphs, pin=True)

    def _even(self, forward_batch: Any, tables: Tables, pin: bool) -> Step:
        """A step whose sequences have as many query tokens each."""
        batch, mode = forward_batch.batch_size, forward_batch.forward_mode
        seq_lens, s_q = forward_batch.seq_lens[:batch], 1
        if mode.is_target_verify():
            s_q, new = self.draft_tokens, self.draft_tokens
        elif mode.is_draft_extend_v2():  # a window of one width, which seq_lens may not count whole
            s_q = len(forward_batch.input_ids) // batch
            new = s_q - forward_batch.extend_seq_lens[:batch]
        elif self.draft_step is not None:
            new = self.draft_step + 1
        else:
            new = None  # seq_lens counts the new token
        if new is not None:  # a slot that pads a batch still sees no token
            seq_lens = (seq_lens + new) * (seq_lens > 0)
        lengths, block_table = self._filled(tables, seq_lens, forward_batch)
        plan = self.plans.get(lengths, s_q, max_pages=self.width, pin=pin)
        return Step(plan, lengths, block_table, s_q)

    def _ragged(self, forward_batch: Any, tokens: int) -> Step:
        """A step of ``tokens`` query tokens, of each sequence as many as it is extended by."""
        batch = forward_batch.batch_size
        if self._of_steps.batch < batch:
            self._of_steps = Tables(batch, self.width, self.device)
        lengths, block_table = self._filled(
            self._of_steps, forward_batch.seq_lens[:batch], forward_batch
        )
        new = forward_batch.extend_seq_lens[:batch].cumsum(0, dtype=torch.int32)
        begin = torch.nn.functional.pad(new, (1, 0))
        plan = self.plans.get(
            lengths, max_pages=self.width, total_q=tokens, cu_seqlens_q=begin
        )  # fmt: skip
        return Step(plan, lengths, block_table, None, begin)

    def _filled(
        self, tables: Tables, seq_lens: torch.Tensor, forward_batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengths and block table of a step, in the front of ``tables``.

        The pages of a request are those of its first, 65th, ... token; columns past its length
        hold what was there before and are not read.
        """
        batch = forward_batch.batch_size
        lengths, block_table = tables.lengths[:batch], tables.block_table[:batch]
        lengths.copy_(seq_lens)
        firsts = self.req_to_token[:, ::PAGE].index_select(
            0, forward_batch.req_pool_indices[:batch]
        )
        torch.div(firsts, PAGE, rounding_mode="floor", out=block_table)
        return lengths, block_table

    # ------------------------------------------------------------------------------------ a layer

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """q (tokens, h * 512) and q_rope (tokens, h, 64), or q (tokens, h * 576); k and k_rope, or
        k, likewise with one head -> (tokens, h * 512)."""
        step, heads = self._step(layer, more), layer.tp_q_head_num
        if k is not None and save_kv_cache:
            where = KVWriteLoc.for_batch(forward_batch)
            if k_rope is None:
                self.token_to_kv_pool.set_kv_buffer(layer, where, k)
            else:
                self.token_to_kv_pool.set_mla_kv_buffer(layer, where, k, k_rope)
        if q_rope is None:
            parts = q.view(-1, heads, HEAD_DIM_QK).split([KV_LORA_RANK, QK_ROPE_HEAD_DIM], -1)
        else:
            parts = q.view(-1, heads, KV_LORA_RANK), q_rope.view(-1, heads, QK_ROPE_HEAD_DIM)
        if step.s_q is not None:
            parts = tuple(part.unflatten(0, (-1, step.s_q)) for part in parts)
        out, _ = api.decode(
            quant.quantize_q(*parts), self.token_to_kv_pool.cache_of(layer.layer_id),
            step.block_table, step.lengths, softmax_scale=layer.scaling, plan=step.plan,
            cu_seqlens_q=step.cu_seqlens_q,
        )  # fmt: skip
        return out.view(-1, heads * KV_LORA_RANK)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> Any:
        """Like ``forward_decode``; multi-head attention is another backend's."""
        if layer.v_head_dim != KV_LORA_RANK:
            if self.multi_head is None:
                raise RuntimeError("snapmla: a draft's step has no multi-head attention")
            return self.multi_head.forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache, **more
            )
        if self.forward_metadata is None:
            self.forward_metadata = self._ragged(forward_batch, len(q))
        return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **more)

    def _step(self, layer: Any, more: dict[str, Any]) -> Step:
        """The step's, after a look at the layer and at arguments that are not known here."""
        if more:
            refuse.arguments(more)
        if layer.layer_id not in self._known_layers:
            refuse.layer(layer)
            self._known_layers.add(layer.layer_id)
        if self.forward_metadata is None:
            raise RuntimeError("snapmla: attention before init_forward_metadata of its step")
        return self.forward_metadata


class SnapMLAMultiStepBackend:
    """A draft model's steps, each with its own tables: ``attn_backends[i]`` sees i + 1 drafts."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int) -> None:
        if topk > 1:
            raise ValueError(f"snapmla: --speculative-eagle-topk {topk}: {refuse.TREES}")
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.kv_index_translator = model_runner.kv_index_translator
        self.attn_backends = [
            SnapMLABackend(model_runner, draft_step=i) for i in range(speculative_num_steps - 1)
        ]
        self.attn_backend_list = self.attn_backends
        self.forward_metadata = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for each in self.attn_backends:
            each.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for each in self.attn_backends:
            each.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        step = build_inner_fb_view(
            forward_batch, bs=forward_batch.batch_size, forward_mode=ForwardMode.DECODE
        )
        for each in self.attn_backends:
            each.init_forward_metadata_out_graph(step, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing: all is written before a replay."""
