"""Dense attention of prompts: separate heads, keys and values in 16 bits (MHA form of MLA).

    from snapmla.mha import mha_prefill, mha_prefill_backward

``snapmla.mha_prefill`` and ``snapmla.mha_prefill_backward`` are the same functions.
``snapmla.flash_mla`` and
``flash_attention_names`` have other projects' signatures over the same kernels.
"""

from snapmla.mha.backward import backward_workspace_size, mha_prefill_backward
from snapmla.mha.prefill import mha_prefill, workspace_size

__all__ = ["backward_workspace_size", "mha_prefill", "mha_prefill_backward", "workspace_size"]
