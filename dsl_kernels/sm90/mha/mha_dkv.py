"""Backward of dense MHA for SM90: gradients of keys and values.  mha_dq.py makes those of queries.

A CTA stays and takes work tiles, 128 keys of one KV head of one sequence, from a list of such
(schedule/mha_items.py); query rows of all heads of its group stream by.  Everything is transposed,
keys on M: S^T = K Q^T, dP^T = V dO^T, P^T = 2^(S^T - LSE), dS^T = P^T (dP^T - delta), dV += P^T dO,
dK += dS^T Q.  LSE and delta of a row come with its tile, from mha_delta.

Roles (3 warpgroups)
    wg 0  warp 0  producer     TMA: K and V of a work tile; tiles of Q, dO and stats, from the first
                               row that sees a key on, head by head
          warp 1  clearing     rows of Q and dO whose LSE is not finite
    wg 1, 2       consumers    64 keys each: S^T, dP^T, both to 16 bits in registers, dV, dK

Timeline of a consumer, tile i; d_qk 192
    turn | dV of i - 1, S^T and dP^T of i | dK of i - 1 issued | turn passed on | wait for the first
    three | exponentials, dS^T of i and P^T i to 16 bits, under dK of i - 1 and the other consumer's
    products | wait dK | dS^T i to 16 bits
d_qk 128: S^T and dP^T of i are issued first, and both sums run under the exponentials, for which
192 channels leave no registers.

Shared memory   K, V 128 keys | Q, dO tiles of rows | stats | notes
    d_qk  tiles  rows  bytes of K, V, Q, dO  registers of a consumer thread: dK + dV + S, dP + P, dS
    192   4      32    163,840               96 + 64 + 32 + 16
    128   4      48    163,840               64 + 64 + 48 + 24

RoPE channels that KV heads share.  A work tile is then ``heads_together`` KV heads, one after the
other, and the accumulators of these channels are not cleared between them; their sum goes to
``parts`` in fp32, and mha_rope_sum adds groups in their order.

Numbers that are not finite.  A row has P and dS 0 for keys that it does not see by a select, and
for all where its LSE stands for no keys or for what is behind the sequence.  Q and dO enter the
sums, and 0 times a NaN is NaN; but a row with a NaN in Q has one in LSE, if it sees a key, and
mha_delta makes one for a dO that is not finite.  So the clearing warp looks at LSEs alone, and what
it clears is lost to nobody: a row whose LSE is NaN makes P and dS NaN for every key that it sees,
and so the key's gradients in all channels.

Beside mha_dq.  That kernel lets the grid behind it begin once its CTAs have waited for what both
read, so that this one, told ``behind_dq``, may take SMs that few tokens leave idle, and those that
fall free at mha_dq's end.  Only the producer's warp reads what other grids wrote.  It does not rely
on the order of launches, which promises nothing of what is visible before griddepcontrol.wait:

    every CTA of mha_delta   griddepcontrol.wait | stores | bar.sync | atom.add.release.gpu (DELTAS)
    producer here            ld.acquire.gpu (DELTAS) | fence.proxy.async | list, tables, TMA

A load that returns READY has all of those additions before it in observation order, so each of them
synchronises with it: stats, and by causality whatever mha_delta's wait made visible to it (lists,
tables, Q, K, V, dO) are visible here; the proxy fence is for what TMA reads.  If it reads any other
value, the producer waits for the grid before, as all kernels do.  An old READY, of a call before in
the same memory, cannot be read: mha_dq's wait returns only when mha_items' store of 0 to DELTAS and
all of mha_delta's additions are performed, and the CTAs here are launched behind that.  Nothing is
stored before the consumers have waited, and the producer waits, too, before it ends: who waits for
this grid has mha_dq's results.

A key's gradients are sums over heads and rows in an order of its own sequence alone: bits are the
same in any batch and on any number of SMs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from ...blocks import budget as bud
from ...blocks import compat
from ...blocks.rounding import fma
from ...formats.mha_grads import DELTAS, DKV_STAGES, READY, ROW_TILE, stats_row
from ...formats.mha_list import ROWS, TILES
from ..attention_parts import release
from .mha_bwd_parts import D_V, WARPGROUP, Gradients, Summed, store_rows

if TYPE_CHECKING:
    from ...spec import VariantSpec

NOPE, ROPE = 128, 64
FIRST, LAST = 1, 2  # of the heads that one CTA sums: bits of a note's word, below their group


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the kernel cannot be built for ``spec``, or None."""
    return bud.check(budget(spec))


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    return MhaDkv(spec).budget


def build(spec: VariantSpec):
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    kernel = MhaDkv(spec)
    entry = TwoKeys(kernel) if kernel.shares else OneKey(kernel)
    return entry, kernel.fakes()


class TwoKeys:
    """The exported function where K is two tensors."""

    def __init__(self, kernel: MhaDkv):
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
        work: cute.Tensor,  # i32 (words,): tiles of keys
        dk_nope: cute.Tensor,  # (total_k, h_k, 128)
        parts: cute.Tensor,  # f32 (total_k, groups, 64)
        dv: cute.Tensor,  # (total_k, h_k, 128)
        softmax_scale: Float32,
        causal: Int32,  # 0 or 1
        heads_together: Int32,  # KV heads of a group
        behind_dq: Int32,  # 1: launched right behind mha_dq of the same call
        ctas: Int32,
        stream,
    ):
        self.enter(
            (q, dout, v, k_nope, k_rope), (cu_seqlens_q, cu_seqlens_k, work),
            (stats, dk_nope, dv, parts), (softmax_scale, causal, heads_together, behind_dq), ctas,
            stream,
        )  # fmt: skip


class OneKey:
    """The exported function where K is one tensor."""

    def __init__(self, kernel: MhaDkv):
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
        work: cute.Tensor,  # i32 (words,): tiles of keys
        dk_nope: cute.Tensor,  # (total_k, h_k, d_qk)
        dv: cute.Tensor,  # (total_k, h_k, 128)
        softmax_scale: Float32,
        causal: Int32,  # 0 or 1
        behind_dq: Int32,  # 1: launched right behind mha_dq of the same call
        ctas: Int32,
        stream,
    ):
        self.enter(
            (q, dout, v, k_nope), (cu_seqlens_q, cu_seqlens_k, work), (stats, dk_nope, dv),
            (softmax_scale, causal, Int32(1), behind_dq), ctas, stream,
        )  # fmt: skip


@compat.dsl_user_op
def load_four(address, *, loc=None, ip=None):
    """Four fp32 of shared memory, loaded where this stands: not all of a tile at once."""
    return compat.inline_ptx(
        "ld.volatile.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4, read_only_args=[Int32(address)], loc=loc, ip=ip,
    )  # fmt: skip


class MhaDkv(Gradients):
    """Gradients of keys and values of one spec.

    Attributes:
        shares: whether K has RoPE channels of their own tensor.
        under: whether dV, too, runs under the exponentials.
    """

    def __init__(self, spec: VariantSpec):
        tile = ROW_TILE[spec.d_qk]
        super().__init__(spec, tile, DKV_STAGES, 2 * tile, still_k=True)
        self.shares, self.under = len(self.widths) == 2, spec.d_qk == NOPE

    def fakes(self):
        """Fake arguments by name."""
        given = super().fakes()
        total, heads = given["v"].shape[:2]
        parts = {}
        if self.shares:
            groups = compat.sym(name="groups")
            parts["parts"] = compat.rows(compat.DTYPES["f32"], (total, groups, ROPE))
        together = {"heads_together": Int32(1)} if self.shares else {}
        return {
            **given, "dk_nope": compat.rows(self.dtype, (total, heads, NOPE)), **parts,
            "dv": compat.rows(self.dtype, (total, heads, D_V)),
            "softmax_scale": Float32(1.0), "causal": Int32(1), **together, "behind_dq": Int32(0),
            "ctas": Int32(1),
        }  # fmt: skip

    @cute.jit
    def enter(self, tensors, tables, results, how, ctas, stream):
        """Host half."""
        q, _, v, *ks = tensors
        scale, causal, together, behind = how
        heads = (v.shape[1], q.shape[1] // v.shape[1], Int32(ks[-1].shape[1]), together, behind)
        self.launch(tensors, (tables, results, heads), scale, causal, ctas, stream)

    def begin(self) -> None:
        """Each role waits by itself."""

    @cute.jit
    def _wait(self, work, behind):
        """Wait until what the producer reads is there.  If ``behind`` and mha_delta is seen to be
        done, return at once; if not, wait for the grid before."""
        ready = Boolean(False)
        if behind != 0:
            (deltas,) = compat.load_words(work.iterator + DELTAS, 1, sem="acquire", scope="gpu")
            ready = deltas == Uint32(READY)
        if not cute.arch.vote_all_sync(ready):
            compat.pdl_wait()
        cute.arch.fence_proxy("async.global")

    def _range(self, s_q, s_k, m, causal):
        """First tile of rows that sees a key of tile ``m`` of keys; how many there are from it."""
        sees = cutlass.max(m * ROWS - (s_k - s_q), 0)
        first = cutlass.select_(causal != 0, sees // self.tile, Int32(0))
        return first, cutlass.max((s_q + (self.tile - 1)) // self.tile - first, 0)

    @cute.jit
    def produce(self, st, ls, tma, rest, causal, ctas):
        """The producer's role."""
        tables, (stats, *_), (kv_heads, group, rope_heads, together, behind) = rest
        rows, keys = tma
        work = tables[2]
        self._wait(work, behind)
        count, kc, done = Int32(0), Int32(0), Int32(0)
        groups = (kv_heads + (together - 1)) // together
        total = work[TILES] * groups
        j, _, _ = cute.arch.block_idx()
        j = Int32(j)
        while j < total:
            tile, part = self._work_tile(j, work[TILES], groups)
            sequence, m, q0, k0, s_q, s_k = self.entry(tables, tile)
            # the list has the last tile first; of keys the first one has most rows
            m = (s_k + (ROWS - 1)) // ROWS - 1 - m
            first, n = self._range(s_q, s_k, m, causal)
            begin, end = part * together, cutlass.min((part + 1) * together, kv_heads)
            for head in cutlass.range(begin, end, unroll=1):
                word = part * 4
                if head == begin:
                    word += FIRST
                if head == end - 1:
                    word += LAST
                self.notes.write(st, count, (head, k0, s_q, s_k, m, word))
                count += 1
                if n > 0:
                    self.fill_still(
                        st, self.kv_boxes(st, ls, keys, k0, head, rope_heads), done, m
                    )  # fmt: skip
                    where = (stats_row(q0, sequence), first, n)
                    for g in cutlass.range(group, unroll=1):
                        boxes = self.q_boxes(st, ls, rows, q0, head * group + g)
                        self._stream(st, stats, boxes, kc, head * group + g, where)
                        kc += n
                    done += 1
            j = ctas + self._taken(work)
        self.end(st, count)
        compat.pdl_wait()  # this grid ends behind mha_dq's: who waits for it has both
        compat.pdl_launch_dependents()

    @cute.jit
    def _stream(self, st, stats, boxes, kc, head, where):
        """All tiles of rows of a head."""
        base, first, n = where
        bulk = cute.make_copy_atom(
            cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=self.stat_words * 32
        )
        target = st.stats.get_tensor(cute.make_layout((self.stat_words, self.stages)))
        for x in cutlass.range(n, unroll=1):
            slot, barrier = self.fill(st, kc + x, boxes, first + x)
            at = cute.crd2idx((head, 0, base + (first + x) * self.tile, 0), stats.layout)
            source = (stats.iterator + cute.assume(at, divby=4)).align(16)
            words = cute.make_tensor(source, cute.make_layout(self.stat_words))
            with cute.arch.elect_one():
                cute.copy(bulk, words, target[None, slot], mbar_ptr=barrier)

    @cute.jit
    def clear(self, st, rest, causal):
        """The clearing warp's role."""
        _, _, (_, group, *_) = rest
        stats = st.stats.get_tensor(cute.make_layout((2, self.tile, self.stages)))
        lane = cute.arch.lane_idx()
        count, kc = Int32(0), Int32(0)
        head, _, s_q, s_k, m, _ = self.notes.read(st, count)
        while head >= 0:
            _, n = self._range(s_q, s_k, m, causal)
            for _ in cutlass.range(n * group, unroll=1):
                slot = kc % self.stages
                self.moving.wait_full(st, slot, (kc // self.stages) & 1)
                wild = Boolean(False)
                for x in cutlass.range_constexpr(-(-self.tile // 32)):
                    row = cutlass.min(x * 32 + lane, self.tile - 1)
                    wild = wild | self._wild(stats[0, row, slot])
                if cute.arch.vote_any_sync(wild):
                    for row in cutlass.range(self.tile, unroll=1):
                        if self._wild(stats[0, row, slot]):
                            self.zero_row(st.moving_qk, slot, row, self.d_qk)
                            self.zero_row(st.moving_v, slot, row, D_V)
                    cute.arch.fence_proxy("async.shared", space="cta")
                self.cleared(st, slot)
                kc += 1
            count += 1
            head, _, s_q, s_k, m, _ = self.notes.read(st, count)

    def _wild(self, lse):
        return (lse.bitcast(Uint32) & Uint32(0x7F800000)) == Uint32(0x7F800000)

    # ---------------------------------------------------------------- consumers

    @cute.jit
    def consume(self, st, ls, rest, scale, scale2, causal, which):
        """The role of consumer ``which``: keys 64 which .. of every work tile."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp = tidx % 32, cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        _, (_, dk, dv, *parts), (_, group, *_) = rest
        thread = tidx % WARPGROUP
        ops = self.operands(st, ls, thread, which)
        sum_k = Summed.of(self.dtype, st.moving_qk, ls[4], thread, self.tile, self.d_qk)
        sum_v = Summed.of(self.dtype, st.moving_v, ls[5], thread, self.tile, D_V)
        sums = (sum_k, sum_v)
        nope = cute.make_tensor(sum_k.acc.iterator, cute.make_layout(NOPE // 2))
        self.first_turn(which)
        kc, done, count = Int32(0), Int32(0), Int32(0)
        head, k0, s_q, s_k, m, word = self._note(st, count)
        while head >= 0:
            first, n = self._range(s_q, s_k, m, causal)
            key0 = m * ROWS + which * 64
            # tiles of rows that begin at ``sees`` or later see all keys of the warpgroup
            sees = Int32(-(1 << 30))
            if causal != 0:
                sees = key0 + 63 - (s_k - s_q)
            sees = cute.arch.make_warp_uniform(sees)
            nope.fill(0.0)
            sum_v.acc.fill(0.0)
            if const_expr(self.shares):  # noqa: SIM102 (only this is at compile time)
                if word % 2 == FIRST:
                    for v in cutlass.range_constexpr(NOPE // 2, self.d_qk // 2):
                        sum_k.acc[v] = Float32(0.0)
            if n > 0:
                self.still.wait_full(st, 0, done & 1)
                row = first * self.tile
                self._first(st, ops, sums, kc, (row, sees, scale2, count, which))
                end = (first + n) * self.tile
                for _ in cutlass.range(n * group - 1, unroll=1):
                    row += self.tile
                    if row == end:
                        row = end - n * self.tile
                    self._tile(st, ops, sums, kc, (row, sees, scale2, count, which))
                    kc += 1
                release(self.still, st, 0)
                self._last(st, sums, kc)
                kc += 1
                done += 1
            # read again: registers are dear in between
            head, k0, s_q, s_k, m, word = self._note(st, count)
            release(self.notes.ring, st, count % 2)
            key = m * ROWS + which * 64 + warp * 16 + lane // 4
            compat.pdl_wait()  # returns at once from the second work tile on
            store_rows(dk, nope, scale, k0, s_k, head, key, NOPE)
            store_rows(dv, sum_v.acc, Float32(1.0), k0, s_k, head, key, D_V)
            if const_expr(self.shares):  # noqa: SIM102 (only this is at compile time)
                if word % 4 >= LAST:
                    self._store_parts(parts[0], sum_k.acc, scale, k0, s_k, word // 4, key)
            count += 1
            head, k0, s_q, s_k, m, word = self._note(st, count)
        self.last_turn(which)

    @cute.jit
    def _store_parts(self, parts, acc, scale, k0, s_k, group, key):
        """RoPE channels of keys ``key`` and ``key + 8``, fp32."""
        quad = cute.arch.lane_idx() % 4
        for i in cutlass.range_constexpr(2):
            if key + 8 * i < s_k:
                at = cute.crd2idx((k0 + key + 8 * i, group, 2 * quad), parts.layout)
                to = parts.iterator + at
                for g in cutlass.range_constexpr(ROPE // 8):
                    v = NOPE // 2 + 4 * g + 2 * i
                    two = [(acc[v + y] * scale).bitcast(Uint32) for y in range(2)]
                    compat.store_words((to + 8 * g).align(8), two)

    @cute.jit
    def _note(self, st, count):
        """Read the ``count``-th note as ``Notes.read`` does, but do not free its slot."""
        slot = count % 2
        self.notes.ring.wait_full(st, slot, (count // 2) & 1)
        words = self.notes._slot(st, slot)
        return tuple([cute.arch.make_warp_uniform(words[i]) for i in range(self.notes.words)])

    @cute.jit
    def _first(self, st, ops, sums, kc, where):
        """S^T, dP^T and dS^T of a work tile's first tile of rows, which has no sums beside it."""
        sum_k, sum_v = sums
        slot = self.wait_tile(st, kc)
        compat.wgmma_fence()
        acc_s, acc_p = self.scores(ops, slot)
        warpgroup.wait_group(0)
        self._ds(st, slot, acc_s, acc_p, where)
        sum_v.take(acc_s)
        sum_k.take(acc_p)

    @cute.jit
    def _tile(self, st, ops, sums, vc, where):
        """S^T and dP^T of the tile behind ``vc``, dV and dK of ``vc``."""
        sum_k, sum_v = sums
        which, old = where[-1], vc % self.stages
        slot = self.wait_tile(st, vc + 1)
        self.turn(which)
        compat.wgmma_fence()
        if const_expr(self.under):
            acc_s, acc_p = self.scores(ops, slot)
            sum_v.issue(old)
        else:  # registers of P are free once dV is done
            sum_v.issue(old)
            acc_s, acc_p = self.scores(ops, slot)
        sum_k.issue(old)
        warpgroup.commit_group()
        self.pass_on(which)
        warpgroup.wait_group(1)
        self._ds(st, slot, acc_s, acc_p, where)
        if const_expr(not self.under):
            sum_v.take(acc_s)
        warpgroup.wait_group(0)
        release(self.moving, st, old)
        if const_expr(self.under):
            sum_v.take(acc_s)
        sum_k.take(acc_p)

    @cute.jit
    def _last(self, st, sums, vc):
        """dV and dK of a work tile's last tile of rows."""
        slot = vc % self.stages
        compat.wgmma_fence()
        for each in reversed(sums):
            each.issue(slot)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        release(self.moving, st, slot)

    @cute.jit
    def _ds(self, st, slot, acc_s, acc_p, where):
        """S^T, dP^T -> P^T in acc_s, dS^T in acc_p."""
        row, sees, scale2, count, which = where
        tidx, _, _ = cute.arch.thread_idx()
        stats = st.stats.data_ptr().toint() + slot * self.stat_words * 4 + tidx % 4 * 16
        for b in cutlass.range_constexpr(self.tile // 8):
            four = load_four(stats + 64 * b)  # of two rows
            for y in cutlass.range_constexpr(4):
                v, e = 4 * b + y, y % 2
                p = cute.math.exp2(fma(acc_s[v], scale2, -four[2 * e]), fastmath=True)
                acc_s[v] = p
                acc_p[v] = p * (acc_p[v] - four[2 * e + 1])
        if row < sees:
            words = self.notes._slot(st, count % 2)  # read again: registers are dear
            key = words[4] * ROWS + which * 64 + tidx % WARPGROUP // 32 * 16 + tidx % 32 // 4
            diagonal = key - (words[3] - words[2]) - 2 * (tidx % 4)
            # a key beyond the value's row + s_k - s_q is not seen
            for v in cutlass.range_constexpr(self.tile // 2):
                if diagonal + (8 * (v // 2 % 2) - 8 * (v // 4) - v % 2) > row:
                    acc_s[v] = Float32(0.0)
                    acc_p[v] = Float32(0.0)
