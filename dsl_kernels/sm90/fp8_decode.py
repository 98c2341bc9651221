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

CTA x owns query rows x * rows_cta ... of each sequence; rows past the end are zero-filled by TMA
and not written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from .. import compat
from ..common import budget as bud
from ..common.epilogue import Results
from ..common.fp8_per_token import FORMAT, TokenScales
from ..common.paged_tma import PagedTma, pipe_barriers
from ..common.smem import array
from ..common.types import BF16, F8, U8
from ..common.work_list import Call, Work, WorkList
from ..dims import KV_LORA_RANK as D
from ..dims import QK_ROPE_HEAD_DIM as R
from ..dims import TOKEN_TILE as TILE
from ..smxx import merge
from .qk import ScoreMma
from .scale_triples import ScaleTriples

if TYPE_CHECKING:
    from ..spec import VariantSpec

WARPGROUP = 128
ROWS_OF_CTA = 64
STAGE_BYTES = TILE * FORMAT.token_bytes
SMALL_BYTES = 8192  # scale triples, factors, barriers, alignment: an upper bound


class Tma(NamedTuple):
    """Planes of Q and of the cache: content, RoPE."""

    q: tuple
    kv: tuple


class Gmem(NamedTuple):
    """Tensors that are read and written without TMA."""

    q_scale: cute.Tensor  # (b, s_q, h)
    scale: cute.Tensor  # (pages, P)
    work: Work
    results: Results


class Layouts(NamedTuple):
    """Shared-memory layouts of Q, K ring (content, RoPE each) and P."""

    q: tuple
    k: tuple
    p: Any


class Cta(NamedTuple):
    """What every role of a CTA works with; ``span``: its items of the work list."""

    st: Any
    layouts: Layouts
    q_pipe: Any
    k_pipe: Any
    gmem: Gmem
    call: Call
    span: tuple


class Parts:
    """What the pipelines are composed of.

    Attributes:
        rows: query rows of a CTA.
        stages, q_stages: KV tiles, Q tiles in flight.
        work, loads, scales, triples, score: work list, producers, scales in the ring, their
            triples, Q.K.
    """

    def __init__(
        self, spec: VariantSpec, *, stages: int, q_stages: int, q_warps: int, k_warps: int,
        few_rows: bool = False, scale_warp: bool = True,
    ):  # fmt: skip
        self.rows = min(spec.row_tile, ROWS_OF_CTA)
        self.stages, self.q_stages = stages, q_stages
        self.few_rows = few_rows  # S^T = K Q^T instead of S = Q K^T
        self.work = WorkList(spec.page_size, TILE)
        self.loads = PagedTma(
            FORMAT, self.work, rows=self.rows, stages=stages, q_stages=q_stages,
            cluster=spec.cluster, q_warps=q_warps, k_warps=k_warps,
        )  # fmt: skip
        self.scales = TokenScales(TILE, stages, self.work.box)
        self.triples = ScaleTriples(self.scales, self.work, scale_warp)
        self.score = ScoreMma(self.rows, few_rows)

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

    @cute.jit
    def row_facts(self, gmem, call, batch, row):
        """(factor of the logits in log2 units, number of visible tokens) of one query row."""
        scale_of = lambda b, s, head: gmem.q_scale[b, s, head]
        return self.work.row_facts(gmem.work, call, batch, row, scale_of)


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


class Fp8Decode:
    """The exported function of one pipeline."""

    def __init__(self, spec: VariantSpec, pipeline: Pipeline):
        self.spec, self.pipeline, self.parts = spec, pipeline, pipeline.parts

    def layouts(self) -> Layouts:
        parts = self.parts
        return Layouts(*parts.score.layouts(parts.q_stages, parts.stages), self.pipeline.p_layout())

    @cute.jit
    def __call__(
        self,
        q_nope: cute.Tensor, q_rope: cute.Tensor, q_scale: cute.Tensor, content: cute.Tensor,
        rope: cute.Tensor, scale: cute.Tensor, block_table: cute.Tensor,
        cache_seqlens: cute.Tensor, work_items: cute.Tensor, part_begin: cute.Tensor,
        split_begin: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, o_accum: cute.Tensor,
        lse_accum: cute.Tensor, softmax_scale: Float32, causal: Int32, lse_factor: Float32,
        empty_lse: Float32, may_split: Int32, stream,
    ):  # fmt: skip
        layouts, loads = self.layouts(), self.parts.loads
        self.Storage = self.pipeline.storage(layouts)
        tma = Tma(
            loads.load_q((q_nope, q_rope), layouts.q), loads.load_kv((content, rope), layouts.k)
        )
        gmem = Gmem(
            q_scale, scale, Work(block_table, cache_seqlens, work_items, part_begin),
            Results(out, lse, o_accum, lse_accum),
        )  # fmt: skip
        rows = q_nope.shape[1] * q_nope.shape[2]
        call = Call(q_nope.shape[2], rows, softmax_scale, causal, lse_factor, empty_lse)
        cluster = self.spec.cluster
        self.kernel(tma, gmem, call).launch(
            grid=(cute.ceil_div(rows, self.spec.row_tile) * cluster,
                  cute.size(part_begin) - 1, 1),
            block=(self.pipeline.threads, 1, 1), cluster=(cluster, 1, 1),
            stream=stream, min_blocks_per_mp=1, use_pdl=True,
        )  # fmt: skip
        if may_split != 0:  # on the host: the caller knows when no plan could cut a sequence
            merge.merge(
                o_accum, lse_accum, split_begin, out, lse, lse_factor, empty_lse, stream
            )  # fmt: skip

    @cute.kernel
    def kernel(self, tma: Tma, gmem: Gmem, call: Call):
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
        span = self.parts.work.items_of(gmem.work, part)
        if wg == 0:
            cute.arch.setmaxregister_decrease(self.pipeline.producer_regs)
            if warp_id == 0:
                self.parts.loads.produce_kv(
                    st, layouts.k, k_pipe, tma.kv, gmem.work, span, gmem.scale.shape[0],
                    self.parts.scales.copier(st, gmem.scale),
                )  # fmt: skip
                cute.arch.griddepcontrol_launch_dependents()
            elif warp_id == 1:
                self.parts.loads.produce_q(st, layouts.q, q_pipe, tma.q, gmem.work, span)
            elif warp_id == 2:  # noqa: SIM102 (only the inner condition is a compile-time one)
                if const_expr(self.parts.triples.wanted):
                    self.parts.triples.prepare(st, k_pipe, gmem.work, span)
        else:
            self.pipeline.math_roles(Cta(st, layouts, q_pipe, k_pipe, gmem, call, span), wg - 1)
        if const_expr(self.spec.cluster > 1):
            # the peer signals barriers in this CTA's shared memory: leave together
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()


def fake_args(spec: VariantSpec) -> dict[str, Any]:
    """Symbolic arguments of the exported function by name, in the order of ``__call__``."""
    names = ["b", "s_q", "h", "pages", "width", "n_items", "parts_plus_1", "slots", "rows_pad"]
    b, s_q, h, pages, width, items, parts1, slots, rows_pad = (
        compat.sym(name=name) for name in names
    )
    free = compat.sym64
    return {
        "q_nope": compat.contiguous(U8, (b, s_q, h, D)),
        "q_rope": compat.contiguous(BF16, (b, s_q, h, R)),
        "q_scale": compat.strided(Float32, (b, s_q, h), (free(), free(), free()), 4),
        **compat.cache_fakes(pages, spec.page_size),
        "block_table": compat.strided(Int32, (b, width), (free(), 1), 4),
        "cache_seqlens": compat.vector(Int32, b),
        "work_items": compat.contiguous(Int32, (items, 4)),
        "part_begin": compat.vector(Int32, parts1),
        "split_begin": compat.vector(Int32, compat.sym(name="b_plus_1")),
        "out": compat.contiguous(compat.dtype(spec.out_dtype), (b, s_q, h, D)),
        "lse": compat.contiguous(Float32, (b, h, s_q), 4),
        "o_accum": compat.contiguous(Float32, (slots, rows_pad, D)),
        "lse_accum": compat.contiguous(Float32, (slots, rows_pad), 4),
        "softmax_scale": Float32(1.0),
        "causal": Int32(1),
        "lse_factor": Float32(1.0),
        "empty_lse": Float32(0.0),
        "may_split": Int32(1),
    }


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
