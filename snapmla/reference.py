"""MLA decode in plain torch: the fp64 truth, the kernels' rounding mimic and the paper's variants.

One function computes all of them; a ``QuantConfig`` says which rounding points it has and whether
the two matrix products accumulate exactly or as a tensor core does, Hopper's or Blackwell's.  Runs
on CPU and CUDA tensors, in chunks of tokens, so that 1M tokens of one sequence fit.

The code is in ``snapmla.testing``: ``reference``, ``attend``, ``rounding``, ``rope`` and
``accumulate``.
"""

from snapmla.testing.byte_records import dequantize_pages, quantize_pages
from snapmla.testing.ds_mla import dequantize_ds_mla_rows, quantize_ds_mla_rows
from snapmla.testing.reference import Move, mla_decode_reference, reference_from_unquantised
from snapmla.testing.rope import rms_norm_rows, rotate_rows
from snapmla.testing.rounding import (
    FP64,
    MIMIC,
    MIMIC_BLACKWELL,
    MIMIC_HW,
    MIMIC_HW_FULL,
    SNAPMLA,
    TABLE_2,
    QuantConfig,
    dequantize_rows,
    quantize_rows,
    to_e4m3,
)

__all__ = [
    "FP64", "MIMIC", "MIMIC_BLACKWELL", "MIMIC_HW", "MIMIC_HW_FULL", "SNAPMLA", "TABLE_2",
    "Move", "QuantConfig", "dequantize_ds_mla_rows", "dequantize_pages", "dequantize_rows",
    "mla_decode_reference", "quantize_ds_mla_rows", "quantize_pages", "quantize_rows",
    "reference_from_unquantised", "rms_norm_rows", "rotate_rows", "to_e4m3",
]  # fmt: skip
