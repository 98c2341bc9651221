"""Vocabulary shared by the kernels."""
