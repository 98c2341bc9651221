"""Attention over 16-bit rows on Hopper: dense decode and sparse prefill."""
