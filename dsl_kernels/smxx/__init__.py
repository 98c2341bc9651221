"""Kernels that compile unchanged for every supported architecture."""
