"""The indexer's rows of the benchmark: index logits, top-k and both, beside DeepGEMM, vLLM,
FlashInfer and torch, those that are there.

``profiles.dsa_cost``, ``index_cost`` and ``dsa_step_cost`` make the calls; here they are held
against float64 or a stable sort and timed as all rows are.  Ours chooses its kernels by itself and
gives cache slots; peers give positions, but for FlashInfer.  DeepGEMM is looked for in the folder
``DEEP_GEMM``, vLLM's operators in the peers' folder.  Top-k reads the same scores in every call, as
they were just written in service; logits rotate over pages as decode rows do.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dsl_kernels.index_cache import INDEX_DIM, PAGE, SCALES_AT
from profiles import dsa_cost, index_cost
from profiles.check import Check
from profiles.dsa_step_cost import Step
from profiles.helper_rows import Helper
from profiles.shapes import IndexShape, Shape
from profiles.timing import TimingConfig, buffer_count
from snapmla.dsa import index_logits

Tensor = torch.Tensor
PROMPT = 16  # query tokens of a sequence from which DeepGEMM's kernel of prompts takes its place
# Of sum_h |w| relu(q k) scale, by which a score may differ from float64: a chain of 128 products
# on Hopper's FP8 tensor core, of normal random numbers.
GATE_SCORES = 3e-4


def pages_of(shapes: Sequence[Shape], config: TimingConfig) -> int:
    """Pages of the pool that these shapes need, 0 if none does."""
    scored = [s for s in shapes if isinstance(s, IndexShape) and s.op != "select_topk"]
    return max((_tables(s, config) * s.batch * -(-s.seqlen // PAGE) for s in scored), default=0)


@functools.lru_cache(maxsize=1)
def pool(pages: int, device: torch.device) -> Tensor:
    """Pages of random keys."""
    torch.manual_seed(0)
    return index_cost.pool_of(pages, device)


def _tables(shape: IndexShape, config: TimingConfig) -> int:
    """Block tables over which calls rotate."""
    return 1 if shape.s_q > PROMPT else buffer_count(shape.cache_bytes, config)


def build(
    shape: IndexShape, config: TimingConfig, device: torch.device, peers: Path | None, pages: int
) -> list[Helper]:
    """All contenders of a row, ours first.

    Args:
        peers: folder of the peers' libraries.
        pages: of the pool, as of ``pages_of`` all shapes of the run.
    """
    torch.manual_seed(shape.seqlen)
    cuda = device.type == "cuda"
    if shape.op == "select_topk":
        found = dsa_cost.Peers.of(peers) if cuda else dsa_cost.Peers()
        return _selecting(shape, device, found)
    ops = dsa_cost.vllm_ops(peers) if cuda and shape.op != "index_logits" else None
    gemm = index_cost.peer_of(os.environ.get("DEEP_GEMM", "")) if cuda else None
    made = _scoring if shape.op == "index_logits" else _stepping
    step = Step(
        pool(pages, device), shape.num_heads, shape.batch, shape.s_q, shape.seqlen, shape.k,
        _tables(shape, config),
    )  # fmt: skip
    return made(step, gemm, ops)


# ---------------------------------------------------------------------------- top-k


def _selecting(shape: IndexShape, device: torch.device, peers: dsa_cost.Peers) -> list[Helper]:
    name = "zeros" if shape.zeros else "normal"
    problem = dsa_cost.Problem.of(shape.batch, shape.seqlen, name, shape.k, device)
    found = []
    for who, call in dsa_cost.contenders(problem, peers).items():
        ours = {"slots": "snapmla", "positions": "snapmla:positions"}
        check = functools.partial(_sorted, problem, who, call)
        found.append(Helper(ours.get(who, who), [call], check, peer=who not in ours))
    return found


def _sorted(problem: dsa_cost.Problem, who: str, call: Callable[[], Tensor]) -> Check:
    try:
        dsa_cost.check(problem, who, call)
    except ValueError as error:
        return Check(False, 1.0, text=str(error))
    return Check(True, 0.0)


# ---------------------------------------------------------------------------- scores


def exact(step: Step, table: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """(scores, sum_h |w| relu scale), float64, of the tokens that a query token sees."""
    sequence, seen = row // step.s_q, int(step.seen.view(-1)[row])
    pages = step.pool[table[sequence, : -(-seen // PAGE)].long()]
    keys = pages[:, :SCALES_AT].contiguous().view(torch.float8_e4m3fn).view(-1, INDEX_DIM)[:seen]
    scales = pages[:, SCALES_AT:].contiguous().view(torch.float32).flatten()[:seen].double()
    terms = torch.relu(step.q[row].double() @ keys.double().T) * scales
    w = step.w[row].double()
    return w @ terms, w.abs() @ terms


def _rows(step: Step) -> tuple[int, int]:
    """Those that are checked."""
    return 0, len(step.q) - 1


def _scored(step: Step, call: Callable[[int], Tensor]) -> Check:
    """Two rows of the last table's call beside float64."""
    last = len(step.tables) - 1
    result, worst = call(last), 0.0
    for row in _rows(step):
        want, size = exact(step, step.tables[last], row)
        error = ((result[row, : len(want)].double() - want).abs() / size.clamp_min(1e-30)).max()
        worst = max(worst, float(error.nan_to_num(torch.inf)))
    text = "" if worst <= GATE_SCORES else f"error {worst:.1e} > {GATE_SCORES:.0e}"
    return Check(not text, worst, text=text)


def _scoring(step: Step, gemm: Any, ops: Any) -> list[Helper]:
    shaped = (len(step.lengths), step.s_q, step.heads)
    q, w = step.q.view(*shaped, INDEX_DIM), step.w.view(shaped)
    out = torch.empty(len(step.q), step.tokens, device=step.q.device)
    calls: dict[str, Callable[[int], Tensor]] = {
        "snapmla": lambda i: index_logits(q, w, step.pool, step.tables[i], step.lengths, out=out)
    }
    if gemm is not None and step.s_q <= PROMPT:
        calls["DeepGEMM"] = step.logits(gemm)
    elif gemm is not None and len(step.lengths) == 1:
        score, gather = index_cost.prompt_peer(
            step.pool, step.tables[0], step.q, step.w, step.tokens, gemm
        )
        calls["DeepGEMM"] = lambda _: score()
        calls["DeepGEMM and a gather by torch"] = lambda _: (gather(), score())[1]
    return [
        Helper(
            name, _each(call, step), functools.partial(_scored, step, call),
            peer=name != "snapmla",
        )
        for name, call in calls.items()
    ]  # fmt: skip


def _each(call: Callable[[int], Any], step: Step) -> list[Callable[[], Any]]:
    return [functools.partial(call, i) for i in range(len(step.tables))]


# ---------------------------------------------------------------------------- both


def _chosen(step: Step, call: Callable[[int], Tensor], slots: bool) -> Check:
    """The tokens of two rows: k of them or all, none twice, none whose score in float64 is below
    the k-th best by more than the tensor core's error; slots in ascending order of position."""
    last = len(step.tables) - 1
    table, result = step.tables[last], call(last)
    wrong, wanted = 0, 0
    for row in _rows(step):
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


def _stepping(step: Step, gemm: Any, ops: Any) -> list[Helper]:
    calls = {"snapmla": step.ours(True), "snapmla:positions": step.ours(False)}
    if gemm is not None and ops is not None and step.s_q <= PROMPT:
        calls |= step.theirs(gemm, ops)
    found = []
    for name, call in calls.items():
        check = functools.partial(_chosen, step, call, name == "snapmla")
        found.append(Helper(name, _each(call, step), check, peer=not name.startswith("snapmla")))
    return found
