"""Common parts of decode's exported functions: the launch with the merge behind it, and fakes.

An exported function is the ``__call__`` of an entry (entry/entries.py), which makes tensor maps of
the queries and of the cache and launches.  Its kernel is an object, composed by an arch, with

    spec, threads        the variant; threads of a CTA
    q_tiles, loads       Q and the cache (load/q_tiles.py, loader.py)
    layouts()            shared-memory layouts ``q`` and ``k``, plane by plane
    kernel(tma, gmem, call)

Fakes are symbolic arguments by name, groups of them in the order that all entries keep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..blocks import compat
from ..combine import merge, partials
from ..combine.coverage import Listed
from ..formats.dims import ITEM_WORDS, KV_LORA_RANK, MERGE
from ..load.work_list import Call, rows_of_each

if TYPE_CHECKING:
    from ..spec import VariantSpec

Fakes = dict[str, Any]
# Row tiles whose merge is one wave: with 64 it loses where lists of 128 heads are cut.
ONE_WAVE_ROWS = 32


class Tma(NamedTuple):
    """Planes of Q, and of the cache as the loader takes them."""

    q: tuple
    kv: tuple


class Entry:
    """Base of the entries: exports a kernel, makes tensor maps, tells merge of the work list.

    Attributes:
        decode: the kernel.
    """

    def __init__(self, decode: Any):
        self.decode = decode

    @classmethod
    def exported(cls, decode: Any) -> tuple[Any, Fakes]:
        """The function of a kernel, and symbolic arguments."""
        return cls(decode), cls.fake_args(decode.spec)

    @staticmethod
    def fake_args(spec: VariantSpec) -> Fakes:
        """Symbolic arguments by name, in the order of ``__call__``."""
        raise NotImplementedError

    def tensor_maps(self, queries: tuple, cache: tuple) -> Tma:
        """``Tma`` of the planes of the queries (b, s_q, h, width) and of the cache."""
        decode, layouts = self.decode, self.decode.layouts()
        return Tma(decode.q_tiles.source(queries, layouts.q), decode.loads.source(cache, layouts.k))

    def listed(self, work: Any, tiles: Any, tile: int, wanted: Any) -> Listed:
        """A work list that may come from outside (coverage.py).

        Args:
            tiles: that a sequence has at most.
            wanted: whether merge asks if it covers the sequences.
        """
        by_tile = compat.fast_divisor(tile)
        return Listed(
            work.work_items, work.part_begin, work.cache_seqlens, tiles, by_tile, wanted
        )  # fmt: skip

    def listed_once(self, work: Any, indices: Any, wanted: Any) -> Listed:
        """``listed`` where a query token has one list of tokens, ``indices`` (b_q, s_q, topk)."""
        tile = self.decode.loads.work.tile
        return self.listed(work, cute.ceil_div(indices.shape[2], tile), tile, wanted)


def call_of(
    q: cute.Tensor, units: cute.Tensor, softmax_scale: Any, causal: Any, lse_factor: Any,
    empty_lse: Any, witness: Any,
) -> Call:  # fmt: skip
    """Scalars of a call; ``q``: queries (b, s_q, h, ...)."""
    b, s_q, h = q.shape[:3]
    return Call(
        compat.fast_divisor(h), compat.fast_divisor(s_q), b * s_q * h,
        rows_of_each(units, s_q * h), softmax_scale, causal, lse_factor, empty_lse, witness,
    )  # fmt: skip


def asks(call: Call, may_split: Any) -> Int32:
    """Says whether merge asks: tables may be from outside, and every sequence is one unit."""
    return Int32(cutlass.select_(call.rows_each > 0, may_split - MERGE, Int32(0)))


@cute.jit
def launch(decode, tma, gmem, call, listed, split_begin, units, may_split, stream):
    """Launches the kernel and, unless ``may_split`` is 0, the merge of split sequences.

    ``listed``: the work list if it may come from outside (coverage.py), None if it is a plan's.
    """
    results, work, spec = gmem.results, gmem.work, decode.spec
    decode.kernel(tma, gmem, call).launch(
        grid=(cute.ceil_div(results.o_accum.shape[1], spec.row_tile) * spec.cluster,
              cute.size(work.part_begin) - 1, 1),
        block=(decode.threads, 1, 1), cluster=(spec.cluster, 1, 1),
        stream=stream, min_blocks_per_mp=1, use_pdl=True,
    )  # fmt: skip
    if may_split != 0:  # on the host: 0 if nothing is split and no coverage check is wanted
        merge.launch(
            merge.Decode(listed, results.sink), results.o_accum, results.lse_accum, split_begin,
            units, results.out, results.lse, call.lse_factor, call.empty_lse, stream,
            one_wave=spec.op == "sparse_decode" and spec.row_tile <= ONE_WAVE_ROWS,
        )  # fmt: skip


class Extents(NamedTuple):
    """Symbols of the queries' extents, and of the sequences."""

    b_q: Any
    s_q: Any
    h: Any
    b: Any

    @classmethod
    def fake(cls) -> Extents:
        """New ones."""
        return cls(*(compat.sym(name=x) for x in cls._fields))

    @property
    def rows(self) -> tuple[Any, Any, Any]:
        """(b_q, s_q, h)."""
        return self[:3]


def paged(at: Extents) -> Fakes:
    table = compat.strided(Int32, (at.b, compat.sym(name="width")), (compat.sym64(), 1), 4)
    return {"block_table": table, "cache_seqlens": compat.vector(Int32, at.b)}


def entries(at: Extents, name: str, width: str) -> Fakes:
    """Entries (b_q, s_q, width) of query tokens that lie anywhere."""
    strides = (compat.sym64(), compat.sym64(), 1)
    return {name: compat.strided(Int32, (at.b_q, at.s_q, compat.sym(name=width)), strides, 4)}


def lengths(at: Extents) -> Fakes:
    return {"topk_length": compat.vector(Int32, at.b)}


def sink() -> Fakes:
    return {"attn_sink": compat.vector(Float32, compat.sym(name="h_or_0"))}


def plan_and_results(at: Extents, dtype: Any, partial_dtype: Any = None) -> Fakes:
    """Args:
    dtype: of ``out``.
    partial_dtype: what ``partials.fake`` takes for it.
    """
    names = ("n_items", "parts_plus_1", "slots", "unit_rows")
    work_tiles, parts1, splits, unit_rows = (compat.sym(name=x) for x in names)
    return {
        "work_items": compat.contiguous(Int32, (work_tiles, ITEM_WORDS)),
        "part_begin": compat.vector(Int32, parts1),
        "split_begin": compat.vector(Int32, compat.sym(name="n_units_plus_1")),
        "units": compat.units_fake(Int32),
        "row_limits": compat.vector(Int32, compat.sym(name="tokens_or_0")),
        "cu_seqlens_q": compat.vector(Int32, compat.sym(name="b_plus_1_or_0")),
        "out": compat.contiguous(dtype, (*at.rows, KV_LORA_RANK)),
        "lse": compat.contiguous(Float32, (at.b_q, at.h, at.s_q), 4),
        "o_accum": partials.fake(splits, unit_rows, partial_dtype),
        "lse_accum": compat.contiguous(Float32, (splits, unit_rows), 4),
    }


def scalars(causal: bool) -> Fakes:
    return {
        "softmax_scale": Float32(1.0), **({"causal": Int32(1)} if causal else {}),
        "lse_factor": Float32(1.0), "empty_lse": Float32(0.0), "may_split": Int32(1),
        "witness": Int32(0),
    }  # fmt: skip
