"""Whether a decode's results are right (``decode_errors``), and a built variant (``check``)."""

from snapmla.testing.selfcheck import DecodeErrors, Result, check, decode_errors

__all__ = ["DecodeErrors", "Result", "check", "decode_errors"]
