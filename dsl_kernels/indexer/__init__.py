"""Kernels of sparse attention's indexer that all architectures share.

They move index keys into and out of their cache, count the tokens that each query token sees, and
select the top-k; one is the prologue.  Kernels of scores are in sm90/indexer and sm100/indexer.
"""
