"""FlashAttention's names: the public path of ``snapmla.compat.flash_attention``."""

from snapmla.compat.flash_attention import *  # noqa: F403
from snapmla.compat.flash_attention import __all__, __doc__  # noqa: F401
