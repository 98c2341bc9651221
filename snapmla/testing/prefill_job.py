"""Sparse prefill at the level of the ABI: inputs, fp64 reference, rounding mimic, FlashMLA's gates.

The mimic rounds P as the kernel does: tiles of 64 entries from the first one on, P' = 2^(t - m_ref)
in BF16, an m_ref that moves when a tile exceeds it by 2^15 (dsl_kernels/sm90/online_softmax.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.dims import KV_LORA_RANK as D_V
from dsl_kernels.formats.dims import TOKEN_TILE as TILE
from dsl_kernels.spec import VariantSpec
from snapmla.testing import metrics

P_LOG2_MAX, HEADROOM = 8.0, 15.0  # of the kernel's m_ref
LOG2_E = math.log2(math.e)
INT_MAX = 2**31 - 1
# FlashMLA's gates of its sparse prefill: an element is right by either, the cosine is of all.
OUT_GATE, LSE_GATE, COSINE_GATE = (8e-4, 3.01 / 128), (1e-6, 2.01 / 65536), 7e-6
# Figures near 0 are what products leave that cancel: right, too, beside the sum of their
# magnitudes, in few rows of short lists.
CONDITION, SHORT, FEW = 8 * 2.0**-24, 64, 0.02
# What the error may exceed that of the mimic by: ties of P that round the other way, tensor cores
# that cut sums instead of rounding them.
MIMIC_FACTOR, FP32_SLACK = 1.1, 2e-5
NO_TOKEN = (-1, INT_MAX, -(2**31))  # and s_kv
STYLES = ("plain", "swings", "equal")
SWING = 200.0  # nats between the tiles of style ``swings``
VALUE = 0.1  # standard deviation of kv, as in FlashMLA's tests, whose absolute gate is for such
Results = tuple[Tensor, ...]  # out, max_logits, lse, and lse_indexer where that is asked for


def named_rows(indices: Tensor, count: int, s_kv: int) -> Tensor:
    """(places of a token's list that hold rows) as a mask of its first ``count`` entries."""
    entries = indices[:count]
    return (entries >= 0) & (entries < s_kv)


def _product(s: Tensor, kv: Tensor, places: Tensor, rounded: bool) -> tuple[Tensor, Tensor]:
    """(O (h, 512), natural LSE (h,)) of logits (h, n) in fp64, of entries at ``places``."""
    t, h = s * LOG2_E, len(s)
    m_ref, total, out = t.new_full((h,), -1e30), t.new_zeros(h), t.new_zeros(h, D_V)
    for first in range(0, int(places[-1]) + 1, TILE):
        own = (places >= first) & (places < first + TILE)
        if not bool(own.any()):
            continue
        tile = t[:, own]
        top = tile.amax(-1)
        new = torch.where(top > m_ref + HEADROOM, top - P_LOG2_MAX, m_ref)
        gamma, p = torch.exp2(m_ref - new), torch.exp2(tile - new[:, None])
        total = total * gamma + p.sum(-1)
        if rounded:
            p = p.bfloat16().double()
        out, m_ref = out * gamma[:, None] + p @ kv[own, :D_V], new
    return out / total[:, None], (m_ref + torch.log2(total)) / LOG2_E


@dataclass(frozen=True)
class PrefillErrors:
    """Errors against fp64 on the same inputs.

    Attributes:
        outside: elements of out, max_logits and LSEs outside of FlashMLA's gates, or NaN or
            infinite where the reference is not.
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


def _outside(got: Tensor, want: Tensor, gate: tuple[float, float]) -> Tensor:
    """Elements that neither gate lets through."""
    off = (got.double() - want).abs()
    return ~((off <= gate[0]) | (off <= gate[1] * want.abs()) | (got == want))


def queries(q: Tensor, apart: bool) -> dict[str, Tensor]:
    """Arguments of queries (s_q, h, channels); ``apart``: content and RoPE in rows with gaps, which
    are NaN, of one tensor each."""
    if not apart:
        return {"q": q}
    content, rope = (
        torch.full((*q.shape[:-1], n), math.nan, dtype=q.dtype, device=q.device)
        for n in (D_V + 8, 192)
    )
    content[..., :D_V], rope[..., 128:] = q[..., :D_V], q[..., D_V:]
    return {"q": content[..., :D_V], "q_rope": rope[..., 128:]}


@dataclass(frozen=True)
class PrefillJob:
    """A call of ``sparse_prefill``; poison wherever no entry that counts names a row.

    Attributes:
        q: (s_q, h, d_qk). kv: (s_kv, 1, d_qk), rows strided.
        indices: (s_q, 1, topk), rows strided.
        lengths: ``topk_length``, None without. sink: of heads, None without.
        scale, ctas: of the call.
        rows: heads of a CTA.
        indexer_topk: entries of a list that the indexer chose, where their LSE is asked for.
        width: entries of a piece where lists are split; results are then those of merge, without
            largest logits.
        apart: whether content and RoPE of queries are a tensor each.
        empty_lse: of query tokens without rows, where lists are split.
    """

    q: Tensor
    kv: Tensor
    indices: Tensor
    lengths: Tensor | None
    sink: Tensor | None
    scale: float
    ctas: int = 2
    rows: int = 64
    indexer_topk: int | None = None
    width: int | None = None
    apart: bool = False
    empty_lse: float = math.inf

    @classmethod
    def draw(
        cls, spec: VariantSpec, s_q: int, heads: int, s_kv: int, topk: int, *,
        lengths: Sequence[int] | None = None, sink: Sequence[float] | bool = False,
        style: str = "plain", spread: float = 1.0, idle: float = 0.1, ctas: int = 2,
        device: str = "cpu",
    ) -> PrefillJob:  # fmt: skip
        """Numbers of torch's global seed; logits have standard deviation ``spread``.

        Args:
            lengths: how many entries of each query token count; None: all.
            sink: of the heads; True: normal numbers.
            style: ``swings`` moves logits by 200 nats up and down from a tile to the next,
                ``equal`` makes each query a multiple of a row that it names.
            idle: share of entries that are no row.
        """
        d = spec.d_qk
        kv = torch.randn(s_kv, 1, d + 8, device=device) * VALUE
        q = torch.randn(s_q, heads, d, device=device) * (spread / VALUE)
        wide = torch.randint(0, s_kv, (s_q, 1, topk + 3), device=device, dtype=torch.int32)
        indices = wide[..., :topk]
        if style == "swings":  # channel 0 of q is 1, of kv what the logit is to be moved by
            tile = torch.arange(s_kv, device=device) % 4
            kv[:, 0, 0] = (tile.float() - 1.5) * SWING / 3 * d**0.5 / 64
            q[..., 0] = 64.0
            for i in range(s_q):  # a tile of the list names rows of one height
                height = (torch.arange(topk, device=device) // TILE + i) % 4
                indices[i, 0] = indices[i, 0] // 4 * 4 + height
            indices.clamp_(max=s_kv - 1)
        drop = torch.rand(s_q, 1, topk, device=device) < idle
        kinds = torch.tensor([*NO_TOKEN, s_kv], dtype=torch.int32, device=device)
        indices[drop] = kinds[torch.randint(0, 4, (int(drop.sum()),), device=device)]
        kv = kv.bfloat16()
        if style == "equal":
            rows = indices[:, 0, :1].long().clamp(0, s_kv - 1)
            q = (kv[rows, 0, :d].float() * (spread / VALUE)).expand(-1, heads, -1)
        counts = None
        if lengths is not None:
            counts = torch.tensor(list(lengths), dtype=torch.int32, device=device)
        sinks = None
        if sink is True:
            sinks = torch.randn(heads, device=device) * 3
        elif sink is not False:
            sinks = torch.tensor(list(sink), device=device)
        job = cls(
            q.bfloat16().contiguous(), kv[..., :d], indices, counts, sinks, d**-0.5, ctas,
            spec.row_tile, TILE if spec.figures == "indexer" else None,
            TILE if spec.lists == "split" else None, spec.query == "two",
        )  # fmt: skip
        job._poison(kv)
        return job

    @property
    def counts(self) -> list[int]:
        """Number of entries of each query token that count."""
        topk = self.indices.shape[2]
        given = [topk] * len(self.q) if self.lengths is None else self.lengths.tolist()
        return [min(max(n, 0), topk) for n in given]

    @property
    def tiles(self) -> int:
        """Tiles of all lists in which an entry that counts names a row."""
        found = 0
        for entries, count in zip(self.indices[:, 0], self.counts, strict=True):
            (places,) = torch.where(named_rows(entries, count, len(self.kv)))
            found += len(torch.unique(places // TILE))
        return found

    def _poison(self, memory: Tensor) -> None:
        """NaN between rows, and in rows that no entry that counts names."""
        memory[..., self.kv.shape[2] :] = math.nan
        entries, s_kv = self.indices[:, 0], len(self.kv)
        counts = torch.tensor(self.counts, device=self.kv.device)[:, None]
        there = torch.arange(entries.shape[1], device=self.kv.device) < counts
        there &= (entries >= 0) & (entries < s_kv)
        named = torch.zeros(s_kv, dtype=torch.bool, device=self.kv.device)
        named[entries[there].long()] = True
        memory[~named] = math.nan

    def arguments(self) -> dict[str, Any]:
        """Arguments of one call by name; results are full of NaN."""
        s_q, heads, _ = self.q.shape
        device = self.q.device
        none = torch.zeros(0, device=device)
        figures = [torch.full((s_q, heads), math.nan, device=device) for _ in range(3)]
        given = {
            **queries(self.q, self.apart), "kv": self.kv, "indices": self.indices,
            "topk_length": none.int() if self.lengths is None else self.lengths,
            "attn_sink": none if self.sink is None else self.sink,
            "out": torch.full((s_q, heads, D_V), math.nan, device=device).bfloat16(),
            "max_logits": figures[0], "lse": figures[1], "softmax_scale": self.scale,
            "ctas": min(self.ctas, s_q * -(-heads // self.rows)),
        }  # fmt: skip
        if self.indexer_topk is not None:
            given |= {"lse_indexer": figures[2], "indexer_tiles": self.indexer_topk // TILE}
        return given if self.width is None else self._split(given)

    def _split(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments where lists are split: each query token is a sequence of one."""
        assert self.width is not None
        (s_q, heads, _), device = self.q.shape, self.q.device
        del given["max_logits"]
        pieces = -(-self.indices.shape[2] // self.width)
        begins = torch.arange(s_q + 1, dtype=torch.int32, device=device) * pieces
        return given | {
            "split_begin": begins, "units": torch.zeros(0, 2, dtype=torch.int32, device=device),
            "out": given["out"][:, None], "lse": given["lse"][..., None],
            "o_accum": torch.full((s_q * pieces, heads, D_V), math.nan, device=device),
            "lse_accum": torch.full((s_q * pieces, heads), math.nan, device=device),
            "lse_factor": math.log(2), "empty_lse": self.empty_lse, "width": self.width,
            "ctas": min(self.ctas, s_q * pieces * -(-heads // self.rows)),
        }  # fmt: skip

    def found(self, given: dict[str, Any]) -> Results:
        """Results of a call, from its arguments after it, in the order that ``errors`` takes.

        Calls with split lists give no max_logits; the reference's stand in for them.
        """
        if self.width is None:
            names = ("out", "max_logits", "lse", "lse_indexer")
            return tuple(given[name] for name in names if name in given)
        most = torch.stack([self.reference(i)[1] for i in range(len(self.q))])
        return given["out"][:, 0], most.float(), given["lse"][..., 0]

    def first_lse(self, i: int) -> tuple[Tensor, Tensor]:
        """(LSE (h,), magnitudes (h,)) of query token ``i`` over the indexer's choice, in fp64.

        The choice is the first ``indexer_topk`` entries.  Magnitudes: sum over channels of
        |q k| * scale, for the row with the largest logit.
        """
        assert self.indexer_topk is not None
        count = torch.tensor([min(self.counts[i], self.indexer_topk)], dtype=torch.int32)
        one = replace(
            self, q=self.q[i : i + 1], indices=self.indices[i : i + 1], lengths=count, sink=None
        )
        _, _, lse, sizes = one.reference(0)
        return lse, sizes

    def reference(self, i: int, rounded: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(out (h, 512), max_logits (h,), lse (h,), magnitudes (h,)) of query token ``i``, in fp64.

        Magnitudes: sum over channels of |q k| * scale, for the row with the largest logit.

        Args:
            rounded: True rounds P as the kernel does.
        """
        entries, count = self.indices[i, 0], self.counts[i]
        there = named_rows(entries, count, len(self.kv))
        heads = self.q.shape[1]
        if not bool(there.any()):

            def full(value: float) -> Tensor:
                return torch.full((heads,), value, dtype=torch.float64, device=self.q.device)

            out = torch.zeros(heads, D_V, dtype=torch.float64, device=self.q.device)
            return out, full(-math.inf), full(math.inf), full(0.0)
        kv, q = self.kv[entries[:count][there].long(), 0].double(), self.q[i].double()
        logits = q @ kv.T * self.scale
        out, lse = _product(logits, kv, there.nonzero()[:, 0], rounded)
        if self.sink is not None:
            out = out / (1 + torch.exp(self.sink.double() - lse))[:, None]
        most, at = logits.max(-1)
        sizes = (q.abs() * kv[at].abs()).sum(-1) * self.scale
        return out, most, lse, sizes

    def errors(self, results: Results, tokens: Sequence[int] | None = None) -> PrefillErrors:
        """Errors of a call's results, as ``found`` returns them, against the reference.

        Args:
            tokens: query tokens to compare; None: all.
        """
        rows = range(len(self.q)) if tokens is None else tokens
        out, most, lse, *first = (x[list(rows)].double() for x in results)
        truth = [torch.stack(x) for x in zip(*map(self.reference, rows), strict=True)]
        mimic = torch.stack([self.reference(i, rounded=True)[0] for i in rows])
        outside = int(_outside(out, truth[0], OUT_GATE).sum())
        figures = [(most, truth[1], truth[3]), (lse, truth[2], truth[3])]
        if first:
            chosen, behind = zip(*map(self.first_lse, rows), strict=True)
            figures.append((first[0], torch.stack(chosen), torch.stack(behind)))
        for got, want, sizes in figures:
            beyond = _outside(got, want, LSE_GATE)
            if self.indices.shape[2] < SHORT:
                excused = beyond & ((got - want).abs() <= CONDITION * sizes)
                if int(excused.sum()) <= max(1, FEW * excused.numel()):
                    beyond = beyond & ~excused
            outside += int(beyond.sum())
        seen = torch.isfinite(truth[2])
        return PrefillErrors(
            outside, metrics.one_minus_cosine(out, truth[0]), metrics.relative_l2(out, truth[0]),
            MIMIC_FACTOR * metrics.relative_l2(mimic.bfloat16(), truth[0]) + FP32_SLACK,
            float((lse - truth[2])[seen].abs().max()) if bool(seen.any()) else 0.0,
        )  # fmt: skip
