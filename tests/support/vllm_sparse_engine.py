"""vLLM's layers of DSA models with both caches, on which ``vllm_sparse_driver`` runs its cases.

``Engine`` has a layer and its indexer, their caches and what the tokens were; ``Layers`` two of the
layers that CUDA builds use.  Names of vLLM are replaced by ``vllm_sparse_ops`` before any is made.

What is compared: attention of the layer against fp32 attention over the latents before they were
quantised.  Its error may be what the reference that rounds as the kernels do predicts, and
``SLACK`` more or less.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dsl_kernels.formats.ds_mla import ROW_BYTES
from snapmla.integrations import vllm as plugin
from snapmla.testing import metrics
from snapmla.testing.record_reference import RecordCall, record_decode_mimic
from tests.support import vllm_engine as dense
from tests.support.vllm_engine import LATENT, NOPE, PAGE, ROPE, SCALE, SLACK, V
from tests.support.vllm_sparse_ops import INDEX_BUILDER, MLA

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
ASKED: list[bool] = []  # whether the older release's name was given to our backend


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
        self.built: Any = None  # attention's metadata of the step that was chosen for last
        self.built_of: Any = None
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
        """Positions (tokens, topk) that the layer's indexer chooses; slots of the buffer are turned
        back."""
        from vllm.forward_context import set_forward_context

        count = step.num_actual_tokens
        hidden, low_rank = (
            torch.stack([x[i][at] for i, at in tokens] + [x[0][0]] * (count - len(tokens)))
            for x in (self.hidden, self.low_rank)
        )
        positions = torch.tensor([at for _, at in tokens] + [0] * (count - len(tokens)))
        self.buffer.fill_(-7)
        self.built, self.built_of = self.builder.build(0, step), step
        metadata = {
            self.indexer.k_cache.prefix: self.index_builder.build(0, step),
            self.layer.layer_name: self.built,
        }
        with set_forward_context(metadata, self.config), torch.no_grad():
            found = self.indexer(hidden, low_rank, positions, self.rope)
        assert found.data_ptr() == self.buffer.data_ptr() and (self.buffer[count:] == -7).all()
        chosen = self.buffer[:count].clone()
        if self.built.chosen is not None and not (chosen == -7).all():  # else nothing chose
            assert torch.equal(self.built.chosen[:count], (chosen >= 0).sum(1, dtype=torch.int32))
            for row, (i, _) in zip(chosen, tokens):
                pages = {page: at for at, page in reversed(list(enumerate(TABLE[i])))}
                there = [pages[int(s) // PAGE] * PAGE + int(s) % PAGE for s in row[row >= 0]]
                row[: len(there)] = torch.tensor(there)
        return chosen

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
        built = self.built if self.built_of is step else self.builder.build(0, step)
        with torch.no_grad():
            self.layer.forward_impl(q, *new, self.kv, built, output=out)
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
