"""The indexer of DeepSeek's sparse attention; users import it as ``snapmla.dsa``.

dsa_prologue.py    what a step writes, in one launch: the indexer's keys, latents, queries
append_index_k.py  the indexer's keys into their pages, with RoPE and Hadamard transform
index_logits.py    a score for each query token and cached token
select_topk.py     the k highest scores of each row, as positions or slots
index_topk.py      both, over one workspace
fetch_index_k.py   keys back out of the pages
shapes.py          which top-k kernel serves a shape
"""
