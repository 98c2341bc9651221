"""Kernels of sparse attention's indexer on every architecture: index cache, rows, top-k."""
