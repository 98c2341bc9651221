"""DeepSeek's sparse attention (DSA): what chooses the tokens that sparse decode attends to.

A step is ``append_index_k`` of the new tokens' keys, ``index_topk``, and ``decode(indices=)`` over
what it chose; ``index_topk`` is ``index_logits`` and ``select_topk``, which are there by themselves
too.  Choices are exact and the same in any batch.  SM90; see docs/dsa.md.

Its tests passed on an H200 and an H100 (profiles/results/gpu-tests-h100.md says which were skipped
as nothing compiled there).  The kernels of a step are in wheels; those of ``fetch_index_k``, of
unusual dtypes, of norms and RoPE inside of ``append_index_k`` are compiled when they are asked for.

prologue.py          ``prologue``: that, the latents' append and the queries, in one launch
append_index_k.py    the indexer's keys into their pages, RoPE and Hadamard transform with them
index_logits.py      a score for each query token and cached token
select.py            ``select_topk``: the k highest scores of each row, as positions or slots
step.py              ``index_topk``: both, over one workspace
fetch.py             ``fetch_index_k``: keys back out of the pages
shapes.py            which top-k kernel serves a shape
deep_gemm_names.py   DeepGEMM's names over these
vllm_names.py        vLLM's
"""

from snapmla.dsa.append_index_k import append_index_k
from snapmla.dsa.fetch import fetch_index_k
from snapmla.dsa.index_logits import index_logits
from snapmla.dsa.prologue import Prologue, prologue
from snapmla.dsa.select import select_topk
from snapmla.dsa.step import index_topk, index_topk_workspace

__all__ = [
    "Prologue",
    "append_index_k",
    "fetch_index_k",
    "index_logits",
    "index_topk",
    "index_topk_workspace",
    "prologue",
    "select_topk",
]
