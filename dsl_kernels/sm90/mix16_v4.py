"""Sparse MLA decode for SM90 over DeepSeek V4's pages of 584 bytes a token, pipeline ``mix16``.

As mix16.py, whose roles these are; a token (cache_records/v4.py) is 448 e4m3 channels with a
power-of-two scale for each 64, and 64 BF16 RoPE channels.  K and V are the same 512 channels.

    S^T = K Q^T     ldmatrix, e4m3 -> f16 times scale / largest scale, both exact; a group of 64
                    channels at a time, one chain for any number of rows; RoPE in BF16 on top
    O^T = V^T P^T   of content as mix16.py; of RoPE in BF16, both operands out of shared memory:
                    16-bit types may lie MN-major there, nothing is converted

Why P is there twice, in f16 and in BF16.  An MMA has one dtype.  e4m3 times a ratio is exact in
f16, and P keeps 11 bits there; BF16 for all of V would cost a conversion more (there is none from
e4m3) and leave P 8 bits.  RoPE in f16 would want sigma to bound it, which takes a maximum over 64
channels a token and moves the ratios of content.  In BF16 it needs no bound; of the 64 RoPE
channels P is rounded to 2^-9, as FlashMLA rounds it for all 512: counted, out's 1 - cosine is
1.4e-6 by the rounding of results alone, + 1.4e-6 in the RoPE channels, so 1.6e-6 of 5e-6 allowed.
P in BF16 is P' / sigma * 2^-40, what the row sums add, so that its O^T needs no factor of its own.

d_v is blocks of 64 channels, of which a warp has 16: the first P.V warpgroup has four blocks of
content, the second three and RoPE.

Timeline of tile i (one stage of the K ring)
    gather        | i+2 ...
    announcer     |  scales i+1 |
    softmax       | Q.K i: 7 x (convert 64 channels, 4 WGMMAs) | RoPE i | vote, exp2 | P i twice ->
                    (of fewer rows 128 channels at once)
    P.V           | V^T of 16 channels | wait P i | (RoPE, 4 WGMMAs) | 2 WGMMAs, convert .. | free i

Registers as mix16.py's.

Shared memory, 64 rows and 3 stages (bytes)
    Q 65536 | K ring 3 x (28672 content + 8192 RoPE + 512 scales + 3968 of theirs) | P 2 x 2 x 8192
    exchange, gamma, factors, 1/l, flags, barriers                                         = 226944
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.tensor_utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from ..common import budget as bud
from ..common.epilogue import Held, Shared, Woven, write_rows
from ..common.gather_v4 import LINES
from ..common.smem import staged
from ..common.types import BF16, U16, U32
from ..compat import wgmma_fence
from ..dims import KV_LORA_RANK as D
from ..dims import QK_ROPE_HEAD_DIM as R
from ..dims import TOKEN_TILE as TILE
from ..smxx.two_list_entry import TwoListEntry, fake_args
from . import mix16, transpose
from .bounds import only_of
from .decode import Decode, infeasible
from .fragments import pad_layout
from .mix16_parts import SUM_FACTOR
from .mix16_v4_parts import STAGE_BYTES, C, V4Parts, V4Softmax, layouts_of
from .mix16_v4_stamps import StampedProducts
from .roles import FEW_ROWS, INV_RING, WARPGROUP, Layouts
from .softmax_role import P_RING, P_STAGES
from .wgmma import issue, tiled_mma

if TYPE_CHECKING:
    from ..spec import VariantSpec

# Of producers, softmax, P.V, by rows
REGISTERS = {16: (40, 152, 160), 32: (40, 152, 160), 64: mix16.REGISTERS[64]}
COLUMN_MAJOR = cutlass.tensor_utils.LayoutEnum.COL_MAJOR
BLOCK = 64  # channels of d_v that a warpgroup's instruction has
BLOCKS = D // 2 // BLOCK  # a P.V warpgroup's
LINE = 128


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    if spec.p_terms > 1:
        return "mix16 has a P of 16 bits: one term"
    if only_of(spec) != "all":
        return "mix16 over V4's pages has no builds for bounds of time"
    return infeasible(spec, 2, budget(spec))


def parts_of(spec: VariantSpec, made: type[V4Parts] = V4Parts) -> V4Parts:
    """What the pipeline is composed of."""
    return made(spec, stages=mix16.stages_of(spec), q_stages=mix16.q_stages(spec))


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    rows, stages = spec.row_tile, mix16.stages_of(spec)
    producer, softmax, pv = REGISTERS[rows]
    tiles = stages * STAGE_BYTES + rows * 2 * (mix16.q_stages(spec) * D + 2 * P_STAGES * TILE)
    return bud.Budget(
        groups=(
            bud.WarpGroup("producers", producer),
            bud.WarpGroup("softmax", softmax),
            bud.WarpGroup("P.V", pv, count=2),
        ),
        smem=tiles + mix16.SMALL_BYTES,
        barriers=(*parts_of(spec).barriers(), *P_RING.budget(), *INV_RING.budget()),
        mmas=(
            bud.Mma("Q.K content", TILE, rows, C, "f16"),
            bud.Mma("Q.K RoPE", TILE, rows, R, "bf16"),
            bud.Mma("P.V content", BLOCK, rows, TILE, "f16"),
            bud.Mma("P.V RoPE", BLOCK, rows, TILE, "bf16"),
        ),
    )


def build(spec: VariantSpec):
    made = StampedV4 if spec.stamps else Mix16V4
    return TwoListEntry(Decode(spec, made(spec))), fake_args(spec)


class Operands(NamedTuple):
    """What P.V multiplies out of shared memory: P^T in f16 and in BF16, V^T's RoPE channels."""

    p: Any
    p_rope: Any
    v_rope: Any


class Tile(NamedTuple):
    """A warpgroup's half of a tile of V.

    Attributes:
        base: pointer to the tile's first byte.
        offset: where the lane's first matrix row lies, in lines and in half lines.
        stage: of the ring.
        half: which; an int.
    """

    base: Any
    offset: Any
    stage: Any
    half: int

    @property
    def blocks(self) -> int:
        """Of content."""
        return BLOCKS - self.half

    @property
    def units(self) -> int:
        """16 channels a warp times 32 tokens."""
        return 2 * self.blocks


class Mix16V4(mix16.Mix16):
    """The pipeline: softmax and P.V roles (``decode.Pipeline``).

    Attributes:
        parts_class, softmax_class: of its members.
    """

    parts_class: Any = V4Parts
    softmax_class: Any = V4Softmax

    def __init__(self, spec: VariantSpec):
        self.parts, self.budget = parts_of(spec, self.parts_class), budget(spec)
        self.rows_cta, self.stages = self.parts.rows, self.parts.stages
        self.softmax = self.softmax_class(self.parts)
        _, self.softmax_regs, self.pv_regs = REGISTERS[self.rows_cta]

    def layouts(self) -> Layouts:
        return layouts_of(self.rows_cta, self.stages, self.parts.q_stages, P_STAGES)

    # ---------------------------------------------------------------- operands of P.V

    def rope_mma(self):
        return tiled_mma(BF16, self.rows_cta, a_mn=True)

    def pv_operands(self, st, layouts):
        tidx, _, _ = cute.arch.thread_idx()
        mma = self.rope_mma()
        thr = mma.get_slice(tidx % WARPGROUP)
        shape = (BLOCK, self.rows_cta, TILE)
        v = staged(st.kr, sm90.make_smem_layout_a(COLUMN_MAJOR, shape, BF16, self.stages))
        return Operands(
            super().pv_operands(st, layouts),
            mma.make_fragment_B(thr.partition_B(staged(st.pr, layouts.p))),
            mma.make_fragment_A(thr.partition_A(v)),
        )

    @staticmethod
    def own_offset(wwarp):
        """(in lines, in half lines); once an item (fp8_etap.py)."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        half = lane * (LINE // 2) + (wwarp ^ (lane // 2 % 4)) * 16
        return tuple(
            cute.arch.shuffle_sync(x, lane) for x in (transpose.lane_offset(wwarp, lane), half)
        )

    def tile(self, st, stage, half, wwarp, offset) -> Tile:
        """The warpgroup's half of a stage."""
        base = st.kc.data_ptr() + cute.assume(stage * (TILE * C), divby=1024)
        return Tile(base, offset, stage, half)

    def load_unit(self, st, tile: Tile, unit: int):
        """32 tokens of 16 channels of a block: four words of two tokens x two channels, and their
        ratios'."""
        kb, d = divmod(unit, tile.blocks)
        block = BLOCKS * tile.half + d
        at, in_lines, in_halves = block // 2 * (TILE * LINE), *tile.offset
        if block // 2 < LINES:
            lane_part, rows = in_lines ^ 64 if block % 2 else in_lines, 32 * LINE
        else:
            lane_part, rows = in_halves, 32 * (LINE // 2)
        ldsm = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), U16)
        p = tile.base + cute.assume(lane_part + (at + kb * rows), divby=16)
        r = cute.make_rmem_tensor((8,), U16)
        cute.copy(ldsm, cute.make_tensor(cute.recast_ptr(p, dtype=U16), cute.make_layout(8)), r)
        return cute.recast_tensor(r, U32), self.load_ratio(st, tile.stage, block, kb)

    def first_unit(self, st, tile: Tile):
        """A fragments of unit 0: what needs no P."""
        return self.to_v(*self.load_unit(st, tile, 0))

    # ---------------------------------------------------------------- P.V

    @cute.jit
    def tiles(self, cta, acc_O, operands, half, span, states, offset, ends):
        """As the base class'; a P.V warpgroup has code for its half, as RoPE is the second's
        alone."""
        kst, pst = states
        if half == 0:
            kst, pst = mix16.Mix16.tiles(
                self, cta, acc_O, operands, 0, span, (kst, pst), offset, ends
            )  # fmt: skip
        else:
            kst, pst = mix16.Mix16.tiles(
                self, cta, acc_O, operands, 1, span, (kst, pst), offset, ends
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
        held, mma = [first, None], self.pv_mma()
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
            loaded = self.load_unit(st, tile, u + 1)
            if u > 0:
                warpgroup.wait_group(1)
            held[(u + 1) % 2] = self.to_v(*loaded)
            if u + 2 == tile.units // 2:
                # behind a use of what ldmatrix read, and behind RoPE's group
                self.parts.loads.free_first_half(st, kst.index)

    @cute.jit
    def write_rows(self, st, results, acc_O, slot, rows, half, frees: cutlass.Constexpr = None):
        """Normalised O^T fragment, as ``align`` leaves it, -> rows: fragment rows g and g + 8 are
        d = 2g and 2g + 1 of a block's 16 channels."""
        tidx, _, _ = cute.arch.thread_idx()
        # out of a shuffle, so that no address is made before the tiles, which have the registers
        lane = cute.arch.shuffle_sync(tidx % 32, tidx % 32)
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        inv_s, g = cute.make_tensor(st.inv.data_ptr(), pad_layout(self.rows_cta)), lane // 4
        own = half * (D // 2) + wwarp * 16
        # the warp's four times 16 channels share an exponent, which four lanes of a row write
        shared = Shared((4, 8, 16), own + BLOCK * g, 1, lane < 16)
        channel, woven = own + 2 * g, None
        if const_expr(self.rows_cta > FEW_ROWS):
            channel, woven = own + lane // 16 * 8, Woven((4, 8), g % 4, BLOCK)
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
                runs[BLOCK * d] = pair
            held.append(Held(8 * (x // 2) + x % 2, runs))
        write_rows(results, slot, rows, (2 * (lane % 4), channel), held, shared, woven)
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
        """RoPE's block of O^T as content's are, whose sum factor that has: rows are written by one
        code for both halves, which is fetched once."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = cute.arch.shuffle_sync(tidx % 32, tidx % 32)
        if half == 0:
            for v in cutlass.range_constexpr(self.rows_cta // 2):
                last[v] = last[v] * SUM_FACTOR
        else:
            for x in cutlass.range_constexpr(self.rows_cta // 4):
                v = 4 * (x // 2) + x % 2
                last[v], last[v + 2] = self.neighbours(last[v], last[v + 2], lane)

    @staticmethod
    def neighbours(low, high, lane):
        """Channels 2 g and 2 g + 1 of lanes that have g (``low``) and g + 8 (``high``)."""
        upper, out = lane >= 16, []
        for e in range(2):
            source = (lane // 4 * 2 + e) % 8 * 4 + lane % 4
            of_low, of_high = (cute.arch.shuffle_sync(x, source) for x in (low, high))
            out.append(cutlass.select_(upper, of_high, of_low))
        return out


class StampedV4(StampedProducts, Mix16V4):
    """``Mix16V4`` that records its items' events."""
