"""FP8 MLA decode for SM90, pipeline ``etap``: O^T = V^T P^T with V^T as the *register* operand.

Idea: FlashMLA-ETAP's transposition, so that N is the number of query rows and few rows do not pay
for 64; numerics of SnapMLA (per-token scales, block-wise P), with fp32 promotion of every token
tile (docs/numerics.md).  V^T never goes back to shared memory: ldmatrix.trans + prmt turn the K
tile into A fragments (transpose.py).

Roles (4 warpgroups of 128 threads)
    wg 0  warp 0  KV producer     TMA: content, RoPE, scales of a 64-token tile into a free stage
          warp 1  Q producer      TMA: the row tile of each work tile
          warp 2  scale warp      sigma_k -> sigma, log2 sigma, 1/sigma in fragment order
                                  (64 rows only; with few rows a thread has just two tokens)
    wg 1          softmax         S = Q K^T, or S^T = K Q^T for <= 32 rows; block softmax, P8 to
                                  shared memory (fp8/rows_on_m.py, fp8/swap_ab.py)
    wg 2, 3       P.V             O^T += beta * (V^T P8^T), half of d_v each, beta in fp32

Timeline of tile i (one stage of the K ring)
    KV producer   |TMA i+3 ...
    scale warp    |  sigma i+1 |
    softmax       | max, exp2, e4m3 of i, Q.K i+1 under it (64 rows; else Q.K i | softmax i)
    P.V           |  V^T frags i | wait P i | 4 x (WGMMA 64 channels, FFMA into O) | V^T frags i+1

Exponents (log2 units).  A block has its own exponent reference m'_b = max_t(s2 + log2 sigma_k), so
its largest P' is 2^8 whatever the row's running maximum is.  O and l are relative to ``m_ref``,
which is *lazy*: it moves only when a block would exceed it by 2^20, so the usual step is one FFMA
an element, O += beta * tmp with beta = 2^(m'_b - 8 - m_ref), and no rescale; nothing overflows
however block maxima rise and fall.

Registers, 64 rows: softmax 112 (fp8/rows_on_m.py), P.V 184 (O 128, beta 16, product tile 16: rows
are taken in halves of 32).

Shared memory, 64 rows and 4 stages (bytes)
    Q 40960 | K ring 4 x (32768 content + 8192 RoPE + 256 scales) | scale triples 4 x 960
    P 2 x 4096 | beta, gamma, flags, 1/l, barriers                                = 220160
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...blocks import budget as bud
from ...blocks.compat import wgmma_fence
from ...blocks.registers import claim_registers
from ...blocks.smem import staged, struct_of
from ...blocks.types import F8, ROW_MAJOR
from ...combine.epilogue import Held, Shared, Woven, write_rows
from ...entry.entries import Fp8Entry
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import QK_ROPE_HEAD_DIM as R
from ...formats.dims import TOKEN_TILE as TILE
from ...formats.stamp import Stamp
from .. import transpose
from ..decode import Decode, infeasible
from ..fragments import pad_layout, padded_size
from ..p_terms import order, stage_of
from ..qk import QK_GROUPS
from ..roles import INV_RING, K_READERS, Q_READERS, SWAP_AB_ROWS, WARPGROUP, Barrier, Cta, Layouts
from ..wgmma import issue, tiled_mma
from ..work_tile_notes import noted
from .fp8_parts import SMALL_BYTES, STAGE_BYTES, Parts
from .rows_on_m import RowsOnMSoftmax
from .softmax_role import P_RING, P_STAGES, any_flag, hand_over_fields
from .swap_ab import SwapAbSoftmax

if TYPE_CHECKING:
    from ...spec import VariantSpec

# Of the K ring, unless the spec says otherwise.  Few rows free a stage soon, and with four tiles in
# flight DRAM gives less than with three (docs/lab-book.md).
STAGES, SWAP_AB_STAGES = 4, 3


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    if spec.p_terms > 1 and spec.row_tile > SWAP_AB_ROWS:
        return (
            f"etap has two terms of P in row tiles up to {SWAP_AB_ROWS}; the softmax of 64 rows "
            "has no registers for them"
        )
    return infeasible(spec, 2, budget(spec))


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    swap_ab, rows, stages = spec.row_tile <= SWAP_AB_ROWS, min(spec.row_tile, 64), stages_of(spec)
    # setmaxnreg hands out one pool of 65536 registers: 128, 128 and 256 threads
    producer, softmax, pv = (40, 120, 160) if swap_ab else (32, 112, 184)
    p_tiles = P_STAGES * spec.p_terms * rows * TILE
    tiles = stages * STAGE_BYTES + q_stages(spec) * rows * 640 + p_tiles
    m, n = (TILE, rows) if swap_ab else (rows, TILE)  # S^T = K Q^T or S = Q K^T
    return bud.Budget(
        groups=(
            bud.WarpGroup("producers", producer),
            bud.WarpGroup("softmax", softmax),
            bud.WarpGroup("P.V", pv, count=2),
        ),
        smem=tiles + (SMALL_BYTES // 2 if swap_ab else SMALL_BYTES),  # no scale triples
        barriers=(*parts_of(spec).barriers(), *P_RING.budget(), *INV_RING.budget()),
        mmas=(
            bud.Mma("Q.K content", m, n, D // QK_GROUPS, "e4m3", under_softmax=not swap_ab),
            bud.Mma("Q.K RoPE", m, n, R, "bf16", under_softmax=not swap_ab),
            bud.Mma("P.V", 64, min(rows, 32), TILE * spec.p_terms, "e4m3"),
        ),
    )


def stages_of(spec: VariantSpec) -> int:
    """KV tiles in flight."""
    return spec.stages or (SWAP_AB_STAGES if spec.row_tile <= SWAP_AB_ROWS else STAGES)


def q_stages(spec: VariantSpec) -> int:
    """Row tiles of Q in flight: the next work tile's is prefetched where there is room."""
    return 2 if spec.row_tile <= SWAP_AB_ROWS and stages_of(spec) <= STAGES else 1


def parts_of(spec: VariantSpec) -> Parts:
    """Components of the pipeline: for gathered tokens if the op is ``sparse_decode``, and without a
    scale warp if rows are ``SWAP_AB_ROWS`` or fewer."""
    swap_ab = spec.row_tile <= SWAP_AB_ROWS
    return Parts(
        spec, stages=stages_of(spec), q_stages=q_stages(spec), q_readers=Q_READERS,
        k_readers=K_READERS, swap_ab=swap_ab, scale_warp=not swap_ab,
        gathers=spec.op == "sparse_decode",
    )  # fmt: skip


def build(spec: VariantSpec):
    return Fp8Entry.exported(Decode(spec, Etap(spec)))


class Etap:
    """The pipeline: softmax and P.V roles (``decode.Pipeline``)."""

    def __init__(self, spec: VariantSpec):
        swap_ab = spec.row_tile <= SWAP_AB_ROWS  # S^T = K Q^T
        self.parts, self.budget = parts_of(spec), budget(spec)
        self.rows_cta, self.stages = self.parts.rows, self.parts.stages
        self.p_terms = spec.p_terms
        # rows of one P.V product tile: halves of 64, because O takes 128 registers and S is in two
        self.pv_rows = min(self.rows_cta, 32)
        self.names = transpose.TOKENS_ON_M if swap_ab else transpose.ROWS_ON_M
        self.softmax = SwapAbSoftmax(self.parts) if swap_ab else RowsOnMSoftmax(self.parts)
        _, self.softmax_regs, self.pv_regs = (group.registers for group in self.budget.groups)

    # ---------------------------------------------------------------- host half

    def layouts(self) -> Layouts:
        stages = P_STAGES * self.p_terms
        p = sm90.make_smem_layout_b(ROW_MAJOR, (64, self.rows_cta, TILE), F8, stages)
        return Layouts(*self.parts.score.layouts(self.parts.q_stages, self.stages), p)

    def pv_mma(self):
        return tiled_mma(F8, self.pv_rows, a_in_registers=True)

    def storage(self, layouts):
        return struct_of(
            **self.parts.barrier_fields,
            **hand_over_fields(self.rows_cta),
            **self.softmax.fields(self.rows_cta),
            **self.parts.tile_fields(layouts),
        )

    # ---------------------------------------------------------------- roles

    @cute.jit
    def init_barriers(self, st):
        P_RING.init(st)
        self.parts.triples.ready.init(st)
        INV_RING.init(st)

    @cute.jit
    def math_roles(self, cta, wg):
        if wg == 0:
            claim_registers(self.budget, self.softmax_regs)
            self.softmax.loop(cta)
        else:
            claim_registers(self.budget, self.pv_regs)
            self.pv_loop(cta, wg - 1)

    # ---------------------------------------------------------------- P.V warpgroups

    @cute.jit
    def pv_loop(self, cta: Cta, half):
        tidx, _, _ = cute.arch.thread_idx()
        st, layouts, _, k_pipe, gmem, call, part = cta
        span = self.parts.work.work_tiles_of(gmem.work, part)
        mma_o = self.pv_mma()
        acc_O = [cute.make_rmem_tensor((self.rows_cta // 2,), Float32) for _ in range(4)]
        tmp = cute.make_rmem_tensor(mma_o.partition_shape_C((64, self.pv_rows)), Float32)
        thr_o, s_p = mma_o.get_slice(tidx % WARPGROUP), staged(st.p, layouts.p)
        rP = [
            mma_o.make_fragment_B(
                thr_o.partition_B(cute.local_tile(s_p, (self.pv_rows, TILE), (x, 0, None)))
            )
            for x in range(self.rows_cta // self.pv_rows)
        ]
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        pst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, P_STAGES)
        work_tiles = Int32(0)  # behind us
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, split = self.parts.work.work_tile_at(gmem.work, i)
            rows = self.parts.work.rows_at(gmem.work, call, i, batch, self.rows_cta)
            seqlen = self.parts.work.seqlen_of(gmem.work, batch)
            ragged_from = self.parts.work.ragged_from(gmem.work, call, batch, rows)
            # Once a work tile, not a tile: ptxas computes anew what is cheap, but not what comes
            # out of a shuffle.  Before V's first fetch of each tile that cost 7 % of the time.
            offset = cute.arch.shuffle_sync(transpose.own_offset(wwarp, tidx % 32), tidx % 32)
            for d_block in cutlass.range_constexpr(4):
                acc_O[d_block].fill(0.0)
            for tile in cutlass.range(first, last, unroll=1):
                k_pipe.consumer_wait(kst)
                if (tile + 1) * TILE > ragged_from:
                    # whatever lies past the end, or under a NaN scale, must not meet P = 0;
                    # P being there means that Q.K has read the rows
                    P_RING.wait_full(st, pst.index, pst.phase)
                    self.parts.scales.zero_values(
                        st, kst.index, seqlen - tile * TILE, 2 * half, 2, Barrier.PV + half
                    )
                self.pv_block(st, k_pipe, acc_O, tmp, rP, half, kst, pst, offset)
                kst.advance()
                pst.advance()
            self.parts.stamps.put(gmem.results, Stamp.PRODUCTS_END, half == 0)
            INV_RING.wait_full(st, 0, work_tiles & 1)
            if const_expr(not self.parts.swap_ab):  # across the tiles they would take registers
                split, rows = noted(st, work_tiles, wwarp, self.rows_cta)
            self.write_rows(st, gmem.results, acc_O, split, rows, half)
            self.parts.stamps.put(gmem.results, Stamp.ROWS_WRITTEN + half)
            work_tiles += 1

    @cute.jit
    def pv_block(self, st, k_pipe, acc_O, tmp, rP, half, kst, pst, offset):
        """O^T += beta * (V^T P8^T) of one tile and all terms of P, 64 channels at a time."""
        tidx, _, _ = cute.arch.thread_idx()
        mma_o = self.pv_mma()
        lane, n = tidx % 32, self.rows_cta // 2
        at = kst.index * (TILE * D) + half * (D // 2 * TILE)
        base = st.kc.data_ptr() + cute.assume(at, divby=1024)
        size = padded_size(self.rows_cta)
        raw = [transpose.load_own(base, offset, d) for d in range(2)] + [None] * 2
        frags = [transpose.to_fragment(mma_o, raw[0], self.names)] + [None] * 3
        P_RING.wait_full(st, pst.index, pst.phase)
        pad = pad_layout(self.rows_cta)
        beta = cute.make_rmem_tensor((self.rows_cta // 4,), Float32)
        if cute.arch.make_warp_uniform(any_flag(st, pst.index)) != 0:
            gamma_s = cute.make_tensor(st.gamma.data_ptr() + pst.index * size, pad)
            for v in cutlass.range_constexpr(n):
                ga = gamma_s[2 * (v // 4) + v % 2, lane % 4]
                for d in cutlass.range_constexpr(4):
                    acc_O[d][v] = acc_O[d][v] * ga
        at = cute.assume(pst.index * size, divby=4)
        beta_s = cute.make_tensor(st.beta.data_ptr() + at, pad)
        self.issue_pv(mma_o, tmp, frags[0], rP[0], pst.index)
        cute.autovec_copy(beta_s[None, lane % 4], beta)
        parts, n_tmp = len(rP), self.pv_rows // 2
        for step in cutlass.range_constexpr(4 * parts):
            d, x = step // parts, step % parts
            warpgroup.wait_group(0)
            # the fragment after next travels during the FFMAs, the next WGMMA and its FFMAs
            if const_expr(x == parts - 1 and d < 2):
                raw[d + 2] = transpose.load_own(base, offset, d + 2)
            if const_expr(x == parts - 1 and d == 2):
                k_pipe.consumer_release(kst)
            for v in cutlass.range_constexpr(n_tmp):
                o = x * n_tmp + v
                acc_O[d][o] = acc_O[d][o] + tmp[v] * beta[2 * (o // 4) + o % 2]
            if const_expr(step + 1 < 4 * parts):
                if const_expr(x == parts - 1):
                    frags[d + 1] = transpose.to_fragment(mma_o, raw[d + 1], self.names)
                self.issue_pv(
                    mma_o, tmp, frags[(step + 1) // parts], rP[(step + 1) % parts], pst.index
                )
        cute.arch.sync_warp()
        if lane == 0:
            P_RING.arrive_empty(st, pst.index)

    def issue_pv(self, mma_o, tmp, frag, rP, buf):
        wgmma_fence()
        for i, term in enumerate(order(self.p_terms)):
            stage = stage_of(buf, term, self.p_terms)
            issue(mma_o, tmp, frag, rP[None, None, None, stage], accumulate=i > 0)
        warpgroup.commit_group()

    @cute.jit
    def write_rows(self, st, results, acc_O, split, rows, half):
        """Normalised O^T fragment -> rows: fragment rows g and g + 8 are d = 2g and 2g + 1 of 16
        channels, of which a warp has four times as many, one after the other."""
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        inv_s = cute.make_tensor(st.inv.data_ptr(), pad_layout(self.rows_cta))
        own = half * (D // 2) + wwarp * 64
        shared = Shared((4, 8, 16), own, 4, lane < 4)  # the warp's 64 channels have one exponent
        channel, woven = own + 2 * (lane // 4), None
        if const_expr(not self.parts.swap_ab):  # few stores take less time than their shuffles
            channel, woven = own + lane // 16 * 8, Woven((4, 8), lane // 4 % 4, 16)
        held = []
        for x in cutlass.range_constexpr(self.rows_cta // 4):
            v = 4 * (x // 2) + x % 2
            inverse = inv_s[x, lane % 4]
            runs = {}
            for d in cutlass.range_constexpr(4):
                pair = cute.make_rmem_tensor((2,), Float32)
                pair[0], pair[1] = acc_O[d][v] * inverse, acc_O[d][v + 2] * inverse
                runs[16 * d] = pair
            held.append(Held(8 * (x // 2) + x % 2, runs))
        at = (2 * (lane % 4), channel)
        write_rows(results, split, rows, at, held, shared, woven)
        cute.arch.sync_warp()
        if lane == 0:
            INV_RING.arrive_empty(st, 0)
