"""Device code, written in NVIDIA's CuTe DSL.  Imports cutlass (lazily), never torch.

``spec`` and ``registry`` import without the compiler; kernel modules need it.
"""
