"""The softmax warpgroup of ``mix16``: S^T = K Q^T with K out of the ring's bytes, P^T in f16.

Tokens lie on M for any number of rows: K is the register operand, which is converted on its way.

    64 rows     one chain over the content, K times the token's ratios in f16 (mix16_parts.py); its
                sum times sigma in fp32, RoPE on top
    fewer       a sum for each group of 128 channels, K exact; times the groups' scales in fp32, and
                RoPE in a chain of its own

Hand-over of a block to P.V, in one of ``P_STAGES`` buffers: P^T in f16, factors gamma of its rows,
and a byte a warp that says whether an m_ref moved.  Where some value of the CTA would pass 2^15,
m_refs move (mix16_m_ref.py): the four warps vote, and only then are maxima taken.  A row whose own
maximum stays below is left as it is (its gamma is 1), so that no row feels another.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from ...blocks.barriers import warps_meet
from ...blocks.compat import wgmma_fence
from ...blocks.smem import array, staged
from ...blocks.types import BF16, F16, U16, U32
from ...combine.online_softmax import NEVER
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import TOKEN_TILE as TILE
from ...formats.ds_mla import GROUPS
from ...formats.stamp import Stamp
from ..block_softmax import store_words_of_p
from ..fp8.softmax_role import P_RING, P_STAGES, flags_of
from ..fragments import TokensOnM, pad_layout
from ..online_softmax import HEADROOM
from ..roles import FEW_ROWS, SOFTMAX_WARPS, WARPGROUP, Barrier
from ..wgmma import issue, tiled_mma
from ..work_tile_notes import note, noted
from .mix16_m_ref import RowReferences
from .mix16_parts import CONVERTED, CONVERTED_THREADS, Parts, times, unpack

STEPS = D // 16  # k steps over the content
UNIT_STEPS = {16: 8, 32: 4, 64: 4}  # k steps that are converted at once, by rows


class MixSoftmax(RowReferences):
    """The role.

    Attributes:
        parts: what the pipeline is composed of.
        fragment: which rows and tokens a thread holds.
        rows_cta: query rows of the CTA.
        units: k steps over the content that are converted at once.
        rope: whether K has RoPE beside content.
        ending: of the tile that is being compiled, (stage of Q, whether it is the work tile's
            last).
    """

    rope = True
    ending: Any = None

    def __init__(self, parts: Parts):
        self.parts, self.rows_cta = parts, parts.rows
        self.fragment, self.few_rows = TokensOnM(parts.rows), parts.rows <= FEW_ROWS
        steps = UNIT_STEPS[parts.rows]
        self.units = [range(k, k + steps) for k in range(0, STEPS, steps)]

    @property
    def first_units(self) -> int:
        """Number of ``units`` in the first half of Q's channels."""
        return sum(steps[-1] < STEPS // 2 for steps in self.units)

    def fields(self) -> dict:
        """Storage: maxima and sums of the warps; a byte for each warp's vote and buffer; m_refs."""
        return dict(
            **self.m_ref_fields(),
            votes=array(cutlass.Uint8, SOFTMAX_WARPS * P_STAGES, 16),
        )

    def init(self, st) -> None:
        """Barriers of the role's own, by one thread: none."""

    # ---------------------------------------------------------------- work tiles

    @cute.jit
    def loop(self, cta):
        """The role, from the first work tile to the last."""
        tidx, _, _ = cute.arch.thread_idx()
        wwarp = cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        n_rows, gmem = const_expr(self.fragment.rows), cta.gmem
        l_run = cute.make_rmem_tensor((n_rows,), Float32)
        tools = self.tools(cta.st, cta.layouts)
        consumer = pipeline.PipelineUserType.Consumer
        qst = pipeline.make_pipeline_state(consumer, self.parts.q_stages)
        kst = pipeline.make_pipeline_state(consumer, self.parts.stages)
        blocks, work_tiles = Int32(0), Int32(0)  # behind us
        span = self.parts.work.work_tiles_of(gmem.work, cta.part)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, first, last, split = self.parts.work.work_tile_at(gmem.work, i)
            rows = self.parts.work.witnessed_rows_at(gmem.work, cta.call, i, batch, self.rows_cta)
            note(cta.st, work_tiles, wwarp, split, rows)
            facts = self.begin_work_tile(cta, qst, batch, rows, l_run, wwarp)
            kst, blocks = self.tiles(cta, tools, (first, last), (qst, kst, blocks), l_run, facts)
            self.end_queries(cta, qst)
            qst.advance()
            self.parts.stamps.put(gmem.results, Stamp.SOFTMAX_END)
            split, rows = noted(cta.st, work_tiles, wwarp, self.rows_cta)
            self.finish_rows(cta, (work_tiles & 1) ^ 1, l_run, split, rows)
            work_tiles += 1

    def begin_work_tile(self, cta, qst, batch, rows, l_run, wwarp):
        """References (``m_ref``) and sums of the work tile's rows, and Q, which P.V's warps
        convert; all warps of the role have met then.  Returns what ``block`` must know of the work
        tile."""
        self.begin_m_refs(cta.st)
        l_run.fill(0.0)
        limits, facts = self.parts.limits, None
        if limits is not None:
            facts = limits.facts(cta, self.parts.work, batch, rows)
        cute.arch.barrier(barrier_id=CONVERTED, number_of_threads=CONVERTED_THREADS)
        return facts

    @cute.jit
    def free_queries(self, cta, qst, wanted):
        """Frees Q's stage if ``wanted``: behind the last tile's Q.K, or of a work tile without
        tiles. The next work tile's Q is on its way while that tile's softmax and the row sums are
        computed."""
        if wanted:
            cta.q_pipe.consumer_release(qst)

    def free_first_half(self, st, wanted) -> None:
        """The same of the first half of Q's channels alone, if ``wanted``, without a branch."""
        tidx, _, _ = cute.arch.thread_idx()
        chosen = cutlass.select_((tidx % 32 == 0) & wanted, Int32(1), Int32(0))
        self.parts.q_tiles.free_first_half(st, chosen)

    def end_queries(self, cta, qst) -> None:
        """Behind a work tile's tiles: nothing."""

    @cute.jit
    def tiles(self, cta, tools, span, states, l_run, facts):
        """Tiles ``span`` of a work tile; returns the next states of the ring and of P."""
        qst, kst, blocks = states
        fresh = Int32(1)  # no token has been seen
        self.free_first_half(cta.st, span[0] >= span[1])
        self.free_queries(cta, qst, span[0] >= span[1])
        for tile in cutlass.range(span[0], span[1], unroll=1):
            self.tile_begins(blocks, tile > span[0])
            cta.k_pipe.consumer_wait(kst)
            self.parts.stamps.put(cta.gmem.results, Stamp.FIRST_TILE, kst.count == 0)
            self._end_with(qst, tile + 1 == span[1])
            fresh = self.block(cta, tools, qst, kst, blocks, fresh, l_run, tile, facts)
            kst.advance()
            blocks += 1
        self.tiles_end(cta.st, blocks, span[0] < span[1])
        return kst, blocks

    def tile_begins(self, blocks, follows) -> None:
        """In front of the wait for a tile, whose P is the ``blocks``-th; ``follows``: whether
        another of the work tile is before it.  Nothing."""

    def scores_issued(self, st) -> None:
        """When all of a tile's Q.K has been issued: nothing."""

    def tiles_end(self, st, blocks, some) -> None:
        """Behind a work tile's tiles, if there are ``some``: nothing."""

    def _end_with(self, *ending) -> None:
        """No loop may assign it: what it assigns goes from tile to tile."""
        self.ending = ending

    def score_mma(self):
        return tiled_mma(F16, self.rows_cta, a_in_registers=True)

    def rope_mma(self):
        return tiled_mma(BF16, self.rows_cta)

    def tools(self, st, layouts):
        """Descriptors of Q's content; of RoPE of K and Q."""
        tidx, _, _ = cute.arch.thread_idx()
        mma_c, mma_r = tiled_mma(F16, self.rows_cta), self.rope_mma()
        thr_c, thr_r = (m.get_slice(tidx % WARPGROUP) for m in (mma_c, mma_r))
        return (
            mma_c.make_fragment_B(thr_c.partition_B(self.content_of_q(st, layouts))),
            mma_r.make_fragment_A(thr_r.partition_A(staged(st.kr, layouts.k[1]))),
            mma_r.make_fragment_B(thr_r.partition_B(staged(st.qr, layouts.q[1]))),
        )

    def content_of_q(self, st, layouts):
        """Q's content in f16."""
        content = cute.recast_ptr(st.qc.data_ptr(), layouts.q[0].inner, dtype=F16)
        return cute.make_tensor(content, layouts.q[0].outer)

    # ---------------------------------------------------------------- S^T

    def load_k(self, st, stage, wwarp, lane, unit: int, ahead=0):
        """Bytes of a unit's channels of the warp's 16 tokens, as ldmatrix deals them out.

        ``ahead``: bytes from the tile's first channels to the warpgroup's.
        """
        ldsm = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), U16)
        row = wwarp * 16 + lane % 16
        base = st.kc.data_ptr().toint() + stage * (TILE * D) + ahead
        raws = []
        for chunk in self.units[unit][::2]:  # of 16 channels
            line = base + chunk // 8 * (TILE * 128) + row * 128
            at = line + (((lane // 16 + chunk % 8) ^ (row % 8)) * 16)
            source = cute.make_ptr(U16, at, cute.AddressSpace.smem, assumed_align=16)
            loaded = cute.make_rmem_tensor((8,), U16)
            cute.copy(ldsm, cute.make_tensor(source, cute.make_layout(8)), loaded)
            raws.append(cute.recast_tensor(loaded, U32))
        return raws

    def to_k(self, raws, ratio):
        """A fragments of them; ``ratio``: of ``load_ratio``, or None."""
        mma = self.score_mma()
        frag = mma.make_fragment_A(mma.partition_shape_A((64, 32 * len(raws))))
        words = cute.recast_tensor(frag, U32)
        for x, raw in enumerate(raws):
            for y in range(2):
                at = 8 * x + 4 * y
                for e in range(2):  # token g, token g + 8
                    pair = unpack(raw[2 * y + e])
                    if ratio is not None:
                        own = self.ratio_of(ratio, x)[e]
                        pair = [times(word, own) for word in pair]
                    words[at + e], words[at + e + 2] = pair
        return frag

    def load_ratio(self, own, stage, token, unit: int, held=None):
        """Words by which the thread's two tokens are multiplied in a unit's channels; ``held``:
        those of the unit before."""
        group = self.group_of(unit)
        if held is not None and group == self.group_of(unit - 1):
            return held
        return [own[group, token + 8 * e, stage] for e in range(2)]

    def ratio_of(self, ratio, x: int):
        """Return ``ratio`` as it is: all channels of a unit are of one group, whatever ``x`` is."""
        return ratio

    @staticmethod
    def operands(tools, q_stage, stage):
        """Q's content, RoPE of K and of Q, of their stages."""
        stages = (q_stage, stage, q_stage)
        return [x[None, None, None, s] for x, s in zip(tools, stages, strict=True)]

    def accumulator(self):
        return cute.make_rmem_tensor(
            self.rope_mma().partition_shape_C((64, self.rows_cta)), Float32
        )

    def issue_unit(self, acc, frag, rQ, unit: int, accumulate: bool):
        """A unit's WGMMAs, committed."""
        mma = self.score_mma()
        wgmma_fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, accumulate)
        for k, step in enumerate(self.units[unit]):
            cute.gemm(atom, acc, frag[None, None, k], rQ[None, None, step], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def issue_rope(self, acc, rKr, rQr, accumulate: bool) -> None:
        """RoPE's WGMMAs, committed."""
        wgmma_fence()
        issue(self.rope_mma(), acc, rKr, rQr, accumulate=accumulate)
        warpgroup.commit_group()

    def group_of(self, unit: int) -> int:
        """The group of a unit's channels."""
        return self.units[unit][0] // (STEPS // GROUPS)

    def issue_of_group(self, sums, frag, rQ, unit: int) -> None:
        """A unit's WGMMAs to the sum of its group."""
        group = self.group_of(unit)
        follows = unit > 0 and group == self.group_of(unit - 1)
        self.issue_unit(sums[group], frag, rQ, unit, follows)

    @cute.jit
    def scores(self, st, tools, q_stage, stage, wwarp, lane, sigma):
        """S^T of 64 rows: content over sigma in one chain, times sigma, RoPE on top."""
        rQ, rKr, rQr = self.operands(tools, q_stage, stage)
        units = const_expr(len(self.units))
        t, token = self.accumulator(), wwarp * 16 + lane // 4
        own = self.parts.scales.own(st)
        ratio = self.load_ratio(own, stage, token, 0)
        raws = self.load_k(st, stage, wwarp, lane, 0)
        held = [self.to_k(raws, ratio), None]
        raws = self.load_k(st, stage, wwarp, lane, 1)
        for u in cutlass.range_constexpr(units):
            self.issue_unit(t, held[u % 2], rQ, u, u > 0)
            if const_expr(u + 1 < units):
                ratio = self.load_ratio(own, stage, token, u + 1, ratio)
                if const_expr(u > 0):
                    warpgroup.wait_group(1)
                if const_expr(u == self.first_units):
                    self.free_first_half(st, self.ending[1])
                held[(u + 1) % 2] = self.to_k(raws, ratio)
                if const_expr(u + 2 < units):
                    raws = self.load_k(st, stage, wwarp, lane, u + 2)
        warpgroup.wait_group(0)
        for v in cutlass.range_constexpr(self.fragment.values):
            t[v] = t[v] * sigma[self.fragment.token(v)]
        if const_expr(self.rope):
            self.issue_rope(t, rKr, rQr, True)
            self.scores_issued(st)
            warpgroup.wait_group(0)
        return t

    @cute.jit
    def scores_by_group(self, st, tools, q_stage, stage, wwarp, lane):
        """S^T of few rows: a sum a group, times its scale, and RoPE's."""
        rQ, rKr, rQr = self.operands(tools, q_stage, stage)
        units = const_expr(len(self.units))
        sums, t = [self.accumulator() for _ in range(GROUPS)], self.accumulator()
        raws = self.load_k(st, stage, wwarp, lane, 0)
        if const_expr(self.rope):
            self.issue_rope(t, rKr, rQr, False)
        else:
            t.fill(0.0)
        held = [self.to_k(raws, None), None]
        raws = self.load_k(st, stage, wwarp, lane, 1)
        for u in cutlass.range_constexpr(units):
            self.issue_of_group(sums, held[u % 2], rQ, u)
            if const_expr(u + 1 < units):
                if const_expr(u > 0):
                    warpgroup.wait_group(1)
                if const_expr(u == self.first_units):
                    self.free_first_half(st, self.ending[1])
                held[(u + 1) % 2] = self.to_k(raws, None)
                if const_expr(u + 2 < units):
                    raws = self.load_k(st, stage, wwarp, lane, u + 2)
        scale = self.scales_of(st, stage)
        warpgroup.wait_group(0)
        for v in cutlass.range_constexpr(self.fragment.values):
            for g in cutlass.range_constexpr(GROUPS):
                t[v] = t[v] + sums[g][v] * scale[self.fragment.token(v)][g]
        return t

    def scales_of(self, st, stage):
        """The groups' scales of the thread's two tokens."""
        tidx, _, _ = cute.arch.thread_idx()
        token = tidx % WARPGROUP // 32 * 16 + tidx % 32 // 4
        scales, out = self.parts.scales.of_tokens(st), []
        for e in range(2):
            four = cute.make_rmem_tensor((GROUPS,), Float32)
            cute.autovec_copy(scales[None, token + 8 * e, stage], four)
            out.append(four)
        return out

    def facts_of(self, st, stage, token):
        """((log2 sigma, 2^-40 / sigma, K's sigma), some).  Each of the three is a list for tokens
        ``token`` and ``token + 8``; ``some`` is 1.0 if the tile has a token, else 0.0."""
        facts, log, inverse, sigma, some = self.parts.scales.facts(st), [], [], [], None
        for e in range(2):
            four = cute.make_rmem_tensor((4,), Float32)
            cute.autovec_copy(facts[None, token + 8 * e, stage], four)
            log.append(four[0])
            inverse.append(four[1])
            sigma.append(four[2])
            some = four[3]
        return (log, inverse, sigma), some

    def free_stage(self, cta, kst) -> None:
        """Both halves, and behind the last tile Q's; one lane tells for all, whose reads come
        first."""
        self.parts.free_first_half(cta.st, kst.index)
        cta.k_pipe.consumer_release(kst)
        self.free_queries(cta, *self.ending)

    # ---------------------------------------------------------------- P^T

    @cute.jit
    def block(self, cta, tools, qst, kst, blocks, fresh, l_run, tile, facts):
        """S^T -> P^T of one tile; returns the next ``fresh``."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, wwarp = tidx % 32, cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        row, token, buf = self.fragment.row, self.fragment.token, blocks & 1
        st = cta.st
        (log, inverse, sigma), some = self.facts_of(st, kst.index, wwarp * 16 + lane // 4)
        if const_expr(self.few_rows):
            t = self.scores_by_group(st, tools, qst.index, kst.index, wwarp, lane)
        else:
            t = self.scores(st, tools, qst.index, kst.index, wwarp, lane, sigma)
        self.free_stage(cta, kst)
        first = cute.arch.make_warp_uniform(
            Int32(cutlass.select_(some > Float32(0.0), fresh, Int32(0)))
        )
        top = Float32(NEVER)
        factor = cute.make_rmem_tensor((self.fragment.rows,), Float32)
        factors = cute.make_tensor(st.factors.data_ptr(), pad_layout(self.rows_cta))
        cute.autovec_copy(factors[None, lane % 4], factor)
        m_ref = cute.make_rmem_tensor((self.fragment.rows,), Float32)
        cute.autovec_copy(self.m_refs_of(st), m_ref)
        for v in cutlass.range_constexpr(self.fragment.values):
            t[v] = t[v] * factor[row(v)] + (log[token(v)] - m_ref[row(v)])
            if const_expr(self.parts.limits is None):
                top = cute.arch.fmax(top, t[v])
        if const_expr(self.parts.limits is not None):
            self.parts.limits.hide(st, t, self.fragment, tile, facts, wwarp, lane)
            for v in cutlass.range_constexpr(self.fragment.values):
                top = cute.arch.fmax(top, t[v])
        self.give(st, t, top > HEADROOM, inverse, first, (blocks, buf), l_run)
        return fresh - first

    def give(self, st, t, wanted, inverse, first, at, l_run) -> None:
        """P^T of ``t``, the values relative to their rows' m_ref, to P.V, its sums to the rows';
        m_refs move before that if ``first`` or some thread's ``wanted``.

        Args:
            at: how many P are behind us, and the buffer.
        """
        tidx, _, _ = cute.arch.thread_idx()
        lane, wwarp = tidx % 32, cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        blocks, buf = at
        moves = self.vote(st, wanted, buf, wwarp, lane) | first
        self.hand_over(st, t, inverse, moves, first, blocks, l_run)

    @cute.jit
    def hand_over(self, st, t, inverse, moves, first, blocks, l_run):
        """P^T of ``t``, the values relative to their rows' m_ref, to P.V, and its sums to the
        rows'; m_refs move before it where the warps have voted for it."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, wwarp = tidx % 32, cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        buf = blocks & 1
        P_RING.wait_empty(st, buf, (blocks >> 1 & 1) ^ 1)
        if moves != 0:
            self.move_m_refs(st, t, buf, first, l_run, wwarp, lane)
        for x in cutlass.range_constexpr(self.fragment.rows):
            v = 4 * (x // 2) + x % 2
            t[v] = cute.math.exp2(t[v], fastmath=True)
            t[v + 2] = cute.math.exp2(t[v + 2], fastmath=True)
            l_run[x] = l_run[x] + (t[v] * inverse[0] + t[v + 2] * inverse[1])
        base = st.p.data_ptr().toint() + buf * (self.rows_cta * TILE * 2)
        self.store_p(base, t, wwarp, lane)
        self.store_more(st, t, inverse, buf, wwarp, lane)
        if lane == 0:
            flags_of(st)[wwarp, buf] = cutlass.Uint8(1) if moves != 0 else cutlass.Uint8(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane == 0:
            P_RING.arrive_full(st, buf)

    @cute.jit
    def vote(self, st, wanted, buf, wwarp, lane):
        """The warps' votes as a word, the same in all of them."""
        votes = st.votes.get_tensor(cute.make_layout((SOFTMAX_WARPS, P_STAGES)))
        mine = cute.arch.vote_any_sync(wanted)
        if lane == 0:
            votes[wwarp, buf] = cutlass.Uint8(1) if mine else cutlass.Uint8(0)
        warps_meet(Barrier.SOFTMAX, SOFTMAX_WARPS)
        words = cute.recast_ptr(st.votes.data_ptr().align(4), dtype=Int32)
        return cute.arch.make_warp_uniform(cute.make_tensor(words, cute.make_layout(P_STAGES))[buf])

    def store_more(self, st, t, inverse, buf, wwarp, lane) -> None:
        """Hook: store what else P.V needs of a tile's P' (``t``); does nothing here."""

    def store_p(self, base, t, wwarp, lane, dtype=F16):
        """P^T of ``t``'s rows to address ``base`` of shared memory, as [row][token]: matrix (j, i)
        of stmatrix.trans is the rows from 8 j on, the warp's tokens from 8 i on."""
        p16 = cute.make_rmem_tensor((cute.size(t),), dtype)
        p16.store(t.load().to(dtype))
        words = cute.recast_tensor(p16, U32)
        row, chunk = lane // 16 * 8 + lane % 8, 2 * wwarp + lane // 8 % 2
        line = row * 128 + (chunk ^ (row % 8)) * 16
        for x in range(cute.size(t) // 8):
            four = [words[4 * x + i] for i in range(4)]
            store_words_of_p(four, base + (line + x * 2048), transposed=True)
