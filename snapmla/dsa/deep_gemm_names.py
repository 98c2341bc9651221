"""DeepGEMM's names: the public path of ``snapmla.compat.deep_gemm``."""

from snapmla.compat.deep_gemm import *  # noqa: F403
from snapmla.compat.deep_gemm import __all__, __doc__  # noqa: F401
