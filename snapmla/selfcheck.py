"""Checks of a decode's results (``decode_errors``), and of a built variant (``check``).

``lse_bounds`` says how far Hopper's tensor core can put a row's LSE from the exact one.
"""

from snapmla.testing.comparison import DecodeErrors, QkErrors, decode_errors
from snapmla.testing.qk_bounds import lse_bounds
from snapmla.testing.selfcheck import Result, check

__all__ = ["DecodeErrors", "QkErrors", "Result", "check", "decode_errors", "lse_bounds"]
