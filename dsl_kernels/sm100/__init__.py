"""Kernels for datacenter Blackwell (sm_100a)."""
