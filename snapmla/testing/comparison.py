"""Judgement of a decode's results: against fp64, and against a model of their rounding."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from dsl_kernels.spec import VariantSpec
from snapmla import checks
from snapmla.cache.paged import PagedKVCache
from snapmla.cache.quant import QuantizedQuery
from snapmla.dense import DecodePlan
from snapmla.runtime import variants
from snapmla.testing import metrics, reference, rounding

WIDE = "f16"  # pipeline with products in 16 bits
MIMIC_OF = {"sm_90a": rounding.MIMIC_HW_FULL, "sm_100a": rounding.MIMIC_BLACKWELL}
# What a decode's errors may exceed those of the mimic by.  Over all built variants they are 1.001
# times the mimic's at most: what rounds the other way is a P at a tie, where both are as wrong.
MIMIC_FACTOR = 1.1
FP32_SLACK = 2e-5  # where the mimic is exact: some ulp of an LSE of 16, ten times what is seen
# Relative L2 between kernel and mimic, beside the output's rounding, from P's at ties: once in some
# 10^5.  1.8e-4 at most in the checks here; one in a row of 64 tokens, of 2 rows in all, is 1e-3.
# One that moves its row by more than that, 3e-2 in a row of 55 tokens on an H200, once in 10^4
# comparisons, is looked for among those that are at a tie in the mimic.
FLIPS = 1e-3
# With two terms of P the second makes up for a tie of the first; what is seen, 1.1e-4 at most, is
# the 16 bits of partial results.
FLIPS_OF_TWO = 2.5e-4
# Beside a P of 16 bits show partial results of split sequences, which have as many, and P's own
# rounding where the kernel's lazy m_ref is not the mimic's: a token alone has P' = 2^8 there.
HALF_ROUNDING = 2.0**-11 / 3**0.5


def mimic_of(spec: VariantSpec, *, exact: bool = False) -> rounding.QuantConfig:
    """The rounding of a decode variant over the FP8 cache; ``exact``: on a software GPU whose
    matrix products are (``SOFTGPU_ACCUMULATE``)."""
    wide = spec.pipeline == WIDE
    if exact:
        mimic = replace(rounding.MIMIC_F16, qk_accumulation="exact") if wide else rounding.MIMIC
    else:
        mimic = rounding.MIMIC_F16 if wide else MIMIC_OF[spec.arch]
    return blocks_of(spec, replace(mimic, p_terms=spec.p_terms))


def blocks_of(spec: VariantSpec, mimic: rounding.QuantConfig) -> rounding.QuantConfig:
    """``mimic`` with the blocks of P of a decode variant: its tiles."""
    return replace(mimic, p_block=spec.token_tile, promote_tokens=spec.token_tile)


@dataclass(frozen=True)
class QkErrors:
    """Errors of a decode that Q.K's sums alone cause, and the error that would remain.

    The sums err as the tensor core's accumulator cuts bits off.

    Attributes:
        error: relative L2 to fp64 of attention by the tensor core's logits, all else exact.
        lse_error: the largest of its errors of LSE, with its sign.
        rest: relative L2 of the mimic with exact logits, in the output's dtype: what would remain.

    Raises:
        Nothing: it holds numbers.

    Source: our own.
    """

    error: float
    lse_error: float
    rest: float

    def __str__(self) -> str:
        return (
            f"Q.K's sums alone {self.error:.2e} (LSE {self.lse_error:+.1e}), "
            f"with exact logits {self.rest:.2e} would remain"
        )


@dataclass(frozen=True)
class DecodeErrors:
    """Errors of a decode against fp64 on the stored inputs, and what the rounding alone explains.

    Attributes:
        error: relative L2 of the output.
        allowed: 1.1 times that of the mimic (FP8 P, matrix products as the tensor core accumulates
            them) in the output's dtype, plus 2e-5; with a P of 16 bits also its rounding and that
            of partial results.
        lse_error: largest absolute error.
        lse_allowed: 1.1 times the mimic's, plus 2e-5.
        apart: relative L2 of the output to the mimic.  It sees what is small beside FP8 P.  Where
            it would be more than allowed, it is to the nearest of the mimics whose P's at ties are
            rounded one way or the other.
        apart_allowed: 1.1 times the rounding to the output's dtype with ``FLIPS``, 1e-3
            (``FLIPS_OF_TWO``, 2.5e-4, for two terms of P).
        flipped: how many P's that one rounds the other way.
        qk: how much of this is Q.K's; None: not asked for (``decode_errors(plan=)``).

    Raises:
        Nothing: it holds numbers.

    Source: our own.
    """

    error: float
    allowed: float
    lse_error: float
    lse_allowed: float
    apart: float
    apart_allowed: float
    flipped: int = 0
    qk: QkErrors | None = None

    @property
    def qk_share(self) -> float | None:
        """Share of Q.K's sums in the squared ``error``, 0 to 1; None without ``qk``."""
        if self.qk is None:
            return None
        return min(1.0, (self.qk.error / self.error) ** 2) if self.error else 0.0

    @property
    def right(self) -> bool:
        """True if it is what the kernel is built to give; ``error`` says how exact that is."""
        return (
            self.error <= self.allowed
            and self.lse_error <= self.lse_allowed
            and self.apart <= self.apart_allowed
        )

    def __str__(self) -> str:
        text = (
            f"relative L2 {self.error:.2e} (allowed {self.allowed:.2e}), "
            f"LSE {self.lse_error:.1e} (allowed {self.lse_allowed:.1e}), "
            f"to the mimic {self.apart:.1e} (allowed {self.apart_allowed:.1e})"
        )
        if self.flipped:
            text += f", {self.flipped} P at ties rounded the other way"
        return text if self.qk is None else f"{text}; {self.qk}"


def decode_errors(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: QuantizedQuery,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    softmax_scale: float,
    *,
    plan: DecodePlan | None = None,
    causal: bool = True,
    cu_seqlens_q: torch.Tensor | None = None,
    row_seqlens: torch.Tensor | None = None,
    batches: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    config: rounding.QuantConfig | None = None,
) -> DecodeErrors:
    """Compares ``snapmla.decode``'s results with fp64 on the stored bytes (``snapmla.reference``).

    The tolerance is the error that a model of the kernel's rounding, the mimic, has on the same
    bytes.  ``right`` therefore means as built.  How exact that is depends on the inputs: see
    ``error``, and with ``plan`` how much of it is Q.K's (docs/numerics.md, "Q.K's sums").

    Args:
        out: what ``decode`` returned, bfloat16 or float32 (b, s_q, h, 512), or (total_q, h, 512).
        lse: float32 (b, h, s_q), or (h, total_q), to base e; -inf for rows that see no token.
        q, cache, softmax_scale, causal: as given to ``decode``.
        block_table: int32 or int64 (b, width).
        cache_seqlens: int32 or int64 (b,).
        plan: that of the call: its kernel's terms of P (``accuracy``) and architecture choose the
            mimic, and Q.K's share of the error is told.  None: one term on Hopper, no share.
        cu_seqlens_q: int32 (b + 1,), as given to the plan; rows of no sequence are not compared.
        row_seqlens: int32 (b, s_q) or (total_q,), as given to the plan.
        batches, heads: compare only these; None: all.
        config: another mimic than the plan's.

    Returns:
        The errors; ``str`` of them is one line.

    Raises:
        TypeError, ValueError: the plan is no DecodePlan, or of a 16-bit cache; a ragged plan's
            ``cu_seqlens_q``, or its ``row_seqlens``, is missing.

    Source: our own; the mimic's rounding is told in docs/numerics.md.
    """
    if plan is not None:
        _check_plan(plan, cu_seqlens_q, row_seqlens)
    config = config or _mimic_of(plan)
    run = functools.partial(
        reference.mla_decode_reference,
        q.nope, q.rope, q.scale, cache.content, cache.rope, cache.named_tensors["scale"],
        block_table, cache_seqlens, softmax_scale, causal=causal, cu_seqlens_q=cu_seqlens_q,
        row_seqlens=row_seqlens, batches=batches, heads=heads,
    )  # fmt: skip
    found = _picked(out, lse, cu_seqlens_q, batches, heads)
    return errors_of(run, *found, config, share_of_qk=plan is not None)


def errors_of(
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    out: torch.Tensor,
    lse: torch.Tensor,
    config: rounding.QuantConfig,
    *,
    share_of_qk: bool = False,
) -> DecodeErrors:
    """Compares results with those of a reference.

    Args:
        run: (config=, moves=) -> (out, lse) of it in fp64, as ``reference.mla_decode_reference``.
        out, lse: what a kernel gave, in the reference's shapes.
        config: the rounding that is allowed.
        share_of_qk: whether to work out Q.K's share, too.
    """
    truth, truth_lse = run(config=rounding.FP64)
    mimic, mimic_lse = run(config=config)
    rounded = mimic.to(out.dtype)
    flips = FLIPS if config.p_terms == 1 else FLIPS_OF_TWO
    half = HALF_ROUNDING if config.p_dtype == "f16" else 0.0
    apart, flipped = metrics.relative_l2(out, mimic), 0
    apart_allowed = MIMIC_FACTOR * math.hypot(metrics.relative_l2(rounded, mimic), flips)
    if not apart <= apart_allowed:
        moves: list[reference.Move] = []
        run(config=config, moves=moves)
        nearest, flipped = _nearest(out, mimic, moves)
        apart = metrics.relative_l2(out, nearest)
    qk = _qk_errors(run, config, (truth, truth_lse), out.dtype) if share_of_qk else None
    return DecodeErrors(
        error=metrics.relative_l2(out, truth),
        allowed=MIMIC_FACTOR * math.hypot(metrics.relative_l2(rounded, truth), half) + FP32_SLACK,
        lse_error=metrics.lse_error(lse, truth_lse),
        lse_allowed=MIMIC_FACTOR * metrics.lse_error(mimic_lse, truth_lse) + FP32_SLACK,
        apart=apart,
        apart_allowed=apart_allowed,
        flipped=flipped,
        qk=qk,
    )


def _mimic_of(plan: DecodePlan | None) -> rounding.QuantConfig:
    """The rounding of the plan's kernel."""
    if plan is None:
        return MIMIC_OF["sm_90a"]
    if plan.pipeline == WIDE:
        return rounding.MIMIC_F16
    mimic = replace(MIMIC_OF[variants.arch_of(plan.device)], p_terms=plan.p_terms)
    return replace(mimic, p_block=plan.token_tile, promote_tokens=plan.token_tile)


def _check_plan(
    plan: DecodePlan, cu_seqlens_q: torch.Tensor | None, row_seqlens: torch.Tensor | None
) -> None:
    """Raises an error if ``plan`` is not a plan of an FP8 cache, whose kernels round P to e4m3.

    Also raises one if the plan was made with ``cu_seqlens_q`` or ``row_seqlens`` and it is missing.
    """
    if not isinstance(plan, DecodePlan):
        hint = "what plan_decode made for the call"
        checks.type_error("plan", "a DecodePlan", type(plan).__name__, hint)
    if plan.cache_dtype != "fp8":
        hint = "dense_decode rounds otherwise: compare with snapmla.testing.dense_job"
        checks.value_error("plan", "one of an FP8 cache", plan.cache_dtype, hint)
    if plan.ragged and cu_seqlens_q is None:
        hint = "give the tensor that the plan was made with"
        checks.value_error("cu_seqlens_q", "the ragged plan's", None, hint)
    if plan.row_limits.shape[0] and row_seqlens is None:
        hint = "give the tensor that the plan was made with"
        checks.value_error("row_seqlens", "the plan's", None, hint)


def _picked(
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    batches: Sequence[int] | None,
    heads: Sequence[int] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of those sequences and heads, and of no row beside them."""
    if cu_seqlens_q is not None:
        begin = cu_seqlens_q.tolist()
        picked = range(len(begin) - 1) if batches is None else batches
        spans = [(begin[i], begin[i + 1]) for i in picked]
        out = torch.cat([out[first:end] for first, end in spans])
        lse = torch.cat([lse[:, first:end] for first, end in spans], 1)
    elif batches is not None:
        out, lse = out[list(batches)], lse[list(batches)]
    if heads is not None:
        out, lse = out[..., list(heads), :], lse[..., list(heads), :]
    return out, lse


def _qk_errors(
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    config: rounding.QuantConfig,
    truth: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
) -> QkErrors:
    """Two more references: the tensor core's logits with all else exact, and the reverse.

    Not the difference of two mimics: logits that differ in the last place round a few P's to the
    other e4m3 value, which says nothing about the logits.
    """
    alone, alone_lse = run(
        config=replace(
            rounding.FP64,
            qk_accumulation=config.qk_accumulation,
            qk_promote_channels=config.qk_promote_channels,
        )
    )
    without, _ = run(config=replace(config, qk_accumulation="exact"))
    off = torch.where(torch.isinf(truth[1]), 0.0, alone_lse - truth[1]).flatten()
    return QkErrors(
        error=metrics.relative_l2(alone, truth[0]),
        lse_error=float(off[off.abs().argmax()]) if off.numel() else 0.0,
        rest=metrics.relative_l2(without.to(dtype), truth[0]),
    )


def _nearest(
    out: torch.Tensor, mimic: torch.Tensor, moves: Sequence[reference.Move]
) -> tuple[torch.Tensor, int]:
    """The mimic (..., 512) with those P's at ties rounded the other way that brings it nearer to
    ``out``, largest first, and how many; what moves a row by ``FLIPS`` or less stays."""
    nearest, flipped = mimic.clone(), 0
    for move in sorted(moves, key=lambda move: float(move.step.norm()), reverse=True):
        size = float(move.step.norm())
        if size <= FLIPS * float(mimic[move.row].norm()):
            continue
        off = out[move.row].double() - nearest[move.row]
        if float(off @ move.step) > size**2 / 2:
            nearest[move.row] += move.step
            flipped += 1
    return nearest, flipped
