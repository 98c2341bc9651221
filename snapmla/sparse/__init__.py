"""Sparse attention: each query token names the cached tokens that it attends to.

    plan.py        ``plan_sparse_decode`` and ``SparsePlan``: who computes what
    plan_cache.py  ``SparsePlanCache``: plans of an engine by shape of step
    decode.py      what ``snapmla.decode(..., indices=)`` does
    prefill.py     ``sparse_prefill`` over rows of BF16;
    prefill_fp8.py the same straight from the FP8 cache, by sparse decode, and its plans
    explain.py     ``explain_prefill``: which call is the fastest for a prompt
    rows.py        the same decode over a BF16 cache, by the kernels of sparse_prefill; rows_plan.py
                   its plans, rows_kernel.py which kernel; lists.py what all check of lists

The kernels' argument order is ``dsl_kernels/entry/entries.py``'s.
"""

from snapmla.sparse.plan import SparsePlan, plan_sparse_decode
from snapmla.sparse.plan_cache import SparsePlanCache
from snapmla.sparse.rows_plan import SparseRowsPlan

__all__ = ["SparsePlan", "SparsePlanCache", "SparseRowsPlan", "plan_sparse_decode"]
