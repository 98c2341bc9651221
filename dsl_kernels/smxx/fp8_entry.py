"""The exported function of FP8 decode: its arguments and its host half, one for every arch.

A kernel of an arch is a subclass of ``Fp8Entry`` that adds shared memory and the device code.  The
order of arguments is written down here alone, in ``__call__`` and in ``fake_args``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .. import compat
from ..common.epilogue import Results
from ..common.paged_tma import PagedTma
from ..common.types import BF16, F16, U8
from ..common.work_list import Call, Work, rows_of_each
from ..dims import ITEM_WORDS, MERGE, PARTIAL_ROW
from ..dims import KV_LORA_RANK as D
from ..dims import QK_ROPE_HEAD_DIM as R
from . import merge
from .coverage import Listed

if TYPE_CHECKING:
    from ..spec import VariantSpec


class Tma(NamedTuple):
    """Planes of Q and of the cache: content, RoPE."""

    q: tuple
    kv: tuple


class Gmem(NamedTuple):
    """Tensors that are read and written without TMA."""

    q_scale: cute.Tensor  # (b, s_q, h)
    scale: cute.Tensor  # (pages, P)
    work: Work
    results: Results


class Fp8Entry:
    """TMA descriptors, the launch, and the merge behind it.

    A subclass has ``layouts()`` with the shared-memory layouts ``q`` and ``k`` (content and RoPE),
    ``storage(layouts)`` and the kernel, ``kernel(tma, gmem, call)``.

    Attributes:
        spec: the variant; a CTA, or a cluster of ``spec.cluster``, owns ``spec.row_tile`` rows.
        loads: its producers.
        threads: of a CTA.
    """

    def __init__(self, spec: VariantSpec, loads: PagedTma, threads: int):
        self.spec, self.loads, self.threads = spec, loads, threads

    @cute.jit
    def __call__(
        self,
        q_nope: cute.Tensor, q_rope: cute.Tensor, q_scale: cute.Tensor, content: cute.Tensor,
        rope: cute.Tensor, scale: cute.Tensor, block_table: cute.Tensor,
        cache_seqlens: cute.Tensor, work_items: cute.Tensor, part_begin: cute.Tensor,
        split_begin: cute.Tensor, units: cute.Tensor, row_limits: cute.Tensor, out: cute.Tensor,
        lse: cute.Tensor, o_accum: cute.Tensor, lse_accum: cute.Tensor, softmax_scale: Float32,
        causal: Int32, lse_factor: Float32, empty_lse: Float32, may_split: Int32, stream,
    ):  # fmt: skip
        layouts, loads = self.layouts(), self.loads
        self.Storage = self.storage(layouts)
        tma = Tma(
            loads.load_q((q_nope, q_rope), layouts.q), loads.load_kv((content, rope), layouts.k)
        )
        gmem = Gmem(
            q_scale, scale, Work(block_table, cache_seqlens, work_items, part_begin, row_limits),
            Results(out, lse, o_accum, lse_accum),
        )  # fmt: skip
        b, s_q, h, _ = q_nope.shape
        rows_each = rows_of_each(units, s_q * h)
        call = Call(
            compat.fast_divisor(h), compat.fast_divisor(s_q), b * s_q * h, rows_each,
            softmax_scale, causal, lse_factor, empty_lse,
        )  # fmt: skip
        cluster = self.spec.cluster
        self.kernel(tma, gmem, call).launch(
            grid=(cute.ceil_div(o_accum.shape[1], self.spec.row_tile) * cluster,
                  cute.size(part_begin) - 1, 1),
            block=(self.threads, 1, 1), cluster=(cluster, 1, 1),
            stream=stream, min_blocks_per_mp=1, use_pdl=True,
        )  # fmt: skip
        if may_split != 0:  # on the host: the caller knows when nobody has to merge or to ask
            work = loads.work
            tiles = cute.ceil_div(block_table.shape[1] * work.page_size, work.tile)
            listed = Listed(
                work_items, part_begin, cache_seqlens, tiles, compat.fast_divisor(work.tile),
                Int32(cutlass.select_(rows_each > 0, may_split - MERGE, Int32(0))),
            )  # fmt: skip
            merge.launch(
                merge.Decode(listed), o_accum, lse_accum, split_begin, units, out, lse,
                lse_factor, empty_lse, stream,
            )  # fmt: skip


def fake_args(spec: VariantSpec) -> dict[str, Any]:
    """Symbolic arguments of the exported function by name, in the order of ``__call__``.

    Queries are (b_q, s_q, h, ...): b_q = b, or 1 for ragged ones, whose tokens then are all of s_q.
    """
    names = ["b_q", "s_q", "h", "b", "pages", "width", "n_items", "parts_plus_1", "slots"]
    b_q, s_q, h, b, pages, width, items, parts1, slots = (compat.sym(name=x) for x in names)
    unit_rows = compat.sym(name="unit_rows")
    free = compat.sym64
    return {
        "q_nope": compat.contiguous(U8, (b_q, s_q, h, D)),
        "q_rope": compat.contiguous(BF16, (b_q, s_q, h, R)),
        "q_scale": compat.strided(Float32, (b_q, s_q, h), (free(), free(), free()), 4),
        **compat.cache_fakes(pages, spec.page_size),
        "block_table": compat.strided(Int32, (b, width), (free(), 1), 4),
        "cache_seqlens": compat.vector(Int32, b),
        "work_items": compat.contiguous(Int32, (items, ITEM_WORDS)),
        "part_begin": compat.vector(Int32, parts1),
        "split_begin": compat.vector(Int32, compat.sym(name="n_units_plus_1")),
        "units": compat.units_fake(Int32),
        "row_limits": compat.vector(Int32, compat.sym(name="tokens_or_0")),
        "out": compat.contiguous(compat.dtype(spec.out_dtype), (b_q, s_q, h, D)),
        "lse": compat.contiguous(Float32, (b_q, h, s_q), 4),
        "o_accum": compat.contiguous(F16, (slots, unit_rows, PARTIAL_ROW)),
        "lse_accum": compat.contiguous(Float32, (slots, unit_rows), 4),
        "softmax_scale": Float32(1.0),
        "causal": Int32(1),
        "lse_factor": Float32(1.0),
        "empty_lse": Float32(0.0),
        "may_split": Int32(1),
    }


@cute.jit
def row_facts(work_list, gmem, call, batch, rows, row):
    """(factor of the logits in log2 units, number of visible tokens) of the CTA's row ``row``."""
    scale_of = lambda b, s, head: gmem.q_scale[b, s, head]
    return work_list.row_facts(gmem.work, call, batch, rows.first + row, rows.end, scale_of)
