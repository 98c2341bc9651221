"""Sparse MLA decode for SM90 over NoPE's rows of 528 bytes (nope.py), pipeline ``mix16``.

A row is 512 e4m3 channels with an fp32 scale for each 128, as those of mix16.py's rows of 656
bytes, whose scales, sums and ratios these are; roles, timeline and registers are
mix16_content.py's.

Shared memory, 64 rows and 3 stages (bytes)
    Q 65536 | K ring 3 x (32768 content + 1024 scales + 2560 of theirs) | P 2 x 8192
    exchange, gamma, factors, 1/l, flags, barriers                                         = 195584
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cache_records.nope import GROUPS, RECORD
from ..common.gather import TokenLists
from ..common.gather_records import GatherRecords
from ..dims import KV_LORA_RANK as D
from ..dims import TOKEN_TILE as TILE
from ..smxx.entry import RecordEntry
from . import mix16
from .decode import Decode
from .mix16_content import (
    ContentParts,
    ContentSoftmax,
    Mix16Content,
    budget_of,
    infeasible_because,
)
from .mix16_parts import RecordScales
from .roles import FEW_ROWS

if TYPE_CHECKING:
    from ..common import budget as bud
    from ..spec import VariantSpec

REGISTERS = mix16.REGISTERS


class GatherNope(GatherRecords):
    """``GatherRecords`` of rows without RoPE."""

    rope = False


class NopeParts(ContentParts):
    """``ContentParts`` of NoPE's rows."""

    lists, loader, scales_of = TokenLists, GatherNope, RecordScales
    stage_bytes = TILE * (RECORD.token_bytes + 4 * (4 + GROUPS + GROUPS // 2))

    def __init__(self, spec: VariantSpec):
        super().__init__(spec)
        self.k_step = D // GROUPS if self.rows <= FEW_ROWS else D


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    return budget_of(spec, NopeParts(spec), REGISTERS)


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    return infeasible_because(spec, budget(spec))


def build(spec: VariantSpec):
    parts = NopeParts(spec)
    pipeline = Mix16Content(spec, parts, ContentSoftmax(parts), REGISTERS)
    return RecordEntry(Decode(spec, pipeline)), RecordEntry.fake_args(spec, RECORD)
