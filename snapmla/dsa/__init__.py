"""DeepSeek's sparse attention (DSA): what chooses the tokens that sparse decode attends to.

append_index_k.py   the indexer's keys into their pages, RoPE and Hadamard transform with them
index_logits.py     a score for each query token and cached token
select.py           ``select_topk``: the k highest scores of each row, as positions or slots
shapes.py           which top-k kernel serves a shape
"""

from snapmla.dsa.select import select_topk

__all__ = ["select_topk"]
