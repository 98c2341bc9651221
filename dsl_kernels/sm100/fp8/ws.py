"""FP8 MLA decode for SM100, pipeline ``ws``: tcgen05.mma.ws, V is K's own bytes, P promoted.

Idea: weight-stationary MMAs give 64 query rows all lanes of tensor memory (umma.py), so S of 64
tokens takes 32 columns and a block product P.V of 512 channels takes 256.  P.V reads the K tile
through a second descriptor (MN-major B): nothing is transposed, nothing is loaded twice.  Numerics
are those of SM90 (docs/numerics.md): per-token scales, a P of every block with a reference of its
own, fp32 sums of blocks in registers; Q.K is one chain, because this tensor core keeps its bits.

Executed on the software GPU (softgpu); no Blackwell GPU has run it.  A copy of 16 bytes a row from
a 128-byte swizzled tile into tensor memory is the form that no shipped kernel is known to use.

Roles (4 warpgroups of 128 threads)
    wg 0  warp 0  producer        TMA: a work tile's Q tile, then its 64-token KV tiles, one ring
          warp 1  Q.K issuer      Q tile -> tensor memory; S = Q K^T, content then RoPE, one chain
          warp 2  P.V issuer      X = P V in two halves of 256 channels
          warp 3                  allocates tensor memory, frees it at the end
    wg 1          softmax         S -> registers, block softmax, P8 -> smem, beta, gamma
    wg 2, 3       promotion       O = gamma O + beta X, 256 channels each, 128 of one row a thread

Timeline of tile i (one stage of the KV ring)
    producer      |TMA i+4 ...
    Q.K issuer    | Q.K i+1 |
    softmax       | S i -> registers | max, exp2, e4m3 -> P i | S i+1 ...
    P.V issuer    |                   wait P i | X lower i | X upper i | ...
    promotion     |                            | wg 2: lower i | wg 3: upper i | ...

Barriers (Ring: full, empty; "commit" is one arrival when the issued MMAs are complete)
    k      TMA bytes            | Q.K commit, P.V commit, softmax warps      stages
    s      Q.K commit           | softmax warps, S is in registers           2
    p      softmax warps        | P.V commit, promotion warps                2  (P, beta, gamma)
    x      P.V commit           | promotion warps of the half                2  (halves, not stages)
    inv    softmax warps 0, 1   | promotion warps                            1  (1/l of a work tile)
The Q tile passes through the KV ring: Q.K's issuer, its only reader, frees it for P.V's, too; the
softmax warps wait for it and free it themselves, to keep count of the phases.

Tensor memory (columns of 512)
    0    X, lower half   128    lane m + 64 g, column c: row m, channel 128 g + c
    128  X, upper half   128    likewise, channel 256 + 128 g + c
    256  S               2 x 32 lane m + 64 g, column c: row m, token 32 g + c
    320  Q content       128    A operand, 4 e4m3 a cell, in both halves of the lanes
    448  Q RoPE          32     A operand, 2 bf16 a cell, likewise

Shared memory, 5 stages (bytes)
    KV ring 5 x (32768 content + 8192 RoPE + 256 scales) | P 2 x 4096 | sigma, 1/sigma 1024
    beta, gamma, 1/l, maxima, sums, barriers                            = 220160
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as helpers
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ...blocks import budget as bud
from ...blocks.barriers import Ring
from ...blocks.registers import claim_registers
from ...blocks.smem import array, struct_of
from ...blocks.types import BF16, F8, ROW_MAJOR
from ...entry.entries import Fp8Entry, Fp8Gmem
from ...entry.launch import Tma
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import QK_ROPE_HEAD_DIM as R
from ...formats.dims import TOKEN_TILE as TILE
from ...load.fp8_per_token import FORMAT, TokenScales
from ...load.loader import Cache, Feed
from ...load.paged_tma import PagedTma
from ...load.q_tiles import QTiles
from ...load.unplanned import void_unplanned
from ...load.work_list import Call, WorkList
from .. import umma
from ..rings import Rings, part_of_cta
from .promotion import HALF, HALF_WARPS, HALVES, WARPGROUP, Promotion
from .softmax_role import Softmax

if TYPE_CHECKING:
    from ...spec import VariantSpec

ROW_TILES = (64,)
STAGES = 5  # of the KV ring, unless the spec says otherwise
MIN_STAGES = 3  # a Q tile, the tile in Q.K, the tile in P.V
STAGE_BYTES = TILE * FORMAT.token_bytes
SMALL_BYTES = 8192  # sigmas, factors, barriers, alignment: an upper bound
SOFTMAX_WARPS = 4
CHUNK = 32  # columns of X in a promotion thread's registers at a time
HALF_NAMES = ("lower", "upper")

K_READERS = {"Q.K commit": 1, "P.V commit": 1, "softmax": SOFTMAX_WARPS}
P_STAGES = S_STAGES = 2


def rings_of(form: umma.Form) -> Rings:
    """The first lane group's softmax warps finish the rows."""
    finishers, promotion = SOFTMAX_WARPS // form.groups, HALVES * HALF_WARPS
    return Rings(
        Ring("s", S_STAGES, {"Q.K commit": 1}, {"softmax": SOFTMAX_WARPS}),
        Ring("p", P_STAGES, {"softmax": SOFTMAX_WARPS}, {"P.V commit": 1, "promotion": promotion}),
        Ring("x", HALVES, {"P.V commit": 1}, {"promotion": HALF_WARPS}),
        Ring("inv", 1, {"softmax": finishers}, {"promotion": promotion}),
    )


class Columns:
    """Tensor memory: first column of each array."""

    def __init__(self, form: umma.Form):
        self.x = 0
        self.s = self.x + HALVES * form.share(HALF)
        self.q_content = self.s + S_STAGES * form.share(TILE)
        self.q_rope = self.q_content + D // 4
        self.end = self.q_rope + 2 * R // 4

    @property
    def allocated(self) -> int:
        """A power of two."""
        return 1 << (self.end - 1).bit_length()


class Barrier(IntEnum):
    """Named barriers; ``SAME_ROWS`` and the next: of the softmax warps that share rows."""

    SAME_ROWS = 1


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    return infeasible(spec, budget(spec))


def infeasible(spec: VariantSpec, needed: bud.Budget) -> str | None:
    """Reasons that hold whatever loads the tiles, or None; ``needed``: of a CTA."""
    if spec.row_tile not in ROW_TILES:
        return f"ws puts {' or '.join(map(str, ROW_TILES))} rows on M; no other row tile so far"
    if spec.stamps:
        return "ws records no stamps so far"
    if spec.p_terms > 1:
        return "ws has one term of P so far"
    if spec.cluster > 1:
        return f"ws: row_tile {spec.row_tile} needs one CTA, not a cluster"
    if spec.stages and spec.stages < MIN_STAGES:
        return f"ws needs at least {MIN_STAGES} stages, got {spec.stages}"
    reason = bud.check(needed)
    return None if reason is None else f"ws: {reason}"


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared and tensor memory of a CTA."""
    return budget_with(spec, loads_of(spec))


def budget_with(spec: VariantSpec, loads: Any) -> bud.Budget:
    """``budget`` behind any loader of tiles of this format."""
    form = umma.Form(spec.row_tile)
    return bud.Budget(
        groups=(
            bud.WarpGroup("producer and issuers", 40),
            bud.WarpGroup("softmax", 136),
            bud.WarpGroup("promotion", 168, count=HALVES),
        ),
        smem=loads.stages * STAGE_BYTES + P_STAGES * form.rows * TILE + SMALL_BYTES,
        barriers=(
            *loads.barriers(),
            *(barrier for ring in rings_of(form) for barrier in ring.budget()),
        ),
        mmas=(
            bud.Mma("Q.K content", form.rows, TILE, D, "e4m3"),
            bud.Mma("Q.K RoPE", form.rows, TILE, R, "bf16"),
            *(bud.Mma(f"P.V, {half} half", form.rows, HALF, TILE, "e4m3") for half in HALF_NAMES),
        ),
        tmem_columns=Columns(form).allocated,
        arch=spec.arch,
    )


def loads_of(spec: VariantSpec) -> PagedTma:
    """The KV ring, through which Q's tiles pass."""
    stages, work = spec.stages or STAGES, WorkList(spec.page_size, TILE)
    return PagedTma(
        FORMAT, work, rows=umma.Form(spec.row_tile).rows, stages=stages, readers=K_READERS,
        cluster=spec.cluster, scales=TokenScales(TILE, stages, work.box),
    )  # fmt: skip


def build(spec: VariantSpec):
    loads = loads_of(spec)
    return Fp8Entry.exported(Ws(spec, loads, loads.scales, OneFiller()))


class Layouts(NamedTuple):
    """Shared-memory layouts of the ring, content and RoPE: ``k`` of KV tiles, ``q`` of Q tiles."""

    q: tuple
    k: tuple


class Cta(NamedTuple):
    """State that every role of a CTA works with; ``tmem``: the address of its tensor memory."""

    st: Any
    k_pipe: Any
    gmem: Fp8Gmem
    call: Call
    tmem: Int32


class RingTiles:
    """Scales and V as the softmax warps meet them (softmax_role.py): both are in the KV ring."""

    with_q = True

    def __init__(self, stages: int, scales: TokenScales):
        self.stages, self.scales = stages, scales

    def wait(self, cta, state) -> None:
        """Wait until the tile is there."""
        cta.k_pipe.consumer_wait(state)

    def wait_values(self, cta, p_state) -> None:
        """V came with the scales."""

    def hide(self, st, stage, p_stage, valid) -> None:
        """Clears V of tokens that are none."""
        self.scales.zero_values(st, stage, valid, 0, D // umma.LINE)

    def release(self, cta, state) -> None:
        """Free the tile for this warp, one of its readers."""
        cta.k_pipe.consumer_release(state)


class OneFiller:
    """Roles beside warp 0's where TMA fills the ring (``Ws``): its barriers say what is there."""

    @staticmethod
    def wait_q(_st, k_pipe, kst) -> None:
        """Wait until an item's Q tile is there; Q.K's issuer calls this."""
        k_pipe.consumer_wait(kst)

    wait_tile = wait_q  # the same of a KV tile

    @staticmethod
    def last_warp(feed) -> None:
        """Nothing is left to be loaded for warp 3."""


class Ws:
    """The kernel: one CTA of 16 warps.

    Args:
        loads: the loader of the KV ring (load/loader.py), whose first stage of a work tile is Q's.
        scales: of the tokens in the ring.
        others: what Q.K's issuer and warp 3 do for the ring, with the methods of ``OneFiller``.
    """

    def __init__(self, spec: VariantSpec, loads: Any, scales: TokenScales, others: Any):
        self.stages, self.form = loads.stages, umma.Form(spec.row_tile)
        self.rings, self.columns = rings_of(self.form), Columns(self.form)
        self.loads, self.others, self.budget = loads, others, budget_with(spec, loads)
        self.work, self.scales = loads.work, scales
        self.q_tiles = QTiles(FORMAT, self.work, rows=self.form.rows, stages=0)
        self.spec, self.threads = spec, self.budget.threads
        self.regs = tuple(group.registers for group in self.budget.groups)
        self.softmax = Softmax(
            self.form, self.rings, self.work, RingTiles(self.stages, self.scales), self.scales,
            stages=(S_STAGES, P_STAGES), s=self.columns.s, same_rows=Barrier.SAME_ROWS,
        )  # fmt: skip
        self.promotion = Promotion(
            self.form, self.rings, self.work, p_stages=P_STAGES, x=self.columns.x, chunk=CHUNK
        )

    # ---------------------------------------------------------------- host half

    def layouts(self) -> Layouts:
        """K-major tiles of 64 rows in column blocks of 128 bytes, 128-byte swizzle."""
        make = helpers.make_smem_layout_b
        tile = (TILE, TILE)
        ring = (
            make(ROW_MAJOR, (*tile, D), F8, self.stages),
            make(ROW_MAJOR, (*tile, R), BF16, self.stages),
        )
        return Layouts(ring, ring)

    def storage(self, layouts: Layouts):
        rows = self.form.rows
        fields = dict(pair for ring in self.rings for pair in ring.field.items())
        return struct_of(
            **self.loads.fields,
            **fields,
            tmem=array(Int32, 4, 16),
            beta=array(Float32, P_STAGES * rows, 128),
            gamma=array(Float32, P_STAGES * rows, 128),
            inv=array(Float32, rows, 128),  # 1 / row sum
            **self.softmax.fields(),
            **self.scales.fields,
            kc=array(F8, cute.cosize(layouts.k[0]), 1024),
            kr=array(BF16, cute.cosize(layouts.k[1]), 1024),
            p=array(F8, P_STAGES * rows * TILE, 1024),
        )

    # ---------------------------------------------------------------- entry

    @cute.kernel
    def kernel(self, tma: Tma, gmem: Fp8Gmem, call: Call):
        tidx, _, _ = cute.arch.thread_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        layouts = self.layouts()
        st = cutlass.memory.SmemAllocator().allocate(self.storage(layouts))
        if warp_id == 0:
            for atom in (*self.q_tiles.descriptors(tma.q), *self.loads.descriptors(tma.kv)):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                self.loads.init(st)
                for ring in self.rings:
                    ring.init(st)  # fenced with the pipe's own, below
        if warp_id == 3:
            self.form.allocate(st.tmem.data_ptr(), self.columns.allocated)
        k_pipe = self.loads.pipe(st)  # its barrier also publishes the address

        cute.arch.griddepcontrol_wait()  # q, the cache and the plan come from the kernels before
        cta = Cta(st, k_pipe, gmem, call, umma.base_of(st.tmem.data_ptr()))
        if wg == 0:
            claim_registers(self.budget, self.regs[0])
            if warp_id == 0:
                self.loads.run(
                    0, self.feed(cta, tma, layouts),
                    self.q_tiles.issuer(st, k_pipe, layouts.k, tma.q, gmem.work, call), None,
                )  # fmt: skip
            elif warp_id == 1:
                self.issue_scores(cta)
            elif warp_id == 2:
                self.issue_products(cta)
            else:
                self.last_warp(cta, tma, layouts)
        elif wg == 1:
            claim_registers(self.budget, self.regs[1])
            self.softmax.run(cta)
        else:
            claim_registers(self.budget, self.regs[2])
            self.promotion.run(cta, wg - 2)
        cute.arch.sync_threads()  # behind the fences and commits of each role's last access
        if warp_id == 3:
            self.form.free(st.tmem.data_ptr(), self.columns.allocated)

    def feed(self, cta: Cta, tma: Tma, layouts: Layouts) -> Feed:
        """Arguments of the loader's roles (``Loader.run``), for this CTA's part."""
        _, part, _ = cute.arch.block_idx()
        cache = Cache(tma.kv, cta.gmem.scale.shape[0], cta.gmem.scale)
        return Feed(cta.st, layouts.k, cta.k_pipe, cache, cta.gmem.work, cta.call, part)

    @cute.jit
    def last_warp(self, cta: Cta, tma: Tma, layouts: Layouts):
        """Warp 3, between the allocation and the end."""
        self.others.last_warp(self.feed(cta, tma, layouts))
        void_unplanned(cta.gmem.work, cta.call, cta.gmem.results, part_of_cta())

    # ---------------------------------------------------------------- issuing warps

    @cute.jit
    def issue_scores(self, cta: Cta):
        """Q tiles into tensor memory, and S of every tile; the warp waits, one lane issues."""
        st, k_pipe, gmem, _, tmem = cta
        span = self.work.work_tiles_of(gmem.work, part_of_cta())
        content = umma.k_major(umma.address_of(st.kc.data_ptr()))
        rope = umma.k_major(umma.address_of(st.kr.data_ptr()))
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        sst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, S_STAGES)
        for i in cutlass.range(span[0], span[1], unroll=1):
            _, first, last, _ = self.work.work_tile_at(gmem.work, i)
            self.others.wait_q(st, k_pipe, kst)
            if umma.elected():
                # Copies come behind the MMAs that read the Q tile before, which this warp issued;
                # nothing would order them behind copies that no MMA has read.
                if first < last:
                    self.copy_q(
                        tmem, umma.advance(content, kst.index * (TILE * D)),
                        umma.advance(rope, kst.index * (TILE * 2 * R)),
                    )  # fmt: skip
                free = k_pipe.sync_object_empty.get_barrier(kst.index)
                self.form.commit(free)
                cute.arch.mbarrier_arrive(free)  # for P.V's issuer; the softmax warps do so
            kst.advance()
            for _ in cutlass.range(first, last, unroll=1):
                self.others.wait_tile(st, k_pipe, kst)
                self.rings.s.wait_empty(st, sst.index, sst.phase)
                umma.after_sync()
                if umma.elected():
                    s = tmem + self.columns.s + sst.index * self.form.share(TILE)
                    k_c = umma.advance(content, kst.index * (TILE * D))
                    k_r = umma.advance(rope, kst.index * (TILE * 2 * R))
                    self.issue_chain(s, tmem, k_c, k_r)
                    self.form.commit(self.rings.s.full_barrier(st, sst.index))
                    self.form.commit(k_pipe.sync_object_empty.get_barrier(kst.index))
                kst.advance()
                sst.advance()

    def copy_q(self, tmem, q_c, q_r):
        """A Q tile, content and RoPE, into tensor memory: 16 bytes of each row at a time."""
        for column, width, q in (
            (self.columns.q_content, D, q_c),
            (self.columns.q_rope, 2 * R, q_r),
        ):
            for x in range(width // 16):
                self.form.copy_rows(tmem + column + 4 * x, umma.advance(q, _chunk(x)))

    def issue_chain(self, s, tmem, k_c, k_r):
        """S = Q K^T of one tile: content, then RoPE, into one accumulator.

        Two kinds of MMA share it: same warp, same accumulator, same shape, so they stay in order.
        RoPE logits, which can be large, come last.
        """
        for dtype, width, q, k in (
            (F8, D, tmem + self.columns.q_content, k_c),
            (BF16, 2 * R, tmem + self.columns.q_rope, k_r),
        ):  # fmt: skip
            for x in range(width // umma.K_BYTES):
                self.form.mma(
                    dtype, s, q + x * umma.CELLS, umma.advance(k, umma.k_step(x, TILE)),
                    self.form.instruction(dtype, TILE), dtype is BF16 or x > 0, a_in_tmem=True,
                )  # fmt: skip

    @cute.jit
    def issue_products(self, cta: Cta):
        """X = P V of every tile, half of the channels at a time."""
        st, k_pipe, gmem, _, tmem = cta
        span = self.work.work_tiles_of(gmem.work, part_of_cta())
        values = umma.mn_major(umma.address_of(st.kc.data_ptr()), TILE * umma.LINE)
        weights = umma.k_major(umma.address_of(st.p.data_ptr()), TILE)
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        pst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, P_STAGES)
        x_phase = Int32(1)
        for i in cutlass.range(span[0], span[1], unroll=1):
            _, first, last, _ = self.work.work_tile_at(gmem.work, i)
            kst.advance()  # over the Q tile, which Q.K's issuer frees for it
            for _ in cutlass.range(first, last, unroll=1):
                # P being there means that the tile is: the softmax warps have waited for it
                self.rings.p.wait_full(st, pst.index, pst.phase)
                for half in cutlass.range_constexpr(HALVES):
                    self.rings.x.wait_empty(st, half, x_phase)
                    umma.after_sync()
                    if umma.elected():
                        x = tmem + self.columns.x + half * self.form.share(HALF)
                        p = umma.advance(weights, pst.index * (self.form.rows * TILE))
                        v = umma.advance(values, kst.index * (TILE * D) + half * (TILE * HALF))
                        self.issue_half(x, p, v)
                        self.form.commit(self.rings.x.full_barrier(st, half))
                        if cutlass.const_expr(half == HALVES - 1):
                            self.form.commit(self.rings.p.empty_barrier(st, pst.index))
                            self.form.commit(k_pipe.sync_object_empty.get_barrier(kst.index))
                x_phase = x_phase ^ 1
                kst.advance()
                pst.advance()

    def issue_half(self, x, p, v):
        """X = P V of 256 channels: 32 tokens a step."""
        for k in range(TILE // umma.K_BYTES):
            self.form.mma(
                F8, x, umma.advance(p, k * umma.K_BYTES),
                umma.advance(v, k * umma.K_BYTES * umma.LINE),
                self.form.instruction(F8, HALF, b_transposed=True), k > 0,
            )  # fmt: skip


def _chunk(x: int) -> int:
    """Bytes from the first to the x-th 16 bytes of a row of a tile in column blocks of 128."""
    return 16 * x // umma.LINE * (TILE * umma.LINE) + 16 * x % umma.LINE
