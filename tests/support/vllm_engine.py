"""vLLM's MLA layer with its cache, and stand-ins, on which the cases of ``vllm_driver`` run.

``Engine`` has one layer, made as the model makes it; what vLLM computes by CUDA outside of our
backend (prefill attention, merging by LSE, pinned memory) is done by torch.

What is compared: attention of the layer against multi-head attention in fp32 over the latents
before they were quantised.  Its error may be what the reference that rounds as the kernels do
predicts, and 15 % more or less.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import snapmla.reference
from snapmla.integrations import vllm as plugin
from snapmla.testing import metrics

HEADS, NOPE, ROPE, V, LATENT, PAGE = 4, 128, 64, 128, 512, 64
PAGES, WIDTH = 8, 3
SCALE = 192**-0.5
LENGTHS = (130, 7, 64)  # of the requests whose tokens are cached
TABLE = ((5, 0, 3), (1, 7, 2), (6, 4, 0))
SLACK = 1.15
SETTINGS = contextlib.ExitStack()  # vLLM's current configuration
MODEL = {
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 256,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": 1,
    "kv_lora_rank": LATENT, "q_lora_rank": None, "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE, "v_head_dim": V, "intermediate_size": 512,
    "moe_intermediate_size": 128, "n_routed_experts": 4, "first_k_dense_replace": 1,
    "vocab_size": 512, "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
}  # fmt: skip


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Ragged attention and its LSE (h, tokens), as a prefill backend computes them."""
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = torch.empty(q.shape[1], q.shape[0])
    for i in range(len(cu_q) - 1):
        a, b, c, d = int(cu_q[i]), int(cu_q[i + 1]), int(cu_k[i]), int(cu_k[i + 1])
        logits = torch.einsum("qhd,khd->hqk", q[a:b].float(), k[c:d].float()) * SCALE
        if causal:
            logits = logits.masked_fill(torch.ones(b - a, d - c).triu(1).bool(), -torch.inf)
        lse[:, a:b] = logits.logsumexp(-1)
        out[a:b] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v[c:d].float()).to(out.dtype)
    return out, lse


def prefill_backend() -> type:
    """A prefill backend of torch, for both forms of a chunk of context."""
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

    class Plain(MLAPrefillBackend):
        @staticmethod
        def get_name() -> str:
            return "PLAIN"

        def prepare_metadata(self, prefill_metadata: Any) -> None:
            self.metadata = prefill_metadata

        def run_prefill_new_tokens(
            self, q: Tensor, k: Tensor, v: Tensor, return_softmax_lse: bool, **_: Any
        ) -> Any:
            begin = self.metadata.query_start_loc
            result = plain_attention(q, k, v, begin, begin, True)
            return result if return_softmax_lse else result[0]

        def run_prefill_context_chunk(
            self, q: Tensor, k: Tensor, v: Tensor, chunk_idx: int = 0, chunk: Any = None
        ) -> Any:
            if chunk is not None:
                begin, cached = chunk.query_start_loc, chunk.cu_seq_lens
            else:
                begin = self.metadata.query_start_loc
                cached = self.metadata.chunked_context.cu_seq_lens[chunk_idx]
            return plain_attention(q, k, v, begin, cached, False)

    return Plain


def merged(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    **_: Any,
) -> None:
    """vLLM's ``merge_attn_states``; LSE (h, tokens)."""
    total = torch.logaddexp(prefix_lse, suffix_lse)
    share = lambda lse: (lse - total).exp().mT[..., None]
    output.copy_(prefix_output * share(prefix_lse) + suffix_output * share(suffix_lse))


class Projection(torch.nn.Module):
    """The layer's kv_b_proj."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(HEADS * (NOPE + V), LATENT) * LATENT**-0.5
        self.weight = torch.nn.Parameter(weight.bfloat16(), requires_grad=False)
        self.quant_method = None

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.nn.functional.linear(x, self.weight), None


class Engine:
    """One layer of vLLM's with its cache, and what its tokens were before they were quantised."""

    def __init__(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.attention import mla_attention as mla
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        plugin.register()
        plugin.register()  # every process does, some twice
        backend = AttentionBackendEnum.CUSTOM.get_class()
        self.has_specs = hasattr(mla.MLACommonBackend, "customize_spec")
        (self.dtype,) = backend.supported_kv_cache_dtypes
        self.config = self.make_config()
        SETTINGS.enter_context(set_current_vllm_config(self.config))
        self.kv_b_proj = Projection()
        self.layer = mla.MLAAttention(
            num_heads=HEADS, scale=SCALE, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE,
            v_head_dim=V, q_lora_rank=None, kv_lora_rank=LATENT, kv_b_proj=self.kv_b_proj,
            cache_config=self.config.cache_config, prefix="model.layers.0.self_attn.attn",
            attn_backend=backend,
        )  # fmt: skip
        self.layer.process_weights_after_loading(torch.bfloat16)
        self.layer.impl.dcp_world_size = 1
        spec = self.layer.get_kv_cache_spec(self.config)
        if self.has_specs:
            spec = backend.customize_spec(spec)
        self.spec = spec
        assert spec.page_size_bytes == PAGE * (644 if self.has_specs else 656)
        self.cached = [(torch.empty(0, LATENT), torch.empty(0, ROPE)) for _ in LENGTHS]
        self.kv = self.new_cache()
        self.builder = self.new_builder()

    def make_config(self) -> Any:
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            ModelConfig,
            ParallelConfig,
            SchedulerConfig,
            VllmConfig,
        )

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODEL))
            model = ModelConfig(
                model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16",
                max_model_len=1024, enforce_eager=True,
            )  # fmt: skip
        return VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=PAGE, cache_dtype=self.dtype),
            device_config=DeviceConfig(device="cpu"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=1024,
                is_encoder_decoder=False,
            ),
            parallel_config=ParallelConfig(),
        )  # fmt: skip

    def new_cache(self) -> Tensor:
        """Pages of this release, full of NaN's bytes: what was not written must not be read."""
        raw = torch.full((PAGES * self.spec.page_size_bytes,), 0xFF, dtype=torch.uint8)
        if not self.has_specs:
            shape = self.layer.attn_backend.get_kv_cache_shape(PAGES, PAGE, 1, 576, self.dtype)
            return raw.view(shape)
        from vllm.v1.kv_cache_interface import compute_layer_kv_cache_shape_bytes

        self.layer.bind_kv_cache(raw.view(compute_layer_kv_cache_shape_bytes(self.spec, PAGES)))
        return self.layer.kv_cache

    def new_builder(self, *names: str) -> Any:
        make = self.layer.attn_backend.get_builder_cls()
        layers = list(names) or [self.layer.layer_name]
        return make(self.spec, layers, self.config, torch.device("cpu"))

    def append(self, request: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """New tokens of a request: latents, RoPE parts, slots; they count as cached from now on."""
        c, r = torch.randn(count, LATENT).bfloat16(), torch.randn(count, ROPE).bfloat16()
        old_c, old_r = self.cached[request]
        at = len(old_c) + torch.arange(count)
        self.cached[request] = torch.cat([old_c, c.float()]), torch.cat([old_r, r.float()])
        slots = torch.tensor(TABLE[request])[at // PAGE] * PAGE + at % PAGE
        return c, r, slots

    def write(self, kv: Tensor, c: Tensor, r: Tensor, slots: Tensor) -> None:
        """Writes new tokens at int64 slots as the layer does, and one at -1, which it skips."""
        skipped = torch.cat([slots, torch.tensor([-1])])
        c, r = torch.cat([c, c[:1] * 9]), torch.cat([r, r[:1] * 9])
        self.layer.impl.do_kv_cache_update(
            c, r.unsqueeze(1), kv, skipped, self.dtype, self.layer._k_scale, False
        )

    def step(self, new: list[int], requests: list[int], padding: int = 0, **more: Any) -> Any:
        """vLLM's metadata of a step with ``new[i]`` query tokens of ``requests[i]``."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        b = len(requests) + padding
        begin = torch.tensor([0, *new]).cumsum(0).int()
        begin = torch.cat([begin, begin[-1:].repeat(padding)])
        lengths = torch.tensor(
            [len(self.cached[i][0]) for i in requests] + [0] * padding, dtype=torch.int32
        )
        table = torch.tensor([TABLE[i] for i in requests] + [[0] * WIDTH] * padding).int()
        tokens = int(begin[-1]) + padding * max(new)
        return CommonAttentionMetadata(
            query_start_loc=begin, query_start_loc_cpu=begin, seq_lens=lengths, num_reqs=b,
            num_actual_tokens=tokens, max_query_len=max(new), max_seq_len=int(lengths.max()),
            block_table_tensor=table, slot_mapping=torch.full((tokens,), -1),
            seq_lens_cpu_upper_bound=lengths, **more,
        )  # fmt: skip

    def run(self, metadata: Any, tokens: int) -> tuple[Tensor, Tensor]:
        """(queries, attention of the layer before the output projection)."""
        q = torch.randn(tokens, HEADS, NOPE + ROPE).bfloat16()
        out = torch.zeros(tokens, HEADS * V, dtype=torch.bfloat16)
        new = torch.zeros(tokens, LATENT).bfloat16(), torch.zeros(tokens, 1, ROPE).bfloat16()
        self.layer.forward_impl(q, *new, self.kv, metadata, output=out)
        return q, out.view(tokens, HEADS, V)

    # ------------------------------------------------------------------ what it should have been

    def weights(self) -> tuple[Tensor, Tensor]:
        """(h, nope, latent), (h, v, latent)."""
        weight = self.kv_b_proj.weight.float().view(HEADS, NOPE + V, LATENT)
        return weight[:, :NOPE], weight[:, NOPE:]

    def truth(self, q: Tensor, request: int, seen: int) -> Tensor:
        """fp32 multi-head attention of one query token over the first ``seen`` tokens."""
        c, r = (part[:seen] for part in self.cached[request])
        up_k, up_v = self.weights()
        k, v = torch.einsum("nr,hdr->hnd", c, up_k), torch.einsum("nr,hdr->hnd", c, up_v)
        logits = torch.einsum("hd,hnd->hn", q[:, :NOPE].float(), k)
        logits += q[:, NOPE:].float() @ r.T
        return torch.einsum("hn,hnd->hd", (logits * SCALE).softmax(-1), v)

    def predicted(self, q: Tensor, request: int, seen: int) -> Tensor:
        """The same with the kernels' rounding, of bf16 queries that were absorbed."""
        c, r = (part[None, :seen] for part in self.cached[request])
        up_k, up_v = self.weights()
        absorbed = torch.einsum("hd,hdr->hr", q[:, :NOPE].float(), up_k).bfloat16().float()
        out, _ = snapmla.reference.reference_from_unquantised(
            absorbed[None, None], q[None, None, :, NOPE:].float(), c, r, SCALE,
            config=snapmla.reference.MIMIC,
        )  # fmt: skip
        return torch.einsum("hr,hdr->hd", out[0, 0].float(), up_v)

    def check(self, what: str, rows: list[tuple[Tensor, Tensor, int, int]]) -> None:
        """Rows of (q, got, request, tokens seen): their error is the predicted one."""
        got = torch.stack([row[1].float() for row in rows])
        truth = torch.stack([self.truth(q, *at) for q, _, *at in rows])
        mimic = torch.stack([self.predicted(q, *at) for q, _, *at in rows])
        error, expected = metrics.relative_l2(got, truth), metrics.relative_l2(mimic, truth)
        print(f"{what}: relative L2 {error:.2e}, predicted {expected:.2e}", flush=True)
        assert expected / SLACK <= error <= expected * SLACK, what


def refused(what: str, make: Callable[[], Any]) -> None:
    """``make`` raises ValueError, in one sentence that has ``what``."""
    try:
        make()
    except ValueError as error:
        print(f"refused: {error}")
        assert what in str(error) and "\n" not in str(error)
    else:
        raise AssertionError(what)


def without_pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A constructor of tensors on a machine that cannot pin memory."""

    def call(*arguments: Any, **options: Any) -> Tensor:
        options.pop("pin_memory", None)
        return make(*arguments, **options)

    return call
