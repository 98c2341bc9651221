"""Dense attention of prompts: separate heads, keys and values in 16 bits (MHA form of MLA).

    from snapmla.mha import mha_prefill

``snapmla.mha_prefill`` is the same function.  ``flash_mla_names`` (those of ``snapmla.flash_mla``)
and ``flash_attention_names`` have other projects' signatures over the same kernels.
"""

from snapmla.mha.prefill import mha_prefill, workspace_size

__all__ = ["mha_prefill", "workspace_size"]
