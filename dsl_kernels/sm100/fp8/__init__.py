"""Decode over the FP8 cache on datacenter Blackwell."""
