"""``fp8_ds_mla``, DeepSeek-V3.2's, named as vLLM does: a token is a row of 656 bytes.

    [0, 512)     512 e4m3 content channels
    [512, 528)   4 fp32 scales, one for each 128 channels: c_kv = content * scale
    [528, 656)   64 bf16 RoPE channels as they are

A scale of 0, which other writers leave for a group of zeros, says that all of its channels are 0,
whatever their bytes are: 0 / 0 made them NaN.  Each token that the table names is one.  Q.K is 32
steps of 16 channels with a scale for each 8 of them, and 4 of RoPE in BF16; V is the content.
"""

from __future__ import annotations

from .dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from .format import ZEROS, Field, Format

NAME = "fp8_ds_mla"
GROUP = 128  # channels that share a scale
GROUPS = KV_LORA_RANK // GROUP
SCALES_AT = KV_LORA_RANK
ROPE_AT = SCALES_AT + 4 * GROUPS
ROW_BYTES = ROPE_AT + 2 * QK_ROPE_HEAD_DIM  # 656
LEAST_SCALE = 2.0**-126  # the smallest normal fp32: what a group of zeros is stored with

FORMAT = Format(
    NAME,
    __name__,
    planes=(ROW_BYTES,),
    content=Field("e4m3", KV_LORA_RANK),
    rope=Field("bf16", QK_ROPE_HEAD_DIM, ROPE_AT),
    scale=Field("f32", GROUPS, SCALES_AT),
    scale_bytes=4 * GROUPS,
    group=GROUP,
    least_scale=LEAST_SCALE,
    zero_scale=ZEROS,
    sparse="mix16",
    elsewhere="there FlashMLA's own flash_mla_with_kvcache(indices=) serves these rows",
    timed=True,
    shipped=True,
    overlaps=True,
    element="uint8",
    about="a cache of format 'fp8_ds_mla'",
    parts=("kv",),
    arguments=("kv",),
    any_page=True,
    named=True,
    appends=(
        {"in_dtype": "bf16", "index_dtype": "i32"},
        {"in_dtype": "bf16", "index_dtype": "i64"},
        *(
            {
                "in_dtype": "bf16", "index_dtype": "i64", "rope_style": "interleaved",
                "norm": "rms", "cos_sin_dtype": table,
            }
            for table in ("f32", "bf16")
        ),
    ),
    fetches=tuple({"in_dtype": "bf16", "mode": mode} for mode in ("pages", "indices", "ragged")),
)  # fmt: skip
