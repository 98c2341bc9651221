"""index_logits for SM100: scores of cached tokens for query tokens, from a paged FP8 index cache.

    out[r, t] = scale[t] * sum_h w[r, h] * max(q[r, h] . k[t], 0)        t < tokens that row r sees

Units, runs, the producer and every edge of a call are SM90's (indexer/index_scoring.py,
indexer/index_units.py).  A step is a *pair* of pages: 128 tokens on M, heads * rows on N, one
``tcgen05.mma`` of 32 channels at a time.  D has a token a lane and a head a column, so a thread
sums the heads of its own token: no shuffle, no exchange.

Executed on the software GPU (softgpu); no Blackwell GPU has run it.

Roles (3 warpgroups of 128 threads)
    wg 0  warp 0  producer     finds the CTA's run, announces units, fills the ring of pairs
          warp 1  issuer       D = K Q^T of every pair
          warp 2               owns tensor memory
    wg 1, 2       maths        ReLU, weights, sum over heads, scores to memory: every other pair,
                               or of units of 256 columns half of the rows of every pair

Timeline of pair i
    producer   | TMA i + stages - 1 as soon as D i - 1 is there and its scales are read ...
    issuer     | wait pair i, accumulator | 4 MMAs | D i + 1 ...
    maths      |                 wait D i | ReLU, fma of head after head | scores out | ...

Barriers (Ring: full, empty; "commit" is one arrival when the issued MMAs are complete)
    pages   TMA bytes   | commit, maths warps of the pair       8 to 12 pairs
    acc     commit      | those maths warps                     4 accumulators, or 2
    units   TMA bytes   | commit, issuer, all maths warps       2
A commit speaks for MMAs: what lanes have read of a unit, its words, the issuer's own arrival frees.

Tensor memory: accumulators side by side, N columns each: lane t, column (r, h) is token t, row r,
head h.  Shared memory (bytes): ring of pairs, 16384 keys (128-byte swizzle) and 512 scales each |
two units: N x 128 queries, N weights, eight words | barriers.

Registers: 72, 216, 216.  A thread keeps the weights of its rows, 128 at most: a word that all lanes
read costs the port of shared memory as much as one that they do not (four wavefronts 16 bytes).

Order of a row's sum, the same in every variant of as many heads: heads h, h + 4, ... ascending in
four sums, (0 + 1) + (2 + 3).  So the bits of a score follow from its row and its token alone.  Of
an odd run the last page stands twice, the second time read by nobody; nothing behind the run or
behind a row's last token is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ...blocks import budget as bud
from ...blocks.barriers import Ring
from ...blocks.registers import claim_registers
from ...blocks.smem import array, struct_of
from ...blocks.types import F8
from ...formats.index_cache import INDEX_DIM, PAGE, PAGE_BYTES
from ...indexer.index_ptx import four_weights, relu, store_below, value_at
from ...indexer.index_scoring import (
    FIRST_TILE,
    ROW,
    ROWS,
    SEEN,
    SMALL_BYTES,
    TILES,
    UNIT_SLOTS,
    WARPGROUP,
    WARPS_OF_GROUP,
    Given,
    Maps,
    Scoring,
    registered,
)
from .. import umma

if TYPE_CHECKING:
    from ...spec import VariantSpec

PAIR = 2 * PAGE
GROUPS = 2  # of maths
LOADS, MATHS = 72, 216  # registers of a thread of the first warpgroup, of the others
KEPT = 128  # weights that a thread has room for
SUMS = 4  # of a row, side by side
PRODUCER, ISSUER, OWNER = range(3)  # warps of the first warpgroup


class Shape(NamedTuple):
    """Sizes of a CTA's rings.

    Attributes:
        stages: pairs in the ring, a multiple of ``GROUPS``.
        accs: accumulators, likewise.
    """

    stages: int
    accs: int


# by columns of a unit, heads * U
SHAPES = {32: Shape(12, 4), 64: Shape(12, 4), 128: Shape(10, 4), 256: Shape(8, 2)}


class Own(NamedTuple):
    """Places, limits and weights that a maths thread keeps of a unit.

    Attributes:
        to: address of its token's score in its first row, of a page at position 0.
        stride: bytes to the next row.
        limits: of each row: position from which on it is not to be written, less the token.
        weights: of its rows, head by head.
    """

    to: Int64
    stride: Int64
    limits: cute.Tensor
    weights: cute.Tensor


class IndexLogits(Scoring):
    """One variant."""

    pages_of_stage = 2

    def __init__(self, spec: VariantSpec):
        super().__init__(spec)
        self.shape, self.form = SHAPES[self.n], umma.Form(PAIR)
        self.stages = self.shape.stages
        self.shares = -(-self.n // KEPT)  # maths warpgroups that part the rows of a pair
        self.own_rows, self.own_columns = self.rows // self.shares, self.n // self.shares
        self.step = GROUPS // self.shares  # pairs from one of a warpgroup's to its next
        readers = WARPS_OF_GROUP * self.shares  # of a pair
        both = {"commit": 1, "maths": readers}
        self.pages = Ring("pages", self.stages, {"producer": 1}, both)
        self.acc = Ring("acc", self.shape.accs, {"commit": 1}, {"maths": readers})
        everyone = {"commit": 1, "issuer": 1, "maths": WARPS_OF_GROUP * GROUPS}
        self.slots = Ring("units", UNIT_SLOTS, {"producer": 1}, everyone)
        self.columns = max(32, self.shape.accs * self.n)  # of tensor memory
        self.budget = budget_of(self)
        self.threads = self.budget.threads

    @property
    def queries_box(self):
        """Shape of a unit's TMA box of queries: (heads * rows, channels)."""
        return (self.n, INDEX_DIM)

    def query_layout(self, rows):
        """Heads in their own order, row after row."""
        return cute.make_layout((rows * self.heads, INDEX_DIM), stride=(INDEX_DIM, 1))

    def first_query(self, row):
        """The row's first head."""
        return row * self.heads

    def storage(self, layouts):
        return struct_of(
            **self.pages.field,
            **self.acc.field,
            **self.slots.field,
            tmem=array(Int32, 4, 16),
            **self.tile_fields(layouts),
        )

    @cute.kernel
    def kernel(self, queries: Maps, keys: Maps, given: Given):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        layouts = self.layouts()
        st = cutlass.memory.SmemAllocator().allocate(self.storage(layouts))
        if warp == PRODUCER:
            cpasync.prefetch_descriptor(queries.atom)
            cpasync.prefetch_descriptor(keys.atom)
            with cute.arch.elect_one():
                for ring in (self.pages, self.acc, self.slots):
                    ring.init(st)
                cute.arch.mbarrier_init_fence()
        if warp == OWNER:
            self.form.allocate(st.tmem.data_ptr(), self.columns)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        tmem = umma.base_of(st.tmem.data_ptr())
        if wg == 0:
            claim_registers(self.budget, LOADS)
            if warp == PRODUCER:
                self._produce(st, layouts, queries, keys, given)
                cute.arch.griddepcontrol_launch_dependents()
            elif warp == ISSUER:
                self._issue(st, tmem)
        else:
            claim_registers(self.budget, MATHS)
            self._compute(st, given.out, wg - 1, warp % WARPS_OF_GROUP, tmem)
        cute.arch.sync_threads()  # behind the loads of each maths warp's last accumulator
        if warp == OWNER:
            self.form.free(st.tmem.data_ptr(), self.columns)

    # ---------------------------------------------------------------- issuer

    @cute.jit
    def _issue(self, st, tmem):
        """One warp: D of each pair of each unit."""
        keys = umma.k_major(umma.address_of(st.k.data_ptr()))
        queries = umma.k_major(umma.address_of(st.q.data_ptr()))
        stage, phase, a, a_phase = Int32(0), Int32(0), Int32(0), Int32(1)
        slot, of_slot, tiles = Int32(0), Int32(0), Int32(1)
        while tiles > 0:
            self.slots.wait_full(st, slot, of_slot)
            tiles = self._words(st, slot)[TILES]
            query = umma.advance(queries, slot * (self.n * INDEX_DIM))
            for x in cutlass.range(0, tiles, 2, unroll=1):
                self.pages.wait_full(st, stage, phase)
                self.acc.wait_empty(st, a, a_phase)
                umma.after_sync()
                if umma.elected():
                    key = umma.advance(keys, stage * (PAIR * INDEX_DIM))
                    self._product(tmem + a * self.n, key, query)
                    self.form.commit(self.acc.full_barrier(st, a))
                    self.form.commit(self.pages.empty_barrier(st, stage))
                    if x + 2 >= tiles:
                        self.form.commit(self.slots.empty_barrier(st, slot))
                stage, a = stage + 1, a + 1
                if stage == self.stages:
                    stage, phase = Int32(0), phase ^ 1
                if a == self.shape.accs:
                    a, a_phase = Int32(0), a_phase ^ 1
            cute.arch.sync_warp()  # all lanes have read the words, of which no commit tells
            if tiles > 0:  # noqa: SIM102 (all lanes of the warp elect)
                if umma.elected():
                    self.slots.arrive_empty(st, slot)
            slot ^= 1
            of_slot = of_slot ^ Int32(slot == 0)

    def _product(self, d, key, query) -> None:
        """D = K Q^T over all channels, by one thread."""
        idesc = self.form.instruction(F8, self.n)
        for k in range(INDEX_DIM // umma.K_BYTES):
            at = k * umma.K_BYTES
            a, b = umma.advance(key, at), umma.advance(query, at)
            self.form.mma(F8, d, a, b, idesc, k > 0)

    # ---------------------------------------------------------------- maths

    @cute.jit
    def _compute(self, st, out, group, warp, tmem):
        """A maths warpgroup: of all units, its pairs, or its rows of all pairs."""
        stages, accs, step = self.stages, self.shape.accs, self.step
        token = warp * 32 + cute.arch.lane_idx()
        share, turn = Int32(group), Int32(0)
        if cutlass.const_expr(self.shares == 1):
            share, turn = Int32(0), Int32(group)
        scale_at = st.scales.data_ptr().toint() + 4 * token
        weights_at = st.weights.data_ptr().toint() + 4 * share * self.own_columns
        d = umma.lanes_of(tmem, warp) + share * self.own_columns
        stage, phase, a, a_phase = Int32(turn), Int32(0), Int32(turn), Int32(0)
        slot, of_slot, tiles = Int32(0), Int32(0), Int32(1)
        while tiles > 0:
            self.slots.wait_full(st, slot, of_slot)
            words = self._words(st, slot)
            tiles = words[TILES]
            if tiles > 0:
                own = self._own(words, out, share, token, weights_at + 4 * self.n * slot)
                position = words[FIRST_TILE] * PAGE + turn * PAIR
                pairs = (tiles + 1) >> 1
                while turn < pairs:
                    self._pair(
                        st, d + a * self.n, scale_at + stage * (4 * PAIR),
                        (stage, phase, a, a_phase), own, position,
                    )  # fmt: skip
                    turn, position = turn + step, position + step * PAIR
                    stage, a = stage + step, a + step
                    if stage >= stages:
                        stage, phase = stage - stages, phase ^ 1
                    if a >= accs:
                        a, a_phase = a - accs, a_phase ^ 1
                turn -= pairs
                cute.arch.sync_warp()  # one lane frees the slot for all
                with cute.arch.elect_one():
                    self.slots.arrive_empty(st, slot)
                slot ^= 1
                of_slot = of_slot ^ Int32(slot == 0)

    @cute.jit
    def _own(self, words, out, share, token, weights_at):
        """See ``Own``; ``weights_at``: those of the thread's first row in shared memory."""
        limits = cute.make_rmem_tensor((self.own_rows,), Int32)
        # of an odd run the last pair has a page that is none
        behind = cutlass.min((words[FIRST_TILE] + words[TILES]) * PAGE, Int32(out.shape[1]))
        for x in cutlass.range_constexpr(self.own_rows):
            row = share * self.own_rows + x
            seen = cutlass.min(words[SEEN] + row, behind)
            limits[x] = Int32(cutlass.select_(row < words[ROWS], seen, Int32(0))) - token
        first = Int64(words[ROW] + share * self.own_rows) * out.stride[0] + token
        weights = cute.make_rmem_tensor((self.own_columns,), Float32)
        for v in cutlass.range_constexpr(0, self.own_columns, 4):
            for z, value in enumerate(four_weights(weights_at + 4 * v)):
                weights[v + z] = value
        to, stride = out.iterator.toint() + 4 * first, 4 * Int64(out.stride[0])
        return Own(to, stride, limits, weights)

    @cute.jit
    def _pair(self, st, d, scale_at, at, own: Own, position):
        """128 tokens: sums, scores."""
        stage, phase, a, a_phase = at
        self.pages.wait_full(st, stage, phase)
        scale = value_at(scale_at)
        self.acc.wait_full(st, a, a_phase)
        umma.after_sync()
        sums = [
            self._sum(d + x * self.heads, own.weights, x * self.heads) for x in range(self.own_rows)
        ]
        umma.wait_loads()
        umma.before_sync()
        cute.arch.sync_warp()  # one lane frees accumulator and stage for all
        with cute.arch.elect_one():
            self.acc.arrive_empty(st, a)
            self.pages.arrive_empty(st, stage)
        to = own.to + 4 * Int64(position)
        for x, total in enumerate(sums):
            store_below(to, total * scale, position, own.limits[x])
            to += own.stride

    def _sum(self, d, weights, first: int):
        """Sum over the heads of a row, whose columns begin at ``d`` and its weights at ``first``:
        two heads an instruction."""
        chunk = 16 if self.own_columns == KEPT else 32  # columns that are loaded at a time
        sums = [(Float32(0.0), Float32(0.0)) for _ in range(SUMS // 2)]
        for c in range(0, self.heads, chunk):
            values = umma.load(d + c, chunk)
            for v in range(0, chunk, 2):
                w = first + c + v
                x = v % SUMS // 2
                sums[x] = cute.arch.fma_packed_f32x2(
                    (relu(values[v]), relu(values[v + 1])), (weights[w], weights[w + 1]), sums[x]
                )
        return (sums[0][0] + sums[0][1]) + (sums[1][0] + sums[1][1])


def budget_of(kernel: IndexLogits) -> bud.Budget:
    """Budget of a CTA of ``kernel``."""
    n = kernel.n
    tiles = kernel.stages * 2 * PAGE_BYTES + UNIT_SLOTS * n * (INDEX_DIM + 4)
    return bud.Budget(
        groups=(
            bud.WarpGroup("producer and issuer", LOADS),
            bud.WarpGroup("maths", MATHS, count=GROUPS),
        ),
        smem=tiles + SMALL_BYTES,
        barriers=(*kernel.pages.budget(), *kernel.acc.budget(), *kernel.slots.budget()),
        mmas=(bud.Mma("Q.K", PAIR, n, INDEX_DIM, "e4m3"),),
        tmem_columns=kernel.columns,
        arch="sm_100a",
    )


budget, feasible, build = registered(IndexLogits, max(SHAPES))
