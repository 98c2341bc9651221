"""``index_topk``: scores of cached tokens and the best of them, of one step."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from dsl_kernels.formats.index_cache import PAGE
from dsl_kernels.spec import VariantSpec
from snapmla import checks
from snapmla.call import memo as calls
from snapmla.call import op
from snapmla.indexer import select_topk, shapes
from snapmla.indexer.index_logits import Call as Scoring
from snapmla.indexer.index_logits import check_scoring, launch_logits
from snapmla.runtime import variants
from snapmla.runtime.launch import nothing

_INT32 = (torch.int32,)
ALIGN = 256  # bytes at which a row of logits, and each part of the workspace, begins
Chosen = tuple[torch.Tensor, torch.Tensor]


def index_topk(
    q: torch.Tensor,
    w: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    k: int,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    slots: bool = True,
    max_tokens: int | None = None,
    out: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    unit_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k cached tokens of each query token that fit it best: what sparse decode attends to.

    ``index_logits`` and ``select_topk`` one behind the other, each launched before the one before
    it has ended (programmatic dependent launch), with scores in a workspace.  Where a sequence has
    several query tokens a small launch comes before, which tells each how many tokens it sees.
    The same tokens whatever the batch, the grid and timing; ties go to the lowest position.

    Lengths stay on the device and nothing is waited for; with ``out``, ``counts`` and ``workspace``
    given nothing is allocated, and the call may be captured in a CUDA graph.

    Args:
        q: float8_e4m3fn (b, s_q, h, 128), h 64 or 32, or packed, (total_q, h, 128), as of
            ``index_logits``.
        w: float32 (b, s_q, h) or (total_q, h): weight of each head times its query's scale.
        cache: uint8 (pages, 64, 132), (pages, 64, 1, 132) or (pages, 8448): the index cache.
        block_table: int32 (b, width).
        cache_seqlens: int32 (b,): tokens of each sequence, the call's own included; 0 is legal.
        k: how many are wanted, 1 to 2048.
        cu_seqlens_q: int32 (b + 1,), beside packed queries: where each sequence's begin, and their
            total.
        slots: ``out`` is cache slots, page * 64 + offset, of pages of ``block_table``, which sparse
            decode takes as ``indices``: caches of an engine share their block tables.  False:
            positions in the sequence.
        max_tokens: columns of the scores, 1 to 1052672 (a context of 1048576 tokens and 64 pages
            of drafts); longer sequences count as that long.  None, and more than that: 64 * width
            of the block table, which may then have up to 16448 pages.
        out: int32 (rows, k), rows b * s_q or total_q; rows may be strided.  None allocates.
        counts: int32 (rows,).  None allocates.
        workspace: uint8 (bytes,), of ``index_topk_workspace(rows, max_tokens)`` bytes or more,
            16-byte aligned; its contents do not matter and steps of one stream may share it.  None
            allocates.
        unit_rows: as of ``index_logits``.

    Returns:
        (out, counts): slots or positions in ascending order of position, -1 behind them; how many
        those are, which sparse decode takes as ``topk_length``.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: the lightning indexer and token selection of DeepSeek-V3.2.
    """
    call = Step(
        q, w, cache, block_table, cache_seqlens, cu_seqlens_q, k, slots, max_tokens, unit_rows,
        out, counts, workspace,
    )  # fmt: skip
    return calls.run(STEP.op, STEP.op, call)


def index_topk_workspace(rows: int, max_tokens: int) -> int:
    """Bytes of the workspace of ``index_topk``: 4 a query token and cached token, and little more.

    Args:
        rows: query tokens of the call, b * s_q or total_q; 0 or more.
        max_tokens: columns of its scores, 1 to 1052672; of a call without, 64 * width of the block
            table.

    Returns:
        Bytes, a multiple of 256.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: our own.
    """
    checks.integer("rows", rows, 0, shapes.MAX_ROWS)
    checks.integer("max_tokens", max_tokens, 1, shapes.MAX_COLUMNS)
    return Room.of(rows, max_tokens).end


class Room(NamedTuple):
    """Offsets of a workspace's parts, in bytes.

    Attributes:
        stride: elements of a row of scores.
        pages: of a row of tables.
        lengths: where the query tokens' lengths begin; scores begin at 0.
        tables: where their rows of the block table begin.
        end: behind those.
    """

    stride: int
    pages: int
    lengths: int
    tables: int
    end: int

    @classmethod
    def of(cls, rows: int, columns: int) -> Room:
        """Computes the offsets for so many rows and columns of scores."""
        stride = _up(4 * columns) // 4
        pages = -(-columns // PAGE)
        lengths = 4 * rows * stride
        tables = lengths + _up(4 * rows)
        return cls(stride, pages, lengths, tables, tables + _up(4 * rows * pages))


def _up(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class Step(NamedTuple):
    """A call of ``index_topk``."""

    q: torch.Tensor
    w: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    k: int
    slots: bool
    max_tokens: int | None
    unit_rows: int | None
    out: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    workspace: torch.Tensor | None = None

    def scoring(self, out: torch.Tensor | None, max_tokens: int | None) -> Scoring:
        """The call of ``index_logits``."""
        given: tuple[Any, ...] = (*self[:READ], out, max_tokens, self.unit_rows)
        return Scoring(*given)

    @property
    def rows(self) -> int:
        """Query tokens."""
        return self.q.shape[0] * (self.q.shape[1] if self.q.ndim == 4 else 1)

    @property
    def columns(self) -> int:
        """Columns of the scores: no more than the block table has."""
        held = PAGE * self.block_table.shape[1]
        return held if self.max_tokens is None else min(self.max_tokens, held)

    @property
    def s_q(self) -> int:
        """Query tokens of every sequence; of ragged queries 1."""
        return self.q.shape[1] if self.q.ndim == 4 else 1


READ = 6  # leading tensors of a step


def _check_scoring(call: Step, known: op.Extents) -> None:
    """Checks options and what is scored."""
    checks.flag("slots", call.slots)
    check_scoring(call.scoring(None, call.max_tokens), known)
    rows, columns = call.rows, call.columns
    if columns > shapes.MAX_COLUMNS:
        hint = "longer sequences than that are not scored: max_tokens cuts them"
        wanted = f"1 to {shapes.MAX_COLUMNS} columns of scores"
        checks.value_error("max_tokens", wanted, columns, hint)
    if rows > shapes.MAX_ROWS:
        checks.value_error("q", f"at most {shapes.MAX_ROWS} query tokens", rows)


def _check_room(call: Step, known: op.Extents) -> None:
    """Checks that the workspace is large enough; how large one is that is made here."""
    rows, columns = call.rows, call.columns
    size = Room.of(rows, columns).end
    got = known.setdefault("bytes", size)
    if got < size:
        hint = f"index_topk_workspace({rows}, {columns}) says how many"
        checks.value_error("workspace", f"{size} bytes or more", got, hint)


def _check_begin(call: Step) -> None:
    """Checks where the workspace begins."""
    if call.workspace is not None:
        checks.aligned("workspace", call.workspace)


@functools.lru_cache(maxsize=64)
def _rows_kernel(device: torch.device) -> variants.Kernel:
    spec = VariantSpec(op="index_rows", arch=variants.arch_of(device))
    return variants.kernel(spec, device.type)


variants.on_forget(_rows_kernel.cache_clear)


def row_lengths(
    cache_seqlens: torch.Tensor, cu_seqlens_q: torch.Tensor | None, block_table: torch.Tensor,
    lengths: torch.Tensor, tables: torch.Tensor | None, s_q: int, most: int,
) -> None:  # fmt: skip
    """Tokens that each query token sees into ``lengths``, its row of the block table into
    ``tables``; one launch.

    Args:
        cache_seqlens: (b,), of one sequence or more.
        s_q: query tokens of each sequence without ``cu_seqlens_q``.
        most: tokens that a sequence can have.
    """
    device = cache_seqlens.device
    begins = nothing(device) if cu_seqlens_q is None else cu_seqlens_q
    tables = select_topk.no_table(device) if tables is None else tables
    _rows_kernel(device)(cache_seqlens, begins, block_table, lengths, tables, s_q, most)


class Ready(NamedTuple):
    """Sizes, offsets and the top-k kernel of a launch, kept for calls of its kind."""

    rows: int
    columns: int
    room: Room
    kernel: variants.Kernel | None  # of top-k


def _launch(call: Step, ready: Ready | None) -> tuple[Chosen, Ready | None]:
    if ready is None:
        ready = Ready(call.rows, call.columns, Room.of(call.rows, call.columns), None)
    rows, columns, room, kernel = ready
    out, counts, table, device = call.out, call.counts, call.block_table, call.q.device
    if out is None:
        out = torch.empty((rows, call.k), dtype=torch.int32, device=device)
    if counts is None:
        counts = torch.empty(rows, dtype=torch.int32, device=device)
    if not rows:
        return (out, counts), None
    lengths, ragged = call.cache_seqlens, call.cu_seqlens_q is not None
    if not len(lengths):  # ragged queries of no sequence
        out.fill_(-1)
        counts.zero_()
        return (out, counts), None
    memory = call.workspace
    if memory is None:
        memory = torch.empty(room.end, dtype=torch.uint8, device=device)
    scores = memory[: room.lengths].view(torch.float32)
    logits = scores.as_strided((rows, columns), (room.stride, 1))
    if ragged or call.s_q > 1:
        lengths = memory[room.lengths :][: 4 * rows].view(torch.int32)
        tables = None
        if ragged and call.slots:
            own = memory[room.tables :][: 4 * rows * room.pages]
            tables = own.view(torch.int32).view(rows, room.pages)
        row_lengths(
            call.cache_seqlens, call.cu_seqlens_q, table, lengths, tables, call.s_q, columns
        )
        table = table if tables is None else tables
    launch_logits(call.scoring(logits, None))
    chosen = select_topk.Select(
        logits, lengths, call.k, table if call.slots else None, PAGE, None, call.s_q, out, counts
    )
    results, kernel = select_topk.launch_select(chosen, kernel)
    return results, ready._replace(kernel=kernel)


STEP = op.Declared(
    "index_topk",
    Step,
    ("out", "counts", "workspace"),
    (
        op.IntArg("k", 1, select_topk.MAX_K),
        _check_scoring,
        op.TensorArg("out", _INT32, "rows k"),
        select_topk.check_row_major,
        op.vector("counts", "rows"),
        op.TensorArg("workspace", (torch.uint8,), "bytes", contiguous=True),
        _check_room,
    ),
    _launch,
    memory=_check_begin,
    scratch=("workspace",),
    wire={"q": op.BYTES},
)
