"""A conformance program for tcgen05: two chained .ws GEMMs over a ring of tiles, softgpu's smallest
relative of the SM100 decode kernels, in which tests plant bugs.

    S_i = Q K_i^T (e4m3, then bf16 RoPE)      P_i = e4m3(S_i / 64)      O = sum over i of P_i K_i

K's bytes are V's: the second GEMM reads the tile through an MN-major descriptor.  One CTA.

Roles           warps 0-3 math: S -> P, O to memory | warp 4 loads | warp 5 Q K | warp 6 P K
Tensor memory   O 128 columns, zeros at first | S 32 | Q content 64, by tcgen05.cp
Shared memory   Q, Q RoPE | 2 stages of K and its RoPE | P

Built as ``tests.support.dsl_program`` says.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.experimental import primitives as prim

from tests.support.dsl_program import SW, at, command, desc, fake, lanes, rows_first, sides

F8, BF = cutlass.Float8E4M3FN, cutlass.BFloat16
M, N, D, R = 64, 64, 256, 64  # rows, tokens of a tile, content and RoPE channels
STAGES, MATH = 2, 128  # tiles in flight; threads that do the arithmetic
T_O, T_S, T_Q, COLUMNS = 0, 128, 192, 256  # tensor memory
Q_FULL, K_FULL, K_EMPTY, S_FULL, S_EMPTY, P_FULL, P_EMPTY, O_FULL, BARRIERS = (
    0, 1, 1 + STAGES, 1 + 2 * STAGES, 2 + 2 * STAGES, 3 + 2 * STAGES, 4 + 2 * STAGES,
    5 + 2 * STAGES, 6 + 2 * STAGES,
)  # fmt: skip
ARRIVALS = {S_EMPTY: MATH, P_FULL: MATH, **{K_EMPTY + s: 2 for s in range(STAGES)}}


class Cta(NamedTuple):
    """Values that the roles share: mbarriers, addresses in shared memory, tensor memory, tiles."""

    bars: Any
    q: Any
    qr: Any
    k: Any
    kr: Any
    p: Any
    tmem: Any
    tiles: Any


def idesc(dtype, n: int, **kw):
    return prim.Tcgen05InstrDesc.build(
        c_dtype=Float32, a_dtype=dtype, b_dtype=dtype, m_dim=M, n_dim=n, **kw
    )


class Chain:
    @cute.jit
    def __call__(self, q, qr, kv, kr, o, stream):
        major = OperandMajorMode.K
        one = tcgen05.CtaGroup.ONE
        mmas = [
            sm100.make_trivial_tiled_mma(t, t, major, major, Float32, one, (M, N)) for t in (F8, BF)
        ]
        load = cpasync.CopyBulkTensorTileG2SOp(one)
        self.bytes = [0, 0]
        atoms, layouts = [], []
        for i, (t, dtype, x, stages) in enumerate(
            ((q, F8, D, 1), (qr, BF, R, 1), (kv, F8, D, STAGES), (kr, BF, R, STAGES))
        ):
            g = rows_first(t, dtype)
            layout = sm100.make_smem_layout_a(mmas[i % 2], (M, N, x), dtype, stages)
            tile = cute.slice_(layout, (None, None, None, 0))
            atoms.append(
                cute.nvgpu.make_tiled_tma_atom_A(
                    load, g, tile, (M, N, x), mmas[i % 2], (1, 1, 1, 1)
                )
            )
            layouts.append(layout)
            self.bytes[i // 2] += cute.size_in_bytes(dtype, tile)
        (aq, gq), (aqr, gqr), (ak, gk), (akr, gkr) = atoms
        self.kernel(*mmas, aq, gq, aqr, gqr, ak, gk, akr, gkr, o, *layouts).launch(
            grid=(1, 1, 1), block=(MATH + 96, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, mc: cute.TiledMma, mr: cute.TiledMma, aq: cute.CopyAtom, gq: cute.Tensor,
        aqr: cute.CopyAtom, gqr: cute.Tensor, ak: cute.CopyAtom, gk: cute.Tensor,
        akr: cute.CopyAtom, gkr: cute.Tensor, o: cute.Tensor, lq: cute.ComposedLayout,
        lqr: cute.ComposedLayout, lk: cute.ComposedLayout, lkr: cute.ComposedLayout,
    ):  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        bars, hold = smem.allocate_array(Int64, BARRIERS), smem.allocate_array(Int32, 4)
        sq, sk, sqr, skr = (
            smem.allocate_tensor(t, x.outer, byte_alignment=1024, swizzle=x.inner)
            for t, x in ((F8, lq), (F8, lk), (BF, lqr), (BF, lkr))
        )
        sp = smem.allocate_array(cutlass.Uint8, M * N, byte_alignment=1024)
        if warp == 4:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(BARRIERS):
                    cute.arch.mbarrier_init(bars + i, ARRIVALS.get(i, 1))
        cute.arch.mbarrier_init_fence()
        if warp == 0:
            cute.arch.alloc_tmem(COLUMNS, hold)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        tmem = Int32(cute.arch.retrieve_tmem_ptr(Float32, 16, hold).toint())
        q, qr, k, kr = (Int32(x.iterator.toint()) for x in (sq, sqr, sk, skr))
        cta = Cta(bars, q, qr, k, kr, sp, tmem, gk.shape[2])
        q_parts = parts(mc, aq, gq, sq, D), parts(mr, aqr, gqr, sqr, R)
        k_parts = parts(mc, ak, gk, sk, D), parts(mr, akr, gkr, skr, R)
        if warp == 4:
            self.load_q(bars, q_parts)
            for i in cutlass.range(cta.tiles, unroll=1):
                self.load_k(bars, i, k_parts)
        elif warp == 5:
            self.score(cta)
        elif warp == 6:
            self.multiply(cta)
        else:
            self.clear(cta)
            for i in cutlass.range(cta.tiles, unroll=1):
                self.weigh(cta, i)
            self.finish(cta, o)
        prim.tcgen05_fence(prim.Tcgen05Fence.BEFORE_THREAD_SYNC)
        cute.arch.sync_threads()
        if warp == 0:
            prim.tcgen05_fence(prim.Tcgen05Fence.AFTER_THREAD_SYNC)
            cute.arch.dealloc_tmem(cute.arch.retrieve_tmem_ptr(Float32, 16, hold), COLUMNS)

    # ---- loads -----------------------------------------------------------------------------------
    @cute.jit
    def load_q(self, bars, planes):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars + Q_FULL, self.bytes[0])
        for which in cutlass.range_constexpr(2):
            atom, ds, dg = planes[which]
            cute.copy(atom, dg[None, 0], ds[None, 0], tma_bar_ptr=bars + Q_FULL)

    @cute.jit
    def load_k(self, bars, i, planes):
        stage = i % STAGES
        cute.arch.mbarrier_wait(bars + K_EMPTY + stage, (i // STAGES & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars + K_FULL + stage, self.bytes[1])
        for which in cutlass.range_constexpr(2):
            atom, ds, dg = planes[which]
            bar = bars + K_FULL + stage
            cute.copy(atom, dg[None, i], ds[None, stage], tma_bar_ptr=bar)

    # ---- the issuing warps -----------------------------------------------------------------------
    @cute.jit
    def score(self, cta: Cta):
        """S = Q K^T of every tile; Q first moves to tensor memory."""
        cute.arch.mbarrier_wait(cta.bars + Q_FULL, 0)
        if prim.elect_sync():
            for c in cutlass.range_constexpr(D // 16):
                chunk = desc(cta.q + c // 8 * 8192 + c % 8 * 16, 16, 1024, SW.SWIZZLE_128B)
                prim.tcgen05_cp(
                    prim.Tcgen05CpShape.SHAPE_64X128B, at(cta.tmem + T_Q + 4 * c), chunk,
                    multicast=prim.Tcgen05CpMulticast.WARPX2_02_13,
                )  # fmt: skip
        for i in cutlass.range(cta.tiles, unroll=1):
            stage = i % STAGES
            cute.arch.mbarrier_wait(cta.bars + K_FULL + stage, i // STAGES & 1)
            cute.arch.mbarrier_wait(cta.bars + S_EMPTY, (i & 1) ^ 1)
            prim.tcgen05_fence(prim.Tcgen05Fence.AFTER_THREAD_SYNC)
            if prim.elect_sync():
                k, kr = cta.k + stage * (N * D), cta.kr + stage * (N * R * 2)
                for x in cutlass.range_constexpr(D // 32):
                    a = at(cta.tmem + T_Q + 8 * x)
                    b = desc(k + x // 4 * 8192 + x % 4 * 32, 16, 1024, SW.SWIZZLE_128B)
                    content = prim.Tcgen05MMAKind.F8F6F4
                    prim.tcgen05_mma_ws(content, at(cta.tmem + T_S), a, b, idesc(F8, N), x > 0)
                for x in cutlass.range_constexpr(R // 16):
                    a = desc(cta.qr + 32 * x, 16, 1024, SW.SWIZZLE_128B)
                    b = desc(kr + 32 * x, 16, 1024, SW.SWIZZLE_128B)
                    rope = prim.Tcgen05MMAKind.F16
                    prim.tcgen05_mma_ws(rope, at(cta.tmem + T_S), a, b, idesc(BF, N), True)
                prim.tcgen05_commit(cta.bars + S_FULL)
                prim.tcgen05_commit(cta.bars + K_EMPTY + stage)

    @cute.jit
    def multiply(self, cta: Cta):
        """O += P K of every tile."""
        for i in cutlass.range(cta.tiles, unroll=1):
            stage = i % STAGES
            # K has landed: its reader score told the math warps, which tell by P
            cute.arch.mbarrier_wait(cta.bars + P_FULL, i & 1)
            prim.tcgen05_fence(prim.Tcgen05Fence.AFTER_THREAD_SYNC)
            if prim.elect_sync():
                k, p = cta.k + stage * (N * D), Int32(cta.p.toint())
                for x in cutlass.range_constexpr(N // 32):
                    a = desc(p + 32 * x, 16, 512, SW.SWIZZLE_64B)
                    v = desc(k + x * 4096, 8192, 1024, SW.SWIZZLE_128B)
                    shape = idesc(F8, D, b_major=1)
                    weighed = prim.Tcgen05MMAKind.F8F6F4
                    prim.tcgen05_mma_ws(weighed, at(cta.tmem + T_O), a, v, shape, True)
                prim.tcgen05_commit(cta.bars + K_EMPTY + stage)
                prim.tcgen05_commit(cta.bars + P_EMPTY)
        if prim.elect_sync():
            prim.tcgen05_commit(cta.bars + O_FULL)

    # ---- arithmetic ------------------------------------------------------------------------------
    @cute.jit
    def clear(self, cta: Cta):
        """O = 0."""
        zeros = cutlass.Vector.from_elements([Int32(0) for _ in range(32)], Int32)
        for c in cutlass.range_constexpr(0, D // 2, 32):
            prim.tcgen05_st("32x32b", at(lanes(cta.tmem) + T_O + c), zeros)
        prim.tcgen05_wait(prim.Tcgen05Wait.STORE)

    @cute.jit
    def weigh(self, cta: Cta, i):
        """P = e4m3(S / 64) of tile i: a thread has half of a row."""
        tidx, _, _ = cute.arch.thread_idx()
        cute.arch.mbarrier_wait(cta.bars + S_FULL, i & 1)
        prim.tcgen05_fence(prim.Tcgen05Fence.AFTER_THREAD_SYNC)
        s = prim.tcgen05_ld("32x32b", at(lanes(cta.tmem) + T_S, Float32), num=N // 2)
        prim.tcgen05_wait(prim.Tcgen05Wait.LOAD)
        prim.tcgen05_fence(prim.Tcgen05Fence.BEFORE_THREAD_SYNC)
        cute.arch.mbarrier_arrive(cta.bars + S_EMPTY)
        values = cute.make_rmem_tensor((N // 2,), Float32)
        for v in cutlass.range_constexpr(N // 2):
            values[v] = s[v]
        p8 = cute.make_rmem_tensor((N // 2,), F8)
        p8.store((values.load() * Float32(1 / 64)).to(F8))
        words = cute.recast_tensor(p8, Int32)
        cute.arch.mbarrier_wait(cta.bars + P_EMPTY, (i & 1) ^ 1)
        for c in cutlass.range_constexpr(N // 32):
            to = tidx % M * N + tidx // M * (N // 2) + 16 * c
            to = to ^ (((to >> 7) & 3) << 4)
            chunk = cutlass.Vector.from_elements([words[4 * c + j] for j in range(4)], Int32)
            store_16(Int32((cta.p + to).toint()), chunk)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(cta.bars + P_FULL)

    @cute.jit
    def finish(self, cta: Cta, o):
        """O to memory."""
        tidx, _, _ = cute.arch.thread_idx()
        cute.arch.mbarrier_wait(cta.bars + O_FULL, 0)
        prim.tcgen05_fence(prim.Tcgen05Fence.AFTER_THREAD_SYNC)
        part = prim.tcgen05_ld("32x32b", at(lanes(cta.tmem) + T_O, Float32), num=D // 2)
        prim.tcgen05_wait(prim.Tcgen05Wait.LOAD)
        for v in cutlass.range_constexpr(D // 2):
            o[tidx % M, tidx // M * (D // 2) + v] = part[v]


def parts(mma, atom, g, s, width):
    """(atom, shared side by stage, global side by tile) of a load of 64 rows."""
    part = mma.get_slice(0).partition_A(cute.local_tile(g, (M, width), (0, 0, None)))
    return sides(atom, s, part)


def store_16(address, words):
    """16 bytes to shared memory."""
    prim.store_ext(words, cutlass.Array(address, dtype=Int32, shape=(4,), addrspace=3))


if __name__ == "__main__":
    tiles, u8 = cute.sym_int(), cutlass.Uint8
    command("ws_chain", Chain(), (
        fake(u8, 1, M, D), fake(BF, 1, M, R), fake(u8, tiles, N, D), fake(BF, tiles, N, R),
        fake(Float32, M, D),
    ))  # fmt: skip
