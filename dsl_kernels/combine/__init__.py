"""Output rows, partial rows of splits, and the kernels that combine them."""
