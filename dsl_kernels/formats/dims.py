"""The constants of Multi-head Latent Attention that every kernel shares.

A leaf: kernels import this and never ``spec`` or the families, so that a new axis or a new op
recompiles nothing that exists.
"""

from __future__ import annotations

KV_LORA_RANK = 512  # d_v: content channels of the latent, c_kv
QK_ROPE_HEAD_DIM = 64  # channels of k_rope
HEAD_DIM_QK = KV_LORA_RANK + QK_ROPE_HEAD_DIM  # 576
E4M3_MAX = 448.0
# e4m3 values to which a cached token's largest channel is scaled, by its offset in the page modulo
# 8, which divides every page: tokens that are alike do not round alike (docs/numerics.md)
CACHE_TOPS = (448.0, 320.0, 384.0, 256.0, 416.0, 288.0, 352.0, 240.0)
EXPONENT_CHANNELS = 16  # channels of a split's partial row that share an exponent byte
# fp16 elements of such a row: channels, and two exponents an element (combine/partials.py)
PARTIAL_ROW = KV_LORA_RANK + KV_LORA_RANK // EXPONENT_CHANNELS // 2  # 528
ITEM_WORDS = 8  # of a work tile (load/work_list.py, schedule/plan_decode.py)
TOKEN_TILE = 64  # tokens of a KV tile of the SM90 pipelines, which share one softmax step
# ``may_split`` of a decode variant's function: no merge behind decode; a merge; a merge that first
# asks whether tables from outside cover each sequence (combine/coverage.py)
NO_MERGE, MERGE, MERGE_CHECKED = 0, 1, 2
