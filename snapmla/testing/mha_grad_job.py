"""Backward of dense MHA at the level of the ABI: fp64 autograd, rounding mimic, calls of kernels.

The mimic rounds what the kernels round: O and LSE that they are given, P and dS as operands of the
sums, results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.mha_grads import PAD, rope_groups, stats_blocks, stats_row
from dsl_kernels.formats.mha_list import most_tiles
from dsl_kernels.spec import VariantSpec
from snapmla.testing import metrics
from snapmla.testing.mha_job import (
    COSINE_GATE,
    FP32_SLACK,
    LOG2_E,
    MIMIC_FACTOR,
    MhaJob,
    mha_reference,
    offsets,
    work_of,
)

ROW_FACTOR = 1.5  # a row's error may exceed the mimic's worst row's by, beside MIMIC_FACTOR of all


def key_work(job: MhaJob) -> Tensor:
    """The list of tiles of keys as ``mha_items`` leaves it."""
    return work_of(job.lk, job.lq, False, len(job.v))


def _parts(job: MhaJob) -> Iterator[tuple[slice, slice, int]]:
    """(query tokens that see a key, keys, how many query tokens before them see none)."""
    q0 = k0 = 0
    for s_q, s_k in zip(job.lq, job.lk):
        skipped = max(0, s_q - s_k) if job.causal else 0
        if s_k and s_q > skipped:
            yield slice(q0 + skipped, q0 + s_q), slice(k0, k0 + s_k), skipped
        q0, k0 = q0 + s_q, k0 + s_k


def _scores(q: Tensor, k: Tensor, job: MhaJob) -> Tensor:
    """fp64 logits (h, s_q, s_k) of query tokens that all see a key."""
    group = q.shape[1] // k.shape[1]
    s = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * job.scale
    if job.causal:
        row = torch.arange(len(q), device=q.device)[:, None] + (len(k) - len(q))
        s = s.masked_fill(torch.arange(len(k), device=q.device)[None] > row, -math.inf)
    return s


@dataclass(frozen=True)
class Grads:
    """Gradients; ``dk_rope`` is None of 128 channels."""

    dq: Tensor
    dk_nope: Tensor
    dk_rope: Tensor | None
    dv: Tensor

    @property
    def each(self) -> dict[str, Tensor]:
        return {name: x for name, x in vars(self).items() if x is not None}


@dataclass(frozen=True)
class GradErrors:
    """Relative L2 of each gradient against fp64, and what may be had of it.

    Attributes:
        error, allowed: by gradient; ``allowed`` is 1.1 times the mimic's, plus 2e-5.
        row, row_allowed: norm of the largest error of a row of a head, to the largest row's; beside
            1.5 times the mimic's a rounding of the result, which in a row of one large element is
            all of its error, and of the mimic's may be none.
        cosine, cosine_allowed: 1 - cosine; FlashMLA's gate, or 1.5 times the mimic's.
        beside: elements that are not finite, or were written though no sequence has them.
    """

    error: dict[str, float]
    allowed: dict[str, float]
    row: dict[str, float]
    row_allowed: dict[str, float]
    cosine: dict[str, float]
    cosine_allowed: dict[str, float]
    beside: int

    @property
    def right(self) -> bool:
        return not self.beside and all(
            self.error[x] <= self.allowed[x] and self.row[x] <= self.row_allowed[x]
            and self.cosine[x] <= self.cosine_allowed[x] for x in self.error
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.beside} elements beside; " + "; ".join(
            f"{x} relative L2 {self.error[x]:.2e} (allowed {self.allowed[x]:.2e}), row "
            f"{self.row[x]:.1e} ({self.row_allowed[x]:.1e}), 1 - cosine {self.cosine[x]:.0e}"
            for x in self.error
        )


@dataclass(frozen=True)
class GradJob:
    """A backward of ``forward``.

    Attributes:
        forward: its inputs; rows behind the last sequence may hold anything.
        out, lse: what the forward gave.
        dout, dlse: gradients of them; ``dlse`` is None where there is none.
        together: KV heads whose RoPE channels one CTA sums.
    """

    forward: MhaJob
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None = None
    together: int = 1

    @classmethod
    def of(
        cls, forward: MhaJob, *, behind: float = math.nan, lse_too: bool = False, together: int = 1
    ) -> GradJob:
        """Normal dO of torch's global seed, out and lse of the fp64 reference, rounded."""
        q, v = forward.q, forward.v
        given = (q, forward.k, v, offsets(forward.lq), offsets(forward.lk))
        out, lse = mha_reference(*given, forward.scale, forward.causal)
        t = sum(forward.lq)
        out[t:], lse[:, t:] = behind, behind
        dout = torch.randn(len(q), q.shape[1], v.shape[-1] + 8, device=q.device)
        dlse = torch.randn(lse.shape, device=q.device) if lse_too else None
        dout[t:] = behind
        return cls(forward, out.to(q.dtype), lse.float(), dout.to(q.dtype)[..., 8:], dlse, together)

    def with_forward(self, forward: MhaJob) -> GradJob:
        """A job with the inputs, out and LSE of another forward, and this one's dO and dLSE."""
        made = GradJob.of(forward)
        return replace(self, forward=forward, out=made.out, lse=made.lse)

    # ---------------------------------------------------------------- references

    def truth(self) -> Grads:
        """fp64, by autograd of ``value``."""
        job = self.forward
        leaves = [x.double().requires_grad_() for x in (job.q, *job.ks, job.v)]
        q, *ks, v = leaves
        value = self.value(replace(job, q=q, ks=tuple(ks), v=v))
        found = torch.autograd.grad(value, leaves, allow_unused=True)
        pairs = zip(leaves, found)
        return self._named([torch.zeros_like(x) if g is None else g for x, g in pairs])

    def value(self, job: MhaJob) -> Tensor:
        """sum(dO O) + sum(dLSE LSE) of a forward in fp64, whose gradients are the job's."""
        q, v, k = job.q, job.v, job.k
        group, total = q.shape[1] // v.shape[1], q[:0].sum()
        for rows, keys, _ in _parts(job):
            s = _scores(q[rows], k[keys], job)
            values = v[keys].repeat_interleave(group, 1)
            out = torch.einsum("hqk,khd->qhd", s.softmax(-1), values)
            total = total + (out * self.dout[rows].double()).sum()
            if self.dlse is not None:
                total = total + (s.logsumexp(-1) * self.dlse[:, rows].double()).sum()
        return total

    def mimic(self) -> Grads:
        """fp64 but for what the kernels round."""
        job, dtype = self.forward, self.forward.q.dtype
        q, v, k, dout = (x.double() for x in (job.q, job.v, job.k, self.dout))
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        group = q.shape[1] // v.shape[1]
        for rows, keys, _ in _parts(job):
            s = _scores(q[rows], k[keys], job)
            p = torch.exp(s - self.lse[:, rows, None].double())
            delta = (self.out[rows].double() * dout[rows]).sum(-1).T
            if self.dlse is not None:
                delta = delta - self.dlse[:, rows]
            dp = torch.einsum("qhd,khd->hqk", dout[rows], v[keys].repeat_interleave(group, 1))
            p16, ds16 = (x.to(dtype).double() for x in (p, p * (dp - delta[..., None])))
            shape = (-1, v.shape[1], group, q.shape[-1])
            dq[rows] = torch.einsum("hqk,khd->qhd", ds16, k[keys].repeat_interleave(group, 1))
            made = torch.einsum("hqk,qhd->khd", ds16, q[rows])
            dk[keys] = made.view(shape).sum(2)
            made = torch.einsum("hqk,qhd->khd", p16, dout[rows])
            dv[keys] = made.view(*shape[:3], v.shape[-1]).sum(2)
        dks, at = [], 0
        for x in job.ks:
            of_heads = dk[..., at : at + x.shape[-1]] * job.scale
            at += x.shape[-1]
            dks.append(of_heads.view(len(x), x.shape[1], -1, x.shape[-1]).sum(2))
        return self._named([x.to(dtype) for x in (dq * job.scale, *dks, dv)])

    def _named(self, grads: list[Tensor]) -> Grads:
        dq, dk_nope, *rope, dv = grads
        return Grads(dq, dk_nope, rope[0] if rope else None, dv)

    def errors(self, got: Mapping[str, Tensor]) -> GradErrors:
        """Errors of named gradients against ``truth``; rows of no sequence must still be NaN."""
        made: list[dict[str, float]] = [{} for _ in range(6)]
        beside = 0
        truth, mimic = self.truth().each, self.mimic().each
        for name, value in got.items():
            end = sum(self.forward.lq if name == "dq" else self.forward.lk)
            beside += int((~value[end:].isnan()).sum() + (~value[:end].isfinite()).sum())
            mine, want, rounded = (x[:end].double() for x in (value, truth[name], mimic[name]))
            if not want.any():
                beside += int((mine != 0).sum())
                continue
            error, rough = (metrics.relative_l2(x, want) for x in (mine, rounded))
            most = want.norm(dim=-1).max()
            rows = [float((x - want).norm(dim=-1).max() / most) for x in (mine, rounded)]
            figures = (error, MIMIC_FACTOR * rough + FP32_SLACK, rows[0],
                       ROW_FACTOR * rows[1] + torch.finfo(self.out.dtype).eps / 2,
                       metrics.one_minus_cosine(mine, want),
                       max(COSINE_GATE, ROW_FACTOR * metrics.one_minus_cosine(rounded, want)),
                       )  # fmt: skip
            for into, figure in zip(made, figures):
                into[name] = figure
        return GradErrors(made[0], made[1], made[2], made[3], made[4], made[5], beside)

    # ---------------------------------------------------------------- calls

    def stats(self) -> Tensor:
        """NaN, as large as a call's must be."""
        t, h, _ = self.forward.q.shape
        shape = (h, stats_blocks(t, len(self.forward.lq)), PAD, 2)
        return torch.full(shape, math.nan, device=self.out.device)

    def stats_rows(self) -> list[int]:
        """First row of each sequence."""
        firsts = offsets(self.forward.lq).tolist()
        return [stats_row(first, i) for i, first in enumerate(firsts[:-1])]

    def want_stats(self) -> Tensor:
        """fp64 of what mha_delta leaves, NaN where it leaves nothing."""
        job, want = self.forward, self.stats().double()
        flat, q0 = want.view(want.shape[0], -1, 2), 0
        lse = torch.where(self.lse == -math.inf, math.inf, self.lse.double() * LOG2_E)
        delta = (self.out.double() * self.dout.double()).sum(-1).T
        if self.dlse is not None:
            delta = delta - self.dlse
        for at, s_q in zip(self.stats_rows(), job.lq):
            end = at + -(-s_q // PAD) * PAD
            flat[:, at:end, 0], flat[:, at:end, 1] = math.inf, 0.0
            flat[:, at : at + s_q, 0] = lse[:, q0 : q0 + s_q]
            flat[:, at : at + s_q, 1] = delta[:, q0 : q0 + s_q]
            q0 += s_q
        return want

    def of_delta(self) -> dict[str, Any]:
        """Arguments of ``mha_delta``."""
        job = self.forward
        dlse = self.lse[:0] if self.dlse is None else self.dlse
        tables = self._tables(work_of(job.lq, job.lk, job.causal, len(job.q)))
        tables["key_work"] = key_work(job).to(self.out.device)
        del tables["cu_seqlens_k"]
        return {
            "out": self.out, "dout": self.dout, "lse": self.lse, "dlse": dlse, **tables,
            "stats": self.stats(), "tiles": max(1, most_tiles(len(job.q), len(job.lq))),
        }  # fmt: skip

    def _tables(self, work: Tensor) -> dict[str, Tensor]:
        job, device = self.forward, self.out.device
        lengths = {"cu_seqlens_q": offsets(job.lq), "cu_seqlens_k": offsets(job.lk)}
        return {name: x.to(device) for name, x in {**lengths, "work": work}.items()}

    def _shared(self, stats: Tensor) -> dict[str, Any]:
        job = self.forward
        return {
            "q": job.q, **dict(zip(("k_nope", "k_rope"), job.ks)), "v": job.v, "dout": self.dout,
            "stats": stats, "softmax_scale": job.scale, "causal": int(job.causal),
        }  # fmt: skip

    def _blank(self, x: Tensor, heads: int, width: int) -> Tensor:
        """Strided rows, full of NaN."""
        made = torch.full((len(x), heads, width + 8), math.nan, device=x.device)
        return made.to(x.dtype)[..., 8:]

    def of_dq(self, stats: Tensor) -> dict[str, Any]:
        """Arguments of ``mha_dq``, whose ``stats`` ``mha_delta`` has filled."""
        job = self.forward
        t, h, width = job.q.shape
        most = max(1, most_tiles(t, len(job.lq)) * h)
        return {
            **self._shared(stats), **self._tables(work_of(job.lq, job.lk, job.causal, t)),
            "dq": self._blank(job.q, h, width), "ctas": min(job.ctas, most),
        }  # fmt: skip

    def of_dkv(self, stats: Tensor) -> dict[str, Any]:
        """Arguments of ``mha_dkv``."""
        job = self.forward
        t, h, _ = job.v.shape
        parts: dict[str, Any] = {}
        if len(job.ks) == 2:
            groups = rope_groups(h, self.together)
            parts["parts"] = torch.full((t, groups, 64), math.nan, device=job.v.device)
            parts["heads_together"] = self.together
        most = max(1, most_tiles(t, len(job.lk)) * h)
        return {
            **self._shared(stats), **self._tables(key_work(job)),
            "dk_nope": self._blank(job.v, h, 128), **parts, "dv": self._blank(job.v, h, 128),
            "behind_dq": 0, "ctas": min(job.ctas, most),
        }  # fmt: skip

    def run(self, call: Callable[[str, Mapping[str, Any]], None]) -> Grads:
        """All kernels, one behind the other; ``call`` (op, arguments) calls one."""
        delta = self.of_delta()
        call("mha_delta", delta)
        dq, dkv = self.of_dq(delta["stats"]), self.of_dkv(delta["stats"])
        call("mha_dq", dq)
        call("mha_dkv", {**dkv, "work": delta["key_work"], "behind_dq": 1})
        rope = None
        if len(self.forward.ks) == 2:
            given = self.forward.ks[1]
            rope = self._blank(given, given.shape[1], given.shape[-1])
            call("mha_rope_sum", {"parts": dkv["parts"], "dk_rope": rope})
        return Grads(dq["dq"], dkv["dk_nope"], rope, dkv["dv"])


def variants(spec: VariantSpec) -> dict[str, VariantSpec]:
    """op -> variant, for the four ops of the backward to which ``spec`` belongs.

    ``spec`` is a variant of mha_dq or mha_dkv.
    """
    of_dtype = {"dtype": spec.dtype, "arch": spec.arch}
    return {
        **{op: VariantSpec(op=op, **of_dtype) for op in ("mha_delta", "mha_rope_sum")},
        **{op: VariantSpec(op=op, d_qk=spec.d_qk, **of_dtype) for op in ("mha_dq", "mha_dkv")},
    }
