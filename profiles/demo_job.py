"""What the demo's steps are made of: sizes, synthetic data, caches, and what a check found."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

import snapmla
from snapmla.cache.paged import PagedKVCache
from snapmla.testing.comparison import DecodeErrors

D, R = 512, 64
DRAFTS = (3, 0, 1, 2)  # tokens that requests verify beside the next one, by request and step
SPECULATIVE_STEPS = 2
ROPE_OUTLIERS = 4  # channels that reach +-1000
SINK_LOGIT = 6.0


@dataclass(frozen=True)
class Job:
    """Sizes of one run."""

    device: torch.device
    batch: int
    num_heads: int
    s_q: int
    layers: int
    steps: int
    page_size: int
    layout: str
    median_length: int
    max_length: int
    softmax_scale: float = 192**-0.5  # DeepSeek: head dim 128 + 64 before absorption

    @property
    def new_tokens(self) -> int:
        """Tokens appended per step and layer."""
        return self.batch * self.s_q


def gpu_job(device: torch.device) -> Job:
    """A decode server's step: 32 requests around 8K tokens, 64 heads, one speculative token."""
    return Job(device, 32, 64, 2, 4, 3, 64, "split", 8192, 65536)


def small_job(device: torch.device) -> Job:
    """The same job, small enough to interpret."""
    return Job(device, 3, 16, 2, 2, 2, 16, "paged", 60, 160)


@dataclass(frozen=True)
class Checked:
    """One decode call against fp64, and the two quantisations before it, bit for bit."""

    step: int
    layer: int
    sequences: int
    errors: DecodeErrors
    exact_bits: bool
    best: bool | None = None  # whether the tokens that were chosen are; None: all tokens were taken

    @property
    def right(self) -> bool:
        return self.errors.right and self.exact_bits and self.best is not False


class Model:
    """Synthetic latents and queries of one layer, with the statistics of the module's docstring."""

    def __init__(self, job: Job, seed: int):
        self.job = job
        self.random = torch.Generator(job.device).manual_seed(seed)
        self.bias = torch.zeros(D, device=job.device)
        self.bias[:: D // 32] = 2.0
        self.direction = self._normal(D)
        self.direction /= self.direction.norm()

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, device=self.job.device)

    def tokens(
        self, n: int, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(c_kv (n, 512), k_rope (n, 64)) bfloat16; ``sinks`` are the rows that are token 0."""
        c_kv = torch.exp(0.3 * self._normal(n, 1)) * (self._normal(n, D) + self.bias)
        k_rope = self._normal(n, R)
        k_rope[:, :ROPE_OUTLIERS] = (333.0 * k_rope[:, :ROPE_OUTLIERS]).clamp(-1e3, 1e3)
        if sinks is not None:
            c_kv[sinks] += SINK_LOGIT / (4.0 * self.job.softmax_scale) * self.direction
        return c_kv.bfloat16(), k_rope.bfloat16()

    def queries(self, *tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(q_nope, q_rope) bfloat16 (b, s_q, h, 512 | 64), slices of one joint tensor.

        Args:
            tokens: extents in place of (b, s_q).
        """
        job = self.job
        q = self._normal(*(tokens or (job.batch, job.s_q)), job.num_heads, D + R)
        q[..., :D] = 0.4 * q[..., :D] + 4.0 * self.direction
        q[..., D : D + ROPE_OUTLIERS] *= 2e-3  # outlier channels of K meet small ones of Q
        joint = q.bfloat16()
        return joint[..., :D], joint[..., D:]


@dataclass(frozen=True)
class Batch:
    """Block table and lengths on the device; ``lengths`` is the host's copy."""

    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    lengths: list[int]
    num_pages: int

    def slots(self, first: list[int], end: list[int], page_size: int) -> torch.Tensor:
        """Flat slots (int32) of tokens [first[i], end[i]) of every sequence i, in order."""
        table = self.block_table.cpu().long()
        rows = []
        for i, (a, b) in enumerate(zip(first, end, strict=True)):
            t = torch.arange(a, b)
            rows.append(table[i, t // page_size] * page_size + t % page_size)
        return torch.cat(rows).int().to(self.block_table.device)


def make_batch(job: Job, seed: int = 0) -> Batch:
    """Log-normal lengths (a long tail; one sequence is at the cap, one almost empty)."""
    random = torch.Generator().manual_seed(seed)
    spread = torch.exp(torch.randn(job.batch, generator=random))
    lengths = (job.median_length * spread).long().clamp(1, job.max_length).tolist()
    lengths[0], lengths[-1] = job.max_length, 1
    most = job.steps * job.s_q + SPECULATIVE_STEPS * (1 + max(DRAFTS))
    grown = [n + most for n in lengths]
    counts = [-(-n // job.page_size) for n in grown]
    order = torch.randperm(sum(counts) + 1, generator=random)
    table = torch.full((job.batch, max(counts)), -1, dtype=torch.int32)
    used = 0
    for i, count in enumerate(counts):
        table[i, :count] = order[used : used + count].int()
        used += count
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=job.device)
    return Batch(table.to(job.device), seqlens, lengths, len(order))


def fill(job: Job, batch: Batch, models: list[Model]) -> list[PagedKVCache]:
    """Allocates each layer's cache and appends every sequence's prompt."""
    starts = [0, *torch.tensor(batch.lengths).cumsum(0).tolist()][:-1]
    slots = batch.slots([0] * job.batch, batch.lengths, job.page_size)
    sinks = torch.tensor(starts, device=job.device)
    caches = []
    for model in models:
        cache = PagedKVCache.allocate(batch.num_pages, job.page_size, job.layout, job.device)
        cache.content_u8.fill_(0x7F)  # what torch.empty may hold: unused slots are NaN
        cache.rope.fill_(math.nan)
        cache.named_tensors["scale"].fill_(math.nan)
        snapmla.append_kv(cache, *model.tokens(len(slots), sinks), slots)
        caches.append(cache)
    return caches


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def stored(cache: PagedKVCache, slots: torch.Tensor) -> Rows:
    """(content, rope, scale) rows of the cache at flat slots."""
    page, offset = slots.long() // cache.page_size, slots.long() % cache.page_size
    content = cache.content_u8[page, offset].view(cache.content.dtype)
    scale = cache.named_tensors["scale"]
    return content, cache.rope[page, offset], scale[page, offset]


def same_rows(got: Rows, want: Rows) -> bool:
    """True if quantised rows agree bit for bit."""
    return all(bool((a.float() == b.float()).all()) for a, b in zip(got, want, strict=True))
