"""Dense MLA decode for SM90 over NoPE's rows of 528 bytes (nope.py) by block table, pipeline
``mix16``.

As mix16_nope.py, whose roles and shared memory these are, behind the loader of pages
(load/gather_pages.py).  mix16_pages.py says what rows of several query tokens do not see; its
scales are these, too.

Shared memory beside mix16_nope.py's: a limit a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...entry.entries import PagedBytesEntry
from ...load.gather_pages import AnyPages
from ..decode import Decode
from . import mix16, mix16_nope
from .mix16_content import ContentParts, ContentSoftmax, infeasible_because
from .mix16_limits import RowLimits
from .mix16_pages import REGISTERS, QuietGroups

if TYPE_CHECKING:
    from ...blocks import budget as bud
    from ...spec import VariantSpec


def parts_of(spec: VariantSpec) -> ContentParts:
    """Make the pipeline's components: ``ContentParts`` of pages, with limits of rows."""
    return mix16.parts_of(
        spec, ContentParts, work=AnyPages, quiet=QuietGroups,
        limits=RowLimits(spec.row_tile),
    )  # fmt: skip


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    return mix16_nope.budget(spec, parts_of(spec), REGISTERS)


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    return infeasible_because(spec, budget(spec))


def build(spec: VariantSpec):
    parts = parts_of(spec)
    decode = Decode(spec, mix16.Mix16(parts, ContentSoftmax(parts), budget(spec)))
    return PagedBytesEntry.exported(decode)
