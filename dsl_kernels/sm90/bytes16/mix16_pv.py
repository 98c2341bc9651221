"""P.V of ``mix16``: V^T out of the ring's bytes, rows of O^T to memory.

A warp has 64 channels of d_v: four times 16, one after the other.  A *unit* is 16 of them times 32
tokens, of which a tile has ``UNITS``; its A operand is converted from two ldmatrix.trans.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from ...blocks.compat import wgmma_fence
from ...blocks.types import F16, U16, U32
from ...combine.epilogue import Held, Shared, Woven, write_rows
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import TOKEN_TILE as TILE
from .. import transpose
from ..fragments import pad_layout
from ..roles import FEW_ROWS, WARPGROUP
from ..wgmma import tiled_mma
from .mix16_parts import SUM_FACTOR, times, unpack

DEINTERLEAVE = 0x3120  # bytes (token, channel) (0,0) (0,1) (1,0) (1,1) -> channel 0, channel 1
UNITS = 8  # of a tile's P.V in a warpgroup: 16 channels a warp x 32 tokens


class VTile(NamedTuple):
    """A warpgroup's half of a tile of V.

    Attributes:
        base: pointer to its first channel's bytes.
        offset: where the lane's first matrix row lies (``own_offset``).
        stage: of the ring.
        group: of channels that share a scale, the warp's first.
    """

    base: Any
    offset: Any
    stage: Any
    group: Any


class ProductsOfV:
    """Steps of a P.V warpgroup for its half of d_v: V^T to fragments, products, rows to memory.

    Attributes:
        parts: what the pipeline is composed of.
        rows_cta: query rows of the CTA.
        sum_factor: what row sums are kept times.
        units_a_ratio: units one behind another whose channels share a scale.
    """

    parts: Any
    rows_cta: int
    sum_factor = SUM_FACTOR
    units_a_ratio = UNITS // 2

    def pv_mma(self):
        return tiled_mma(F16, self.rows_cta, a_in_registers=True)

    @staticmethod
    def own_offset(wwarp):
        """Byte offset of a lane's first matrix row of V^T; worked out once a work tile
        (fp8/transposed.py says why)."""
        tidx, _, _ = cute.arch.thread_idx()
        return cute.arch.shuffle_sync(transpose.own_offset(wwarp, tidx % 32), tidx % 32)

    def load_v(self, base, offset, unit: int):
        """32 tokens of 16 channels of a unit: four words of two tokens x two channels."""
        kb, d = divmod(unit, 4)
        ldsm = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), U16)
        p = base + cute.assume((offset ^ (16 * d) if d else offset) + kb * 4096, divby=16)
        r = cute.make_rmem_tensor((8,), U16)
        cute.copy(ldsm, cute.make_tensor(cute.recast_ptr(p, dtype=U16), cute.make_layout(8)), r)
        return cute.recast_tensor(r, U32)

    def load_ratio(self, st, stage, group, half: int):
        """Words of ratios for 32 of the tile's tokens."""
        ratio = cute.make_rmem_tensor((4,), U32)
        words = self.parts.scales.ratios(st)[None, cute.arch.lane_idx() % 4, group, stage]
        own = cute.make_tensor(words.iterator + 4 * half, cute.make_layout(4))
        cute.autovec_copy(own, ratio)
        return ratio

    def to_v(self, raw, ratio):
        """A fragments of two k steps; ``ratio``: words by which tokens are multiplied, or None."""
        mma = self.pv_mma()
        frag = mma.make_fragment_A(mma.partition_shape_A((64, 32)))
        words = cute.recast_tensor(frag, U32)
        for h in range(2):
            for x in range(2):
                pair = cute.arch.prmt(raw[2 * h + x], raw[2 * h + x], DEINTERLEAVE)
                even, odd = unpack(pair)
                if ratio is not None:
                    even, odd = (times(word, ratio[2 * h + x]) for word in (even, odd))
                words[4 * h + 2 * x], words[4 * h + 2 * x + 1] = even, odd
        return frag

    def tile(self, st, stage, half, wwarp, offset) -> VTile:
        """The warpgroup's half of a stage."""
        at = stage * (TILE * D) + half * (D // 2 * TILE)
        base = st.kc.data_ptr() + cute.assume(at, divby=1024)
        return VTile(base, offset, stage, 2 * half + wwarp // 2)

    def first_unit(self, st, tile: VTile):
        """(A fragments of unit 0, ratios of the first half of the tokens): what needs no P."""
        ratio = self.load_ratio(st, tile.stage, tile.group, 0)
        return self.to_v(self.load_v(tile.base, tile.offset, 0), ratio), ratio

    def multiply(self, st, acc_O, p, tile: VTile, first, first_half_read=None) -> None:
        """Adds V^T P^T of a tile to O^T: a unit's WGMMAs run while the next is converted.  The last
        unit's are committed, not waited for.

        Args:
            p: k step -> B fragment of P^T.
            first: of ``first_unit``.
            first_half_read: what to do once the bytes of the first half of the tokens are read.
        """
        fragment, ratio = first
        held, mma = [fragment, None], self.pv_mma()
        for u in range(UNITS):
            kb, d = u // 4, u % 4
            wgmma_fence()
            atom = cute.make_mma_atom(mma.op)
            atom.set(warpgroup.Field.ACCUMULATE, True)
            for k in range(2):
                b = p(2 * kb + k)
                cute.gemm(atom, acc_O[d], held[u % 2][None, None, k], b, acc_O[d])
            warpgroup.commit_group()
            if u + 1 == UNITS:
                break
            raw = self.load_v(tile.base, tile.offset, u + 1)
            if (u + 1) % self.units_a_ratio == 0:
                half, d = divmod(u + 1, UNITS // 2)
                group = tile.group + d // self.units_a_ratio if d else tile.group
                ratio = self.load_ratio(st, tile.stage, group, half)
            if u > 0:
                warpgroup.wait_group(1)
            held[(u + 1) % 2] = self.to_v(raw, ratio)
            if u + 2 == UNITS // 2 and first_half_read is not None:
                first_half_read()  # behind a use of its words: before one, ldmatrix may still read

    @cute.jit
    def write_rows(self, st, results, acc_O, split, rows, half, frees: cutlass.Constexpr = None):
        """Normalised O^T fragment -> rows: fragment rows g and g + 8 are d = 2g and 2g + 1 of 16
        channels, of which a warp has four times as many, one after the other.

        ``frees``: the ``Ring`` of the rows' 1 / l, if whoever writes them waits for it.
        """
        tidx, _, _ = cute.arch.thread_idx()
        # out of a shuffle, so that no address is made before the tiles, which have the registers
        lane = cute.arch.shuffle_sync(tidx % 32, tidx % 32)
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        inv_s = cute.make_tensor(st.inv.data_ptr(), pad_layout(self.rows_cta))
        own = half * (D // 2) + wwarp * 64
        shared = Shared((4, 8, 16), own, 4, lane < 4)  # the warp's 64 channels have one exponent
        channel, woven = own + 2 * (lane // 4), None
        if const_expr(self.rows_cta > FEW_ROWS):  # few stores take less time than their shuffles
            channel, woven = own + lane // 16 * 8, Woven((4, 8), lane // 4 % 4, 16)
        held = []
        for x in cutlass.range_constexpr(self.rows_cta // 4):
            v = 4 * (x // 2) + x % 2
            inverse = inv_s[x, lane % 4]
            runs = {}
            for d in cutlass.range_constexpr(4):
                pair = cute.make_rmem_tensor((2,), Float32)
                for e in range(2):
                    pair[e] = acc_O[d][v + 2 * e] * self.sum_factor * inverse
                runs[16 * d] = pair
            held.append(Held(8 * (x // 2) + x % 2, runs))
        write_rows(results, split, rows, (2 * (lane % 4), channel), held, shared, woven)
        if const_expr(frees is not None):
            cute.arch.sync_warp()
            if lane == 0:
                frees.arrive_empty(st, 0)
