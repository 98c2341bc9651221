"""The demo's steps of sparse attention: each query token attends to what the indexer chose for it.

The new tokens' latents go into the KV cache and their index keys, behind LayerNorm and RoPE, into
the index cache at the same slots; ``dsa.index_topk`` chooses, sparse decode attends.  Checked for a
few sequences: index keys bit for bit; the choice by scores in float64; attention as all of the
demo's, over the chosen tokens in pages of their own.
"""

from __future__ import annotations

import dataclasses
import time

import torch
from rich.console import Console

import snapmla
from profiles.demo_job import Batch, Checked, Job, Model, fill, make_batch, same_rows, stored
from snapmla import dsa
from snapmla.cache.paged import PagedKVCache
from snapmla.cache.quant import QuantizedQuery
from snapmla.testing import index_reference
from snapmla.testing.comparison import DecodeErrors, decode_errors
from snapmla.testing.rounding import quantize_rows

INDEX_HEADS, DIM, PAGE, STEPS = 64, 128, 64, 2
TOPK, FEW = 2048, 64  # tokens that are chosen; of the small job
# What a chain of 128 FP8 products may cost a score, of sum_h |w| relu(q k) (docs/dsa.md).
SLACK = 3e-4
Tensor = torch.Tensor


class Indexer:
    """Synthetic keys and queries of a layer's indexer, and what its projections leave to do."""

    def __init__(self, job: Job, max_position: int, seed: int) -> None:
        self.job = job
        self.random = torch.Generator(job.device).manual_seed(seed)
        angle = torch.arange(max_position, device=job.device)[:, None].float()
        angle = angle * 10000.0 ** (-torch.arange(32, device=job.device) / 32.0)
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], 1)
        self.norm = 1 + 0.1 * self._normal(DIM), 0.1 * self._normal(DIM)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, device=self.job.device)

    def append(self, cache: Tensor, slots: Tensor, positions: Tensor) -> bool:
        """New keys into their slots; whether the cache holds them bit for bit."""
        k = self._normal(len(slots), DIM).bfloat16()
        weight, bias = self.norm
        dsa.append_index_k(
            cache, k, slots, positions=positions, cos_sin_cache=self.cos_sin,
            norm_weight=weight, norm_bias=bias,
        )  # fmt: skip
        few = slice(0, None, max(1, len(slots) // 512))
        normed = index_reference.layer_norm(k[few].cpu(), weight.cpu(), bias.cpu(), 1e-6)
        turned = index_reference.rotate(normed, positions[few].cpu(), self.cos_sin.cpu(), True)
        want = index_reference.quantize_keys(turned, power_of_two=True)
        got = dsa.fetch_index_k(cache, slots[few])
        return all(torch.equal(a.cpu().float(), b.float()) for a, b in zip(got, want))

    def queries(self) -> tuple[Tensor, Tensor]:
        """(q e4m3 (b, s_q, 64, 128), w (b, s_q, 64)), w with the queries' scales."""
        shape = (self.job.batch, self.job.s_q, INDEX_HEADS)
        q, w = self._normal(*shape, DIM), self._normal(*shape)
        scale = q.abs().amax(-1).clamp_min(1e-4) / 448
        factor = (DIM * INDEX_HEADS) ** -0.5
        return (q / scale[..., None]).to(torch.float8_e4m3fn), w * scale * factor


def sparse_steps(base: Job, console: Console) -> list[Checked]:
    """Two steps of one layer, over caches of pages of 64 tokens that share their block table."""
    job = dataclasses.replace(base, page_size=PAGE, layout="split", layers=1, steps=STEPS)
    topk = TOPK if job.device.type == "cuda" else FEW
    batch = make_batch(job, seed=1)
    model = Model(job, seed=100)
    (cache,) = fill(job, batch, [model])
    index_cache = torch.full((batch.num_pages, PAGE, 132), 0x7F, dtype=torch.uint8).to(job.device)
    width = batch.block_table.shape[1]
    indexer = Indexer(job, width * PAGE, seed=200)
    lengths, begin = list(batch.lengths), [0] * job.batch
    exact = indexer.append(index_cache, *_new(batch, begin, lengths))
    rows = job.batch * job.s_q
    plan = snapmla.plan_sparse_decode(
        job.num_heads, job.s_q, topk=topk, batch=job.batch, device=job.device
    )
    room = dsa.index_topk_workspace(rows, width * PAGE)
    workspace = torch.empty(room, dtype=torch.uint8, device=job.device)
    results = []
    for step in range(STEPS):
        started = time.perf_counter()
        begin, lengths = lengths, [n + job.s_q for n in lengths]
        slots, positions = _new(batch, begin, lengths)
        batch.cache_seqlens.add_(job.s_q)
        c_kv, k_rope = model.tokens(job.new_tokens)
        snapmla.append_kv(cache, c_kv, k_rope, slots)
        exact &= indexer.append(index_cache, slots, positions)
        exact &= same_rows(stored(cache, slots), quantize_rows(c_kv, k_rope, slots=slots))
        index_q, index_w = indexer.queries()
        chosen, counts = dsa.index_topk(
            index_q, index_w, index_cache, batch.block_table, batch.cache_seqlens, topk,
            workspace=workspace,
        )  # fmt: skip
        q = snapmla.quantize_q(*model.queries())
        out, lse = snapmla.decode(
            q, cache, indices=chosen.view(job.batch, job.s_q, topk),
            softmax_scale=job.softmax_scale, plan=plan,
        )  # fmt: skip
        picks = [0, sorted(range(job.batch), key=lambda i: lengths[i])[job.batch // 2]]
        picks = [i * job.s_q + j for i in dict.fromkeys([*picks, job.batch - 1])
                 for j in range(job.s_q)]  # fmt: skip
        best = all(
            _best(row, job, lengths, batch, index_cache, (index_q, index_w), chosen, counts)
            for row in picks
        )
        errors = _errors(job, picks, cache, q, chosen, counts, out, lse)
        results.append(Checked(step, 0, len(picks) // job.s_q, errors, exact, best))
        console.print(
            f"sparse step {step}: {topk} tokens at most of each query token, "
            f"{time.perf_counter() - started:.1f} s"
        )
    return results


def _new(batch: Batch, first: list[int], end: list[int]) -> tuple[Tensor, Tensor]:
    """(slots, positions) of tokens [first, end) of every sequence."""
    slots = batch.slots(first, end, PAGE)
    positions = torch.cat([torch.arange(a, b) for a, b in zip(first, end, strict=True)])
    return slots, positions.int().to(slots.device)


def _best(
    row: int, job: Job, lengths: list[int], batch: Batch, index_cache: Tensor,
    query: tuple[Tensor, Tensor], chosen: Tensor, counts: Tensor,
) -> bool:  # fmt: skip
    """True if a query token's slots are as many as there are, in order, and by float64 the best."""
    i, j = divmod(row, job.s_q)
    seen = lengths[i] - job.s_q + 1 + j
    slots = batch.slots([0] * i + [0], [0] * i + [seen], PAGE).long()
    stored_keys, scales = dsa.fetch_index_k(index_cache, slots.int())
    q, w = query[0][i, j].double(), query[1][i, j].double()
    terms = torch.relu(q @ stored_keys.double().T) * scales.double()
    scores, size = w @ terms, w.abs() @ terms
    count = min(seen, chosen.shape[1])
    at = torch.isin(slots, chosen[row, :count].long())
    least = scores.topk(count).values[-1] - 2 * SLACK * size.max()
    return (
        int(counts[row]) == count
        and torch.equal(slots[at], chosen[row, :count].long())
        and bool((chosen[row, count:] == -1).all())
        and bool((scores[at] >= least).all())
    )


def _errors(
    job: Job, picks: list[int], cache: PagedKVCache, q: QuantizedQuery, chosen: Tensor,
    counts: Tensor, out: Tensor, lse: Tensor,
) -> DecodeErrors:  # fmt: skip
    """Of some query tokens, each a sequence of the tokens that were chosen for it, in pages of
    their own."""
    width = -(-chosen.shape[1] // PAGE)
    own = PagedKVCache.allocate(len(picks) * width, PAGE, "split", job.device)
    for name, rows in zip(("content", "rope", "scale"), stored(cache, chosen[picks].flatten())):
        to = own.content_u8 if name == "content" else own.named_tensors[name]
        rows = rows.view(torch.uint8) if name == "content" else rows
        padded = rows.new_zeros((len(picks), width * PAGE, *rows.shape[1:]))
        padded[:, : chosen.shape[1]] = rows.view(len(picks), chosen.shape[1], *rows.shape[1:])
        to.copy_(padded.view(to.shape))
    nope, rope, scale = (
        x.flatten(0, 1)[picks][:, None].contiguous() for x in (q.nope_u8, q.rope, q.scale)
    )
    table = torch.arange(len(picks) * width, dtype=torch.int32, device=job.device)
    return decode_errors(
        out.flatten(0, 1)[picks][:, None], lse.transpose(1, 2).flatten(0, 1)[picks][..., None],
        QuantizedQuery(nope.view(torch.float8_e4m3fn), rope, scale), own,
        table.view(len(picks), width), counts[picks], job.softmax_scale,
        heads=range(0, job.num_heads, max(1, job.num_heads // 8)),
    )  # fmt: skip
