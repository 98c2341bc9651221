"""``fp8_v4``, DeepSeek V4's, 584 bytes a token (FlashMLA's MODEL1); a page has two planes:

    [0, 576 P)        of each token 448 e4m3 channels, then 64 bf16 RoPE channels as they are
    [576 P, 584 P)    of each token 7 scales, one for each 64 e4m3 channels, and a byte that is any

FlashMLA shapes it (pages, P, 1, 584), though tokens are no rows, and lets pages lie apart: engines
round them up to multiples of 576 bytes.  A scale is a byte b, 2^(b - 127), and NaN where b is 255:
none is 0.  Each token that the table names is one.

K and V are the same 512 channels: V has the RoPE channels, too.  Q.K is 28 steps of 16 channels
with a scale for each 4 of them, and 4 of RoPE in BF16.
"""

from __future__ import annotations

from .dims import QK_ROPE_HEAD_DIM
from .format import Field, Format

GROUP, GROUPS = 64, 7  # channels that share a scale; groups of a token
CONTENT = Field("e4m3", GROUP * GROUPS)
ROPE = Field("bf16", QK_ROPE_HEAD_DIM, at=CONTENT.nbytes)
SCALE_BYTES = 8  # of a token: a byte more than it has scales

FORMAT = Format(
    "fp8_v4",
    __name__,
    planes=(CONTENT.nbytes + ROPE.nbytes, SCALE_BYTES),
    content=CONTENT,
    rope=ROPE,
    scale=Field("ue8m0", GROUPS, plane=1),
    scale_bytes=SCALE_BYTES,
    group=GROUP,
    least_scale=2.0**-22,  # engines take the largest channel for 1e-4 at least
    page_multiple=576,
    rope_in_v=True,
    sparse="mix16",
    elsewhere="there FlashMLA's own flash_mla_with_kvcache(indices=) serves these pages",
    shipped=True,
    overlaps=True,
    two_lists=True,
    element="uint8",
    about="a cache of format 'fp8_v4'",
    parts=("kv",),
    arguments=("kv",),
    any_page=True,
    named=True,
    appends=(
        {"in_dtype": "bf16", "index_dtype": "i32"},
        {"in_dtype": "bf16", "index_dtype": "i64"},
        {"in_dtype": "bf16", "index_dtype": "i64", "rope_style": "interleaved"},
    ),
    fetches=tuple({"in_dtype": "bf16", "mode": mode} for mode in ("pages", "indices", "ragged")),
)
