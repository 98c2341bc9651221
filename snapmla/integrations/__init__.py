"""Inference engines on snapmla's kernels; each subpackage imports its engine when it is used."""
