"""Caches of 16 bits: a row of 576 channels a token and KV head, 512 of c_kv and 64 of k_rope, as
they are.  V is the first 512.  Each token that the table names is one."""

from __future__ import annotations

from typing import Any

from .dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from .format import Field, Format

MODES = ("pages", "indices", "ragged")  # of fetch


def _rows(name: str, element: str, **more: Any) -> Format:
    own = {"in_dtype": name}
    return Format(
        name,
        __name__,
        planes=(2 * HEAD_DIM_QK,),
        content=Field(name, KV_LORA_RANK),
        rope=Field(name, QK_ROPE_HEAD_DIM, at=2 * KV_LORA_RANK),
        element=element,
        about="a 16-bit cache",
        parts=("kv",),
        arguments=("kv",),
        rows=True,
        results=(name,),
        most_kv_heads=128,
        large_pages=True,
        appends=tuple({**own, "index_dtype": index} for index in ("i32", "i64")),
        fetches=(
            *({**own, "mode": mode} for mode in MODES),
            {**own, "mode": "indices", "index_dtype": "i64"},
        ),
        **more,
    )


BF16 = _rows("bf16", "bfloat16", lists_of_rows=True)
# WGMMA cuts every sum toward zero, which 32K tokens of latent mean 2 show as 2e-4 beside an
# error of 2.4e-4, 16K as 1e-4 (docs/numerics.md); BF16's own rounding hides it.
F16 = _rows("f16", "float16", longest_item=16384, partial="f32")
