"""``mha_items``: the list of work of dense prefill, longest row tiles first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dsl_kernels.formats.mha_list import (
    ENTRY_WORDS,
    HEADER,
    LIST,
    ROWS,
    SPLITS,
    TILES,
    SplitRoom,
    most_tiles,
    workspace_words,
)
from dsl_kernels.spec import VariantSpec
from snapmla.testing.mha_job import key_tiles, offsets, row_tiles
from snapmla.testing.mha_split_job import entry_tiles, lists_of
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import Call, Result, Sizes, Workload
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.samples import Random

BINS = 1024  # of the kernel's counting sort: which orders longer lists less finely


def _given(lq: Sequence[int], lk: Sequence[int], causal: bool, spec: VariantSpec) -> dict[str, Any]:
    """Arguments; the workspace full of -7."""
    words, room = workspace_words(sum(lq), len(lq)), room_of(lq, lk)
    more: dict[str, Any] = {}
    if spec.keys == "split":
        words, more = room.list_words, {"most_splits": room.splits, "partial_rows": room.rows}
    if spec.lists == "backward":
        more = {"max_seqlen_q": max(lq, default=0)}
        size = (workspace_words(sum(lk), len(lk)),)
        more["key_work"] = torch.full(size, -7, dtype=torch.int32)
    return {
        "cu_seqlens_q": offsets(lq), "cu_seqlens_k": offsets(lk),
        "work": torch.full((words,), -7, dtype=torch.int32), "causal": int(causal),
        "max_seqlen_k": max(lk, default=0), **more,
    }  # fmt: skip


def room_of(lq: Sequence[int], lk: Sequence[int]) -> SplitRoom:
    """Room for the lists of a call whose tensors hold no rows beyond its sequences."""
    return SplitRoom.of(sum(lq), len(lq), sum(lk))


SMALL = (
    ((300, 0, 5, 129, 128), (300, 7, 1000, 129, 0), True),
    ((300, 0, 5, 129, 128), (300, 7, 1000, 129, 0), False),
    ((1,) * 70, tuple(range(0, 7000, 100)), True),
    ((500, 900, 40), (300000, 900, 299000), True),  # beyond BINS tiles: costs in twos and more
    ((4000, 6000), (4000, 6000), True),
    ((), (), True),
)
# Of split keys, beside those: 0 to 8 pieces of 1 to 5 row tiles, and just too few keys for two
SPLIT = (
    ((128, 129, 512, 513, 0, 7), (1921, 4096, 8192, 60000, 9999, 1920), True),
    ((384, 1, 256, 300), (7041, 2**20, 4000, 90000), False),
    ((1,) * 600, (2000, 30) * 300, True),  # more sequences than threads
)


def small(spec: VariantSpec) -> Iterator[Call]:
    """Lengths 0 on either side, many sequences, few, none; long keys."""
    for lq, lk, causal in (*SMALL, *(SPLIT if spec.keys == "split" else ())):
        given = _given(lq, lk, causal, spec)
        results = {str(name): str(name) for name in ("work", "key_work") if name in given}
        yield Call(given, results, job=(lq, lk, causal), note=str(lq))


def wrong(
    work: Sequence[int], lq: Sequence[int], lk: Sequence[int], causal: bool, max_seqlen_k: int = 0
) -> str:
    """A sentence that says what is wrong with a work list; empty if nothing is.

    A sequence's row tiles must be adjacent, the last one first.  Sequences must descend by the key
    tiles that their last row tile sees, as the kernel's bins count them.

    Args:
        work: words of the workspace.
        max_seqlen_k: as given to the kernel; 0: the longest.
    """
    want = row_tiles(lq, lk, causal)
    if list(work[:HEADER]) != [0, len(want), 0, 0] or TILES != 1:
        return f"header {list(work[:HEADER])}, expected {len(want)} row tiles"
    words = work[HEADER : HEADER + 2 * len(want)]
    tiles = list(zip(words[::2], words[1::2]))
    if sorted(tiles) != sorted(want):
        return "not every row tile once"
    order = list(dict.fromkeys(i for i, _ in tiles))
    if tiles != [(i, m) for i in order for m in reversed(range(-(-lq[i] // ROWS)))]:
        return "a sequence's row tiles are not side by side from the last on"
    longest, shift = -(-(max_seqlen_k or max(lk, default=0)) // 128), 0
    while longest >> shift >= BINS:
        shift += 1
    last = [key_tiles(lq[i], lk[i], -(-lq[i] // ROWS) - 1, causal) >> shift for i in order]
    costs = [min(cost, BINS - 1) for cost in last]
    return "" if costs == sorted(costs, reverse=True) else "a longer sequence behind a shorter one"


def wrong_split(
    work: Sequence[int], lq: Sequence[int], lk: Sequence[int], causal: bool, room: SplitRoom
) -> str:
    """``wrong`` of a list that may have pieces; words behind it must be -7."""
    lists, bases = lists_of(lq, lk, causal), HEADER + ENTRY_WORDS * room.splits
    begin = bases + len(lq)
    header = [0, len(lists.entries), len(lists.splits), begin]
    if [work[0], work[TILES], work[SPLITS], work[LIST]] != header:
        return f"header {list(work[:HEADER])}, expected {header}"
    rows = [tuple(work[at : at + ENTRY_WORDS]) for at in range(HEADER, bases, ENTRY_WORDS)]
    idle = [(-7,) * ENTRY_WORDS] * (room.splits - len(lists.splits))
    if rows != [*lists.splits, *idle]:
        return "other split row tiles"
    if list(work[bases:begin]) != lists.bases:
        return f"first partial rows {list(work[bases:begin])}, expected {lists.bases}"
    end = begin + ENTRY_WORDS * len(lists.entries)
    entries = [tuple(work[at : at + ENTRY_WORDS]) for at in range(begin, end, ENTRY_WORDS)]
    if sorted(entries) != sorted(lists.entries):
        return "not every piece of a row tile once"
    longest, shift = -(-max(lk, default=0) // 128), 0
    while longest >> shift >= BINS:
        shift += 1
    costs = [min(entry_tiles(lq, lk, e, causal) >> shift, BINS - 1) for e in entries]  # type: ignore[arg-type]
    if costs != sorted(costs, reverse=True):
        return "a longer entry behind a shorter one"
    return "words behind the list were written" if set(work[end:]) - {-7} else ""


def judge(spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """Every row tile (every piece) once, in order."""
    bad = []
    for call in calls:
        work, (lq, lk, causal) = call.arguments["work"].tolist(), call.job
        if spec.keys == "split":
            reason = wrong_split(work, lq, lk, causal, room_of(lq, lk))
            bad += [f"{call.note}: {reason}"] if reason else []
            continue
        lists = [(work, lq, lk, causal)]
        if spec.lists == "backward":  # of tiles of keys: rows and keys change places
            lists.append((call.arguments["key_work"].tolist(), lk, lq, False))
        for words, *given in lists:
            reason = wrong(words, *given)
            behind = words[HEADER + 2 * len(row_tiles(*given)) :]
            if not reason and any(x != -7 for x in behind):
                reason = "words behind the list were written"
            if reason:
                bad.append(f"{call.note}: {reason}")
    return Result(not bad, "; ".join(bad) or "every row tile once, the longest sequence's first")


def recorded(case: Case, run: Runner) -> Recorded:
    """Random lengths; of the list, whose order among equals is open, the sorted tiles."""
    bits, found, seen = case.bits(), [], []
    for causal in (True, False):
        lq, lk = (bits.below(700, (9,)).tolist() for _ in range(2))
        split = case.spec.keys == "split"
        if split:
            lk = [n * 30 for n in lk]
        given = _given(lq, lk, causal, case.spec)
        given = {n: x.to(run.device) if isinstance(x, torch.Tensor) else x
                 for n, x in given.items()}  # fmt: skip
        run.call(case.variant, **given)
        work, n, width, begin = given["work"], len(row_tiles(lq, lk, causal)), 2, HEADER
        if split:
            n, width = len(lists_of(lq, lk, causal).entries), ENTRY_WORDS
            begin = HEADER + ENTRY_WORDS * room_of(lq, lk).splits + len(lq)
        tiles = work[begin : begin + width * n].view(n, width).cpu().long()
        order = (tiles[:, 0] * 4096 + tiles[:, 1]).argsort()
        if split:
            order = (tiles[:, 0] * 2**20 + tiles[:, 1] * 16 + tiles[:, 2]).argsort()
        seen += [np.array(lq, np.int32), np.array(lk, np.int32)]
        found.append([work[:HEADER], tiles[order].int().flatten().to(run.device)])
        if case.spec.lists == "backward":
            of_keys = given["key_work"]
            found[-1].append(of_keys[:HEADER])
    return exact.of_problems(seen, found, "tables")


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """Prompts of ``sizes.s_q`` new tokens, ``sizes.tokens`` keys in all."""
    source = Random(device, seed)
    lq, lk = [sizes.s_q] * sizes.batch, [sizes.tokens] * sizes.batch
    given = _given(lq, lk, True, spec)
    words = len(given["work"])
    return {
        **{n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in given.items()},
        "work": source.full(words, dtype=torch.int32),
    }


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads 16 bytes a sequence, writes 8 a row tile."""
    return 16.0 * sizes.batch + 8.0 * most_tiles(sizes.batch * sizes.s_q, sizes.batch)


WORKLOAD = Workload(small, judge, recorded, sized, moved=moved)
