"""vLLM's names of the indexer's ops: the public path of ``snapmla.compat.vllm``."""

from snapmla.compat.vllm import *  # noqa: F403
from snapmla.compat.vllm import __all__, __doc__  # noqa: F401
