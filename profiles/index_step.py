"""A step of the indexer, drawn at random: its calls, the peers', and what is right.

``profiles.tables.index_cost`` and ``dsa_step_cost`` time them.  Ours chooses its kernels by itself
and gives cache slots; peers give positions.  Scores are held against float64 on the same keys.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from dsl_kernels.formats.index_cache import INDEX_DIM, PAGE, PAGE_BYTES, SCALES_AT
from profiles.check import Check
from profiles.peer_ops import COOPERATIVE_ROWS, WORKSPACE
from profiles.timing import Call
from snapmla.dsa import index_topk, index_topk_workspace
from snapmla.runtime.launch import sm_count
from snapmla.testing.index_reference import E4M3, quantize_keys

Tensor = torch.Tensor
Timed = Callable[[int], Any]  # a call with its n-th block table
CALLS = 8  # block tables
PROMPT = 16  # query tokens of a sequence from which DeepGEMM's kernel of prompts takes its place
# Of sum_h |w| relu(q k) scale, by which a score may differ from float64: a chain of 128 products
# on Hopper's FP8 tensor core, of normal random numbers.
GATE_SCORES = 3e-4
AGREE = 2e-5  # of the largest score: both sum fp32 products of the same tensor core


def pool_of(pages: int, device: torch.device | str = "cuda") -> Tensor:
    """Pages of random keys."""
    pool = torch.empty(pages, PAGE_BYTES, dtype=torch.uint8, device=device)
    for begin in range(0, pages, 4096):
        some = pool[begin : begin + 4096]
        keys, scales = quantize_keys(
            torch.randn(len(some) * PAGE, INDEX_DIM, device=device), power_of_two=False
        )
        some[:, :SCALES_AT] = keys.view(torch.uint8).view(len(some), -1)
        some[:, SCALES_AT:] = scales.view(torch.uint8).view(len(some), -1)
    return pool


def tables(pool: Tensor, b: int, tokens: int, count: int = CALLS) -> list[Tensor]:
    """Block tables over different pages, as far as the pool goes."""
    width = -(-tokens // PAGE)
    found = []
    for i in range(count):
        start = (i * b * width) % max(1, len(pool) - b * width + 1)
        found.append((torch.randperm(b * width, device=pool.device) + start).int().view(b, width))
    return found


def queries(rows: int, heads: int, device: torch.device | str = "cuda") -> tuple[Tensor, Tensor]:
    """(rows, heads, 128) e4m3 and the heads' weights (rows, heads)."""
    q = torch.randn(rows, heads, INDEX_DIM, device=device).to(E4M3)
    return q, 0.1 * torch.randn(rows, heads, device=device)


class Step:
    """A step's tensors on the card; scores have ``columns``, as many as ``tokens`` if 0."""

    def __init__(
        self, pool: Tensor, heads: int, b: int, s_q: int, tokens: int, k: int = 2048,
        count: int = CALLS, columns: int = 0,
    ) -> None:  # fmt: skip
        self.pool, self.tokens, self.s_q, self.heads, self.k = pool, tokens, s_q, heads, k
        self.q, self.w = queries(b * s_q, heads, pool.device)
        self.columns, self.tables = columns or tokens, tables(pool, b, tokens, count)
        more = -(-self.columns // PAGE) - self.tables[0].shape[1]
        if more:
            self.tables = [torch.nn.functional.pad(table, (0, more)) for table in self.tables]
        self.lengths = torch.full((b,), tokens, dtype=torch.int32, device=pool.device)
        behind = torch.arange(1 - s_q, 1, device=pool.device, dtype=torch.int32)
        self.seen = (self.lengths[:, None] + behind).contiguous()

    def result(self) -> Tensor:
        size = (len(self.q), self.k)
        return torch.full(size, -1, dtype=torch.int32, device=self.q.device)

    def ours(self, slots: bool) -> Timed:
        """``index_topk`` with everything given."""
        b, out = len(self.lengths), self.result()
        counts = torch.empty(len(out), dtype=torch.int32, device=out.device)
        held = PAGE * self.tables[0].shape[1]  # columns of the scores
        size = index_topk_workspace(len(out), held)
        workspace = torch.empty(size, dtype=torch.uint8, device=out.device)
        rows = (b, self.s_q, self.heads)
        given = self.q.view(*rows, INDEX_DIM), self.w.view(rows), self.pool
        return lambda i: index_topk(
            *given, self.tables[i], self.lengths, self.k, slots=slots, out=out, counts=counts,
            workspace=workspace,
        )[0]  # fmt: skip

    def logits(self, peer: Any) -> Timed:
        """DeepGEMM's call."""
        each = self.s_q if self.s_q <= 2 else 1
        seen = self.seen.view(-1, each)
        wide = [t.repeat_interleave(self.s_q // each, 0).contiguous() for t in self.tables]
        planned = peer.get_paged_mqa_logits_metadata(seen, PAGE, sm_count(self.q.device))
        shaped = self.q.view(-1, each, self.heads, INDEX_DIM)
        cache = self.pool.view(-1, PAGE, 1, PAGE_BYTES // PAGE)
        newer = getattr(peer, "fp8_fp4_paged_mqa_logits", None)
        first = shaped if newer is None else (shaped, None)
        score = newer or peer.fp8_paged_mqa_logits
        return lambda i: score(
            first, cache, self.w, seen, wide[i], planned, self.columns, clean_logits=False
        )

    def theirs(self, peer: Any, ops: Any) -> dict[str, Timed]:
        """DeepGEMM's logits and vLLM's top-k, by the op of each."""
        logits, workspace = self.logits(peer), torch.zeros(WORKSPACE, dtype=torch.uint8).cuda()
        lengths = self.seen.view(-1, 1)
        names = ["persistent_topk"]
        if len(self.q) <= COOPERATIVE_ROWS and hasattr(ops, "cooperative_topk"):
            names.append("cooperative_topk")

        def call_of(name: str) -> Timed:
            out, op = self.result(), getattr(ops, name)

            def call(i: int) -> Tensor:
                op(logits(i), lengths, out, workspace, self.k, self.columns)
                return out

            return call

        return {f"DeepGEMM + {name}": call_of(name) for name in names}

    def converted(self) -> Timed:
        """Positions to slots, by torch."""
        at = self.result().random_(0, self.tokens).long()
        rows = [t.repeat_interleave(self.s_q, 0) for t in self.tables]
        return lambda i: rows[i].gather(1, at // PAGE) * PAGE + at % PAGE

    def each(self, call: Timed) -> list[Call]:
        """A call for each block table."""
        return [functools.partial(call, i) for i in range(len(self.tables))]


def prompt_peer(
    pool: Tensor, table: Tensor, q: Tensor, w: Tensor, tokens: int,
    peer: Any,
) -> tuple[Callable[[], Tensor], Callable[[], Any]]:  # fmt: skip
    """DeepGEMM's call for the last query tokens of one sequence, and the copy of its keys that the
    call needs."""
    pages, n = table[0].long(), len(q)

    def gathered() -> tuple[Tensor, Tensor]:
        own = pool[pages]
        keys = own[:, :SCALES_AT].contiguous().view(E4M3).view(-1, INDEX_DIM)
        return keys, own[:, SCALES_AT:].contiguous().view(torch.float32).view(-1)

    begin = torch.zeros(n, dtype=torch.int32, device="cuda")
    end = torch.arange(tokens - n + 1, tokens + 1, dtype=torch.int32, device="cuda")
    score = getattr(peer, "fp8_fp4_mqa_logits", None)
    first = (q, None) if score is not None else q
    score = score or peer.fp8_mqa_logits
    keys = gathered()
    return lambda: score(first, keys, w, begin, end, clean_logits=False), gathered


def peer_of(folder: str) -> Any:
    """DeepGEMM, None where it cannot be imported."""
    if folder:
        sys.path.insert(0, folder)
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


# ---------------------------------------------------------------------------- what is right


def exact(step: Step, table: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """(scores, sum_h |w| relu scale), float64, of the tokens that a query token sees."""
    sequence, seen = row // step.s_q, int(step.seen.view(-1)[row])
    pages = step.pool[table[sequence, : -(-seen // PAGE)].long()]
    keys = pages[:, :SCALES_AT].contiguous().view(torch.float8_e4m3fn).view(-1, INDEX_DIM)[:seen]
    scales = pages[:, SCALES_AT:].contiguous().view(torch.float32).flatten()[:seen].double()
    terms = torch.relu(step.q[row].double() @ keys.double().T) * scales
    w = step.w[row].double()
    return w @ terms, w.abs() @ terms


def rows_of(step: Step) -> list[int]:
    """Rows that are held against float64: four, from the first to the last."""
    last = len(step.q) - 1
    return sorted({last * i // 3 for i in range(4)})


def agree(step: Step, scores: Tensor, others: Tensor, gate: float) -> None:
    """Holds scores against another contender's, in the columns that all rows see.

    Args:
        scores, others: of the same rows.
        gate: of the largest score.

    Raises:
        ValueError: they differ by more.
    """
    columns = step.tokens - step.s_q + 1
    mine, theirs = scores[:, :columns], others[:, :columns]
    error = float((mine - theirs).abs().max() / theirs.abs().max())
    if not error <= gate:  # nor NaN
        raise ValueError(f"scores are {error:.1e} off the first contender's")


def scored(step: Step, call: Callable[[int], Tensor]) -> Check:
    """Rows of the last table's call beside float64."""
    last = len(step.tables) - 1
    result, worst = call(last), 0.0
    for row in rows_of(step):
        want, size = exact(step, step.tables[last], row)
        error = ((result[row, : len(want)].double() - want).abs() / size.clamp_min(1e-30)).max()
        worst = max(worst, float(error.nan_to_num(torch.inf)))
    text = "" if worst <= GATE_SCORES else f"error {worst:.1e} > {GATE_SCORES:.0e}"
    return Check(not text, worst, text=text)


def chosen(step: Step, call: Callable[[int], Tensor], slots: bool) -> Check:
    """The tokens of some rows: k of them or all, none twice, none whose score in float64 is below
    the k-th best by more than the tensor core's error; slots in ascending order of position."""
    last = len(step.tables) - 1
    table, result = step.tables[last], call(last)
    wrong, wanted = 0, 0
    for row in rows_of(step):
        scores, size = exact(step, table, row)
        k = min(step.k, len(scores))
        mine = result[row].long()
        mine = mine[mine >= 0]
        if slots:
            mine = _positions(table[row // step.s_q], mine, len(scores))
        kth = scores.topk(k)
        least = kth.values[-1] - 2 * GATE_SCORES * size.max()
        good = (mine >= 0) & (mine < len(scores))
        good &= scores[mine.clamp(0, len(scores) - 1)] >= least
        ordered = not slots or bool((mine.diff() > 0).all())
        right = int(good.sum()) if ordered and len(mine.unique()) == len(mine) == k else 0
        wrong, wanted = wrong + k - right, wanted + k
    text = f"{wrong} of {wanted} tokens are not among the best" if wrong else ""
    return Check(not wrong, wrong / wanted, text=text)


def _positions(table: Tensor, slots: Tensor, seen: int) -> Tensor:
    """Positions of slots in a sequence, -1 where it has no such page."""
    pages = table[: -(-seen // PAGE)].long()
    order = pages.argsort()
    at = torch.searchsorted(pages[order], slots // PAGE).clamp(max=len(pages) - 1)
    index = order[at]
    return torch.where(pages[index] == slots // PAGE, index * PAGE + slots % PAGE, -1)
