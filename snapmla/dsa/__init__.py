"""DeepSeek's sparse attention (DSA): what chooses the tokens that sparse decode attends to.

A step is ``append_index_k`` of the new tokens' keys, ``index_topk``, and ``decode(indices=)`` over
what it chose; ``index_topk`` is ``index_logits`` and ``select_topk``, which are there by themselves
too.  Choices are exact and the same in any batch.  SM90; see docs/dsa.md.

Its tests passed on an H200 and an H100 (profiles/results/gpu-tests-h100.md says which were skipped
as nothing compiled there).  The kernels of a step are in wheels; those of ``fetch_index_k``, of
unusual dtypes, of norms and RoPE inside of ``append_index_k`` are compiled when they are asked for.

The code is ``snapmla.indexer``; ``deep_gemm_names`` and ``vllm_names`` have other libraries' names
for it.
"""

from snapmla.indexer.append_index_k import append_index_k
from snapmla.indexer.dsa_prologue import Prologue, prologue
from snapmla.indexer.fetch_index_k import fetch_index_k
from snapmla.indexer.index_logits import index_logits
from snapmla.indexer.index_topk import index_topk, index_topk_workspace
from snapmla.indexer.select_topk import select_topk

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
