"""FP8 MLA decode for SM100, pipeline ``pair``: 128 rows as M = 128 over two CTAs.

Idea: one MMA of a pair reads each CTA's half of the tokens (Q.K) and of the channels (P.V) for the
rows of both, so shared memory is read half as often as by two CTAs of their own (fp8/ws.py).  A
tile, and so a block of P with its reference, is 128 tokens.  V is a region of its own: as B of P.V
a CTA holds its channels of all tokens, as B of Q.K its tokens of all channels (pair_loads.py).
Numerics are those of ``ws`` with blocks of 128 (docs/numerics.md).

Executed on the software GPU (softgpu); no Blackwell GPU has run it.

Roles (4 warpgroups of 128 threads in each CTA; its 64 rows in softmax and promotion)
    wg 0  warp 0  producer        TMA: Q tile, then K halves and scales
          warp 1  Q.K issuer      of the leader: Q -> tensor memory; S = Q K^T of both CTAs
          warp 2  P.V issuer      of the leader: X = P V in two halves of 256 channels
          warp 3  V producer      V halves; allocates tensor memory, frees it at the end
    wg 1          softmax         S -> registers, block softmax, P8 -> smem, beta, gamma
    wg 2, 3       promotion       O = gamma O + beta X, 256 channels each, 128 of one row a thread

Timeline of tile i
    producers     |TMA K i+2 ... | V i+1 when P.V i-1 is done ...
    Q.K issuer    | Q.K i+1 |
    softmax       | S i -> registers | max, exp2, e4m3 -> P i | S i+1 ...
    P.V issuer    |                   wait P i of both | X lower i | X upper i | ...
    promotion     |                            | wg 2: lower i | wg 3: upper i | ...

Barriers (Ring: full, empty; commits arrive at both CTAs', "leader": at its only)
    k      TMA bytes of both CTAs (leader) | Q.K commit                      3
    q      Q.K commit: RoPE of a work tile's Q is read                           2
    c      TMA bytes: scales    | softmax warps                              3
    v      TMA bytes            | P.V commit                                 2
    s      Q.K commit           | softmax warps of both CTAs (leader)        2
    p      softmax warps        | P.V commit, promotion warps                2  (P, beta, gamma)
    both   softmax warps of both CTAs (leader): P and V are there            2
    x      P.V commit           | promotion warps of the half (leader)       2  (halves)
    inv    softmax warps 0, 1   | promotion warps                            1  (1/l of a work tile)

Tensor memory (columns of 512), of each CTA
    0    X, lower half   128    lane m + 64 g, column c: row m, channel 128 g + c
    128  X, upper half   128    likewise, channel 256 + 128 g + c
    256  S               2 x 64 lane m + 64 g, column c: row m, token 64 g + c
    384  Q content       128    A operand, 4 e4m3 a cell, in both halves of the lanes

Shared memory of each CTA (bytes)
    K 3 x (32768 content + 8192 RoPE) | V 2 x 32768 | Q RoPE 2 x 8192 | P 2 x 8192
    scales 3 x 512, sigmas, beta, gamma, 1/l, maxima, sums, barriers            = 230400
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
from ...blocks.registers import claim_registers
from ...blocks.smem import array, struct_of
from ...blocks.types import BF16, F8, ROW_MAJOR, U32
from ...entry.entries import Fp8Entry, Fp8Gmem
from ...entry.launch import Tma
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import QK_ROPE_HEAD_DIM as R
from ...load.unplanned import void_unplanned
from ...load.work_list import Call
from .. import umma
from ..rings import LEADER, AlsoToLeader, Rings, ToLeader, part_of_cta
from . import pair_loads as loads
from .pair_loads import CTAS, K_TOKENS, LINE, ROWS, TILE, Layouts, PairQ, PairTma
from .promotion import HALF, HALF_WARPS, HALVES, WARPGROUP, Promotion
from .softmax_role import SoftmaxInRuns

if TYPE_CHECKING:
    from ...spec import VariantSpec

FORM = umma.Form(ROWS, CTAS)
SOFTMAX_WARPS = loads.SOFTMAX_WARPS
P_STAGES = S_STAGES = 2
SMALL_BYTES = 10240  # scales, sigmas, factors, barriers, alignment: an upper bound
CHUNK = 32  # columns of X in a promotion thread's registers at a time
HALF_NAMES = ("lower", "upper")
MIN_STAGES = 2  # of K: a Q tile, a tile

X_AT, S_AT = 0, HALVES * FORM.share(HALF)
Q_AT = S_AT + S_STAGES * FORM.share(TILE)
COLUMNS = Q_AT + D // 4


class Barrier(IntEnum):
    """Named barriers; ``SAME_ROWS`` and the next: of the softmax warps that share rows."""

    SAME_ROWS = 1


class PairRings(NamedTuple):
    """Rings of the roles, and ``both``: tells the leader that both CTAs' P and V are there."""

    roles: Rings
    both: ToLeader

    @property
    def all(self) -> tuple:
        """Every ring."""
        return (*self.roles, self.both)


def rings_of() -> PairRings:
    """The first lane group's softmax warps finish the rows."""
    softmax, promotion = {"softmax": SOFTMAX_WARPS}, HALVES * HALF_WARPS
    of_both = {"softmax": CTAS * SOFTMAX_WARPS}
    both = ToLeader("both", P_STAGES, of_both)
    roles = Rings(
        s=ToLeader("s", S_STAGES, {"Q.K commit": 1}, of_both),
        p=AlsoToLeader(
            "p", P_STAGES, softmax, {"P.V commit": 1, "promotion": promotion}, leader=both
        ),
        x=ToLeader("x", HALVES, {"P.V commit": 1}, {"promotion": CTAS * HALF_WARPS}),
        inv=AlsoToLeader(
            "inv", 1, {"softmax": SOFTMAX_WARPS // FORM.groups}, {"promotion": promotion}
        ),
    )
    return PairRings(roles, both)


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    if spec.row_tile != CTAS * ROWS:
        return f"pair puts {CTAS * ROWS} rows on M of two CTAs; ws has fewer"
    if spec.cluster != CTAS:
        return f"pair needs a cluster of {CTAS}, got {spec.cluster}"
    if spec.stamps:
        return "pair records no stamps so far"
    if spec.p_terms > 1:
        return "pair has one term of P: 64 tokens a thread leave no registers for a second"
    if spec.stages and spec.stages < MIN_STAGES:
        return f"pair needs at least {MIN_STAGES} stages, got {spec.stages}"
    reason = bud.check(budget(spec))
    return None if reason is None else f"pair: {reason}"


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared and tensor memory of a CTA; MMAs of the pair."""
    tma = loads_of(spec)
    tiles = tma.k_stages * loads.K_BYTES + loads.V_STAGES * loads.V_BYTES
    rows = CTAS * ROWS
    return bud.Budget(
        groups=(
            bud.WarpGroup("producers and issuers", 40),
            bud.WarpGroup("softmax", 136),
            bud.WarpGroup("promotion", 168, count=HALVES),
        ),
        smem=tiles + loads.Q_STAGES * ROWS * 2 * R + P_STAGES * ROWS * TILE + SMALL_BYTES,
        barriers=(
            *tma.barriers(),
            *(barrier for ring in rings_of().all for barrier in ring.budget()),
        ),
        mmas=(
            bud.Mma("Q.K content", rows, TILE, D, "e4m3"),
            bud.Mma("Q.K RoPE", rows, TILE, R, "bf16"),
            *(bud.Mma(f"P.V, {half} half", rows, HALF, TILE, "e4m3") for half in HALF_NAMES),
        ),
        tmem_columns=COLUMNS,
        arch=spec.arch,
    )


def loads_of(spec: VariantSpec) -> PairTma:
    """Loads of Q, K, V and scales into shared memory; K has ``spec.stages`` stages,
    ``loads.K_STAGES`` by default."""
    return PairTma(spec.page_size, spec.stages or loads.K_STAGES)


def build(spec: VariantSpec):
    return Fp8Entry.exported(Pair(spec))


class Cta(NamedTuple):
    """State that every role of a CTA works with; ``tmem``: the address of its tensor memory."""

    st: Any
    layouts: Layouts
    gmem: Fp8Gmem
    call: Call
    tmem: Int32


class PairTiles:
    """Scales and V as the softmax warps meet them (softmax_role.py): rings of their own.

    V has as many stages as P, which it comes and goes with, so P's counter is V's.
    """

    with_q = False

    def __init__(self, tma: PairTma):
        self.tma, self.stages = tma, tma.k_stages

    def wait(self, cta, state) -> None:
        """Wait until the scales are there."""
        self.tma.c.wait_full(cta.st, state.index, state.phase)

    def wait_values(self, cta, p_state) -> None:
        """Wait until this CTA's V is there; this CTA's arrival at P then tells the leader so."""
        self.tma.v.wait_full(cta.st, p_state.index, p_state.phase ^ 1)

    @cute.jit
    def hide(self, st, stage, p_stage, valid):
        """Clears V of tokens >= ``valid`` or with a NaN scale: a thread has a token's two lines of
        128 bytes, so there is no swizzle to mind."""
        tidx, _, _ = cute.arch.thread_idx()
        token = tidx % TILE
        s = self.tma.scales.of_stages(st)[token, stage]
        if token >= valid or s != s:
            zero = cute.make_rmem_tensor((LINE // 4,), U32)
            zero.fill(0)
            for half in cutlass.range_constexpr(HALVES):
                at = p_stage * loads.V_BYTES + half * (TILE * LINE) + token * LINE
                ptr = cute.recast_ptr((st.v.data_ptr() + at).align(LINE), dtype=U32)
                cute.autovec_copy(zero, cute.make_tensor(ptr, cute.make_layout(LINE // 4)))

    @cute.jit
    def release(self, cta, state):
        """This warp has read the scales; V is the MMAs'."""
        if cute.arch.lane_idx() == 0:
            self.tma.c.arrive_empty(cta.st, state.index)


class Pair:
    """The kernel: two CTAs of 16 warps."""

    def __init__(self, spec: VariantSpec):
        self.loads, self.q_tiles, self.rings = loads_of(spec), PairQ(), rings_of()
        self.work, self.stages = self.loads.work, self.loads.k_stages
        self.spec, self.budget = spec, budget(spec)
        self.threads = self.budget.threads
        self.regs = tuple(group.registers for group in self.budget.groups)
        self.roles = roles = self.rings.roles
        self.softmax = SoftmaxInRuns(
            FORM, roles, self.work, PairTiles(self.loads), self.loads.scales,
            stages=(S_STAGES, P_STAGES), s=S_AT, same_rows=Barrier.SAME_ROWS,
        )  # fmt: skip
        self.promotion = Promotion(FORM, roles, self.work, p_stages=P_STAGES, x=X_AT, chunk=CHUNK)

    # ---------------------------------------------------------------- host half

    def layouts(self) -> Layouts:
        """K-major tiles in column blocks of 128 bytes, 128-byte swizzle; V block by block."""
        make, tile = helpers.make_smem_layout_b, (ROWS, ROWS)
        content = make(ROW_MAJOR, (*tile, D), F8, self.stages)
        rope = make(ROW_MAJOR, (*tile, R), BF16, self.stages)
        q_rope = make(ROW_MAJOR, (*tile, R), BF16, loads.Q_STAGES)
        v = make(ROW_MAJOR, (TILE, TILE, LINE), F8, HALVES * loads.V_STAGES)
        return Layouts((content, q_rope), (content, rope, v), v)

    def storage(self, layouts: Layouts):
        fields = dict(pair for ring in self.rings.all for pair in ring.field.items())
        return struct_of(
            **self.loads.fields,
            **fields,
            tmem=array(Int32, 4, 16),
            beta=array(Float32, P_STAGES * ROWS, 128),
            gamma=array(Float32, P_STAGES * ROWS, 128),
            inv=array(Float32, ROWS, 128),  # 1 / row sum
            **self.softmax.fields(),
            **loads.fields_of(layouts),
            p=array(F8, P_STAGES * ROWS * TILE, 1024),
        )

    # ---------------------------------------------------------------- entry

    @cute.kernel
    def kernel(self, tma: Tma, gmem: Fp8Gmem, call: Call):
        tidx, _, _ = cute.arch.thread_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        layouts = self.layouts()
        st = cutlass.memory.SmemAllocator().allocate(self.storage(layouts))
        if warp_id == 0:
            for atom in (*self.q_tiles.descriptors(tma.q), *self.loads.descriptors(tma.kv)):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for ring in (*self.loads.rings, *self.rings.all):
                    ring.init(st)
            cute.arch.mbarrier_init_fence()
        if warp_id == 3:
            FORM.allocate(st.tmem.data_ptr(), COLUMNS)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()  # both CTAs' barriers are there, and the address is published

        cute.arch.griddepcontrol_wait()  # q, the cache and the plan come from the kernels before
        cta = Cta(st, layouts, gmem, call, umma.base_of(st.tmem.data_ptr()))
        if wg == 0:
            claim_registers(self.budget, self.regs[0])
            if warp_id == 0:
                q_tiles = self.q_tiles.bound(tma.q)
                self.loads.run_k(cta, tma.kv, q_tiles, rank)
                cute.arch.griddepcontrol_launch_dependents()
                void_unplanned(gmem.work, call, gmem.results, part_of_cta())
            elif warp_id == 3:
                self.loads.run_v(cta, tma.kv, rank)
            elif rank == LEADER:
                if warp_id == 1:
                    self.issue_scores(cta)
                else:
                    self.issue_products(cta)
        elif wg == 1:
            claim_registers(self.budget, self.regs[1])
            self.softmax.run(cta)
        else:
            claim_registers(self.budget, self.regs[2])
            self.promotion.run(cta, wg - 2)
        cute.arch.cluster_arrive()  # behind the fences and commits of each role's last access
        cute.arch.cluster_wait()
        if warp_id == 3:
            FORM.free(st.tmem.data_ptr(), COLUMNS)

    # ---------------------------------------------------------------- issuing warps, of the leader

    @cute.jit
    def issue_scores(self, cta: Cta):
        """Q tiles into tensor memory, and S of every tile, for both CTAs."""
        st, gmem, tmem = cta.st, cta.gmem, cta.tmem
        span = self.work.work_tiles_of(gmem.work, part_of_cta())
        content = umma.k_major(umma.address_of(st.kc.data_ptr()))
        rope = umma.k_major(umma.address_of(st.kr.data_ptr()))
        q_rope = umma.k_major(umma.address_of(st.qr.data_ptr()))
        consumer = pipeline.PipelineUserType.Consumer
        kst = pipeline.make_pipeline_state(consumer, self.stages)
        qst = pipeline.make_pipeline_state(consumer, loads.Q_STAGES)
        sst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, S_STAGES)
        for i in cutlass.range(span[0], span[1], unroll=1):
            _, first, last, _ = self.work.work_tile_at(gmem.work, i)
            self.loads.k.wait_full(st, kst.index, kst.phase)
            if umma.elected():
                if first < last:  # copies that no MMA has read would be in no order (fp8/ws.py)
                    at = umma.advance(content, kst.index * (ROWS * D))
                    for x in cutlass.range_constexpr(D // 16):
                        FORM.copy_rows(tmem + Q_AT + 4 * x, umma.advance(at, _chunk(x)))
                FORM.commit(self.loads.k.empty_barrier(st, kst.index))
            kst.advance()
            for _ in cutlass.range(first, last, unroll=1):
                self.loads.k.wait_full(st, kst.index, kst.phase)
                self.roles.s.wait_empty(st, sst.index, sst.phase)
                umma.after_sync()
                if umma.elected():
                    self.issue_chain(
                        tmem + S_AT + sst.index * FORM.share(TILE), tmem,
                        umma.advance(q_rope, qst.index * (ROWS * 2 * R)),
                        umma.advance(content, kst.index * (K_TOKENS * D)),
                        umma.advance(rope, kst.index * (K_TOKENS * 2 * R)),
                    )  # fmt: skip
                    FORM.commit(self.roles.s.full_barrier(st, sst.index))
                    FORM.commit(self.loads.k.empty_barrier(st, kst.index))
                kst.advance()
                sst.advance()
            if umma.elected():
                FORM.commit(self.loads.q.full_barrier(st, qst.index))
            qst.advance()

    def issue_chain(self, s, tmem, q_r, k_c, k_r):
        """S = Q K^T of one tile: content, then RoPE, into one accumulator, as ``ws`` sums it."""
        for x in range(D // umma.K_BYTES):
            FORM.mma(
                F8, s, tmem + Q_AT + x * umma.CELLS, umma.advance(k_c, umma.k_step(x, K_TOKENS)),
                FORM.instruction(F8, TILE), x > 0, a_in_tmem=True,
            )  # fmt: skip
        for x in range(2 * R // umma.K_BYTES):
            step = x * umma.K_BYTES
            FORM.mma(
                BF16, s, umma.advance(q_r, step), umma.advance(k_r, step),
                FORM.instruction(BF16, TILE), True,
            )  # fmt: skip

    @cute.jit
    def issue_products(self, cta: Cta):
        """X = P V of every tile, half of the channels at a time, for both CTAs."""
        st, gmem, tmem = cta.st, cta.gmem, cta.tmem
        span = self.work.work_tiles_of(gmem.work, part_of_cta())
        values = umma.mn_major(umma.address_of(st.v.data_ptr()), TILE * LINE)
        weights = umma.k_major(umma.address_of(st.p.data_ptr()), TILE)
        pst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, P_STAGES)
        x_phase = Int32(1)
        for i in cutlass.range(span[0], span[1], unroll=1):
            _, first, last, _ = self.work.work_tile_at(gmem.work, i)
            for _ in cutlass.range(first, last, unroll=1):
                # P being there means that V is: the softmax warps have waited for it
                self.rings.both.wait_full(st, pst.index, pst.phase)
                for half in cutlass.range_constexpr(HALVES):
                    self.roles.x.wait_empty(st, half, x_phase)
                    umma.after_sync()
                    if umma.elected():
                        p = umma.advance(weights, pst.index * (ROWS * TILE))
                        v = umma.advance(values, pst.index * loads.V_BYTES + half * (TILE * LINE))
                        self.issue_half(tmem + X_AT + half * FORM.share(HALF), p, v)
                        FORM.commit(self.roles.x.full_barrier(st, half))
                        if cutlass.const_expr(half == HALVES - 1):
                            FORM.commit(self.roles.p.empty_barrier(st, pst.index))
                            FORM.commit(self.loads.v.empty_barrier(st, pst.index))
                x_phase = x_phase ^ 1
                pst.advance()

    def issue_half(self, x, p, v):
        """X = P V of 256 channels: 32 tokens a step."""
        for k in range(TILE // umma.K_BYTES):
            FORM.mma(
                F8, x, umma.advance(p, k * umma.K_BYTES),
                umma.advance(v, k * umma.K_BYTES * LINE),
                FORM.instruction(F8, HALF, b_transposed=True), k > 0,
            )  # fmt: skip


def _chunk(x: int) -> int:
    """Bytes from the first to the x-th 16 bytes of a row of a tile in column blocks of 128."""
    return 16 * x // LINE * (ROWS * LINE) + 16 * x % LINE
