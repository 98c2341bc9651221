"""Kernels for Hopper (sm_90a)."""
