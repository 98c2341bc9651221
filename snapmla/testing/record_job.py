"""Sparse decodes over 656-byte rows at the level of the ABI: inputs, one call, and its errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.dims import E4M3_MAX, HEAD_DIM_QK, KV_LORA_RANK, PARTIAL_ROW
from dsl_kernels.ds_mla import GROUP, GROUPS, LEAST_SCALE, ROPE_AT, ROW_BYTES, SCALES_AT
from snapmla.testing import dense_job, metrics
from snapmla.testing.dense_job import COSINE_GATE, OUT_GATE, DenseErrors
from snapmla.testing.record_reference import (
    RecordCall,
    magnitudes_of,
    record_decode_mimic,
    record_decode_reference,
)
from snapmla.testing.sparse_job import HEAD_SCALE, INT_MAX, SWING, SparseJob, SparseShape
from snapmla.testing.workloads.call import DTYPES, NATURAL

GROUP_SUM_ROWS = 32  # row tiles up to this one sum Q.K by groups (dsl_kernels/sm90/mix16_softmax.py)
SHORT, RATIO_ROUNDING = 17, 2.0**-12
MIMIC_FACTOR = 1.1
# What the mimic does not have: sums in fp32, exponentials and logarithms to 2^-22, partial rows of
# 16 bits.  With logits of hundreds of nats their last places count.
SLACK, SLACK_OF_FRAMES = 1e-4, 2.5e-3
# The exported function's, in order (dsl_kernels/smxx/record_entry.py).
ARGUMENTS = (
    "q", "cache", "indices", "topk_length", "attn_sink", "work_items", "part_begin", "split_begin",
    "units", "row_limits", "out", "lse", "o_accum", "lse_accum", "softmax_scale", "lse_factor",
    "empty_lse", "may_split",
)  # fmt: skip
STYLES = ("plain", "std3", "std30", "swings", "equal", "rope", "groups", "scales")


@dataclass(frozen=True)
class RecordShape(SparseShape):
    """``SparseShape`` of a cache of rows.

    Attributes:
        layout: ``split``, rows behind rows; ``padded``, at multiples of 672 bytes; ``packed``, pages
            of three caches in turn.
        style: of the numbers, one of ``STYLES``.
        powers: whether scales are powers of two.
        padding: what heads from ``heads - padded`` on hold instead of queries.
        padded: how many those are.
    """

    powers: bool = False
    padded: int = 0
    padding: float = 0.0


def poisoned_rows(pages: int, page_size: int, layout: str) -> Tensor:
    """(pages, P, 656) u8, every byte 0xFF."""
    if layout == "padded":
        return torch.full((pages, page_size, 672), 0xFF, dtype=torch.uint8)[..., :ROW_BYTES]
    caches = 3 if layout == "packed" else 1
    blocks = torch.full((pages, caches, page_size * ROW_BYTES), 0xFF, dtype=torch.uint8)
    return blocks[:, caches // 2].unflatten(1, (page_size, ROW_BYTES))


def quantised(c: Tensor, r: Tensor, powers: bool) -> Tensor:
    """c (n, 512), r (n, 64) -> rows (n, 656) u8."""
    groups = c.float().unflatten(1, (GROUPS, GROUP))
    scale = (groups.abs().amax(-1) / E4M3_MAX).clamp_min(LEAST_SCALE)
    if powers:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    content = (groups / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    rows = torch.empty(len(c), ROW_BYTES, dtype=torch.uint8)
    rows[:, :SCALES_AT] = content.view(torch.uint8).flatten(1)
    rows[:, SCALES_AT:ROPE_AT] = scale.contiguous().view(torch.uint8)
    rows[:, ROPE_AT:] = r.bfloat16().contiguous().view(torch.uint8)
    return rows


class RecordJob(SparseJob):
    """One sparse decode over rows, 0xFF wherever nobody names a token; ``shape`` is a
    ``RecordShape``."""

    shape: RecordShape
    argument_names = ARGUMENTS

    # ---------------------------------------------------------------- inputs

    def _fill(self) -> None:
        shape = self.shape
        pages = -(-max(sum(shape.counts), 1) // shape.page_size) + 2
        self.cache = poisoned_rows(pages, shape.page_size, shape.layout)
        self.planes = (self.cache,) * 3  # whose first two extents ``_idle`` asks for
        order = torch.randperm(pages * shape.page_size)
        self.indices = torch.full((shape.tokens, shape.topk), INT_MAX, dtype=torch.int32)
        q = torch.randn(shape.tokens, shape.heads, HEAD_DIM_QK)
        if shape.style == "plain":
            q = q.clamp(-1, 1)
        for i, count in enumerate(shape.counts):
            slots, order = order[:count], order[count:]
            q[i], rows = self._numbers(q[i], count)
            self.cache[slots // shape.page_size, slots % shape.page_size] = rows
            self.indices[i, :count] = slots.int()
            if not shape.dense:
                self._idle(i, count)
        q = q.bfloat16()
        if shape.padded:
            q[:, shape.heads - shape.padded :] = shape.padding
        b_q = 1 if shape.begins is not None else len(shape.lengths)
        self.q = q.view(b_q, shape.s_q, shape.heads, HEAD_DIM_QK)

    def _numbers(self, q: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """(q, rows (n, 656)) of a query token's heads and list."""
        style = self.shape.style
        size = torch.exp(0.3 * torch.randn(n, 1))
        if style == "plain":
            size = size * 0.1
        c, r = size * (torch.randn(n, KV_LORA_RANK) + 0.3), torch.randn(n, 64)
        if style.startswith("std") and n > 1:
            spread = (q @ torch.cat((c, r), 1).T * HEAD_SCALE).std(1, keepdim=True)
            q = q * (float(style[3:]) / spread)
        elif style == "swings":
            mean = q[:, :KV_LORA_RANK].mean(0)
            tile = torch.arange(n) // self.spec.token_tile
            unit = SWING / (HEAD_SCALE * float(mean.square().sum()))
            c = c + (torch.tensor([0.0, 1.0, -1.0, 0.5, -0.5, 1.1])[tile % 6] * unit)[:, None] * mean
        elif style == "equal" and n:
            q = torch.cat((c, r), 1)[torch.randint(n, (len(q),))]
        elif style == "rope":
            r = 1e3 * torch.sign(r)
        elif style == "groups":
            powers = torch.tensor([0.0, -20.0, -10.0, -5.0])
            order = torch.stack([torch.randperm(GROUPS) for _ in range(n)]) if n else torch.empty(0, 4).long()
            c = c * torch.exp2(powers[order]).repeat_interleave(GROUP, 1)
        rows = quantised(c, r, self.shape.powers)
        if style == "scales":
            self._odd_scales(rows)
        return q, rows

    @staticmethod
    def _odd_scales(rows: Tensor) -> None:
        """Of the tokens some have scales of 0 over NaN bytes, one or all, some the least there is, some
        2^20; of every other list all have tiny ones."""
        n = len(rows)
        scales = rows[:, SCALES_AT:ROPE_AT].contiguous().view(torch.float32)
        if n % 2:
            scales *= 2.0**-118 / scales.amax(1, keepdim=True).clamp_min(LEAST_SCALE)
        else:
            kind = torch.randint(6, (n,))
            scales[kind == 0] = 0.0
            scales[kind == 1, 1] = 0.0
            scales[kind == 2] = LEAST_SCALE
            rows[kind == 0, :SCALES_AT] = 0x7F
            rows[kind == 1, GROUP : 2 * GROUP] = 0xFF
        rows[:, SCALES_AT:ROPE_AT] = scales.view(torch.uint8)

    # ---------------------------------------------------------------- calls

    def arguments(self) -> dict[str, Any]:
        shape = self.shape
        b_q = self.q.shape[0]
        out = torch.full((b_q, shape.s_q, shape.heads, KV_LORA_RANK), math.nan)
        slots = max(2 * shape.parts, self.plan.split_begin[-1])
        return {
            "q": self.q, "cache": self.cache, "indices": self.indices,
            "topk_length": self.lengths, "attn_sink": self.sink,
            "out": out.to(DTYPES[self.spec.out_dtype]),
            "lse": torch.full((b_q, shape.heads, shape.s_q), math.nan),
            "o_accum": torch.full((slots, shape.heads, PARTIAL_ROW), math.nan).half(),
            "lse_accum": torch.full((slots, shape.heads), math.nan),
            **self._planned().arguments(), "softmax_scale": HEAD_SCALE, **NATURAL,
            "may_split": int(self.plan.split_begin[-1] > 0),
        }  # fmt: skip

    # ---------------------------------------------------------------- truth

    def call(self) -> RecordCall:
        """The inputs as the reference takes them: no padded heads, no query tokens of nobody."""
        n, h = self.shape.covered, self.shape.heads - self.shape.padded
        return RecordCall(
            self.q.flatten(0, 1)[:n, :h], self.cache, self.indices[:n], self.counts[:n], HEAD_SCALE,
            self.sink[:h] if self.shape.sink else None,
        )  # fmt: skip

    def errors(self, result: tuple[Tensor, Tensor]) -> DenseErrors:  # type: ignore[override]
        """What ``run`` returned: elements by FlashMLA's gates, each query token's relative L2 by the
        mimic's."""
        call = self.call()
        n, h, _ = call.q.shape
        out = result[0].flatten(0, 1)[:n, :h]
        lse = result[1].transpose(0, 1).flatten(1)[:h, :n]
        truth, truth_lse = record_decode_reference(call)
        few = self.spec.row_tile <= GROUP_SUM_ROWS
        mimic = record_decode_mimic(call, few)[0].to(out.dtype)
        missed = dense_job._outside(out, truth, OUT_GATE)
        missed_lse, excused = self._lse_outside(call, lse, truth_lse)
        slack = SLACK if self.shape.style == "plain" else SLACK_OF_FRAMES
        pairs = [
            (metrics.relative_l2(a, c), MIMIC_FACTOR * metrics.relative_l2(b, c) + slack)
            for a, b, c in zip(out, mimic, truth, strict=True)
        ]
        error, allowed = max(pairs, key=lambda x: x[0] / x[1] if x[0] == x[0] else math.inf)
        # an absolute gate is met by anything where values are large or tiny: FlashMLA's are of order 1
        outside = int(missed_lse.sum()) + (int(missed.sum()) if self.shape.style == "plain" else 0)
        cosine = max(metrics.one_minus_cosine(a, b) for a, b in zip(out, truth, strict=True))
        return DenseErrors(
            outside=outside, cosine=cosine if self.shape.style == "plain" else min(cosine, COSINE_GATE),
            error=error, allowed=allowed, lse_error=metrics.lse_error(lse, truth_lse),
            by_condition=excused,
            by_condition_allowed=dense_job.by_condition_allowed(lse.numel()),
            where=tuple(
                dense_job._places("out", out, truth, missed, range(n), 0)
                + dense_job._places("lse", lse, truth_lse, missed_lse, range(n), 1)
            ),
        )  # fmt: skip

    def _lse_outside(self, call: RecordCall, lse: Tensor, truth: Tensor) -> tuple[Tensor, int]:
        """As ``dense_job.lse_outside``; where K is rounded (more than 32 rows, free scales) a row of
        few tokens, or that few dominate, may be off by the rounding of its largest logit's products."""
        missed, excused = dense_job.lse_outside(lse, truth, lambda of: magnitudes_of(call, of))
        if self.spec.row_tile > GROUP_SUM_ROWS and not self.shape.powers:
            peaked = torch.tensor(self.shape.style != "plain")
            short = (peaked | (self.counts[: len(call.q)] < SHORT)).expand_as(missed)
            size = magnitudes_of(call, missed & short)
            missed = missed & ~(short & ((lse.double() - truth).abs() <= RATIO_ROUNDING * size))
        return missed, excused


def some(spec: Any, shapes: Sequence[RecordShape]) -> list[RecordJob]:
    """A job of each shape."""
    return [RecordJob(spec, shape) for shape in shapes]
