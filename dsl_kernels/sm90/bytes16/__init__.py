"""Decode on Hopper with 16-bit products of a cache that is dequantised in registers."""
