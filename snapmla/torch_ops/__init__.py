"""``torch.ops.snapmla``: the same kernels as operators over flat tensors and numbers.

For ``torch.compile``, ``torch.export`` and code that wants operators.  Where something traces or
watches, or stands in for tensors (``snapmla.call.tracing``), the public functions become these
operators (``snapmla.append_kv``, ``rope_append_kv``, ``quantize_q``, ``rope_quantize_q``,
``decode``, ``fetch_dequant``, ``merge_state``, ``merge_states``, ``plan.update_``, and so
``flash_mla_fp8``); in eager mode they do not go through them.

{operators}

``!`` is written, ``?`` may be None. ``content`` and ``nope`` are the FP8 bytes as uint8,
``q_scale`` is (b, s_q, h) or (b, s_q). ``decode`` takes ragged queries, and gives their results, as
those of one sequence, (1, total_q, h, ...); ``row_seqlens`` is flat, and ``s_q`` of ``plan_update``
then total_q. Where content, RoPE and scale are views of one memory, operators take that memory
(``PagedKVCache.memory``): (block, None, None) for layout ``paged``, (rows, None, scale) for
``row640``. One of format ``fp8_ds_mla`` is bytes, ``kv``, beside its format's name in operators of
their own. A cache of 16 bits is (kv, None, None) to ``append_kv`` and ``fetch_dequant``, and kv,
in pages of 128 tokens at most, to ``dense_decode``, whose sequences read KV head number modulo
num_kv_heads (``snapmla.dense.kv_heads``), and which takes bytes beside ``cache_dtype``. ``outs``
and ``lses`` are the parts, or with ``stacked`` one tensor of them each; ``out!`` and ``lse!`` may
be those of a part. The cache, ``plan`` and ``q`` are pytrees of their tensors, so they may be
arguments of compiled functions. Operators but ``mha_prefill`` have no gradients, and their results
never require any: this is inference.
``check_tables`` says that the tables, without ``units``, are somebody else's memory: rows of a
sequence that they do not cover then become NaN.
``append_index_k``, ``index_logits``, ``index_topk`` and ``fetch_index_k_out`` are those of
``snapmla.dsa``, whose ``q`` is bytes, too; ``unit_rows`` 0 chooses.  ``keys`` of bytes have
``scales`` beside them, keys that are multiplied out have none.  ``mha_prefill`` has
gradients of its first derivative; ``mha_prefill_backward`` returns them, dk_rope without rows where
k_rope is None. ``dsa_prologue`` is
``snapmla.indexer.dsa_prologue``: the KV cache as to the appends, beside its format's name,
``out_q`` bytes.
"""

from __future__ import annotations

import torch

from snapmla.indexer import select_topk
from snapmla.sparse import prefill
from snapmla.torch_ops import (
    append,
    cache_bytes,
    decode,
    dense_decode,
    fetch,
    index,
    merge,
    mha,
    plan,
    quantize,
    records,
    sparse_decode,
)
from snapmla.torch_ops.listing import listing
from snapmla.torch_ops.operator import NAMESPACE, Operator, define

__all__ = ["NAMESPACE", "OPERATORS", "SCHEMAS", "Operator", "define"]

OPERATORS: tuple[Operator, ...] = (
    *append.OPERATORS,
    *quantize.OPERATORS,
    *plan.OPERATORS,
    *records.OPERATORS,
    *decode.OPERATORS,
    *dense_decode.OPERATORS,
    *sparse_decode.OPERATORS,
    *fetch.OPERATORS,
    *merge.OPERATORS,
    *index.OPERATORS,
    *cache_bytes.OPERATORS,
    *(Operator(*each) for each in select_topk.SELECT.operators),
    *(Operator(*each) for each in prefill.PREFILL.operators),
    *mha.OPERATORS,
)
SCHEMAS = tuple(operator.schema for operator in OPERATORS)
__doc__ = (__doc__ or "{operators}").format(operators=listing(SCHEMAS))

# must stay alive as long as operators are used
_library = torch.library.Library(NAMESPACE, "DEF")
for _operator in OPERATORS:
    define(_library, *_operator)
