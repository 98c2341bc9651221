"""Sparse FP8 MLA decode for SM100 behind TMA's gather: ``sparse_ws.py`` with another loader.

Built when it is asked for (``loads="gather4"``), not by default: a clock has to say whether it is
faster than ``cp.async``; by counts of shared memory's port both are level (docs/performance.md).
Results have the same bits.

Roles           as ws's (fp8_ws.py), but for the first warpgroup:
                warps 0, 3  gather rows (gather4_loads.py); warp 0 has Q's tiles copied, warp 3
                            also does what ws's does: tensor memory, rows that no item has
                warp 1      issues Q.K; it announces nothing: the copies complete the tile's barrier
                warp 2      issues P.V
Shared memory   as ws's, and 512 bytes a stage: where tokens are          = 222208 of 5 stages
Tensor memory   as ws's

Timeline of tile i (one stage of the KV ring)
    gather        | entries i+1 | wait empty | rows, scales | 40 x gather4 i, by one lane | i+1 ...
    Q.K issuer    | wait full | wait S free | Q.K i | ...
    softmax, P.V issuer, promotion: as ws's

Executed on the software GPU (softgpu); no Blackwell GPU has run it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import cutlass.cute as cute

from ..common import budget as bud
from ..common.fp8_per_token import TokenScales
from ..common.gather import TokenLists
from ..common.unplanned import void_unplanned
from ..dims import TOKEN_TILE as TILE
from ..smxx.decode_entry import Tma
from ..smxx.entry import SparseEntry
from . import fp8_ws
from .fp8_ws import K_READERS, Cta, Layouts, Ws
from .gather4_loads import Gather4
from .rings import part_of_cta

if TYPE_CHECKING:
    from ..spec import VariantSpec


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the kernel cannot be built for ``spec``, or None."""
    return fp8_ws.infeasible(spec, budget(spec))


def budget(spec: VariantSpec) -> bud.Budget:
    """Budget of ``ws`` with this loader, and with the shared memory of its table."""
    loads = loads_of(spec)
    needed = fp8_ws.budget_with(spec, loads)
    return replace(needed, smem=needed.smem + loads.table_bytes)


def loads_of(spec: VariantSpec) -> Gather4:
    """The KV ring, through which Q's tiles pass."""
    return Gather4(TokenLists(TILE), stages=spec.stages or fp8_ws.STAGES, readers=K_READERS)


def build(spec: VariantSpec):
    return SparseEntry.exported(SparseGather4(spec))


class SparseGather4(Ws):
    """The kernel: one CTA of 16 warps."""

    def __init__(self, spec: VariantSpec):
        loads = loads_of(spec)
        super().__init__(spec, loads, TokenScales(TILE, loads.stages, TILE))

    @cute.jit
    def last_warp(self, cta: Cta, tma: Tma, layouts: Layouts):
        self.loads.run(3, self.feed(cta, tma, layouts), None, None)
        void_unplanned(cta.gmem.work, cta.call, cta.gmem.results, part_of_cta())
