"""``index_topk``: scores of cached tokens and the best of them, of one step."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from dsl_kernels.index_cache import PAGE
from dsl_kernels.spec import VariantSpec
from snapmla import call as calls
from snapmla import checks, overlap, runtime
from snapmla.decode_plan import nothing
from snapmla.dsa import select, shapes
from snapmla.dsa.index_logits import Call as Scoring
from snapmla.dsa.index_logits import check_scoring, launch_logits

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
    return calls.run(_STEP, _STEP, call)


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
        """Of so many rows and columns of scores."""
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

    @property
    def read(self) -> dict[str, torch.Tensor | None]:
        """What is read, by name."""
        given: tuple[Any, ...] = self[:READ]
        return dict(zip(Step._fields[:READ], given))

    @property
    def written(self) -> dict[str, torch.Tensor | None]:
        """What is written, by name."""
        given: tuple[Any, ...] = self[-WRITTEN:]
        return dict(zip(Step._fields[-WRITTEN:], given))

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
        """Of the scores: no more than the block table has."""
        held = PAGE * self.block_table.shape[1]
        return held if self.max_tokens is None else min(self.max_tokens, held)

    @property
    def s_q(self) -> int:
        """Query tokens of every sequence; of ragged queries 1."""
        return self.q.shape[1] if self.q.ndim == 4 else 1


READ, WRITTEN = 6, 3  # leading tensors of a step, and trailing ones


def _parts(call: Step) -> calls.Parts:
    told = call[READ:-WRITTEN]
    given: tuple[Any, ...] = (*call[:READ], *call[-WRITTEN:])
    tensors = tuple([t for t in given if t is not None])
    there = tuple([t is None for t in given])
    options = (there, told, tuple([x.__class__ for x in told]))
    return tensors, options, tuple([t.data_ptr() for t in tensors])


def _places(call: Step, _: object) -> calls.Groups:
    if call.workspace is not None:
        checks.aligned("workspace", call.workspace)
    written = [[overlap.span(t)] for t in call.written.values() if t is not None]
    return *written, [overlap.span(t) for t in call.read.values() if t is not None]


def check_shapes(call: Step) -> tuple[tuple[int, int], tuple[int], int]:
    """Checks what can be told without memory: shapes of ``out`` and ``counts``, bytes of the
    workspace."""
    checks.integer("k", call.k, 1, select.MAX_K)
    checks.flag("slots", call.slots)
    check_scoring(call.scoring(None, call.max_tokens))
    rows, columns, device = call.rows, call.columns, call.q.device
    if columns > shapes.MAX_COLUMNS:
        hint = "longer sequences than that are not scored: max_tokens cuts them"
        wanted = f"1 to {shapes.MAX_COLUMNS} columns of scores"
        checks.value_error("max_tokens", wanted, columns, hint)
    if rows > shapes.MAX_ROWS:
        checks.value_error("q", f"at most {shapes.MAX_ROWS} query tokens", rows)
    if call.out is not None:
        checks.tensor("out", call.out, _INT32, (rows, call.k), device)
        if call.k > 1 and call.out.stride(1) != 1:
            strides = f"strides {call.out.stride()}"
            checks.value_error("out", "innermost stride 1", strides, "allocate it row-major")
    if call.counts is not None:
        checks.vector("counts", call.counts, (rows,), device)
    size = Room.of(rows, columns).end
    if call.workspace is not None:
        checks.tensor("workspace", call.workspace, (torch.uint8,), ("bytes",), device)
        checks.contiguous("workspace", call.workspace)
        if call.workspace.shape[0] < size:
            hint = f"index_topk_workspace({rows}, {columns}) says how many"
            got = call.workspace.shape[0]
            checks.value_error("workspace", f"{size} bytes or more", got, hint)
    return (rows, call.k), (rows,), size


def _checked(call: Step) -> Step:
    check_shapes(call)
    if call.out is not None:
        checks.distinct("out", call.out)
    if call.workspace is not None:
        checks.aligned("workspace", call.workspace)
    before = call.read
    for name, value in call.written.items():
        if value is not None:
            checks.apart(name, value, before)
            before = {**before, name: value}
    return call


@functools.lru_cache(maxsize=64)
def _rows_kernel(device: torch.device) -> runtime.Kernel:
    spec = VariantSpec(op="index_rows", arch=runtime.arch_of(device))
    return runtime.kernel(spec, device.type)


runtime.on_forget(_rows_kernel.cache_clear)


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
    tables = select.no_table(device) if tables is None else tables
    _rows_kernel(device)(cache_seqlens, begins, block_table, lengths, tables, s_q, most)


class Ready(NamedTuple):
    """What a launch prepares."""

    rows: int
    columns: int
    room: Room
    kernel: runtime.Kernel | None  # of top-k


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
    chosen = select.Select(
        logits, lengths, call.k, table if call.slots else None, PAGE, None, call.s_q, out, counts
    )
    results, kernel = select.launch_select(chosen, kernel)
    return results, ready._replace(kernel=kernel)


def _traced(call: Step) -> Chosen:
    """The call as an operator, for tracers."""
    shape, vector, size = check_shapes(call)
    given = call.q.view(torch.uint8), *call[1:-WRITTEN]
    if all(x is None for x in call.written.values()):
        return torch.ops.snapmla.index_topk(*given)
    out, counts, workspace = call.out, call.counts, call.workspace
    if out is None:
        out = call.cache_seqlens.new_empty(shape)
    if counts is None:
        counts = call.cache_seqlens.new_empty(vector)
    if workspace is None:
        workspace = call.cache.new_empty(size)
    torch.ops.snapmla.index_topk_out(*given, out, counts, workspace)
    return out, counts


def now(call: Step) -> Chosen:
    """Checks and launches, whoever traces: what the operators do."""
    return _launch(_checked(call), None)[0]


_STEP = calls.Op("index_topk", _checked, _launch, _traced, _parts, _places)
runtime.on_forget(_STEP.memo.forget)  # kernels
