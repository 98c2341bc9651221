"""vLLM's own classes for DSA models (DeepSeek-V3.2) on CPU tensors, with our backend and indexer.

    PYTHONPATH=... python -m tests.support.vllm_sparse_driver CASE...

As ``tests/support/vllm_driver.py``, of which it takes the stand-ins for what vLLM computes by CUDA
outside of our backend; those of sparse attention are here: the kernel that turns positions into
rows, the one that describes chunks of prompts, streams, and, for the layer that CUDA builds use,
its two fused operators.  Prints a line a case, last ``all right``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import snapmla
from dsl_kernels.cache_records.ds_mla import ROW_BYTES
from snapmla import runtime
from snapmla.integrations import vllm as plugin
from snapmla.integrations.vllm.__main__ import needed_sparse
from snapmla.testing import metrics
from snapmla.testing.record_reference import RecordCall, record_decode_mimic
from tests.support import vllm_driver as dense
from tests.support.vllm_driver import LATENT, NOPE, PAGE, ROPE, SCALE, SLACK, V

HEADS, INDEX_HEADS, TOPK, HIDDEN, Q_RANK = dense.HEADS, 32, 128, 256, 96
PAGES, WIDTH = 12, 6
LENGTHS = (300, 40, 129)
TABLE = ((5, 0, 3, 1, 7, 9), (2, 10, 0, 0, 0, 0), (6, 4, 8, 11, 0, 0))
ROPE_OPTIONS = {"rope_type": "default", "rope_theta": 1e4}
MODEL = dense.MODEL | {
    "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"],
    "q_lora_rank": Q_RANK, "index_topk": TOPK, "index_n_heads": INDEX_HEADS, "index_head_dim": 128,
    "rope_parameters": ROPE_OPTIONS, "rms_norm_eps": 1e-6,
}  # fmt: skip
CONVERTED: list[int] = []  # query tokens of each call that turned positions into rows
ASKED: list[bool] = []  # whether the older release's name was given to our backend
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


# ------------------------------------------------------------------------------------- the engine


def sparse_backend() -> type:
    """Ours, as vLLM's registry has it: by a name of its own, or in the place of another."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Names

    plugin.register()
    if plugin.SPARSE_BACKEND not in Names.__members__:
        if not ASKED:
            assert Names[plugin.OVERRIDDEN].get_class().__module__.startswith("vllm.")
        ASKED.append(True)
        with mock.patch.dict("os.environ", {"SNAPMLA_VLLM_SPARSE": "1"}):
            plugin.register()
    newer = plugin.SPARSE_BACKEND in Names.__members__
    name = plugin.SPARSE_BACKEND if newer else plugin.OVERRIDDEN
    found = Names[name].get_class()
    assert found.__name__ == "SnapMLASparseBackend" and found.get_name() == name
    return found


def make_config(**of_model: Any) -> Any:
    """vLLM's configuration of a model of this form."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL | of_model))
        model = ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16",
            max_model_len=WIDTH * PAGE, enforce_eager=True,
        )  # fmt: skip
    return VllmConfig(
        model_config=model, cache_config=CacheConfig(block_size=PAGE, cache_dtype="fp8_ds_mla"),
        device_config=DeviceConfig(device="cpu"), parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=WIDTH * PAGE,
            is_encoder_decoder=False,
        ),
    )  # fmt: skip


def one_rank() -> None:
    """vLLM's process groups, of this process alone."""
    from vllm.distributed import parallel_state

    if not torch.distributed.is_initialized():
        store = Path(tempfile.mkdtemp()) / "store"
        dense.SETTINGS.callback(torch.distributed.destroy_process_group)
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
        parallel_state.initialize_model_parallel(1)


@contextlib.contextmanager
def in_bfloat16() -> Iterator[None]:
    """A model's layers are made in its dtype."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def initialised(module: torch.nn.Module) -> None:
    """Random weights, norms of ones."""
    for name, weight in module.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        else:
            (torch.nn.init.zeros_ if "bias" in name else torch.nn.init.ones_)(weight)


def bound(owner: Any, spec: Any, apart: int = 1) -> Any:
    """Memory of a layer's cache full of NaN's bytes; pages ``apart`` pages apart, as where layers'
    pages lie in turn."""
    size = spec.page_size_bytes
    raw = torch.full((PAGES * apart, size), 0xFF, dtype=torch.uint8)[::apart]
    pages = raw.unflatten(1, (PAGE, size // PAGE))
    if hasattr(owner, "bind_kv_cache"):
        owner.bind_kv_cache(pages.unsqueeze(1))
    else:
        owner.kv_cache = pages
    return pages


class Engine:
    """A layer of vLLM's with its indexer and both caches, and what its tokens were."""

    def __init__(self, drafts: int = 0, apart: int = 1, invariant: bool = False) -> None:
        from vllm import envs
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.models import deepseek_v2 as model

        mla = importlib.import_module(MLA)
        self.backend = sparse_backend()
        self.config = make_config()
        if drafts:
            self.config.speculative_config = mock.Mock(
                num_speculative_tokens=drafts, enable_adaptive_verification=False
            )
        dense.SETTINGS.enter_context(set_current_vllm_config(self.config))
        one_rank()
        with in_bfloat16():
            self._make_layers(model, mla)
        self.layer.process_weights_after_loading(torch.bfloat16)
        self.layer.impl.dcp_world_size = 1
        spec = self.layer.get_kv_cache_spec(self.config)
        if hasattr(mla.MLACommonBackend, "customize_spec"):
            spec = self.backend.customize_spec(spec)
        self.spec, self.index_spec = spec, self.indexer.k_cache.get_kv_cache_spec(self.config)
        assert spec.page_size_bytes == PAGE * ROW_BYTES
        assert self.index_spec.page_size_bytes == PAGE * 132
        self.kv = bound(self.layer, spec, apart)
        self.index_pages = bound(self.indexer.k_cache, self.index_spec)
        with mock.patch.object(envs, "VLLM_BATCH_INVARIANT", invariant, create=True):
            self.builder = self.new_builder()
        self.shard = (0, 1, 1)  # rank, ranks, tokens of a turn
        self.index_builder = new_index_builder(self)
        self.lengths = [0] * len(LENGTHS)
        self.latents = [torch.randn(WIDTH * PAGE, LATENT).bfloat16() for _ in LENGTHS]
        self.ropes = [torch.randn(WIDTH * PAGE, ROPE).bfloat16() for _ in LENGTHS]
        self.hidden = [torch.randn(WIDTH * PAGE, HIDDEN).bfloat16() for _ in LENGTHS]
        self.low_rank = [torch.randn(WIDTH * PAGE, Q_RANK).bfloat16() for _ in LENGTHS]

    def _make_layers(self, model: Any, mla: Any) -> None:
        """The indexer and the attention layer, as the model makes them."""
        self.buffer = torch.full((1024, TOPK), -7, dtype=torch.int32)
        hf = self.config.model_config.hf_text_config
        self.indexer = model.Indexer(
            self.config, hf, HIDDEN, Q_RANK, None, self.config.cache_config, self.buffer,
            prefix="model.layers.0.self_attn.indexer",
        )  # fmt: skip
        initialised(self.indexer)
        self.indexer.indexer_op._forward_method = self.indexer.indexer_op.forward_cuda
        self.rope = model.get_rope(
            ROPE, max_position=2048, rope_parameters=ROPE_OPTIONS, is_neox_style=True
        )
        self.rope._forward_method = self.rope.forward_native
        self.kv_b_proj = dense.Projection()
        self.layer = mla.MLAAttention(
            num_heads=HEADS, scale=SCALE, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE,
            v_head_dim=V, q_lora_rank=Q_RANK, kv_lora_rank=LATENT, kv_b_proj=self.kv_b_proj,
            cache_config=self.config.cache_config, prefix="model.layers.0.self_attn.attn",
            use_sparse=True, indexer=self.indexer, topk_indices_buffer=self.buffer,
            attn_backend=self.backend,
        )  # fmt: skip

    def new_builder(self) -> Any:
        make = self.backend.get_builder_cls()
        return make(self.spec, [self.layer.layer_name], self.config, torch.device("cpu"))

    def tokens(self, new: list[int], requests: list[int]) -> list[tuple[int, int]]:
        """(request, position) of a step's query tokens, which are the last ones."""
        return [
            (i, self.lengths[i] - n + j) for n, i in zip(new, requests, strict=True)
            for j in range(n)
        ]  # fmt: skip

    def slots(self, tokens: list[tuple[int, int]]) -> Tensor:
        """-1 of tokens that another rank has."""
        rank, ranks, turn = self.shard
        found = torch.full((len(tokens),), -1)
        for row, (i, at) in enumerate(tokens):
            local = at // (turn * ranks) * turn + at % turn
            if at // turn % ranks == rank:
                found[row] = TABLE[i][local // PAGE] * PAGE + local % PAGE
        return found

    def step(self, new: list[int], requests: list[int], padding: int = 0, **more: Any) -> Any:
        """vLLM's metadata of a step with ``new[i]`` query tokens of ``requests[i]``."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        begin = torch.tensor([0, *new, *[max(new)] * padding]).cumsum(0).int()
        lengths = [self.lengths[i] for i in requests] + [0] * padding
        table = torch.tensor([TABLE[i] for i in requests] + [[0] * WIDTH] * padding).int()
        count, seen = int(begin[-1]), torch.tensor(lengths, dtype=torch.int32)
        slots = torch.full((count,), -1)
        slots[: sum(new)] = self.slots(self.tokens(new, requests))
        return CommonAttentionMetadata(
            query_start_loc=begin, query_start_loc_cpu=begin, seq_lens=seen, num_reqs=len(lengths),
            num_actual_tokens=count, max_query_len=max(new), max_seq_len=max(lengths),
            block_table_tensor=table, slot_mapping=slots, seq_lens_cpu_upper_bound=seen, **more,
        )  # fmt: skip

    def choose(self, step: Any, tokens: list[tuple[int, int]]) -> Tensor:
        """What the layer's indexer writes of them: positions (tokens, topk)."""
        from vllm.forward_context import set_forward_context

        count = step.num_actual_tokens
        hidden, low_rank = (
            torch.stack([x[i][at] for i, at in tokens] + [x[0][0]] * (count - len(tokens)))
            for x in (self.hidden, self.low_rank)
        )
        positions = torch.tensor([at for _, at in tokens] + [0] * (count - len(tokens)))
        self.buffer.fill_(-7)
        metadata = {self.indexer.k_cache.prefix: self.index_builder.build(0, step)}
        with set_forward_context(metadata, self.config), torch.no_grad():
            found = self.indexer(hidden, low_rank, positions, self.rope)
        assert found.data_ptr() == self.buffer.data_ptr() and (self.buffer[count:] == -7).all()
        return self.buffer[:count].clone()

    def write(self, tokens: list[tuple[int, int]]) -> None:
        """New tokens into the KV cache, as the layer does; a skipped one behind them."""
        c, r = self.of(self.latents, tokens), self.of(self.ropes, tokens)
        slots = torch.cat([self.slots(tokens), torch.tensor([-1])])
        c, r = torch.cat([c, c[:1] * 9]), torch.cat([r, r[:1] * 9])
        self.layer.impl.do_kv_cache_update(
            c, r.unsqueeze(1), self.kv, slots, "fp8_ds_mla", self.layer._k_scale, False
        )

    @staticmethod
    def of(parts: list[Tensor], tokens: list[tuple[int, int]]) -> Tensor:
        return torch.stack([parts[i][at] for i, at in tokens])

    def grow(self, new: list[int], requests: list[int]) -> list[tuple[int, int]]:
        """New tokens of some requests, written to the KV cache; the indexer writes its own."""
        for n, i in zip(new, requests, strict=True):
            self.lengths[i] += n
        tokens = self.tokens(new, requests)
        self.write(tokens)
        return tokens

    def attend(self, step: Any, tokens: list[tuple[int, int]], q: Tensor | None = None) -> Any:
        """(queries, attention of the layer before the output projection)."""
        count = step.num_actual_tokens
        if q is None:
            q = torch.randn(count, HEADS, NOPE + ROPE).bfloat16()
        out = torch.zeros(count, HEADS * V, dtype=torch.bfloat16)
        padded = tokens + [(0, 0)] * (count - len(tokens))
        new = self.of(self.latents, padded), self.of(self.ropes, padded).unsqueeze(1)
        with torch.no_grad():
            self.layer.forward_impl(q, *new, self.kv, self.builder.build(0, step), output=out)
        return q, out.view(count, HEADS, V)

    # ------------------------------------------------------------------ what it should have been

    def weights(self) -> tuple[Tensor, Tensor]:
        weight = self.kv_b_proj.weight.float().view(HEADS, NOPE + V, LATENT)
        return weight[:, :NOPE], weight[:, NOPE:]

    def truth(self, q: Tensor, request: int, seen: Tensor) -> Tensor:
        """fp32 multi-head attention of a query token over tokens before they were quantised."""
        c, r = self.latents[request][seen].float(), self.ropes[request][seen].float()
        up_k, up_v = self.weights()
        k, v = torch.einsum("nr,hdr->hnd", c, up_k), torch.einsum("nr,hdr->hnd", c, up_v)
        logits = torch.einsum("hd,hnd->hn", q[:, :NOPE].float(), k)
        logits += q[:, NOPE:].float() @ r.T
        return torch.einsum("hn,hnd->hd", (logits * SCALE).softmax(-1), v)

    def predicted(self, q: Tensor, slots: list[Tensor]) -> Tensor:
        """The kernels' rounding over the cache's own rows, for query tokens that see ``slots``."""
        up_k, up_v = self.weights()
        absorbed = torch.einsum("thd,hdr->thr", q[..., :NOPE].float(), up_k).bfloat16()
        indices = torch.full((len(q), max(map(len, slots))), -1, dtype=torch.int32)
        for row, seen in zip(indices, slots, strict=True):
            row[: len(seen)] = seen.int()
        call = RecordCall(
            torch.cat((absorbed, q[..., NOPE:]), -1), self.kv, indices,
            torch.tensor([len(seen) for seen in slots]), SCALE,
        )  # fmt: skip
        out, _ = record_decode_mimic(call, group_sums=True)
        return torch.einsum("thr,hdr->thd", out.bfloat16().float(), up_v)

    def check(
        self, what: str, q: Tensor, got: Tensor, tokens: list[tuple[int, int]], chosen: Tensor
    ) -> None:
        """Attention to chosen positions: its error is the predicted one."""
        seen = [row[row >= 0].long() for row in chosen[: len(tokens)]]
        for (_, at), row in zip(tokens, seen, strict=True):
            assert len(row) == min(TOPK, at + 1) and int(row.max()) <= at
        truth = torch.stack([self.truth(x, i, row) for x, (i, _), row in zip(q, tokens, seen)])
        slots = [self.slots([(i, int(p)) for p in row]) for (i, _), row in zip(tokens, seen)]
        mimic = self.predicted(q[: len(tokens)], slots)
        error = metrics.relative_l2(got[: len(tokens)].float(), truth)
        expected = metrics.relative_l2(mimic, truth)
        print(f"{what}: relative L2 {error:.2e}, predicted {expected:.2e}", flush=True)
        assert expected / SLACK <= error <= expected * SLACK, what


def new_index_builder(engine: Any) -> Any:
    """vLLM's builder of the indexer's metadata."""
    module = importlib.import_module(INDEX_BUILDER)
    make = module.DeepseekV32IndexerMetadataBuilder
    more = {"block_table_width": WIDTH} if getattr(make, "requires_block_table_width", 0) else {}
    with mock.patch.object(module, "num_compute_units", lambda *_: 132):
        return make(
            engine.index_spec, [engine.indexer.k_cache.prefix], engine.config, torch.device("cpu"),
            **more,
        )  # fmt: skip


def with_past(**options: Any) -> Engine:
    """An engine whose requests have cached tokens, all but the last three."""
    engine = Engine(**options)
    from snapmla.integrations.vllm import indexer as choosing  # vLLM is there now

    with mock.patch.object(choosing, "index_topk"):  # keys are written, nothing is chosen
        for request, length in enumerate(LENGTHS):
            tokens = engine.grow([length - 3], [request])
            engine.choose(engine.step([length - 3], [request]), tokens)
    return engine


def decode() -> None:
    """s_q of 1 and 2; what is chosen does not depend on the batch."""
    for s_q in (1, 2):
        engine = with_past(drafts=s_q - 1, apart=2)
        requests = [0, 1, 2]
        tokens = engine.grow([s_q] * 3, requests)
        step = engine.step([s_q] * 3, requests)
        chosen = engine.choose(step, tokens)
        built = engine.index_builder.build(0, step)
        assert (built.num_decodes, built.num_prefills) == (3, 0)
        q, got = engine.attend(step, tokens)
        engine.check(f"decode of {s_q} query tokens", q, got, tokens, chosen)
        for i in requests:
            alone = engine.step([s_q], [i])
            part = slice(i * s_q, (i + 1) * s_q)
            assert torch.equal(engine.choose(alone, tokens[part]), chosen[part]), i


def graphs() -> None:
    """Slots that pad a graph; its plan is kept, and lists of nothing give zeros."""
    engine, requests = with_past(), [0, 2]
    tokens = engine.grow([1, 1], requests)
    captured = engine.builder.build_for_cudagraph_capture(engine.step([1, 1], [1, 2], padding=2))
    assert captured.plans is engine.builder.plans and engine.builder.plans.pinned == 1
    plan = captured.plans.get(4)
    step = engine.step([1, 1], requests, padding=2)
    chosen = engine.choose(step, tokens)
    assert (chosen[2:] == -1).all()
    q, got = engine.attend(step, tokens)
    engine.check("slots that pad a graph", q, got, tokens, chosen)
    assert not got[2:].any() and engine.builder.plans.get(4) is plan
    assert engine.builder.plans.pinned == 1


def prompts() -> None:
    """Batch-invariant: a prompt in chunks, with single tokens, and beside a request that decodes,
    has the bits of one prefill; what is chosen, too.  Else a short one may be dense attention."""
    engine = with_past(invariant=True)
    assert engine.config.attention_config.sparse_mla_force_mqa
    begin, count = engine.lengths[2], 32
    q = torch.randn(count, HEADS, NOPE + ROPE).bfloat16()
    waits = {"is_prefilling": torch.tensor([True])}

    def run(sizes: list[int], beside: bool) -> tuple[Tensor, Tensor]:
        parts, at = [], 0
        engine.lengths[2] = begin
        for size in sizes:
            tokens = engine.grow([size], [2])
            rows, others = q[at : at + size], 0
            if beside:  # request 0 decodes, and comes first
                others = 1
                tokens = engine.tokens([1, size], [0, 2])
                rows = torch.cat([torch.randn(1, HEADS, NOPE + ROPE).bfloat16(), rows])
                step = engine.step(
                    [1, size], [0, 2], is_prefilling=torch.tensor([False, size > 1])
                )  # fmt: skip
            else:
                step = engine.step([size], [2], **waits)
            chosen = engine.choose(step, tokens)
            _, got = engine.attend(step, tokens, rows)
            parts.append((chosen[others:], got[others:]))
            at += size
        return tuple(torch.cat(part) for part in zip(*parts))  # type: ignore[return-value]

    whole = run([count], beside=False)
    tokens = engine.tokens([count], [2])
    engine.check("one prefill", q, whole[1], tokens, whole[0])
    for sizes, beside in (([18, 1, 1, 12], False), ([20, 12], True)):
        again = run(sizes, beside)
        same = [torch.equal(a, b) for a, b in zip(whole, again)]
        print(f"chunks of {sizes}, beside a decode {beside}: the same choice and bits {same}")
        assert same == [True, True]
    short_prompt(engine)


def short_prompt(engine: Engine) -> None:
    """Dense attention of a chunk over a cached prefix, which our rows are fetched for."""
    engine.config.attention_config.sparse_mla_force_mqa = False
    engine.builder.reorder_batch_threshold = 8
    tokens = engine.grow([30], [1])
    step = engine.step([30], [1], is_prefilling=torch.tensor([True]))
    built = engine.builder.build(0, step)
    assert (built.num_decodes, built.num_prefills) == (0, 1)
    assert built.prefill_max_seq_len == LENGTHS[1] + 27
    q, got = engine.attend(step, tokens)
    truth = torch.stack([engine.truth(x, i, torch.arange(at + 1)) for x, (i, at) in zip(q, tokens)])
    error = metrics.relative_l2(got.float(), truth)
    print(f"dense attention of a short prompt over 37 cached tokens: relative L2 {error:.2e}")
    assert 5e-3 < error < 4.5e-2  # e4m3 of the prefix; its own tokens are exact to bf16


def ranks() -> None:
    """Context parallelism: both ranks choose what one would; an empty shard is (0, -inf)."""
    from snapmla.integrations.vllm import indexer as choosing

    engine = with_past()
    one = engine.kv.clone(), engine.index_pages.clone()
    for turn, new, requests in (
        (1, [1, 1, 1], [0, 1, 2]),
        (64, [1, 1, 1], [0, 1, 2]),
        (16, [6], [0]),
    ):
        tokens = engine.grow(new, requests)
        step = engine.step(new, requests)
        chosen = engine.choose(step, tokens)
        q = torch.randn(len(tokens), HEADS, LATENT + ROPE).bfloat16()
        built = engine.builder.build(0, step)
        want, _ = engine.layer.impl.forward_mqa(q, engine.kv, built, engine.layer)
        one = engine.kv.clone(), engine.index_pages.clone()
        told: list[Tensor] = []
        for stage in ("told", "merged"):
            parts = []
            for rank in range(2):
                engine.shard = (rank, 2, turn)
                fill(engine, choosing, requests, new)
                gather = told.append if stage == "told" else None
                found = rank_step(engine, choosing, new, requests, tokens, told, gather)
                if stage == "merged":
                    assert torch.equal(found, chosen), f"rank {rank} of 2, turns of {turn}"
                    parts.append(rank_attend(engine, new, requests, q))
        lse_of = [lse for _, lse in parts]
        if turn == 64:  # request 1 has 38 tokens: all are rank 0's
            at = requests.index(1)
            assert torch.isneginf(lse_of[1][at]).all() and not parts[1][0][at].any()
        out, _ = snapmla.merge_state(
            *(t for o, lse in parts for t in (o.unsqueeze(0), lse.mT.unsqueeze(0).contiguous()))
        )
        error = metrics.relative_l2(out[0].float(), want.float())
        print(
            f"two ranks, turns of {turn}, {new}: one rank's choice, relative L2 to it {error:.1e}"
        )
        assert error < 6e-3  # of bfloat16 results and partial results
        engine.shard = (0, 1, 1)
        engine.layer.impl.dcp_world_size = 1
        engine.kv.copy_(one[0])
        engine.index_pages.copy_(one[1])


def fill(engine: Engine, choosing: Any, requests: list[int], new: list[int]) -> None:
    """The rank's tokens of some requests into caches that were empty; new index keys come later."""
    engine.kv.fill_(255)
    engine.index_pages.fill_(255)
    before = dict(zip(requests, new))
    for i in requests:
        every = engine.tokens([engine.lengths[i]], [i])
        engine.write(every)
        past = engine.lengths[i] - before[i]
        now, engine.lengths[i] = engine.lengths[i], past
        with mock.patch.object(choosing, "index_topk"):  # keys are written, nothing is chosen
            engine.choose(engine.step([past], [i]), engine.tokens([past], [i]))
        engine.lengths[i] = now


def rank_step(
    engine: Engine, choosing: Any, new: list[int], requests: list[int],
    tokens: list[tuple[int, int]], told: list[Tensor], gather: Any,
) -> Tensor:  # fmt: skip
    """What a rank's indexer chooses; ``told``: what the ranks tell one another."""
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    rank, count, turn = engine.shard
    step = engine.step(new, requests)
    step.dcp_local_seq_lens = get_dcp_local_seq_lens(step.seq_lens, count, rank, turn)

    def all_gather(best: Tensor, dim: int) -> Tensor:
        if gather is not None:
            gather(best.clone())
            return torch.cat([best] * count, dim)
        return torch.cat(told, dim)

    op, builder = engine.indexer.indexer_op, engine.index_builder
    group = mock.Mock(all_gather=all_gather, rank_in_group=rank)
    rank_of = torch.tensor(rank, dtype=torch.int32)
    config = mock.Mock(cp_kv_cache_interleave_size=turn)
    with (
        mock.patch.object(choosing, "get_dcp_group", lambda: group),
        mock.patch.multiple(op, dcp_rank=rank, dcp_world_size=count, _parallel_config=config),
        mock.patch.multiple(
            builder, dcp_rank=rank, dcp_world_size=count, dcp_rank_tensor=rank_of,
            cp_kv_cache_interleave_size=turn, compressed_cp_interleave_size=turn,
        ),
    ):  # fmt: skip
        return engine.choose(step, tokens)


def rank_attend(
    engine: Engine, new: list[int], requests: list[int], q: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, LSE (tokens, h)) of the rank's share of what is in the buffer."""
    rank, count, turn = engine.shard
    impl = engine.layer.impl
    impl.dcp_world_size, impl.dcp_rank, impl.need_to_return_lse_for_decode = count, rank, True
    with mock.patch.object(engine.builder, "cp_kv_cache_interleave_size", turn):
        built = engine.builder.build(0, engine.step(new, requests))
    out, lse = impl.forward_mqa(q, engine.kv, built, engine.layer)
    assert lse.shape == out.shape[:2]
    impl.dcp_world_size, impl.need_to_return_lse_for_decode = 1, False
    return out, lse


# -------------------------------------------------------------------- the layer of CUDA builds


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
        snapmla.dsa.append_index_k(
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


class Layers:
    """Two of the layers that CUDA builds use, of which the second has no indexer of its own."""

    def __init__(self) -> None:
        from vllm import envs
        from vllm.config import set_current_vllm_config
        from vllm.models.deepseek_v32 import attention as module
        from vllm.v1.attention.backends.mla.index_group import SparseMLAIndexGroupBuilder

        self.module, self.backend = module, sparse_backend()
        self.config = make_config(index_topk_pattern="FS", num_hidden_layers=2)
        dense.SETTINGS.enter_context(set_current_vllm_config(self.config))
        one_rank()
        self.buffer = torch.full((1024, TOPK), -7, dtype=torch.int32)
        groups = SparseMLAIndexGroupBuilder(self.buffer)
        hf = self.config.model_config.hf_text_config
        with in_bfloat16():
            self.layers = [
                module.DeepseekV32Attention(
                    self.config, hf, f"model.layers.{i}.self_attn", topk_indices_buffer=self.buffer,
                    attn_backend=self.backend, index_group_builder=groups,
                )
                for i in range(2)
            ]  # fmt: skip
        assert self.layers[1].indexer is None and self.layers[0].impl.index_group.num_layers == 2
        for layer in self.layers:
            initialised(layer)
            layer.process_weights_after_loading(torch.bfloat16)
            layer.impl.dcp_world_size = 1
            spec = self.backend.customize_spec(layer.get_kv_cache_spec(self.config))
            bound(layer, spec)
        self.indexer = self.layers[0].indexer
        self.index_spec = self.indexer.k_cache.get_kv_cache_spec(self.config)
        bound(self.indexer.k_cache, self.index_spec)
        names = [layer.layer_name for layer in self.layers]
        with mock.patch.object(envs, "VLLM_BATCH_INVARIANT", True, create=True):
            self.builder = self.backend.get_builder_cls()(
                spec, names, self.config, torch.device("cpu")
            )
        self.index_builder = new_index_builder(self)

    def run(self, hidden: Tensor, begin: int, end: int) -> Tensor:
        """Both layers' results for tokens ``begin`` to ``end`` of one request."""
        from vllm.forward_context import set_forward_context
        from vllm.v1.attention.backend import CommonAttentionMetadata

        n, at = end - begin, torch.arange(begin, end)
        cu, seen = (torch.tensor(x, dtype=torch.int32) for x in ([0, n], [end]))
        table = torch.tensor([TABLE[0]], dtype=torch.int32)
        slots = table[0, at // PAGE].long() * PAGE + at % PAGE
        step = CommonAttentionMetadata(
            query_start_loc=cu, query_start_loc_cpu=cu, seq_lens=seen, num_reqs=1,
            num_actual_tokens=n, max_query_len=n, max_seq_len=end, block_table_tensor=table,
            slot_mapping=slots, seq_lens_cpu_upper_bound=seen,
        )  # fmt: skip
        built = self.builder.build(0, step)
        steps = {layer.layer_name: built for layer in self.layers}
        steps[self.indexer.k_cache.prefix] = self.index_builder.build(0, step)
        out = [hidden[begin:end]]
        context = set_forward_context(steps, self.config, slot_mapping={s: slots for s in steps})
        with context, torch.no_grad():
            for layer in self.layers:
                out.append(layer(at, out[-1]))
        return torch.stack(out[1:])


def layer() -> None:
    """The layer that CUDA builds use, which writes both caches itself and calls the indexer as a
    function: chunks have the bits of one prefill, and a group's layers share decode's rows."""
    layers, hidden, past = Layers(), torch.randn(150, HIDDEN).bfloat16(), 130
    nothing = lambda _, q, *__: (torch.zeros_like(q[0]), None)
    update = type(layers.layers[0].impl).do_kv_cache_update
    with (
        mock.patch.object(layers.module, "fused_norm_rope", fused_norm_rope),
        mock.patch.object(layers.module, "fused_q", fused_q),
        mock.patch.object(type(layers.layers[0].impl), "do_kv_cache_update") as updates,
    ):
        with mock.patch.object(type(layers.layers[0].impl), "forward_mqa", nothing):
            layers.run(hidden, 0, past)  # what is cached; its results are nobody's
        whole = layers.run(hidden, past, 150)
        sizes, parts, converted_by = [12, 1, 1, 6], [], []
        for size in sizes:
            at = past + sum(part.shape[1] for part in parts)
            CONVERTED.clear()
            parts.append(layers.run(hidden, at, at + size))
            converted_by.append(len(CONVERTED))
    assert update is not None and not updates.called
    again = torch.cat(parts, 1)
    same = torch.equal(whole, again)
    print(f"two layers, chunks of {sizes}: the bits of one prefill {same}", flush=True)
    print(f"positions were turned into rows {converted_by} times by both layers")
    assert whole.isfinite().all() and same
    assert converted_by[1:3] == [1, 1], "layers of a group share decode's rows"


def refusals() -> None:
    """What is not served stops the engine with a sentence; the selector takes what is."""
    from vllm.platforms.interface import DeviceCapability

    engine = Engine()
    asked = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8_ds_mla",
        "block_size": PAGE, "use_mla": True, "has_sink": False, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder", "use_sparse": True,
    }  # fmt: skip
    backend, parallel = engine.backend, engine.config.parallel_config
    assert backend.validate_configuration(**asked) == []
    for change in (
        {"head_size": 512}, {"kv_cache_dtype": "auto"}, {"use_sparse": False},
        {"device_capability": DeviceCapability(10, 0)}, {"has_sink": True},
    ):  # fmt: skip
        reasons = backend.validate_configuration(**asked | change)
        print(f"{change}: {reasons}")
        assert len(reasons) == 1
    with mock.patch.object(parallel, "prefill_context_parallel_size", 2):
        dense.refused("prefill context parallelism", engine.new_builder)
    from snapmla.integrations.vllm import indexer as choosing

    with mock.patch.object(engine.indexer, "n_head", 48):
        dense.refused("48 heads", lambda: choosing.serve(engine.indexer))
    others(choosing)


def others(choosing: Any) -> None:
    """An indexer of a layer that is not ours gets vLLM's own function, and all its arguments."""
    ours, seen = choosing.theirs.sparse_attn_indexer, []
    with mock.patch.object(ours, "theirs", lambda *given, **named: seen.append((given, named))):
        ours("hidden", "another.layer", 3, scale_fmt="ue8m0")
    assert seen == [(("hidden", "another.layer", 3), {"scale_fmt": "ue8m0"})]


CASES: dict[str, Callable[[], None]] = {
    "decode": decode, "graphs": graphs, "prompts": prompts, "ranks": ranks, "layer": layer,
    "refusals": refusals,
}  # fmt: skip
NEWER = ("ranks", "layer")  # cases of 0.33 alone


def main(names: list[str]) -> None:
    import vllm

    print(f"vLLM {vllm.__version__}, torch {torch.__version__}")
    loaded, load = set(), runtime.kernel

    def noted(spec: Any, *more: Any) -> Any:
        loaded.add(spec)
        return load(spec, *more)

    with contextlib.ExitStack() as stack:
        for name in ("empty", "zeros", "tensor"):
            free = dense.without_pinning(getattr(torch, name))
            stack.enter_context(mock.patch.object(torch, name, free))
        for module, name, value in replacements():
            stack.enter_context(mock.patch.object(sys.modules[module], name, value))
        stack.enter_context(mock.patch.object(runtime, "kernel", noted))
        stack.enter_context(dense.SETTINGS)
        for name in names:
            torch.manual_seed(0)  # a case has the same numbers alone
            CASES[name]()
    beside = ("merge_states", "quantize_q")  # of ``ranks``; of nobody
    known = {spec.name for spec in needed_sparse()}
    unknown = {s.name for s in loaded if s.name not in known and s.op not in beside}
    if "layer" not in names:  # whose fused operators stand for vLLM's
        assert not unknown, f"`check --sparse` does not ask for {unknown}"
    print("all right")


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
