"""Q.K of one warpgroup: content in FP8 and RoPE in BF16 into one accumulator.

``ScoreMma`` issues all of a tile at once; ``ScoreChains`` in pieces, between other work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup

from ..blocks.compat import wgmma_fence
from ..blocks.types import BF16, F8, ROW_MAJOR
from ..formats.dims import KV_LORA_RANK as D
from ..formats.dims import QK_ROPE_HEAD_DIM as R
from ..formats.dims import TOKEN_TILE as TILE
from .wgmma import issue, issue_words, low_word, tiled_mma

QK_GROUPS = 2  # partial sums of Q.K over the content channels


class ScoreMma:
    """S = Q K^T (rows on M), or S^T = K Q^T (tokens on M) for few rows.

    Attributes:
        rows: query rows of the CTA.
        tokens_on_m: S^T.
    """

    def __init__(self, rows: int, tokens_on_m: bool):
        self.rows, self.tokens_on_m = rows, tokens_on_m

    @property
    def n(self) -> int:
        """N of the MMA."""
        return self.rows if self.tokens_on_m else TILE

    def mmas(self):
        """(content, RoPE)."""
        return tiled_mma(F8, self.n), tiled_mma(BF16, self.n)

    def layouts(self, q_stages: int, k_stages: int):
        """Shared-memory layouts ((qc, qr), (kc, kr)): Q is operand A and K operand B, or K A."""
        a, b = sm90.make_smem_layout_a, sm90.make_smem_layout_b
        make_q, make_k = (b, a) if self.tokens_on_m else (a, b)
        tiler = (TILE, self.rows) if self.tokens_on_m else (self.rows, TILE)
        return tuple(
            (make(ROW_MAJOR, (*tiler, D), F8, n), make(ROW_MAJOR, (*tiler, R), BF16, n))
            for make, n in ((make_q, q_stages), (make_k, k_stages))
        )

    def accumulators(self):
        """One for each group of content channels."""
        shape = self.mmas()[0].partition_shape_C((64, self.n))
        return [cute.make_rmem_tensor(shape, Float32) for _ in range(QK_GROUPS)]

    def issue(self, acc_S, frags, q_stage, k_stage):
        """S in QK_GROUPS partial sums over the content channels, RoPE on top of the first.

        Hopper's FP8 accumulator keeps 13 bits below the largest addend: shorter chains lose less,
        and RoPE logits, which can be large, come last in their chain.  By then the first chain's
        results are there, so that the BF16 WGMMAs do not wait for the FP8 ones.
        """
        mma_c, mma_r = self.mmas()
        a_stage, b_stage = (k_stage, q_stage) if self.tokens_on_m else (q_stage, k_stage)
        rA, rB, rAr, rBr = (
            f[None, None, None, s]
            for f, s in zip(frags, (a_stage, b_stage, a_stage, b_stage), strict=True)
        )
        steps = D // 32 // QK_GROUPS
        wgmma_fence()
        for g in range(QK_GROUPS):
            issue(mma_c, acc_S[g], rA, rB, accumulate=False, first=g * steps, last=(g + 1) * steps)
        wgmma_fence()  # another shape of WGMMA on the same accumulator: order the two chains
        issue(mma_r, acc_S[0], rAr, rBr, accumulate=True)
        warpgroup.commit_group()


class Words(NamedTuple):
    """Low descriptor words (wgmma.low_word) of Q's tile and of the K ring's first stage."""

    q: Any
    q_rope: Any
    k: Any
    k_rope: Any


class ScoreChains:
    """S = Q K^T of 64 rows in pieces, the same sums as ``ScoreMma`` makes.

    WGMMAs are issued from descriptor words (wgmma.issue_words): one Q tile, stage ``k`` of the K
    ring.  ``acc``: chain A, content channels 0..255 and RoPE; chain B, channels 256..511.
    """

    steps = D // 32 // QK_GROUPS  # WGMMAs of a chain over the content

    def words(self, st) -> Words:
        """Descriptor words of Q's tile and of the K ring's first stage."""
        return Words(*(low_word(field) for field in (st.qc, st.qr, st.kc, st.kr)))

    def accumulators(self):
        """A, B."""
        return [cute.make_rmem_tensor((32,), Float32) for _ in range(QK_GROUPS)]

    def content_a(self, acc, words, k):
        """Chain A without RoPE."""
        wgmma_fence()
        self._content(acc, words, k, 0)

    def content_b(self, acc, words, k):
        """Chain B, and the commit of everything."""
        wgmma_fence()  # orders nothing new, but without it ptxas places the chain 5 % slower
        self._content(acc, words, k, 1)
        warpgroup.commit_group()

    def rope(self, acc, words, k):
        """RoPE on top of chain A."""
        wgmma_fence()  # another shape of WGMMA on the same accumulator
        key = words.k_rope + k * (TILE * R // 8)
        for x in range(R // 16):
            issue_words(acc[0], words.q_rope + 2 * x, key + 2 * x, BF16, accumulate=True)

    def issue(self, acc, words, k):
        """All of a tile at once."""
        self.content_a(acc, words, k)
        self.rope(acc, words, k)
        self.content_b(acc, words, k)

    def forget(self, acc):
        """S becomes undefined, so that a loop need not carry it past its last round."""
        for chain in acc:
            for v in range(32):
                chain[v] = Float32(0.0)

    def _content(self, acc, words, k, chain: int):
        key = words.k + k * (TILE * D // 16)
        for x in range(self.steps):
            step = chain * self.steps + x
            at = step // 4 * (TILE * 128 // 16) + step % 4 * 2  # 128 channels a column block
            issue_words(acc[chain], words.q + at, key + at, F8, accumulate=x > 0)
