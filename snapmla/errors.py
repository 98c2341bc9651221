"""Exception types beyond ValueError and TypeError.

Wrong arguments raise ``ValueError`` or ``TypeError`` that name the argument, what was expected and
what came (``snapmla.checks``).  The types here are about the machine and the built variants.
"""

from __future__ import annotations


class SnapMLAError(RuntimeError):
    """Base class of this package's run-time errors."""


class UnsupportedDeviceError(SnapMLAError):
    """The tensors live on a device that no kernel is built for."""


class VariantError(SnapMLAError):
    """A needed variant is not there, or could not be compiled or loaded."""
