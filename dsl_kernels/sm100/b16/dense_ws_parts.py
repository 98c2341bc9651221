"""KV ring, barriers and place of P that the roles of the 64-row pipeline (dense_ws.py) share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as helpers

from ...blocks import compat
from ...blocks.barriers import Ring
from ...blocks.smem import array
from ...blocks.types import ROW_MAJOR
from ...formats.dims import HEAD_DIM_QK
from ...formats.dims import TOKEN_TILE as TILE
from ...load.latent16 import LatentValues, latent_format
from ...load.paged_tma import Early, PagedTma
from ...load.q_tiles import QTiles
from ...load.work_list import WorkList
from .. import umma
from .dense_parts import (
    CHUNKS,
    CORRECTION_WARPS,
    S_STAGES,
    SOFTMAX_WARPS,
    Barrier,
    Columns,
    Rings,
    inverses,
)

if TYPE_CHECKING:
    from ...spec import VariantSpec

STAGES, Q_STAGES = 2, 1
EARLY = (0, 1, 2, 3)  # chunks of a tile: the first half of V, free before the second is
BLOCK = TILE * umma.LINE  # bytes of a chunk, and of P of a tile
STAGE_BYTES = CHUNKS * BLOCK
TOKEN_BYTES = 2 * HEAD_DIM_QK
Q_IN_TMEM = 384  # channels of Q: what tensor memory has left beside O and S

K_READERS = {"P.V commit": 1}  # P being there means that Q.K and softmax are done with the tile
Q_READERS = {"Q.K commit": 1}


class Layouts(NamedTuple):
    """Shared-memory layouts of Q and of the KV ring, one plane each."""

    q: tuple
    k: tuple


class Pipes(NamedTuple):
    """Rings of Q and of KV tiles."""

    q: Any
    k: Any


class WsParts:
    """Components of the pipeline's roles, a ``dense_parts.Parts``.

    ``p``, ``corrected`` and ``o`` have the KV ring's stages, whose release frees theirs.

    Attributes:
        o: P.V of a stage is complete.
        q_tiles, loads, values: Q, KV tiles, V in the ring.
    """

    tile, p_stages = TILE, STAGES

    def __init__(self, spec: VariantSpec):
        self.dtype, self.form = compat.dtype(spec.dtype), umma.Form(spec.row_tile)
        self.columns = Columns(self.form, TILE, Q_IN_TMEM)
        self.rings = Rings(
            s=Ring("s", S_STAGES, {"Q.K commit": 1}, {"softmax": SOFTMAX_WARPS}),
            p=Ring("p", STAGES, {"softmax": SOFTMAX_WARPS}),
            corrected=Ring("corrected", STAGES, {"correction": CORRECTION_WARPS}),
            inv=inverses(self.form),
        )
        self.o = Ring("o", STAGES, {"P.V commit": 1})
        self.work = WorkList(spec.page_size, TILE)
        latent = latent_format(self.dtype)
        self.q_tiles = QTiles(
            latent, self.work, rows=self.form.rows, stages=Q_STAGES, readers=Q_READERS
        )
        self.loads = PagedTma(
            latent, self.work, rows=self.form.rows, stages=STAGES, readers=K_READERS,
            q_stages=Q_STAGES, chunks=CHUNKS, early=Early(EARLY, 1),
        )  # fmt: skip
        self.values = LatentValues(self.dtype, TILE)

    @property
    def all_rings(self) -> tuple[Ring, ...]:
        """Rings beside those of Q and of the KV ring."""
        return (*self.rings, self.o)

    def layouts(self) -> Layouts:
        """K-major tiles in column blocks of 128 bytes, 128-byte swizzle."""
        make, width = helpers.make_smem_layout_b, HEAD_DIM_QK
        return Layouts(
            (make(ROW_MAJOR, (self.form.rows, self.form.rows, width), self.dtype, Q_STAGES),),
            (make(ROW_MAJOR, (TILE, TILE, width), self.dtype, STAGES),),
        )

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory for the KV ring and Q."""
        return (STAGES * TILE + Q_STAGES * self.form.rows) * TOKEN_BYTES

    def tile_fields(self, layouts: Layouts) -> dict:
        """Storage of the KV ring and Q, at multiples of the 1024-byte swizzle period."""
        return dict(
            kc=array(self.dtype, cute.cosize(layouts.k[0]), 1024),
            qc=array(self.dtype, cute.cosize(layouts.q[0]), 1024),
        )

    def p_address(self, st, stage):
        """Byte address of P of a stage: over the tile's RoPE columns, which only Q.K reads."""
        return umma.address_of(st.kc.data_ptr()) + (stage * CHUNKS + CHUNKS - 1) * BLOCK

    @cute.jit
    def prepare_values(self, cta, state, tile, ragged_from, seqlen):
        """V is the K tile: P being there means that Q.K has read it, and that all of it is."""
        if (tile + 1) * TILE > ragged_from:
            at = tile * TILE
            self.values.clear(
                cta.st, state.index, ragged_from - at, seqlen - at, 0, CHUNKS - 1,
                Barrier.CORRECTION,
            )  # fmt: skip

    @cute.jit
    def wait_products(self, st, state):
        """P.V of the tile before stage ``state`` is the last one whose P was handed over, or the
        one before this tile's, whose stage P.V of two tiles ago has freed: so the barrier of its
        stage is in this phase or the next."""
        before = state.index ^ 1
        self.o.wait_full(st, before, state.phase ^ before)
