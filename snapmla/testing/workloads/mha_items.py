"""``mha_items``: the list of work of dense prefill, longest row tiles first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from snapmla.testing.workloads.call import Call, Result, Sizes
from snapmla.testing.workloads.draw import Draw
from snapmla.testing.workloads.exact import Exact
from snapmla.testing.workloads.problem import Problem, workload

BINS = 1024  # of the kernel's counting sort: which orders longer lists less finely


def room_of(lq: Sequence[int], lk: Sequence[int]) -> SplitRoom:
    """Room for the lists of a call whose tensors hold no rows beyond its sequences."""
    return SplitRoom.of(sum(lq), len(lq), sum(lk))


@dataclass(frozen=True)
class Prompts(Problem):
    """Query tokens and keys of each sequence."""

    lq: Sequence[int]
    lk: Sequence[int]
    causal: bool = True


def arguments(spec: VariantSpec, problem: Prompts, draw: Draw) -> dict[str, Any]:
    """Arguments by name; the workspace full of -7."""
    lq, lk = problem.lq, problem.lk
    draw.identify_by(draw.i32(lq), draw.i32(lk))
    room, more = room_of(lq, lk), {}
    words = {"work": workspace_words(sum(lq), len(lq))}
    if spec.keys == "split":
        words["work"] = room.list_words
        more = {"most_splits": room.splits, "partial_rows": room.rows}
    if spec.lists == "backward":
        words["key_work"] = workspace_words(sum(lk), len(lk))
        more = {"max_seqlen_q": max(lq, default=0)}
    return {
        "cu_seqlens_q": draw.there(offsets(lq)), "cu_seqlens_k": draw.there(offsets(lk)),
        **draw.blank(**{name: (n,) for name, n in words.items()}), "causal": int(problem.causal),
        "max_seqlen_k": max(lk, default=0), **more,
    }  # fmt: skip


SMALL = (
    Prompts((300, 0, 5, 129, 128), (300, 7, 1000, 129, 0)),
    Prompts((300, 0, 5, 129, 128), (300, 7, 1000, 129, 0), False),
    Prompts((1,) * 70, range(0, 7000, 100)),
    Prompts((500, 900, 40), (300000, 900, 299000)),  # beyond BINS tiles: costs in twos and more
    Prompts((4000, 6000), (4000, 6000)),
    Prompts((), ()),
)
# Of split keys, beside those: 0 to 8 pieces of 1 to 5 row tiles, and just too few keys for two
SPLIT = (
    Prompts((128, 129, 512, 513, 0, 7), (1921, 4096, 8192, 60000, 9999, 1920)),
    Prompts((384, 1, 256, 300), (7041, 2**20, 4000, 90000), False),
    Prompts((1,) * 600, (2000, 30) * 300),  # more sequences than threads
)


def small(spec: VariantSpec) -> Iterator[Prompts]:
    """Lengths 0 on either side, many sequences, few, none; long keys."""
    for problem in (*SMALL, *(SPLIT if spec.keys == "split" else ())):
        yield replace(problem, note=str(problem.lq))


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
        work, problem = call.arguments["work"].tolist(), call.job
        lq, lk, causal = problem.lq, problem.lk, problem.causal
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


def recorded(draw: Exact) -> Iterator[Prompts]:
    """Random lengths."""
    for causal in (True, False):
        lq, lk = (draw.below(700, 9).tolist() for _ in range(2))
        yield Prompts(lq, [n * 30 for n in lk] if draw.case.spec.keys == "split" else lk, causal)


def _rows(spec: VariantSpec, given: Mapping[str, Any]) -> exact.Rows:
    """Headers, and the sorted tiles of the list, whose order among equals is open."""
    lq, lk = (given[name].diff().tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    work, causal, begin, width = given["work"].cpu(), bool(given["causal"]), HEADER, 2
    n = len(row_tiles(lq, lk, causal))
    if spec.keys == "split":
        n, width = len(lists_of(lq, lk, causal).entries), ENTRY_WORDS
        begin += ENTRY_WORDS * room_of(lq, lk).splits + len(lq)
    tiles = work[begin : begin + width * n].view(n, width)
    order = sorted(range(n), key=lambda i: tiles[i, :3].tolist())
    headers = [given[name][:HEADER] for name in ("work", "key_work") if name in given]
    return exact.hashes_of([[headers[0], tiles[order].flatten(), *headers[1:]]], "tables")


def sized(_spec: VariantSpec, sizes: Sizes) -> Prompts:
    """Prompts of ``sizes.s_q`` new tokens, ``sizes.tokens`` keys in all."""
    return Prompts([sizes.s_q] * sizes.batch, [sizes.tokens] * sizes.batch)


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads 16 bytes a sequence, writes 8 a row tile."""
    return 16.0 * sizes.batch + 8.0 * most_tiles(sizes.batch * sizes.s_q, sizes.batch)


def _results(spec: VariantSpec, _problem: Prompts) -> dict[str, str]:
    """Lists that a variant writes."""
    return {name: name for name in ("work", "key_work")[: 1 + (spec.lists == "backward")]}


WORKLOAD = workload(
    judge, None, arguments, small=small, recorded=recorded, sized=sized, results=_results,
    rows=_rows, moved=moved,
)  # fmt: skip
