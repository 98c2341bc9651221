"""Decode over the FP8 cache on Hopper, with FP8 products."""
