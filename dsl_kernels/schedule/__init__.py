"""Kernels that make work lists on the device: decode's plan, FlashMLA's metadata, prefill's."""
