"""Dense MLA decode for SM90 over NoPE's rows of 528 bytes (nope.py) by block table, pipeline
``mix16``.

As mix16_nope.py, whose roles and shared memory these are, behind the loader of pages
(common/gather_pages.py).  mix16_pages.py says what rows of several query tokens do not see; its
scales are these, too.

Shared memory beside mix16_nope.py's: a limit a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import compat
from ..cache_records.nope import RECORD
from ..common.gather_pages import AnyPages, FromPages
from ..common.types import U8
from ..smxx.entry import PagedRecordEntry
from .decode import Decode
from .mix16_content import (
    ContentRows,
    ContentSoftmax,
    Mix16Content,
    budget_of,
    infeasible_because,
)
from .mix16_nope import GatherNope, NopeParts
from .mix16_pages import REGISTERS, LimitedRows, PagedScales, PagedSoftmax

if TYPE_CHECKING:
    from ..common import budget as bud
    from ..spec import VariantSpec


class GatherNopePages(FromPages, GatherNope):
    """``GatherNope`` whose rows come from pages."""


class LimitedNopeRows(LimitedRows, ContentRows):
    """``LimitedRows`` of content alone."""


class PagedNopeParts(NopeParts):
    """``NopeParts`` of pages."""

    lists, loader = AnyPages, GatherNopePages
    scales_of, rows_of_q = PagedScales, LimitedNopeRows
    queries: LimitedNopeRows


class PagedNopeSoftmax(PagedSoftmax, ContentSoftmax):
    """``ContentSoftmax`` of rows that see more or less of a sequence."""


def budget(spec: VariantSpec) -> bud.Budget:
    """Warpgroups, registers, barriers, shared memory of a CTA."""
    return budget_of(spec, PagedNopeParts(spec), REGISTERS)


def feasible(spec: VariantSpec) -> str | None:
    """Reason why the pipeline cannot be built for ``spec``, or None."""
    return infeasible_because(spec, budget(spec))


def build(spec: VariantSpec):
    cache = compat.rows(U8, (compat.sym(name="pages"), compat.sym(name="P"), RECORD.token_bytes))
    parts = PagedNopeParts(spec)
    decode = Decode(spec, Mix16Content(spec, parts, PagedNopeSoftmax(parts), REGISTERS))
    return PagedRecordEntry(decode), PagedRecordEntry.fake_args(spec, cache, RECORD.channels)
