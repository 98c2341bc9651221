"""Dense MHA prefill at the level of the ABI: fp64 reference, rounding mimic, FlashMLA's gates.

The mimic rounds P as the kernel does: tiles of 128 keys (80 beside 256 channels) from the last one
on, P' = 2^(t - m_ref) in 16 bits, an m_ref that moves when a tile exceeds it by 2^15
(dsl_kernels/sm90/online_softmax.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.mha_list import (
    HEADER,
    KEY_TILE,
    KEYS,
    ROWS,
    TILES,
    WIDTHS,
    most_tiles,
    workspace_words,
)
from dsl_kernels.spec import VariantSpec
from snapmla.testing import metrics

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
P_LOG2_MAX, HEADROOM = 8.0, 15.0  # of the kernel's m_ref
LOG2_E = math.log2(math.e)
# FlashMLA's gates of its MHA forward: an element is right by either, the cosine is of all.
OUT_GATE, LSE_GATE, COSINE_GATE = (1e-3, 8.01 / 128), (1e-6, 2.01 / 65536), 7e-6
# An LSE near 0 is what products leave that cancel: it is right, too, beside the sum of their
# magnitudes, as of dense decodes (dense_job.py).
LSE_CONDITION = 8 * 2.0**-24
# What the error may exceed that of the mimic by: ties of P that round the other way, tensor cores
# that cut sums instead of rounding them.
MIMIC_FACTOR, FP32_SLACK = 1.1, 2e-5


def offsets(lengths: Sequence[int]) -> Tensor:
    """cu_seqlens (b + 1,) int32 of lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def key_tiles(s_q: int, s_k: int, tile: int, causal: bool) -> int:
    """Tiles of keys that some row of a row tile sees."""
    seen = min(s_k, (tile + 1) * ROWS + s_k - s_q) if causal else s_k
    return -(-max(seen, 0) // KEYS)


def row_tiles(lq: Sequence[int], lk: Sequence[int], causal: bool) -> list[tuple[int, int]]:
    """(sequence, row tile) of all row tiles: the sequence first whose last one sees the most keys,
    its row tiles from the last on."""
    tiles = [-(-s_q // ROWS) for s_q in lq]
    seen = [key_tiles(lq[i], lk[i], n - 1, causal) for i, n in enumerate(tiles)]
    order = sorted(range(len(lq)), key=lambda i: -seen[i])
    return [(i, m) for i in order for m in reversed(range(tiles[i]))]


def work_of(lq: Sequence[int], lk: Sequence[int], causal: bool, total_q: int = 0) -> Tensor:
    """The workspace as ``mha_items`` leaves it; -1 behind the list.

    Args:
        total_q: query tokens that the workspace has room for; 0: those of the sequences.
    """
    tiles = row_tiles(lq, lk, causal)
    work = torch.full((workspace_words(total_q or sum(lq), len(lq)),), -1, dtype=torch.int32)
    work[:HEADER] = 0
    work[TILES] = len(tiles)
    if tiles:
        work[HEADER : HEADER + 2 * len(tiles)] = torch.tensor(tiles, dtype=torch.int32).flatten()
    return work


def _sequences(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """(query tokens, keys) of each sequence that has queries."""
    ends = zip(cu_q.tolist(), cu_q[1:].tolist(), cu_k.tolist(), cu_k[1:].tolist())
    return ((slice(a, b), slice(c, d)) for a, b, c, d in ends if b > a)


def _logits(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """fp64 logits (h, s_q, s_k); -inf of keys that a row does not see, whatever they hold."""
    group, (s_q, s_k) = q.shape[1] // k.shape[1], (len(q), len(k))
    s = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(group, 1)) * scale
    if causal:
        row = torch.arange(s_q, device=q.device)[:, None]
        hidden = torch.arange(s_k, device=q.device)[None] > row + (s_k - s_q)
        s = s.masked_fill(hidden, -math.inf)
    return s


def _product(p: Tensor, v: Tensor, group: int, seen: Tensor) -> Tensor:
    """P V; NaN in channels of rows that see a number that is not finite there, ``seen`` (h, q, k).
    What a row does not see does not reach it, though 0 times a NaN is NaN."""
    values = v.double().repeat_interleave(group, 1)
    wild = ~values.isfinite()
    made = torch.einsum("hqk,khd->qhd", p, values.masked_fill(wild, 0.0))
    if wild.any():
        met = torch.einsum("hqk,khd->qhd", seen.double(), wild.double()) > 0
        made = made.masked_fill(met, math.nan)
    return made


def _exact(s: Tensor, v: Tensor, group: int) -> tuple[Tensor, Tensor]:
    lse = s.logsumexp(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)
    m_ref = torch.where(torch.isneginf(lse), 0.0, lse)
    return _product(torch.exp(s - m_ref[..., None]), v, group, ~torch.isneginf(s)), lse


def _rounded(
    s: Tensor, v: Tensor, group: int, dtype: torch.dtype, keys: int
) -> tuple[Tensor, Tensor]:
    """Like ``_exact``, P rounded to ``dtype`` relative to m_ref; tiles of ``keys``."""
    s = s * LOG2_E
    m_ref, total = s.new_full(s.shape[:-1], -1e30), s.new_zeros(s.shape[:-1])
    out = s.new_zeros(s.shape[1], s.shape[0], v.shape[-1])
    for first in reversed(range(0, s.shape[-1], keys)):
        tile = s[..., first : first + keys]
        top = tile.amax(-1)
        new = torch.where(top > m_ref + HEADROOM, top - P_LOG2_MAX, m_ref)
        gamma = torch.exp2(m_ref - new)
        p = torch.exp2(tile - new[..., None])
        total = total * gamma + p.sum(-1)
        p16 = p.to(dtype).double()
        out = out * gamma.T[..., None] + _product(
            p16, v[first : first + keys], group, ~torch.isneginf(tile)
        )  # fmt: skip
        m_ref = new
    empty = total == 0
    lse = torch.where(empty, -math.inf, (m_ref + torch.log2(total)) / LOG2_E)
    return torch.where(empty.T[..., None], 0.0, out / total.T[..., None]), lse


def mha_reference(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, causal: bool,
    *, p_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale * q k^T) v of each sequence, fp64.

    Args:
        q: (total_q, h, d_qk). k: (total_k, h_k, d_qk). v: (total_k, h_k, d_v).
        cu_q, cu_k: (b + 1,) where each sequence's tokens begin.
        causal: query i of s_q sees keys up to i + s_k - s_q.
        p_dtype: rounds P as the kernel does; None: nothing is rounded.

    Returns:
        (out (total_q, h, d_v), natural lse (h, total_q)); rows of no sequence are NaN, rows without
        keys 0 and -inf.

    Raises:
        Nothing of its own.

    Source: the definition; FlashMLA's tests compute the same.
    """
    group, tile = q.shape[1] // k.shape[1], KEY_TILE.get(q.shape[-1], KEYS)
    out = torch.full((*q.shape[:2], v.shape[-1]), math.nan, dtype=torch.float64, device=q.device)
    lse = torch.full((q.shape[1], len(q)), math.nan, dtype=torch.float64, device=q.device)
    for rows, keys in _sequences(cu_q, cu_k):
        s, values = _logits(q[rows], k[keys], scale, causal), v[keys]
        if p_dtype is None:
            out[rows], lse[:, rows] = _exact(s, values, group)
        else:
            out[rows], lse[:, rows] = _rounded(s, values, group, p_dtype, tile)
    return out, lse


@dataclass(frozen=True)
class MhaErrors:
    """Errors against fp64 on the same inputs.

    Attributes:
        outside: elements of out and lse outside of FlashMLA's gates (an LSE also of its logits'
            condition), or NaN or infinite where the reference is not.
        cosine: 1 - cosine of the output.
        error: relative L2 of the output; ``allowed`` is 1.1 times the mimic's, plus 2e-5.
        lse_error: largest absolute error of the LSE.
    """

    outside: int
    cosine: float
    error: float
    allowed: float
    lse_error: float

    @property
    def right(self) -> bool:
        return not self.outside and self.cosine <= COSINE_GATE and self.error <= self.allowed

    def __str__(self) -> str:
        return (
            f"relative L2 {self.error:.2e} (allowed {self.allowed:.2e}), LSE {self.lse_error:.1e}, "
            f"1 - cosine {self.cosine:.1e} (allowed {COSINE_GATE:.0e}), {self.outside} outside of "
            "FlashMLA's gates"
        )


def _outside(got: Tensor, want: Tensor, gate: tuple[float, float], more: Tensor | float = 0) -> int:
    """Elements that no gate lets through; ``more`` is another absolute one."""
    off = (got.double() - want).abs()
    right = (off <= gate[0]) | (off <= gate[1] * want.abs()) | (off <= more)
    right = right | (want.isnan() & ~got.isfinite())
    return int((~(right | (got == want))).sum())


def mha_errors(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor,
    scale: float, causal: bool,
) -> MhaErrors:  # fmt: skip
    """Results against fp64 by FlashMLA's gates and the mimic; rows of no sequence are not seen.

    Where the reference is NaN the result must be NaN or infinite, and counts no further.

    Args:
        out, lse: what the kernel gave, (total_q, h, d_v) and (h, total_q).
        q, k, v, cu_q, cu_k, scale, causal: as ``mha_reference`` takes them.

    Returns:
        The errors; ``str`` of them is one line.

    Raises:
        Nothing of its own.

    Source: our own; the gates are those of FlashMLA's tests.
    """
    inputs = (q, k, v, cu_q, cu_k, scale, causal)
    truth, truth_lse = mha_reference(*inputs)
    mimic, _ = mha_reference(*inputs, p_dtype=q.dtype)
    end = int(cu_q[-1])
    out, lse, truth, truth_lse, mimic = (
        out[:end], lse[:, :end], truth[:end], truth_lse[:, :end], mimic[:end]
    )  # fmt: skip
    condition = torch.zeros_like(truth_lse)
    for rows, keys in _sequences(cu_q, cu_k):
        sizes = _logits(q[rows].abs(), k[keys].abs(), abs(scale), causal)
        if keys.stop > keys.start:
            condition[:, rows] = sizes.amax(-1).clamp_min(0) * LSE_CONDITION
    outside = _outside(out, truth, OUT_GATE) + _outside(lse, truth_lse, LSE_GATE, condition)
    out, truth, mimic = (x.masked_fill(truth.isnan(), 0.0) for x in (out, truth, mimic))
    return MhaErrors(
        outside=outside,
        cosine=metrics.one_minus_cosine(out, truth),
        error=metrics.relative_l2(out, truth),
        allowed=MIMIC_FACTOR * metrics.relative_l2(mimic.to(out.dtype), truth) + FP32_SLACK,
        lse_error=metrics.lse_error(lse, truth_lse),
    )


@dataclass(frozen=True)
class MhaJob:
    """A call of ``mha_fwd``.

    Attributes:
        q, v: (total_q, h, d_qk), (total_k, h_k, d_v); rows may be strided.
        ks: K's tensors, (total_k, h_k, 128) and of d_qk 192 (total_k, 1 or h_k, 64); of d_qk 256
            they have 192 and 64 channels.
        lq, lk: lengths of the sequences.
        fill: value of results before a call.
    """

    q: Tensor
    ks: tuple[Tensor, ...]
    v: Tensor
    lq: tuple[int, ...]
    lk: tuple[int, ...]
    causal: bool = True
    scale: float = 0.0
    ctas: int = 2
    fill: float = math.nan

    @classmethod
    def draw(
        cls, spec: VariantSpec, lq: Sequence[int], lk: Sequence[int], heads: int = 2,
        kv_heads: int = 1, *, causal: bool = True, spread: float = 1.0, ctas: int = 2,
        behind: float = math.nan, rope_heads: int = 1, device: str = "cpu",
    ) -> MhaJob:  # fmt: skip
        """Normal numbers of torch's global seed; logits have standard deviation ``spread``.

        V has 0.1, as in FlashMLA's tests, whose absolute gate is for such.

        Args:
            behind: value of 9 rows behind the last sequence, in q, k and v.
        """
        dtype, (t_q, t_k) = DTYPES[spec.dtype], (sum(lq), sum(lk))

        def rows(tokens: int, h: int, width: int, factor: float = 1.0) -> Tensor:
            x = torch.randn(tokens + 9, h, width + 8, device=device) * factor
            x[tokens:] = behind
            return x.to(dtype)[..., :width]

        per_head = (kv_heads, rope_heads)
        ks = tuple(rows(t_k, h, width) for h, width in zip(per_head, WIDTHS[spec.d_qk]))
        q, v = rows(t_q, heads, spec.d_qk, spread), rows(t_k, kv_heads, spec.d_v, 0.1)
        return cls(q, ks, v, tuple(lq), tuple(lk), causal, spec.d_qk**-0.5, ctas)

    @property
    def k(self) -> Tensor:
        """K as one tensor."""
        heads = self.v.shape[1]
        return torch.cat([k.expand(-1, heads, -1) for k in self.ks], -1)

    @property
    def tiles(self) -> int:
        """Tiles of keys of all row tiles of a head."""
        given = self.lq, self.lk, self.causal
        return sum(key_tiles(self.lq[i], self.lk[i], m, self.causal) for i, m in row_tiles(*given))

    def arguments(self) -> dict[str, Any]:
        """Arguments of one call by name: results full of ``fill``, work list made on the host."""
        keys = dict(zip(("k_nope", "k_rope"), self.ks))
        t, h, _ = self.q.shape
        most, device = max(1, most_tiles(t, len(self.lq)) * h), self.q.device
        tables = {
            "cu_seqlens_q": offsets(self.lq), "cu_seqlens_k": offsets(self.lk),
            "work": work_of(self.lq, self.lk, self.causal, t),
        }  # fmt: skip
        out = torch.full((t, h, self.v.shape[-1]), self.fill, device=device)
        return {
            "q": self.q, **keys, "v": self.v,
            **{name: table.to(device) for name, table in tables.items()},
            "out": out.to(self.q.dtype), "lse": torch.full((h, t), self.fill, device=device),
            "softmax_scale": self.scale, "causal": int(self.causal), "ctas": min(self.ctas, most),
        }  # fmt: skip

    def errors(self, result: tuple[Tensor, Tensor]) -> MhaErrors:
        """Errors of (out, lse) against the reference; rows of no sequence must still be NaN."""
        out, lse = result
        cu_q, cu_k = offsets(self.lq), offsets(self.lk)
        errors = mha_errors(out, lse, self.q, self.k, self.v, cu_q, cu_k, self.scale, self.causal)
        beside = int((~out[sum(self.lq) :].isnan()).sum() + (~lse[:, sum(self.lq) :].isnan()).sum())
        if not beside:
            return errors
        return MhaErrors(errors.outside + beside, *(
            getattr(errors, name) for name in ("cosine", "error", "allowed", "lse_error")
        ))  # fmt: skip
