"""``fp8_nope``, of models whose attention has no RoPE (GLM-5.3-Flash): a row of 528 bytes a token.

    [0, 512)     512 e4m3 channels
    [512, 528)   4 fp32 scales, one for each 128 channels

``fp8_ds_mla`` without its last 128 bytes, as FlashMLA's forks have it (V32_NO_ROPE): scales and
what a scale of 0 says are that format's.  V4.1's rows have as many bytes.  K and V are the same 512
channels: Q.K is 32 steps of 16 channels with a scale for each 8 of them.
"""

from __future__ import annotations

from .dims import KV_LORA_RANK
from .format import ZEROS, Field, Format

GROUP = 128  # channels that share a scale
GROUPS = KV_LORA_RANK // GROUP

FORMAT = Format(
    "fp8_nope",
    __name__,
    planes=(KV_LORA_RANK + 4 * GROUPS,),
    content=Field("e4m3", KV_LORA_RANK),
    rope=None,
    scale=Field("f32", GROUPS, at=KV_LORA_RANK),
    scale_bytes=4 * GROUPS,
    group=GROUP,
    least_scale=2.0**-126,
    zero_scale=ZEROS,
    sparse="mix16",
    elsewhere="there FlashMLA's copy in SGLang serves these rows (V32_NO_ROPE)",
    element="uint8",
    about="a cache of format 'fp8_nope'",
    parts=("kv",),
    arguments=("kv",),
    any_page=True,
    named=True,
)
