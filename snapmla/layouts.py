"""Cache layouts as data: the public path of ``snapmla.cache.layouts``."""

from snapmla.cache.layouts import __doc__, memory_of, paged_views, rows640_views  # noqa: F401

__all__ = ["memory_of", "paged_views", "rows640_views"]
