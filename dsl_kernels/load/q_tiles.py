"""A work tile's row tile of Q, by TMA: descriptors, its ring, and the copies a loader issues.

Queries have the planes of the cache, (b, s_q, h, width) each, and a Q tile is any run of rows of
theirs (work_list.Rows).

    q_pipe   who calls ``tile_of_q``  -> who reads Q    (full: TMA bytes, empty: warps)

A Q tile has the planes of a KV tile and may be as large, so it can also pass through the KV ring
(no Q stages: ``stages`` 0): a work tile is then one Q tile and its KV tiles, and whoever reads the
ring sees the Q tile first.

Shared memory: a field ``q<plane>`` for each plane and ``q_bar``; without Q stages none.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import cpasync

from ..blocks import budget as bud
from ..blocks.smem import array, one_stage, staged
from .loader import Readers, ring_barriers, ring_pipe
from .planes import CacheFormat, Loaded, atoms
from .work_list import WorkList


class QTiles:
    """Host half, ring and copies of Q.

    Attributes:
        rows: query rows of a CTA.
        stages: Q tiles in flight; 0: they are in the KV ring.
        readers: who frees a Q stage.
    """

    def __init__(
        self, fmt: CacheFormat, work: WorkList, *, rows: int, stages: int,
        readers: Readers | None = None,
    ):  # fmt: skip
        self.format, self.work, self.rows = fmt, work, rows
        self.stages, self.readers = stages, readers or {}

    def source(self, tensors, layouts):
        """``Loaded`` of each plane of the queries, the CTA's rows each."""
        out = []
        for plane, t, layout in zip(self.format.planes, tensors, layouts, strict=True):
            b, s_q, h, width = t.shape
            view = cute.make_tensor(
                cute.recast_ptr(t.iterator, dtype=plane.dtype),
                cute.make_layout((b * s_q * h, width), stride=(width, 1)),
            )
            atom = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(), view, one_stage(layout), (self.rows, width)
            )
            out.append(Loaded(*list(atom)[:2]))
        return tuple(out)

    descriptors = staticmethod(atoms)

    # ---------------------------------------------------------------- barriers

    @property
    def fields(self) -> dict:
        """Storage of the ring's barriers."""
        return dict(q_bar=array(Int64, 2 * self.stages)) if self.stages else {}

    @property
    def bytes(self) -> int:
        """Bytes of a Q tile, in all planes together."""
        return self.rows * sum(p.token_bytes for p in self.format.planes)

    def barriers(self) -> tuple[bud.Barrier, ...]:
        """The ring in a budget."""
        return ring_barriers("q", self.stages, "Q producer", self.readers) if self.stages else ()

    def pipe(self, st):
        """The ring of Q, None without; the KV ring's fence publishes it (``Loader.pipe``)."""
        if not self.stages:
            return None
        return ring_pipe(st.q_bar, self.stages, self.readers, self.bytes, defer_sync=True)

    # ---------------------------------------------------------------- device

    def issuer(self, st, pipe, layouts, source, work, call):
        """``tile_of_q`` of a kernel (loader.py); ``pipe`` and ``layouts`` of the ring that Q passes
        through."""

        # through the KV ring they are a second view of its tiles, made once
        planes = None if self.stages else self._planes(st, source, layouts)
        claim = self._acquired if self.stages else self._claim

        def tile_of_q(i, batch, stage):
            rows = self.work.rows_at(work, call, i, batch, self.rows)
            bar = claim(pipe, stage)
            self._copy(planes or self._planes(st, source, layouts), rows, stage.index, bar)

        return tile_of_q

    def _acquired(self, pipe, stage):
        """The barrier of a free stage of Q's own ring, armed."""
        pipe.producer_acquire(stage)
        return pipe.producer_get_barrier(stage)

    def _claim(self, pipe, stage):
        """The barrier of a free stage of the KV ring, armed."""
        pipe.sync_object_empty.wait(stage.index, stage.phase)
        bar = pipe.producer_get_barrier(stage)
        with cute.arch.elect_one():  # fewer bytes than a KV tile's, which has scales
            cute.arch.mbarrier_arrive_and_expect_tx(bar, self.bytes)
        return bar

    def _planes(self, st, source, layouts):
        """(plane, its TMA view, its tiles in shared memory)."""
        side = "q" if self.stages else "k"
        tiles = [staged(getattr(st, side + p.name), x) for p, x in zip(self.format.planes, layouts)]
        return list(zip(self.format.planes, source, tiles, strict=True))

    def _copy(self, planes, rows, stage, bar):
        """Copy this CTA's row tile of a work tile into a stage.  Rows past the sequence's end may
        be another sequence's: no results are stored for them.  Rows past the last query are 0."""
        for plane, loaded, tiles in planes:
            moved = cute.domain_offset((rows.first, 0), loaded.coords)
            target, source = cpasync.tma_partition(
                loaded.atom, 0, cute.make_layout(1), cute.group_modes(tiles, 0, 2),
                cute.group_modes(cute.local_tile(moved, (self.rows, plane.width), (0, 0)), 0, 2),
            )  # fmt: skip
            cute.copy(loaded.atom, source, target[None, stage], tma_bar_ptr=bar)
