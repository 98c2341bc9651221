"""``sparse_prefill``: query tokens over rows of BF16; its references are
``snapmla.testing.prefill_job``'s."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dsl_kernels.formats.dims import KV_LORA_RANK, TOKEN_TILE
from dsl_kernels.spec import VariantSpec
from snapmla.testing.prefill_job import PrefillJob, queries
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import Call, Result, Sizes, Workload
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.samples import Random

TOPK = 2048  # of calls as large as in service


def small(spec: VariantSpec) -> Iterator[Call]:
    """Lists that end anywhere, two row blocks, sinks; logits that swing between tiles; a CTA with
    more work tiles than Q has stages, of a tile each, as else the ring of KV holds Q's loads back.
    """
    heads, lengths = spec.row_tile + 3, (130, 0)
    jobs = (
        PrefillJob.draw(spec, 2, heads, 200, 130, lengths=lengths, sink=True, style="swings"),
        PrefillJob.draw(spec, 5, 7, 90, 70, lengths=(70, 10, 64, 1, 50), spread=3.0, ctas=1),
    )
    for job in jobs:
        yield Call(job.arguments(), {}, job=job)


def judge(_spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """The errors that their jobs find."""
    found = [call.job.errors(call.job.found(call.arguments)) for call in calls]
    return Result(all(errors.right for errors in found), "; ".join(map(str, found)))


def recorded(case: Case, run: Runner) -> Recorded:
    """Lists of rows anywhere, one entry in eight of none; heads that fill a row block, and not."""
    spec, bits, device = case.spec, case.bits(), run.device
    heads = (spec.row_tile, 20 * spec.row_tile // 64, 2 * spec.row_tile)[case.index % 3]
    s_q, s_kv, topk = 4, 400, 150 + 3 * case.index
    q = exact.bell(bits, (s_q, heads, spec.d_qk), bits.below(3, (s_q, heads, 1)))
    kv = exact.bell(bits, (s_kv, 1, spec.d_qk), 0)
    indices = bits.below(s_kv, (s_q, 1, topk)).astype(np.int32)
    indices[bits.below(8, (s_q, 1, topk)) == 0] = (-1, 2**31 - 1, s_kv)[case.index % 3]
    lengths = bits.below(topk + 1, (s_q,)).astype(np.int32)
    out = run.full((s_q, heads, KV_LORA_RANK), 5.0, torch.bfloat16)
    most, lse, first = (run.full((s_q, heads), 5.0) for _ in range(3))
    query = queries(exact.as_tensor(q, torch.bfloat16, device), spec.query == "two")
    if spec.lists == "split":
        given = _pieces(run.full, (s_q, heads, topk), out, lse, 3)
        run.call(
            case.variant, **query,
            kv=exact.as_tensor(kv, torch.bfloat16, device), indices=run.there(indices),
            topk_length=run.there(lengths), attn_sink=run.full((heads,), 0.5),
            softmax_scale=exact.SOFTMAX_SCALE, **given,
        )  # fmt: skip
        return exact.results((q, kv, indices, lengths), out[None], lse[None])
    more = {"lse_indexer": first, "indexer_tiles": 1} if spec.figures == "indexer" else {}
    run.call(
        case.variant, **query,
        kv=exact.as_tensor(kv, torch.bfloat16, device), indices=run.there(indices),
        topk_length=run.there(lengths), attn_sink=run.full((heads,), 0.5), out=out, max_logits=most,
        lse=lse, softmax_scale=exact.SOFTMAX_SCALE, ctas=3, **more,
    )  # fmt: skip
    made = exact.results((q, kv, indices, lengths), out[None], lse[None])
    made.rows["max_logits"] = exact.bits_of(most).reshape(-1, 1)
    if more:
        made.rows["lse_indexer"] = exact.bits_of(first).reshape(-1, 1)
    return made


def _pieces(
    full: Callable[..., torch.Tensor], shape: tuple[int, int, int], out: torch.Tensor,
    lse: torch.Tensor, ctas: int, width: int = TOKEN_TILE,
) -> dict[str, Any]:  # fmt: skip
    """Arguments that split lists have alone: each query token is a sequence of one.

    Args:
        full: (shape, value) -> a float32 tensor where the call runs.
        shape: query tokens, heads, entries.
        out, lse: of query tokens and heads.
    """
    s_q, heads, topk = shape
    pieces = -(-topk // width)
    begins = torch.arange(s_q + 1, dtype=torch.int32, device=out.device) * pieces
    return {
        "split_begin": begins, "units": torch.zeros(0, 2, dtype=torch.int32, device=out.device),
        "out": out[:, None], "lse": lse[..., None],
        "o_accum": full((s_q * pieces, heads, KV_LORA_RANK), 5.0),
        "lse_accum": full((s_q * pieces, heads), 5.0), "lse_factor": math.log(2),
        "empty_lse": -math.inf, "width": width, "ctas": ctas,
    }  # fmt: skip


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """``batch`` times ``s_q`` query tokens over ``tokens`` rows, lists of 2048 at most."""
    source, d = Random(device, seed), spec.d_qk
    s_q, h, s_kv = sizes.batch * sizes.s_q, sizes.heads, sizes.tokens
    topk = min(TOPK, s_kv)
    blocks = -(-h // spec.row_tile)
    given = {
        **queries(source.normal(s_q, h, d), spec.query == "two"),
        "kv": source.normal(s_kv, 1, d),
        "indices": source.below(s_kv, s_q * topk).view(s_q, 1, topk).int(),
        "topk_length": source.i32([]), "attn_sink": source.full(0),
        "out": source.full(s_q, h, KV_LORA_RANK, dtype=torch.bfloat16),
        "max_logits": source.full(s_q, h), "lse": source.full(s_q, h),
        "softmax_scale": d**-0.5, "ctas": min(sizes.parts, s_q * blocks),
    }  # fmt: skip
    if spec.lists == "split":
        del given["max_logits"]
        most = max(min(sizes.parts // max(s_q * blocks, 1), -(-topk // TOKEN_TILE)), 1)
        width = -(-topk // (most * TOKEN_TILE)) * TOKEN_TILE
        ctas = min(sizes.parts, s_q * blocks * -(-topk // width))
        given |= _pieces(
            lambda shape, value: source.full(*shape), (s_q, h, topk), given["out"], given["lse"],
            ctas, width,
        )  # fmt: skip
    if spec.figures == "indexer":
        given |= {"lse_indexer": source.full(s_q, h), "indexer_tiles": -(-topk // TOKEN_TILE)}
    return given


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


WORKLOAD = Workload(small, judge, recorded, sized, public=public, moved=moved, tiles=tiles)
