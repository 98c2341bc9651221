"""References, error measures, models of rounding and checks of variants.

Nothing in service imports any of it.  ``reference`` (with ``rounding``, ``accumulate``),
``reference_plan`` and ``metrics`` need torch alone; ``selfcheck`` and ``python -m snapmla.testing``
run variants, on CPU tensors on the software GPU.
"""
