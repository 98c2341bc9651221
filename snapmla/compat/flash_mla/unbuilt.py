"""Arguments of FlashMLA's functions that are refused, because they are not built."""

from __future__ import annotations

import torch

from snapmla import checks

_FP8 = "FlashMLA's dense FP8 cache is not built yet"
_DENSE = "dense decode has neither"
_SECOND = "None without indices", "dense decode has no second cache"
OWN_FP8 = "snapmla.flash_mla_fp8 decodes an FP8 cache with a scale a token"
_NOT_BUILT = {
    "topk_length": ("None without indices", _DENSE), "attn_sink": ("None without indices", _DENSE),
    "extra_k_cache": _SECOND, "extra_indices_in_kvcache": _SECOND, "extra_topk_length": _SECOND,
    "is_fp8_kvcache": (f"False: {_FP8}", OWN_FP8), "descale_q": (f"None: {_FP8}", OWN_FP8),
    "descale_k": (f"None: {_FP8}", OWN_FP8),
    "kv_format": ("None without indices", "dense decode takes a cache of 16 bits"),
}  # fmt: skip


def refuse(**given: object) -> None:
    """Raises ValueError for the first argument that asks for what is not built."""
    for name, value in given.items():
        if value is not None and value is not False:
            expected, hint = _NOT_BUILT[name]
            got = "a tensor" if isinstance(value, torch.Tensor) else value
            checks.value_error(name, expected, got, hint)
