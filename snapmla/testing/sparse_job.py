"""Sparse decodes at the level of the ABI: inputs, plan, one call, and its errors."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.dims import KV_LORA_RANK, PARTIAL_ROW, QK_ROPE_HEAD_DIM
from dsl_kernels.spec import VariantSpec
from snapmla.cache.quant import QuantizedQuery
from snapmla.runtime import variants
from snapmla.testing import rounding
from snapmla.testing.comparison import DecodeErrors, errors_of, mimic_of
from snapmla.testing.plan_tables import PlanTables
from snapmla.testing.reference_plan import PlanReference, Queries, plan_reference
from snapmla.testing.sparse_reference import sparse_decode_reference
from snapmla.testing.workloads.call import DTYPES, NATURAL
from snapmla.testing.workloads.samples import sample_tokens

HEAD_SCALE = 576**-0.5
INT_MAX = 2**31 - 1
# The exported function's, in order (dsl_kernels/entry/entries.py).
ARGUMENTS = (
    "q_nope", "q_rope", "q_scale", "content", "rope", "scale", "indices", "topk_length",
    "attn_sink", "work_items", "part_begin", "split_begin", "units", "row_limits", "cu_seqlens_q",
    "out", "lse", "o_accum", "lse_accum", "softmax_scale", "lse_factor", "empty_lse", "may_split",
    "witness",
)  # fmt: skip
LAYOUTS = ("split", "paged", "row640", "packed")
STYLES = ("plain", "swings", "equal")
SWING = 200.0  # nats between the tiles of style ``swings``

Planes = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class SparseShape:
    """Extents of a sparse decode, and what is peculiar in its inputs.

    Attributes:
        heads, topk, page_size: of the call.
        lengths: of each sequence, how many entries of its query tokens' rows count.
        s_q: query tokens of each; of all with ``begins``.
        begins: where each sequence's query tokens begin and the last one's end; None: each has s_q.
        own_lengths: how many entries count for each query token, beside ``lengths``; None: no more.
        layout: of the cache, one of ``LAYOUTS``.
        style: of the logits, one of ``STYLES``.
        sink: whether heads have sinks.
        parts, split_tiles, fixed_overhead: of the plan.
        dense: rows name all of their sequence's tokens in order, no entry is idle.
    """

    heads: int
    topk: int
    lengths: tuple[int, ...]
    page_size: int = 64
    s_q: int = 1
    begins: tuple[int, ...] | None = None
    own_lengths: tuple[int, ...] | None = None
    layout: str = "split"
    style: str = "plain"
    sink: bool = False
    parts: int = 2
    split_tiles: int = 0
    fixed_overhead: int = 1
    dense: bool = False

    @property
    def tokens(self) -> int:
        """Query tokens."""
        return self.s_q * (1 if self.begins is not None else len(self.lengths))

    @property
    def counts(self) -> list[int]:
        """Number of entries that count for each query token; 0 for those of no sequence."""
        begins = self.begins or range(0, self.tokens + 1, self.s_q)
        counts = [0] * self.tokens
        for i, n in enumerate(self.lengths):
            counts[begins[i] : begins[i + 1]] = [n] * (begins[i + 1] - begins[i])
        if self.own_lengths is not None:
            counts = [min(a, b) for a, b in zip(counts, self.own_lengths, strict=True)]
        return [min(max(n, 0), self.topk) for n in counts]

    @property
    def planned(self) -> tuple[tuple[int, ...], int]:
        """(lengths, width) of the lists that a plan is made for."""
        return self.lengths, self.topk

    @property
    def covered(self) -> int:
        """Query tokens of sequences, those in front."""
        return self.tokens if self.begins is None else self.begins[-1]

    @property
    def queries(self) -> Queries:
        """A unit is one query token."""
        begins = None if self.begins is None else list(self.begins)
        own = None if self.own_lengths is None else list(self.own_lengths)
        return Queries(self.heads, self.s_q, self.heads, begins=begins, row_seqlens=own)


def poisoned_planes(pages: int, page_size: int, layout: str) -> Planes:
    """content u8 (pages, P, 512), rope bf16 (pages, P, 64), scale f32 (pages, P), every byte NaN.

    ``paged`` has pages of all three, ``packed`` such pages of three caches in turn, both of a
    multiple of 16 bytes; ``row640`` rows of content and RoPE.
    """
    row, p = KV_LORA_RANK + 2 * QK_ROPE_HEAD_DIM, page_size
    if layout in ("split", "row640"):
        rows = torch.full((pages, p, row), 0xFF, dtype=torch.uint8)
        scale = torch.full((pages, p), math.nan)
        if layout == "row640":
            return rows[..., :KV_LORA_RANK], rows[..., KV_LORA_RANK:].view(torch.bfloat16), scale
        content, rope = (rows[..., x].contiguous() for x in (slice(512), slice(512, 640)))
        return content, rope.view(torch.bfloat16), scale
    size = -(-p * (row + 4) // 16) * 16
    caches = 3 if layout == "packed" else 1
    blocks = torch.full((pages, caches, size), 0xFF, dtype=torch.uint8)[:, caches // 2]
    ends = 512 * p, row * p, (row + 4) * p
    content, rope, scale = (blocks[:, a:b] for a, b in zip((0, *ends[:2]), ends, strict=True))
    return (
        content.unflatten(1, (p, KV_LORA_RANK)),
        rope.view(torch.bfloat16).unflatten(1, (p, QK_ROPE_HEAD_DIM)),
        scale.view(torch.float32),
    )


def placed(x: Tensor, device: torch.device | str) -> Tensor:
    """``x`` on a device with its strides, gaps included."""
    if torch.device(device).type == x.device.type:
        return x
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


class SparseJob:
    """One sparse decode: idle entries anywhere, poison wherever nobody names a token.

    Args:
        spec: the variant.
        shape: what is asked of it.
        planner: the plan_decode kernel of ``device``; None plans with ``reference_plan``.
        device: where calls run; inputs are made on the CPU.
    """

    argument_names: tuple[str, ...] = ARGUMENTS

    def __init__(
        self,
        spec: VariantSpec,
        shape: SparseShape,
        *,
        planner: variants.Kernel | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec, self.shape, self.planner, self.device = spec, shape, planner, device
        self.counts = torch.tensor(shape.counts, dtype=torch.int32)
        self._fill()
        self.sink = torch.empty(0)
        if shape.sink:
            self.sink = torch.randn(shape.heads) * 2 + 3
            self.sink[: shape.heads // 3 : 2] = math.inf
            self.sink[1 : shape.heads // 3 : 2] = -math.inf
        self.lengths = torch.tensor(shape.lengths, dtype=torch.int32)
        lengths, topk = shape.planned
        self.plan: PlanReference = plan_reference(
            lengths, shape.parts, spec.token_tile, shape.fixed_overhead, topk, shape.split_tiles,
            queries=shape.queries,
        )  # fmt: skip

    # ---------------------------------------------------------------- inputs

    def _fill(self) -> None:
        """Pool, indices, queries."""
        shape = self.shape
        named = max(sum(shape.counts), 1)
        pages = -(-named // shape.page_size) + 2
        self.planes = poisoned_planes(pages, shape.page_size, shape.layout)
        order = torch.randperm(pages * shape.page_size)
        self.indices = torch.full((shape.tokens, shape.topk), INT_MAX, dtype=torch.int32)
        b_q = 1 if shape.begins is not None else len(shape.lengths)
        nope = torch.randn(b_q, shape.s_q, shape.heads, KV_LORA_RANK)
        rope = torch.randn(b_q, shape.s_q, shape.heads, QK_ROPE_HEAD_DIM)
        keys: list[tuple[Tensor, Tensor]] = []
        for i, count in enumerate(shape.counts):
            slots, order = order[:count], order[count:]
            c, r = sample_tokens(count)
            if shape.style == "swings":
                c, r = self._swinging(nope.view(-1, *nope.shape[2:])[i], c, r)
            self._store(slots, c, r)
            keys.append((c, r))
            self.indices[i, :count] = slots.int()
            if not shape.dense:
                self._idle(i, count)
        if shape.style == "equal":  # each row of a query is a token of its list
            for i, (c, r) in enumerate(keys):
                at = torch.randint(max(len(c), 1), (shape.heads,))
                if len(c):
                    nope.view(-1, *nope.shape[2:])[i] = c[at]
                    rope.view(-1, *rope.shape[2:])[i] = r[at]
        self.q = QuantizedQuery(*rounding.quantize_rows(nope, rope))

    def _swinging(self, q: Tensor, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens whose logits go up and down by ``SWING`` from tile to tile, by the mean query."""
        mean = q.mean(0)
        tile = torch.arange(len(c)) // self.spec.token_tile
        size = SWING / (HEAD_SCALE * float(mean.square().sum()))
        height = torch.tensor([0.0, 1.0, -1.0, 0.5, -0.5, 1.1])[tile % 6]
        return c + (height * size)[:, None] * mean, r

    def _store(self, slots: Tensor, c: Tensor, r: Tensor) -> None:
        p = self.shape.page_size
        content, rope, scale = rounding.quantize_rows(c, r, slots=torch.arange(len(c)))
        for target, values in zip(
            self.planes, (content.view(torch.uint8), rope, scale), strict=True
        ):
            target[slots // p, slots % p] = values

    def _idle(self, i: int, count: int) -> None:
        """Replaces some of query token ``i``'s first ``count`` entries by indices of no token.

        An entry is replaced with probability 1/7.  If ``i`` % 4 is 1, all are replaced.  If it is
        2, and ``count`` exceeds 192, the tile of entries 64 to 127 is replaced, too.  An index of
        no token is -1, INT_MAX, the slot just past the pool, or -2^31.
        """
        pool = self.planes[0].shape[0] * self.planes[0].shape[1]
        none = torch.tensor([-1, INT_MAX, pool, -(2**31)], dtype=torch.int32)
        row = self.indices[i]
        idle = torch.rand(count) < 1 / 7
        if i % 4 == 1:
            idle[:] = True
        if count > 192 and i % 4 == 2:
            idle[64:128] = True
        row[:count][idle] = none[torch.randint(4, (int(idle.sum()),))]

    # ---------------------------------------------------------------- calls

    def arguments(self) -> dict[str, Any]:
        """Arguments of one call by name; results and workspace are new and full of NaN."""
        shape, q = self.shape, self.q
        b_q = q.rope.shape[0]
        out = torch.full((b_q, shape.s_q, shape.heads, KV_LORA_RANK), math.nan)
        lse = torch.full((b_q, shape.heads, shape.s_q), math.nan)
        slots = max(2 * shape.parts, self.plan.split_begin[-1])
        o_accum = torch.full((slots, shape.heads, PARTIAL_ROW), math.nan).half()
        lse_accum = torch.full((slots, shape.heads), math.nan)
        content, rope, scale = self.planes
        return {
            "q_nope": q.nope_u8, "q_rope": q.rope, "q_scale": q.row_scale,
            "content": content, "rope": rope, "scale": scale,
            "indices": self.indices.unflatten(0, (b_q, shape.s_q)),
            "topk_length": self.lengths, "attn_sink": self.sink,
            "out": out.to(DTYPES[self.spec.out_dtype]), "lse": lse,
            "o_accum": o_accum, "lse_accum": lse_accum, **self._planned().arguments(),
            "softmax_scale": HEAD_SCALE, **NATURAL,
            "may_split": int(self.plan.split_begin[-1] > 0), "witness": 0,
        }  # fmt: skip

    def run(self, kernel: variants.Kernel, **changes: Any) -> tuple[Tensor, Tensor]:
        """(out, lse) of one call, on the CPU.

        ``changes``: other arguments than the job's; lists may be (tokens, topk), as the job's are.
        """
        given, own = {}, self.arguments()
        for name, x in {**own, **changes}.items():
            if name in ("indices", "extra_indices") and x.ndim == 2:
                x = x.unflatten(0, own["indices"].shape[:2])
            given[name] = placed(x, self.device) if isinstance(x, Tensor) else x
        kernel(*(given[name] for name in self.argument_names))
        return given["out"].cpu(), given["lse"].cpu()

    def _planned(self) -> PlanTables:
        """The plan's tables, by the kernel or the reference."""
        if self.planner is None:
            return PlanTables.of(self.plan)
        shape = self.shape
        lengths, topk = shape.planned
        tiles = -(-topk // self.spec.token_tile)
        pieces = -(-tiles // shape.split_tiles) if shape.split_tiles else 0
        made = PlanTables.empty(
            len(shape.lengths), shape.parts, shape.queries, pieces, device=self.device
        )
        numbers = (topk, self.spec.token_tile, shape.fixed_overhead, shape.split_tiles)
        planned = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        made.fill(self.planner, planned, shape.queries, numbers)
        return made

    # ---------------------------------------------------------------- truth

    def errors(self, result: tuple[Tensor, Tensor]) -> DecodeErrors:
        """Errors of ``run``'s (out, lse) against the reference, query tokens of sequences only."""
        out, lse = result
        n, q = self.shape.covered, self.q
        nope, q_rope, q_scale = (x.flatten(0, 1)[:n] for x in (q.nope, q.rope, q.row_scale))
        content, rope, scale = self.planes
        run = functools.partial(
            sparse_decode_reference, nope, q_rope, q_scale, content.view(torch.float8_e4m3fn),
            rope, scale, self.indices[:n], self.counts[:n], HEAD_SCALE,
            attn_sink=self.sink if self.shape.sink else None,
        )  # fmt: skip
        exact = os.environ.get("SOFTGPU_ACCUMULATE") == "exact"
        return errors_of(
            run, out.flatten(0, 1)[:n], lse.transpose(0, 1).flatten(1)[:, :n],
            mimic_of(self.spec, exact=exact),
        )  # fmt: skip
