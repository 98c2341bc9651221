"""What a decode step of DeepSeek-V3.2's attention reads and writes, and its layers by our calls.

A layer stands between its products: it begins with what the projections wrote and ends with the
output over latents.  Layers share the projections' tensors, as buffers in an engine are used again;
caches are one pool, of which each layer has other pages.  Block tables are as wide as the longest
context, as an engine's are, whatever the lengths.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import snapmla
from profiles.index_step import pool_of
from profiles.tables.sparse_cost import filled
from snapmla import dsa
from snapmla.testing.index_reference import E4M3

LAYERS, LONGEST, PAGE, K = 61, 163840, 64, 2048
HEADS, INDEX_HEADS = 128, 64
SCALE, EPS = 192**-0.5, 1e-6
FORMAT = "fp8_ds_mla"


class Made(NamedTuple):
    """What a layer made: slots (b, k); RoPE of queries, (b, h, 64); ``out`` (b, 1, h, 512)."""

    slots: torch.Tensor
    q_rope: torch.Tensor
    out: torch.Tensor


Layer = Callable[[int], Made]  # the n-th


class Memory:
    """Both caches, of random tokens: rows of 656 bytes, index keys of 132."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        kv = filled("fp8_ds_mla", tokens, device).kv
        assert kv is not None
        self.kv = kv.view(-1, 656)
        self.index = pool_of(tokens // PAGE, device)


class Step:
    """Tensors of one step: a token of each of ``batch`` sequences, which then have ``tokens``."""

    def __init__(self, memory: Memory, batch: int, tokens: int, layers: int = LAYERS) -> None:
        device = memory.kv.device
        self.kv, self.index, self.batch, self.tokens = memory.kv, memory.index, batch, tokens

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device).bfloat16()

        latents, keys = normal(batch, 576), normal(batch, 128 + INDEX_HEADS)
        self.c_kv, self.k_rope = latents[:, :512], latents[:, 512:]
        self.index_k, self.index_weights = keys[:, :128], keys[:, 128:]
        self.index_q, self.q = normal(batch, INDEX_HEADS, 128), normal(batch, HEADS, 192)
        self.q_nope = normal(batch, HEADS, 512)
        self.norm_weight = torch.ones(512, device=device, dtype=torch.bfloat16)
        self.index_norm_weight, self.index_norm_bias = normal(2, 128).float()
        self.weight_scale = 128**-0.5 * INDEX_HEADS**-0.5
        self.positions = torch.full((batch,), tokens - 1, device=device)
        self.lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
        angles = torch.arange(LONGEST, device=device)[:, None] * 1e4 ** -torch.linspace(
            0, 31 / 32, 32, device=device
        )
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
        self._cos_sin: dict[torch.dtype, torch.Tensor] = {}
        self.tables = [self._table(i) for i in range(layers)]
        last = (tokens - 1) // PAGE
        self.slots = [t[:, last].long() * PAGE + (tokens - 1) % PAGE for t in self.tables]

    def _table(self, layer: int) -> torch.Tensor:
        """Pages of a layer, behind those of the layer before, as far as the pool goes."""
        width, pages, device = -(-self.tokens // PAGE), len(self.index), self.kv.device
        used = self.batch * width
        start = layer * used % max(1, pages - used + 1)
        table = torch.zeros(self.batch, LONGEST // PAGE, dtype=torch.int32, device=device)
        own = torch.randperm(used, device=device) + start
        table[:, :width] = own.view(self.batch, width)
        return table

    def cos_sin_of(self, dtype: torch.dtype) -> torch.Tensor:
        """Angles in the tokens' dtype, as vLLM keeps them."""
        if dtype not in self._cos_sin:
            self._cos_sin[dtype] = self.cos_sin.to(dtype)
        return self._cos_sin[dtype]

    def converted(self, positions: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
        """Positions to slots."""
        from profiles.slots_kernel import convert  # Triton, where there is a GPU

        convert(positions, table, out, PAGE)


class _Ours:
    """What both of our layers share: choice and attention, results given."""

    def __init__(self, step: Step, package: Any) -> None:
        b, device = step.batch, step.q.device
        self.step, self.package = step, package
        self.dsa = importlib.import_module("snapmla.dsa")  # the active checkout's
        rows = step.kv.view(-1, PAGE, 1, 656)
        self.cache = package.PagedKVCache.from_tensors(rows, format=FORMAT)
        self.plan = package.plan_sparse_decode(
            HEADS, 1, topk=K, batch=b, device=device, cache_dtype=FORMAT
        )
        self.chosen = torch.empty(b, K, dtype=torch.int32, device=device)
        self.counts = torch.empty(b, dtype=torch.int32, device=device)
        size = self.dsa.index_topk_workspace(b, LONGEST)
        self.workspace = torch.empty(size, dtype=torch.uint8, device=device)
        self.out = torch.empty(b, 1, HEADS, 512, dtype=torch.bfloat16, device=device)
        self.lse = torch.empty(b, HEADS, 1, device=device)

    def choose(self, i: int, q: torch.Tensor, w: torch.Tensor) -> None:
        self.dsa.index_topk(
            q[:, None], w[:, None], self.step.index, self.step.tables[i], self.step.lengths, K,
            max_tokens=LONGEST, out=self.chosen, counts=self.counts, workspace=self.workspace,
        )  # fmt: skip

    def attend(self, q: Any) -> None:
        self.package.decode(
            q, self.cache, indices=self.chosen[:, None], softmax_scale=SCALE, plan=self.plan,
            out=self.out, lse=self.lse,
        )  # fmt: skip


def today(step: Step) -> Layer:
    """``dsa.prologue``, ``dsa.index_topk`` and ``decode``, whose queries stay in two tensors."""
    ours, b = _Ours(step, snapmla), step.batch
    q_rope = step.q[..., 128:]
    turned = step.q.new_empty(b, HEADS, 64)
    made = dsa.Prologue(
        step.index_q.new_empty(step.index_q.shape, dtype=torch.uint8).view(E4M3),
        step.lengths.new_empty(b, INDEX_HEADS, dtype=torch.float32), turned,
    )  # fmt: skip
    both = step.q_nope[:, None], turned[:, None]

    def run(i: int) -> Made:
        dsa.prologue(
            ours.cache, step.c_kv, step.k_rope, step.slots[i], step.index, step.index_k,
            step.index_q, step.index_weights, step.positions, step.cos_sin,
            norm_weight=step.norm_weight, index_norm_weight=step.index_norm_weight,
            index_norm_bias=step.index_norm_bias, q_rope=q_rope, out=made,
        )  # fmt: skip
        ours.choose(i, made.index_q, made.index_weights)
        ours.attend(both)
        return Made(ours.chosen, turned, ours.out)

    return run


def single(step: Step, package: Any, queries: Any, turn: Callable[[torch.Tensor], None]) -> Layer:
    """The same in single calls, of a package that may know no prologue.

    Args:
        package: an imported ``snapmla``; a checkout's while that is active, at first.
        queries: called with None, leaves the indexer's in ``made`` and ``w``.
        turn: RoPE of attention's queries where they lie.
    """
    ours, q = _Ours(step, package), step.q.clone()
    q_rope = q[..., 128:]

    def run(i: int) -> Made:
        package.rope_append_kv(
            ours.cache, step.c_kv, step.k_rope, step.slots[i], step.positions, step.cos_sin,
            norm_weight=step.norm_weight,
        )  # fmt: skip
        ours.dsa.append_index_k(
            step.index, step.index_k, step.slots[i], positions=step.positions,
            cos_sin_cache=step.cos_sin, norm_weight=step.index_norm_weight,
            norm_bias=step.index_norm_bias,
        )  # fmt: skip
        queries(None)
        ours.choose(i, queries.made.view(step.index_q.shape), queries.w)
        turn(q_rope)
        ours.attend(torch.cat((step.q_nope, q_rope), -1)[:, None])
        return Made(ours.chosen, q_rope, ours.out)

    return run
