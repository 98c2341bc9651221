"""``select_topk``: the k highest scores of each row; sparse attention then reads those tokens.

A variant is how much of a row a cluster holds, or by how many CTAs it is streamed; which one serves
a call does not show in results.
"""

from __future__ import annotations

from collections.abc import Iterator

from .family import Axis, Values, helper

# threads a CTA; keys that a thread holds, 0: it reads them in every sweep; CTAs a row
THREADS = Axis("threads", "t", (64, 128, 512, 1024))
KEYS = Axis("keys", "e", (0, 8, 16, 32))
CLUSTER = Axis("cluster", "c", (1, 2, 4, 8))

# keys a thread and CTAs a row of the default matrix, all of 1024 threads: what hosts choose from
CHOSEN = ((8, 1), (16, 2), (32, 1), (16, 8), (0, 1), (0, 2), (0, 4), (0, 8))


def points(_arch: str) -> Iterator[Values]:
    """Yield the variants that hosts choose from, ``CHOSEN``."""
    for keys, cluster in CHOSEN:
        yield {"threads": 1024, "keys": keys, "cluster": cluster}


FAMILY = helper(
    "select_topk",
    "indexer",
    THREADS,
    KEYS,
    CLUSTER,
    points=points,
    # those that read their keys in every sweep run with few threads (tests/kernels): 8 CTAs of 1024
    # threads take the software GPU most of a minute
    everyday=({"keys": 8},),
    shown=("logits", "block_table", "out"),
    results=("out", "counts"),
)
