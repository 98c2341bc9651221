"""Decode over 16-bit rows on datacenter Blackwell."""
