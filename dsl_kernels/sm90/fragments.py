"""Coordinate maps of WGMMA accumulators: row and token of each value that a thread holds.

Softmax and masks ask a map instead of repeating the formula.  Warp w of the warpgroup, lane
4 g + c (quad lane c).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32


class RowsOnM:
    """m64n64 of S = Q K^T: a thread holds 2 rows x 16 tokens.

    Value v = e + 2 i + 4 j is row 16 w + g + 8 i, token 8 j + 2 c + e.
    """

    values = 32
    rows = 2

    def row(self, v: int) -> int:
        """Index of value ``v``'s row among the thread's 2 rows."""
        return v // 2 % 2

    def token(self, v: int) -> int:
        """Index of value ``v``'s token among the thread's 16 tokens."""
        return 2 * (v // 4) + v % 2

    def row_at(self, wwarp, lane, x: int):
        """Row of the tile that is the thread's row ``x``."""
        return wwarp * 16 + lane // 4 + 8 * x

    def token_at(self, first, wwarp, lane, v: int):
        """Token that value v belongs to, in a tile that starts with token ``first``."""
        return first + 8 * (v // 4) + 2 * (lane % 4) + v % 2


class TokensOnM:
    """m64 x rows of S^T = K Q^T: a thread holds 2 tokens x rows / 4 rows.

    Value v = e + 2 i + 4 j is token 16 w + g + 8 i, row 8 j + 2 c + e.
    """

    def __init__(self, rows_cta: int):
        self.rows = rows_cta // 4
        self.values = 2 * self.rows

    def row(self, v: int) -> int:
        """Index of value ``v``'s row among the thread's ``rows`` rows, a quarter of the CTA's."""
        return 2 * (v // 4) + v % 2

    def token(self, v: int) -> int:
        """Index of value ``v``'s token among the thread's 2 tokens."""
        return v // 2 % 2

    def row_at(self, wwarp, lane, x: int):
        """Row of the tile that is the thread's row ``x``."""
        return 8 * (x // 2) + 2 * (lane % 4) + x % 2

    def token_at(self, first, wwarp, lane, v: int):
        """Token that value v belongs to, in a tile that starts with token ``first``."""
        return first + wwarp * 16 + lane // 4 + 8 * self.token(v)


@cute.jit
def mask(t, fragment: cutlass.Constexpr, first_token, limit, wwarp, lane):
    """Hides what a row must not see: values of tokens from ``limit`` of their row on are -inf."""
    for v in cutlass.range_constexpr(fragment.values):
        if fragment.token_at(first_token, wwarp, lane, v) >= limit[fragment.row(v)]:
            t[v] = -Float32.inf


# ---------------------------------------------------------------- factors of the columns of O^T


def pad_layout(rows: int):
    """Row factors in the order in which an O^T fragment wants them.

    A thread of quad lane c needs rows 8j + 2c + e for all j, e: they lie side by side, and the four
    lanes' runs are 4 words apart modulo the banks, so that 16-byte reads do not collide.
    Shape (rows // 4, 4): (2j + e, c).
    """
    return cute.make_layout((rows // 4, 4), stride=(1, rows // 4 + 4))


def padded_size(rows: int) -> int:
    return rows + 16


def row_position(row, rows: int):
    """Offset of ``row`` in ``pad_layout``."""
    return (row % 8) // 2 * (rows // 4 + 4) + row // 8 * 2 + row % 2
