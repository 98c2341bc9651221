"""FP8 decode for SM90: host half, entry and producer roles; a pipeline does the arithmetic.

A part (one CTA, or one cluster when ``row_tile`` is 128) walks its items of the work list
(common/work_list.py).  Every warp role runs the same two loops, items and tiles, and meets the
others only at mbarriers:

    k_pipe   KV producer warp -> all who read the K tile        (full: TMA bytes, empty: warps)
    q_pipe   Q producer warp  -> the Q.K warpgroup(s)
    others   belong to the pipeline (fp8_etap.py, fp8_dual_wg.py)

Roles here      wg 0: warp 0 KV producer, warp 1 Q producer (common/paged_tma.py), warp 2 scale warp
                if the pipeline asks for it (scale_triples.py)
Shared memory   Q tile(s) of rows x 640 bytes | K ring, a stage: 64 x 512 content in four column
                blocks of 64 tokens x 128 B (128-byte swizzle), 64 x 128 RoPE, 64 scales | scale
                triples (sigma, log2, 1/) of 960 bytes a stage | what the pipeline adds
Timeline        PDL wait | an item: Q tile | a tile: wait empty, TMA content and RoPE, bulk
                scales -> full -> scale warp -> sigma ring -> softmax | PDL trigger at the end

CTA x owns query rows x * rows_cta ... of each item; what lies past the end of the sequence's rows
is computed with them and not written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import cutlass.cute as cute
import cutlass.memory
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync

from ..common import budget as bud
from ..common.fp8_per_token import FORMAT, TokenScales
from ..common.paged_tma import START_TILES, PagedTma, pipe_barriers
from ..common.smem import array
from ..common.stamps import Stamps
from ..common.types import BF16, F8
from ..common.work_list import Call, WorkList
from ..dims import TOKEN_TILE as TILE
from ..smxx.fp8_entry import Fp8Entry, Gmem, Tma
from ..stamp import Stamp
from .qk import ScoreMma
from .scale_triples import ScaleTriples

if TYPE_CHECKING:
    from ..spec import VariantSpec

WARPGROUP = 128
ROWS_OF_CTA = 64
STAGE_BYTES = TILE * FORMAT.token_bytes
SMALL_BYTES = 8192  # scale triples, factors, barriers, alignment: an upper bound


class Layouts(NamedTuple):
    """Shared-memory layouts of Q, K ring (content, RoPE each) and P."""

    q: tuple
    k: tuple
    p: Any


class Cta(NamedTuple):
    """What every role of a CTA works with; ``part``: whose items it walks."""

    st: Any
    layouts: Layouts
    q_pipe: Any
    k_pipe: Any
    gmem: Gmem
    call: Call
    part: Any


class Parts:
    """What the pipelines are composed of.

    Attributes:
        rows, cluster: query rows of a CTA; CTAs that share their K tiles.
        stages, q_stages: KV tiles, Q tiles in flight.
        work, loads, scales, triples, score: work list, producers, scales in the ring, their
            triples, Q.K.
        stamps: recorder of events, off in ordinary builds.
        p_terms: e4m3 terms of P (p_terms.py).
    """

    def __init__(
        self, spec: VariantSpec, *, stages: int, q_stages: int, q_warps: int, k_warps: int,
        few_rows: bool = False, scale_warp: bool = True,
    ):  # fmt: skip
        self.rows, self.cluster = min(spec.row_tile, ROWS_OF_CTA), spec.cluster
        self.stages, self.q_stages = stages, q_stages
        self.p_terms = spec.p_terms
        self.few_rows = few_rows  # S^T = K Q^T instead of S = Q K^T
        self.work = WorkList(spec.page_size, TILE)
        self.loads = PagedTma(
            FORMAT, self.work, rows=self.rows, stages=stages, q_stages=q_stages,
            cluster=spec.cluster, q_warps=q_warps, k_warps=k_warps, start_tiles=START_TILES,
        )  # fmt: skip
        self.scales = TokenScales(TILE, stages, self.work.box)
        self.triples = ScaleTriples(self.scales, self.work, scale_warp)
        self.score = ScoreMma(self.rows, few_rows)
        self.stamps = Stamps(bool(spec.stamps))

    @property
    def barrier_fields(self) -> dict:
        """Barriers of the roles that live here."""
        return {**self.loads.fields, **self.triples.ready.field}

    def tile_fields(self, layouts: Layouts) -> dict:
        """Scales, Q, K ring and P; the tiles start at multiples of the 1024-byte swizzle period."""
        size = cute.cosize
        return dict(
            **self.triples.fields,
            **self.scales.fields,
            qc=array(F8, size(layouts.q[0]), 1024),
            kc=array(F8, size(layouts.k[0]), 1024),
            kr=array(BF16, size(layouts.k[1]), 1024),
            qr=array(BF16, size(layouts.q[1]), 1024),
            p=array(F8, size(layouts.p), 1024),
        )


class Pipeline(Protocol):
    """What computes: everything between a filled stage and a written row."""

    parts: Parts
    threads: int
    producer_regs: int

    def p_layout(self) -> Any:
        """Shared-memory layout of P."""

    def storage(self, layouts: Layouts) -> Any:
        """The CTA's shared memory, ``Parts.barrier_fields`` and ``tile_fields`` in it."""

    def init_barriers(self, st: Any) -> None:
        """By one thread, before the fence that publishes them."""

    def math_roles(self, cta: Cta, wg: Any) -> None:
        """Warpgroups 1 and on; ``wg`` counts from 0."""


class Fp8Decode(Fp8Entry):
    """The exported function of one pipeline."""

    def __init__(self, spec: VariantSpec, pipeline: Pipeline):
        super().__init__(spec, pipeline.parts.loads, pipeline.threads)
        self.pipeline, self.parts = pipeline, pipeline.parts

    def layouts(self) -> Layouts:
        parts = self.parts
        return Layouts(*parts.score.layouts(parts.q_stages, parts.stages), self.pipeline.p_layout())

    def storage(self, layouts: Layouts):
        return self.pipeline.storage(layouts)

    @cute.kernel
    def kernel(self, tma: Tma, gmem: Gmem, call: Call):
        entered = self.parts.stamps.now()
        tidx, _, _ = cute.arch.thread_idx()
        _, part, _ = cute.arch.block_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        layouts = self.layouts()
        st = cutlass.memory.SmemAllocator().allocate(self.Storage)
        if warp_id == 0:
            for loaded in (*tma.q, *tma.kv):
                cpasync.prefetch_descriptor(loaded.atom)
            with cute.arch.elect_one():
                self.pipeline.init_barriers(st)  # fenced with the pipes' own, below
        q_pipe, k_pipe = self.parts.loads.pipes(st)

        cute.arch.griddepcontrol_wait()  # q, the cache and the plan come from the kernels before
        waited = self.parts.stamps.now()
        if wg == 0:
            cute.arch.setmaxregister_decrease(self.pipeline.producer_regs)
            if warp_id == 0:
                self.parts.stamps.put(gmem.results, Stamp.ENTRY, value=entered)
                self.parts.stamps.put(gmem.results, Stamp.WAITED, value=waited)
                span = self.parts.work.items_of(gmem.work, part)
                self.parts.loads.produce_kv(
                    st, layouts.k, k_pipe, tma.kv, gmem.work, span, gmem.scale.shape[0],
                    call.rows, self.parts.scales.copier(st, gmem.scale),
                    mark=self.parts.stamps.marker(gmem.results, Stamp.FIRST_TMA),
                )  # fmt: skip
                cute.arch.griddepcontrol_launch_dependents()
            elif warp_id == 1:
                span = self.parts.work.items_of(gmem.work, part)
                self.parts.loads.produce_q(st, layouts.q, q_pipe, tma.q, gmem.work, call, span)
            elif warp_id == 2:  # noqa: SIM102 (only the inner condition is a compile-time one)
                if const_expr(self.parts.triples.wanted):
                    span = self.parts.work.items_of(gmem.work, part)
                    self.parts.triples.prepare(st, k_pipe, gmem.work, span)
        else:
            self.pipeline.math_roles(Cta(st, layouts, q_pipe, k_pipe, gmem, call, part), wg - 1)
        if const_expr(self.spec.cluster > 1):
            # the peer signals barriers in this CTA's shared memory: leave together
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()


def barriers(
    spec: VariantSpec, q_stages: int, q_readers: dict[str, int], stages: int,
    k_readers: dict[str, int],
) -> tuple[bud.Barrier, ...]:  # fmt: skip
    """Budget of the barriers that live here."""
    pipes = pipe_barriers(q_stages, q_readers, stages, k_readers, spec.cluster)
    return (*pipes, bud.Barrier("sigma_full", 1, {"scale warp": 1}, stages))


def infeasible(spec: VariantSpec, min_stages: int, budget: bud.Budget) -> str | None:
    """Reasons that hold for every SM90 FP8 pipeline, or None; ``budget`` is the pipeline's."""
    if spec.cluster * ROWS_OF_CTA < spec.row_tile:
        return (
            f"{spec.pipeline}: a CTA holds {ROWS_OF_CTA} rows, {spec.cluster} of a cluster do not "
            f"hold row_tile {spec.row_tile}"
        )
    if spec.cluster > 1 and spec.row_tile <= ROWS_OF_CTA:
        return f"{spec.pipeline}: row_tile {spec.row_tile} needs one CTA, not a cluster"
    if spec.stages and spec.stages < min_stages:
        return f"{spec.pipeline} needs at least {min_stages} stages, got {spec.stages}"
    reason = bud.check(budget)
    return None if reason is None else f"{spec.pipeline}: {reason}"
