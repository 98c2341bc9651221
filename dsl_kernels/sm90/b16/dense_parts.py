"""Sizes, barriers and ``Parts`` that the two forms of 16-bit decode share (dense_decode.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass.cute as cute
import cutlass.tensor_utils

from ...blocks import compat
from ...blocks.barriers import Ring
from ...blocks.smem import array
from ...blocks.stamps import Stamps
from ...blocks.types import ROW_MAJOR
from ...formats.dims import HEAD_DIM_QK, KV_LORA_RANK
from ...formats.dims import TOKEN_TILE as TILE
from ...load.latent16 import LatentValues, latent_format
from ...load.loader import Cache
from ...load.paged_tma import Early, PagedTma
from ...load.q_tiles import QTiles
from ...load.work_list import WorkList
from ..roles import (
    K_READERS,
    PV_WARPS,
    Q_READERS,
    ROWS_OF_CTA,
    SOFTMAX_WARPS,
    SWAP_AB_ROWS,
    Cta,
    Layouts,
)

if TYPE_CHECKING:
    from ...entry.entries import DenseGmem
    from ...entry.launch import Tma
    from ...spec import VariantSpec

TOKEN_BYTES = 2 * HEAD_DIM_QK
CHUNKS = 9  # of a KV tile, 64 channels each: Q.K begins on the first
EARLY = (0, 1, 4, 5)  # of them: the first half of what each P.V warpgroup reads
CHUNK_STEPS = HEAD_DIM_QK // 16 // CHUNKS  # of Q.K
COLUMN_MAJOR = cutlass.tensor_utils.LayoutEnum.COL_MAJOR


def swaps_ab(spec: VariantSpec) -> bool:
    """Return True if query rows lie on N: ``row_tile`` is ``SWAP_AB_ROWS`` or fewer."""
    return spec.row_tile <= SWAP_AB_ROWS


def stages_of(spec: VariantSpec) -> int:
    """Stages of the KV ring: ``spec.stages``, or 2 by default."""
    return spec.stages or 2


def q_stages_of(spec: VariantSpec) -> int:
    """Q tiles in flight: the next work tile's is prefetched where there is room."""
    return 2 if spec.row_tile <= SWAP_AB_ROWS // stages_of(spec) else 1


def p_ring(stages: int) -> Ring:
    """P of a tile lies in its stage of the ring, where RoPE was: the stage's release frees it."""
    return Ring("p", stages, {"softmax": SOFTMAX_WARPS})


def early_of(spec: VariantSpec) -> Early | None:
    """Chunks that P.V frees half-way; None for a cluster, which frees its stages as a whole."""
    return Early(EARLY, PV_WARPS) if spec.cluster == 1 else None


class Parts:
    """Components that the forms are made of, a ``decode.Parts``.

    Attributes:
        dtype: of Q, K, V and P.
        rows, cluster: query rows of a CTA; CTAs that share their K tiles.
        stages, q_stages: KV tiles, Q tiles in flight.
        work, q_tiles, loads, values: work list, Q, KV tiles, V in the ring.
        p_ring: barriers of P.
        stamps: recorder of events, off in ordinary builds.
    """

    def __init__(self, spec: VariantSpec):
        self.dtype = compat.dtype(spec.dtype)
        self.rows, self.cluster = min(spec.row_tile, ROWS_OF_CTA), spec.cluster
        self.stages, self.q_stages = stages_of(spec), q_stages_of(spec)
        self.work = WorkList(spec.page_size, TILE)
        latent = latent_format(self.dtype)
        self.q_tiles = QTiles(
            latent, self.work, rows=self.rows, stages=self.q_stages, readers=Q_READERS
        )
        self.loads = PagedTma(
            latent, self.work, rows=self.rows, stages=self.stages, readers=K_READERS,
            q_stages=self.q_stages, cluster=spec.cluster, chunks=CHUNKS, early=early_of(spec),
        )  # fmt: skip
        self.p_ring = p_ring(self.stages)
        self.values = LatentValues(self.dtype, TILE)
        self.stamps = Stamps(bool(spec.stamps))

    def cache(self, tma: Tma, gmem: DenseGmem) -> Cache:
        """The cache as the loader's warps read it."""
        return Cache(tma.kv, gmem.num_pages, kv_heads=gmem.kv_heads)

    def on_full(self, st) -> None:
        """Nothing is wanted of a full stage."""

    def tile_fields(self, layouts: Layouts) -> dict:
        """Ring and Q, at multiples of the 1024-byte swizzle period."""
        return dict(
            kc=array(self.dtype, cute.cosize(layouts.k[0]), 1024),
            qc=array(self.dtype, cute.cosize(layouts.q[0]), 1024),
        )

    def of_stages(self, one):
        """The layout ``one`` of what lies in a stage of the ring, for all of them."""
        stages = cute.make_layout(self.stages, stride=TILE * HEAD_DIM_QK)
        outer = cute.append(cute.select(one.outer, mode=[0, 1]), stages)
        return cute.make_composed_layout(one.inner, 0, outer)

    def rope(self, st):
        """Pointer to the RoPE columns of the ring's first stage."""
        return st.kc.data_ptr() + TILE * KV_LORA_RANK

    def v_layout(self, make):
        """V of every stage: MN-major over the bytes of the K tile.

        ``make``: of hopper_helpers, for the operand that V is.
        """
        one = make(COLUMN_MAJOR, (KV_LORA_RANK, KV_LORA_RANK, TILE), self.dtype, 1)
        return self.of_stages(one)

    def row_facts(self, cta: Cta, batch, rows, row):
        """(factor of the logits in log2 units, number of visible tokens) of the CTA's ``row``."""
        return self.work.row_facts(cta.gmem.work, cta.call, batch, rows.first + row, rows.end)


def k_layout(make, parts: Parts):
    """The KV ring, and Q's tile where it passes through it, by a maker of hopper_helpers."""
    return make(ROW_MAJOR, (TILE, TILE, HEAD_DIM_QK), parts.dtype, parts.stages)
