"""Float64 truth for timed rows, and the gates a row must pass to count."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

CHUNK_TOKENS = 16384

# Relative L2 error against float64 on a contender's own (already quantised) inputs.  With zero-mean
# latents e4m3 probabilities alone cost 1.2e-2 to 2.7e-2 in exact arithmetic, so a constant wide
# enough for FP8 hides 2 % of any other cause: it judges peers only, ``mimic_gate`` judges ours.
GATE_FP8 = 3.5e-2
GATE_BF16 = 1e-2
MIMIC_FACTOR, MIMIC_SLACK = 1.1, 2.5e-3


@dataclass(frozen=True)
class Check:
    """Outcome of comparing a row with its truth.

    Attributes:
        ok: passed its gate; a row that did not is reported but never counted.
        error: relative L2 error of the output (exact mismatches for byte-exact operations).
        lse_error: largest absolute error of the LSE, where the contender returns one.
        text: what failed.
    """

    ok: bool
    error: float
    lse_error: float | None = None
    text: str = ""

    def passed(self) -> float:
        """The error; raises ValueError if it did not pass."""
        if not self.ok:
            raise ValueError(self.text)
        return self.error


@dataclass(frozen=True)
class Truth:
    """float64 result of one request: out (s_q, h, 512), lse (h, s_q), largest visible |logit|."""

    out: torch.Tensor
    lse: torch.Tensor
    max_logit: float


def decode_truth(
    query: torch.Tensor,
    keys: Callable[[int, int], torch.Tensor],
    length: int,
    softmax_scale: float,
) -> Truth:
    """Attention of one request in float64, causal over the last ``s_q`` tokens.

    Args:
        query: (s_q, h, 576) float64.
        keys: ``keys(begin, end)`` gives those tokens' (end - begin, 576) in float64.
        length: cached tokens.
        softmax_scale: multiplies the logits.
    """
    s_q, heads, dim = query.shape
    flat = query.reshape(s_q * heads, dim)
    device = query.device
    limit = length - s_q + torch.arange(s_q, device=device).repeat_interleave(heads)
    top = torch.full((s_q * heads, 1), -math.inf, dtype=torch.float64, device=device)
    total = torch.zeros_like(top)
    out = torch.zeros(s_q * heads, 512, dtype=torch.float64, device=device)
    max_logit = 0.0
    for begin in range(0, length, CHUNK_TOKENS):
        end = min(length, begin + CHUNK_TOKENS)
        k = keys(begin, end)
        s = flat @ k.T * softmax_scale
        max_logit = max(max_logit, float(s.abs().max()))
        hidden = torch.arange(begin, end, device=device)[None, :] > limit[:, None]
        s.masked_fill_(hidden, -math.inf)
        new_top = torch.maximum(top, s.amax(1, keepdim=True))
        safe = new_top.masked_fill(new_top == -math.inf, 0.0)
        p = torch.exp(s - safe)
        decay = torch.exp(top - safe)
        total = total * decay + p.sum(1, keepdim=True)
        out = out * decay + p @ k[:, :512]
        top = new_top
    out = torch.where(total > 0, out / total, 0.0)
    lse = (torch.log(total) + top).reshape(s_q, heads).T
    return Truth(out.reshape(s_q, heads, 512), lse, max_logit)


def relative_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want|; NaN and Inf in ``got`` give NaN or Inf."""
    want = want.double()
    norm = want.norm().item()
    return (got.double() - want).norm().item() / (norm if norm > 0 else 1.0)


def mimic_gate(mimic: torch.Tensor, truth: Truth) -> float:
    """What the rounding of P to e4m3 explains on these inputs, and the output's own rounding.

    Args:
        mimic: (s_q, h, 512), the same request under ``snapmla.reference.MIMIC``.
    """
    return MIMIC_FACTOR * relative_l2(mimic.reshape(truth.out.shape), truth.out) + MIMIC_SLACK


def check_decode(
    out: Mapping[int, torch.Tensor] | torch.Tensor,
    lse: Mapping[int, torch.Tensor] | torch.Tensor | None,
    truths: dict[int, Truth],
    gates: dict[int, float],
    strict_lse: bool,
) -> Check:
    """Compares requests ``truths`` of a decode's ``out`` (b, s_q, h, 512) and ``lse`` (b, h, s_q),
    or of these by request.

    ``gates``: allowed relative L2 error of each request's ``out``.  ``strict_lse`` also gates the
    LSE: |error| <= 2e-4 + 1e-3 * largest |logit|, twice what random logits show and less than a row
    shows that equals a key (``snapmla.testing.qk_bounds``).
    """
    worst, worst_lse, problems = 0.0, None, []
    for request, truth in truths.items():
        got = out[request].reshape(truth.out.shape)
        error, gate = relative_l2(got, truth.out), gates[request]
        if not error <= gate:  # NaN fails too
            problems.append(f"request {request}: out error {error:.2e} > {gate:.2e}")
        worst = error if not error <= worst else worst
        if lse is None:
            continue
        got_lse = lse[request].double().reshape(truth.lse.shape)
        same = got_lse == truth.lse  # both may be -inf
        difference = float((got_lse - truth.lse).masked_fill(same, 0.0).abs().max())
        if worst_lse is None or not difference <= worst_lse:
            worst_lse = difference
        allowed = 2e-4 + 1e-3 * truth.max_logit
        if strict_lse and not difference <= allowed:
            problems.append(f"request {request}: lse error {difference:.2e} > {allowed:.1e}")
    return Check(not problems, worst, worst_lse, "; ".join(problems[:3]))
