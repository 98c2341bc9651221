"""``sparse_prefill``: query tokens over rows of BF16; its references are
``snapmla.testing.prefill_job``'s."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsl_kernels.formats.dims import KV_LORA_RANK, TOKEN_TILE
from dsl_kernels.spec import VariantSpec
from snapmla.testing.prefill_job import PrefillJob
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import Call, Result, Sizes
from snapmla.testing.workloads.draw import Draw
from snapmla.testing.workloads.exact import Exact
from snapmla.testing.workloads.problem import Made, Problem, unnamed, workload
from snapmla.testing.workloads.samples import Random

TOPK = 2048  # of calls as large as in service


@dataclass(frozen=True)
class Lists(Problem):
    """Query tokens and their lists of rows; ``job``: (spec, draw) -> their numbers."""

    job: Callable[[VariantSpec, Any], PrefillJob]


def arguments(spec: VariantSpec, problem: Lists, draw: Draw) -> Made:
    """Arguments by name, as the job lays them out."""
    job = problem.job(spec, draw)
    return Made(job.arguments(), job)


def small(spec: VariantSpec) -> Iterator[Lists]:
    """Lists that end anywhere, two row blocks, sinks; logits that swing between tiles; a CTA with
    more work tiles than Q has stages, of a tile each, as else the ring of KV holds Q's loads back.
    """
    some = {"lengths": (130, 0), "sink": True, "style": "swings"}
    few = {"lengths": (70, 10, 64, 1, 50), "spread": 3.0, "ctas": 1}
    for extents, how in (((2, spec.row_tile + 3, 200, 130), some), ((5, 7, 90, 70), few)):
        yield Lists(lambda spec, _, n=extents, how=how: PrefillJob.draw(spec, *n, **how))


def judge(_spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """The errors that their jobs find."""
    found = [call.job.errors(call.job.found(call.arguments)) for call in calls]
    return Result(all(errors.right for errors in found), "; ".join(map(str, found)))


def recorded(draw: Exact) -> Iterator[Lists]:
    """Lists of rows anywhere, one entry in eight of none; heads that fill a row block, and not."""
    yield Lists(_any)


def _any(spec: VariantSpec, draw: Exact) -> PrefillJob:
    """Numbers of a recorded case."""
    bits, third = draw.bits(), draw.case.index % 3
    heads = (spec.row_tile, 20 * spec.row_tile // 64, 2 * spec.row_tile)[third]
    s_q, s_kv, topk = 4, 400, 150 + 3 * draw.case.index
    q = exact.bell(bits, (s_q, heads, spec.d_qk), bits.below(3, (s_q, heads, 1)))
    kv = exact.bell(bits, (s_kv, 1, spec.d_qk), 0)
    indices = bits.below(s_kv, (s_q, 1, topk)).astype(np.int32)
    indices[bits.below(8, (s_q, 1, topk)) == 0] = (-1, 2**31 - 1, s_kv)[third]
    given = [
        torch.from_numpy(x) for x in (q, kv, indices, bits.below(topk + 1, (s_q,)).astype(np.int32))
    ]
    draw.identify_by(*given)
    rows = [draw.there(x, torch.bfloat16) for x in given[:2]]
    return _job(
        spec,
        *rows,
        *map(draw.there, given[2:]),
        draw.full(heads, value=0.5),
        exact.SOFTMAX_SCALE,
        3,
    )


def _job(
    spec: VariantSpec, q: Tensor, kv: Tensor, indices: Tensor, lengths: Tensor | None,
    sink: Tensor | None, scale: float, ctas: int, width: int = TOKEN_TILE, first: int = TOKEN_TILE,
) -> PrefillJob:  # fmt: skip
    """A job; ``width`` and ``first``: where the variant splits lists, or has the indexer's LSE."""
    return PrefillJob(
        q, kv, indices, lengths, sink, scale, ctas, spec.row_tile,
        first if spec.figures == "indexer" else None, width if spec.lists == "split" else None,
        spec.query == "two", -math.inf,
    )  # fmt: skip


def _rows(_spec: VariantSpec, given: Mapping[str, Any]) -> exact.Rows:
    """Rows of 512 and a row's figures."""
    figures = {
        name: exact.bits_of(given[name]).reshape(-1, 1)
        for name in ("max_logits", "lse_indexer") if name in given
    }  # fmt: skip
    return {**exact.rows_of(given["out"], given["lse"]), **figures}


def sized(_spec: VariantSpec, sizes: Sizes) -> Lists:
    """``batch`` times ``s_q`` query tokens over ``tokens`` rows, lists of 2048 at most."""

    def job(spec: VariantSpec, draw: Random) -> PrefillJob:
        d, s_q, h, s_kv = spec.d_qk, sizes.batch * sizes.s_q, sizes.heads, sizes.tokens
        topk = min(TOPK, s_kv)
        most, tiles = sizes.parts // max(s_q * -(-h // spec.row_tile), 1), -(-topk // TOKEN_TILE)
        width = -(-topk // (max(min(most, tiles), 1) * TOKEN_TILE)) * TOKEN_TILE
        q, kv = draw.normal(s_q, h, d), draw.normal(s_kv, 1, d)
        indices = draw.below(s_kv, s_q * topk).view(s_q, 1, topk).int()
        first = tiles * TOKEN_TILE
        return _job(spec, q, kv, indices, None, None, d**-0.5, sizes.parts, width, first)

    return Lists(job)


def public(_spec: VariantSpec, given: Mapping[str, Any]) -> Callable[[], Any]:
    """``snapmla.sparse_prefill``; where lists are split ``snapmla.decode`` with ``indices``."""
    if "width" in given or "q_rope" in given:
        return _public_decode(given)
    from snapmla.sparse.prefill import sparse_prefill

    tensors = given["q"], given["kv"], given["indices"], given["softmax_scale"]
    results = {name: given[name] for name in ("out", "max_logits", "lse")}
    if "lse_indexer" in given:
        results["lse_indexer"] = given["lse_indexer"]
        results["indexer_topk"] = given["indexer_tiles"] * TOKEN_TILE
    return lambda: sparse_prefill(*tensors, **results)


def _public_decode(given: Mapping[str, Any]) -> Callable[[], Any]:
    """A sequence for each query token, pages of one row."""
    import snapmla

    q, indices = given["q"][:, None], given["indices"]
    query = (q, given["q_rope"][:, None]) if "q_rope" in given else q
    s_q, _, heads, _ = q.shape
    cache = snapmla.PagedKVCache.from_tensors(given["kv"][:, None])
    plan = snapmla.plan_sparse_decode(
        heads, 1, topk=indices.shape[-1], batch=s_q, device=q.device, cache_dtype="bf16",
        fixed_split_tokens=given.get("width"),
    )  # fmt: skip
    split = "width" in given  # else results are those of prompts
    results = {name: given[name] for name in ("out", "lse") if split}
    return lambda: snapmla.decode(
        query, cache, indices=indices, softmax_scale=given["softmax_scale"], plan=plan, **results
    )  # fmt: skip


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Bytes that a launch cannot avoid: q, each list's rows once, the results; partial rows, which
    stay in L2, are none of them."""
    s_q, topk = sizes.batch * sizes.s_q, min(TOPK, sizes.tokens)
    rows = min(sizes.tokens, s_q * topk) * spec.d_qk * 2.0 + s_q * topk * 4.0
    return rows + s_q * sizes.heads * (2.0 * (spec.d_qk + KV_LORA_RANK) + 8.0)


def tiles(_spec: VariantSpec, call: Call) -> int:
    """Tiles of lists in which an entry that counts names a row."""
    return int(call.job.tiles)


WORKLOAD = workload(
    judge, None, arguments, small=small, recorded=recorded, sized=sized, results=unnamed,
    rows=_rows, public=public, moved=moved, tiles=tiles,
)  # fmt: skip
