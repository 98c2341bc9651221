"""A conformance program for tcgen05 in a pair of CTAs: one GEMM over a ring of tiles, in which
tests plant bugs.

    C = sum over i of A_i B_i^T (e4m3)      128 x 64, over both CTAs

Each CTA loads its 64 rows of A and its 32 of B; CTA 0, the leader, multiplies for both.  Its
mbarriers count the bytes of both, and its commits arrive at the mbarriers of both.

Roles           warps 0-3 C to memory | warp 4 loads | warp 5 of the leader A B
Tensor memory   C 32 columns: layout B, 64 rows by two halves of the columns
Shared memory   2 stages of A and B

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

F8 = cutlass.Float8E4M3FN
CTAS, STAGES = 2, 2  # of the pair; tiles in flight
M, N, K = 128, 64, 64  # of the pair: rows, columns, channels of a tile
ROWS, COLUMNS = M // CTAS, N // 2  # of a CTA in memory, in tensor memory
FULL, EMPTY, DONE, BARRIERS = 0, STAGES, 2 * STAGES, 2 * STAGES + 1
PAIR, BOTH = prim.CTAGroup.CTA_2, (1 << CTAS) - 1


class Cta(NamedTuple):
    """Values that the roles share: mbarriers, addresses in shared memory, tensor memory, tiles."""

    bars: Any
    a: Any
    b: Any
    tmem: Any
    tiles: Any
    rank: Any


class PairGemm:
    @cute.jit
    def __call__(self, a, b, c, stream):
        major, two = OperandMajorMode.K, tcgen05.CtaGroup.TWO
        mma = sm100.make_trivial_tiled_mma(F8, F8, major, major, Float32, two, (M, N))
        load, shape = cpasync.CopyBulkTensorTileG2SOp(two), (M, N, K)
        cluster = cute.tiled_divide(cute.make_layout((CTAS, 1, 1)), (mma.thr_id.shape,)).shape
        la = sm100.make_smem_layout_a(mma, shape, F8, STAGES)
        lb = sm100.make_smem_layout_b(mma, shape, F8, STAGES)
        tile_a, tile_b = (cute.slice_(x, (None, None, None, 0)) for x in (la, lb))
        atom_a, ga = cute.nvgpu.make_tiled_tma_atom_A(
            load, rows_first(a, F8), tile_a, shape, mma, cluster
        )
        atom_b, gb = cute.nvgpu.make_tiled_tma_atom_B(
            load, rows_first(b, F8), tile_b, shape, mma, cluster
        )
        self.bytes = CTAS * (cute.size_in_bytes(F8, tile_a) + cute.size_in_bytes(F8, tile_b))
        self.kernel(mma, atom_a, ga, atom_b, gb, c, la, lb).launch(
            grid=(CTAS, 1, 1), block=(192, 1, 1), cluster=(CTAS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, mma: cute.TiledMma, atom_a: cute.CopyAtom, ga: cute.Tensor, atom_b: cute.CopyAtom,
        gb: cute.Tensor, c: cute.Tensor, la: cute.ComposedLayout, lb: cute.ComposedLayout,
    ):  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        smem = cutlass.memory.SmemAllocator()
        bars, hold = smem.allocate_array(Int64, BARRIERS), smem.allocate_array(Int32, 4)
        sa, sb = (
            smem.allocate_tensor(F8, x.outer, byte_alignment=1024, swizzle=x.inner)
            for x in (la, lb)
        )
        if warp == 4:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(BARRIERS):
                    cute.arch.mbarrier_init(bars + i, 1)
        cute.arch.mbarrier_init_fence()
        if warp == 0:
            cute.arch.alloc_tmem(COLUMNS, hold, is_two_cta=True)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        tmem = Int32(cute.arch.retrieve_tmem_ptr(Float32, 16, hold).toint())
        a, b = (Int32(x.iterator.toint()) for x in (sa, sb))
        cta = Cta(bars, a, b, tmem, ga.shape[2], rank)
        part = mma.get_slice(rank)
        rows = part.partition_A(cute.local_tile(ga, (M, K), (0, 0, None)))
        columns = part.partition_B(cute.local_tile(gb, (N, K), (0, 0, None)))
        operands = sides(atom_a, sa, rows), sides(atom_b, sb, columns)
        if warp == 4:
            for i in cutlass.range(cta.tiles, unroll=1):
                self.load(cta, i, operands)
        elif warp == 5:
            if rank == 0:
                self.multiply(cta)
        else:
            self.finish(cta, c)
        prim.tcgen05_fence(prim.Tcgen05Fence.BEFORE_THREAD_SYNC)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp == 0:
            prim.tcgen05_fence(prim.Tcgen05Fence.AFTER_THREAD_SYNC)
            where = cute.arch.retrieve_tmem_ptr(Float32, 16, hold)
            cute.arch.dealloc_tmem(where, COLUMNS, is_two_cta=True)

    @cute.jit
    def load(self, cta: Cta, i, operands):
        """This CTA's halves of tile i; the leader expects the bytes of both CTAs."""
        stage = i % STAGES
        cute.arch.mbarrier_wait(cta.bars + EMPTY + stage, (i // STAGES & 1) ^ 1)
        bar = cta.bars + FULL + stage
        if cta.rank == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, self.bytes)
        for which in cutlass.range_constexpr(2):
            atom, ds, dg = operands[which]
            cute.copy(atom, dg[None, i], ds[None, stage], tma_bar_ptr=bar)

    @cute.jit
    def multiply(self, cta: Cta):
        """C of both CTAs."""
        shape = prim.Tcgen05InstrDesc.build(
            c_dtype=Float32, a_dtype=F8, b_dtype=F8, m_dim=M, n_dim=N
        )
        for i in cutlass.range(cta.tiles, unroll=1):
            stage = i % STAGES
            cute.arch.mbarrier_wait(cta.bars + FULL + stage, i // STAGES & 1)
            if prim.elect_sync():
                for x in cutlass.range_constexpr(K // 32):
                    a = desc(cta.a + stage * (ROWS * K) + 32 * x, 16, 512, SW.SWIZZLE_64B)
                    b = desc(cta.b + stage * (N // CTAS * K) + 32 * x, 16, 512, SW.SWIZZLE_64B)
                    more = (i > 0) | (x > 0)
                    kind = prim.Tcgen05MMAKind.F8F6F4
                    prim.tcgen05_mma(kind, PAIR, at(cta.tmem), a, b, shape, more)
                empty = cta.bars + EMPTY + stage
                prim.tcgen05_commit(empty, multicast_mask=BOTH, group=PAIR)
        if prim.elect_sync():
            prim.tcgen05_commit(cta.bars + DONE, multicast_mask=BOTH, group=PAIR)

    @cute.jit
    def finish(self, cta: Cta, c):
        """C to memory: a thread has half of a row."""
        tidx, _, _ = cute.arch.thread_idx()
        cute.arch.mbarrier_wait(cta.bars + DONE, 0)
        prim.tcgen05_fence(prim.Tcgen05Fence.AFTER_THREAD_SYNC)
        part = prim.tcgen05_ld("32x32b", at(lanes(cta.tmem), Float32), num=COLUMNS)
        prim.tcgen05_wait(prim.Tcgen05Wait.LOAD)
        for v in cutlass.range_constexpr(COLUMNS):
            c[cta.rank * ROWS + tidx % ROWS, tidx // ROWS * COLUMNS + v] = part[v]


if __name__ == "__main__":
    tiles, u8 = cute.sym_int(), cutlass.Uint8
    arguments = fake(u8, tiles, M, K), fake(u8, tiles, N, K), fake(Float32, M, N)
    command("pair_gemm", PairGemm(), arguments)
