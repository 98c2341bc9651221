"""Columns of a row that a CTA of ``select_topk`` takes: the kernel, its family and hosts agree."""

from __future__ import annotations

# columns a thread where sweeps read memory: more than 128, so that 8 CTAs hold 1M tokens and drafts
STREAMED = 132
# the same of CTAs of 1024 threads that are fewer: each takes 256K tokens
FEW_STREAMED = 256
MANY = 8  # CTAs a row


def share(threads: int, keys: int, cluster: int) -> int:
    """The most columns of a CTA.

    Args:
        threads: of it.
        keys: that a thread keeps; 0: none are.
        cluster: CTAs a row.
    """
    few = threads == 1024 and cluster < MANY
    return threads * (keys or (FEW_STREAMED if few else STREAMED))
