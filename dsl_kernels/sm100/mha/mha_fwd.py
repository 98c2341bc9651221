"""Dense MHA prefill for SM100, heads of 192/128 and 128/128 channels, BF16 or fp16.

Built when it is asked for (``softmax="turns"``); no public function calls it, where
FlashAttention-4 and FlashMLA serve.

Arguments, list of work, loads, clearing of V and what a NaN in V does are SM90's
(sm90/mha/mha_fwd.py, sm90/attention_parts.py, sm90/hidden_keys.py).  A CTA has 128 query rows, M of
one ``tcgen05.mma``.  Two softmax warpgroups take its tiles of 128 keys *in turn*, each with m_refs,
row sums and an accumulator O of its own, which are merged at a work tile's end: nothing is
exchanged in the loop, and S of one is computed under the other's softmax.

Roles (3 warpgroups of 128 threads)
    wg 0  warp 0  producer     TMA: Q of a work tile; K and V tiles of keys, the last tile first
          warp 1  clearing     V behind a sequence's end; V that is not finite, in a work tile that
                               is taken again
          warp 2  issuer       S = Q K^T; O = P V (+ O)                            (mha_issue.py)
          warp 3               allocates tensor memory, frees it at the end
    wg 1, 2       softmax      tiles 0, 2 .. and 1, 3 ..: S -> P, rescaling of O where an m_ref
                               moves (rarely), half of the channels of every row   (mha_softmax.py)

Timeline, tile x of a work tile (n - 1 .. 0 of its keys)
    issuer       | S x | wait P x - 1 | P.V x - 1 | S x + 1 | wait P x | P.V x | ...
    softmax      turn 0: S x -> registers | max, exp2 | P x -> tensor memory | wait S x + 2 ...
                 turn 1:       ... x - 1         | S x + 1 -> registers | ...

Tensor memory (columns of 512, a row a lane)
    0    S of turn 0, then its P in columns 64 .. 127 (two keys a column)
    128  S of turn 1, likewise
    256  O of turn 0, d_v channels      256 + d_v  O of turn 1

Shared memory    Q 128 rows | K 2 tiles | V 2 tiles | notes, barriers, m_refs and sums
    d_qk, d_v  192, 128: 219,136 bytes      128, 128: 169,984 bytes

Executed on the software GPU (softgpu); no Blackwell GPU has run it.
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
from ...formats.mha_list import ROWS, VALUES
from ...sm90.attention_parts import STAGES
from ...sm90.mha import mha_fwd as base
from .. import umma
from ..b16.dense_parts import WARPGROUP
from .mha_issue import ALLOCATED, FORM, TILE, TURNS, Loads100, Products
from .mha_softmax import Softmax

if TYPE_CHECKING:
    from ...spec import VariantSpec

SMALL, SOFTMAX = 80, 208  # registers
SMALL_BYTES = 8192  # notes, barriers, m_refs and sums, alignment: an upper bound


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the kernel cannot be built for ``spec``, or None."""
    if spec.d_v != VALUES[spec.d_qk] or spec.key_tile != TILE or spec.q_steps:
        return "softmax in turns takes 192/128 or 128/128 channels, 128 keys at a time"
    return bud.check(budget(spec))


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared and tensor memory of a CTA."""
    tiles = ROWS * spec.d_qk + STAGES * TILE * (spec.d_qk + spec.d_v)
    return bud.Budget(
        groups=(
            bud.WarpGroup("producer and issuer", SMALL),
            bud.WarpGroup("softmax", SOFTMAX, count=TURNS),
        ),
        smem=2 * tiles + SMALL_BYTES,
        barriers=tuple(barrier for ring in Loads100(spec).rings for barrier in ring.budget()),
        mmas=(
            bud.Mma("Q.K", ROWS, TILE, spec.d_qk, spec.dtype),
            bud.Mma("P.V", ROWS, spec.d_v, TILE, spec.dtype),
        ),
        tmem_columns=ALLOCATED,
        arch=spec.arch,
    )


def build(spec: VariantSpec):
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    kernel = MhaFwd(spec)
    entry = base.TwoKeys(kernel) if len(kernel.loads.widths) == 2 else base.OneKey(kernel)
    return entry, kernel.fakes()


class MhaFwd(base.MhaFwd):
    """The kernel of one head size and dtype; its host half is SM90's."""

    def __init__(self, spec: VariantSpec):
        self.d_qk, self.d_v, self.dtype = spec.d_qk, spec.d_v, compat.dtype(spec.dtype)
        self.tile, self.budget = spec.key_tile, budget(spec)
        self.loads = Loads100(spec)
        self.products = Products(self.loads, self.dtype)
        self.softmax = Softmax(self.loads, self.dtype)

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
        if warp_id == 3:
            FORM.allocate(st.tmem.data_ptr(), ALLOCATED)
        cute.arch.sync_threads()
        compat.pdl_wait()  # the list, q, k and v come from the kernels before
        tmem = umma.base_of(st.tmem.data_ptr())
        if wg == 0:
            claim_registers(self.budget, SMALL)
            query_heads, group, rope_heads = heads
            if warp_id == 0:
                gmem = (*tables, query_heads)
                self.loads.run(st, layouts, tma, gmem, causal, group, rope_heads, ctas)
            elif warp_id == 1:
                self.loads.clear(st)
            elif warp_id == 2:
                self.products.run(st, tmem, causal)
        else:
            claim_registers(self.budget, SOFTMAX)
            self.softmax.run(st, tmem, results, scale, causal, wg - 1, self._next)
        cute.arch.sync_threads()  # behind each role's last access of tensor memory
        if warp_id == 3:
            FORM.free(st.tmem.data_ptr(), ALLOCATED)
