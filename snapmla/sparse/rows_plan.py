"""Plans of sparse decode over a BF16 cache: memory for split lists, and how they are split.

Few query tokens would leave most SMs idle (2 tokens of 16 heads are 2 work tiles of 32 tiles each,
some 45 us of one gather's latency), so lists are split into pieces and merged; many are one launch
without.  Which it is follows from shapes alone, and so does all of a plan: nothing of it changes
with ``topk_length``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from dsl_kernels.formats import rows16
from dsl_kernels.formats.dims import KV_LORA_RANK, TOKEN_TILE
from snapmla import checks
from snapmla.call import memo as calls
from snapmla.call import tracing
from snapmla.runtime import launch
from snapmla.runtime.launch import sm_count
from snapmla.sparse.rows_kernel import ROW_TILES, row_tile_of, split_row_tile_of

MAKE_PLAN = "make one for this step's shapes with snapmla.plan_sparse_decode"
Tensor = torch.Tensor
ROWS = rows16.BF16.name  # the format of the caches that these plans are for
MAX_PIECES = 32  # of a list, where they fill the device; merge reads up to 16 at once
MAX_TOPK = 1 << 24  # entries of a row; what a batch may hold is bounded beside
MAX_SLOTS = 1 << 23  # partial rows of all lists, as of other plans: what merge counts
TENSORS = ("split_begin", "units", "lengths", "o_accum", "lse_accum")
# (slots, num_heads) -> o_accum, lse_accum
Partials = Callable[[int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False, repr=False)
class SparseRowsPlan(launch.OverTensors):
    """Split of lists for ``decode(..., indices=)`` over a BF16 cache, and the memory that it takes;
    made by ``plan_sparse_decode(..., cache_dtype="bf16")``.

    It depends on shapes alone and serves every step of them, and all layers; calls that may run at
    the same time want a plan each.

    Attributes:
        split_begin: int32 (b * s_q + 1,): where partial rows of each query token begin.
        units: int32 (b * s_q, 2): rows of each query token; (0, 2) with one token a sequence.
        lengths: int32 (b * s_q,): room for ``topk_length`` of each query token; (0,) with one
            token a sequence.
        o_accum: float32 (b * s_q * pieces, h, 512), partial rows; (0, h, 512) if nothing is split.
        lse_accum: float32 (b * s_q * pieces, h), log2; (2 * b * s_q, h) if nothing is split.
        batch, s_q, num_heads, topk: of the calls.
        pieces, width: of each list; ``width`` entries, a multiple of 64, are a piece.
        row_tile: heads of a CTA.
        cache_dtype: of the caches that it is for, ``bf16``.

    Raises:
        TypeError, ValueError: from the methods, naming the argument.

    Source: our own; results of one ``width`` have the same bits in any batch.
    """

    cache_dtype: ClassVar[str] = ROWS  # of the caches that it is for

    split_begin: Tensor
    units: Tensor
    lengths: Tensor
    o_accum: Tensor
    lse_accum: Tensor
    batch: int
    s_q: int
    num_heads: int
    topk: int
    pieces: int
    width: int
    row_tile: int

    def __post_init__(self) -> None:
        if self.plain:  # not a tracer's, nor a stand-in of one
            self._check_sizes()

    def _check_sizes(self) -> None:
        """Raises an error if a table's shape does not fit the plan's numbers.

        ``dataclasses.replace`` can mix tables and numbers of two plans.
        """
        tokens, heads = self.batch * self.s_q, self.num_heads
        each = 0 if self.s_q == 1 else tokens
        slots = tokens * self.pieces if self.pieces > 1 else 0
        for name, shape in (
            ("split_begin", (tokens + 1,)),
            ("units", (each, 2)),
            ("lengths", (each,)),
            ("o_accum", (slots, heads, KV_LORA_RANK)),
            ("lse_accum", (slots or 2 * tokens, heads)),
        ):
            if tuple(getattr(self, name).shape) != shape:
                wanted = f"shape {shape} by its plan's numbers"
                checks.value_error(f"plan.{name}", wanted, tuple(getattr(self, name).shape))

    @functools.cached_property
    def memo(self) -> calls.Memo:
        """Kinds of calls that were checked."""
        return calls.Memo()

    @functools.cached_property
    def device(self) -> torch.device:
        """Device of the plan's tensors."""
        return self.split_begin.device

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """(b, s_q, num_heads) of the calls."""
        return self.batch, self.s_q, self.num_heads

    @property
    def tokens(self) -> int:
        """Query tokens."""
        return self.batch * self.s_q

    @functools.cached_property
    def plain(self) -> bool:
        """True if its tensors have memory: no tracer's stand-ins."""
        return tracing.plain(*(getattr(self, name) for name in TENSORS))

    @property
    def workspace_bytes(self) -> int:
        """Bytes of ``o_accum`` and ``lse_accum``."""
        return self.o_accum.nbytes + self.lse_accum.nbytes

    def update_(self, topk_length: Tensor | None = None) -> None:
        """Does nothing: calls read ``topk_length`` themselves.  It is there so that an engine may
        treat all plans alike.

        Args:
            topk_length: int32 (b,), or None.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        if topk_length is not None:
            checks.tensor("topk_length", topk_length, (torch.int32,), (self.batch,))

    def expect_memory(self) -> None:
        """ValueError if a tensor was freed, or its storage moved."""
        if self.plain and not self.stays:
            checks.in_place("plan", self.begins, "make another plan")

    @functools.cached_property
    def arguments(self) -> tuple[Any, ...]:
        """split_begin, units, o_accum, lse_accum as kernels take them."""
        return launch.prepared(self.split_begin, self.units, self.o_accum, self.lse_accum)


def pieces_of(
    tokens: int, num_heads: int, topk: int, ctas: int, row_tile: int | None = None
) -> tuple[int, int, int]:
    """(row tile, pieces, width) that fill so many CTAs with work tiles, each of at least one tile.

    Few tokens wait for gathers, whose rows two CTAs of 16 heads share in L2: pieces are built for
    16 and 64 heads only.
    """
    chosen = row_tile or row_tile_of(num_heads)
    found = chosen, *_pieces(tokens * -(-num_heads // chosen), topk, ctas)
    less = split_row_tile_of(num_heads)
    if row_tile is None and found[1] > 1 and less != chosen:
        other = less, *_pieces(tokens * -(-num_heads // less), topk, ctas)
        return other if other[1] > 1 else (chosen, 1, -(-topk // TOKEN_TILE) * TOKEN_TILE)
    return found


def _pieces(work: int, topk: int, ctas: int) -> tuple[int, int]:
    """(pieces, width) of ``work`` work tiles over so many CTAs."""
    tiles = -(-topk // TOKEN_TILE)
    most = min(max(ctas // max(work, 1), 1), MAX_PIECES, tiles)
    width = -(-tiles // most)
    return -(-tiles // width), width * TOKEN_TILE


def _new_partials(device: torch.device) -> Partials:
    """Memory of a plan's own."""

    def made(slots: int, heads: int) -> tuple[Tensor, Tensor]:
        shape = (slots, heads, KV_LORA_RANK)
        return torch.empty(shape, device=device), torch.empty(shape[:2], device=device)

    return made


def plan_rows(
    num_heads: int,
    s_q: int,
    *,
    topk: int,
    batch: int,
    device: torch.device | str | int = "cuda",
    num_parts: int | None = None,
    row_tile: int | None = None,
    fixed_split_tokens: int | None = None,
    partials: Partials | None = None,
) -> SparseRowsPlan:
    """Plans sparse decode over a BF16 cache; arguments and errors as of ``plan_sparse_decode``.

    Args:
        partials: memory of partial rows that others use as well; None allocates.
    """
    num_heads, s_q = checks.num_heads(num_heads), checks.s_q(s_q)
    topk = checks.integer("topk", topk, 1, MAX_TOPK)
    batch, where = checks.integer("batch", batch, 0), checks.device("device", device)
    tokens = batch * s_q
    checks.rows("batch", tokens, num_heads)
    if row_tile is not None:
        checks.choice("row_tile", row_tile, ROW_TILES)
    if fixed_split_tokens is not None:
        width = checks.integer("fixed_split_tokens", fixed_split_tokens, TOKEN_TILE)
        if width % TOKEN_TILE:
            checks.value_error("fixed_split_tokens", f"a multiple of {TOKEN_TILE}", width)
        width = min(width, -(-topk // TOKEN_TILE) * TOKEN_TILE)
        pieces = -(-topk // width)
        if row_tile is None:
            row_tile = (split_row_tile_of if pieces > 1 else row_tile_of)(num_heads)
    else:
        ctas = sm_count(where)
        if num_parts is not None:
            ctas = checks.integer("num_parts", num_parts, 1) * -(
                -num_heads // (row_tile or row_tile_of(num_heads))
            )
        row_tile, pieces, width = pieces_of(tokens, num_heads, topk, ctas, row_tile)
    if tokens * pieces > MAX_SLOTS:
        wanted = f"at most {MAX_SLOTS} pieces of all lists"
        checks.value_error("fixed_split_tokens", wanted, tokens * pieces, "take longer pieces")
    slots = tokens * pieces if pieces > 1 else 0
    o_accum, lse_accum = (partials or _new_partials(where))(slots, num_heads)
    if pieces == 1:  # largest logits, and sums as the kernel has them
        lse_accum = torch.empty(2 * tokens, num_heads, device=where)
    begins = torch.arange(tokens + 1, dtype=torch.int32, device=where)
    units = torch.stack((begins[:-1], begins[1:]), 1) * num_heads
    each = 0 if s_q == 1 else tokens
    return SparseRowsPlan(
        begins * pieces, units[:each].contiguous(),
        torch.empty(each, dtype=torch.int32, device=where), o_accum, lse_accum, batch, s_q,
        num_heads, topk, pieces, width, row_tile,
    )  # fmt: skip


STATIC = tuple(f.name for f in fields(SparseRowsPlan) if f.name not in TENSORS)
