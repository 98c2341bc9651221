"""Contenders of a decode row: our pipelines, the peers' kernels, plain torch.

A contender named on the command line is one of

* ``snapmla``, ours, followed by any of ``:etap`` ``:dual_wg`` (else the default pipeline),
  ``:bf16`` ``:f32`` (dtype of ``out``), ``:quantise`` (the call quantises the query too),
  ``:padded`` (ragged queries as even ones, as a kernel without them must), ``:page=``,
  ``:layout=``, ``:cache=`` (``bf16``, ``f16``: a cache of 16 bits), ``:row_tile=``,
  ``:row_blocks=``, ``:num_parts=``, ``:fixed_overhead=``, ``:fixed_split=``
* ``snapmla@DIR``, the same with the host package and the built variants of another checkout
* ``flashmla_bf16``: FlashMLA's dense BF16 kernel
* ``flashmla_fp8``: FlashMLA's dense FP8 kernel, one scale per tensor
* ``fa3``: FlashAttention-3, MLA through q_v
* ``etap``: FlashMLA-ETAP's BF16 kernel, ``etap:cache=f16`` its fp16 one (``snapmla:etap`` is our
  pipeline of that name)
* ``torch``: gather and scaled_dot_product_attention in BF16, small shapes only

Peers are shared libraries in a folder of your own (``--peers`` or ``SNAPMLA_PEERS``), never part of
this repository; ``profiles/results/README.md`` says which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from profiles import checkouts
from profiles.decode_row import CACHES, SOFTMAX_SCALE, Contender, DecodeCall, Entry, Problem
from profiles.peer_libraries import FlashAttention3, FlashMlaBf16, FlashMlaEtap, FlashMlaFp8
from profiles.pools import Pool, RowsPool, SnapPool
from profiles.roofline import CONTENT_DIM, HEAD_DIM_QK
from profiles.shapes import DecodeShape
from snapmla.testing.reference import mla_decode_reference
from snapmla.testing.rounding import MIMIC

TORCH_TOKEN_LIMIT = 1 << 17
PIPELINES = ("etap", "dual_wg")
CHOICES = {"cache": tuple(CACHES)}
COUNTS = ("page", "row_tile", "num_parts", "fixed_overhead", "fixed_split")
OUT_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True)
class SnapOptions:
    """Options behind ``snapmla:`` in a contender's name; None leaves the choice to the library."""

    pipeline: str | None = None
    out: str = "bf16"
    page: int = 64
    layout: str = "split"
    cache: str = "fp8"
    row_tile: int | None = None
    row_blocks: str | None = None
    num_parts: int | None = None
    fixed_overhead: int | None = None
    fixed_split: int | None = None
    quantise: bool = False
    padded: bool = False

    @classmethod
    def parse(cls, name: str) -> SnapOptions:
        """Reads ``snapmla:word:key=value...``; raises ValueError that names the odd part."""
        values: dict[str, Any] = {}
        for part in name.split(":")[1:]:
            key, given, value = part.partition("=")
            if not given and part in PIPELINES:
                values["pipeline"] = part
            elif not given and part in OUT_DTYPES:
                values["out"] = part
            elif part in ("quantise", "padded"):
                values[part] = True
            elif value in CHOICES.get(key, ()) or (key in ("layout", "row_blocks") and given):
                values[key] = value
            elif key in COUNTS and value.isdigit():
                values[key] = int(value)
            else:
                raise ValueError(
                    f"backend {name!r}: expected one of {', '.join((*PIPELINES, *OUT_DTYPES))}, "
                    f"quantise, padded or layout=, row_blocks=, {'=, '.join(COUNTS)}= or "
                    f"cache={'|'.join(CACHES)}; got {part!r}"
                )
        return cls(**values)


class SnapMla(Contender):
    """Ours, or another checkout's, through the public API with a plan and preallocated outputs."""

    peer = False
    strict_lse = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.options = SnapOptions.parse(name)
        self.out_bytes = OUT_DTYPES[self.options.out].itemsize
        folder = name.partition(":")[0].partition("@")[2]
        self.checkout = checkouts.checkout(folder) if folder else None

    def unavailable(self) -> str | None:
        if self.checkout is not None:
            return self.checkout.unavailable()
        try:
            import snapmla  # noqa: F401
        except ImportError as error:
            return f"cannot import snapmla: {error}"
        return None

    def pool_key(self) -> tuple[Any, ...]:
        if self.options.cache != "fp8":  # bf16 in pages of 64 is the peers' memory
            page = () if self.options.page == 64 else (self.options.page,)
            return (self.options.cache, *page)
        return ("snapmla", self.options.page, self.options.layout)

    def make_pool(self, tokens: int, device: torch.device) -> Pool:
        if self.options.cache != "fp8":
            return RowsPool(tokens, device, CACHES[self.options.cache], self.options.page)
        return SnapPool(tokens, device, self.options.page, self.options.layout)

    @property
    def page_size(self) -> int:
        return self.options.page

    def enter(self, problem: Problem, pool: Any) -> Entry:
        if self.checkout is None:
            import snapmla

            if self.options.cache != "fp8":
                return self._enter_rows(snapmla, problem, pool)
            return self._enter(snapmla, problem, pool.cache)
        with self.checkout.active() as other:
            if self.options.cache == "fp8":
                mine = pool.cache
                cache = other.PagedKVCache.from_tensors(mine.content, mine.rope, mine.scale)
                entry = self._enter(other, problem, cache)
            else:
                entry = self._enter_rows(other, problem, pool)
            entry.calls[0]()  # loads its kernels
        return replace(entry, note=f"{entry.note}, commit {self.checkout.commit}")

    def _enter(self, snapmla: Any, problem: Problem, cache: Any) -> Entry:
        shape, options, tables = problem.shape, self.options, problem.tables[self.options.page]
        packed = shape.ragged_q and not options.padded
        every = snapmla.quantize_q(*_halves(problem.query))
        halves = _halves(_packed(problem)) if packed else _halves(problem.query)
        q = snapmla.quantize_q(*halves) if packed else every
        plan = self._plan(snapmla, problem, packed)
        rows = q.nope.shape[:-1]
        device = problem.query.device
        out = torch.empty(*rows, CONTENT_DIM, dtype=OUT_DTYPES[options.out], device=device)
        lse = torch.empty(rows, dtype=torch.float32, device=device).mT.contiguous()

        def call(table: torch.Tensor) -> DecodeCall:
            decode = lambda: snapmla.decode(
                q, cache, table, problem.lengths, softmax_scale=SOFTMAX_SCALE, plan=plan,
                out=out, lse=lse,
            )  # fmt: skip
            if not options.quantise:
                return decode

            def layer() -> tuple[torch.Tensor, torch.Tensor]:
                snapmla.quantize_q(*halves, out=q)
                return decode()

            return layer

        def mimic(buffer: int, request: int) -> torch.Tensor:
            return mla_decode_reference(
                every.nope, every.rope, every.scale, cache.content, cache.rope, cache.scale,
                tables[buffer], problem.lengths, SOFTMAX_SCALE, config=MIMIC, batches=[request],
            )[0][0]  # fmt: skip

        scale = every.row_scale.double()[..., None]
        query = torch.cat([every.nope.double(), every.rope.double()], -1) * scale
        note = f"{plan.pipeline} row_tile {plan.row_tile} parts {plan.num_parts}"
        return Entry([call(t) for t in tables], query, [out, lse], note, packed, mimic)

    def _enter_rows(self, snapmla: Any, problem: Problem, pool: Any) -> Entry:
        """A cache of 16 bits, the very memory of the peers' where that is BF16."""
        options, packed = self.options, problem.shape.ragged_q and not self.options.padded
        cache = snapmla.PagedKVCache.from_tensors(pool.cache)
        q = (_packed(problem) if packed else problem.query).to(CACHES[options.cache])
        plan = self._plan(snapmla, problem, packed, cache_dtype=CACHES[options.cache])
        rows = q.shape[:-1]
        out = q.new_empty(*rows, CONTENT_DIM)
        lse = q.new_empty(rows, dtype=torch.float32).mT.contiguous()

        def call(table: torch.Tensor) -> DecodeCall:
            return lambda: snapmla.decode(
                q, cache, table, problem.lengths, softmax_scale=SOFTMAX_SCALE, plan=plan,
                out=out, lse=lse,
            )  # fmt: skip

        query = problem.query.to(q.dtype).double()
        note = f"{plan.pipeline} row_tile {plan.row_tile} parts {plan.num_parts}"
        calls = [call(table) for table in problem.tables[options.page]]
        return Entry(calls, query, [out, lse], note, packed)

    def _plan(self, snapmla: Any, problem: Problem, packed: bool, **more: Any) -> Any:
        """The step's plan; options not given are not passed: other checkouts may lack them."""
        shape, options = problem.shape, self.options
        chosen = dict(
            num_parts=options.num_parts, pipeline=options.pipeline, row_tile=options.row_tile,
            row_blocks=options.row_blocks, fixed_overhead=options.fixed_overhead,
            fixed_split_tokens=options.fixed_split,
        )  # fmt: skip
        given = {name: value for name, value in chosen.items() if value is not None} | more
        given.update(page_size=options.page, max_pages=problem.tables[options.page][0].shape[1])
        if not packed:
            return snapmla.plan_decode(problem.lengths, shape.num_heads, shape.s_q, **given)
        ends = torch.tensor([0, *shape.query_tokens()], device=problem.lengths.device).cumsum(0)
        return snapmla.plan_decode(
            problem.lengths, shape.num_heads, cu_seqlens_q=ends.int(),
            total_q=sum(shape.query_tokens()), **given,
        )  # fmt: skip


def _halves(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Content and RoPE of (..., 576)."""
    return query[..., :CONTENT_DIM], query[..., CONTENT_DIM:]


def _packed(problem: Problem) -> torch.Tensor:
    """(total, h, 576): the query tokens that count, request by request."""
    tokens = problem.shape.query_tokens()
    return torch.cat([q[-n:] for q, n in zip(problem.query, tokens, strict=True)])


class TorchSdpa(Contender):
    """Gathers the pages and calls scaled_dot_product_attention; what one writes first."""

    name = "torch"

    def pool_key(self) -> tuple[Any, ...]:
        return ("bf16",)

    def refuses(self, shape: DecodeShape) -> str | None:
        if shape.uneven:
            return "torch baseline takes equal lengths only"
        if shape.tokens > TORCH_TOKEN_LIMIT:
            return f"torch baseline is for at most {TORCH_TOKEN_LIMIT} tokens"
        return None

    def enter(self, problem: Problem, pool: Any) -> Entry:
        shape = problem.shape
        b, s_q, h, n = shape.batch, shape.s_q, shape.num_heads, shape.seqlen
        q = problem.query.view(b, 1, s_q * h, HEAD_DIM_QK)
        mask = None
        if s_q > 1:
            limit = n - s_q + torch.arange(s_q, device=q.device).repeat_interleave(h)
            mask = torch.arange(n, device=q.device)[None, :] <= limit[:, None]

        def call(table: torch.Tensor) -> DecodeCall:
            pages = table.long()

            def run() -> tuple[torch.Tensor, torch.Tensor | None]:
                k = pool.cache[pages].view(b, 1, -1, HEAD_DIM_QK)[:, :, :n]
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, k, k[..., :CONTENT_DIM], attn_mask=mask, scale=SOFTMAX_SCALE
                )
                return out.view(b, s_q, h, CONTENT_DIM), None

            return run

        return Entry([call(t) for t in problem.tables[64]], problem.query.double())


def make(name: str, peers: Path | None) -> Contender:
    """The contender called ``name`` (see the module's docstring).

    Raises:
        ValueError: no such contender.
    """
    ours, at, folder = name.partition(":")[0].partition("@")
    if ours == "snapmla" and bool(folder) == bool(at):
        return SnapMla(name)
    plain: dict[str, Callable[[], Contender]] = {
        "flashmla_bf16": lambda: FlashMlaBf16(name, peers),
        "flashmla_fp8": lambda: FlashMlaFp8(name, peers),
        "fa3": lambda: FlashAttention3(name, peers),
        "etap": lambda: FlashMlaEtap(name, peers),
        "etap:cache=f16": lambda: FlashMlaEtap(name, peers, "f16"),
        "torch": TorchSdpa,
    }
    if name not in plain:
        raise ValueError(
            f"backend: expected snapmla[@DIR][:..] or one of {', '.join(plain)}; got {name!r}"
        )
    return plain[name]()
