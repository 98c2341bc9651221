"""Attention of one sequence's query rows over its tokens, a chunk at a time, as a config rounds it.

Notation (log2 domain throughout): sigma = scale of a token, s2 = logit * log2 e, t' = s2 +
log2 sigma, m' = reference maximum of a block of tokens, P' = 2^(t' - m') * p_max, so that
P.V = sum P' . k8 * 2^m' / p_max.  The matrix products are ``snapmla.testing.accumulate``'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from snapmla.testing.accumulate import bf16_dot, blackwell_fp8_dot, hopper_fp8_dot
from snapmla.testing.rounding import D_V, FP8, QuantConfig, to_e4m3

LOG2E = math.log2(math.e)
FP8_DOT = {"hopper": hopper_fp8_dot, "blackwell": blackwell_fp8_dot}


@dataclass(frozen=True)
class Rows:
    """Query rows of one sequence: nope (R, 512), rope (R, 64), scale (R,), visible tokens (R,)."""

    nope: Tensor
    rope: Tensor
    scale: Tensor
    limit: Tensor


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens: content (n, 512), rope (n, 64), sigma (n,); n a multiple of 32.

    ``absent`` (n,): places that hold no token; None: all do.
    """

    start: int
    content: Tensor
    rope: Tensor
    sigma: Tensor
    absent: Tensor | None = None


@dataclass
class _State:
    """Sums so far, in units of 2^m_ref: o (R, 512), mass (R,) = sum of P,
    m_ref (R,), all fp64.

    ``running`` (R,) is the running maximum for P scales that need one.  ``acc`` (R, 512) fp32 and
    ``acc_m_ref`` (R,) are the unpromoted accumulator, ``acc_tokens`` how many tokens it holds.
    """

    o: Tensor
    mass: Tensor
    m_ref: Tensor
    running: Tensor
    acc: Tensor
    acc_m_ref: Tensor
    acc_tokens: int = 0

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> _State:
        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        low = torch.full((rows,), -torch.inf, dtype=torch.float64, device=device)
        acc = zeros(rows, D_V, dtype=torch.float32)
        return cls(zeros(rows, D_V), zeros(rows), low, low.clone(), acc, low.clone())

    def move_to(self, m_ref: Tensor) -> None:
        """Raises ``m_ref`` to at least the argument (R,)."""
        new = torch.maximum(self.m_ref, m_ref)
        ratio = _exp2(self.m_ref - new)
        self.o *= ratio[:, None]
        self.mass *= ratio
        self.m_ref = new

    def promote(self) -> None:
        if self.acc_tokens:
            self.move_to(self.acc_m_ref)
            self.o += _exp2(self.acc_m_ref - self.m_ref)[:, None] * self.acc.double()
            self.acc.zero_()
            self.acc_tokens = 0


def _exp2(x: Tensor) -> Tensor:
    """2^x where -inf - -inf counts as -inf: an m_ref that has seen nothing weighs nothing."""
    return torch.where(torch.isnan(x), 0.0, torch.exp2(x))


def _dot_qk(rows: Rows, chunk: Chunk, config: QuantConfig) -> Tensor:
    """q8 . k8 + q_rope' . k_rope' (R, n): fp64, or fp32 as the tensor core leaves it."""
    if config.qk_accumulation == "exact":
        content = rows.nope.double() @ chunk.content.double().T
        return content + rows.rope.double() @ chunk.rope.double().T
    a, b = rows.nope.float(), chunk.content.float()
    rope_a, rope_b = rows.rope.bfloat16(), chunk.rope.bfloat16()
    if config.qk_accumulation == "f16":
        return bf16_dot(bf16_dot(None, a.half(), b.half()), rope_a, rope_b)
    acc = bf16_dot(None, rope_a, rope_b) if config.rope_first else None
    step, fp8_dot = config.qk_promote_channels, FP8_DOT[config.qk_accumulation]
    total = fp8_dot(a[:, :step], b[:, :step], acc)
    if not config.rope_first:
        total = bf16_dot(total, rope_a, rope_b)
    for i in range(step, D_V, step):
        total = total + fp8_dot(a[:, i : i + step], b[:, i : i + step])
    return total


def _logits(
    rows: Rows, chunk: Chunk, softmax_scale: float, config: QuantConfig
) -> tuple[Tensor, Tensor]:
    """(s2, t') of a chunk (R, n), fp64; t' holds fp32 values unless ``arithmetic`` is fp64, s2 does
    if it is ``fp32``."""
    dot, sigma = _dot_qk(rows, chunk, config), chunk.sigma
    if config.arithmetic == "fp64":
        factor = rows.scale.double() * (softmax_scale * LOG2E)
        s2 = dot.double() * factor[:, None] * sigma.double()
        return s2, s2 + torch.log2(sigma.double())
    single = torch.tensor(softmax_scale, dtype=torch.float32) * torch.tensor(LOG2E).float()
    factor = (rows.scale.float() * single.to(rows.scale.device)).double()
    product = (dot.float() * sigma.float()).double() * factor[:, None]
    log_sigma = torch.log2(sigma.double()).float().double()
    if config.arithmetic == "fp32":
        product = product.float().double()
    return product, (product + log_sigma).float().double()


def _block_m_refs(
    state: _State, t: Tensor, s2: Tensor, sigma_max: float, config: QuantConfig
) -> Tensor:
    """Reference maxima m' (R, blocks); t, s2 (R, blocks, p_block) are -inf where invisible."""
    if config.p_scale in ("none", "tile"):
        return t.amax(-1)
    top = t.amax(-1) if config.p_scale == "running" else s2.amax(-1) + math.log2(sigma_max)
    top = torch.maximum(top.cummax(-1).values, state.running[:, None])
    state.running = top[:, -1].clone()
    return top


def _quantised_p(p: Tensor, config: QuantConfig) -> list[Tensor]:
    """e4m3 terms of P' (fp32 values); their sum stands for P'."""
    if config.p_scale == "none":
        return [p]
    if config.p_dtype == "f16":
        return [p.half().to(p.dtype)]
    first = to_e4m3(p).to(p.dtype)
    if config.p_terms == 1:
        return [first]
    return [first, to_e4m3(p - first).to(p.dtype)]


def _sum_terms(terms: list[Tensor]) -> Tensor:
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _requantise_even(p: Tensor, m_refs: Tensor) -> tuple[Tensor, Tensor]:
    """The inverted order: P8 of even blocks rescaled, and rounded again, to the odd one's m_ref.

    p (R, blocks, p_block) e4m3 values, m_refs (R, blocks); returns both anew.
    """
    p, m_refs = p.clone(), m_refs.clone()
    pairs = m_refs.shape[1] // 2 * 2
    even, odd = m_refs[:, 0:pairs:2], m_refs[:, 1:pairs:2]
    usable = torch.isfinite(odd)
    ratio = torch.where(usable, _exp2(even - odd), 1.0)
    p[:, 0:pairs:2] = to_e4m3(p[:, 0:pairs:2] * ratio[..., None]).to(p.dtype)
    m_refs[:, 0:pairs:2] = torch.where(usable, odd, even)
    return p, m_refs


def _add_exact(state: _State, p: Tensor, m_refs: Tensor, v: Tensor, columns: slice) -> None:
    """O += 2^(m' - m_ref) P . V over all blocks of a chunk; p (R, blocks, p_block), v (n, 512)."""
    weight = _exp2(m_refs - state.m_ref[:, None])
    flat = (p * weight[..., None]).flatten(1)
    state.o[:, columns] += flat @ v[:, columns].double()


def _add_modelled(
    state: _State, terms: list[Tensor], m_refs: Tensor, v: Tensor, config: QuantConfig
) -> None:
    """O += ..., groups of ``promote_tokens`` (<= p_block) in one tensor-core accumulator each.

    The second term of P goes first, the first on top of it.
    """
    size, fp8_dot = config.promote_tokens, FP8_DOT[config.pv_accumulation]
    groups = m_refs.shape[1] * terms[0].shape[2] // size
    v_t = v.float().unflatten(0, (groups, size)).transpose(1, 2)  # (groups, 512, size)
    weight = _exp2(m_refs - state.m_ref[:, None]).repeat_interleave(groups // m_refs.shape[1], 1)
    product: Tensor | None = None  # (groups, R, 512)
    for term in reversed(terms):
        p = term.float().flatten(1).unflatten(1, (groups, size)).transpose(0, 1)
        product = fp8_dot(p, v_t, product)
    assert product is not None
    state.o += torch.einsum("rg,grd->rd", weight, product.double())


def _add_chained(state: _State, p: Tensor, m_refs: Tensor, v: Tensor, config: QuantConfig) -> None:
    """O kept in the tensor core's accumulator across blocks, rescaled in fp32 as the paper does.

    gamma = 2^(m'_old - m'_new) overflows when a block lies far below the one before: the paper's
    recurrence, kept as it is.
    """
    for i in range(m_refs.shape[1]):
        m_ref = m_refs[:, i]
        fresh = torch.isneginf(state.acc_m_ref) | (state.acc_tokens == 0)
        gamma = torch.where(fresh, 0.0, torch.exp2(state.acc_m_ref - m_ref)).float()
        seen = torch.isfinite(m_ref)
        scaled = torch.where(seen[:, None], state.acc * gamma[:, None], state.acc)
        tokens = slice(i * config.p_block, (i + 1) * config.p_block)
        state.acc = FP8_DOT[config.pv_accumulation](p[:, i].float(), v[tokens].float().T, scaled)
        state.acc_m_ref = torch.where(seen, m_ref, state.acc_m_ref)
        state.acc_tokens += config.p_block
        if config.promote_tokens and state.acc_tokens >= config.promote_tokens:
            state.promote()


def _block_p(
    state: _State,
    rows: Rows,
    chunk: Chunk,
    softmax_scale: float,
    sigma_max: float,
    config: QuantConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """(P' (R, blocks, p_block), m_refs (R, blocks) such that P = 2^m_ref P', visible) of a chunk.

    P' is 0 where invisible and NaN where a row attends to a NaN token, whose m_ref ignores it.
    """
    positions = chunk.start + torch.arange(len(chunk.sigma), device=chunk.sigma.device)
    seen = positions < rows.limit[:, None]
    if chunk.absent is not None:
        seen &= ~chunk.absent
    visible = seen.unflatten(1, (-1, config.p_block))
    s2, t = (
        x.unflatten(1, (-1, config.p_block)) for x in _logits(rows, chunk, softmax_scale, config)
    )
    hidden = ~visible | torch.isnan(t)
    s2, seen = s2.masked_fill(hidden, -torch.inf), t.masked_fill(hidden, -torch.inf)
    m_refs = _block_m_refs(state, seen, s2, sigma_max, config)
    shift = math.log2(config.p_max)
    if config.arithmetic != "fp64":
        base = (shift - m_refs).float().double()
        p = torch.exp2((t + base[..., None]).float().double()).float().double()
    else:
        p = torch.exp2(t - m_refs[..., None] + shift)
    return torch.where(visible, p, 0.0), m_refs - shift, visible


@dataclass(frozen=True)
class _Ties:
    """P' of a chunk near the middle of two e4m3 values.

    Attributes:
        row, m_ref: (k,) where P = 2^m_ref P'.
        step: (k, 512) fp64, what the other of the two values adds to P' . V.
    """

    row: Tensor
    m_ref: Tensor
    step: Tensor

    @classmethod
    def of(cls, p: Tensor, m_refs: Tensor, v: Tensor) -> _Ties:
        """Arguments as of ``_add_exact``, but for P', which is not rounded yet.

        Near is what an ulp each of t' and m' and two of 2^x reach: logarithms and powers are
        approximate in a kernel, and differ in the last places.
        """
        spacing = torch.exp2(torch.floor(torch.log2(p.clamp_min(2.0**-6))) - 3)
        t = torch.log2(p) + m_refs[..., None]
        reach = (_ulp(t) + _ulp(m_refs)[..., None]) * math.log(2) + 2.0**-22
        middle = (torch.floor(p / spacing) + 0.5) * spacing
        near = (p > 0) & ((p - middle).abs() <= reach * p)
        row, block, token = near.nonzero(as_tuple=True)
        up = to_e4m3(p[near]).double() > p[near]
        step = torch.where(up, -spacing[near], spacing[near])
        values = v[block * p.shape[2] + token].double()
        return cls(row, m_refs[row, block], step[:, None] * values)

    def moves(self, state: _State) -> Iterator[tuple[int, Tensor]]:
        """(row, what is added to its result (512,)) by the final state."""
        weight = torch.exp2(self.m_ref - state.m_ref[self.row]) / state.mass[self.row]
        yield from zip(self.row.tolist(), self.step * weight[:, None], strict=True)


def _ulp(x: Tensor) -> Tensor:
    """Distance between fp32 numbers of the size of x."""
    return torch.exp2(torch.floor(torch.log2(x.abs().clamp_min(2.0**-100))) - 23)


def _add_chunk(
    state: _State,
    rows: Rows,
    chunk: Chunk,
    softmax_scale: float,
    sigma_max: float,
    config: QuantConfig,
    ties: list[_Ties] | None = None,
) -> None:
    """Adds one chunk of tokens to the sums, and what is at ties to ``ties``."""
    p, m_refs, visible = _block_p(state, rows, chunk, softmax_scale, sigma_max, config)
    state.move_to(m_refs.amax(-1))
    terms = _quantised_p(torch.where(torch.isnan(p), 0.0, p), config)
    total, wide = _sum_terms(terms), config.p_dtype != "e4m3"
    mass = p if config.normaliser == "unquantised" else torch.where(torch.isnan(p), p, total)
    inverse = 1.0 / chunk.sigma.double().unflatten(0, (-1, config.p_block))
    inverse = torch.where(visible, inverse, 0.0)
    weight = _exp2(m_refs - state.m_ref[:, None])
    state.mass += ((mass * inverse).sum(-1) * weight).sum(-1)
    bad = torch.isnan(chunk.sigma) | torch.isnan(chunk.content.float()).any(-1)
    v = chunk.content.float() if chunk.content.dtype == FP8 else chunk.content
    v = torch.where(bad[:, None], 0.0, v)
    if ties is not None and len(terms) == 1 and config.p_scale != "none" and not wide:
        ties.append(_Ties.of(torch.where(torch.isnan(p), 0.0, p), m_refs, v))
    if config.order == "inverted":
        half = D_V // 2
        _add_exact(state, total, m_refs, v, slice(0, half))
        _add_exact(state, *_requantise_even(total, m_refs), v, slice(half, D_V))
    elif config.pv_accumulation == "exact":
        _add_exact(state, total, m_refs, v, slice(0, D_V))
    elif config.promote_tokens and config.promote_tokens <= config.p_block:
        _add_modelled(state, terms, m_refs, v, config)
    else:
        _add_chained(state, terms[0], m_refs, v, config)


def attend(
    rows: Rows, chunks: Iterator[Chunk], softmax_scale: float, sigma_max: float,
    config: QuantConfig, moves: list[tuple[int, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out (R, 512), lse in log2 units (R,)); rows that see no token have out 0, lse -inf.

    Args:
        moves: gets (row, step) of each ``Move``.
    """
    state = _State.empty(len(rows.scale), rows.scale.device)
    ties: list[_Ties] | None = None if moves is None else []
    for chunk in chunks:
        _add_chunk(state, rows, chunk, softmax_scale, sigma_max, config, ties)
    state.promote()
    if moves is not None:
        moves += [move for some in ties or () for move in some.moves(state)]
    empty = state.mass == 0
    out = torch.where(empty[:, None], 0.0, state.o / state.mass[:, None])
    lse = state.m_ref + torch.log2(state.mass)
    if config.arithmetic == "fused":
        lse = lse.float().double()
    return out, torch.where(empty, -torch.inf, lse)


def check_modelled(config: QuantConfig, k8: Tensor) -> None:
    """ValueError if no model covers what ``config`` asks of these operands."""
    modelled = {config.qk_accumulation, config.pv_accumulation} != {"exact"}
    if modelled and k8.dtype != FP8:
        raise ValueError(
            "config: modelled accumulation needs e4m3 operands, that is granularity 'token' or"
            f" 'tensor' without joint RoPE, got {config.granularity!r}, {config.rope_quantised!r}"
        )
    if config.pv_accumulation != "exact":
        if config.p_scale == "none":
            raise ValueError("p_scale: modelled P.V accumulation needs an e4m3 P, got 'none'")
        if config.order == "inverted" or (config.p_terms == 2 and config.group > config.p_block):
            raise ValueError(
                "pv_accumulation: the model covers the monotone order, and two terms of P only"
                " with promote_tokens <= p_block"
            )
