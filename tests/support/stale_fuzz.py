"""Random steps by plans that may be stale: every row is its own request's right value, NaN, or the
call is refused.

    python -m tests.support.stale_fuzz TRIALS [DEVICE] [FIRST_SEED]

A request's cache holds one number, so that a row of ``out`` says whose tokens it saw and its LSE
how many.  A trial plans one step, changes offsets, lengths or limits in place or anew, and decodes:
with ``check_stale``, or with the changed tensors as witnesses.  Results are compared with those of
a plan for the changed step.
"""

from __future__ import annotations

import collections
import sys
from dataclasses import dataclass
from typing import Any

import torch

import snapmla
from snapmla import PagedKVCache
from snapmla.dense import DecodePlan

PAGE, TOPK, UNWRITTEN = 64, 64, 99.0
KINDS = (
    "fp8", "fp8 by f16", "bf16", "bf16 of two KV heads", "records", "sparse",
    "sparse records",
)  # fmt: skip
PIPELINES = {"fp8 by f16": ("f16", 16)}  # with row tiles
RECORDS = "fp8_ds_mla"
OUT, LSE = 0.04, 2e-3  # e4m3 weights of few tokens add up to 1 within OUT; of the LSE, absolute


def value_of(request: int) -> float:
    return (1.0, -2.0, 4.0, 0.5, -8.0, 16.0)[request]


@dataclass
class Tables:
    """Lengths, offsets and limits of a step, on the device."""

    lengths: torch.Tensor
    offsets: torch.Tensor
    limits: torch.Tensor | None

    def clone(self) -> Tables:
        limits = None if self.limits is None else self.limits.clone()
        return Tables(self.lengths.clone(), self.offsets.clone(), limits)


class Trial:
    """One step, and what becomes of it."""

    def __init__(self, seed: int, device: str):
        self.draw = torch.Generator().manual_seed(seed)
        self.device, self.kind = device, KINDS[self.below(len(KINDS))]
        self.b, self.width = 1 + self.below(5), 1 + self.below(3)
        self.total, self.heads = 1 + self.below(7), (2, 4, 16)[self.below(3)]
        self.seed = seed
        self.cache = self._cache()
        q = torch.randn(self.total, self.heads, 576, generator=self.draw).bfloat16() * 0.3
        q = q.to(device)
        self.q = snapmla.quantize_q(q[..., :512], q[..., 512:]) if self.native else q
        pages = torch.arange(self.b * self.width, dtype=torch.int32).view(self.b, self.width)
        self.table = pages.to(device)
        limited = not self.sparse and self.below(3) == 0
        self.planned = self._tables(limited)

    @property
    def sparse(self) -> bool:
        return self.kind.startswith("sparse")

    @property
    def native(self) -> bool:
        """True if the cache is this library's own."""
        return self.kind == "sparse" or self.kind.startswith("fp8")

    def below(self, n: int) -> int:
        return int(torch.randint(n, (), generator=self.draw))

    def _cache(self) -> PagedKVCache:
        pages = self.b * self.width
        values = torch.tensor([value_of(i // self.width) for i in range(pages)])
        rows = values.repeat_interleave(PAGE)[:, None].expand(-1, 576).bfloat16().to(self.device)
        if self.native or "records" in self.kind:
            dtype = "fp8" if self.native else RECORDS
            cache = PagedKVCache.allocate(pages, PAGE, device=self.device, dtype=dtype)
            slots = torch.arange(pages * PAGE, dtype=torch.int32, device=self.device)
            content, rope = rows[:, :512].contiguous(), rows[:, 512:].contiguous() * 0
            snapmla.append_kv(cache, content, rope, slots)
            return cache
        heads = 2 if "two" in self.kind else 1
        kv = rows.view(pages, PAGE, 1, 576).repeat(1, 1, heads, 1)
        return PagedKVCache.from_tensors(kv)

    def _tables(self, limited: bool) -> Tables:
        most = TOPK if self.sparse else self.width * PAGE
        lengths = torch.randint(most + 1, (self.b,), generator=self.draw)
        cuts = torch.randint(self.total + 1, (self.b,), generator=self.draw).sort().values
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), cuts])
        limits = torch.randint(most + 1, (self.total,), generator=self.draw) if limited else None
        made = [None if x is None else x.int().to(self.device) for x in (lengths, offsets, limits)]
        return Tables(made[0], made[1], made[2])  # type: ignore[arg-type]

    def plan(self, tables: Tables, **options: Any) -> DecodePlan:
        more: dict[str, Any] = {}
        if not self.native:
            more["cache_dtype"] = RECORDS if "records" in self.kind else torch.bfloat16
        if self.sparse:
            return snapmla.plan_sparse_decode(
                self.heads, topk=TOPK, topk_length=tables.lengths, cu_seqlens_q=tables.offsets,
                total_q=self.total, **more, **options,
            )  # fmt: skip
        if self.kind in PIPELINES:
            more["pipeline"], more["row_tile"] = PIPELINES[self.kind]
        return snapmla.plan_decode(
            tables.lengths, self.heads, cu_seqlens_q=tables.offsets, total_q=self.total,
            row_seqlens=tables.limits, page_size=PAGE, max_pages=self.width,
            num_kv_heads=2 if "two" in self.kind else 1, **more, **options,
        )  # fmt: skip

    def run(self, plan: DecodePlan, tables: Tables, **witness: Any) -> tuple[Any, Any]:
        """(out's first channel, LSE), (total, heads); all channels of a row are one value."""
        out = torch.full((self.total, self.heads, 512), UNWRITTEN, device=self.device).bfloat16()
        lse = torch.full((self.heads, self.total), UNWRITTEN, device=self.device)
        given: dict[str, Any] = dict(
            plan=plan, out=out, lse=lse, softmax_scale=0.02, empty_lse="+inf", **witness
        )
        if self.sparse:
            given |= {"indices": self._lists(tables), "topk_length": tables.lengths}
            snapmla.decode(self.q, self.cache, **given)
        else:
            snapmla.decode(self.q, self.cache, self.table, tables.lengths, **given)
        out = out.float().cpu()
        same = (out == out[..., :1]) | out.isnan()
        assert bool(same.all()), "channels of a row differ"
        return out[..., 0], lse.T.cpu()

    def _lists(self, tables: Tables) -> torch.Tensor:
        """Each query token names the first tokens of its own request."""
        token = torch.arange(self.total, dtype=torch.int32, device=self.device)
        owner = torch.searchsorted(tables.offsets[1:].contiguous(), token, right=True)
        first = owner.clamp_max(self.b - 1) * self.width * PAGE
        return (first[:, None] + torch.arange(TOPK, device=self.device)).int()

    def change(self, kept: Tables) -> Tables:
        """The changed step: ``kept`` rewritten in place, or new tensors."""
        other, which = self._tables(self.planned.limits is not None), 1 + self.below(7)
        now = kept if self.below(2) else kept.clone()
        if which & 1:
            now.offsets.copy_(other.offsets)
        if which & 2:
            now.lengths.copy_(other.lengths)
        if which & 4 and now.limits is not None and other.limits is not None:
            now.limits.copy_(other.limits)
        return now

    def outcome(self) -> str:
        """``refused``, ``right``, ``some void`` or ``void``; AssertionError of anything else."""
        switch = bool(self.below(2))
        options: dict[str, Any] = [{}, {"num_parts": 5}, {"fixed_split_tokens": 64}][self.below(3)]
        plan = self.plan(self.planned, check_stale=switch, **options)
        now = self.change(self.planned)
        want, want_lse = self.run(self.plan(now), now)
        if switch and now is not self.planned:  # what is new is seen by a witness alone
            witness = {"cu_seqlens_q": now.offsets, "row_seqlens": now.limits}
        else:
            witness = {} if switch else {"cu_seqlens_q": now.offsets, "row_seqlens": now.limits}
        try:
            out, lse = self.run(plan, now, **witness)
        except ValueError as error:
            assert switch and str(error).startswith("plan: expected the "), error
            return "refused"
        end = int(now.offsets[-1])
        out, lse, want, want_lse = out[:end], lse[:end], want[:end], want_lse[:end]
        assert not bool(((out == UNWRITTEN) | (lse == UNWRITTEN)).any()), "unwritten"
        void = out.isnan()
        assert torch.equal(void, lse.isnan()), "NaN in one of out and LSE alone"
        right = ((out - want).abs() <= OUT * want.abs()) & (
            (lse == want_lse) | ((lse - want_lse).abs() <= LSE)
        )
        assert bool((right | void).all()), "another value than its own"
        assert not switch or not bool(void.any()), "void with the switch"
        return "right" if not bool(void.any()) else "void" if bool(void.all()) else "some void"


def fuzz(trials: int, device: str, first: int = 0) -> collections.Counter[str]:
    """Outcomes of so many trials by kind.

    Raises:
        AssertionError: naming the seed.
    """
    found: collections.Counter[str] = collections.Counter()
    for seed in range(first, first + trials):
        trial = Trial(seed, device)
        try:
            found[f"{trial.kind}: {trial.outcome()}"] += 1
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {trial.kind}: {error}") from error
    return found


if __name__ == "__main__":
    count, where, start = (*sys.argv[1:], *("20", "cpu", "0")[len(sys.argv) - 1 :])
    for name, n in sorted(fuzz(int(count), where, int(start)).items()):
        print(f"{n:5}  {name}")
