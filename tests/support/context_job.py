"""Work of one rank in tests of ``snapmla.parallel``: on CPUs with gloo, on GPUs with NCCL."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

import snapmla
from snapmla.parallel import ContextGroup, ContextPlan
from snapmla.testing import metrics, selfcheck
from tests.support import shards
from tests.support.shards import PAGE, SCALE, own_tokens

WAYS = tuple(
    (method, transport)
    for method in ("all_to_all", "reduce_scatter")
    for transport in (torch.float32, torch.bfloat16)
)
Results = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """A step. ``s_q`` query tokens of each sequence, or ``counts`` of them."""

    lengths: tuple[int, ...]
    heads: int
    interleave: int
    s_q: int | None = 1
    counts: tuple[int, ...] = ()
    ways: tuple[tuple[str, torch.dtype], ...] = WAYS
    replicated: bool = False  # also with replicated heads
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (len(self.lengths), self.s_q) if self.s_q else (sum(self.counts),)

    @property
    def cu_seqlens_q(self) -> Tensor | None:
        if self.s_q:
            return None
        return torch.tensor([0, *self.counts]).cumsum(0).int()

    def seen(self, rank: int, ranks: int) -> list[int]:
        """Tokens of a rank that each query token sees, in order."""
        counts = self.counts or (self.s_q,) * len(self.lengths)
        return [
            own_tokens(length - (count - 1 - s), rank, ranks, self.interleave)
            for length, count in zip(self.lengths, counts, strict=True)
            for s in range(count)
        ]


def name_of(method: str, transport: torch.dtype, heads: str = "gathered") -> str:
    return f"{method} {str(transport).removeprefix('torch.')} {heads}"


def begin(
    rank: int, ranks: int, store: str, backend: str = "gloo", seconds: float = 300
) -> torch.device:
    """Joins the process group; the device of this rank, which becomes the current one."""
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    distributed.init_process_group(
        backend, f"file://{store}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=seconds), device_id=device if backend == "nccl" else None,
    )  # fmt: skip
    return device


class Step:
    """A case on one rank: its shard on a device, queries, and plans by way of exchange."""

    def __init__(self, case: Case, rank: int, ranks: int, device: str) -> None:
        self.case, self.rank, self.ranks, self.device = case, rank, ranks, device
        shape = (case.lengths, rank, ranks, case.interleave)
        self.cache, self.table, _ = shards.shard(*shape, device)
        self.lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
        cu = case.cu_seqlens_q
        self.cu = None if cu is None else cu.to(device)
        self.q = shards.plain_queries(case.tokens, case.heads).to(device)

    def group(self, method: str, transport: torch.dtype, heads: str = "gathered") -> ContextGroup:
        return ContextGroup(
            num_heads=self.case.heads, interleave=self.case.interleave, method=method,
            transport=transport, heads=heads,
        )  # fmt: skip

    def plan(self, group: ContextGroup, workspace: Tensor | None = None) -> ContextPlan:
        """Made for other lengths, then updated to those of the case."""
        ragged = {} if self.cu is None else {"total_q": self.case.tokens[0]}
        plan = group.plan_decode(
            self.lengths.flip(0), self.case.s_q, page_size=PAGE, max_pages=self.table.shape[1],
            cu_seqlens_q=self.cu, workspace=workspace, **ragged, **self.case.options,
        )  # fmt: skip
        return plan.update_(self.lengths, self.cu)

    def queries(self, group: ContextGroup) -> tuple[Tensor, Tensor]:
        """This rank's queries, slices of a joint tensor."""
        own = group.own_heads
        at = slice(self.rank * own, (self.rank + 1) * own)
        q = self.q[..., at, :] if group.heads == "gathered" else self.q
        return q[..., :512], q[..., 512:]

    def results(self, group: ContextGroup) -> tuple[Tensor, Tensor]:
        """(out, lse) in float32, to be written."""
        *batch, last = self.case.tokens
        own = group.own_heads
        out = torch.full((*batch, last, own, 512), torch.nan, device=self.device)
        return out, torch.full((*batch, own, last), torch.nan, device=self.device)

    def decode(
        self, group: ContextGroup, plan: ContextPlan, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        return group.decode(
            *self.queries(group), self.cache, self.table, plan, softmax_scale=SCALE, out=out,
            lse=lse,
        )  # fmt: skip


def check_local(step: Step, group: ContextGroup, plan: ContextPlan) -> None:
    """Lengths and limits are those of the rule, slots those where the shard's tokens lie."""
    case, rank, ranks = step.case, step.rank, step.ranks
    own = [own_tokens(n, rank, ranks, case.interleave) for n in case.lengths]
    assert plan.cache_seqlens.tolist() == own
    assert group.local_lengths(step.lengths).tolist() == own
    if plan.row_seqlens is not None:
        seen = [max(n, 0) for n in case.seen(rank, ranks)]
        assert plan.row_seqlens.flatten().tolist() == seen
    at = torch.cat([torch.arange(n) for n in case.lengths]).to(step.device)
    of = torch.arange(len(case.lengths)).repeat_interleave(torch.tensor(case.lengths))
    slots = group.local_slots(at, step.table, of.to(step.device), page_size=PAGE)
    room = step.table.shape[1] * PAGE
    want = torch.cat([i * room + torch.arange(n) for i, n in enumerate(own)])
    assert torch.equal(slots[slots >= 0].cpu(), want)


def decode_case(case: Case, rank: int, ranks: int, device: str) -> Results:
    """This rank's results of a case by each way of exchange, in one workspace for all."""
    step, found = Step(case, rank, ranks, device), {}
    ways = [(*way, "gathered") for way in case.ways]
    ways += [(*case.ways[0], "replicated")] if case.replicated else []
    groups = [step.group(*way) for way in ways]
    size = max(group.workspace_bytes(*case.tokens) for group in groups)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=device)
    for way, group in zip(ways, groups, strict=True):
        plan = step.plan(group, workspace)
        check_local(step, group, plan)
        out, lse = step.decode(group, plan, *step.results(group))
        found[name_of(*way)] = out.clone(), lse.clone()
    return {name: (out.cpu(), lse.cpu()) for name, (out, lse) in found.items()}


def rows_case(rank: int, ranks: int, device: str) -> list[str]:
    """A cache of bfloat16 rows by each way, against fp64 and one rank; lines of figures."""
    lengths, heads, width, page = (40, 1, 17), 4, 3, 16
    torch.manual_seed(6)
    tokens = [torch.randn(n, 576, device=device).bfloat16() for n in lengths]
    q = torch.randn(len(lengths), 1, heads, 576, device=device).bfloat16()
    table = torch.arange(len(lengths) * width, dtype=torch.int32, device=device).view(-1, width)
    whole = torch.tensor(lengths, dtype=torch.int32, device=device)
    exact = []
    for i, x in enumerate(tokens):
        weights = (q[i, 0].double() @ x.double().T * SCALE).softmax(-1)
        exact.append(weights @ x[:, :512].double())
    truth, lines = torch.stack(exact)[:, None], []
    own = slice(rank * heads // ranks, (rank + 1) * heads // ranks)
    for method, transport in WAYS:
        for how in ("gathered", "replicated"):
            group = ContextGroup(
                num_heads=heads, interleave=16, method=method, transport=transport, heads=how
            )
            kind: Any = {"dtype": torch.bfloat16, "device": device}
            cache = snapmla.PagedKVCache.allocate(table.numel(), page, **kind)
            for i, x in enumerate(tokens):
                at = torch.arange(len(x), device=device)
                slots = group.local_slots(at, table, at * 0 + i, page_size=page)
                snapmla.append_kv(cache, x[:, :512], x[:, 512:], slots)
            plan = group.plan_decode(
                whole, 1, page_size=page, max_pages=width, cache_dtype=torch.bfloat16
            )
            mine = q[:, :, own] if how == "gathered" else q
            args = mine[..., :512], mine[..., 512:], cache, table, plan
            out, lse = group.decode(*args, softmax_scale=SCALE)
            error = metrics.relative_l2(out, truth[:, :, own])
            lines.append(f"rows, {name_of(method, transport, how)}: {error:.1e}")
            # P, partial results, weighted rows, their sum and the result, each in bfloat16
            assert error <= 5**0.5 * 2**-9 and torch.isfinite(lse).all(), lines[-1]
    return lines


def transport_rounding(name: str) -> float:
    """Largest relative L2 that rounding on the way adds: a result rounded to bfloat16 is off
    by no more than 2^-9 of it.  all_to_all rounds partial results; reduce_scatter rounds weighted
    rows and sums, too."""
    if "bfloat16" not in name:
        return 0.0
    return (3 if "reduce_scatter" in name else 1) ** 0.5 * 2**-9


def judge(case: Case, ranks: int, parts: list[Results], device: str = "cpu") -> list[str]:
    """Holds the ranks' results to fp64 on the stored bytes and to each other; lines of figures."""
    names, lines, joined = list(parts[0]), [], {}
    shape = ranks, case.interleave, device
    stored = [shards.shard(case.lengths, rank, *shape) for rank in range(ranks)]
    cache, table, lengths = shards.whole(case.lengths, stored, case.interleave)
    q = shards.plain_queries(case.tokens, case.heads).to(device)
    query, cu = snapmla.quantize_q(q[..., :512], q[..., 512:]), case.cu_seqlens_q
    rule = {} if cu is None else {"cu_seqlens_q": cu.to(device)}
    own = case.heads // ranks  # of many heads the first and last of each rank, to fp64
    ends = [h for r in range(ranks) for h in (r * own, (r + 1) * own - 1)]
    heads = ends if case.heads > 16 else None
    for name in names:
        out = torch.cat([part[name][0] for part in parts], -2).to(device)
        lse = torch.cat([part[name][1] for part in parts], -2).to(device)
        joined[name] = out, lse
        errors = selfcheck.decode_errors(
            out, lse, query, cache, table, lengths, SCALE, heads=heads, **rule
        )
        lines.append(f"{name}: {errors}")
        allowed = math.hypot(errors.allowed, transport_rounding(name))
        assert errors.error <= allowed, f"{lines[-1]}, with transport {allowed:.2e}"
        assert errors.lse_error <= errors.lse_allowed, lines[-1]
        empty = torch.isinf(lse)
        assert torch.isneginf(lse[empty]).all() and not out.mT.mT[empty.mT].any()
    for name in names:
        for other in names[: names.index(name)]:
            same = "bfloat16" not in name + other
            apart = metrics.relative_l2(joined[name][0], joined[other][0])
            finite = torch.isfinite(joined[other][1])
            lse_apart = (joined[name][1] - joined[other][1])[finite].abs().max()
            lines.append(f"{name} to {other}: relative L2 {apart:.1e}, LSE {lse_apart:.1e}")
            assert apart <= (1e-5 if same else 4e-3) and lse_apart <= 1e-5, lines[-1]
            if "replicated" in name and other.split()[:2] == name.split()[:2]:
                assert torch.equal(joined[name][0], joined[other][0]), lines[-1]
    return lines
