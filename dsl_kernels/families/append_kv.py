"""``append_kv``: quantises tokens into the cache."""

from __future__ import annotations

from .family import IN_DTYPE, Axis, helper

INDEX_DTYPE = Axis("index_dtype", "i", ("i32", "i64"), "i32")  # of slot_mapping

FAMILY = helper("append_kv", IN_DTYPE, INDEX_DTYPE)
