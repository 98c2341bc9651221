"""The host half that every decode's exported function shares: the launch, and the merge behind it.

An exported function is the ``__call__`` of an entry (fp8_entry.py, dense_entry.py), which makes
tensor maps of the queries and of the cache and hands them to ``launch``.  Its kernel is an object,
composed by an arch, with

    spec, threads        the variant; threads of a CTA
    q_tiles, loads       Q and the cache (common/q_tiles.py, loader.py)
    layouts()            shared-memory layouts ``q`` and ``k``, plane by plane
    kernel(tma, gmem, call)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from .. import compat
from ..common import partials
from ..common.work_list import Call, rows_of_each
from ..dims import ITEM_WORDS, KV_LORA_RANK
from . import merge


class Tma(NamedTuple):
    """Planes of Q, and of the cache as the loader takes them."""

    q: tuple
    kv: tuple


def tensor_maps(decode, queries: tuple, cache: tuple) -> Tma:
    """``Tma`` of the planes of the queries (b, s_q, h, width) and of the cache."""
    layouts = decode.layouts()
    return Tma(decode.q_tiles.source(queries, layouts.q), decode.loads.source(cache, layouts.k))


def call_of(shape, units, softmax_scale, causal, lse_factor, empty_lse, witness) -> Call:
    """Scalars of a call; ``shape``: (b, s_q, h, ...) of the queries."""
    b, s_q, h = shape[:3]
    return Call(
        compat.fast_divisor(h), compat.fast_divisor(s_q), b * s_q * h,
        rows_of_each(units, s_q * h), softmax_scale, causal, lse_factor, empty_lse, witness,
    )  # fmt: skip


@cute.jit
def launch(decode, tma, gmem, call, listed, split_begin, units, may_split, stream):
    """The kernel, and the merge of split sequences unless ``may_split`` is 0; ``listed``: of a work
    list that may come from outside (coverage.py), None where it is a plan's."""
    results, work, spec = gmem.results, gmem.work, decode.spec
    decode.kernel(tma, gmem, call).launch(
        grid=(cute.ceil_div(results.o_accum.shape[1], spec.row_tile) * spec.cluster,
              cute.size(work.part_begin) - 1, 1),
        block=(decode.threads, 1, 1), cluster=(spec.cluster, 1, 1),
        stream=stream, min_blocks_per_mp=1, use_pdl=True,
    )  # fmt: skip
    if may_split != 0:  # on the host: the caller knows when nobody has to merge or to ask
        merge.launch(
            merge.Decode(listed, results.sink), results.o_accum, results.lse_accum, split_begin,
            units, results.out, results.lse, call.lse_factor, call.empty_lse, stream,
            one_wave=spec.op == "sparse_decode",
        )  # fmt: skip


def fakes_behind_cache(
    shape: tuple, b: Any, dtype: Any, partial_dtype: Any = None
) -> dict[str, Any]:
    """Fake arguments behind queries and cache, by name, in the ABI's order.

    Args:
        shape: (b_q, s_q, h) of the queries.
        b: sequences.
        dtype: of ``out``.
        partial_dtype: what ``partials.fake`` is told of it.
    """
    b_q, s_q, h = shape
    names = ["width", "n_items", "parts_plus_1", "slots", "unit_rows"]
    width, items, parts1, slots, unit_rows = (compat.sym(name=x) for x in names)
    return {
        "block_table": compat.strided(Int32, (b, width), (compat.sym64(), 1), 4),
        "cache_seqlens": compat.vector(Int32, b),
        "work_items": compat.contiguous(Int32, (items, ITEM_WORDS)),
        "part_begin": compat.vector(Int32, parts1),
        "split_begin": compat.vector(Int32, compat.sym(name="n_units_plus_1")),
        "units": compat.units_fake(Int32),
        "row_limits": compat.vector(Int32, compat.sym(name="tokens_or_0")),
        "cu_seqlens_q": compat.vector(Int32, compat.sym(name="b_plus_1_or_0")),
        "out": compat.contiguous(dtype, (b_q, s_q, h, KV_LORA_RANK)),
        "lse": compat.contiguous(Float32, (b_q, h, s_q), 4),
        "o_accum": partials.fake(slots, unit_rows, partial_dtype),
        "lse_accum": compat.contiguous(Float32, (slots, unit_rows), 4),
        "softmax_scale": Float32(1.0),
        "causal": Int32(1),
        "lse_factor": Float32(1.0),
        "empty_lse": Float32(0.0),
        "may_split": Int32(1),
        "witness": Int32(0),
    }
