"""SGLang's own pool, layers and forward batches, on which the cases of ``sglang_driver`` run.

``Engine`` has a pool with cached tokens, layers over it and our backend.  All tensors are on
torch's default device; what SGLang imports for a GPU are shells.

What is compared: attention of the layer against attention in fp64 over the latents before they
were quantised.  Its error may be what the reference that rounds as the kernels do predicts, and
15 % more or less.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from snapmla import reference
from snapmla.integrations import sglang as plugin
from snapmla.testing import metrics

HEADS, PAGE, LAYERS, CONTEXT, LATENT, ROPE = 16, 64, 2, 256, 512, 64
NOPE, V = 128, 128  # of multi-head attention
SCALE = 192**-0.5
DRAFTS = 3
LENGTHS = (130, 1, 64)  # of the requests whose tokens are cached
ROWS = (3, 1, 5)  # their rows of the request pool
SLACK = 1.15


class MultiHead:
    """Backend in the place of SGLang's ``fa3``: attention over K and V by torch."""

    def __init__(self, model_runner: Any) -> None:
        self.kv_cache_dtype_str = model_runner.kv_cache_dtype_str
        self.batch: Any = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.batch = forward_batch

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save: bool
    ) -> Any:
        assert self.kv_cache_dtype_str == "auto" and forward_batch is self.batch and not save
        new = forward_batch.extend_seq_lens
        prefix = bool(forward_batch.attn_attend_prefix_cache)
        keys = forward_batch.extend_prefix_lens if prefix else new
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = q.new_empty(len(q), layer.tp_q_head_num, layer.v_head_dim)
        lse = torch.empty(len(q), layer.tp_q_head_num)
        ends_q, ends_k = new.cumsum(0).tolist(), keys.cumsum(0).tolist()
        for n, m, a, b in zip(new.tolist(), keys.tolist(), ends_q, ends_k, strict=True):
            part, its = slice(a - n, a), slice(b - m, b)
            logits = torch.einsum("qhd,khd->hqk", q[part].float(), k[its].float()) * layer.scaling
            if not prefix:
                logits = logits.masked_fill(torch.ones(n, m).triu(1).bool(), -torch.inf)
            lse[part] = logits.logsumexp(-1).mT
            of = torch.einsum("hqk,khd->qhd", logits.softmax(-1).nan_to_num(), v[its].float())
            out[part] = of.to(out.dtype)
        return (out, lse) if forward_batch.mha_return_lse else out


@contextmanager
def settings(**fields: Any) -> Iterator[None]:
    """SGLang's published configuration."""
    from sglang.srt.runtime_context import get_context, get_parallel

    fields = {
        "attention_backend": plugin.BACKEND, "kv_cache_dtype": "fp8_e4m3", "page_size": PAGE,
        "speculative_num_draft_tokens": DRAFTS, **fields,
    }  # fmt: skip
    with (
        get_parallel().override(attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0),
        get_context().override_server_args(**fields),
    ):
        yield


def device() -> str:
    """Device of all tensors."""
    return torch.get_default_device().type


class Engine:
    """A pool with cached tokens, layers over it, and a backend; latents as they were."""

    def __init__(self, **more: Any) -> None:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        from snapmla.integrations.sglang.pool import SnapMLATokenToKVPool

        self.pool = SnapMLATokenToKVPool(
            size=16 * PAGE, page_size=PAGE, dtype=torch.float8_e4m3fn, kv_lora_rank=LATENT,
            qk_rope_head_dim=ROPE, layer_num=LAYERS, device=device(), enable_memory_saver=False,
        )  # fmt: skip
        for rows, scale in zip(self.pool.kv_buffer, self.pool.kv_scale_buffer, strict=True):
            rows[PAGE:] = 0xFF  # NaN: what was not written must not be read
            scale[PAGE:] = torch.nan
        self.requests = ReqToTokenPool(8, CONTEXT, device(), False)
        self.runner = SimpleNamespace(
            token_to_kv_pool=self.pool, req_to_token_pool=self.requests, dtype=torch.bfloat16,
            kv_index_translator=None, kv_cache_dtype_str="fp8_e4m3",
            model_config=SimpleNamespace(num_attention_heads=HEADS, hf_text_config=None), **more,
        )  # fmt: skip
        self.backend = ATTENTION_BACKENDS[plugin.BACKEND](self.runner)
        self.layers = [
            RadixAttention(
                num_heads=HEADS, head_dim=LATENT + ROPE, scaling=SCALE, num_kv_heads=1, layer_id=i,
                v_head_dim=LATENT,
            )
            for i in range(LAYERS)
        ]  # fmt: skip
        self.lengths = list(LENGTHS)
        shape = (LAYERS, len(LENGTHS), CONTEXT, LATENT + ROPE)
        self.latents = (torch.randn(shape) + 0.5).bfloat16()
        pages = iter((torch.randperm(16) + 1).tolist())  # page 0 is for padding
        for row in ROWS:
            ids = [next(pages) * PAGE + torch.arange(PAGE) for _ in range(CONTEXT // PAGE)]
            self.requests.write((row, slice(0, CONTEXT)), torch.cat(ids).int())
        for layer in self.layers:
            for i, n in enumerate(LENGTHS):
                self.pool.set_mla_kv_buffer(layer, self.slots(i, 0, n), *self.new(layer, i, 0, n))

    def slots(self, request: int, begin: int, end: int) -> Tensor:
        return self.requests.req_to_token[ROWS[request], begin:end].long()

    def new(self, layer: Any, request: int, begin: int, end: int) -> list[Tensor]:
        """Latents of tokens, as a layer hands them over: (n, 1, 512) and (n, 1, 64)."""
        rows = self.latents[layer.layer_id, request, begin:end, None]
        return list(rows.split([LATENT, ROPE], -1))

    def batch(self, mode: Any, new: list[int], padding: int = 0, counted: bool = True) -> Any:
        """A forward batch of ``new[i]`` query tokens of request i.

        counted: whether seq_lens has them already, as in decode and extend.
        """
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        past = self.lengths
        lens = [n + (m if counted else 0) for n, m in zip(past, new, strict=True)]
        slots = [self.slots(i, n, n + m) for i, (n, m) in enumerate(zip(past, new, strict=True))]
        slots += [torch.zeros(new[0], dtype=torch.long)] * padding
        where = torch.cat(slots)
        return ForwardBatch(
            forward_mode=mode, batch_size=len(lens) + padding,
            input_ids=torch.zeros(len(where), dtype=torch.long),
            req_pool_indices=torch.tensor([*ROWS, *[0] * padding]),
            seq_lens=torch.tensor(lens + [0] * padding), out_cache_loc=where, seq_lens_sum=0,
            extend_seq_lens=torch.tensor(new + [new[0]] * padding),
            extend_prefix_lens=torch.tensor(past + [0] * padding), extend_num_tokens=len(where),
        )  # fmt: skip

    def run(
        self, what: str, batch: Any, new: list[int], backend: Any = None, joined: bool = False
    ) -> Tensor:
        """All layers of a step; their errors are looked at."""
        backend, rows, outs = backend or self.backend, [], []
        for layer in self.layers:
            q = torch.randn(len(batch.out_cache_loc), HEADS, LATENT + ROPE).bfloat16()
            parts = [self.new(layer, i, self.lengths[i], self.lengths[i] + m)
                     for i, m in enumerate(new)]  # fmt: skip
            k, k_rope = (torch.cat(each) for each in zip(*parts, strict=True))
            short = len(q) - len(k)
            k, k_rope = (torch.cat([x, x[:1].expand(short, -1, -1)]) for x in (k, k_rope))
            if joined:
                joint = torch.cat([k, k_rope], -1)
                out = backend.forward(q.flatten(1), joint, k, layer, batch)
            else:
                # as bmm leaves them: heads apart
                q_nope = q[..., :LATENT].transpose(0, 1).contiguous().transpose(0, 1)
                q_rope = q[..., LATENT:]
                out = backend.forward(q_nope, k, k, layer, batch, q_rope=q_rope, k_rope=k_rope)
            out = out.view(-1, HEADS, LATENT)
            at = 0
            for i, m in enumerate(new):
                for j in range(m):
                    rows.append((q[at], out[at], layer.layer_id, i, self.lengths[i] + j + 1))
                    at += 1
            assert not out[at:].any(), "a slot that pads a batch sees no token"
            outs.append(out)
        self.check(what, rows)
        return torch.stack(outs)

    def check(self, what: str, rows: list[tuple[Tensor, Tensor, int, int, int]]) -> None:
        """Rows of (q, got, layer, request, tokens seen): their error is the predicted one."""
        wanted: dict[Any, list[Tensor]] = {reference.FP64: [], reference.MIMIC: []}
        for q, _, layer, i, seen in rows:
            c, r = self.latents[layer, i, :seen].float().split([LATENT, ROPE], -1)
            for config, found in wanted.items():
                out, _ = reference.reference_from_unquantised(
                    q[None, None, :, :LATENT].float(), q[None, None, :, LATENT:].float(), c[None],
                    r[None], SCALE, config=config,
                )  # fmt: skip
                found.append(out[0, 0].float())
        truth, mimic = (torch.stack(each) for each in wanted.values())
        got = torch.stack([row[1].float() for row in rows])
        error, expected = metrics.relative_l2(got, truth), metrics.relative_l2(mimic, truth)
        print(f"{what}: relative L2 {error:.2e}, predicted {expected:.2e}", flush=True)
        assert expected / SLACK <= error <= expected * SLACK, what

    def advance(self, by: int) -> None:
        self.lengths = [n + by for n in self.lengths]
