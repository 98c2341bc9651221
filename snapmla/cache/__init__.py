"""The paged cache: its memory, what writes it and what reads it back.

paged.py       ``PagedKVCache``
layouts.py     where content, RoPE and scale of a token lie in memory
byte_cache.py  rows of bytes, of the formats that engines keep
quant.py       ``append_kv``, ``quantize_q``; rope.py the same with RoPE in the launch
fetch.py       ``fetch_dequant``: tokens back as tensors
convert.py     ``convert_cache``: pages of one format to another
"""

from snapmla.cache.paged import PagedKVCache

__all__ = ["PagedKVCache"]
