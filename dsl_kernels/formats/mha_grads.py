"""Backward of dense MHA, for kernels and hosts: sizes of tiles, and the rows of ``stats``.

Standard library only.

``stats`` is f32 (h, blocks, PAD, 2): of each head and query row LSE * log2 e and sum(O dO).  A
sequence begins at a block of its own, and what is left of its last one holds +inf and 0: of LSE
+inf a row has P = 0, and that is the mask of rows behind a sequence's end.  +inf stands for rows
without keys, too, and NaN for rows whose dO is not finite.  Kernels that were compiled with another
``PAD`` refuse the tensor, since it is one of its sizes.

The list of tiles of keys (mha_list.py) has a word more, ``DELTAS``: mha_delta's CTAs that have
stored, 0 from the list's kernel on.  CTA (0, 0) adds ``READY`` less the number of the others, each
of the others 1, so that it is ``READY`` once all have, however many they are.

``parts`` is f32 (total_k, groups, 64): dK of RoPE channels, summed over ``heads_together`` KV heads
in their order, each group by one CTA.
"""

from __future__ import annotations

from typing import Any

PAD = 192  # rows of a block: a multiple of every tile of rows
KEY_TILE = 64  # keys that mha_dq takes at a time
DQ_STAGES = {192: 3, 128: 4}  # channels of q -> tiles of K and V in shared memory
ROW_TILE = {192: 32, 128: 48}  # channels of q -> query rows that mha_dkv takes at a time
DKV_STAGES = 4
DELTAS = 2  # word of the header of the list of tiles of keys
READY = 1 << 30  # more than CTAs there can be


def stats_blocks(total_q: int, batch: int) -> int:
    """Blocks that ``batch`` sequences of together ``total_q`` query tokens have at most."""
    return total_q // PAD + batch


def stats_row(first_token: Any, sequence: Any) -> Any:
    """Row of ``stats`` where a sequence begins whose first query token is ``first_token``."""
    return (first_token + PAD * sequence) // PAD * PAD


def rope_groups(kv_heads: int, heads_together: int) -> int:
    """Partial sums of a key's RoPE channels."""
    return -(-kv_heads // heads_together)
