"""Barriers, and places of P and V, that the roles of the 128-row pipeline (dense_pair.py) share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute

from ...blocks import compat
from ...blocks.barriers import Ring
from ...blocks.smem import array
from ...load.latent16 import LatentValues
from .. import umma
from ..rings import ToLeader
from .dense_pair_loads import (
    BYTES,
    CTAS,
    Q_IN_TMEM,
    ROWS,
    RUNS,
    SQUARE,
    TILE,
    V_AT,
    V_SQUARES,
    Layouts,
    PairLoads,
    PairQ,
)
from .dense_parts import (
    CORRECTION_WARPS,
    RUN,
    S_STAGES,
    SOFTMAX_WARPS,
    Barrier,
    Columns,
    Rings,
    inverses,
)

if TYPE_CHECKING:
    from ...spec import VariantSpec

P_STAGES = 1
P_BYTES = P_STAGES * RUNS * SQUARE


class PairParts:
    """Components of the pipeline's roles, a ``dense_parts.Parts``.

    Attributes:
        q_tiles, loads, values: Q, K and V, V's cleaner.
    """

    tile, p_stages = TILE, P_STAGES

    def __init__(self, spec: VariantSpec):
        self.dtype, self.form = compat.dtype(spec.dtype), umma.Form(ROWS, CTAS)
        self.columns = Columns(self.form, TILE, Q_IN_TMEM)
        of_both = {"softmax": CTAS * SOFTMAX_WARPS}
        self.rings = Rings(
            s=ToLeader("s", S_STAGES, {"Q.K commit": 1}, of_both),
            p=Ring("p", P_STAGES, {"softmax": SOFTMAX_WARPS}, {"P.V commit": 1}),
            corrected=ToLeader("corrected", P_STAGES, {"correction": CTAS * CORRECTION_WARPS}),
            inv=inverses(self.form),
        )
        self.q_tiles, self.loads = PairQ(self.dtype), PairLoads(self.dtype, spec.page_size)
        self.work, self.values = self.loads.work, LatentValues(self.dtype, RUN)

    @property
    def all_rings(self) -> tuple[Ring, ...]:
        """Rings of the roles and of the loads."""
        return (*self.rings, *self.loads.rings)

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory for Q, K, V and P."""
        return BYTES + P_BYTES

    def tile_fields(self, layouts: Layouts) -> dict:
        """Storage of Q, K, V and P."""
        return dict(
            **self.loads.tile_fields(layouts),
            p=array(self.dtype, P_BYTES // 2, 1024),
        )

    def p_address(self, st, stage):
        """Byte address of P of a stage; P has a region of its own."""
        return umma.address_of(st.p.data_ptr()) + stage * (RUNS * SQUARE)

    @cute.jit
    def prepare_values(self, cta, state, tile, ragged_from, seqlen):
        """V of the CTA has landed; the arrival that follows tells the leader."""
        for run in range(RUNS):
            self.loads.v.wait_full(cta.st, run, state.phase)
        if (tile + 1) * TILE > ragged_from:
            for run in cutlass.range(RUNS, unroll=1):
                at = tile * TILE + run * RUN
                self.values.clear(
                    cta.st, 0, ragged_from - at, seqlen - at, V_AT + run * V_SQUARES, V_SQUARES,
                    Barrier.CORRECTION,
                )  # fmt: skip

    @cute.jit
    def wait_products(self, st, state):
        """Wait until P.V of the tile before ``state``'s is complete, which has freed P."""
        self.rings.p.wait_empty(st, 0, state.phase ^ 1)
