"""Dense MHA prefill for SM90: out = softmax(q k^T scale) v of ragged sequences, causal or not.

A CTA stays and takes *work tiles*, 128 query rows of one head of one sequence, from a list that
begins with the longest (schedule/mha_items.py), the first by its number, the others from a counter.
K comes as the tensors that a model has: 128 channels of a head and, with d_qk 192, 64 RoPE channels
that all heads may share (with d_qk 256, 192 and 64); in shared memory they are one tile.

BF16 and fp16 are one source.

Roles (3 warpgroups)
    wg 0  warp 0  producer     TMA: Q of a work tile; K and V tiles of keys, the last tile first
          warp 1  clearing     V behind a sequence's end, in its last tile; V that is not finite
                               where a work tile is taken again (sm90/hidden_keys.py)
    wg 1, 2       consumers    64 rows each: S = Q K^T, softmax, O += P V; P stays in registers

Timeline of a consumer, tile i (n - 1 .. 0)
    turn | Q.K i, P.V i + 1 issued | turn passed on | wait Q.K | max, exp2 of i, under P.V i + 1 and
    the other consumer's products | wait P.V | O moved if an m_ref did | P i to 16 bits

Shared memory   Q 128 rows | K 2 tiles | V 2 tiles | notes
    d_qk, d_v  keys of a tile    bytes    registers of a consumer thread: O + S + P
    192, 128   128             212,992     64 + 64 + 32
    128, 128   128             163,840     64 + 64 + 32
    256, 256    80             229,376    128 + 40 + 20

With d_v 256 it is shared memory that bounds a tile.  80 keys take 1280 cycles of the tensor core
for each consumer and 1216 of the shared-memory port (Q and K 576, V 320, its half of the fill 320);
64 keys would take 1024 of both.

m_ref (log2 units; sm90/online_softmax.py).  P' = 2^(t - m_ref) in 16 bits, O and the row sum in
fp32 relative to the same m_ref, which moves when a tile exceeds it by 2^15 only: O is hardly ever
rescaled.

Causal is bottom right: query i of s_q sees keys up to i + s_k - s_q.  Rows without keys have out 0
and LSE -inf.  A work tile's result depends on its own sequence alone, so that bits are the same in
any batch and on any number of SMs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.tensor_utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from ...blocks import budget as bud
from ...blocks import compat
from ...blocks.registers import claim_registers
from ...blocks.rounding import fma
from ...blocks.smem import array, one_stage, staged, struct_of
from ...blocks.types import ROW_MAJOR, U16, U32
from ...combine.online_softmax import NEVER
from ...formats.mha_list import ROWS, VALUES
from ...load.planes import Loaded
from ...load.work_list import LOG2E
from ...schedule.mha_items import key_tiles
from ..attention_parts import STAGES, Loads, Rows, has_tail, release, to_a
from ..hidden_keys import CONSUMER_WARPS, whole_tiles
from ..online_softmax import raise_m_ref
from ..wgmma import issue, tiled_mma

if TYPE_CHECKING:
    from ...spec import VariantSpec

COL_MAJOR = cutlass.tensor_utils.LayoutEnum.COL_MAJOR
WARPGROUP = 128
PRODUCER, CONSUMER = 24, 240  # registers
SMALL_BYTES = 2048  # notes, barriers, alignment: an upper bound


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the kernel cannot be built for ``spec``, or None."""
    if spec.d_v != VALUES[spec.d_qk]:
        return f"values of {spec.d_v} channels beside {spec.d_qk} of q, not {VALUES[spec.d_qk]}"
    return bud.check(budget(spec))


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    loads = Loads(spec)
    tiles = ROWS * spec.d_qk + STAGES * spec.key_tile * (spec.d_qk + spec.d_v)
    return bud.Budget(
        groups=(
            bud.WarpGroup("producer", PRODUCER),
            bud.WarpGroup("consumers", CONSUMER, count=2),
        ),
        smem=2 * tiles + SMALL_BYTES,
        barriers=tuple(barrier for ring in loads.rings for barrier in ring.budget()),
        mmas=(
            bud.Mma("Q.K", 64, spec.key_tile, spec.d_qk, spec.dtype),
            bud.Mma("P.V", 64, spec.d_v, spec.key_tile, spec.dtype),
        ),
    )


def build(spec: VariantSpec):
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    kernel = MhaFwd(spec)
    entry = TwoKeys(kernel) if len(kernel.loads.widths) == 2 else OneKey(kernel)
    return entry, kernel.fakes()


class TwoKeys:
    """The exported function where K is two tensors."""

    def __init__(self, kernel: MhaFwd):
        self.launch = kernel.launch

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # bf16 | f16 (total_q, h, d_qk)
        k_nope: cute.Tensor,  # (total_k, h_k, d_qk - 64)
        k_rope: cute.Tensor,  # (total_k, 1 | h_k, 64)
        v: cute.Tensor,  # (total_k, h_k, d_v)
        cu_seqlens_q: cute.Tensor,  # i32 (b + 1,)
        cu_seqlens_k: cute.Tensor,  # i32 (b + 1,)
        work: cute.Tensor,  # i32 (words,), as mha_items leaves it
        out: cute.Tensor,  # (total_q, h, d_v)
        lse: cute.Tensor,  # f32 (h, total_q), natural
        softmax_scale: Float32,
        causal: Int32,  # 0 or 1
        ctas: Int32,
        stream,
    ):
        tensors = (q, v, k_nope, k_rope)
        self.launch(
            tensors, (cu_seqlens_q, cu_seqlens_k, work), (out, lse), softmax_scale, causal, ctas,
            stream,
        )  # fmt: skip


class OneKey:
    """The exported function where K is one tensor."""

    def __init__(self, kernel: MhaFwd):
        self.launch = kernel.launch

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # bf16 | f16 (total_q, h, d_qk)
        k_nope: cute.Tensor,  # (total_k, h_k, d_qk)
        v: cute.Tensor,  # (total_k, h_k, d_v)
        cu_seqlens_q: cute.Tensor,  # i32 (b + 1,)
        cu_seqlens_k: cute.Tensor,  # i32 (b + 1,)
        work: cute.Tensor,  # i32 (words,), as mha_items leaves it
        out: cute.Tensor,  # (total_q, h, d_v)
        lse: cute.Tensor,  # f32 (h, total_q), natural
        softmax_scale: Float32,
        causal: Int32,  # 0 or 1
        ctas: Int32,
        stream,
    ):
        self.launch(
            (q, v, k_nope), (cu_seqlens_q, cu_seqlens_k, work), (out, lse), softmax_scale, causal,
            ctas, stream,
        )  # fmt: skip


class MhaFwd:
    """The kernel of one head size and dtype."""

    def __init__(self, spec: VariantSpec):
        self.d_qk, self.d_v, self.dtype = spec.d_qk, spec.d_v, compat.dtype(spec.dtype)
        self.tile, self.budget = spec.key_tile, budget(spec)
        self.q_steps = spec.q_steps
        self.loads = Loads(spec)
        self.rows = Rows(self.dtype, spec.d_v)

    def layouts(self):
        """Shared-memory layouts of Q, K, V."""
        q = sm90.make_smem_layout_a(ROW_MAJOR, (ROWS, self.tile, self.d_qk), self.dtype, 1)
        k = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, self.tile, self.d_qk), self.dtype, STAGES)
        v = sm90.make_smem_layout_b(COL_MAJOR, (ROWS, self.d_v, self.tile), self.dtype, STAGES)
        return q, k, v

    def fakes(self):
        """Fake arguments by name."""
        names = ("h", "h_k", "h_rope", "total_q", "total_k", "b_plus_1", "words")
        h, h_k, h_rope, t_q, t_k, b1, words = (compat.sym(name=x) for x in names)
        dt, i32, f32 = self.dtype, compat.DTYPES["i32"], compat.DTYPES["f32"]
        heads = (h_k, h_rope)
        keys = {
            name: compat.rows(dt, (t_k, heads[i], width))
            for i, (name, width) in enumerate(zip(("k_nope", "k_rope"), self.loads.widths))
        }
        return {
            "q": compat.rows(dt, (t_q, h, self.d_qk)),
            **keys,
            "v": compat.rows(dt, (t_k, h_k, self.d_v)),
            "cu_seqlens_q": compat.vector(i32, b1),
            "cu_seqlens_k": compat.vector(i32, b1),
            "work": compat.vector(i32, words),
            "out": compat.rows(dt, (t_q, h, self.d_v)),
            "lse": compat.strided(f32, (h, t_q), (compat.sym64(), compat.sym64()), 4),
            "softmax_scale": Float32(1.0),
            "causal": Int32(1),
            "ctas": Int32(1),
        }

    @cute.jit
    def launch(self, tensors, tables, results, softmax_scale, causal, ctas, stream):
        """Host half: descriptors and the launch; tensors = (q, v, K's)."""
        lq, lk, lv = self.layouts()
        q, v, *ks = tensors
        big = [array(self.dtype, cute.cosize(layout), 1024) for layout in (lq, lk, lv)]
        self.Storage = struct_of(
            **self.loads.fields, **dict(zip(("q", "k", "v"), big, strict=True))
        )
        op = cpasync.CopyBulkTensorTileG2SOp()

        def load(t, order, layout, tile):
            view = cute.make_tensor(t.iterator, cute.select(t.layout, mode=order))
            return Loaded(*list(cpasync.make_tiled_tma_atom(op, view, layout, tile))[:2])

        def box(width):
            layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, self.tile, width), self.dtype, 1)
            return one_stage(layout)

        tokens = [0, 2, 1]
        tma = (
            load(q, tokens, one_stage(lq), (ROWS, self.d_qk)),
            load(v, [2, 0, 1], one_stage(lv), (self.d_v, self.tile)),
            *(load(k, tokens, box(w), (self.tile, w)) for k, w in zip(ks, self.loads.widths)),
        )
        heads = (q.shape[1], compat.fast_divisor(q.shape[1] // v.shape[1]), Int32(ks[-1].shape[1]))
        self.kernel(tma, tables, results, heads, softmax_scale * LOG2E, causal, ctas).launch(
            grid=(ctas, 1, 1), block=(self.budget.threads, 1, 1), stream=stream,
            min_blocks_per_mp=1, use_pdl=True,
        )  # fmt: skip

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, tma, tables, results, heads, scale: Float32, causal: Int32, ctas: Int32):
        tidx, _, _ = cute.arch.thread_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        layouts = self.layouts()
        st = cutlass.memory.SmemAllocator().allocate(self.Storage)
        if warp_id == 0:
            for loaded in tma:
                cpasync.prefetch_descriptor(loaded.atom)
            with cute.arch.elect_one():
                self.loads.init(st)
                cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        compat.pdl_wait()  # the list, q, k and v come from the kernels before
        if wg == 0:
            claim_registers(self.budget, PRODUCER)
            query_heads, group, rope_heads = heads
            if warp_id == 0:
                gmem = (*tables, query_heads)
                self.loads.run(st, layouts, tma, gmem, causal, group, rope_heads, ctas)
            elif warp_id == 1:
                self.loads.clear(st)
        else:
            claim_registers(self.budget, CONSUMER)
            self.consume(st, layouts, results, scale, causal, wg - 1)

    @cute.jit
    def consume(self, st, layouts, results, scale, causal, which):
        """The role of consumer ``which``: rows 64 which .. of every work tile."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp = tidx % 32, cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        operands = self._operands(st, layouts, tidx % WARPGROUP, which)
        acc_o = operands[6]
        m_ref, total, limit = (
            cute.make_rmem_tensor((2,), t) for t in (Float32, Float32, Int32)
        )  # fmt: skip
        state = (m_ref, total, scale, limit)
        if which == 1:  # the first turn is the other's
            cute.arch.barrier_arrive(barrier_id=1, number_of_threads=2 * WARPGROUP)
        kc, done, count, phases = Int32(0), Int32(0), Int32(0), Int32(0)
        number = which * (CONSUMER_WARPS // 2) + warp
        self.loads.hidden.reset(st, number)
        count, head, q0, s_q, s_k, m, again = self._next(st, Int32(-1), number)
        while head >= 0:
            n = key_tiles(s_q, s_k, m, causal, self.tile)
            row0 = m * ROWS + which * 64  # of the warpgroup, in its sequence
            row = row0 + warp * 16 + lane // 4
            for i in cutlass.range_constexpr(2):
                limit[i] = s_k
                if causal != 0:
                    limit[i] = cutlass.min(s_k, row + 8 * i + 1 + s_k - s_q)
            if again != 0:  # what is cleared, and waited for, is so for both warpgroups
                row0 = m * ROWS
            whole = whole_tiles(s_q, s_k, row0, n, self.tile, causal)
            m_ref.fill(NEVER)
            total.fill(0.0)
            acc_o.fill(0.0)
            if n > 0:
                self.loads.q.wait_full(st, 0, done & 1)
                if const_expr(self.q_steps):
                    self._take_q(st, operands)
                self._first(st, operands, state, kc, (n - 1) * self.tile)
                if has_tail(s_k, n, self.tile) & (again == 0):
                    phases = self._clean(st, kc, phases)
                top = cutlass.min(n - 1, whole)
                for x in cutlass.range(n - 1 - top, unroll=1):
                    if again != 0:
                        phases = self._clean(st, kc, phases)
                    self._tile(st, operands, state, kc, (n - 2 - x) * self.tile, True)
                    kc += 1
                if (again != 0) & (whole < n):
                    phases = self._clean(st, kc, phases)
                for _ in cutlass.range(top, unroll=1):
                    self._tile(st, operands, state, kc, 0, False)
                    kc += 1
                release(self.loads.q, st, 0)
                self._last(st, operands, kc)
                kc += 1
                done += 1
            if (again != 0) & (whole < n):
                self.loads.hidden.poison(st, acc_o, limit)
            bad = self.rows.write(results, acc_o, m_ref, total, limit, q0, s_q, head, row)
            bad = cute.arch.vote_any_sync(bad) & (causal != 0) & (again == 0) & (whole < n)
            self.loads.hidden.tell(st, count, number, bad)
            count, head, q0, s_q, s_k, m, again = self._next(st, count, number)
        if which == 0:  # the last turn that was passed on
            cute.arch.barrier(barrier_id=1, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def _next(self, st, count, number):
        """Number of the note behind ``count``, and what it tells; head is -1 behind the last."""
        count += 1
        note = self.loads.notes.read(st, count)
        pause = note[0] < 0
        while pause:
            pause = Boolean(False)
            if self.loads.hidden.left(st, count):
                self.loads.hidden.tell(st, count, number, Boolean(False))
                count += 1
                note = self.loads.notes.read(st, count)
                pause = note[0] < 0
        return (count, *note)

    @cute.jit
    def _clean(self, st, vc, phases):
        """Waits until the clearing warp is done with V of use ``vc``; the phases behind it."""
        slot = vc % STAGES
        self.loads.clean.wait_full(st, slot, (phases >> slot) & 1)
        return phases ^ (1 << slot)

    def _operands(self, st, layouts, thread, which):
        """MMAs, operands and accumulators of a consumer."""
        lq, lk, lv = layouts
        mma_s = tiled_mma(self.dtype, self.tile)
        mma_o = tiled_mma(self.dtype, self.d_v, a_in_registers=True, b_mn=True)
        thr_s, thr_o = mma_s.get_slice(thread), mma_o.get_slice(thread)
        mine = cute.local_tile(staged(st.q, lq), (64, self.d_qk), (which, 0, None))
        r_q = [mma_s.make_fragment_A(thr_s.partition_A(mine))[None, None, None, 0], None]
        if const_expr(self.q_steps):
            first = tiled_mma(self.dtype, self.tile, a_in_registers=True)
            r_q[1] = first.make_fragment_A(first.partition_shape_A((64, 16 * self.q_steps)))
        r_k = mma_s.make_fragment_B(thr_s.partition_B(staged(st.k, lk)))
        r_v = mma_o.make_fragment_B(thr_o.partition_B(staged(st.v, lv)))
        acc_s = cute.make_rmem_tensor(mma_s.partition_shape_C((64, self.tile)), Float32)
        acc_o = cute.make_rmem_tensor(mma_o.partition_shape_C((64, self.d_v)), Float32)
        r_p = mma_o.make_fragment_A(mma_o.partition_shape_A((64, self.tile)))
        p16 = cute.make_tensor(r_p.iterator, cute.make_layout(self.tile // 2))
        return mma_s, mma_o, r_q, r_k, r_v, acc_s, acc_o, r_p, p16, which

    def _scores(self, mma_s, acc_s, r_q, r_k):
        """Issues S = Q K^T: steps of Q in registers, if there are, then those in shared memory."""
        n = self.q_steps
        if n:
            first = tiled_mma(self.dtype, self.tile, a_in_registers=True)
            issue(first, acc_s, r_q[1], r_k, accumulate=False, last=n)
        issue(mma_s, acc_s, r_q[0], r_k, accumulate=n > 0, first=n)
        warpgroup.commit_group()

    @cute.jit
    def _take_q(self, st, operands):
        """The warpgroup's rows of Q -> A fragments of the first steps."""
        r_q, which = operands[2][1], operands[-1]
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp_id = tidx % 32, cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        row = warp_id * 16 + lane % 16
        line = row * 128 + ((lane // 16) ^ (row % 8)) * 16
        ldsm = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), U16)
        words = cute.recast_tensor(r_q, U32)
        base = st.q.data_ptr().toint() + which * (64 * 128)
        for x in cutlass.range_constexpr(self.q_steps):
            at = base + ((line ^ (x % 4 * 32)) + x // 4 * (ROWS * 128))
            source = cute.make_ptr(U16, at, cute.AddressSpace.smem, assumed_align=16)
            loaded = cute.make_rmem_tensor((8,), U16)
            cute.copy(ldsm, cute.make_tensor(source, cute.make_layout(8)), loaded)
            four = cute.recast_tensor(loaded, U32)
            for i in cutlass.range_constexpr(4):
                words[4 * x + i] = four[i]

    @cute.jit
    def _first(self, st, operands, state, kc, first):
        """Q.K and softmax of a work tile's first tile of keys, which has no P.V beside it."""
        mma_s, _, r_q, r_k, _, acc_s, _, _, p16, _ = operands
        slot = kc % STAGES
        self.loads.k.wait_full(st, slot, (kc // STAGES) & 1)
        compat.wgmma_fence()
        self._scores(mma_s, acc_s, r_q, r_k[None, None, None, slot])
        warpgroup.wait_group(0)
        release(self.loads.k, st, slot)
        self._softmax(acc_s, state, first, True)
        to_a(acc_s, p16, self.tile // 2, self.dtype)

    @cute.jit
    def _tile(self, st, operands, state, vc, first, masked: cutlass.Constexpr):
        """Q.K of the tile behind ``vc`` and P.V of ``vc``, softmax between their ends."""
        mma_s, mma_o, r_q, r_k, r_v, acc_s, acc_o, r_p, p16, which = operands
        kc = vc + 1
        slot, v_slot = kc % STAGES, vc % STAGES
        self.loads.k.wait_full(st, slot, (kc // STAGES) & 1)
        cute.arch.barrier(barrier_id=1 + which, number_of_threads=2 * WARPGROUP)
        compat.wgmma_fence()
        self._scores(mma_s, acc_s, r_q, r_k[None, None, None, slot])
        self.loads.v.wait_full(st, v_slot, (vc // STAGES) & 1)
        compat.wgmma_fence()
        issue(mma_o, acc_o, r_p, r_v[None, None, None, v_slot], accumulate=True)
        warpgroup.commit_group()
        cute.arch.barrier_arrive(barrier_id=2 - which, number_of_threads=2 * WARPGROUP)
        warpgroup.wait_group(1)
        release(self.loads.k, st, slot)
        gamma0, gamma1, moved = self._softmax(acc_s, state, first, masked)
        # What hangs on the vote must stand before the wait (``_softmax``) and concern the warp
        # alone: the wait is an instruction of the whole warpgroup, whose warps vote apart.
        if moved:
            cute.arch.sync_warp()
        warpgroup.wait_group(0)
        if moved:
            for v in cutlass.range_constexpr(self.d_v // 2):
                acc_o[v] = acc_o[v] * (gamma0 if v // 2 % 2 == 0 else gamma1)
        release(self.loads.v, st, v_slot)
        to_a(acc_s, p16, self.tile // 2, self.dtype)

    @cute.jit
    def _last(self, st, operands, vc):
        """P.V of a work tile's last tile of keys."""
        _, mma_o, _, _, r_v, _, acc_o, r_p, _, _ = operands
        slot = vc % STAGES
        self.loads.v.wait_full(st, slot, (vc // STAGES) & 1)
        compat.wgmma_fence()
        issue(mma_o, acc_o, r_p, r_v[None, None, None, slot], accumulate=True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        release(self.loads.v, st, slot)

    @cute.jit
    def _softmax(self, acc_s, state, first, masked: cutlass.Constexpr):
        """S -> P' in place; (gamma of the two rows, did an m_ref of the warp move?)."""
        m_ref, total, scale, limit = state
        tidx, _, _ = cute.arch.thread_idx()
        if const_expr(masked):
            column = first + 2 * (tidx % 4)
            for v in cutlass.range_constexpr(self.tile // 2):
                if column + (8 * (v // 4) + v % 2) >= limit[v // 2 % 2]:
                    acc_s[v] = -Float32.inf
        most = [acc_s[v] for v in range(8)]
        for v in cutlass.range_constexpr(8, self.tile // 2):
            most[v % 8] = cute.arch.fmax(most[v % 8], acc_s[v])
        gamma, moved = [None] * 2, Boolean(False)
        for i in cutlass.range_constexpr(2):
            x = cute.arch.fmax(
                cute.arch.fmax(most[2 * i], most[2 * i + 1]),
                cute.arch.fmax(most[2 * i + 4], most[2 * i + 5]),
            )
            for off in cutlass.range_constexpr(2):
                x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, 1 << off))
            old = m_ref[i]
            new, gamma[i] = raise_m_ref(x * scale, old)
            m_ref[i] = new
            moved = moved | (new != old)
        part = [Float32(0.0) for _ in range(4)]
        for v in cutlass.range_constexpr(self.tile // 2):
            r = v // 2 % 2
            acc_s[v] = cute.math.exp2(fma(acc_s[v], scale, -m_ref[r]), fastmath=True)
            part[2 * r + v % 2] = part[2 * r + v % 2] + acc_s[v]
        for i in cutlass.range_constexpr(2):
            total[i] = total[i] * gamma[i] + (part[2 * i] + part[2 * i + 1])
        # The vote asks for the sums too, which are never negative, and an instruction of the warp
        # hangs on it before the wait for P.V: or else ptxas puts the exponentials behind that wait.
        moved = moved | (total[0] + total[1] < 0.0)
        return gamma[0], gamma[1], cute.arch.vote_any_sync(moved)
