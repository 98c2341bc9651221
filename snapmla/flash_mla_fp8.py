"""SnapMLA's own names: the public path of ``snapmla.compat.flash_mla_fp8``."""

from snapmla.compat.flash_mla_fp8 import *  # noqa: F403
from snapmla.compat.flash_mla_fp8 import __all__, __doc__  # noqa: F401
