"""The calls that ``profiles.old_new`` times: the rows of the tables, for whichever package.

A table has shapes by label, and draws a problem of one: tensors on the device that all sides read.
A problem makes a *side*: calls through one checkout's package, planned by it, into results of their
own.  Calls of a side rotate over block tables or lists of tokens, as those of the tables do; top-k
and dense prefill read the same tensors in every call, as they do there.

A side may bring a *witness*: ``decode`` is also given the offsets of the query tokens that its plan
was made for, and where the plan has them the lengths of the rows.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from profiles import shapes
from profiles.shapes import DecodeShape
from profiles.tables import dsa_cost, mha_cost, sparse_prefill_cost, sparse_v4_cost
from profiles.tables.sparse_cost import SHAPES as SPARSE_SHAPES
from profiles.timing import TimingConfig, buffer_count
from snapmla import PagedKVCache, append_kv

Tensor = torch.Tensor
Call = Callable[[], Any]
PAGE = 64
SCALE, V4_SCALE = 576**-0.5, 512**-0.5
WINDOW, V4_PAGES = sparse_v4_cost.WINDOW, sparse_v4_cost.PAGES
APPENDED = 1 << 17  # tokens that a cache is filled with at a time
FORMATS = {"native": "fp8", "rows": "fp8_ds_mla"}


@dataclass(frozen=True)
class Sizes:
    """Bytes that calls read.

    Attributes:
        tokens: of a cache.
        span: tokens of a sequence whose tokens are listed.
        rotate: bytes over which the calls of a side rotate.
    """

    tokens: int = 1 << 22
    span: int = 32768
    rotate: float = 1e9


FULL, TINY = Sizes(), Sizes(tokens=1024, span=256, rotate=1.0)


class Side(NamedTuple):
    """The calls of one package, in the order in which they rotate.

    ``results`` are written by every call, ``note`` says what was planned.
    """

    calls: list[Call]
    results: tuple[Tensor, ...]
    note: str = ""


class Problem(Protocol):
    """Tensors of a row."""

    def side(self, package: Any, witness: bool = False) -> Side:
        """Calls of ``package``, the imported ``snapmla`` of a checkout that is active."""
        ...


class SparseShape(NamedTuple):
    """Sparse decode: ``more`` entries of V4's second cache; else ``topk`` of one list."""

    fmt: str
    batch: int
    s_q: int
    heads: int
    topk: int
    ragged: bool = False

    @property
    def label(self) -> str:
        tail = "_ragged_q" if self.ragged else ""
        return f"{self.fmt}_b{self.batch}_q{self.s_q}_h{self.heads}_k{self.topk}{tail}"


class TopkRow(NamedTuple):
    """``rows`` of ``columns`` scores of a distribution, of which ``tokens`` count, all if 0."""

    rows: int
    columns: int
    tokens: int = 0
    scores: str = "normal"

    @property
    def label(self) -> str:
        tail = f"_{self.tokens}" if self.tokens else ""
        return f"{self.rows}x{self.columns}{tail}" + ("" if self.scores == "normal" else "_zeros")


@functools.cache
def cache_of(dtype: str, page_size: int, tokens: int, device: torch.device) -> PagedKVCache:
    """A cache of random tokens, one object a format and run."""
    generator = torch.Generator(device).manual_seed(1)
    cache = PagedKVCache.allocate(tokens // page_size, page_size, device=device, dtype=dtype)
    content = cache.content.shape[-1]
    for begin in range(0, tokens, APPENDED):
        slots = torch.arange(begin, min(begin + APPENDED, tokens), device=device).int()
        x = torch.randn(len(slots), content + 64, generator=generator, device=device).bfloat16()
        append_kv(cache, x[:, :content], x[:, content:], slots)
    return cache


def seen_by(package: Any, cache: PagedKVCache) -> Any:
    """The same memory as a cache of ``package``."""
    if cache.kv is not None:
        return package.PagedKVCache.from_tensors(cache.kv, format=cache.format)
    return package.PagedKVCache.from_tensors(cache.content, cache.rope, cache.scale)


def new_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` of a query (..., s_q, h, any) or (total, h, any)."""
    *rows, heads, _ = q.shape
    out = torch.empty(*rows, heads, 512, dtype=torch.bfloat16, device=q.device)
    return out, torch.empty(*rows[:-1], heads, rows[-1], device=q.device)


def planned(plan: Any) -> str:
    """Kernel and cut of a plan."""
    return f"{plan.pipeline} {plan.row_tile} x {plan.num_parts}"


def offsets(tokens: Sequence[int], device: torch.device) -> Tensor:
    """cu_seqlens of query tokens."""
    return torch.tensor([0, *tokens], device=device).cumsum(0).int()


# ---------------------------------------------------------------------------- dense decode


@dataclass
class Dense:
    """Decode over the FP8 cache: even, or of ragged lengths or queries.

    ``rows`` are what each query token sees, where the plan is told; ``cu`` is None of even queries.
    """

    cache: PagedKVCache
    x: Tensor
    lengths: Tensor
    tables: list[Tensor]
    s_q: int
    cu: Tensor | None = None
    rows: Tensor | None = None

    @classmethod
    def draw(cls, shape: tuple[DecodeShape, bool], sizes: Sizes, device: torch.device) -> Dense:
        """Random queries; pages in any order, other ones in each call."""
        decode, with_rows = shape
        generator = torch.Generator(device).manual_seed(11)
        tokens = decode.query_tokens()
        x = torch.randn(sum(tokens), decode.num_heads, 576, generator=generator, device=device)
        x = x.bfloat16()
        lengths = decode.lengths()
        pages = [-(-n // PAGE) for n in lengths]
        held = sizes.tokens // PAGE // sum(pages)
        wanted = buffer_count(decode.tokens * 644.0, TimingConfig(rotate_bytes=sizes.rotate))
        used = torch.arange(max(pages))[None] < torch.tensor(pages)[:, None]
        tables = []
        for number in range(min(held, wanted)):
            order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(number))
            table = torch.zeros(used.shape, dtype=torch.int32)
            table[used] = (order + number * sum(pages)).int()
            tables.append(table.to(device))
        if not tables:
            raise ValueError(f"{decode.label}: expected at most {sizes.tokens} tokens in pages")
        cu = offsets(tokens, device) if decode.ragged_q else None
        seen = [n - s for n, q in zip(lengths, tokens, strict=True) for s in range(q)[::-1]]
        rows = torch.tensor(seen, device=device).int() if with_rows else None
        if cu is None:
            x = x.view(decode.batch, decode.s_q, *x.shape[1:])
        cache = cache_of("fp8", PAGE, sizes.tokens, device)
        filled = torch.tensor(lengths, device=device).int()
        return cls(cache, x, filled, tables, decode.s_q, cu, rows)

    def side(self, package: Any, witness: bool = False) -> Side:
        cache = seen_by(package, self.cache)
        q = package.quantize_q(self.x[..., :512], self.x[..., 512:])
        given: dict[str, Any] = {"s_q": self.s_q}
        if self.cu is not None:
            given = {"cu_seqlens_q": self.cu, "total_q": len(self.x)}
        if self.rows is not None:
            given["row_seqlens"] = self.rows
        plan = package.plan_decode(
            self.lengths, self.x.shape[-2], page_size=PAGE, max_pages=self.tables[0].shape[1],
            **given,
        )  # fmt: skip
        out, lse = new_results(self.x)
        more = witnesses(self.cu, self.rows) if witness else {}

        def call(table: Tensor) -> Call:
            return lambda: package.decode(
                q, cache, table, self.lengths, softmax_scale=SCALE, plan=plan, out=out, lse=lse,
                **more,
            )  # fmt: skip

        return Side([call(table) for table in self.tables], (out, lse), planned(plan))


def witnesses(cu: Tensor | None, rows: Tensor | None = None) -> dict[str, Tensor]:
    """The arguments of ``decode`` by which it sees that its plan is of other queries."""
    if cu is None:
        raise ValueError("witness: expected ragged queries, got even ones, which have no offsets")
    return {"cu_seqlens_q": cu} | ({} if rows is None else {"row_seqlens": rows})


# ---------------------------------------------------------------------------- sparse decode


@dataclass
class Sparse:
    """Decode of listed tokens over the FP8 cache or rows of 656 bytes."""

    cache: PagedKVCache
    x: Tensor
    lists: list[Tensor]
    batch: int
    s_q: int
    cu: Tensor | None = None

    @classmethod
    def draw(cls, shape: SparseShape, sizes: Sizes, device: torch.device) -> Sparse:
        """Distinct random tokens of each query token's sequence, other ones in each call."""
        b, s_q, topk = shape.batch, shape.s_q, shape.topk
        generator = torch.Generator(device).manual_seed(topk)
        count = min(max(3, int(1.2 * sizes.rotate) // (b * s_q * topk * 656)), 8)
        tokens = query_tokens(shape)
        kept = torch.arange(s_q)[None] < torch.tensor(tokens)[:, None]
        lists, sequences = [], sizes.tokens // sizes.span
        for number in range(count):
            own = (number * b + torch.arange(b, device=device)) % sequences * sizes.span
            made = torch.empty(b, s_q, topk, dtype=torch.int32, device=device)
            for i in range(0, b, 64):
                some = made[i : i + 64]
                drawn = torch.rand(
                    *some.shape[:2], sizes.span, generator=generator, device=device
                ).argsort(-1)
                some.copy_(drawn[..., :topk] + own[i : i + 64, None, None])
            lists.append(made[kept.to(device)] if shape.ragged else made)
        x = torch.randn(
            b, s_q, shape.heads, 576, generator=generator, device=device
        ).bfloat16()  # fmt: skip
        x = x[kept.to(device)] if shape.ragged else x
        cache = cache_of(FORMATS[shape.fmt], PAGE, sizes.tokens, device)
        cu = offsets(tokens, device) if shape.ragged else None
        return cls(cache, x, lists, b, s_q, cu)

    def side(self, package: Any, witness: bool = False) -> Side:
        cache, q = seen_by(package, self.cache), self.x
        given: dict[str, Any] = {"s_q": self.s_q}
        if self.cu is not None:
            given = {"cu_seqlens_q": self.cu, "total_q": len(self.x)}
        if self.cache.kv is None:
            q = package.quantize_q(self.x[..., :512], self.x[..., 512:])
        else:
            given["cache_dtype"] = self.cache.format
        plan = package.plan_sparse_decode(
            self.x.shape[-2], topk=self.lists[0].shape[-1], batch=self.batch,
            device=self.x.device, **given,
        )  # fmt: skip
        out, lse = new_results(self.x)
        more = witnesses(self.cu) if witness else {}

        def call(indices: Tensor) -> Call:
            return lambda: package.decode(
                q, cache, indices=indices, softmax_scale=SCALE, plan=plan, out=out, lse=lse, **more
            )

        return Side([call(indices) for indices in self.lists], (out, lse), planned(plan))


def query_tokens(shape: SparseShape) -> list[int]:
    """Of each sequence; of ragged ones the first has ``s_q``, the others 1 to ``s_q``."""
    if not shape.ragged:
        return [shape.s_q] * shape.batch
    pick = random.Random(f"{shape.batch}/{shape.s_q}/queries")
    return [shape.s_q, *(pick.randint(1, shape.s_q) for _ in range(shape.batch - 1))]


@dataclass
class V4:
    """Sparse decode over V4's two caches, by FlashMLA's name and a scheduling object."""

    caches: list[PagedKVCache]
    x: Tensor
    lists: list[tuple[Tensor, Tensor | None]]

    @classmethod
    def draw(cls, shape: SparseShape, sizes: Sizes, device: torch.device) -> V4:
        """Random tokens, other ones in each call."""
        generator = torch.Generator(device).manual_seed(shape.topk)
        b, s_q, tokens = shape.batch, shape.s_q, min(sizes.tokens, sparse_v4_cost.TOKENS)
        count = int(1.2 * sizes.rotate) // (b * s_q * (WINDOW + shape.topk) * 584)

        def made(width: int) -> Tensor:
            given = {"dtype": torch.int32, "device": device, "generator": generator}
            return torch.randint(tokens, (b, s_q, width), **given)  # type: ignore[call-overload]

        lists = [
            (made(WINDOW), made(shape.topk) if shape.topk else None)
            for _ in range(min(max(3, count), 8))
        ]
        x = torch.randn(b, s_q, shape.heads, 512, generator=generator, device=device).bfloat16()
        return cls([cache_of("fp8_v4", page, tokens, device) for page in V4_PAGES], x, lists)

    def side(self, package: Any, witness: bool = False) -> Side:
        names = importlib.import_module(f"{package.__name__}.flash_mla")
        out, lse = new_results(self.x)
        metadata, _ = names.get_mla_metadata()
        kv = [cache.kv for cache in self.caches]

        def call(first: Tensor, second: Tensor | None) -> Call:
            more: dict[str, Any] = {}
            if second is not None:
                more = {"extra_k_cache": kv[1], "extra_indices_in_kvcache": second}
            return lambda: names.flash_mla_with_kvcache(
                self.x, kv[0], None, None, 512, metadata, softmax_scale=V4_SCALE,
                is_fp8_kvcache=True, indices=first, out=out, lse=lse, **more,
            )  # fmt: skip

        return Side([call(*both) for both in self.lists], (out, lse))


# ---------------------------------------------------------------------------- prefill and top-k


@dataclass
class Mha:
    """Dense prefill, its list of work included."""

    tensors: mha_cost.Problem
    split_keys: bool = False

    @classmethod
    def draw(cls, shape: mha_cost.Shape, _: Sizes, device: torch.device) -> Mha:
        """Normal numbers."""
        torch.manual_seed(0)
        return cls(mha_cost.Problem.draw(shape, device))

    @classmethod
    def split(cls, shape: mha_cost.Shape, _: Sizes, device: torch.device) -> Mha:
        """The same, keys cut into pieces and merged."""
        torch.manual_seed(0)
        return cls(mha_cost.Problem.draw(shape, device), split_keys=True)

    def side(self, package: Any, witness: bool = False) -> Side:
        mha, given = importlib.import_module(f"{package.__name__}.mha"), self.tensors
        shape, out, lse = given.shape, torch.empty_like(given.out), torch.empty_like(given.lse)
        more = (out.shape[1], sum(shape.lk)) if self.split_keys else ()
        words = mha.workspace_size(len(given.q), len(shape.lq), *more)
        work = torch.empty(words, dtype=torch.int32, device=out.device)

        def call() -> Any:
            return mha.mha_prefill(
                given.q, given.k, given.v, given.cu_q, given.cu_k, max(shape.lq), max(shape.lk),
                causal=shape.causal, split_keys=self.split_keys, out=out, lse=lse, workspace=work,
            )  # fmt: skip

        return Side([call], (out, lse))


@dataclass
class Topk:
    """``select_topk`` to cache slots."""

    tensors: dsa_cost.Problem

    @classmethod
    def draw(cls, shape: TopkRow, _: Sizes, device: torch.device) -> Topk:
        """Drawn as by ``profiles.tables.dsa_cost``."""
        k = min(dsa_cost.K, shape.columns)
        rows, columns, tokens, scores = shape
        return cls(dsa_cost.Problem.of(rows, columns, scores, k, device, tokens))

    def side(self, package: Any, witness: bool = False) -> Side:
        dsa, given = importlib.import_module(f"{package.__name__}.dsa"), self.tensors
        out, counts = given.results(), torch.empty_like(given.lengths)

        def call() -> Any:
            return dsa.select_topk(
                given.logits, given.lengths, given.k, block_table=given.table, out=out,
                counts=counts,
            )  # fmt: skip

        return Side([call], (out, counts))


@dataclass
class Prefill:
    """Sparse prefill over BF16 rows."""

    tensors: sparse_prefill_cost.Problem

    @classmethod
    def draw(cls, shape: sparse_prefill_cost.Shape, _: Sizes, device: torch.device) -> Prefill:
        """Normal numbers, distinct random rows."""
        torch.manual_seed(0)
        return cls(sparse_prefill_cost.Problem.draw(shape, device))

    def side(self, package: Any, witness: bool = False) -> Side:
        given = self.tensors
        sparse = importlib.import_module(f"{package.__name__}.sparse.prefill")
        out, most, lse = (torch.empty_like(result) for result in given.results)

        def call() -> Any:
            return sparse.sparse_prefill(
                given.q, given.kv, given.indices, given.scale, out=out, max_logits=most, lse=lse
            )

        return Side([call], (out, most, lse))


# ---------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Table:
    """Rows of one kind, by label.

    Attributes:
        tiny: shapes for the software GPU.
    """

    title: str
    draw: Callable[[Any, Sizes, torch.device], Problem]
    shapes: dict[str, Any]
    tiny: dict[str, Any] = field(default_factory=dict)


def _labelled(found: Sequence[Any]) -> dict[str, Any]:
    return {shape.label: shape for shape in found}


def _dense(found: Sequence[Any], with_rows: bool = False) -> dict[str, Any]:
    tail = ":rows" if with_rows else ""
    return {shape.label + tail: (shape, with_rows) for shape in found}


def _sparse(*formats: str) -> list[SparseShape]:
    return [SparseShape(fmt, *shape) for shape in SPARSE_SHAPES for fmt in formats]


def _mha(causal: bool, found: Sequence[mha_cost.Shape] = mha_cost.SHAPES) -> dict[str, Any]:
    return {
        f"{s.label.replace(' ', '')}_h{s.heads}"
        + (f"/{s.kv_heads}" if s.kv_heads else "") + f"_d{s.d_qk}": s
        for s in found if s.causal == causal
    }  # fmt: skip


def _prefill(found: Sequence[sparse_prefill_cost.Shape]) -> dict[str, Any]:
    return {f"q{s.s_q}_kv{s.s_kv}_h{s.heads}_k{s.topk}_d{s.d_qk}": s for s in found}


_TOPK = [
    *(TopkRow(*shape) for shape in (*dsa_cost.SHAPES, *dsa_cost.MORE)),
    *(TopkRow(*shape, scores="zeros") for shape in dsa_cost.ZEROS),
    *(TopkRow(*shape) for shape in dsa_cost.ENGINE),
]
_TINY_MHA = [mha_cost.even("1 x 6", 1, 6, 1, 192, causal, 1.0) for causal in (True, False)]
_SPLIT = [
    mha_cost.Shape(f"{b} x {s_q} / {s_k}", (s_q,) * b, (s_k,) * b, heads, 192, True, 1.0)
    for b, s_q, s_k, heads in (
        (1, 128, 4096, 16), (1, 128, 32768, 16), (1, 512, 32768, 16), (8, 128, 16384, 16),
        (1, 128, 32768, 128), (1, 2048, 32768, 16),
    )
]  # fmt: skip
_TINY_SPLIT = [mha_cost.Shape("1 x 3 / 2048", (3,), (2048,), 1, 192, True, 1.0)]
_TINY_PREFILL = [sparse_prefill_cost.Shape(1, 80, 16, 64, 1.0, 512)]
_TINY_RAGGED = DecodeShape(2, 40, 2, 2, ragged_q=True)
TABLES = {
    "dense": Table(
        "Dense decode", Dense.draw, _dense(shapes.preset("h200-table")),
        _dense([DecodeShape(1, 40, 2)]),
    ),
    "ragged": Table(
        "Dense decode, ragged lengths and queries", Dense.draw,
        _dense([*shapes.preset("ragged"), *shapes.preset("ragged-q")]), _dense([_TINY_RAGGED]),
    ),
    "sparse": Table(
        "Sparse decode, 656 and 644 bytes", Sparse.draw, _labelled(_sparse("rows", "native")),
        _labelled([SparseShape(fmt, 1, 1, 16, 64) for fmt in FORMATS]),
    ),
    "sparse_v4": Table(
        "Sparse decode, V4's two caches", V4.draw,
        _labelled([SparseShape("v4", *shape) for shape in sparse_v4_cost.SHAPES]),
        _labelled([SparseShape("v4", 1, 1, 16, 64)]),
    ),
    "mha": Table("Dense prefill, full", Mha.draw, _mha(False), _mha(False, _TINY_MHA)),
    "mha_causal": Table("Dense prefill, causal", Mha.draw, _mha(True), _mha(True, _TINY_MHA)),
    "mha_split": Table(
        "Dense prefill, split keys, causal", Mha.split, _mha(True, _SPLIT), _mha(True, _TINY_SPLIT)
    ),
    "topk": Table("Top-k", Topk.draw, _labelled(_TOPK), _labelled([TopkRow(2, 200)])),
    "prefill": Table(
        "Sparse prefill", Prefill.draw,
        _prefill([*sparse_prefill_cost.SHAPES, *sparse_prefill_cost.DECODE]),
        _prefill(_TINY_PREFILL),
    ),
}  # fmt: skip
_SHORT_RAGGED = [DecodeShape(16, 1024, h, 4, ragged_q=True) for h in (16, 128)]
_RAGGED_LISTS = ((128, 2, 128, 2048), (128, 2, 16, 2048), (32, 4, 64, 2048), (2, 2, 64, 2048))
WITNESSED = {
    "dense": Table(
        "Dense decode", Dense.draw,
        _dense([*shapes.preset("ragged-q"), *_SHORT_RAGGED])
        | _dense([shapes.preset("ragged-q")[0], _SHORT_RAGGED[0]], with_rows=True),
        _dense([_TINY_RAGGED]) | _dense([_TINY_RAGGED], with_rows=True),
    ),
    "sparse": Table(
        "Sparse decode", Sparse.draw,
        _labelled(
            [SparseShape(fmt, *one, ragged=True) for one in _RAGGED_LISTS for fmt in FORMATS]
        ),
        _labelled([SparseShape(fmt, 2, 2, 16, 64, ragged=True) for fmt in FORMATS]),
    ),
}  # fmt: skip
