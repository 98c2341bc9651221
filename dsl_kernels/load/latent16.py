"""The 16-bit latent cache: one plane of 576 channels a token, of which the first 512 are V.

A cache is (pages, P, KV heads, 576) in BF16 or fp16 (formats/rows16.py); there are no scales.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ..blocks.types import BF16, U32
from ..formats.dims import HEAD_DIM_QK
from ..formats.rows16 import BF16 as BF16_ROWS
from .planes import CacheFormat, Plane

LINE = 128  # bytes of a row of a column block of the tile
LINE_CHANNELS = LINE // 2
EXPONENT = {True: 0x7F80, False: 0x7C00}  # of BF16, of fp16: all ones are infinity and NaN


def latent_format(dtype) -> CacheFormat:
    """The format in ``dtype``, field ``kc`` of the KV ring."""
    return CacheFormat((Plane("c", dtype, BF16_ROWS.channels),))


class LatentValues:
    """V in the KV ring: what must not meet P = 0.

    Attributes:
        dtype: of the cache.
        tile: tokens of a stage.
    """

    def __init__(self, dtype, tile: int):
        self.dtype, self.tile = dtype, tile

    @cute.jit
    def clear(
        self, st, stage, shown, valid, first_block, blocks: cutlass.Constexpr, barrier_id
    ):  # fmt: skip
        """Zeroes V of tokens from ``valid`` on, which may be anything, and non-finite V of tokens
        from ``shown`` on, which some row must not see: 0 * NaN must not reach O.

        A row that sees a token with a NaN has it in its logit, and so in O all the same.  One
        warpgroup clears ``blocks`` column blocks of 64 channels from ``first_block`` and may use
        them as operands behind this; a thread clears whole 128-byte lines, so there is no swizzle
        to mind.
        """
        tidx, _, _ = cute.arch.thread_idx()
        token, column = tidx % 128 // 2, tidx % 2
        if token >= shown:
            for x in cutlass.range(blocks // 2, unroll=1):
                block = first_block + 2 * x + column
                offset = (stage * HEAD_DIM_QK + block * LINE_CHANNELS) * self.tile * 2
                line = (st.kc.data_ptr().toint() + offset + token * LINE).to(Int32)
                words = cute.make_tensor(
                    cute.make_ptr(U32, line, cute.AddressSpace.smem, assumed_align=LINE),
                    cute.make_layout((4, LINE // 16)),
                )
                bad = Int32(1) if token >= valid else Int32(0)
                if bad == 0:
                    for c in cutlass.range(LINE // 16, unroll=1):
                        bad = bad | self._non_finite(words[None, c])
                if bad != 0:
                    zero = cute.make_rmem_tensor((4,), U32)
                    zero.fill(0)
                    for c in cutlass.range(LINE // 16, unroll=1):
                        cute.autovec_copy(zero, words[None, c])
        # later TMA writes of this stage must come after these stores
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=128)

    def _non_finite(self, chunk):
        """1 if one of 8 elements has an exponent of all ones."""
        loaded = cute.make_rmem_tensor((4,), U32)
        cute.autovec_copy(chunk, loaded)
        mask = EXPONENT[self.dtype is BF16]
        bad = Int32(0)
        for i in range(4):
            for shift in (0, 16):
                field = loaded[i] & Uint32(mask << shift)
                bad = cutlass.select_(field == Uint32(mask << shift), Int32(1), bad)
        return bad
