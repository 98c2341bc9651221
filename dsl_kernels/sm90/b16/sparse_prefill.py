"""Sparse prefill for SM90: attention of each query token to the rows of KV that it names, BF16.

out = softmax(softmax_scale q kv^T) kv[:, :512] over a query's ``indices``; with the largest logit
and the LSE of each row.  Nothing is split: a CTA stays and takes work tiles, a block of heads of a
query, one behind the other (sparse_prefill_parts.py).  More than 64 heads are two work tiles, which
two CTAs compute side by side: each row of KV then comes once from DRAM and once more from L2.

Roles (4 warpgroups)
    wg 0  warps 0, 1, 3  gather KV rows by cp.async; warp 1 loads Q by TMA, too
          warp 2         announcer: a landed half of a tile, behind a proxy fence
    wg 1                 softmax: S = Q K^T, P to shared memory, where RoPE was
    wg 2, 3              P.V: O of half of the 512 channels each, in fp32 registers

Timeline of tile i
    gather    | first half of i+1 when P.V has read its half of i-1 | second half ...
    softmax   | Q.K i: first half, second half | maxima, exp2 | P i -> |
    P.V       | wait P i | first half of the channels | free it | second half | free it

Forms, loops and hand-overs: sparse_prefill_form.py.

m_ref (log2 units; sm90/online_softmax.py).  P' = 2^(t - m_ref) in BF16, O and the row sum in fp32
relative to the same m_ref, which moves when a tile exceeds it by 2^15 only.

Shared memory   KV 2 x 73728 (a stage has room for 576 channels; with 512 the last 64 are P's alone)
| Q 73728 with 64 rows, 2 x 36864 with 32, 2 x 18432 with 16 | gamma, factors of O, flags, bits of
the places, barriers
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ...blocks import budget as bud
from ...blocks import compat
from ...blocks.registers import claim_registers
from ...blocks.smem import struct_of
from ...formats.dims import HEAD_DIM_QK, KV_LORA_RANK
from ...formats.dims import TOKEN_TILE as TILE
from ...load.work_list import LOG2E
from ..roles import INV_RING, SWAP_AB_ROWS, WARPGROUP
from .dense_rows_on_m import PV_N
from .sparse_prefill_form import GatheredForm, p_ring
from .sparse_prefill_parts import STAGES, GatheredTiles, Gmem
from .sparse_prefill_rows_on_m import GatheredLines, GatheredRowsOnM
from .sparse_prefill_swap_ab import GatheredSwapAb

if TYPE_CHECKING:
    from ...spec import VariantSpec

SMALL_BYTES = 3072  # gamma, barriers, alignment: an upper bound


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the kernel cannot be built for ``spec``, or None."""
    return bud.check(budget(spec))


def form_of(spec: VariantSpec) -> type[GatheredForm]:
    """The class of the form of ``spec``."""
    if spec.row_tile <= SWAP_AB_ROWS:
        return GatheredSwapAb
    return GatheredLines if spec.lists == "split" else GatheredRowsOnM


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    rows, swap_ab, form = spec.row_tile, spec.row_tile <= SWAP_AB_ROWS, form_of(spec)
    producer, softmax, pv = form.registers
    loads = GatheredTiles(spec.d_qk, rows)
    tiles = (STAGES * TILE + loads.q_stages * rows) * HEAD_DIM_QK * 2
    return bud.Budget(
        groups=(
            bud.WarpGroup("producers", producer),
            bud.WarpGroup("softmax", softmax),
            bud.WarpGroup("P.V", pv, count=2),
        ),
        smem=tiles + form.lines_bytes + SMALL_BYTES,
        barriers=(
            *(barrier for ring in loads.rings for barrier in ring.budget()),
            *p_ring(rows).budget(), *INV_RING.budget(),
        ),
        mmas=(
            bud.Mma("Q.K", TILE if swap_ab else rows, rows if swap_ab else TILE, spec.d_qk, "bf16"),
            bud.Mma("P.V", 64, rows if swap_ab else PV_N, TILE, "bf16"),
        ),
    )  # fmt: skip


def build(spec: VariantSpec):
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    return SparsePrefill(spec), fake_args(spec)


def fake_args(spec: VariantSpec):
    """Symbolic arguments of the exported function by name, in the order of ``__call__``."""
    s_q, h, s_kv, topk, lengths, sinks = (
        compat.sym(name=x) for x in ("s_q", "h", "s_kv", "topk", "lengths_or_0", "sinks_or_0")
    )
    bf16, i32, f32 = (compat.DTYPES[x] for x in ("bf16", "i32", "f32"))

    def figures():
        return compat.strided(f32, (s_q, h), (compat.sym64(), compat.sym64()), 4)

    return {
        "q": compat.rows(bf16, (s_q, h, spec.d_qk)),
        "kv": compat.rows(bf16, (s_kv, 1, spec.d_qk)),
        "indices": compat.strided(i32, (s_q, 1, topk), (compat.sym64(), compat.sym64(), 1), 4),
        "topk_length": compat.vector(i32, lengths),
        "attn_sink": compat.vector(f32, sinks),
        "out": compat.rows(bf16, (s_q, h, KV_LORA_RANK)),
        "max_logits": figures(),
        "lse": figures(),
        "softmax_scale": Float32(1.0),
        "ctas": Int32(1),
    }


class SparsePrefill:
    """The kernel of one head size and row tile."""

    def __init__(self, spec: VariantSpec):
        self.budget, self.loads = budget(spec), GatheredTiles(spec.d_qk, spec.row_tile)
        self.form = form_of(spec)(self.loads)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # bf16 (s_q, h, d_qk)
        kv: cute.Tensor,  # bf16 (s_kv, 1, d_qk)
        indices: cute.Tensor,  # i32 (s_q, 1, topk), rows of kv
        topk_length: cute.Tensor,  # i32 (s_q,) or (0,)
        attn_sink: cute.Tensor,  # f32 (h,) or (0,)
        out: cute.Tensor,  # bf16 (s_q, h, 512)
        max_logits: cute.Tensor,  # f32 (s_q, h), natural
        lse: cute.Tensor,  # f32 (s_q, h), natural
        softmax_scale: Float32,
        ctas: Int32,
        stream,
    ):
        lists, figures = (kv, indices, topk_length, attn_sink), (max_logits, lse)
        self.launch_whole((q,), lists, (out, *figures), (softmax_scale, ctas), stream)

    def launch_whole(self, queries, lists, results, numbers, stream):
        """The kernel over whole lists; ``queries``: a tensor, or content and RoPE."""
        softmax_scale, ctas = numbers
        heads, rows = Int32(queries[0].shape[1]), self.loads.rows
        blocks = compat.fast_divisor((heads + (rows - 1)) // rows)
        gmem = Gmem(*lists, *results, heads, blocks, softmax_scale * LOG2E, ctas)
        self.launch(queries, gmem, stream)

    def launch(self, q, gmem, stream):
        """``gmem.ctas`` CTAs over the queries; ``q``: (a tensor), or content and RoPE."""
        self.kernel(self.loads.source_of_q(*q), gmem).launch(
            grid=(gmem.ctas, 1, 1), block=(self.budget.threads, 1, 1), stream=stream,
            min_blocks_per_mp=1, use_pdl=True,
        )  # fmt: skip

    def storage(self, layouts):
        """The CTA's shared memory."""
        return struct_of(**self.form.all_fields(), **self.form.parts.tile_fields(layouts))

    @cute.kernel
    def kernel(self, tma_q, gmem: Gmem):
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        layouts = self.form.layouts()
        st = cutlass.memory.SmemAllocator().allocate(self.storage(layouts))
        if warp_id == 0:
            for loaded in tma_q:
                cpasync.prefetch_descriptor(loaded.atom)
            with cute.arch.elect_one():
                self.loads.init(st)
                self.form.init_barriers(st)
                cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        compat.pdl_wait()  # queries, KV and indices come from the kernels before
        producer, softmax, pv = self.form.registers
        if wg == 0:
            claim_registers(self.budget, producer)
            self.loads.run(st, warp_id, layouts, tma_q, gmem, Int32(cta))
        elif wg == 1:
            claim_registers(self.budget, softmax)
            self.form.softmax(st, layouts, gmem, Int32(cta))
        else:
            claim_registers(self.budget, pv)
            self.form.products(st, layouts, gmem, Int32(cta), wg - 2)
