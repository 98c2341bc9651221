"""Dense MHA prefill for SM90 where few query tokens against many keys are split over keys.

``mha_fwd`` in all but two places: a work tile may be a piece of a row tile, a range of its keys
(mha_list.py), and the rows of such a one go to partial rows in fp32, which mha_merge makes rows of
the output of.  What is not split is computed, and written, as there: the same bits.

Roles, shared memory and the timeline are those of mha_fwd.py.

A piece is told to the consumers as a sequence of its own whose causal diagonal is the same: of its
keys [first, end) row i sees those below i + 1 + s_k - s_q - first, which is i + 1 + k - q of
k = end - first keys and q = s_q - (s_k - end) query tokens.  Where rows go, and how many there
are, travels beside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ...blocks import compat
from ...blocks.rounding import fma
from ...formats.mha_list import ENTRY_WORDS, KEYS, LIST, TILES
from ...schedule.mha_items import length, piece_begin, pieces_of
from ..attention_parts import LN2, Loads, Notes, Rows
from ..hidden_keys import CONSUMER_WARPS
from .mha_fwd import MhaFwd, budget, feasible

if TYPE_CHECKING:
    from ...spec import VariantSpec

__all__ = ["budget", "build", "feasible"]


def build(spec: VariantSpec):
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    kernel = MhaSplit(spec)
    entry = TwoKeys(kernel) if len(kernel.loads.widths) == 2 else OneKey(kernel)
    return entry, kernel.fakes()


class TwoKeys:
    """The exported function where K is two tensors."""

    def __init__(self, kernel: MhaSplit):
        self.launch = kernel.launch

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # bf16 | f16 (total_q, h, d_qk)
        k_nope: cute.Tensor,  # (total_k, h_k, d_qk - 64)
        k_rope: cute.Tensor,  # (total_k, 1 | h_k, 64)
        v: cute.Tensor,  # (total_k, h_k, d_v)
        cu_seqlens_q: cute.Tensor,  # i32 (b + 1,)
        cu_seqlens_k: cute.Tensor,  # i32 (b + 1,)
        work: cute.Tensor,  # i32 (words,), as mha_items leaves it where keys are split
        out: cute.Tensor,  # (total_q, h, d_v)
        lse: cute.Tensor,  # f32 (h, total_q), natural
        partial_out: cute.Tensor,  # f32 (rows, h, d_v)
        partial_lse: cute.Tensor,  # f32 (rows, h), natural
        softmax_scale: Float32,
        causal: Int32,  # 0 or 1
        ctas: Int32,
        stream,
    ):
        self.launch(
            (q, v, k_nope, k_rope), (cu_seqlens_q, cu_seqlens_k, work),
            (out, lse, partial_out, partial_lse), softmax_scale, causal, ctas, stream,
        )  # fmt: skip


class OneKey:
    """The exported function where K is one tensor."""

    def __init__(self, kernel: MhaSplit):
        self.launch = kernel.launch

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # bf16 | f16 (total_q, h, d_qk)
        k_nope: cute.Tensor,  # (total_k, h_k, d_qk)
        v: cute.Tensor,  # (total_k, h_k, d_v)
        cu_seqlens_q: cute.Tensor,  # i32 (b + 1,)
        cu_seqlens_k: cute.Tensor,  # i32 (b + 1,)
        work: cute.Tensor,  # i32 (words,), as mha_items leaves it where keys are split
        out: cute.Tensor,  # (total_q, h, d_v)
        lse: cute.Tensor,  # f32 (h, total_q), natural
        partial_out: cute.Tensor,  # f32 (rows, h, d_v)
        partial_lse: cute.Tensor,  # f32 (rows, h), natural
        softmax_scale: Float32,
        causal: Int32,  # 0 or 1
        ctas: Int32,
        stream,
    ):
        self.launch(
            (q, v, k_nope), (cu_seqlens_q, cu_seqlens_k, work),
            (out, lse, partial_out, partial_lse), softmax_scale, causal, ctas, stream,
        )  # fmt: skip


class MhaSplit(MhaFwd):
    """The kernel of one head size and dtype."""

    def __init__(self, spec: VariantSpec):
        super().__init__(spec)
        self.loads = PieceLoads(spec)
        self.rows = PieceRows(self.dtype, spec.d_v)

    def fakes(self):
        """Fake arguments by name."""
        made = super().fakes()
        rows, f32 = compat.sym(name="partial_rows"), compat.DTYPES["f32"]
        heads = made["q"].shape[1]
        partial = {
            "partial_out": compat.rows(f32, (rows, heads, self.d_v)),
            "partial_lse": compat.strided(f32, (rows, heads), (compat.sym64(), 1), 4),
        }
        names = [*made]
        before = names[: names.index("lse") + 1]
        return {n: made[n] for n in before} | partial | made


class PieceNotes(Notes):
    """Notes of a work tile: head, first query token, query tokens, first partial row (-1: it is no
    piece), then query tokens, keys and row tile that the consumers count by, and whether it is
    taken again."""

    @cute.jit
    def read(self, st, count):
        """Read the ``count``-th note in the form in which consumers unpack it: the three words that
        say where rows go are one tuple."""
        head, q0, s_q, partial, q, k, m, again = Notes.read(self, st, count)
        return head, (q0, s_q, partial), q, k, m, again


class PieceLoads(Loads):
    """The producer's warp, where a work tile may be a piece."""

    def __init__(self, spec: VariantSpec):
        super().__init__(spec)
        self.notes = PieceNotes("item", Notes.room, {"consumers": CONSUMER_WARPS})
        self.rings = (self.notes.ring, *self.rings[1:])
        self.fields = {**self.fields, **self.notes.fields}
        self.hidden.notes = self.notes.ring

    def taken_apart(self, gmem, j):
        """Return the note of work tile ``j`` without its last word, and its place as the base class
        gives it; if it is a piece, query tokens and keys are those of the sequence that stands for
        it (see above)."""
        cu_q, cu_k, work, heads = gmem
        tile, head = self._work_tile(j, work[TILES], heads)
        at = work[LIST] + ENTRY_WORDS * tile
        sequence, m, piece, base = work[at], work[at + 1], work[at + 2], work[at + 3]
        s_q = length(cu_q, sequence)
        q0, k0 = cu_q[sequence], cu_k[sequence]
        first, end, partial = self._range(s_q, length(cu_k, sequence), piece, base)
        q, k = s_q - (length(cu_k, sequence) - end), end - first
        return (head, q0, s_q, partial, q, k, m), (q0, k0 + first, q, k, m, head)

    @cute.jit
    def _range(self, s_q, s_k, piece, base):
        """Return (first key, end, first partial row) of a piece; if ``base`` is -1, the tile is no
        piece: (0, ``s_k``, -1)."""
        first, end, partial = Int32(0), s_k, Int32(-1)
        if base >= 0:
            pieces = pieces_of(s_q, s_k)
            first = piece_begin(s_k, pieces, piece) * KEYS
            end = cutlass.min(piece_begin(s_k, pieces, piece + 1) * KEYS, s_k)
            partial = base + piece * s_q
        return first, end, partial


class PieceRows(Rows):
    """Rows of results, or of partial ones, from fragments of 64 x d_v accumulators."""

    @cute.jit
    def write(self, results, acc_o, m_ref, total, limit, where, s_q, head, row):
        """Rows ``row`` and ``row + 8`` of a sequence; ``where``: as ``PieceNotes`` reads it."""
        q0, rows, partial = where
        bad = Boolean(False)
        if partial < 0:
            bad = Rows.write(
                self, results[:2], acc_o, m_ref, total, limit, q0, rows, head, row
            )  # fmt: skip
        else:
            bad = self._partial(results[2:], acc_o, (m_ref, total, limit), partial, rows, head, row)
        return bad

    @cute.jit
    def _partial(self, results, acc_o, state, first, rows, head, row):
        """Normalised rows in fp32 behind partial row ``first``, and their LSE; returns what
        ``write`` does.

        A quad's lanes hold pairs of channels: 8 bytes each, a sector of 32 together.
        """
        out, lse = results
        m_ref, total, limit = state
        quad, bad = cute.arch.lane_idx() % 4, Boolean(False)
        for i in cutlass.range_constexpr(2):
            s, empty = self._sum(m_ref[i], total[i], limit[i])
            inverse, looked = cute.arch.rcp_approx(s), Float32(0.0)
            mine = row + 8 * i < rows
            token = first + row + 8 * i
            if mine & (quad == 0):
                value = (m_ref[i] + cute.math.log2(s, fastmath=True)) * LN2
                lse[token, head] = -Float32.inf if empty else value
            if mine:
                for g in cutlass.range_constexpr(self.d_v // 8):
                    v = 4 * g + 2 * i
                    pair = [
                        Float32(cutlass.select_(empty, Float32(0.0), acc_o[v + y] * inverse))
                        for y in range(2)
                    ]
                    for value in pair:
                        looked = fma(value, Float32(0.0), looked)
                    at = cute.crd2idx((token, head, 8 * g + 2 * quad), out.layout)
                    words = [x.bitcast(Uint32) for x in pair]
                    compat.store_words((out.iterator + at).align(8), words)
            bad = bad | ((s == s) & (looked != looked))
        return bad
