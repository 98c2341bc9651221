"""A token of format ``fp8_ds_mla``, DeepSeek-V3.2's, is a row of 656 bytes: where fields lie.

    [0, 512)     512 e4m3 content channels
    [512, 528)   4 fp32 scales, one for each 128 channels: c_kv = content * scale
    [528, 656)   64 bf16 RoPE channels as they are

A leaf beside ``dims``, so that what knows nothing of this format is not compiled anew.
"""

from __future__ import annotations

from .dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM

GROUP = 128  # channels that share a scale
GROUPS = KV_LORA_RANK // GROUP
SCALES_AT = KV_LORA_RANK
ROPE_AT = SCALES_AT + 4 * GROUPS
ROW_BYTES = ROPE_AT + 2 * QK_ROPE_HEAD_DIM  # 656
LEAST_SCALE = 2.0**-126  # the smallest normal fp32: what a group of zeros is stored with
