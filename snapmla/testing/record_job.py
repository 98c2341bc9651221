"""Sparse decodes over caches of bytes at the level of the ABI: inputs, one call, and its errors."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.dims import KV_LORA_RANK, PARTIAL_ROW, QK_ROPE_HEAD_DIM, TOKEN_TILE
from dsl_kernels.formats.ds_mla import FORMAT as DS_MLA
from dsl_kernels.formats.ds_mla import LEAST_SCALE
from dsl_kernels.formats.format import ZEROS, Format
from dsl_kernels.formats.registered import FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla.cache import byte_cache
from snapmla.testing import dense_job, metrics, record_qk
from snapmla.testing.byte_records import quantize_tokens
from snapmla.testing.dense_job import OUT_GATE, DenseErrors
from snapmla.testing.record_reference import (
    RecordCall,
    magnitudes_of,
    record_decode_mimic,
    record_decode_reference,
)
from snapmla.testing.sparse_job import HEAD_SCALE, INT_MAX, SWING, SparseJob, SparseShape
from snapmla.testing.workloads.call import DTYPES, NATURAL

ROUNDS_QUERIES = "mix8"  # pipeline whose content products are FP8 ones of a rounded query
# Row tiles up to this one sum Q.K by groups (dsl_kernels/sm90/bytes16/mix16_softmax.py); others
# round K, and the LSE of a row that one token makes, or less than SHORT, shows it.
GROUP_SUM_ROWS, SHORT, RATIO_ROUNDING = 32, 17, 2.0**-12
MIMIC_FACTOR = 1.1
# What the mimic does not have: sums in fp32, exponentials and logarithms to 2^-22, partial rows of
# 16 bits.  With logits of hundreds of nats their last places count.
SLACK, SLACK_OF_FRAMES = 1e-4, 2.5e-3
# The exported function's, in order (dsl_kernels/entry/entries.py).
ARGUMENTS = (
    "q", "q_rope", "cache", "indices", "topk_length", "attn_sink", "work_items", "part_begin",
    "split_begin", "units", "row_limits", "cu_seqlens_q", "out", "lse", "o_accum", "lse_accum",
    "softmax_scale", "lse_factor", "empty_lse", "may_split", "witness", "q_stride",
    "q_rope_stride",
)  # fmt: skip
# And where there may be two lists (dsl_kernels/entry/entries.py).
TWO_LISTS = (*ARGUMENTS[:5], "extra_cache", "extra_indices", "extra_length", *ARGUMENTS[5:])
STYLES = ("plain", "std3", "std30", "swings", "equal", "rope", "groups", "scales")
HEIGHTS = (0.0, 1.0, -1.0, 0.5, -0.5, 1.1)  # of the tiles of ``swings``, in turn
GROUP_POWERS = (0.0, -20.0, -10.0, -5.0)  # log2 of the groups' sizes in ``groups``, in turn


@dataclass(frozen=True)
class RecordShape(SparseShape):
    """``SparseShape`` of a cache of rows.

    Attributes:
        layout: ``split``, rows behind rows; ``padded``, 16 bytes apart; ``packed``, pages of three
            caches in turn.  Where kernels take pages whole, of two caches, ``padded`` is a page at
            a multiple of 576 bytes, or 512.
        style: of the numbers, one of ``STYLES``: FlashMLA's own; logits of standard deviation 3 or
            30; swings of 200 nats between tiles; queries that equal a token; RoPE of 1e3; groups
            2^20 apart; scales of 0, 2^-126 and on.
        powers: whether scales are powers of two.
        two_tensors: whether content and RoPE of queries are a tensor each, where the cache has RoPE
            apart.
        extra_topk, extra_lengths, extra_page_size: of a second list and its cache; of no entries
            there is none.
    """

    powers: bool = False
    two_tensors: bool = False
    extra_topk: int = 0
    extra_lengths: tuple[int, ...] = ()
    extra_page_size: int = 64

    @property
    def planned(self) -> tuple[tuple[int, ...], int]:
        """Lengths and width of both lists as one: the second begins behind the first's tiles."""
        if not self.extra_topk:
            return super().planned
        first = -(-self.topk // TOKEN_TILE) * TOKEN_TILE
        own = (first + min(max(n, 0), self.extra_topk) for n in self.extra_lengths)
        return tuple(own), first + self.extra_topk

    @property
    def second(self) -> SparseShape:
        """The second list, as a shape of one list."""
        return replace(
            self, topk=self.extra_topk, lengths=self.extra_lengths, extra_topk=0,
            page_size=self.extra_page_size,
        )  # fmt: skip


def poisoned_rows(pages: int, page_size: int, layout: str, record: Format = DS_MLA) -> Tensor:
    """(pages, P, bytes of a token) u8, every byte 0xFF."""
    token, whole = record.token_bytes, record.two_lists
    if layout == "padded" and not whole:
        return torch.full((pages, page_size, token + 16), 0xFF, dtype=torch.uint8)[..., :token]
    unit = (max(record.page_multiple, 512) if layout == "padded" else 16) if whole else 1
    caches, size = 3 if layout == "packed" else 1, -(-page_size * token // unit) * unit
    blocks = torch.full((pages, caches, size), 0xFF, dtype=torch.uint8)
    return blocks[:, caches // 2, : page_size * token].unflatten(1, (page_size, token))


class RecordJob(SparseJob):
    """One sparse decode over a cache of bytes, 0xFF wherever nobody names a token; ``shape`` is a
    ``RecordShape``."""

    shape: RecordShape
    cache: Tensor
    indices: Tensor
    extra: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def argument_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the exported function's arguments, in order."""
        return TWO_LISTS if self.record.two_lists else ARGUMENTS

    @property
    def record(self) -> Format:
        """The cache's format."""
        return FORMATS[self.spec.cache_dtype]

    # ---------------------------------------------------------------- inputs

    def _fill(self) -> None:
        shape = self.shape
        order = self._new_list(shape)
        q = torch.randn(shape.tokens, shape.heads, self.record.channels)
        if shape.extra_topk:
            first = self.cache, self.indices
            self._fill_list(shape.second, self._new_list(shape.second), q)
            counts = torch.tensor(shape.second.counts, dtype=torch.int32)
            self.extra = self.cache, self.indices, counts
            self.cache, self.indices = first
        self._fill_list(shape, order, q)
        b_q = 1 if shape.begins is not None else len(shape.lengths)
        self.q16 = q.bfloat16().view(b_q, shape.s_q, shape.heads, self.record.channels)

    def _new_list(self, shape: SparseShape) -> Tensor:
        """Poisoned ``cache`` and idle ``indices`` of one list; returns its slots in some order."""
        pages = -(-max(sum(shape.counts), 1) // shape.page_size) + 2
        self.cache = poisoned_rows(pages, shape.page_size, shape.layout, self.record)
        self.indices = torch.full((shape.tokens, shape.topk), INT_MAX, dtype=torch.int32)
        return torch.randperm(pages * shape.page_size)

    def _fill_list(self, shape: SparseShape, order: Tensor, q: Tensor) -> None:
        """Tokens of one list; queries as the style wants them, in place."""
        self.planes = (self.cache,) * 3  # whose first two extents ``_idle`` asks for
        for i, count in enumerate(shape.counts):
            slots, order = order[:count], order[count:]
            q[i], c, r = self._numbers(q[i], count)
            content, rope, scales = quantize_tokens(self.record, c, r, self.shape.powers)
            content, scales = content.view(torch.uint8), scales.view(torch.uint8)
            if shape.style == "scales":
                scales = self._odd_scales(content, scales)
            self._store(slots, content, rope, scales)
            self.indices[i, :count] = slots.int()
            if not shape.dense:
                self._idle(i, count)

    def _store(self, slots: Tensor, *values: Tensor) -> None:
        """Content, RoPE and scales, two of them as bytes, to their places."""
        fields = byte_cache.fields_of(self.record, self.cache[:, :, None])
        for field, value in zip(fields, values, strict=True):
            own = field if field.dtype == value.dtype else field.view(torch.uint8)
            own[slots // field.shape[1], slots % field.shape[1]] = value

    def _numbers(self, q: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """(q (h, channels of K), c (n, channels of content), r (n, 64)) of a query token's heads
        and list."""
        style, size = self.shape.style, torch.exp(0.3 * torch.randn(n, 1))
        channels, groups = self.record.content.count, self.record.content.count // self.record.group
        c = size * (torch.randn(n, channels) + 0.3)
        r = torch.randn(n, self.record.rope_channels)
        if style in ("plain", "scales"):
            return q.clamp(-1, 1), c / 10, r / 10
        if style.startswith("std") and n > 1:
            spread = (q @ torch.cat((c, r), 1).T * HEAD_SCALE).std(1, keepdim=True)
            q = q * (float(style[3:]) / spread)
        elif style == "swings":
            mean = q[:, :channels].mean(0)
            tile = torch.arange(n) // self.spec.token_tile
            unit = SWING / (HEAD_SCALE * float(mean.square().sum()))
            c = c + (torch.tensor(HEIGHTS)[tile % len(HEIGHTS)] * unit)[:, None] * mean
        elif style == "equal" and n:
            q = torch.cat((c, r), 1)[torch.randint(n, (len(q),))]
        elif style == "rope":
            r = 1e3 * torch.sign(r)
        elif style == "groups":
            order = torch.rand(n, groups).argsort(1)
            powers = torch.tensor(GROUP_POWERS * 4)[:groups]
            c = c * torch.exp2(powers[order]).repeat_interleave(self.record.group, 1)
        return q, c, r

    def _odd_scales(self, content: Tensor, scales: Tensor) -> Tensor:
        """A list of odd length has tiny scales, from 2^-118 down; of another some tokens have
        the least scales there are, one or all: 0, over NaN bytes where that says zeros, or the
        least number."""
        n, group = len(content), self.record.group
        if self.record.powers:
            if n % 2:
                return (scales.int() - scales.int().amax(1, keepdim=True) + 9).clamp_min(0).byte()
            kind = torch.randint(6, (n,))
            scales[kind == 0] = 0
            scales[kind == 1, 1] = 0
            scales[kind == 2] = 1
            return scales
        values = scales.view(torch.float32)
        if n % 2:
            values *= 2.0**-118 / values.amax(1, keepdim=True)
        else:
            kind = torch.randint(6, (n,))
            values[kind == 0] = 0.0
            values[kind == 1, 1] = 0.0
            values[kind == 2] = LEAST_SCALE
            if self.record.zero_scale == ZEROS:
                content[kind == 0] = 0x7F
                content[kind == 1, group : 2 * group] = 0xFF
        return values.view(torch.uint8)

    # ---------------------------------------------------------------- calls

    def arguments(self) -> dict[str, Any]:
        shape = self.shape
        b_q = self.q16.shape[0]
        out = torch.full((b_q, shape.s_q, shape.heads, KV_LORA_RANK), math.nan)
        slots = max(2 * shape.parts, self.plan.split_begin[-1])
        nothing = self.cache, self.indices[:, :0], torch.empty(0, dtype=torch.int32)
        extra_cache, extra_indices, _ = self.extra or nothing
        lists = [x.unflatten(0, (b_q, shape.s_q)) for x in (self.indices, extra_indices)]
        given = {
            **self._query(), "cache": self.cache, "indices": lists[0],
            "extra_cache": extra_cache, "extra_indices": lists[1],
            "extra_length": torch.tensor(shape.extra_lengths, dtype=torch.int32),
            "topk_length": self.lengths, "attn_sink": self.sink,
            "out": out.to(DTYPES[self.spec.out_dtype]),
            "lse": torch.full((b_q, shape.heads, shape.s_q), math.nan),
            "o_accum": torch.full((slots, shape.heads, PARTIAL_ROW), math.nan).half(),
            "lse_accum": torch.full((slots, shape.heads), math.nan),
            **self._planned().arguments(), "softmax_scale": HEAD_SCALE, **NATURAL,
            "may_split": int(self.plan.split_begin[-1] > 0), "witness": 0,
        }  # fmt: skip
        return {name: given[name] for name in self.argument_names}

    def _query(self) -> dict[str, Any]:
        """Arguments of the query: one tensor, or with ``two_tensors``, where RoPE is apart, content
        and RoPE in one each, rows with gaps, NaN in them."""
        q, channels = self.q16, self.record.channels
        if not self.shape.two_tensors or self.record.rope is None:
            return {"q": q, "q_rope": q, "q_stride": channels, "q_rope_stride": channels}
        content, wide = channels - QK_ROPE_HEAD_DIM, 192
        rows = torch.full((*q.shape[:-1], content + 8), math.nan, dtype=q.dtype)[..., :content]
        rope = torch.full((*q.shape[:-1], wide), math.nan, dtype=q.dtype)[..., -QK_ROPE_HEAD_DIM:]
        rows.copy_(q[..., :content])
        rope.copy_(q[..., content:])
        return {"q": rows, "q_rope": rope, "q_stride": content + 8, "q_rope_stride": wide}

    # ---------------------------------------------------------------- truth

    def call(self) -> RecordCall:
        """The inputs as the reference takes them, without query tokens of nobody."""
        n = self.shape.covered
        return RecordCall(
            self.q16.flatten(0, 1)[:n], self.cache, self.indices[:n], self.counts[:n], HEAD_SCALE,
            self.sink if self.shape.sink else None, self.record, self._extra_of(n),
        )  # fmt: skip

    def _extra_of(self, n: int) -> tuple[Tensor, Tensor, Tensor] | None:
        if self.extra is None:
            return None
        cache, *lists = self.extra
        indices, counts = (x[:n] for x in lists)
        return cache, indices, counts

    def errors(self, result: tuple[Tensor, Tensor]) -> DenseErrors:  # type: ignore[override]
        """Errors of ``run``'s (out, lse), LSE to base e, by ``record_errors``."""
        call = self.call()
        n = len(call.q)
        out, lse = result[0].flatten(0, 1)[:n], result[1].transpose(0, 1).flatten(1)[:, :n]
        return self._errors(call, out, lse)

    def _errors(self, call: RecordCall, out: Tensor, lse: Tensor) -> DenseErrors:
        """Errors of the query tokens of ``call``: out (tokens, h, 512) and lse (h, tokens)."""
        return record_errors(
            self.spec, call, out, lse, plain=self.shape.style == "plain",
            powers=self.shape.powers or self.record.powers,
        )  # fmt: skip


def record_errors(
    spec: VariantSpec, call: RecordCall, out: Tensor, lse: Tensor, *, plain: bool, powers: bool
) -> DenseErrors:
    """Results (tokens, h, 512), natural LSE (h, tokens), against fp64 on the stored scales; of
    ``mix8`` on the query as that rounds it, within what its sums may do (``record_qk``).

    ``error`` is of the query token that comes nearest to what its mimic allows, ``cosine`` the
    worst of all.

    Args:
        plain: whether the numbers are FlashMLA's own: elements of ``out`` are held to its gate,
            whose absolute half is made for such.
        powers: whether all scales are powers of two.
    """
    n = len(call.q)
    sums = None
    if spec.pipeline == ROUNDS_QUERIES:
        sums = record_qk.bounds(call)
        call = call._replace(q=record_qk.rounded(call.q))
    truth, truth_lse = record_decode_reference(call)
    exact_k = sums is not None or spec.row_tile <= GROUP_SUM_ROWS
    mimic, _ = record_decode_mimic(call, exact_k and not call.record.powers)
    slack = SLACK if plain else SLACK_OF_FRAMES
    more = [0.0] * n if sums is None else sums.out.tolist()
    pairs = [
        (metrics.relative_l2(a, c), MIMIC_FACTOR * metrics.relative_l2(b, c) + slack + d)
        for a, b, c, d in zip(out, mimic.to(out.dtype), truth, more, strict=True)
    ]
    error, allowed = max(pairs, key=lambda x: math.inf if math.isnan(x[0]) else x[0] / x[1])
    missed = dense_job.out_of_gate(out, truth, OUT_GATE) & (plain and sums is None)
    if sums is None:
        rounds_k = spec.row_tile > GROUP_SUM_ROWS and not powers
        missed_lse, excused = _lse_outside(call, lse, truth_lse, rounds_k, plain)
    else:
        missed_lse, excused = ~sums.hold(lse, truth_lse), 0
    places = dense_job.named_places("out", out, truth, missed, range(n), 0)
    places += dense_job.named_places("lse", lse, truth_lse, missed_lse, range(n), 1)
    return DenseErrors(
        outside=int(missed.sum()) + int(missed_lse.sum()),
        cosine=max(metrics.one_minus_cosine(a, b) for a, b in zip(out, truth, strict=True)),
        error=error, allowed=allowed, lse_error=metrics.lse_error(lse, truth_lse),
        by_condition=excused,
        by_condition_allowed=dense_job.by_condition_allowed(lse.numel()),
        where=tuple(places),
    )  # fmt: skip


def _lse_outside(
    call: RecordCall, lse: Tensor, truth: Tensor, rounds_k: bool, plain: bool
) -> tuple[Tensor, int]:
    """Like ``dense_job.lse_outside``; where K is rounded, a row of few tokens, or that few
    dominate, may be off by the rounding of its largest logit's products."""
    missed, excused = dense_job.lse_outside(lse, truth, functools.partial(magnitudes_of, call))
    if rounds_k:
        few = call.counts < SHORT if plain else torch.ones_like(call.counts, dtype=torch.bool)
        asked = missed & few
        error = (lse.double() - truth).abs()
        missed = missed & ~(few & (error <= RATIO_ROUNDING * magnitudes_of(call, asked)))
    return missed, excused
