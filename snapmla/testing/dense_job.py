"""A decode over a 16-bit cache at the level of the ABI, its fp64 reference and FlashMLA's gates."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.dims import EXPONENT_CHANNELS, HEAD_DIM_QK, KV_LORA_RANK
from dsl_kernels.spec import VariantSpec
from snapmla.dense import new_workspace
from snapmla.runtime import variants
from snapmla.testing import metrics
from snapmla.testing.dense_reference import dense_decode_reference, logit_magnitudes
from snapmla.testing.plan_tables import PlanTables
from snapmla.testing.reference_plan import Queries, plan_reference

LN2 = math.log(2.0)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
SHAPES = {16: (7, 2), 32: (16, 2), 64: (20, 3), 128: (64, 2)}  # row tile: (heads, s_q)
SCALE = HEAD_DIM_QK**-0.5
# The exported function's, in order (dsl_kernels/entry/entries.py).
ARGUMENTS = (
    "q", "cache", "block_table", "cache_seqlens", "work_items", "part_begin", "split_begin",
    "units", "row_limits", "cu_seqlens_q", "out", "lse", "o_accum", "lse_accum", "softmax_scale",
    "causal", "lse_factor", "empty_lse", "may_split", "witness",
)  # fmt: skip
TILE = 64
P_LOG2_MAX, HEADROOM = 8.0, 15.0  # of the kernels' m_ref (dsl_kernels/sm90/online_softmax.py)
HALF_TOP = 15  # log2 of what the largest of 16 channels is below, as partial results store it

# FlashMLA's gates of its dense decode: an element is right by either, the cosine is of all.
OUT_GATE, LSE_GATE, COSINE_GATE = (8e-4, 2.01 / 128), (1e-6, 8.01 / 65536), 5e-6
# An LSE near 0 is what products leave that cancel, rounded as these are: it is right, too, if its
# error is small beside the sum of their magnitudes (``logit_magnitudes``).  Over 32768 rows of one
# token on an H200 it is 3.9 times 2^-24 of that sum at most, 4.0 times of FlashMLA's own kernel.
# Of these rows 3 need it, or 4: of a call's LSEs one in BY_CONDITION_ONE_IN may, and always
# BY_CONDITION_ALWAYS.
LSE_CONDITION = 8 * 2.0**-24
BY_CONDITION_ONE_IN, BY_CONDITION_ALWAYS = 1000, 2
PLACES = 3  # of elements outside that are named
# What the error may exceed that of the mimic by: ties of P that round the other way, tensor cores
# that cut sums instead of rounding them, partial results in 16 bits.
MIMIC_FACTOR, FP32_SLACK = 1.1, 2e-5


@dataclass(frozen=True)
class DenseErrors:
    """Errors of a dense decode against fp64 on the same 16-bit inputs.

    Attributes:
        outside: elements of out and lse outside of FlashMLA's gates, or NaN or infinite where the
            reference is not, or not NaN where it is; of the LSE's, those that their logits'
            condition does not make right.
        by_condition: elements of the LSE that this condition alone makes right (``LSE_CONDITION``);
            ``by_condition_allowed`` may be.
        cosine: 1 - cosine of the output.
        error: relative L2 of the output; ``allowed`` is 1.1 times that of the mimic (P in 16 bits)
            in the output's dtype, plus 2e-5; None where no mimic was asked.
        lse_error: largest absolute error of the LSE.
        where: the first elements outside, with value and reference.
    """

    outside: int
    cosine: float
    error: float
    allowed: float | None
    lse_error: float
    by_condition: int
    by_condition_allowed: int
    where: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        small = self.allowed is None or self.error <= self.allowed
        few = self.by_condition <= self.by_condition_allowed
        return self.outside == 0 and self.cosine <= COSINE_GATE and small and few

    def __str__(self) -> str:
        allowed = "" if self.allowed is None else f" (allowed {self.allowed:.2e})"
        where = f": {'; '.join(self.where)}" if self.where else ""
        return (
            f"relative L2 {self.error:.2e}{allowed}, LSE {self.lse_error:.1e}, "
            f"1 - cosine {self.cosine:.1e} (allowed {COSINE_GATE:.0e}), {self.outside} outside of "
            f"FlashMLA's gates, {self.by_condition} LSEs right by their logits' condition "
            f"(allowed {self.by_condition_allowed}){where}"
        )


def decode_errors(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    *,
    causal: bool = True,
    cu_seqlens_q: Tensor | None = None,
    row_seqlens: Tensor | None = None,
    by_sequence: bool = False,
) -> DenseErrors:
    """A decode's results, natural LSE, against fp64 by FlashMLA's gates and ``LSE_CONDITION``; rows
    of no sequence are not looked at.

    Args:
        q, kv, block_table, cache_seqlens, softmax_scale, causal, cu_seqlens_q, row_seqlens: as
            ``dense_decode_reference`` takes them.
        by_sequence: as kernels see several KV heads: sequence i reads KV head i modulo their number
            with all its query heads.
    """
    step = kv.shape[2] if by_sequence else 1
    pairs: list[tuple[Tensor, Tensor]] = []  # truth and result, of out and of lse in turn
    outside, by_condition, where = 0, 0, []
    for first in range(step):
        own = range(first, len(block_table), step)
        pool = kv[:, :, first : first + 1] if by_sequence else kv
        inputs = (q, pool, block_table, cache_seqlens, softmax_scale)
        rule: dict[str, Any] = {
            "causal": causal, "cu_seqlens_q": cu_seqlens_q, "row_seqlens": row_seqlens,
            "batches": own,
        }  # fmt: skip
        truth = dense_decode_reference(*inputs, **rule)
        ids, axis = _picked(own, cu_seqlens_q)
        got = out[ids], lse[:, ids] if axis else lse[ids]
        missed = out_of_gate(got[0], truth[0], OUT_GATE)
        magnitudes = functools.partial(logit_magnitudes, *inputs, **rule)
        missed_lse, excused = lse_outside(got[1], truth[1], magnitudes)
        outside += int(missed.sum()) + int(missed_lse.sum())
        by_condition += excused
        where += named_places("out", got[0], truth[0], missed, ids, 0)
        where += named_places("lse", got[1], truth[1], missed_lse, ids, axis)
        pairs += [(x.flatten(), y.flatten()) for x, y in zip(truth, got, strict=True)]
    truth_out, got_out = (torch.cat(side) for side in zip(*pairs[::2], strict=True))
    truth_lse, got_lse = (torch.cat(side) for side in zip(*pairs[1::2], strict=True))
    return DenseErrors(
        outside=outside,
        cosine=metrics.one_minus_cosine(got_out, truth_out),
        error=metrics.relative_l2(got_out, truth_out),
        allowed=None,
        lse_error=metrics.lse_error(got_lse, truth_lse),
        by_condition=by_condition,
        by_condition_allowed=by_condition_allowed(len(truth_lse)),
        where=tuple(where),
    )


def _picked(own: Sequence[int], cu_seqlens_q: Tensor | None) -> tuple[list[int], int]:
    """Sequences or, if queries are ragged, query tokens of ``own``; and the LSE's
    axis of them."""
    if cu_seqlens_q is None:
        return list(own), 0
    begin = cu_seqlens_q.tolist()
    return [t for i in own for t in range(begin[i], begin[i + 1])], 1


def dense_reference(
    q: Tensor,
    tokens: Sequence[Tensor],
    limits: Sequence[Tensor],
    scale: float,
    p_dtype: Any = None,
    tile: int = TILE,
) -> tuple[Tensor, Tensor]:
    """(out (b, s_q, h, 512), lse (b, h, s_q)) in fp64, of each sequence's tokens.

    Args:
        q: (b, s_q, h, 576).
        tokens: (n, h_kv, 576) a sequence; query heads j g ... (j + 1) g - 1 read KV head j.
        limits: (s_q,) a sequence: how many tokens a query token sees.
        p_dtype: P is rounded to it in units of the kernels' m_ref; None: the truth.
        tile: tokens of a block, behind which an m_ref may move.
    """
    b, s_q, h, _ = q.shape
    fp64: dict[str, Any] = {"dtype": torch.float64, "device": q.device}
    out = torch.zeros(b, s_q, h, KV_LORA_RANK, **fp64)
    lse = torch.full((b, h, s_q), -math.inf, **fp64)
    for i, k in enumerate(tokens):
        n, h_kv, _ = k.shape
        if not n:
            continue
        key = k.double().repeat_interleave(h // h_kv, 1)
        logits = torch.einsum("shd,nhd->shn", q[i].double(), key) * scale
        seen = torch.arange(n, device=q.device) < limits[i][:, None]
        logits = logits.masked_fill(~seen[:, None], -math.inf)
        m_ref = _m_refs(logits / LN2, None if p_dtype is None else tile)
        p = torch.exp2(logits / LN2 - m_ref)
        total = p.sum(-1)
        weights = p if p_dtype is None else p.to(p_dtype).double()
        # a token that no row sees may be anything
        value = key[..., :KV_LORA_RANK].masked_fill(~seen.any(0)[:, None, None], 0.0)
        o = torch.einsum("shn,nhd->shd", weights, value) / total[..., None]
        none = (~seen.any(-1))[:, None].expand(s_q, h)
        out[i] = o.masked_fill(none[..., None], 0.0)
        top = m_ref[..., -1]
        lse[i] = ((torch.log2(total) + top) * LN2).masked_fill(none, -math.inf).T
    return out, lse


def _m_refs(t: Tensor, tile: int | None) -> Tensor:
    """The reference (log2) of each row, ``t`` (s, h, n): the maximum; or where a kernel's
    m_ref ends that starts with the first tile and moves lazily."""
    if tile is None:
        top = t.amax(-1, keepdim=True)
        return torch.where(torch.isneginf(top), 0.0, top)
    m_ref = torch.full(t.shape[:-1], -1e30, dtype=t.dtype, device=t.device)
    for block in t.split(tile, -1):
        m = block.amax(-1)
        m_ref = torch.where(m > m_ref + HEADROOM, m - P_LOG2_MAX, m_ref)
    return m_ref[..., None]


def stored_partial(out: Tensor) -> Tensor:
    """Channels (..., 512), fp64, as partial results keep them: fp16 beneath an exponent of 16
    channels (dsl_kernels/combine/partials.py)."""
    groups = out.unflatten(-1, (-1, EXPONENT_CHANNELS))
    exponent = torch.frexp(groups.abs().amax(-1, keepdim=True)).exponent
    scaled = torch.ldexp(groups, HALF_TOP - exponent)
    return torch.ldexp(scaled.half().double(), exponent - HALF_TOP).flatten(-2)


def gate_violations(actual: Tensor, expected: Tensor, gate: tuple[float, float]) -> int:
    """Elements that neither an absolute nor a relative error makes right, and NaN or infinities
    that are not the reference's."""
    return int(out_of_gate(actual, expected, gate).sum())


def lse_outside(
    actual: Tensor, expected: Tensor, magnitudes: Callable[[Tensor], Tensor]
) -> tuple[Tensor, int]:
    """LSEs that are outside of the gate, and how many others only ``LSE_CONDITION`` makes right.

    Args:
        actual, expected: (...) floating point, natural.
        magnitudes: ``logit_magnitudes`` of a mask of LSEs; asked only where the other two bounds
            are missed.

    Returns:
        (bool (...), a count that is to be held to ``by_condition_allowed``).
    """
    missed = out_of_gate(actual, expected, LSE_GATE)
    if not bool(missed.any()):
        return missed, 0
    size, error = magnitudes(missed), (actual.double() - expected.double()).abs()
    # what is infinite, as of a token of -infinity, excuses nothing
    excused = missed & torch.isfinite(size) & (error <= LSE_CONDITION * size)
    return missed & ~excused, int(excused.sum())


def by_condition_allowed(elements: int) -> int:
    """Number of a call's ``elements`` LSEs that may be right by their logits' condition alone."""
    return max(BY_CONDITION_ALWAYS, elements // BY_CONDITION_ONE_IN)


def out_of_gate(actual: Tensor, expected: Tensor, gate: tuple[float, float]) -> Tensor:
    """Elements that ``gate_violations`` counts."""
    a, e = actual.double(), expected.double()
    special = ~torch.isfinite(a) | ~torch.isfinite(e)
    same = (a == e) | (torch.isnan(a) & torch.isnan(e))
    error = (a - e).abs()
    right = torch.where(special, same, (error <= gate[0]) | (error <= gate[1] * e.abs()))
    return ~right


def named_places(
    name: str, actual: Tensor, expected: Tensor, missed: Tensor, ids: Sequence[int], axis: int
) -> list[str]:
    """The first elements that are ``missed``; position x of ``axis`` is ``ids[x]`` in the result
    called ``name``."""
    texts = []
    for place in missed.nonzero()[:PLACES].tolist():
        value, truth = float(actual[tuple(place)]), float(expected[tuple(place)])
        place[axis] = ids[place[axis]]
        texts.append(f"{name}{place} is {value:.6e} for {truth:.6e}")
    return texts


class DenseJob:
    """One decode: ragged lengths, splits, NaN wherever no token is.

    Args:
        spec: the variant; its row tile picks heads and s_q.
        lengths: tokens per sequence.  parts: CTAs (or clusters) that share them.
        heads, s_q: None takes ``SHAPES``; with several KV heads, query heads of one.
        kv_heads: KV heads of the cache; each (sequence, KV head) is a sequence of the plan.
        planner: the plan_decode kernel; None plans with ``reference_plan``.
        amplitude: of the queries, or of each sequence's; large ones make peaked rows, whose maxima
            move.
        device: where ``run`` puts tensors; results come back to the CPU.
    """

    def __init__(
        self, spec: VariantSpec, lengths: Sequence[int] = (64, 0, 130, 1), parts: int = 2, *,
        heads: int | None = None, s_q: int | None = None, kv_heads: int = 1,
        planner: variants.Kernel | None = None,
        amplitude: float | Sequence[float] = 10.0, device: str = "cpu",
    ) -> None:  # fmt: skip
        usual = SHAPES[spec.row_tile]
        self.spec, self.parts, self.planner, self.device = spec, parts, planner, device
        self.heads, self.s_q, self.kv_heads = heads or usual[0], s_q or usual[1], kv_heads
        self.lengths = tuple(n for n in lengths for _ in range(kv_heads))
        dtype = DTYPES[spec.dtype]
        self.tokens = [self._sample(n, dtype) for n in lengths]
        self.cache, self.table = self._paged(lengths, dtype)
        b = len(self.lengths)
        each = torch.as_tensor(amplitude).expand(len(lengths)).repeat_interleave(kv_heads)
        q = each.view(b, 1, 1, 1) * torch.randn(b, self.s_q, self.heads, HEAD_DIM_QK)
        self.q = q.to(dtype)
        self.seqlens = torch.tensor(self.lengths, dtype=torch.int32)
        rows = -(-self.heads * self.s_q // spec.row_tile) * spec.row_tile
        self.queries = Queries(self.heads, self.s_q, rows, causal=True)
        self.capacity = self.table.shape[1] * spec.page_size
        self.plan = plan_reference(
            self.lengths, parts, spec.token_tile, 1, self.capacity, queries=self.queries
        )

    def _sample(self, n: int, dtype: torch.dtype) -> Tensor:
        """(n, KV heads, 576): biased channels, log-normal token amplitudes; a tenth of a standard
        deviation, for which FlashMLA's absolute gate is made."""
        amplitude = 0.1 * torch.exp(0.3 * torch.randn(n, self.kv_heads, 1))
        return (amplitude * (torch.randn(n, self.kv_heads, HEAD_DIM_QK) + 0.5)).to(dtype)

    def _paged(self, lengths: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cache, block_table): shuffled pages of padded rows, NaN and absurd ids elsewhere."""
        size = self.spec.page_size
        counts = [-(-n // size) for n in lengths]
        order = torch.randperm(sum(counts) + 2).tolist()
        pool = torch.full((len(order), size, self.kv_heads, HEAD_DIM_QK + 8), math.nan).to(dtype)
        cache = pool[..., :HEAD_DIM_QK]
        table = torch.full((len(lengths), max(counts) + 1), 2147480000, dtype=torch.int32)
        for i, count in enumerate(counts):
            pages = [order.pop() for _ in range(count)]
            table[i, :count] = torch.tensor(pages, dtype=torch.int32)
            table[i, count:-1] = -1
            for j, page in enumerate(pages):
                rows = self.tokens[i][j * size : (j + 1) * size]
                cache[page, : len(rows)] = rows
        return cache, table.repeat_interleave(self.kv_heads, 0)

    def arguments(self) -> dict[str, Any]:
        """Arguments of one call by name, on the CPU; results and workspace are new, full of NaN."""
        b, unit_rows = len(self.lengths), self.queries.unit_rows
        dtype = DTYPES[self.spec.dtype]
        out = torch.full((b, self.s_q, self.heads, KV_LORA_RANK), math.nan).to(dtype)
        lse = torch.full((b, self.heads, self.s_q), math.nan)
        return {
            "q": self.q, "cache": self.cache, "block_table": self.table,
            "cache_seqlens": self.seqlens, "out": out, "lse": lse,
            **self._workspace(2 * self.parts, unit_rows),
            **self._planned().arguments(),
            "softmax_scale": SCALE, "causal": 1, "lse_factor": LN2, "empty_lse": -math.inf,
            "may_split": int(self.plan.split_begin[-1] > 0), "witness": 0,
        }  # fmt: skip

    def run(self, kernel: variants.Kernel) -> tuple[Tensor, Tensor]:
        """(out, lse) of one call."""
        moved = {
            name: x.to(self.device) if isinstance(x, Tensor) else x
            for name, x in self.arguments().items()
        }
        kernel(*(moved[name] for name in ARGUMENTS))
        return moved["out"].cpu(), moved["lse"].cpu()

    def _workspace(self, slots: int, unit_rows: int) -> dict[str, Tensor]:
        """Partial results, NaN until they are written."""
        made = new_workspace(self.q, slots, unit_rows, self.spec.dtype)
        return dict(zip(("o_accum", "lse_accum"), (x.fill_(math.nan) for x in made), strict=True))

    def _planned(self) -> PlanTables:
        """The plan's tables, by the kernel or the reference."""
        if self.planner is None:
            return PlanTables.of(self.plan)
        tables = PlanTables.empty(len(self.lengths), self.parts, self.queries)
        tables.fill(
            self.planner, self.seqlens, self.queries, (self.capacity, self.spec.token_tile, 1, 0)
        )
        return tables

    def limits(self) -> list[Tensor]:
        """Tokens that each query token sees, a sequence."""
        behind = self.s_q - 1 - torch.arange(self.s_q)
        return [torch.clamp(n - behind, min=0) for n in self.lengths]

    def errors(self, result: tuple[Tensor, Tensor]) -> DenseErrors:
        """Errors of ``run``'s (out, lse) against the reference, which runs on the job's device."""
        out, lse = (x.to(self.device) for x in result)
        q = self.q.to(self.device)
        cache, table, seqlens = (x.to(self.device) for x in (self.cache, self.table, self.seqlens))
        errors = decode_errors(out, lse, q, cache, table, seqlens, SCALE, by_sequence=True)
        tokens = [
            x[:, j : j + 1].to(self.device) for x in self.tokens for j in range(self.kv_heads)
        ]
        limits = [limit.to(self.device) for limit in self.limits()]
        truth, _ = dense_reference(q, tokens, limits, SCALE)
        rounded = metrics.relative_l2(self._mimic(q, tokens, limits).to(out.dtype), truth)
        return replace(errors, allowed=MIMIC_FACTOR * rounded + FP32_SLACK)

    def _mimic(self, q: Tensor, tokens: Sequence[Tensor], limits: Sequence[Tensor]) -> Tensor:
        """(b, s_q, h, 512) with P in 16 bits and, of split sequences, partial results in fp16
        (dsl_kernels/combine/partials.py; of an fp16 cache they are fp32)."""
        dtype, tile = DTYPES[self.spec.dtype], self.spec.token_tile
        mimic, _ = dense_reference(q, tokens, limits, SCALE, dtype, tile)
        if dtype is torch.float16:
            return mimic
        for i, pieces in self._pieces().items():
            of_pieces = [
                dense_reference(
                    q[i : i + 1], [tokens[i][begin:end]], [(limits[i] - begin).clamp(min=0)],
                    SCALE, dtype, tile,
                )
                for begin, end in pieces
            ]  # fmt: skip
            out = torch.stack([stored_partial(out[0]) for out, _ in of_pieces])
            weights = torch.stack([lse[0].T for _, lse in of_pieces]).softmax(0)
            mimic[i] = (weights.nan_to_num()[..., None] * out).sum(0)
        return mimic

    def _pieces(self) -> dict[int, list[tuple[int, int]]]:
        """Tokens of each piece of the sequences that the plan splits."""
        tile, pieces = self.spec.token_tile, dict[int, list[tuple[int, int]]]()
        for sequence, begin, end, slot, *_ in self.plan.work_items:
            if slot >= 0:
                pieces.setdefault(sequence, []).append((begin * tile, end * tile))
        return pieces
