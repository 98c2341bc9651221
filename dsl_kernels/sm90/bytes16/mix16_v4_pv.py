"""P.V of ``mix16`` over DeepSeek V4's pages: V^T out of the ring's bytes, RoPE's product, rows of
O^T to memory.

d_v is blocks of 64 channels, of which a warp has 16: the first P.V warpgroup has four blocks of
content, the second three and RoPE.  RoPE's operand lies in shared memory, so that warp w has the
channels from 16 w on.  Content comes through registers, and whose channels are whose is ours to
say:

    Spread      16 and 32 rows: block d is 64 neighbours, whose scale all warps share.  A thread
                stores the pairs it has
    Neighbours  64 rows: a warp's channels of content are neighbours.  Its stores of 16 bytes fill
                whole lines of a row in the first half, parts of two or three lines in the second.
                With Spread a row's store touches 32 bytes of each of four lines, and what softmax
                wants of shared memory waits behind them: calls of two tiles a work tile took 9 to
                11 % longer
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ...blocks.compat import wgmma_fence
from ...blocks.smem import staged
from ...blocks.types import BF16, U16, U32
from ...combine.epilogue import Held, Shared, Woven, write_rows
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import TOKEN_TILE as TILE
from ...load.gather_v4 import LINES
from .. import transpose
from ..fragments import pad_layout
from ..roles import FEW_ROWS, WARPGROUP
from ..wgmma import issue, tiled_mma
from . import mix16
from .mix16_parts import SUM_FACTOR
from .mix16_v4_parts import LINE, C

BLOCK = 64  # channels of d_v that a warpgroup's instruction has
BLOCKS = D // 2 // BLOCK  # a P.V warpgroup's
STEP = 32  # tokens of a unit


class Operands(NamedTuple):
    """Operands of P.V in shared memory: P^T in f16 and in BF16, V^T's RoPE channels."""

    p: Any
    p_rope: Any
    v_rope: Any


class Tile(NamedTuple):
    """A warpgroup's half of a tile of V.

    Attributes:
        base: pointer to the tile's first byte.
        places: where the lane's first matrix rows of V^T lie: of ``Spread.places`` or
            ``Neighbours.places``.
        stage: of the ring.
        half: which; an int.
        wwarp: number of the warp in its warpgroup.
    """

    base: Any
    places: Any
    stage: Any
    half: int
    wwarp: Any

    @property
    def blocks(self) -> int:
        """Number of blocks of content: 4 in the first half, 3 in the second."""
        return BLOCKS - self.half

    @property
    def units(self) -> int:
        """16 channels a warp times 32 tokens."""
        return 2 * self.blocks


class Stores(NamedTuple):
    """Placement of a thread's stores of a row, for ``write_rows`` of combine/epilogue.py.

    Attributes:
        channel: its first; of stores that are woven, less the lane's share of the weave.
        step: channels from a block of the warp's to the next.
        shared, woven: a ``Shared``, a ``Woven`` or None.
    """

    channel: Any
    step: int
    shared: Shared
    woven: Woven | None


class Spread:
    """A warp has 16 channels of each 64 neighbours.

    Attributes:
        one_scale: whether a warp's blocks of the first half share a scale.
    """

    one_scale = False

    @staticmethod
    def places(half: int, wwarp, lane):
        """Byte offsets of the lane's first matrix row of V^T: in 128-byte lines, in half lines."""
        in_halves = lane * (LINE // 2) + (wwarp ^ (lane // 2 % 4)) * 16
        return transpose.lane_offset(wwarp, lane), in_halves

    @staticmethod
    def unit(tile: Tile, kb: int, d: int):
        """(byte of the stage, group of channels that share a scale) of 32 tokens of block ``d``."""
        group, (in_lines, in_halves) = BLOCKS * tile.half + d, tile.places
        at = group // 2 * (TILE * LINE)
        if group // 2 < LINES:
            return (in_lines ^ 64 if group % 2 else in_lines) + (at + kb * STEP * LINE), group
        return in_halves + (at + kb * STEP * (LINE // 2)), group

    @staticmethod
    def stores(half, wwarp, lane) -> Stores:
        """``Stores`` of a thread: a pair of channels of each of four blocks, not woven."""
        own, g = half * (D // 2) + wwarp * 16, lane // 4
        # the warp's four times 16 channels share an exponent, which four lanes of a row write
        shared = Shared((4, 8, 16), own + BLOCK * g, 1, lane < 16)
        return Stores(own + 2 * g, BLOCK, shared, None)


class Neighbours:
    """A warp has neighbouring channels of content.

    Attributes:
        one_scale: whether a warp's blocks of the first half share a scale.
    """

    one_scale = True

    @staticmethod
    def chunk(wwarp, d: int):
        """Number of the warp's ``d``-th block among the second half's twelve times 16 channels of
        content."""
        return (BLOCKS - 1) * wwarp + d

    def places(self, half: int, wwarp, lane):
        """Byte offsets of the lane's first matrix rows of V^T: one for all blocks of the first
        half; one for each of the second, where a block lies in lines or in half lines."""
        if half == 0:
            return (transpose.own_offset(wwarp, lane),)
        places = []
        for d in range(BLOCKS - 1):
            chunk = self.chunk(wwarp, d)
            in_line = 2 * (TILE * LINE) + lane * LINE + ((chunk % 8) ^ (lane % 8)) * 16
            in_half = LINES * (TILE * LINE) + lane * (LINE // 2)
            in_half = in_half + ((chunk % 4) ^ (lane // 2 % 4)) * 16
            places.append(Int32(cutlass.select_(chunk < 8, in_line, in_half)))
        return tuple(places)

    def unit(self, tile: Tile, kb: int, d: int):
        """(byte of the stage, group of channels that share a scale) of 32 tokens of block ``d``."""
        if tile.half == 0:
            at = tile.places[0]
            return (at ^ (16 * d) if d else at) + kb * STEP * LINE, tile.wwarp
        at, chunk = tile.places[d], self.chunk(tile.wwarp, d)
        if kb:
            at = at + Int32(cutlass.select_(chunk < 8, STEP * LINE, STEP * (LINE // 2)))
        return at, BLOCKS + chunk // 4

    @staticmethod
    def stores(half, wwarp, lane) -> Stores:
        """``Stores`` of a thread, woven: a lane stores channels of one block.  RoPE's block is no
        multiple of ``step`` away, so the lanes that store it have the difference in ``channel``.
        Right only for results of 16 bits (``mix16_v4.feasible``)."""
        own, block = half * (D // 2) + wwarp * (64 - 16 * half), lane // 4 % 4
        rope = half * (C + 16 * wwarp - (own + 48))  # from where a fourth block would lie
        own = own + Int32(cutlass.select_(block == BLOCKS - 1, rope, 0))
        # the warp's four times 16 channels share an exponent, which four lanes of a row write
        shared = Shared((4, 8, 16), own + 16 * block, 1, lane < 16)
        return Stores(own + lane // 16 * 8, 16, shared, Woven((4, 8), block, 16))


class ProductsOfV4(mix16.Mix16):
    """The pipeline (``decode.Pipeline``), of V4's tokens.

    Attributes:
        channels: which ones warps have.
    """

    @property
    def channels(self) -> Spread | Neighbours:
        return Spread() if self.rows_cta <= FEW_ROWS else Neighbours()

    def rope_mma(self):
        return tiled_mma(BF16, self.rows_cta, a_mn=True)

    def pv_operands(self, st, layouts):
        tidx, _, _ = cute.arch.thread_idx()
        mma = self.rope_mma()
        thr = mma.get_slice(tidx % WARPGROUP)
        shape = (BLOCK, self.rows_cta, TILE)
        layout = sm90.make_smem_layout_a(LayoutEnum.COL_MAJOR, shape, BF16, self.stages)
        return Operands(
            super().pv_operands(st, layouts),
            mma.make_fragment_B(thr.partition_B(staged(st.pr, layouts.p))),
            mma.make_fragment_A(thr.partition_A(staged(st.kr, layout))),
        )

    # ---------------------------------------------------------------- V^T

    @staticmethod
    def own_offset(wwarp):
        """Nothing: places depend on the half, which ``tiles`` knows when it is compiled."""
        return ()

    def places(self, half: int, wwarp):
        """Byte offsets of the lane's first matrix rows of V^T; worked out once a work tile
        (fp8/transposed.py says why)."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        found = self.channels.places(half, wwarp, lane)
        return tuple(cute.arch.shuffle_sync(place, lane) for place in found)

    def tile(self, st, stage, half, wwarp, offset) -> Tile:
        """The warpgroup's half of a stage; ``offset``: of ``places``."""
        base = st.kc.data_ptr() + cute.assume(stage * (TILE * C), divby=1024)
        return Tile(base, offset, stage, half, wwarp)

    def load_unit(self, st, tile: Tile, unit: int, ratio=None):
        """32 tokens of 16 channels of a block: four words of two tokens x two channels, and their
        ratios; ``ratio``: those of the unit before."""
        kb, d = divmod(unit, tile.blocks)
        at, group = self.channels.unit(tile, kb, d)
        ldsm = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), U16)
        p = tile.base + cute.assume(at, divby=16)
        r = cute.make_rmem_tensor((8,), U16)
        cute.copy(ldsm, cute.make_tensor(cute.recast_ptr(p, dtype=U16), cute.make_layout(8)), r)
        if d == 0 or tile.half == 1 or not self.channels.one_scale:
            ratio = self.load_ratio(st, tile.stage, group, kb)
        return cute.recast_tensor(r, U32), ratio

    def first_unit(self, st, tile: Tile):
        """(A fragments of unit 0, its ratios): what needs no P."""
        raw, ratio = self.load_unit(st, tile, 0)
        return self.to_v(raw, ratio), ratio

    # ---------------------------------------------------------------- products

    @cute.jit
    def tiles(self, cta, acc_O, operands, half, span, states, offset, ends):
        """Run a work tile's tiles like the base class, but with code of its own for each half,
        since only the second has RoPE."""
        tidx, _, _ = cute.arch.thread_idx()
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        kst, pst = states
        if half == 0:
            kst, pst = mix16.Mix16.tiles(
                self, cta, acc_O, operands, 0, span, (kst, pst), self.places(0, wwarp), ends
            )  # fmt: skip
        else:
            kst, pst = mix16.Mix16.tiles(
                self, cta, acc_O, operands, 1, span, (kst, pst), self.places(1, wwarp), ends
            )  # fmt: skip
        return kst, pst

    def products(self, st, acc_O, operands, kst, pst, tile, first) -> None:
        """Adds V^T P^T of a tile to O^T: RoPE's WGMMAs, which need no conversion, then a unit's
        while the next is converted.  The last unit's are committed, not waited for; by then RoPE's
        have read the stage."""
        if tile.half:
            wgmma_fence()
            issue(
                self.rope_mma(), acc_O[-1], operands.v_rope[None, None, None, tile.stage],
                operands.p_rope[None, None, None, pst.index], accumulate=True,
            )  # fmt: skip
            warpgroup.commit_group()
        (fragment, ratio), mma = first, self.pv_mma()
        held = [fragment, None]
        for u in range(tile.units):
            kb, d = divmod(u, tile.blocks)
            wgmma_fence()
            atom = cute.make_mma_atom(mma.op)
            atom.set(warpgroup.Field.ACCUMULATE, True)
            for k in range(2):
                b = operands.p[None, None, 2 * kb + k, pst.index]
                cute.gemm(atom, acc_O[d], held[u % 2][None, None, k], b, acc_O[d])
            warpgroup.commit_group()
            if u + 1 == tile.units:
                break
            raw, ratio = self.load_unit(st, tile, u + 1, ratio)
            if u > 0:
                warpgroup.wait_group(1)
            held[(u + 1) % 2] = self.to_v(raw, ratio)
            if u + 2 == tile.units // 2:
                # behind a use of what ldmatrix read, and behind RoPE's group
                self.parts.loads.free_first_half(st, kst.index)

    # ---------------------------------------------------------------- rows

    @cute.jit
    def write_rows(self, st, results, acc_O, split, rows, half, frees: cutlass.Constexpr = None):
        """Normalised O^T fragment, as ``align`` leaves it, -> rows: fragment rows g and g + 8 are
        d = 2g and 2g + 1 of a block's 16 channels."""
        tidx, _, _ = cute.arch.thread_idx()
        # out of a shuffle, so that no address is made before the tiles, which have the registers
        lane = cute.arch.shuffle_sync(tidx % 32, tidx % 32)
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        inv_s = cute.make_tensor(st.inv.data_ptr(), pad_layout(self.rows_cta))
        channel, step, shared, woven = self.channels.stores(half, wwarp, lane)
        held = []
        for x in cutlass.range_constexpr(self.rows_cta // 4):
            v = 4 * (x // 2) + x % 2
            inverse = inv_s[x, lane % 4]
            runs = {}
            for d in cutlass.range_constexpr(BLOCKS):
                pair = cute.make_rmem_tensor((2,), Float32)
                # in this order: the product of both factors may be too small for fp32
                pair[0], pair[1] = self.pair_of(acc_O, d, v)
                for e in range(2):
                    pair[e] = pair[e] * inverse
                runs[step * d] = pair
            held.append(Held(8 * (x // 2) + x % 2, runs))
        write_rows(results, split, rows, (2 * (lane % 4), channel), held, shared, woven)
        if const_expr(frees is not None):
            cute.arch.sync_warp()
            if lane == 0:
                frees.arrive_empty(st, 0)

    def pair_of(self, acc_O, d: int, v: int):
        """Channels 2 g and 2 g + 1 of a block, without the row's factor."""
        low, high = acc_O[d][v], acc_O[d][v + 2]
        return (low, high) if d + 1 == BLOCKS else (low * SUM_FACTOR, high * SUM_FACTOR)

    @cute.jit
    def align(self, last, half):
        """Bring the last block of O^T to one form, so that one copy of the code writes the rows of
        both halves.  Content (first half) gets the sum factor, which RoPE's P has already; RoPE
        (second half) gets its channels in pairs, as content has them."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = cute.arch.shuffle_sync(tidx % 32, tidx % 32)
        if half == 0:
            for v in cutlass.range_constexpr(self.rows_cta // 2):
                last[v] = last[v] * SUM_FACTOR
        else:
            for x in cutlass.range_constexpr(self.rows_cta // 4):
                v = 4 * (x // 2) + x % 2
                last[v], last[v + 2] = self.as_pairs(last[v], last[v + 2], lane)

    @staticmethod
    def as_pairs(low, high, lane):
        """Channels 2 g and 2 g + 1 of lanes that have g (``low``) and g + 8 (``high``)."""
        upper, out = lane >= 16, []
        for e in range(2):
            source = (lane // 4 * 2 + e) % 8 * 4 + lane % 4
            of_low, of_high = (cute.arch.shuffle_sync(x, source) for x in (low, high))
            out.append(cutlass.select_(upper, of_high, of_low))
        return out
