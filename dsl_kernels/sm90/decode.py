"""The decode kernel of SM90, whatever the cache and the arithmetic: barriers, registers, roles.

A part (one CTA, or one cluster when ``row_tile`` is 128) walks its work tiles of the work list
(load/work_list.py).  Every warp role runs the same two loops, work tiles and tiles, and meets the
others only at mbarriers:

    k_pipe   the loader -> all who read the K tile     (full: TMA bytes, empty: warps)
    q_pipe   the loader -> the Q.K warpgroup(s)        (likewise)
    others   belong to the pipeline (fp8/transposed.py, fp8/dual_wg.py, dense_decode.py)

Roles here      wg 0: the loader's warps (load/loader.py; load/paged_tma.py: warp 0 KV, warp 1
                Q, warp 2 what the format wants of a full stage); the rest is the pipeline's
Shared memory   Q tile(s) | K ring | barriers | what format and pipeline add
Timeline        barriers | PDL wait | work tiles and tiles | PDL trigger when the last tile is asked
                for

CTA x owns query rows x * rows_cta ... of each work tile; what lies past the end of the sequence's
rows is computed with them and not written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import cutlass.cute as cute
import cutlass.memory
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync

from ..blocks import budget as bud
from ..blocks.registers import claim_registers
from ..blocks.stamps import Stamps
from ..entry.launch import Tma
from ..formats.stamp import Stamp
from ..load.loader import Cache, Feed, Loader
from ..load.q_tiles import QTiles
from ..load.unplanned import void_unplanned
from ..load.work_list import Call, WorkList
from .roles import ROWS_OF_CTA, WARPGROUP, Cta, Layouts

if TYPE_CHECKING:
    from ..spec import VariantSpec

FREE_WARP = 3  # of the first warpgroup: none of its roles is the last to end


class Parts(Protocol):
    """Protocol of the components that a format's pipelines are made of (fp8_parts.py,
    dense_parts.py).

    Attributes:
        rows, cluster: query rows of a CTA; CTAs that share their K tiles.
        work, q_tiles, loads: work list, Q, KV tiles.
        stamps: recorder of events, off in ordinary builds.
    """

    rows: int
    cluster: int
    work: WorkList
    q_tiles: QTiles
    loads: Loader
    stamps: Stamps

    def cache(self, tma: Tma, gmem: Any) -> Cache:
        """The cache as the loader's warps read it."""

    def on_full(self, st: Any) -> Any:
        """Function that a warp of the loader calls for every full stage (``Loader.run``); None if
        nothing is to be done."""


class Pipeline(Protocol):
    """Protocol of a pipeline's arithmetic: everything between a filled stage and a written row.

    Attributes:
        budget: of a CTA; the producers are its first warpgroup.
    """

    parts: Any
    budget: bud.Budget

    def layouts(self) -> Layouts:
        """Shared-memory layouts."""

    def storage(self, layouts: Layouts) -> Any:
        """The CTA's shared memory, the fields of ``Parts`` in it."""

    def init_barriers(self, st: Any) -> None:
        """Initialise all barriers but Q's and the loader's; one thread calls this, before the fence
        that publishes them."""

    def math_roles(self, cta: Cta, wg: Any) -> None:
        """Run the calling math warpgroup's role with its registers; ``wg``: its number, less 1."""


class Decode:
    """The kernel of one pipeline, for the entry of its format to launch."""

    def __init__(self, spec: VariantSpec, pipeline: Pipeline):
        self.spec, self.pipeline, self.parts = spec, pipeline, pipeline.parts
        self.loads, self.q_tiles = self.parts.loads, self.parts.q_tiles
        self.threads, self.layouts = pipeline.budget.threads, pipeline.layouts

    @cute.kernel
    def kernel(self, tma: Tma, gmem, call: Call):
        entered = self.parts.stamps.now()
        tidx, _, _ = cute.arch.thread_idx()
        _, part, _ = cute.arch.block_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        layouts = self.layouts()
        st = cutlass.memory.SmemAllocator().allocate(self.pipeline.storage(layouts))
        if warp_id == 0:
            for atom in (*self.q_tiles.descriptors(tma.q), *self.loads.descriptors(tma.kv)):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                self.loads.init(st)  # fenced with the pipes' own, below
                self.pipeline.init_barriers(st)
        q_pipe, k_pipe = self.q_tiles.pipe(st), self.loads.pipe(st)

        cute.arch.griddepcontrol_wait()  # q, the cache and the plan come from the kernels before
        waited = self.parts.stamps.now()
        if wg == 0:
            claim_registers(self.pipeline.budget, self.pipeline.budget.groups[0].registers)
            self.parts.stamps.put(gmem.results, Stamp.ENTRY, value=entered)
            self.parts.stamps.put(gmem.results, Stamp.WAITED, value=waited)
            self.loads.run(
                warp_id,
                Feed(
                    st, layouts.k, k_pipe, self.parts.cache(tma, gmem), gmem.work, call, part,
                    self.parts.stamps.marker(gmem.results, Stamp.FIRST_TMA),
                ),
                self.q_tiles.issuer(st, q_pipe, layouts.q, tma.q, gmem.work, call),
                self.parts.on_full(st),
            )  # fmt: skip
            if warp_id == FREE_WARP:
                void_unplanned(gmem.work, call, gmem.results, part)
        else:
            self.pipeline.math_roles(Cta(st, layouts, q_pipe, k_pipe, gmem, call, part), wg - 1)
        if const_expr(self.parts.cluster > 1):
            # the peer signals barriers in this CTA's shared memory: leave together
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()


def infeasible(spec: VariantSpec, min_stages: int, budget: bud.Budget) -> str | None:
    """Reasons that hold for every SM90 pipeline, or None; ``budget`` is the pipeline's."""
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
