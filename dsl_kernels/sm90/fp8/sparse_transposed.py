"""Sparse FP8 MLA decode for SM90: pipeline ``etap`` (fp8/transposed.py) behind a gathering loader.

Every query token is a sequence of its own, whose row of ``indices`` names up to topk tokens of the
cache.  Softmax, P.V, epilogue, merge and work list are those of decode over pages.

Roles           as etap's, but for the producers (load/gather.py): warps 0, 1 and 3 gather rows,
                warp 1 has Q's tiles copied, warp 2 announces tiles and makes their scale triples
Shared memory   as etap's, and a barrier a stage
Timeline        a tile: wait empty, cp.async of rows and scales -> landed -> announcer -> full ->
                scale triples -> softmax

128 heads are two row blocks of 64 in two CTAs, side by side: the second finds the rows in L2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...entry.entries import SparseEntry
from ..decode import Decode
from . import transposed

if TYPE_CHECKING:
    from ...spec import VariantSpec

feasible, budget = transposed.feasible, transposed.budget


def build(spec: VariantSpec):
    return SparseEntry.exported(Decode(spec, transposed.Etap(spec)))
