"""The FP8 latent cache with a scale a token: its planes, and its scales in the KV ring.

One token is 512 e4m3 channels and 64 BF16 RoPE channels divided by the token's scale sigma, and
sigma in fp32: 644 bytes (formats/fp8.py).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from ..blocks.smem import array
from ..blocks.types import BF16, F8, U32
from ..formats.dims import KV_LORA_RANK as D
from ..formats.fp8 import CONTENT, ROPE
from .planes import CacheFormat, Plane

FORMAT = CacheFormat((Plane("c", F8, CONTENT.count), Plane("r", BF16, ROPE.count)), scales="ks")
SMALLEST_SCALE = 2.0**-100  # append_kv's floor is 2^-80
LINE = 128  # bytes, and e4m3 channels, of a row of a column block of the content tile


class TokenScales:
    """The scales of the tokens in the KV ring, field ``ks``.

    Attributes:
        tile, stages: tokens of a stage, stages.
        box: tokens that one copy brings.
    """

    def __init__(self, tile: int, stages: int, box: int):
        self.tile, self.stages, self.box = tile, stages, box

    @property
    def fields(self) -> dict:
        """Storage."""
        return dict(ks=array(Float32, self.tile * self.stages, 128))

    def of_stages(self, st):
        """(token, stage)"""
        return st.ks.get_tensor(cute.make_layout((self.tile, self.stages)))

    def copier(self, st, scale):
        """Return the function that ``PagedTma`` calls for each box of tokens: one lane copies the
        box's scales.  ``scale``: the cache's, (pages, P)."""

        def copy(page, part, box, stage, bar):
            bulk = cute.make_copy_atom(
                cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=self.box * 32
            )
            offset = Int64(page) * scale.stride[0] + part * self.box
            src = cute.make_tensor(
                (scale.iterator + cute.assume(offset, divby=4)).align(16),
                cute.make_layout(self.box),
            )
            dst = cute.local_tile(self.of_stages(st)[None, stage], (self.box,), (box,))
            cute.copy(bulk, src, dst, mbar_ptr=bar)

        return copy

    @cute.jit
    def zero_values(
        self, st, stage, valid, first_block, blocks: cutlass.Constexpr, barrier_id=None
    ):
        """Zeroes V bytes of tokens >= ``valid`` or with a NaN scale: 0 * NaN must not reach O.

        One warpgroup clears ``blocks`` column blocks (128 channels each) from ``first_block``; a
        thread clears whole 128-byte lines, so there is no swizzle to mind.  The warpgroup may use
        them as operands when it has met at ``barrier_id``; without one the caller has a proxy fence
        and a synchronisation to make.
        """
        tidx, _, _ = cute.arch.thread_idx()
        token, column = tidx % 128 // 2, tidx % 2
        s_ks = self.of_stages(st)
        s = s_ks[token, stage]
        if token >= valid or s != s:
            zero = cute.make_rmem_tensor((32,), U32)
            zero.fill(0)
            for x in cutlass.range_constexpr(blocks // 2):
                block = first_block + 2 * x + column
                offset = stage * (self.tile * D) + block * (self.tile * LINE) + token * LINE
                ptr = cute.recast_ptr((st.kc.data_ptr() + offset).align(128), dtype=U32)
                cute.autovec_copy(zero, cute.make_tensor(ptr, cute.make_layout(32)))
        if const_expr(barrier_id is not None):
            # later TMA writes of this stage must come after these stores
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=barrier_id, number_of_threads=128)


@cute.jit
def safe_reciprocal(s):
    """1/s, but 0 for what is no scale (NaN rows, bytes past the end): masked tokens have P' = 0 and
    must add 0 to the sums, and a NaN row's P' is NaN already."""
    inv = cute.arch.rcp_approx(s)
    return inv if s >= SMALLEST_SCALE else Float32(0.0)
