"""Sparse FP8 MLA decode for SM100: pipeline ``ws`` (fp8/ws.py) behind a gathering loader.

Every query token is a sequence of its own, whose row of ``indices`` names up to topk tokens of the
cache.  Softmax, P.V's issuer, promotion, epilogue, merge and work list are those of decode over
pages, and so are numerics: a list that names all tokens in their order gives decode's bits.

Roles           as ws's, but for the first warpgroup (sparse_loads.py):
                warps 0, 3  gather rows; warp 0 has Q's tiles copied, warp 3 also does what ws's
                            does: tensor memory, rows that no work tile has
                warp 1      announces tiles, and issues Q.K
                warp 2      issues P.V
Shared memory   as ws's, and a barrier a stage (``landed``)
Tensor memory   as ws's

Timeline of tile i (one stage of the KV ring)
    gather        | entries i+1 | wait empty | cp.async i ... | arrive when they have landed
    Q.K issuer    | wait landed, proxy fence, full | wait S free | Q.K i | ...
    softmax       |                                wait full | sigmas i | S i -> registers | ...
    P.V issuer, promotion: as ws's

128 heads are two row blocks of 64 in two CTAs, side by side: the second finds the rows in L2.

Executed on the software GPU (softgpu); no Blackwell GPU has run it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...blocks import budget as bud
from ...entry.entries import SparseEntry
from ...formats.dims import TOKEN_TILE as TILE
from ...load.fp8_per_token import TokenScales
from ...load.gather import TokenLists
from . import ws
from .sparse_loads import GatherThroughRing
from .ws import K_READERS, Ws

if TYPE_CHECKING:
    from ...spec import VariantSpec


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    return ws.infeasible(spec, budget(spec))


def budget(spec: VariantSpec) -> bud.Budget:
    """Budget of ``ws`` with this loader."""
    return ws.budget_with(spec, loads_of(spec))


def loads_of(spec: VariantSpec) -> GatherThroughRing:
    """The KV ring, through which Q's tiles pass."""
    return GatherThroughRing(
        TokenLists(TILE), stages=spec.stages or ws.STAGES, readers=K_READERS,
        by_lines=bool(spec.lines),
    )  # fmt: skip


def build(spec: VariantSpec):
    loads = loads_of(spec)
    return SparseEntry.exported(Ws(spec, loads, TokenScales(TILE, loads.stages, TILE), loads))
