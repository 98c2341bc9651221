"""Two ways to make ranks' partial results whole, each rank getting its own heads.

``all_to_all``: every rank sends each other one that one's heads, a row's LSE behind its 512 values,
and merges what it gets in fp32 (``snapmla.merge_states``): one collective, one rounding.

``reduce_scatter``: LSEs are gathered, rows are weighted by them, and the collective sums them: two
collectives.  In bfloat16 weighted rows are rounded before they are summed, and so is each sum.

Bytes that a rank sends, of a row of 512 values and a peer that gets it: 1040 in bfloat16 and 2064
in float32 by ``all_to_all``; 1024 and 2048 by ``reduce_scatter``, beside 4 of each of all rows'
LSE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import distributed

from dsl_kernels.formats.dims import KV_LORA_RANK
from snapmla.dense.merge import merge_states
from snapmla.errors import SnapMLAError

Tensor = torch.Tensor
ALIGN = 256  # bytes: where buffers of a workspace begin
ROW_ALIGN = 16  # bytes: rows are read by vector instructions
LEAST = torch.finfo(torch.float32).min


class Rows(NamedTuple):
    """The query rows of a step, and how their results travel.

    Attributes:
        tokens: (b, s_q), or (total_q,) with ragged queries.
        ranks: of the group.
        own: heads that each rank gets; all together have ranks * own.
        transport: dtype in which partial results travel, bfloat16 or float32.
    """

    tokens: tuple[int, ...]
    ranks: int
    own: int
    transport: torch.dtype

    @property
    def heads(self) -> int:
        return self.ranks * self.own

    def lse_shape(self, heads: int) -> tuple[int, ...]:
        """Shape of the LSE of ``heads`` heads, as in ``decode``: heads before query tokens."""
        *batch, last = self.tokens
        return (*batch, heads, last)


class Fields(Protocol):
    """Takes buffers: (shape, dtype) -> tensor."""

    def __call__(self, *shape: int, dtype: torch.dtype) -> Tensor: ...


class Arena:
    """Buffers side by side in a workspace of bytes; without one it only counts."""

    def __init__(self, workspace: Tensor | None = None) -> None:
        self.workspace, self.used = workspace, 0

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """The next buffer, uninitialised; on the meta device where bytes are counted."""
        made = torch.empty(shape, dtype=dtype, device="meta")
        begin, size = self.used, made.numel() * made.element_size()
        self.used += -(-size // ALIGN) * ALIGN
        if self.workspace is None:
            return made
        return self.workspace[begin : begin + size].view(dtype).view(shape)


def _named(*names: str) -> Callable[..., Any]:
    """The first of several names that this torch has for a collective."""
    found = [getattr(distributed, name) for name in names if hasattr(distributed, name)]
    return found[0]


class Collectives:
    """Collectives of a group, by names that any torch has; errors say what they mean."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self._gather = _named("all_gather_single", "all_gather_into_tensor")
        self._scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")

    def _run(self, what: str, call: Callable[..., Any], *tensors: Tensor) -> None:
        try:
            call(*tensors, group=self.group)
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise SnapMLAError(
                f"rank {self.rank} of {self.size}: {what} did not end: another rank has raised, "
                f"stopped or is in another call ({reason[:200]})"
            ) from error

    def gather(self, what: str, into: Tensor, mine: Tensor) -> None:
        """``into[r]`` becomes rank r's ``mine``."""
        self._run(f"all-gather of {what}", self._gather, into.flatten(0, 1), mine)

    def exchange(self, what: str, into: Tensor, send: Tensor) -> None:
        """``into[r]`` becomes what rank r has in ``send[this rank]``."""
        call = distributed.all_to_all_single
        self._run(f"all-to-all of {what}", call, into.flatten(0, 1), send.flatten(0, 1))

    def reduce_scatter(self, what: str, into: Tensor, send: Tensor) -> None:
        """``into`` becomes the sum over ranks of their ``send[this rank]``."""
        self._run(f"reduce-scatter of {what}", self._scatter, into, send.flatten(0, 1))


class Exchange(Protocol):
    """Makes partial results whole, over buffers for steps of one shape."""

    def __call__(self, part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
        """Collective.

        Args:
            part: (*tokens, heads, 512), any dtype; of a row whose LSE is infinite anything.
            part_lse: float32, heads before query tokens, contiguous.
            out: bfloat16 or float32 (*tokens, own, 512); lse: float32 likewise; both are written.
        """


def _by_rank(tensor: Tensor, dim: int, ranks: int) -> Tensor:
    """A view whose first dimension is the rank that gets a part of dimension ``dim``."""
    at = dim % tensor.ndim
    return tensor.unflatten(at, (ranks, -1)).movedim(at, 0)


class AllToAll:
    """``all_to_all`` for steps of one shape."""

    def __init__(self, rows: Rows, collectives: Collectives, take: Fields) -> None:
        self._collectives = collectives
        row_bytes = KV_LORA_RANK * rows.transport.itemsize
        words = -(-(row_bytes + 4) // ROW_ALIGN) * ROW_ALIGN // 4
        shape = (rows.ranks, *rows.tokens, rows.own, words)
        self._ranks = rows.ranks
        self._send, self._got = (take(*shape, dtype=torch.float32) for _ in range(2))
        self._views = [self._rows(buffer, rows.transport) for buffer in (self._send, self._got)]

    @staticmethod
    def _rows(buffer: Tensor, transport: torch.dtype) -> tuple[Tensor, Tensor]:
        """The rows of a buffer and their LSEs, heads before query tokens."""
        values = KV_LORA_RANK * transport.itemsize // 4
        lse = buffer[..., values]
        return buffer.view(transport)[..., :KV_LORA_RANK], lse.transpose(-1, -2)

    def __call__(self, part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
        (rows, lses), (got, got_lses) = self._views
        rows.copy_(_by_rank(part, -2, self._ranks))
        lses.copy_(_by_rank(part_lse, -2, self._ranks))
        self._collectives.exchange("partial results", self._got, self._send)
        merge_states(got, got_lses, out=out, lse=lse)


class ReduceScatter:
    """``reduce_scatter`` for steps of one shape."""

    def __init__(self, rows: Rows, collectives: Collectives, take: Fields) -> None:
        self._collectives, self._ranks = collectives, rows.ranks
        shape, flags = rows.lse_shape(rows.heads), torch.bool
        self._own = slice(collectives.rank * rows.own, (collectives.rank + 1) * rows.own)
        self._all = take(rows.ranks, *shape, dtype=torch.float32)
        self._infinite = take(rows.ranks, *shape, dtype=flags)
        self._first, self._top, self._total, self._whole = (
            take(*shape, dtype=torch.float32) for _ in range(4)
        )
        self._none = take(*shape, dtype=flags)
        values = (*rows.tokens, rows.own, KV_LORA_RANK)
        self._send = take(rows.ranks, *values, dtype=rows.transport)
        self._got = take(*values, dtype=rows.transport)

    def __call__(self, part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
        mine = self._collectives.rank
        self._collectives.gather("LSEs", self._all, part_lse)
        self._weights()
        weight, empty = self._all[mine], self._infinite[mine]
        torch.mul(
            _by_rank(part, -2, self._ranks), self._spread(weight), out=self._send
        )  # 0 times what an empty part may hold is not always 0
        self._send.masked_fill_(self._spread(empty), 0.0)
        self._collectives.reduce_scatter("weighted rows", self._got, self._send)
        out.copy_(self._got)
        lse.copy_(self._whole[..., self._own, :])

    def _spread(self, value: Tensor) -> Tensor:
        """A number a row, (..., heads, tokens), as rows by rank have it."""
        return _by_rank(value, -2, self._ranks).transpose(-1, -2)[..., None]

    def _weights(self) -> None:
        """Makes of all LSEs the ranks' weights, which rows' are nothing, and the whole LSE.

        An infinite LSE of either sign is that of a part without tokens; a NaN stays one.
        """
        every, top, total = self._all, self._top, self._total
        self._first.copy_(every[0])
        torch.isposinf(every, out=self._infinite)
        every.masked_fill_(self._infinite, -torch.inf)
        torch.isneginf(every, out=self._infinite)
        torch.amax(every, 0, out=top)
        top.clamp_(min=LEAST)  # of a row without any tokens: no difference of infinities
        every.sub_(top).exp_()
        torch.sum(every, 0, out=total)
        torch.eq(total, 0.0, out=self._none)
        torch.log(total, out=self._whole)
        self._whole.add_(top)
        torch.where(self._none, self._first, self._whole, out=self._whole)
        every.div_(total.clamp_(min=1.0))  # the greatest term is 1


METHODS: dict[str, type[AllToAll] | type[ReduceScatter]] = {
    "all_to_all": AllToAll, "reduce_scatter": ReduceScatter,
}  # fmt: skip


def make_exchange(method: str, rows: Rows, collectives: Collectives, take: Fields) -> Exchange:
    """The exchange of a method, over buffers that ``take`` gives."""
    return METHODS[method](rows, collectives, take)
