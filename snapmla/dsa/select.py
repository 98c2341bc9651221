"""``select_topk``: which cached tokens a query attends to, from the indexer's scores."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from dsl_kernels.spec import VariantSpec
from snapmla import call as calls
from snapmla import checks, launch, overlap, runtime
from snapmla.decode_plan import nothing
from snapmla.dsa import shapes

MAX_K = 2048
MAX_PAGE_SIZE = 1 << 20
_FLOAT32, _INT32 = (torch.float32,), (torch.int32,)
Selected = tuple[torch.Tensor, torch.Tensor]


def select_topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    block_table: torch.Tensor | None = None,
    page_size: int = 64,
    row_starts: torch.Tensor | None = None,
    next_n: int = 1,
    out: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k highest scores of each row, exact and deterministic, in ascending order of position.

    What is selected is what a stable descending sort puts first: of equal scores the lower position
    wins, -0 equals +0, NaN is above +inf.  Results depend on a row's scores and nothing else: not
    on the other rows, the device, or timing.  One launch; lengths stay on the device, no workspace,
    nothing is waited for, and with ``out`` and ``counts`` given nothing is allocated, so it can be
    captured in a graph.  Where calls are recorded or watched it is one node,
    ``torch.ops.snapmla.select_topk``.

    Args:
        logits: float32 (rows, columns), of 1 to 1052672 columns, innermost stride 1; rows may lie
            any number of elements apart.  What lies outside a row's scores is never read.
        lengths: int32 (rows,), scores of each row; 0 and fewer than k are fine.  Below 0 counts as
            0, and scores that would lie behind the last column are left out.
        k: how many are wanted, 1 to 2048.
        block_table: int32 (rows / next_n, width), page ids of each sequence: ``out`` is then cache
            slots, ``page * page_size + offset``, which sparse decode takes as ``indices``.  A
            position outside the width, or on a page below 0, gives slot -1.  None: positions.
        page_size: tokens of a page, 1 or more.
        row_starts: int32 (rows,), column of each row's first score, as in a ragged prefill, where
            row r has columns [row_starts[r], row_starts[r] + lengths[r]); positions count from
            there.  None: all 0.
        next_n: rows, one behind another, that share a row of the block table: draft tokens of a
            sequence.
        out: int32 (rows, k), its rows may be strided; None allocates.
        counts: int32 (rows,); None allocates.

    Returns:
        (out, counts): positions, or slots, of the selected scores, -1 behind them; how many those
        are, min(length, k), which sparse decode takes as ``topk_length``.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: the top-k of DeepSeek-V3.2's sparse attention; radix selection.
    """
    call = Select(logits, lengths, k, block_table, page_size, row_starts, next_n, out, counts)
    return calls.run(_SELECT, _SELECT, call)


class Select(NamedTuple):
    """A call of ``select_topk``."""

    logits: torch.Tensor
    lengths: torch.Tensor
    k: int
    block_table: torch.Tensor | None
    page_size: int
    row_starts: torch.Tensor | None
    next_n: int
    out: torch.Tensor | None = None
    counts: torch.Tensor | None = None

    @property
    def read(self) -> dict[str, torch.Tensor | None]:
        """What is read, by name."""
        return {name: getattr(self, name) for name in _READ}


_READ = ("logits", "lengths", "block_table", "row_starts")


def _parts(call: Select) -> calls.Parts:
    logits, lengths, k, table, page_size, starts, next_n, out, counts = call
    given = (logits, lengths, table, starts, out, counts)
    tensors = tuple([t for t in given if t is not None])
    where = tuple([t.data_ptr() for t in tensors])
    options = (
        k.__class__, k, page_size.__class__, page_size, next_n.__class__, next_n,
        table is None, starts is None, out is None, counts is None, where[0] % checks.ALIGN,
    )  # fmt: skip
    return tensors, options, where


def _places(call: Select, _: object) -> calls.Groups:
    _check_begin(call)
    written = [[overlap.span(t)] for t in (call.out, call.counts) if t is not None]
    return *written, [overlap.span(t) for t in call.read.values() if t is not None]


def _check_begin(call: Select) -> None:
    """Checks that rows of scores are rows of words."""
    if call.logits.numel():
        checks.aligned_rows("logits", call.logits, align=_FLOAT32[0].itemsize)


def check_shapes(call: Select) -> tuple[tuple[int, int], tuple[int]]:
    """Checks what can be told without memory; the shapes of ``out`` and ``counts``."""
    k = checks.integer("k", call.k, 1, MAX_K)
    checks.integer("page_size", call.page_size, 1, MAX_PAGE_SIZE)
    next_n = checks.integer("next_n", call.next_n, 1)
    checks.tensor("logits", call.logits, _FLOAT32, ("rows", "columns"))
    rows, columns = call.logits.shape
    device = call.logits.device
    if not 1 <= columns <= shapes.MAX_COLUMNS:
        checks.value_error("logits", f"1 to {shapes.MAX_COLUMNS} columns", columns)
    if rows > shapes.MAX_ROWS:
        checks.value_error("logits", f"at most {shapes.MAX_ROWS} rows", rows)
    checks.vector("lengths", call.lengths, (rows,), device)
    if call.row_starts is not None:
        checks.vector("row_starts", call.row_starts, (rows,), device)
    if rows % next_n:
        hint = "rows of a sequence lie one behind another, as many of each"
        checks.value_error("next_n", f"a divisor of the {rows} rows of logits", next_n, hint)
    if call.block_table is not None:
        checks.block_table(call.block_table, rows // next_n, device)
    if call.out is not None:
        checks.tensor("out", call.out, _INT32, (rows, k), device)
        if k > 1 and call.out.stride(1) != 1:
            strides = f"strides {call.out.stride()}"
            checks.value_error("out", "innermost stride 1", strides, "allocate it row-major")
    if call.counts is not None:
        checks.vector("counts", call.counts, (rows,), device)
    return (rows, k), (rows,)


def _checked(call: Select) -> Select:
    check_shapes(call)
    _check_begin(call)
    if call.out is not None:
        checks.distinct("out", call.out)
        checks.apart("out", call.out, call.read)
    if call.counts is not None:
        checks.apart("counts", call.counts, {**call.read, "out": call.out})
    return call


@functools.lru_cache(maxsize=64)
def _kernel(device: torch.device, shape: shapes.TopkShape) -> runtime.Kernel:
    spec = VariantSpec(op="select_topk", arch=runtime.arch_of(device), **shape._asdict())
    return runtime.kernel(spec, device.type)


runtime.on_forget(_kernel.cache_clear)


def kernel_of(logits: torch.Tensor) -> runtime.Kernel:
    """The kernel that selects from these rows, by their shape and whether all begin at 16 bytes."""
    rows, columns = logits.shape
    apart = logits.stride(0) * logits.element_size() if rows > 1 else 0
    if apart % checks.ALIGN or logits.data_ptr() % checks.ALIGN:
        columns += shapes.MOST_SHIFT
    return _kernel(logits.device, shapes.choose(rows, columns))


@functools.lru_cache(maxsize=64)
def no_table(device: torch.device) -> Any:
    """A block table without rows, as kernels take it."""
    return launch.prepared(torch.empty((0, 0), dtype=torch.int32, device=device))[0]


def launch_select(
    call: Select, ready: runtime.Kernel | None
) -> tuple[Selected, runtime.Kernel | None]:
    """The launch of a checked call; ``ready``: its kernel, found if None."""
    logits, lengths, k, table, page_size, starts, next_n, out, counts = call
    rows, device = logits.shape[0], logits.device
    if out is None:
        out = torch.empty((rows, k), dtype=torch.int32, device=device)
    if counts is None:
        counts = torch.empty(rows, dtype=torch.int32, device=device)
    if not rows:
        return (out, counts), None
    kernel = kernel_of(logits) if ready is None else ready
    starts = nothing(device) if starts is None else starts
    table = no_table(device) if table is None else table
    kernel(logits, lengths, starts, table, out, counts, page_size, next_n)
    return (out, counts), kernel


def select_now(call: Select) -> Selected:
    """Checks tensors with memory, and selects, whoever traces."""
    return launch_select(_checked(call), None)[0]


def _traced(call: Select) -> Selected:
    """The call as an operator, for tracers."""
    given, out, counts = call[:-2], call.out, call.counts
    if out is None and counts is None:
        return torch.ops.snapmla.select_topk(*given)
    shape, vector = check_shapes(call)
    if out is None:
        out = call.lengths.new_empty(shape)
    if counts is None:
        counts = call.lengths.new_empty(vector)
    torch.ops.snapmla.select_topk_out(*given, out, counts)
    return out, counts


_SELECT = calls.Op("select_topk", _checked, launch_select, _traced, _parts, _places)
runtime.on_forget(_SELECT.memo.forget)  # kernels
