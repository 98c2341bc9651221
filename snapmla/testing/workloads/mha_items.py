"""``mha_items``: the list of work of dense prefill, longest row tiles first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dsl_kernels.mha_list import HEADER, TILES, most_tiles, workspace_words
from dsl_kernels.spec import VariantSpec
from snapmla.testing.mha_job import key_tiles, offsets, row_tiles
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import Call, Result, Sizes, Workload
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.samples import Source

BINS = 1024  # of the kernel's counting sort: which orders longer lists less finely


def _given(lq: Sequence[int], lk: Sequence[int], causal: bool) -> dict[str, Any]:
    """Arguments; the workspace full of -7."""
    words = workspace_words(sum(lq), len(lq))
    return {
        "cu_seqlens_q": offsets(lq), "cu_seqlens_k": offsets(lk),
        "work": torch.full((words,), -7, dtype=torch.int32), "causal": int(causal),
        "max_seqlen_k": max(lk, default=0),
    }  # fmt: skip


SMALL = (
    ((300, 0, 5, 129, 128), (300, 7, 1000, 129, 0), True),
    ((300, 0, 5, 129, 128), (300, 7, 1000, 129, 0), False),
    ((1,) * 70, tuple(range(0, 7000, 100)), True),
    ((500, 900, 40), (300000, 900, 299000), True),  # beyond BINS tiles: costs in twos and more
    ((4000, 6000), (4000, 6000), True),
    ((), (), True),
)


def small(spec: VariantSpec) -> Iterator[Call]:
    """Lengths 0 on either side, many sequences, few, none; long keys."""
    for lq, lk, causal in SMALL:
        yield Call(_given(lq, lk, causal), {"work": "work"}, job=(lq, lk, causal), note=str(lq))


def wrong(
    work: Sequence[int], lq: Sequence[int], lk: Sequence[int], causal: bool, max_seqlen_k: int = 0
) -> str:
    """What is wrong with a list, empty if nothing is.

    Args:
        work: words of the workspace.
        max_seqlen_k: as the kernel was told; 0: the longest.
    """
    want = row_tiles(lq, lk, causal)
    if list(work[:HEADER]) != [0, len(want), 0, 0] or TILES != 1:
        return f"header {list(work[:HEADER])}, expected {len(want)} row tiles"
    words = work[HEADER : HEADER + 2 * len(want)]
    tiles = list(zip(words[::2], words[1::2]))
    if sorted(tiles) != sorted(want):
        return "not every row tile once"
    longest, shift = -(-(max_seqlen_k or max(lk, default=0)) // 128), 0
    while longest >> shift >= BINS:
        shift += 1
    costs = [min(key_tiles(lq[i], lk[i], m, causal) >> shift, BINS - 1) for i, m in tiles]
    return "" if costs == sorted(costs, reverse=True) else "a longer row tile behind a shorter one"


def judge(_spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """Every row tile once, longest first."""
    bad = []
    for call in calls:
        work, (lq, lk, causal) = call.arguments["work"].tolist(), call.job
        reason = wrong(work, lq, lk, causal)
        if not reason and any(x != -7 for x in work[HEADER + 2 * len(row_tiles(lq, lk, causal)) :]):
            reason = "words behind the list were written"
        if reason:
            bad.append(f"{call.note}: {reason}")
    return Result(not bad, "; ".join(bad) or "every row tile once, longest first")


def recorded(case: Case, run: Runner) -> Recorded:
    """Random lengths; of the list, whose order among equals is open, the sorted tiles."""
    bits, found, seen = case.bits(), [], []
    for causal in (True, False):
        lq, lk = (bits.below(700, (9,)).tolist() for _ in range(2))
        given = _given(lq, lk, causal)
        given = {n: x.to(run.device) if isinstance(x, torch.Tensor) else x
                 for n, x in given.items()}  # fmt: skip
        run.call(case.variant, **given)
        work, n = given["work"], len(row_tiles(lq, lk, causal))
        tiles = work[HEADER : HEADER + 2 * n].view(n, 2).cpu().long()
        order = (tiles[:, 0] * 4096 + tiles[:, 1]).argsort()
        seen += [np.array(lq, np.int32), np.array(lk, np.int32)]
        found.append([work[:HEADER], tiles[order].int().flatten().to(run.device)])
    return exact.of_problems(seen, found, "tables")


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Prompts of ``sizes.s_q`` new tokens, ``sizes.tokens`` keys in all."""
    source = Source(device, seed)
    lq, lk = [sizes.s_q] * sizes.batch, [sizes.tokens] * sizes.batch
    given = _given(lq, lk, True)
    words = len(given["work"])
    return {
        **{n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in given.items()},
        "work": source.full(words, dtype=torch.int32),
    }


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads 16 bytes a sequence, writes 8 a row tile."""
    return 16.0 * sizes.batch + 8.0 * most_tiles(sizes.batch * sizes.s_q, sizes.batch)


WORKLOAD = Workload(small, judge, recorded, sized, moved=moved)
