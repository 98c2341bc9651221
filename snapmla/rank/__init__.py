"""Choice of the kernel that serves a call, why, and what the others would take.

A *candidate* is a variant that could.  It gets a reason why it cannot or should not be used, or it
is the chosen one.  ``plan_decode`` asks ``choose``, people ask ``explain``; both walk one list.

    cards.py       GPU models: what bounds a kernel there
    verdicts.py    candidates, reasons, times, the winner; knows no op
    costs.py       times of decode kernels, from committed tables and by a model
    decode.py      decode calls as problems of the ranking
    fp8_decode.py  decode over the FP8 cache: features and figures; another cache, another such file
    dense_decode.py  decode over a 16-bit cache
    record_decode.py  dense decode over caches of bytes
    sparse_decode.py  sparse decode over either cache that it reads
    calls.py       ``choose`` and ``explain``
    model.py       a model and its engine, and what a config.json tells of it
    needs.py       all kernels of a model, those around decode with them

The choice looks at shapes that fix a kernel's efficiency (rows, card), not at batch or lengths: a
sequence meets the same kernel whatever else is in the batch, and the host does not know lengths
anyway.  Sparse decode is the exception: its lists have a known width, and few query tokens want
small row tiles, unless the plan's bits must be those of any batch (``fixed_split_tokens``).
"""

from snapmla.rank.calls import (
    OPS,
    cache_name,
    choose,
    choose_sparse,
    explain,
    longest_item,
    op_of,
    sparse_cache_name,
    tile_times,
)
from snapmla.rank.cards import Card, card_named, card_of, cards
from snapmla.rank.costs import ROW_BLOCKS, parts_of, rows_of_unit, unit_rows
from snapmla.rank.load import Load, Share
from snapmla.rank.model import DENSE_FORMATS, INDICES, PLAIN, SPARSE_FORMATS, Facts, Model, facts_of
from snapmla.rank.needs import needs
from snapmla.rank.sparse_decode import (
    PIPELINES,
    is_never_cut,
    parts_of_lists,
    pipeline_of,
    stays_whole,
)
from snapmla.rank.verdicts import Explanation, Size, Verdict

__all__ = [
    "DENSE_FORMATS",
    "INDICES",
    "OPS",
    "PIPELINES",
    "PLAIN",
    "ROW_BLOCKS",
    "SPARSE_FORMATS",
    "Card",
    "Explanation",
    "Facts",
    "Load",
    "Model",
    "Share",
    "Size",
    "Verdict",
    "cache_name",
    "card_named",
    "card_of",
    "cards",
    "choose",
    "choose_sparse",
    "explain",
    "facts_of",
    "is_never_cut",
    "longest_item",
    "needs",
    "op_of",
    "parts_of",
    "parts_of_lists",
    "pipeline_of",
    "rows_of_unit",
    "sparse_cache_name",
    "stays_whole",
    "tile_times",
    "unit_rows",
]
