"""Context parallelism: decode over the ranks of a ``torch.distributed`` group, each of which holds
a part of every sequence's tokens.

    group = ContextGroup(num_heads=128, interleave=64)               # on every rank, once
    slots = group.local_slots(positions, block_table, page_size=64)  # a step's new tokens
    plan = group.plan_decode(cache_seqlens, 1, page_size=64, max_pages=width)
    out, lse = group.decode(q_nope, q_rope, cache, block_table, plan, softmax_scale=s)

Tokens are dealt in turns of ``interleave``: rank r of n holds token p if p // interleave % n is r.
Every rank attends with all heads to its own tokens; the partial results are exchanged, and each
rank gets its h / n heads over all tokens, as tensor parallelism wants them.

    sharding.py    who holds which token, on the device
    exchange.py    the two ways to make partial results whole
    plan.py        what a step needs: local lengths, decode plan, buffers
    group.py       ``ContextGroup``
"""

from snapmla.parallel.group import ContextGroup
from snapmla.parallel.plan import ContextPlan

__all__ = ["ContextGroup", "ContextPlan"]
