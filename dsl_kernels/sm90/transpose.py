"""V^T fragments straight out of the K tile: an 8-bit transpose made of ldmatrix.trans and prmt.

``ldmatrix.x4.trans`` moves 16-bit units, so a register holds two tokens of two neighbouring
channels: {token 2c: d 2g, 2g+1 | token 2c+1: d 2g, 2g+1} for lane 4g + c.  One ``prmt`` of two such
words gathers four tokens of one channel, which is one register of the A fragment of m64k32 when row
g of a 16-channel block stands for d = 2g and row g + 8 for d = 2g + 1.

The k index inside a group of 16 tokens is *renamed* by the choice of prmt selectors, so that P can
be stored without shuffles.  Two names are in use:

    ROWS_ON_M    k = 4c + 2q + e  stands for token 8q + 2c + e   (S = Q K^T, P through stmatrix)
    TOKENS_ON_M  k = 2g + i       stands for token g + 8i        (S^T = K Q^T, stmatrix.trans)
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from ..blocks.types import U16, U32

TILE = 64  # tokens of a K tile
COLUMN_BLOCK = TILE * 128  # bytes of 128 channels of the tile: 64 rows of one 128-byte swizzle line


@dataclass(frozen=True)
class TokenNames:
    """prmt selectors of the even and the odd channel."""

    even: int
    odd: int


ROWS_ON_M = TokenNames(0x6420, 0x7531)
TOKENS_ON_M = TokenNames(0x6240, 0x7351)


def lane_offset(wwarp, lane):
    """Byte offset, inside a column block, of the row that this lane names to ldmatrix.

    Warp w reads channels 16w..16w+15 of a 64-channel block: 16-byte chunk w, which the 128-byte
    swizzle XORs with row % 8.  The upper 64 channels of a column block lie at offset ^ 64.
    """
    row = lane  # ldmatrix.x4: matrix lane // 8, row lane % 8, so tokens 0..31
    return row * 128 + (wwarp ^ (row % 8)) * 16


def own_offset(wwarp, lane):
    """The same where warp w reads 64 channels of its own, 64w..64w+63 of 256: neighbours, so that
    it writes whole lines of its rows.  Its 16 channels from 16 * d on lie at offset ^ 16 * d."""
    row = lane
    return (wwarp // 2) * COLUMN_BLOCK + row * 128 + ((wwarp % 2 * 4) ^ (row % 8)) * 16


def load_raw(base, offset, d_block: int):
    """64 tokens x (16 channels a warp) of d block ``d_block``: two ldmatrix.x4.trans.

    ``base`` is the tile's first byte plus 128 * (first channel // 128) * 64; d blocks of 64
    channels are counted from there.
    """
    lane_part = offset ^ 64 if d_block % 2 else offset
    return _load(base, lane_part, (d_block // 2) * COLUMN_BLOCK)


def load_own(base, offset, d: int):
    """64 tokens x 16 channels from 16 * d on of the warp's own, ``offset`` is ``own_offset``'s."""
    return _load(base, offset ^ (16 * d) if d else offset, 0)


def _load(base, lane_part, block: int):
    ldsm = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), U16)
    raw = []
    for kb in range(2):
        p = base + cute.assume(lane_part + (block + kb * 4096), divby=16)
        r = cute.make_rmem_tensor((8,), U16)
        cute.copy(ldsm, cute.make_tensor(cute.recast_ptr(p, dtype=U16), cute.make_layout(8)), r)
        raw.append(cute.recast_tensor(r, U32))
    return raw


def to_fragment(mma, raw, names: TokenNames):
    """The A fragment (64 channels x 64 tokens) of ``mma`` from the words of ``load_raw`` or
    ``load_own``: 16 prmt."""
    frag = mma.make_fragment_A(mma.partition_shape_A((64, TILE)))
    words = cute.recast_tensor(frag, U32)
    for kb in range(2):
        w = raw[kb]
        for h in range(2):
            words[4 * kb + 2 * h] = cute.arch.prmt(w[2 * h], w[2 * h + 1], names.even)
            words[4 * kb + 2 * h + 1] = cute.arch.prmt(w[2 * h], w[2 * h + 1], names.odd)
    return frag
