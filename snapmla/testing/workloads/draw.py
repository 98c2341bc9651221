"""Draws: where the numbers of a problem's arguments come from.

A *problem* is an op's own record of a call before any number is there: extents, lengths, what is
planted.  ``arguments(spec, problem, draw)`` of the op's file lays it out, once for all draws:

* ``Adversarial`` (``samples.py``): small calls on the CPU, torch's global seed, poison around them;
* ``Exact`` (``exact.py``): the same bits on every machine, for results that are on record;
* ``Random`` (``samples.py``): normal numbers on any device, in calls as large as in service.

``problem.py`` makes an op's workload of them.  Every draw draws in the order in which it is asked.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.formats.index_cache import INDEX_DIM, PAGE_BYTES
from dsl_kernels.spec import VariantSpec

T = TypeVar("T")
Plant = Callable[..., None]  # (draw, tensors): writes what a problem is about among numbers


def nothing(_draw: Draw, *_tensors: Tensor) -> None:
    """Plants nothing."""


class Draw(abc.ABC):
    """Numbers for arguments.

    Floating-point values are fp32 unless a dtype is named; ``there`` gives them their dtype behind
    what is planted, and takes them to ``device``.

    Attributes:
        device: of the arguments.
        fill: value of results before a call.
        angles: positions of a RoPE table.
        byte: of an index cache before a call.
    """

    fill: ClassVar[float]
    angles: ClassVar[int]
    byte: ClassVar[int]

    def __init__(self, device: str) -> None:
        self.device = device
        self._kept: dict[Hashable, Any] = {}

    # ---------------------------------------------------------------- numbers

    @abc.abstractmethod
    def rows(self, *shape: int) -> Tensor:
        """Values: normal, or of a like spread."""

    @abc.abstractmethod
    def below(self, bound: int, n: int) -> Tensor:
        """(n,) int64 of [0, bound)."""

    @abc.abstractmethod
    def order(self, n: int) -> Tensor:
        """0 to n - 1 in random order, int64."""

    def lses(self, *shape: int) -> Tensor:
        """LSE of partial results."""
        return self.rows(*shape)

    def joint(self, n: int, dtype: torch.dtype) -> Tensor:
        """Rows of 576 values of queries or tokens, in their dtype."""
        return self.rows(n, HEAD_DIM_QK).to(dtype)

    def tokens(self, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """c_kv (n, 512) and k_rope (n, 64), in their dtype, as a projection leaves them."""
        rows = self.joint(n, dtype)
        return rows[:, :KV_LORA_RANK], rows[:, KV_LORA_RANK:]

    def keys(self, n: int, dtype: torch.dtype, gap: int = 0) -> Tensor:
        """Rows that begin with an index key, in their dtype; ``gap``: elements behind it."""
        return self.rows(n, INDEX_DIM + gap).to(dtype)

    def rope_queries(self, n: int, heads: int, dtype: torch.dtype) -> Tensor:
        """RoPE channels of attention's queries, (n, heads, 64), in their dtype."""
        return self.rows(n, heads, QK_ROPE_HEAD_DIM + 128).to(dtype)[..., 128:]

    def affine(self, width: int) -> tuple[Tensor, Tensor]:
        """Numbers for a layer norm's weight and bias, (width,) each, on the device."""
        weight, bias = self.rows(2, width)
        return weight, bias

    def gain(self, width: int, dtype: torch.dtype) -> Tensor:
        """Weight of an RMS norm, on the device."""
        return (1 + 0.2 * self.rows(width)).to(dtype)

    def positions(self, n: int, dtype: torch.dtype) -> Tensor:
        """Rows of a RoPE table, (n,), on the device."""
        return self.there(self.below(self.angles, n), dtype)

    def cos_sin(self, dtype: torch.dtype) -> Tensor:
        """RoPE table of ``angles`` positions, (angles, 64), on the device."""
        steps = torch.arange(QK_ROPE_HEAD_DIM // 2, device=self.device) * 2 / QK_ROPE_HEAD_DIM
        angle = torch.arange(self.angles, device=self.device)[:, None] * 10000.0**-steps
        return torch.cat([angle.cos(), angle.sin()], -1).to(dtype)

    # ---------------------------------------------------------------- caches

    @abc.abstractmethod
    def cache(
        self, cache_dtype: str, pages: int, page_size: int, heads: int = 1, style: int = 0
    ) -> dict[str, Tensor]:
        """Planes of a cache as kernels take them.

        Args:
            style: of its memory; 0: without gaps, of FP8 ``split``.
        """

    @abc.abstractmethod
    def key_pages(self, pages: int, gap: int = 0) -> Tensor:
        """Pages of an index cache with keys, uint8; ``gap``: bytes behind each."""

    def index_pages(self, pages: int, gap: int = 0) -> Tensor:
        """Pages of an index cache, full of ``byte``; ``gap``: bytes behind each."""
        made = self.full(pages, PAGE_BYTES + gap, value=self.byte, dtype=torch.uint8)
        return made[:, :PAGE_BYTES]

    def page_ids(self, batch: int, width: int, bound: int = 0) -> Tensor:
        """Block table, int32 (batch, width), on the device.

        Args:
            bound: ids are random and below it; 0: each page of a pool occurs once.
        """
        ids = self.below(bound, batch * width) if bound else self.order(batch * width)
        return self.there(ids.view(batch, width), torch.int32)

    def slots(
        self, n: int, room: int, dtype: torch.dtype, *, outside: Sequence[int] = (),
        edges: Sequence[int] = (),
    ) -> Tensor:  # fmt: skip
        """Slots of tokens in a pool, (n,), on the device.

        Args:
            room: slots of the pool.
            outside: tokens that get -1, ``room`` and the dtype's ends, as far as they go.
            edges: slots of the last tokens.
        """
        found = self.order(room - len(edges))[:n]
        for edge in sorted(edges):
            found = found + (found >= edge)
        found[n - len(edges) :] = found.new_tensor(edges)
        ends = torch.iinfo(dtype)
        for token, slot in zip(outside, (-1, room, ends.min, ends.max), strict=False):
            found[token] = slot
        return self.there(found, dtype)

    # ---------------------------------------------------------------- layout

    def there(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Drawn values in their dtype, on the device."""
        return (x if dtype is None else x.to(dtype)).to(self.device)

    def full(self, *shape: int, value: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """One value."""
        return torch.full(shape, value, dtype=dtype, device=self.device)

    def blank(self, **shapes: Sequence[int]) -> dict[str, Tensor]:
        """Tables of int32 that a call writes, full of -7, which no call means."""
        return {
            name: self.full(*shape, value=-7, dtype=torch.int32) for name, shape in shapes.items()
        }

    def i32(self, values: Any) -> Tensor:
        """A table."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def alone(self, *names: str) -> dict[str, Tensor]:
        """Tables that are empty where every sequence is one unit of query rows."""
        return {name: self.i32([]).view((0, 2) if name == "units" else (0,)) for name in names}

    def results(
        self, batch: int, s_q: int, heads: int, dtype: torch.dtype, d_v: int = KV_LORA_RANK
    ) -> dict[str, Tensor]:
        """out (batch, s_q, heads, d_v) and lse (batch, heads, s_q), full of ``fill``."""
        out = self.full(batch, s_q, heads, d_v, value=self.fill, dtype=dtype)
        return {"out": out, "lse": self.full(batch, heads, s_q, value=self.fill)}

    def lse_units(self) -> dict[str, float]:
        """lse_factor and empty_lse, natural as torch has them."""
        return {"lse_factor": math.log(2.0), "empty_lse": -math.inf}

    # ---------------------------------------------------------------- several problems

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """Values that problems of one draw share: ``make`` draws them for the first that asks."""
        if name not in self._kept:
            self._kept[name] = make()
        found: T = self._kept[name]
        return found

    def of(self, _spec: VariantSpec) -> Draw:
        """Draw of arguments that another op's variant shares."""
        return self

    def identify_by(self, *values: Tensor, bits: Sequence[Tensor] = ()) -> None:  # noqa: B027
        """Tells a record, if this is one's draw, what identifies inputs; of ``bits`` patterns."""
