"""FlashMLA's test grid of dense decode: its shapes and gates, any kernel of its call form.

Queries are N(0, 1) cut at 1, tokens N(0, 1) / 10 cut at 1, in pages of 64, shuffled; tokens behind
a sequence's end are NaN.  Each case is judged by FlashMLA's own gates (``dense_job.OUT_GATE``,
``LSE_GATE``, ``COSINE_GATE``) to float64 on the stored values; rows without tokens must be 0 with
an LSE of +infinity.

``near 0`` is a case apart: sequences of one token, whose LSE is a logit, often near 0.  There
FlashMLA's gate is 1e-6 absolute, while a logit is an fp32 sum of 576 products whose magnitudes add
up to some 17: less than that sum's own rounding.  Such LSEs are right by their logits' condition
(``dense_job.LSE_CONDITION``), of which few may have need; how many had, and the largest error in
units of 2^-24 of the sum of magnitudes, is shown of every kernel.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from profiles.peer_libraries import FlashMlaBf16
from profiles.roofline import CONTENT_DIM, HEAD_DIM_QK
from snapmla.testing import metrics
from snapmla.testing.dense_job import (
    COSINE_GATE,
    LSE_CONDITION,
    LSE_GATE,
    OUT_GATE,
    by_condition_allowed,
    gate_violations,
    lse_outside,
)
from snapmla.testing.dense_reference import logit_magnitudes

PAGE, SCALE = 64, HEAD_DIM_QK**-0.5
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
BATCHES, TOKENS, LENGTHS = (1, 2, 6, 64), (1, 2, 4), (20, 140, 4096)
HEADS, KV_HEADS = (1, 3, 9, 63, 64, 126, 128), (1, 2, 3, 8)
KINDS = ("equal", "uneven", "with empty ones")  # each no longer than the one before
CHUNK_BYTES = 1 << 31  # of the reference's K and of its logits, each
NEAR_ZERO = "near 0"

# q (b, s_q, h, 576), cache (pages, 64, h_kv, 576), block_table, cache_seqlens, causal ->
# out (b, s_q, h, 512), natural LSE (b, h, s_q)
Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool],
    tuple[torch.Tensor, torch.Tensor],
]


@dataclass
class Tally:
    """What a kernel did in all cases of a dtype and a kind of lengths.

    Attributes:
        gated: whether elements outside are failures: ours.
        cases, elements: judged; elements of out and LSE together.
        out_outside, lse_outside: elements outside of the gates; of ``worst``, the first cases.
        by_condition: elements of the LSE that their logits' condition alone makes right;
            ``condition_cases``: cases with more of them than may be.
        cosine_cases: cases beyond the cosine's gate.
        cosine, lse_error: the largest 1 - cosine and absolute error of the LSE.
        condition: the largest LSE error over 2^-24 sum|q_i k_i| softmax_scale (``near 0`` alone).
        refused: cases that raised, and the first reason.
    """

    who: str
    dtype: str
    kind: str
    gated: bool = False
    cases: int = 0
    elements: int = 0
    out_outside: int = 0
    lse_outside: int = 0
    by_condition: int = 0
    condition_cases: int = 0
    cosine_cases: int = 0
    cosine: float = 0.0
    lse_error: float = 0.0
    condition: float | None = None
    refused: int = 0
    reason: str = ""
    worst: list[str] = field(default_factory=list)

    def failures(self) -> list[str]:
        """A sentence for each way in which it failed a gate."""
        if not self.gated:
            return []
        at, texts = f"grid: {self.who}, {self.dtype}, {self.kind}", []
        if not self.cases:
            texts.append(f"{at}: no case ran")
        if self.refused:
            texts.append(f"{at}: {self.refused} cases raised, {self.reason}")
        outside = self.out_outside + self.lse_outside
        if outside or self.cosine_cases:
            first = "; ".join(self.worst)
            texts.append(f"{at}: {outside} elements outside, {self.cosine_cases} cosines: {first}")
        if self.condition_cases:
            texts.append(
                f"{at}: {self.by_condition} LSEs right by their logits' condition alone, "
                f"{self.condition_cases} cases with too many"
            )
        return texts

    def refuse(self, error: Exception | str) -> None:
        """Counts a case that could not run."""
        self.refused += 1
        self.reason = self.reason or (str(error).strip().splitlines() or [type(error).__name__])[0]

    def judge(
        self, got: tuple[torch.Tensor, torch.Tensor], truth: tuple[torch.Tensor, torch.Tensor],
        magnitudes: Callable[[torch.Tensor], torch.Tensor], case: str,
    ) -> None:  # fmt: skip
        """Adds a case's errors; ``magnitudes`` as of ``dense_job.lse_outside``."""
        (out, lse), (want, want_lse) = got, truth
        out, lse = out.reshape(want.shape), lse.reshape(want_lse.shape)
        missed, by_condition = lse_outside(lse, want_lse, magnitudes)
        bad = gate_violations(out, want, OUT_GATE), int(missed.sum())
        cosine, lse_error = metrics.one_minus_cosine(out, want), metrics.lse_error(lse, want_lse)
        self.cases += 1
        self.elements += want.numel() + want_lse.numel()
        self.out_outside += bad[0]
        self.lse_outside += bad[1]
        self.by_condition += by_condition
        self.condition_cases += by_condition > by_condition_allowed(lse.numel())
        beyond = not cosine <= COSINE_GATE
        self.cosine_cases += beyond
        self.cosine, self.lse_error = _worse(self.cosine, cosine), _worse(self.lse_error, lse_error)
        if (any(bad) or beyond) and len(self.worst) < 5:
            self.worst.append(f"{case} (out {bad[0]}, LSE {bad[1]}, 1 - cosine {cosine:.1e})")


def _worse(a: float, b: float) -> float:
    """The larger one; NaN if either is."""
    return a if a >= b or a != a else b


# ---------------------------------------------------------------------------------------- kernels


def ours(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``snapmla.flash_mla``, by FlashMLA's names."""
    from snapmla.compat import flash_mla

    metadata, _ = flash_mla.get_mla_metadata()
    return flash_mla.flash_mla_with_kvcache(
        q, cache, table, lengths, CONTENT_DIM, metadata, None, causal=causal
    )


def kernels(peers: Path | None) -> dict[str, Kernel | str]:
    """Ours and FlashMLA's; a text says why there is none."""
    peer = FlashMlaBf16("flashmla_bf16", peers)
    reason = peer.unavailable()
    if reason is not None:
        return {"ours": ours, "flashmla": reason}

    def theirs(
        q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        op = torch.ops._flashmla_C.dense_decode_fwd
        out, lse, *_ = op(q, cache, CONTENT_DIM, lengths, table, SCALE, causal, None, None, None)
        return out, lse

    try:
        peer.load()
    except OSError as error:
        return {"ours": ours, "flashmla": str(error)}
    return {"ours": ours, "flashmla": theirs}


# ------------------------------------------------------------------------------------------ cases


@dataclass
class Cache:
    """Tokens of a batch, and the same in pages.

    Attributes:
        tokens: (b, n, h_kv, 576), n a multiple of 64.
        paged: (pages, 64, h_kv, 576); tokens cut off by ``cut`` are NaN.
        table: (b, n / 64) int32.
    """

    tokens: torch.Tensor
    paged: torch.Tensor
    table: torch.Tensor

    @staticmethod
    def of(tokens: torch.Tensor) -> Cache:
        b, n, kv_heads, dim = tokens.shape
        width = n // PAGE
        table = torch.randperm(b * width, device=tokens.device).view(b, width)
        paged = torch.empty(b * width, PAGE, kv_heads, dim, dtype=tokens.dtype, device=table.device)
        paged[table.flatten()] = tokens.view(-1, PAGE, kv_heads, dim)
        return Cache(tokens, paged, table.int())

    def cut(self, lengths: Sequence[int]) -> torch.Tensor:
        """NaN behind ``lengths``, which never grow; returns them on the device, int32."""
        for own, length in zip(self.table.long(), lengths, strict=True):
            first, offset = divmod(length, PAGE)
            if offset:
                self.paged[own[first], offset:] = float("nan")
                first += 1
            self.paged[own[first:]] = float("nan")
        return torch.tensor(lengths, dtype=torch.int32, device=self.table.device)


def lengths_of(kind: str, batch: int, s_k: int) -> list[int]:
    """Tokens of each sequence; the same list every time."""
    rng = random.Random(f"{batch}/{s_k}")
    uneven = [min(max(round(rng.gauss(s_k, s_k / 2)), max(TOKENS)), s_k) for _ in range(batch)]
    if kind == "equal":
        return [s_k] * batch
    return [0 if kind == KINDS[2] and (i + 1 - batch) % 3 == 0 else n for i, n in enumerate(uneven)]


def reference(
    q: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 (out (b, s_q, h, 512), lse (b, h, s_q)); +infinity and 0 for rows without tokens.

    Args:
        q: (b, s_q, h, 576).
        tokens: (b, n, h_kv, 576), finite everywhere.
        lengths: (b,).
    """
    b, s_q, h, _ = q.shape
    n, kv_heads = tokens.shape[1:3]
    each = 8 * n * max(kv_heads * HEAD_DIM_QK, s_q * h)
    outs, lses = [], []
    for own in torch.arange(b, device=q.device).split(max(1, CHUNK_BYTES // each)):
        k = tokens[own].double().transpose(1, 2)  # (b, h_kv, n, 576)
        rows = q[own].double().unflatten(2, (kv_heads, -1)).transpose(1, 2)
        logits = rows.flatten(2, 3) @ k.mT * SCALE  # (b, h_kv, s_q * g, n)
        behind = s_q - 1 - torch.arange(s_q, device=q.device) if causal else lengths.new_zeros(s_q)
        limit = (lengths[own, None] - behind).repeat_interleave(h // kv_heads, 1)[:, None, :, None]
        logits.masked_fill_(torch.arange(n, device=q.device) >= limit, -torch.inf)
        top = logits.amax(-1, keepdim=True).masked_fill(limit <= 0, 0.0)
        p = logits.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        out = (p @ k[..., :CONTENT_DIM] / total).masked_fill(limit <= 0, 0.0)
        lse = (total.log() + top).masked_fill(limit <= 0, torch.inf)[..., 0]
        outs.append(out.unflatten(2, (s_q, -1)).transpose(1, 2).flatten(2, 3))
        lses.append(lse.unflatten(2, (s_q, -1)).transpose(2, 3).flatten(1, 2))
    return torch.cat(outs), torch.cat(lses)


def caches(
    batches: Sequence[int], lengths: Sequence[int], device: torch.device
) -> Iterator[tuple[str, int, int, Cache]]:
    """(dtype, s_k, h_kv, cache)."""
    for (name, dtype), b, s_k, kv_heads in itertools.product(
        DTYPES.items(), batches, lengths, KV_HEADS
    ):
        shape = (b, -(-s_k // PAGE) * PAGE, kv_heads, HEAD_DIM_QK)
        drawn = torch.randn(shape, device=device).div_(10).clamp_(-1, 1)
        yield name, s_k, kv_heads, Cache.of(drawn.to(dtype))


def run(
    kernels: Mapping[str, Kernel | str],
    device: torch.device,
    batches: Sequence[int] = BATCHES,
    lengths: Sequence[int] = LENGTHS,
    heads: Sequence[int] = HEADS,
) -> list[Tally]:
    """The grid, causal and not, then ``near 0``; a tally a kernel, dtype and kind."""
    torch.manual_seed(0)
    tallies = {
        (who, dtype, kind): Tally(who, dtype, kind, gated=who == "ours")
        for kind in (*KINDS, NEAR_ZERO)
        for dtype in DTYPES
        for who in kernels
    }

    def judge(q: torch.Tensor, cache: Cache, seqlens: torch.Tensor, causal: bool,
              dtype: str, kind: str) -> None:  # fmt: skip
        truth = reference(q, cache.tokens, seqlens, causal)
        b, s_q, h, _ = q.shape
        magnitudes = functools.partial(
            logit_magnitudes, q, cache.paged, cache.table, seqlens, SCALE, causal=causal
        )
        case = f"b {b} s_q {s_q} h {h} h_kv {cache.tokens.shape[2]} s_k {int(seqlens.max())}"
        for who, kernel in kernels.items():
            tally = tallies[who, dtype, kind]
            if isinstance(kernel, str):
                tally.refuse(kernel)
                continue
            try:
                got = kernel(q, cache.paged, cache.table, seqlens, causal)
            except Exception as error:  # counted; of ours it is a failure
                tally.refuse(error)
                continue
            tally.judge(got, truth, magnitudes, case + (" causal" if causal else ""))
            if kind == NEAR_ZERO:
                tally.condition = condition(got[1], truth[1], q, cache.tokens)

    for dtype, s_k, kv_heads, cache in caches(batches, lengths, device):
        b = len(cache.table)
        for kind in KINDS:
            seqlens = cache.cut(lengths_of(kind, b, s_k))
            for h, s_q in itertools.product([n for n in heads if n % kv_heads == 0], TOKENS):
                q = torch.randn(b, s_q, h, HEAD_DIM_QK, device=device).clamp_(-1, 1)
                for causal in (False, True)[: 1 + (s_q > 1)]:
                    judge(q.to(DTYPES[dtype]), cache, seqlens, causal, dtype, kind)
    for dtype in DTYPES:
        q, cache, seqlens = near_zero(max(batches), max(heads), dtype, device)
        judge(q, cache, seqlens, False, dtype, NEAR_ZERO)
    return list(tallies.values())


def near_zero(
    batch: int, heads: int, dtype: str, device: torch.device
) -> tuple[torch.Tensor, Cache, torch.Tensor]:
    """(q, cache, lengths) of one token a sequence, drawn as ``tests/gpu/test_dense.py`` does."""
    q = 10 * torch.randn(batch, max(TOKENS), heads, HEAD_DIM_QK, device=device)
    tokens = 0.1 * (torch.randn(batch, PAGE, 1, HEAD_DIM_QK, device=device) + 0.5)
    cache = Cache.of(tokens.to(DTYPES[dtype]))
    return q.to(DTYPES[dtype]), cache, cache.cut([1] * batch)


def condition(
    lse: torch.Tensor, truth: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor
) -> float:
    """Largest LSE error of sequences of one token over 2^-24 sum|q_i k_i| softmax_scale."""
    magnitudes = q.double().abs() * tokens[:, :1].double().abs()  # (b, s_q, h, 576)
    unit = 2.0**-24 * magnitudes.sum(-1).transpose(1, 2) * SCALE
    return float(((lse.double() - truth).abs() / unit).max())


# ----------------------------------------------------------------------------------------- report


def lines(tallies: Sequence[Tally]) -> list[str]:
    """Markdown."""
    made = [
        "## FlashMLA's gates on its test grid", "",
        f"b {BATCHES}, s_q {TOKENS}, s_k {LENGTHS}, h_q {HEADS}, h_kv {KV_HEADS}, causal and not."
        f" Gates: out {OUT_GATE[0]:g} absolute or {OUT_GATE[1]:.4g} relative, LSE {LSE_GATE[0]:g}"
        f" or {LSE_GATE[1]:.4g}, 1 - cosine {COSINE_GATE:g}; an LSE also by its logits' condition,"
        f" {LSE_CONDITION * 2**24:g} x 2^-24 sum|q k| softmax_scale. `{NEAR_ZERO}`: one token a"
        " sequence; its LSE error as a multiple of 2^-24 sum|q k| softmax_scale is in the last"
        " column but one.", "",
        "| lengths | dtype | who | cases | elements | out outside | LSE outside | LSE by condition "
        "| cosines beyond | worst 1 - cosine | worst LSE | x condition | not run |",
        "|---" * 13 + "|",
    ]  # fmt: skip
    for t in tallies:
        multiple = "" if t.condition is None else f"{t.condition:.1f}"
        missing = f"{t.refused}: {t.reason}" if t.refused else ""
        made.append(
            f"| {t.kind} | {t.dtype} | {t.who} | {t.cases} | {t.elements:.2e} | {t.out_outside} "
            f"| {t.lse_outside} | {t.by_condition} | {t.cosine_cases} | {t.cosine:.1e} "
            f"| {t.lse_error:.1e} | {multiple} | {missing} |"
        )
    outside = [f"- {t.who}, {t.dtype}, {t.kind}: {'; '.join(t.worst)}" for t in tallies if t.worst]
    return [*made, *(["", "Outside, first cases:", "", *outside] if outside else [])]
