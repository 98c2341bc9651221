"""Sparse FP8 MLA decode for SM100 behind TMA's gather: ``sparse_ws.py`` with another loader.

Built when it is asked for (``loads="gather4"``), not by default: a clock has to say whether it is
faster than ``cp.async``; by counts of shared memory's port both are level (docs/lab-book.md).
Results have the same bits.

Roles           as ws's (fp8/ws.py), but for the first warpgroup:
                warps 0, 3  gather rows (gather4_loads.py); warp 0 has Q's tiles copied, warp 3
                            also does what ws's does: tensor memory, rows that no work tile has
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

from ...blocks import budget as bud
from ...entry.entries import SparseEntry
from ...formats.dims import TOKEN_TILE as TILE
from ...load.fp8_per_token import TokenScales
from ...load.gather import TokenLists
from . import ws
from .gather4_loads import Gather4
from .ws import K_READERS, Ws

if TYPE_CHECKING:
    from ...spec import VariantSpec


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the kernel cannot be built for ``spec``, or None."""
    return ws.infeasible(spec, budget(spec))


def budget(spec: VariantSpec) -> bud.Budget:
    """Budget of ``ws`` with this loader, and with the shared memory of its table."""
    loads = loads_of(spec)
    needed = ws.budget_with(spec, loads)
    return replace(needed, smem=needed.smem + loads.table_bytes)


def loads_of(spec: VariantSpec) -> Gather4:
    """The KV ring, through which Q's tiles pass."""
    return Gather4(TokenLists(TILE), stages=spec.stages or ws.STAGES, readers=K_READERS)


def build(spec: VariantSpec):
    loads = loads_of(spec)
    return SparseEntry.exported(Ws(spec, loads, TokenScales(TILE, loads.stages, TILE), loads))
