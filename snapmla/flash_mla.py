"""FlashMLA's names: the public path of ``snapmla.compat.flash_mla``."""

from snapmla.compat.flash_mla import *  # noqa: F403
from snapmla.compat.flash_mla import __all__, __doc__  # noqa: F401
