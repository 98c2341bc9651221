"""Measurements: roofline models, timing, the benchmark CLI and its committed results."""
