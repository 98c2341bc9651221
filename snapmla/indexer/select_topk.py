"""``select_topk``: which cached tokens a query attends to, from the indexer's scores."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from dsl_kernels.spec import VariantSpec
from snapmla import checks
from snapmla.call import memo as calls
from snapmla.call import op
from snapmla.indexer import shapes
from snapmla.runtime import launch, variants
from snapmla.runtime.launch import nothing

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
    return calls.run(SELECT.op, SELECT.op, call)


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


def _check_begin(call: Select) -> None:
    """Checks that rows of scores are rows of words."""
    if call.logits.numel():
        checks.aligned_rows("logits", call.logits, align=_FLOAT32[0].itemsize)


def _check_size(call: Select, known: op.Extents) -> None:
    """Checks how many scores there are."""
    if not 1 <= known["columns"] <= shapes.MAX_COLUMNS:
        checks.value_error("logits", f"1 to {shapes.MAX_COLUMNS} columns", known["columns"])
    if known["rows"] > shapes.MAX_ROWS:
        checks.value_error("logits", f"at most {shapes.MAX_ROWS} rows", known["rows"])


def _check_table(call: Select, known: op.Extents) -> None:
    """Checks that every ``next_n`` rows have a row of the block table."""
    rows, next_n = known["rows"], known["next_n"]
    if rows % next_n:
        hint = "rows of a sequence lie one behind another, as many of each"
        checks.value_error("next_n", f"a divisor of the {rows} rows of logits", next_n, hint)
    if call.block_table is not None:
        checks.block_table(call.block_table, rows // next_n, known["device"])


def check_row_major(call: Any, known: op.Extents) -> None:
    """Checks that what is selected for a row lies side by side."""
    if call.out is not None and call.k > 1 and call.out.stride(1) != 1:
        strides = f"strides {call.out.stride()}"
        checks.value_error("out", "innermost stride 1", strides, "allocate it row-major")


@functools.lru_cache(maxsize=64)
def _kernel(device: torch.device, shape: shapes.TopkShape) -> variants.Kernel:
    spec = VariantSpec(op="select_topk", arch=variants.arch_of(device), **shape._asdict())
    return variants.kernel(spec, device.type)


variants.on_forget(_kernel.cache_clear)


def kernel_of(logits: torch.Tensor) -> variants.Kernel:
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
    call: Select, ready: variants.Kernel | None
) -> tuple[Selected, variants.Kernel | None]:
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


SELECT = op.Declared(
    "select_topk",
    Select,
    ("out", "counts"),
    (
        op.IntArg("k", 1, MAX_K),
        op.IntArg("page_size", 1, MAX_PAGE_SIZE),
        op.IntArg("next_n", 1),
        op.TensorArg("logits", _FLOAT32, "rows columns"),
        _check_size,
        op.vector("lengths", "rows"),
        op.vector("row_starts", "rows"),
        _check_table,
        op.TensorArg("out", _INT32, "rows k"),
        check_row_major,
        op.vector("counts", "rows"),
    ),
    launch_select,
    memory=_check_begin,
    by_phase=True,
)
