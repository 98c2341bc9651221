"""Dense prefill split over keys at the level of the ABI: lists with pieces, partial rows, merging.

Beside ``mha_job``, whose reference and gates hold for what was split as for what was not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsl_kernels.formats.mha_list import (
    ENTRY_WORDS,
    HEADER,
    KEYS,
    LIST,
    ROWS,
    SPLITS,
    TILES,
    SplitRoom,
    most_tiles,
    piece_keys,
    pieces_of,
)
from snapmla.testing.mha_job import MhaErrors, MhaJob, key_tiles
from snapmla.testing.reference import merge_states_reference

Entry = tuple[int, int, int, int]


class Lists(NamedTuple):
    """Lists that ``mha_items`` writes if it may split keys.

    Attributes:
        entries: (sequence, row tile, piece, first partial row or -1), most key tiles first.
        splits: (sequence, row tile, pieces, first partial row).
        bases: first partial row of each sequence, -1 if it is not split.
    """

    entries: list[Entry]
    splits: list[Entry]
    bases: list[int]


def entry_tiles(lq: Sequence[int], lk: Sequence[int], entry: Entry, causal: bool) -> int:
    """Tiles of keys that some row of an entry sees."""
    i, m, piece, base = entry
    seen = key_tiles(lq[i], lk[i], m, causal)
    if base < 0:
        return seen
    first, end = piece_keys(lk[i], pieces_of(lq[i], lk[i]), piece)
    return max(min(seen, -(-end // KEYS)) - first // KEYS, 0)


def lists_of(lq: Sequence[int], lk: Sequence[int], causal: bool) -> Lists:
    """The lists of a call, by the rule of ``mha_list``."""
    entries: list[Entry] = []
    splits: list[Entry] = []
    bases, rows = [], 0
    for i, (s_q, s_k) in enumerate(zip(lq, lk)):
        pieces = pieces_of(s_q, s_k) if s_q else 1
        base = rows if pieces > 1 else -1
        tiles = range(-(-s_q // ROWS))
        entries += [(i, m, piece, base) for m in tiles for piece in range(pieces)]
        if pieces > 1:
            splits += [(i, m, pieces, base) for m in tiles]
            rows += s_q * pieces
        bases.append(base)
    entries.sort(key=lambda entry: -entry_tiles(lq, lk, entry, causal))
    return Lists(entries, splits, bases)


def split_work(
    lq: Sequence[int], lk: Sequence[int], causal: bool, room: SplitRoom, fill: int = -1
) -> Tensor:
    """The lists' words as ``mha_items`` leaves them; ``fill`` where it writes nothing."""
    lists = lists_of(lq, lk, causal)
    work = torch.full((room.list_words,), fill, dtype=torch.int32)
    bases = HEADER + ENTRY_WORDS * room.splits
    begin = bases + len(lq)
    work[:HEADER] = 0
    work[TILES], work[SPLITS], work[LIST] = len(lists.entries), len(lists.splits), begin
    for at, rows in ((HEADER, lists.splits), (begin, lists.entries)):
        if rows:
            work[at : at + ENTRY_WORDS * len(rows)] = torch.tensor(rows).int().flatten()
    work[bases:begin] = torch.tensor(lists.bases, dtype=torch.int32)
    return work


def merged(
    lq: Sequence[int], lk: Sequence[int], out: Tensor, lse: Tensor, partial: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """out and lse with the rows that partial ones (rows, h, d_v), (rows, h) make, in fp64."""
    out, lse = out.double().clone(), lse.double().clone()
    q0 = 0
    for i, base in enumerate(lists_of(lq, lk, True).bases):
        if base >= 0:
            pieces = pieces_of(lq[i], lk[i])
            rows = [x[base : base + lq[i] * pieces] for x in partial]
            values, logs = (x.unflatten(0, (pieces, lq[i])) for x in rows)
            made, made_lse = merge_states_reference(values, logs.mT)
            out[q0 : q0 + lq[i]], lse[:, q0 : q0 + lq[i]] = made, made_lse
        q0 += lq[i]
    return out, lse


class SplitJob(MhaJob):
    """A call of ``mha_fwd`` of split keys; ``mha_merge``'s part is done here."""

    @property
    def room(self) -> SplitRoom:
        """Room for the lists and partial rows, of the keys' extent as a host knows it."""
        return SplitRoom.of(len(self.q), len(self.lq), len(self.v))

    def arguments(self) -> dict[str, Any]:
        """Arguments as of what is not split, and partial rows full of NaN."""
        given, room, heads = super().arguments(), self.room, self.q.shape[1]
        shape, device = (room.rows, heads, self.v.shape[-1] + 1), self.q.device
        partial = torch.full(shape, math.nan, device=device)
        most = max(1, (most_tiles(len(self.q), len(self.lq)) + 2 * room.splits) * heads)
        own = {
            "work": split_work(self.lq, self.lk, self.causal, room).to(device),
            "partial_out": partial[..., :-1].contiguous(), "partial_lse": partial[..., -1].clone(),
            "ctas": min(self.ctas, most),
        }  # fmt: skip
        return {**given, **own}

    def split_errors(self, given: dict[str, Any]) -> MhaErrors:
        """Errors of a call, from its arguments after it; combines the partial rows itself.

        Rows of ``out`` of split sequences, and partial rows that no split has, must still be NaN.
        """
        partial = given["partial_out"], given["partial_lse"]
        out, lse = merged(self.lq, self.lk, given["out"], given["lse"], partial)
        errors = self.errors((out.to(self.q.dtype), lse.float()))
        used = sum(
            s_q * pieces_of(s_q, s_k)
            for s_q, s_k, base in zip(self.lq, self.lk, lists_of(self.lq, self.lk, True).bases)
            if base >= 0
        )
        beside = sum(int((~x[used:].isnan()).sum()) for x in partial)
        begin = 0
        for s_q, base in zip(self.lq, lists_of(self.lq, self.lk, True).bases):
            if base >= 0:
                beside += int((~given["out"][begin : begin + s_q].isnan()).sum())
            begin += s_q
        return MhaErrors(errors.outside + beside, *list(vars(errors).values())[1:])
