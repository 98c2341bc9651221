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

from ...entry.entries import BytesEntry
from ...formats.dims import KV_LORA_RANK as D
from ..decode import Decode
from ..roles import FEW_ROWS
from . import mix16
from .mix16_content import ContentParts, ContentSoftmax, budget_of, infeasible_because
from .mix16_parts import GROUPS

if TYPE_CHECKING:
    from ...blocks import budget as bud
    from ...spec import VariantSpec

REGISTERS = mix16.REGISTERS
MADE_BYTES = 4 * (4 + GROUPS + GROUPS // 2)  # of what is made of a token's scales


def budget(
    spec: VariantSpec, parts: ContentParts | None = None, registers: dict | None = None
) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA; ``registers``: of producers,
    softmax, P.V, by rows."""
    k_step = D // GROUPS if spec.row_tile <= FEW_ROWS else D
    own = mix16.parts_of(spec, ContentParts) if parts is None else parts
    return budget_of(spec, own, registers or REGISTERS, MADE_BYTES, k_step)


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    return infeasible_because(spec, budget(spec))


def build(spec: VariantSpec):
    parts = mix16.parts_of(spec, ContentParts)
    pipeline = mix16.Mix16(parts, ContentSoftmax(parts), budget(spec))
    return BytesEntry.exported(Decode(spec, pipeline))
