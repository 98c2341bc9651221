"""A layer of DeepSeek-V3.2's sparse attention by the operators that vLLM 0.24 calls, without vLLM.

FlashMLA's library, vLLM's own of operators and DeepGEMM are peers in a folder
(``profiles/results/README.md``); each operator is called as vLLM's eager layers call it, but for
copies that they make and that are left out here, to their favour: RoPE turns queries and keys where
they lie, so nothing is concatenated behind it.  What is no operator of a library:

* LayerNorm of index keys and the product of weights and scales are torch's, as there;
* positions to slots is a Triton kernel, as there, but ours (``profiles.slots_kernel``).

vLLM's compiled mode fuses some of the small kernels; what it makes is not rebuilt here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from profiles.index_step import peer_of
from profiles.peer_ops import COOPERATIVE_ROWS, WORKSPACE, vllm_ops
from profiles.v32_layers import EPS, LONGEST, PAGE, SCALE, K, Layer, Made, Step
from snapmla.runtime.launch import sm_count

E4M3 = torch.float8_e4m3fn
FLASHMLA = "vllm_flashmla/_flashmla_C.abi3.so"


class Peers:
    """The libraries of a step, each None where it is not; ``missing`` names them."""

    def __init__(self, folder: Path | None) -> None:
        library = folder / FLASHMLA if folder else None
        if library is not None and library.is_file():
            torch.ops.load_library(str(library))
        attend = getattr(torch.ops._flashmla_C, "sparse_decode_fwd", None)
        self.attend: Any = attend
        self.ops: Any = vllm_ops(folder)
        self.gemm: Any = peer_of(os.environ.get("DEEP_GEMM", ""))

    @property
    def missing(self) -> str:
        named = {"FlashMLA": self.attend, "vLLM's operators": self.ops, "DeepGEMM": self.gemm}
        return ", ".join(name for name, there in named.items() if there is None)


def turned(step: Step, ops: Any, query: torch.Tensor, key: torch.Tensor | None, neox: bool) -> None:
    """RoPE of heads where they lie, by vLLM's operator."""
    ops.rotary_embedding(
        step.positions, query, key, query.shape[-1], step.cos_sin_of(query.dtype), neox
    )


class IndexQueries:
    """RoPE and quantisation of the indexer's queries, and their weights, by vLLM's operators."""

    def __init__(self, step: Step, ops: Any) -> None:
        b, heads, width = step.index_q.shape
        self.step, self.ops = step, ops
        self.q = step.index_q.clone()
        self.made = self.q.new_empty(b * heads, width, dtype=torch.uint8).view(E4M3)
        self.scales = self.q.new_empty(b * heads, 1, dtype=torch.float32)
        self.w = self.q.new_empty(b, heads, dtype=torch.float32)

    def __call__(self, key: torch.Tensor | None) -> None:
        """Turns a key of each token beside them, if given."""
        q, (b, heads, width) = self.q, self.q.shape
        turned(self.step, self.ops, q, key, True)
        self.ops.per_token_group_fp8_quant(
            q.view(-1, width), self.made, self.scales, width, 1e-10, -448.0, 448.0, True, False,
            False,
        )  # fmt: skip
        torch.mul(self.step.index_weights, self.scales.view(b, heads), out=self.w)
        self.w.mul_(self.step.weight_scale)


def layer(step: Step, peers: Peers) -> Layer:
    """All of it; results given but for those that operators allocate."""
    b, device, ops, caches = step.batch, step.q.device, peers.ops, torch.ops._C_cache_ops
    queries, q = IndexQueries(step, ops), step.q.clone()
    q_rope, k_rope = q[..., 128:], step.k_rope.clone().view(b, 1, 64)
    latent = step.c_kv.new_empty(step.c_kv.shape)
    one = torch.ones(1, device=device)
    buffer, slots = (torch.empty(b, K, dtype=torch.int32, device=device) for _ in range(2))
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    whole = q.new_empty(b, 128, 576)
    seen = step.lengths.view(b, 1)
    planned = peers.gemm.get_paged_mqa_logits_metadata(seen, PAGE, sm_count(device))
    keys = step.index.view(-1, PAGE, 1, 132)
    newer = getattr(peers.gemm, "fp8_fp4_paged_mqa_logits", None)
    score = newer or peers.gemm.fp8_paged_mqa_logits
    given = queries.made.view(b, 1, 64, 128)
    first = (given, None) if newer else given
    few = b <= COOPERATIVE_ROWS and hasattr(ops, "cooperative_topk")
    choose = ops.cooperative_topk if few else ops.persistent_topk
    rows, nothing = step.kv.view(-1, PAGE, 1, 656), (None,) * 3

    def attend(*schedule: Any) -> Any:
        return peers.attend(
            whole[:, None], rows, slots[:, None], None, None, *schedule, *nothing, 512, SCALE, None
        )

    slots.zero_()
    schedule = attend(None, None)[2:4]

    def run(i: int) -> Made:
        ops.rms_norm(latent, step.c_kv, step.norm_weight, EPS)
        turned(step, ops, q_rope, k_rope, False)
        key = torch.nn.functional.layer_norm(
            step.index_k.float(), (128,), step.index_norm_weight, step.index_norm_bias, EPS
        ).type_as(latent)
        queries(key.view(b, 1, 128))
        caches.indexer_k_quant_and_cache(
            key, step.index.view(-1, PAGE, 132), step.slots[i], 128, "ue8m0"
        )
        buffer.fill_(-1)
        logits = score(
            first, keys, queries.w, seen, step.tables[i], planned, LONGEST, clean_logits=False
        )
        choose(logits, seen, buffer, workspace, K, LONGEST)
        caches.concat_and_cache_mla(
            latent, k_rope[:, 0], step.kv.view(-1, PAGE, 656), step.slots[i], "fp8_ds_mla", one
        )
        caches.concat_mla_q(step.q_nope, q_rope, whole)
        step.converted(buffer, step.tables[i], slots)
        return Made(slots, whole[..., 512:], attend(*schedule)[0])

    return run
