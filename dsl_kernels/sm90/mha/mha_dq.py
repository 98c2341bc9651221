"""Backward of dense MHA for SM90: gradient of queries.  mha_dkv.py makes those of keys and values.

A CTA stays and takes work tiles, 128 query rows of one head of one sequence, from the list of the
forward (schedule/mha_items.py); 64 keys at a time it makes S = Q K^T and dP = dO V^T anew, from
them P = 2^(S - LSE) and dS = P (dP - delta), and adds dS K.  LSE and delta of a row come from
mha_delta.

Roles (3 warpgroups)
    wg 0  warp 0  producer     TMA: Q and dO of a work tile; tiles of K and V, the last tile first
          warp 1  clearing     K behind a sequence's end, or behind what any row of the work tile
                               sees; keys that hold a NaN, where some row does not see them
    wg 1, 2       consumers    64 rows each: S, dP, dS to 16 bits in registers, dQ += dS K

Timeline of a consumer, tile i (n - 1 .. 0)
    turn | S, dP of i and dQ of i + 1 issued | turn passed on | wait S, dP | exponentials and dS of
    i, under dQ of i + 1 and the other consumer's products | wait dQ | dS i to 16 bits

Shared memory   Q, dO 128 rows | K, V tiles of 64 keys | notes
    d_qk    tiles    bytes      registers of a consumer thread: dQ + S + dP + dS
    192     3        204,800    96 + 32 + 32 + 16
    128     4        196,608    64 + 32 + 32 + 16

Numbers that are not finite.  A key that a row does not see has P and dS 0 there by a select,
whatever S and dP are, and V enters nothing else; K enters dS K, and 0 times a NaN is NaN.  A NaN in
a key that the last row of a work tile sees makes that row's LSE NaN, so the clearing warp looks for
such keys only behind such an LSE, and only in tiles that some row does not see as a whole.  What it
clears is lost to nobody: rows that see the key have a NaN in LSE or delta, and so in dS.  A key
of infinities whose logits are all -inf leaves no trace in an LSE: rows that do not see it may get
NaN.

The grid behind this one may begin as soon as this one has (mha_dkv.py: ``behind_dq``).

A row's gradient is one sum over its keys, in an order of its own sequence alone: bits are the same
in any batch and on any number of SMs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from ...blocks import budget as bud
from ...blocks import compat
from ...blocks.rounding import fma
from ...blocks.types import F16, U32
from ...formats.mha_grads import DQ_STAGES, KEY_TILE, stats_row
from ...formats.mha_list import ROWS, TILES
from ...schedule.mha_items import key_tiles
from ..attention_parts import release
from ..hidden_keys import LINE, whole_tiles
from .mha_bwd_parts import WARPGROUP, Gradients, Summed, store_rows

if TYPE_CHECKING:
    from ...spec import VariantSpec


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the kernel cannot be built for ``spec``, or None."""
    return bud.check(budget(spec))


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    return MhaDq(spec).budget


def build(spec: VariantSpec):
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    kernel = MhaDq(spec)
    entry = TwoKeys(kernel) if len(kernel.widths) == 2 else OneKey(kernel)
    return entry, kernel.fakes()


class TwoKeys:
    """The exported function where K is two tensors."""

    def __init__(self, kernel: MhaDq):
        self.enter = kernel.enter

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # bf16 | f16 (total_q, h, d_qk)
        k_nope: cute.Tensor,  # (total_k, h_k, 128)
        k_rope: cute.Tensor,  # (total_k, 1 | h_k, 64)
        v: cute.Tensor,  # (total_k, h_k, 128)
        dout: cute.Tensor,  # (total_q, h, 128)
        stats: cute.Tensor,  # f32 (h, blocks, PAD, 2), as mha_delta leaves it
        cu_seqlens_q: cute.Tensor,  # i32 (b + 1,)
        cu_seqlens_k: cute.Tensor,  # i32 (b + 1,)
        work: cute.Tensor,  # i32 (words,), as mha_items leaves it
        dq: cute.Tensor,  # (total_q, h, d_qk)
        softmax_scale: Float32,
        causal: Int32,  # 0 or 1
        ctas: Int32,
        stream,
    ):
        tables = (cu_seqlens_q, cu_seqlens_k, work)
        self.enter(
            (q, dout, v, k_nope, k_rope), tables, (stats, dq), softmax_scale, causal, ctas, stream
        )


class OneKey:
    """The exported function where K is one tensor."""

    def __init__(self, kernel: MhaDq):
        self.enter = kernel.enter

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # bf16 | f16 (total_q, h, d_qk)
        k_nope: cute.Tensor,  # (total_k, h_k, d_qk)
        v: cute.Tensor,  # (total_k, h_k, 128)
        dout: cute.Tensor,  # (total_q, h, 128)
        stats: cute.Tensor,  # f32 (h, blocks, PAD, 2), as mha_delta leaves it
        cu_seqlens_q: cute.Tensor,  # i32 (b + 1,)
        cu_seqlens_k: cute.Tensor,  # i32 (b + 1,)
        work: cute.Tensor,  # i32 (words,), as mha_items leaves it
        dq: cute.Tensor,  # (total_q, h, d_qk)
        softmax_scale: Float32,
        causal: Int32,  # 0 or 1
        ctas: Int32,
        stream,
    ):
        tables = (cu_seqlens_q, cu_seqlens_k, work)
        self.enter((q, dout, v, k_nope), tables, (stats, dq), softmax_scale, causal, ctas, stream)


class MhaDq(Gradients):
    """Gradient of queries of one spec."""

    def __init__(self, spec: VariantSpec):
        super().__init__(spec, KEY_TILE, DQ_STAGES[spec.d_qk], 0, still_k=False)

    def fakes(self):
        """Fake arguments by name."""
        given = super().fakes()
        total, heads = given["q"].shape[:2]
        return {
            **given, "dq": compat.rows(self.dtype, (total, heads, self.d_qk)),
            "softmax_scale": Float32(1.0), "causal": Int32(1), "ctas": Int32(1),
        }  # fmt: skip

    @cute.jit
    def enter(self, tensors, tables, results, scale, causal, ctas, stream):
        """Host half."""
        q, _, v, *ks = tensors
        group = compat.fast_divisor(q.shape[1] // v.shape[1])
        heads = (q.shape[1], group, Int32(ks[-1].shape[1]))
        self.launch(tensors, (tables, results, heads), scale, causal, ctas, stream)

    @cute.jit
    def begin(self):
        """All else waits for the kernels before; behind that mha_dkv may begin, on idle SMs."""
        compat.pdl_wait()  # the list, stats and all else come from them
        compat.pdl_launch_dependents()

    @cute.jit
    def produce(self, st, ls, tma, rest, causal, ctas):
        """The producer's role."""
        tables, _, (heads, group, rope_heads) = rest
        rows, keys = tma
        work = tables[2]
        count, kc, done = Int32(0), Int32(0), Int32(0)
        total = work[TILES] * heads
        j, _, _ = cute.arch.block_idx()
        j = Int32(j)
        while j < total:
            tile, head = self._work_tile(j, work[TILES], heads)
            sequence, m, q0, k0, s_q, s_k = self.entry(tables, tile)
            self.notes.write(st, count, (head, q0, s_q, s_k, m, stats_row(q0, sequence)))
            count += 1
            n = key_tiles(s_q, s_k, m, causal, self.tile)
            if n > 0:
                self.fill_still(st, self.q_boxes(st, ls, rows, q0, head), done, m)
                kv_head, _ = divmod(head, group)
                boxes = self.kv_boxes(st, ls, keys, k0, kv_head, rope_heads)
                for x in cutlass.range(n, unroll=1):
                    self.fill(st, kc + x, boxes, n - 1 - x)
                done += 1
                kc += n
            j = ctas + self._taken(work)
        self.end(st, count)

    # ---------------------------------------------------------------- clearing

    @cute.jit
    def clear(self, st, rest, causal):
        """The clearing warp's role."""
        _, (stats, _), _ = rest
        count, kc = Int32(0), Int32(0)
        head, _, s_q, s_k, m, base = self.notes.read(st, count)
        while head >= 0:
            n = key_tiles(s_q, s_k, m, causal, self.tile)
            last, end = cutlass.min((m + 1) * ROWS, s_q) - 1, s_k
            if causal != 0:
                end = cutlass.max(cutlass.min(s_k, last + 1 + s_k - s_q), 0)
            whole = whole_tiles(s_q, s_k, m * ROWS, n, self.tile, causal)
            wild = Boolean(False)
            if whole < n:
                wild = self._lse(stats, head, base + last) != 0
            for x in cutlass.range(n, unroll=1):
                slot = kc % self.stages
                self.moving.wait_full(st, slot, (kc // self.stages) & 1)
                valid = cutlass.min(end - (n - 1 - x) * self.tile, self.tile)
                if valid < self.tile:
                    for row in cutlass.range(valid, self.tile, unroll=1):
                        self.zero_row(st.moving_qk, slot, row, self.d_qk)
                    cute.arch.fence_proxy("async.shared", space="cta")
                if wild & (n - 1 - x >= whole):
                    self._look(st, slot, valid)
                self.cleared(st, slot)
                kc += 1
            count += 1
            head, _, s_q, s_k, m, base = self.notes.read(st, count)

    @cute.jit
    def _lse(self, stats, head, row):
        """Return 1 if the row's LSE is NaN, else 0."""
        value = stats[head, 0, row, 0]
        return cutlass.select_(value == value, Int32(0), Int32(1))

    @cute.jit
    def _look(self, st, slot, valid):
        """Makes zeros of the keys in ``slot`` that are not finite, among the first ``valid``."""
        lane = cute.arch.lane_idx()
        exponent = 0x7C00 if self.dtype is F16 else 0x7F80
        for row in cutlass.range(valid, unroll=1):
            bad = Boolean(False)
            for block in cutlass.range_constexpr(self.d_qk * 2 // LINE):
                begin = st.moving_qk.data_ptr().toint()
                begin = begin + (slot * self.d_qk * 2 + block * LINE) * self.tile
                place = cute.make_ptr(
                    U32, Int32(begin + row * LINE + lane * 4), cute.AddressSpace.smem,
                    assumed_align=4,
                )  # fmt: skip
                held = cute.make_tensor(place, cute.make_layout(1))[0]
                for at in (0, 16):
                    mask = U32(exponent << at)
                    bad = bad | ((held & mask) == mask)
            if cute.arch.vote_any_sync(bad):
                self.zero_row(st.moving_qk, slot, row, self.d_qk)
        cute.arch.fence_proxy("async.shared", space="cta")

    # ---------------------------------------------------------------- consumers

    @cute.jit
    def consume(self, st, ls, rest, scale, scale2, causal, which):
        """The role of consumer ``which``: rows 64 which .. of every work tile."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp = tidx % 32, cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        _, (stats, dq), _ = rest
        ops = self.operands(st, ls, tidx % WARPGROUP, which)
        summed = Summed.of(self.dtype, st.moving_qk, ls[4], tidx % WARPGROUP, self.tile, self.d_qk)
        lse2, delta, limit = (cute.make_rmem_tensor((2,), t) for t in (Float32, Float32, Int32))
        state = (lse2, delta, limit, scale2)
        self.first_turn(which)
        kc, done, count = Int32(0), Int32(0), Int32(0)
        head, q0, s_q, s_k, m, base = self.notes.read(st, count)
        while head >= 0:
            n = key_tiles(s_q, s_k, m, causal, self.tile)
            row0 = m * ROWS + which * 64  # of the warpgroup, in its sequence
            row = row0 + warp * 16 + lane // 4
            for i in cutlass.range_constexpr(2):
                limit[i] = s_k
                if causal != 0:
                    limit[i] = cutlass.min(s_k, row + 8 * i + 1 + s_k - s_q)
                lse2[i], delta[i] = Float32.inf, Float32(0.0)
                if row + 8 * i < s_q:
                    at = cute.crd2idx((head, 0, base + row + 8 * i, 0), stats.layout)
                    two = compat.load_words(stats.iterator + at, 2)
                    lse2[i], delta[i] = two[0].bitcast(Float32), two[1].bitcast(Float32)
            whole = whole_tiles(s_q, s_k, row0, n, self.tile, causal)
            summed.acc.fill(0.0)
            if n > 0:
                self.still.wait_full(st, 0, done & 1)
                self._first(st, ops, summed, state, kc, (n - 1) * self.tile)
                top = cutlass.min(n - 1, whole)
                # one loop: of two, the compiler copies accumulators between fence and WGMMA
                for x in cutlass.range(n - 1, unroll=1):
                    where = ((n - 2 - x) * self.tile, x < n - 1 - top, which)
                    self._tile(st, ops, summed, state, kc, where)
                    kc += 1
                release(self.still, st, 0)
                self._last(st, summed, kc)
                kc += 1
                done += 1
            store_rows(dq, summed.acc, scale, q0, s_q, head, row, self.d_qk)
            count += 1
            head, q0, s_q, s_k, m, base = self.notes.read(st, count)
        self.last_turn(which)

    @cute.jit
    def _first(self, st, ops, summed, state, kc, first):
        """S, dP and dS of a work tile's first tile of keys, which has no sum beside it."""
        slot = self.wait_tile(st, kc)
        compat.wgmma_fence()
        acc_s, acc_p = self.scores(ops, slot)
        warpgroup.wait_group(0)
        self._ds(acc_s, acc_p, state, first, True)
        summed.take(acc_p)

    @cute.jit
    def _tile(self, st, ops, summed, state, vc, where):
        """S and dP of the tile behind ``vc`` and dQ of ``vc``, dS between their ends."""
        first, masked, which = where
        slot = self.wait_tile(st, vc + 1)
        self.turn(which)
        compat.wgmma_fence()
        acc_s, acc_p = self.scores(ops, slot)
        summed.issue(vc % self.stages)
        warpgroup.commit_group()
        self.pass_on(which)
        warpgroup.wait_group(1)
        self._ds(acc_s, acc_p, state, first, masked)
        warpgroup.wait_group(0)
        release(self.moving, st, vc % self.stages)
        summed.take(acc_p)

    @cute.jit
    def _last(self, st, summed, vc):
        """dQ of a work tile's last tile of keys."""
        slot = vc % self.stages
        compat.wgmma_fence()
        summed.issue(slot)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        release(self.moving, st, slot)

    @cute.jit
    def _ds(self, acc_s, acc_p, state, first, masked):
        """S, dP -> P in acc_s, dS in acc_p."""
        lse2, delta, limit, scale2 = state
        tidx, _, _ = cute.arch.thread_idx()
        for v in cutlass.range_constexpr(self.tile // 2):
            r = v // 2 % 2
            p = cute.math.exp2(fma(acc_s[v], scale2, -lse2[r]), fastmath=True)
            acc_s[v] = p  # both are written: or else registers are copied behind the fence
            acc_p[v] = p * (acc_p[v] - delta[r])
        if masked:
            column = first + 2 * (tidx % 4)
            for v in cutlass.range_constexpr(self.tile // 2):
                if column + (8 * (v // 4) + v % 2) >= limit[v // 2 % 2]:
                    acc_p[v] = Float32(0.0)
