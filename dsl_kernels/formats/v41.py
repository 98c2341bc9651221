"""DeepSeek V4.1's, 528 bytes a token in two byte orders, which no byte count tells apart:

    fp8_v41_planar    a page of two planes: [0, 512 P) of each token 512 e4m3 channels, then
                      [512 P, 528 P) of each token 16 scales
    fp8_v41_rows      a row a token: 512 e4m3 channels, then 16 scales

FlashMLA wrote the first until the end of September 2026 and the second since; vLLM lets pages lie
apart, and rounds those of the first up to multiples of 512 bytes.  A scale is for 32 channels, a
byte b, 2^(b - 127), and NaN where b is 255: none is 0.  Each token that the table names is one.

K and V are the same 512 channels, of which the last 64 are RoPE, quantised as the others: Q.K is 32
steps of 16 channels with a scale for each 2 of them, and none in BF16.
"""

from __future__ import annotations

from typing import Any

from .dims import KV_LORA_RANK
from .format import Field, Format

GROUP = 32  # channels that share a scale
SCALES = KV_LORA_RANK // GROUP


def _format(name: str, **bytes_of_it: Any) -> Format:
    return Format(
        name,
        __name__,
        content=Field("e4m3", KV_LORA_RANK),
        rope=None,
        scale_bytes=SCALES,
        group=GROUP,
        least_scale=2.0**-22,  # as of V4
        sparse="mix16",
        two_lists=True,
        element="uint8",
        about=f"a cache of format {name!r}",
        parts=("kv",),
        arguments=("kv",),
        any_page=True,
        named=True,
        **bytes_of_it,
    )


PLANAR = _format(
    "fp8_v41_planar", planes=(KV_LORA_RANK, SCALES), scale=Field("ue8m0", SCALES, plane=1),
    page_multiple=512, elsewhere="there FlashMLA 07a1089 serves these pages",
)  # fmt: skip
ROWS = _format(
    "fp8_v41_rows", planes=(KV_LORA_RANK + SCALES,),
    scale=Field("ue8m0", SCALES, at=KV_LORA_RANK),
    elsewhere="there FlashMLA since 2e5429f serves these rows",
)  # fmt: skip
