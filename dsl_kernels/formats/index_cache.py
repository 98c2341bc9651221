"""The index cache of DeepSeek's sparse attention: a key of 128 e4m3 channels and a scale a token.

A page of 64 tokens is planar: the keys' bytes, token by token, then the tokens' fp32 scales.
Engines shape it as (pages, 64, 132), as if a token's bytes lay side by side.  Pages may lie any
multiple of 16 bytes apart.

A leaf, as ``dims``: hosts and kernels read it.
"""

from __future__ import annotations

INDEX_DIM = 128  # channels of a key, and of each head's query
PAGE = 64  # tokens
SCALES_AT = PAGE * INDEX_DIM  # of a page: byte at which its scales begin
PAGE_BYTES = SCALES_AT + 4 * PAGE
HEADS = (64, 32)  # of the index query: DeepSeek-V3.2 and GLM-5, smaller models
UNIT_ROWS = (1, 2, 4, 8)  # query tokens that see a page while it is in shared memory
MMA_COLUMNS = 128  # heads times rows of one product; units of more take several
LEAST_AMAX = 1e-4  # of a key: a smaller one is quantised as if it were this
