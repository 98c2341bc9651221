"""Dense attention of prompts: separate heads, keys and values in 16 bits (MHA form of MLA).

    from snapmla.mha import mha_prefill

Not part of the public API yet: the kernels have been executed on the software GPU only.
``flash_mla_names`` and ``flash_attention_names`` have other projects' signatures over the same
kernels.
"""

from snapmla.mha.prefill import mha_prefill, workspace_size
from snapmla.torch_ops import mha as _operators  # noqa: F401 (registers its operators)

__all__ = ["mha_prefill", "workspace_size"]
