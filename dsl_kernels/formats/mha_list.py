"""Dense MHA prefill, for kernels and hosts: sizes of heads, and the list of work in the workspace.

Standard library only.

A *row tile* is ``ROWS`` query rows of one sequence and one head.  Tiles of all heads are alike, so
the list names a tile once: the sequence first that sees the most keys, its row tiles from the last
on.  Kernels walk it by sections of ``SECTION`` heads, the last of ``LAST_SECTION`` or more, where
heads are so many: a section's first row tile of each head, then its second, and so on.

    words 0..3       work tiles taken beyond the first of each CTA | row tiles t | 0, and of the
                     backward's tiles of keys what mha_delta counts (mha_grads.py) | 0
    words 4 + 2 i    sequence, row tile of it; i < t

Split over keys.  Few query tokens against many keys are too few work tiles for a GPU, so such a
sequence's keys are cut into *pieces*, whose partial results are combined.  How many and where
follows from its own two lengths: with r row tiles and n tiles of keys

    pieces = max(1, min(PIECES, n // PIECE_TILES) // r)       piece p: tiles p n // pieces ..

so that r * pieces <= PIECES, and a piece is PIECE_TILES * r tiles or more.  Where a list may have
pieces (``SplitRoom``) a row tile stands in it once for each:

    words 0..3       taken | entries t | row tiles that are split | where the list begins, w
    words 4 + 4 i    a split row tile: sequence, row tile, pieces, first partial row of the sequence
    (b words)        first partial row of each sequence, -1 if it is not split
    words w + 4 i    an entry: sequence, row tile, piece, first partial row of the sequence or -1

Partial row ``first + piece * s_q + i`` is query token i's; all heads lie side by side in it.
"""

from __future__ import annotations

from typing import NamedTuple

ROWS = 128  # query rows of a row tile
KEYS = 128  # keys of a tile, in which lists count whatever a kernel takes at a time
WIDTHS = {192: (128, 64), 128: (128,), 256: (192, 64)}  # channels of q -> those of K's tensors
VALUES = {192: 128, 128: 128, 256: 256}  # channels of q -> of a row of V
KEY_TILE = {192: 128, 128: 128, 256: 80}  # channels of q -> keys that kernels take at a time
SECTION = 4  # heads that are worked on side by side, so that K and V stay in L2
LAST_SECTION = 8  # heads of the last section, at least: short work for all CTAs to end together
HEADER = 4  # words before the list
TILE_WORDS = 2
TAKEN, TILES, SPLITS, LIST = 0, 1, 2, 3  # words of the header; the last two where keys are split
PIECES = 8  # row tiles times pieces of a split sequence, at most
PIECE_TILES = 8  # tiles of keys of a piece, at least
ENTRY_WORDS = 4  # of lists that may have pieces, and of a split row tile


def most_tiles(total_q: int, batch: int) -> int:
    """The most row tiles that ``batch`` sequences of ``total_q`` query tokens together have."""
    return total_q // ROWS + min(batch, total_q)


def workspace_words(total_q: int, batch: int) -> int:
    """int32 words of the workspace of a call."""
    return HEADER + TILE_WORDS * most_tiles(total_q, batch)


def pieces_of(s_q: int, s_k: int) -> int:
    """Pieces that a sequence's keys are cut into; 1: it is not split."""
    row_tiles, tiles = -(-s_q // ROWS), -(-s_k // KEYS)
    return max(1, min(PIECES, tiles // PIECE_TILES) // max(1, row_tiles))


def piece_keys(s_k: int, pieces: int, piece: int) -> tuple[int, int]:
    """Return (first key, end) of a piece of a sequence of ``s_k`` keys."""
    tiles = -(-s_k // KEYS)
    first, end = (tiles * x // pieces * KEYS for x in (piece, piece + 1))
    return first, min(end, s_k)


class SplitRoom(NamedTuple):
    """Upper bounds of a call's lists and partial results, whatever its sequences' lengths.

    Attributes:
        batch: sequences.
        entries: of the list.
        splits: row tiles that are split.
        rows: partial rows, each of all heads.
    """

    batch: int
    entries: int
    splits: int
    rows: int

    @classmethod
    def of(cls, total_q: int, batch: int, total_k: int) -> SplitRoom:
        """Return the bounds for ``batch`` sequences that have ``total_q`` query tokens and
        ``total_k`` keys together."""
        of_keys = (total_k + (KEYS - 1) * batch) // (PIECE_TILES * KEYS)
        splits = min(PIECES * min(batch, total_q), of_keys)  # row tiles times pieces
        rows = min(PIECES * total_q, ROWS * splits)
        return cls(batch, most_tiles(total_q, batch) + splits, splits // 2, rows)

    @property
    def list_words(self) -> int:
        """int32 words before the partial rows, whose place is a multiple of 16 bytes."""
        words = HEADER + ENTRY_WORDS * (self.entries + self.splits) + self.batch
        return -(-words // 4) * 4

    def words(self, heads: int, d_v: int) -> int:
        """int32 words of the workspace: lists, partial rows (fp32), their LSEs."""
        return self.list_words + self.rows * heads * (d_v + 1)


def may_split(total_k: int, max_seqlen_k: int) -> bool:
    """Return True if some sequence may have enough keys for two pieces."""
    return -(-min(total_k, max_seqlen_k) // KEYS) >= 2 * PIECE_TILES
