"""The FP8 cache, 644 bytes a token with one scale, SnapMLA's (section 3.1):

    content  512 e4m3     c_kv / scale
    rope     64 bf16      k_rope / scale, so that one factor serves both parts of a logit
    scale    fp32

A page is the three planes one behind another (layout ``paged``), or they are tensors of their own
(``split``), or content and RoPE lie side by side in rows (``row640``).  The scale is max|c_kv| /
top with floors; top goes by the token's place in its page (``dims.CACHE_TOPS``,
``blocks/quant.py``).  A scale of 0 is no token.
"""

from __future__ import annotations

from types import MappingProxyType

from .dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from .format import NO_TOKEN, Field, Format

CONTENT = Field("e4m3", KV_LORA_RANK, plane=0)
ROPE = Field("bf16", QK_ROPE_HEAD_DIM, plane=1)
SCALE = Field("f32", 1, plane=2)

FORMAT = Format(
    "fp8",
    __name__,
    planes=(CONTENT.nbytes, ROPE.nbytes, SCALE.nbytes),
    content=CONTENT,
    rope=ROPE,
    scale=SCALE,
    scale_bytes=SCALE.nbytes,
    group=KV_LORA_RANK,
    least_scale=2.0**-80,
    zero_scale=NO_TOKEN,
    layouts=MappingProxyType({
        "split": ((("content",),), (("rope",),), (("scale",),)),
        "paged": ((("content",), ("rope",), ("scale",)),),
        "row640": ((("content", "rope"),), (("scale",),)),
    }),
    rope_scaled=True,
    sparse="etap",
    element="float8_e4m3fn",
    about="an FP8 cache",
    parts=("content", "rope", "scale"),
    arguments=("content_u8", "rope", "scale"),
    quantized_query=True,
    results=("bf16", "f32"),
)  # fmt: skip
