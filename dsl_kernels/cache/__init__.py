"""Kernels that write and read the paged cache, and that quantise queries."""
