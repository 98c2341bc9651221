"""The indexer's rows of the benchmark: index logits, top-k and both, beside DeepGEMM, vLLM,
FlashInfer and torch, those that are there.

``profiles.tables.dsa_cost`` and ``profiles.index_step`` make the calls; here they are held against
float64 or a stable sort and timed as all rows are.  Ours chooses its kernels by itself and
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

from dsl_kernels.index_cache import PAGE
from profiles import index_step
from profiles.check import Check
from profiles.helper_rows import Helper
from profiles.index_step import PROMPT, Step, chosen, scored
from profiles.peer_ops import vllm_ops
from profiles.shapes import IndexShape, Shape
from profiles.tables import dsa_cost
from profiles.timing import TimingConfig, buffer_count
from snapmla.dsa import index_logits

Tensor = torch.Tensor


def pages_of(shapes: Sequence[Shape], config: TimingConfig) -> int:
    """Pages of the pool that these shapes need, 0 if none does."""
    scored = [s for s in shapes if isinstance(s, IndexShape) and s.op != "select_topk"]
    return max((_tables(s, config) * s.batch * -(-s.seqlen // PAGE) for s in scored), default=0)


@functools.lru_cache(maxsize=1)
def pool(pages: int, device: torch.device) -> Tensor:
    """Pages of random keys."""
    torch.manual_seed(0)
    return index_step.pool_of(pages, device)


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
    ops = vllm_ops(peers) if cuda and shape.op != "index_logits" else None
    gemm = index_step.peer_of(os.environ.get("DEEP_GEMM", "")) if cuda else None
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


# ---------------------------------------------------------------------------- scores and both


def _scoring(step: Step, gemm: Any, ops: Any) -> list[Helper]:
    shaped = (len(step.lengths), step.s_q, step.heads)
    q, w = step.q.view(*shaped, -1), step.w.view(shaped)
    out = torch.empty(len(step.q), step.tokens, device=step.q.device)
    calls: dict[str, Callable[[int], Tensor]] = {
        "snapmla": lambda i: index_logits(q, w, step.pool, step.tables[i], step.lengths, out=out)
    }
    if gemm is not None and step.s_q <= PROMPT:
        calls["DeepGEMM"] = step.logits(gemm)
    elif gemm is not None and len(step.lengths) == 1:
        score, gather = index_step.prompt_peer(
            step.pool, step.tables[0], step.q, step.w, step.tokens, gemm
        )
        calls["DeepGEMM"] = lambda _: score()
        calls["DeepGEMM and a gather by torch"] = lambda _: (gather(), score())[1]
    return [
        Helper(
            name, step.each(call), functools.partial(scored, step, call),
            peer=name != "snapmla",
        )
        for name, call in calls.items()
    ]  # fmt: skip


def _stepping(step: Step, gemm: Any, ops: Any) -> list[Helper]:
    calls = {"snapmla": step.ours(True), "snapmla:positions": step.ours(False)}
    if gemm is not None and ops is not None and step.s_q <= PROMPT:
        calls |= step.theirs(gemm, ops)
    found = []
    for name, call in calls.items():
        check = functools.partial(chosen, step, call, name == "snapmla")
        found.append(Helper(name, step.each(call), check, peer=not name.startswith("snapmla")))
    return found
