"""FlashMLA's sparse calls on a real GPU: its gates on its data, and inputs that move the maxima.

Truth is fp64 on e4m3 times the stored scale.  Every entry that is no token is -1 or INT_MAX, and
what no entry names is NaN.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from snapmla import metrics
from snapmla.compat import flash_mla
from snapmla.testing.record_reference import RecordCall, record_decode_mimic

pytestmark = pytest.mark.gpu
HEADS = (1, 8, 16, 20, 40, 64, 96, 128)
TOPK = (1, 17, 64, 100, 128, 512, 2048, 16384)
PAGES_OF = (1, 2, 53, 61, 64, 69, 256)
SCALE, INT_MAX = 576**-0.5, 2**31 - 1
ABS, REL, COSINE = 1e-3, 2.01 / 128, 5e-6  # FlashMLA's gates of ``out``
LSE_ABS, LSE_REL = 1e-6, 8.01 / 65536
FREE_LSE = 2.0**-12  # of softmax_scale * sum |q k|, with free scales and few tokens
Case = tuple[int, int, int, bool]  # heads, topk, tokens of a page, powers of two


class Step:
    """One call of 3 sequences, 2 query tokens each, over a pool of rows of 656 bytes."""

    B, S_Q = 3, 2

    def __init__(self, case: Case, style: str = "flashmla") -> None:
        heads, topk, page, powers = case
        self.heads, self.page = heads, page
        pages = -(-max(2 * topk, 300) // page)
        pool = pages * page
        k = torch.randn(pool, 576, device="cuda") / 10
        self.q = torch.randn(self.B, self.S_Q, heads, 576, device="cuda").clamp(-1, 1)
        self.indices = torch.randint(pool, (self.B, self.S_Q, topk), device="cuda").int()
        self._style(style, k)
        self.length = torch.tensor([topk, topk // 2, 0], device="cuda").int()
        self.indices[0, :, 3::7] = -1
        self.indices[1, :, topk // 2 :] = INT_MAX
        self.rows = self._stored(k, powers).view(pages, page, 1, 656)
        self.sink = torch.randn(heads, device="cuda")
        self.sink[1::3], self.sink[2::5] = math.inf, -math.inf
        self.q = self.q.bfloat16()

    def _style(self, style: str, k: torch.Tensor) -> None:
        """Inputs that move the maxima: logits of large deviation, tiles that rise and fall by
        200 nats, queries that equal a token, large RoPE, groups of far scales."""
        if style.startswith("std"):
            self.q *= float(style[3:]) / 0.4
        elif style in ("rising", "falling"):
            mean = self.q.flatten(0, 2).mean(0)
            tile = torch.arange(self.indices.shape[-1], device="cuda") // 64
            step = (tile if style == "rising" else -tile) % 5 * 200.0
            size = step / (SCALE * float(mean.square().sum()))
            for i, s in itertools.product(range(self.B), range(self.S_Q)):
                at = self.indices[i, s].long()
                k[at] = k[at] + size[:, None] * mean
        elif style == "equal":
            self.q[:] = k[self.indices[..., 0].long()][:, :, None]
        elif style == "rope":
            k[:, 512:] = k[:, 512:].sign() * 1e3
        elif style == "groups":
            k[:, :128] *= 2.0**10
            k[:, 128:256] *= 2.0**-10

    def _stored(self, k: torch.Tensor, powers: bool) -> torch.Tensor:
        groups = k[:, :512].unflatten(-1, (4, 128))
        scale = (groups.abs().amax(-1) / 448).clamp_min(2.0**-126)
        if powers:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        content = (groups / scale[..., None]).to(torch.float8_e4m3fn).flatten(-2)
        rope = k[:, 512:].bfloat16()
        parts = [x.contiguous().view(torch.uint8) for x in (content, scale, rope)]
        rows = torch.cat(parts, 1)
        named = torch.zeros(len(k), dtype=torch.bool, device="cuda")
        flat = self.indices[(self.indices >= 0) & (self.indices < len(k))].long()
        named[flat] = True
        rows[~named] = 0xFF
        return rows

    def run(self, sink: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        metadata, _ = flash_mla.get_mla_metadata()
        return flash_mla.flash_mla_with_kvcache(
            self.q, self.rows, None, None, 512, metadata, is_fp8_kvcache=True,
            indices=self.indices, topk_length=self.length,
            attn_sink=self.sink if sink else None,
        )  # fmt: skip

    def truth(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(out with sinks, lse, the largest softmax_scale * sum |q k| of a token), in fp64."""
        b, s_q, h = self.B, self.S_Q, self.heads
        out = torch.zeros(b, s_q, h, 512, dtype=torch.float64, device="cuda")
        lse = torch.full((b, h, s_q), math.inf, dtype=torch.float64, device="cuda")
        size = torch.zeros(b, h, s_q, dtype=torch.float64, device="cuda")
        flat = self.rows.view(-1, 656)
        for i, s in itertools.product(range(b), range(s_q)):
            row = self.indices[i, s, : int(self.length[i])].long()
            row = row[(row >= 0) & (row < len(flat))]
            if not len(row):
                continue
            rows = flat[row]
            content = rows[:, :512].contiguous().view(torch.float8_e4m3fn).double()
            scale = rows[:, 512:528].contiguous().view(torch.float32).double()
            k = content * scale.repeat_interleave(128, 1)
            k = torch.cat((k, rows[:, 528:].contiguous().view(torch.bfloat16).double()), 1)
            q = self.q[i, s].double()
            logits = q @ k.T * SCALE
            total = torch.logsumexp(logits, 1)
            out[i, s] = torch.exp(logits - total[:, None]) @ k[:, :512]
            out[i, s] *= torch.sigmoid(total - self.sink.double())[:, None]
            lse[i, :, s] = total
            size[i, :, s] = (q.abs() @ k.abs().T).amax(1) * SCALE
        return out, lse, size

    def mimic(self) -> torch.Tensor:
        """(b, s_q, h, 512) fp64 on the CPU: results with the rounding of the kernel's pipeline."""
        counts = self.length.repeat_interleave(self.S_Q)
        given = self.q.flatten(0, 1), self.rows[:, :, 0], self.indices.flatten(0, 1), counts
        q, rows, indices, lengths = (x.cpu() for x in given)
        call = RecordCall(q, rows, indices, lengths, SCALE, self.sink.cpu())
        return record_decode_mimic(call, self.heads <= 32)[0].view(*self.q.shape[:3], 512)


def outside(got: torch.Tensor, want: torch.Tensor, absolute: float, relative: float) -> int:
    """How many values are outside of FlashMLA's gate; others than finite ones must be equal."""
    same = torch.isfinite(want) == torch.isfinite(got)
    near = (got - want).abs() <= torch.maximum(
        torch.full_like(want, absolute), relative * want.abs()
    )
    return int((~(same & (near | (got == want)))).sum())


def cases() -> list[Case]:
    """Every pair of heads and topk, every page size, both kinds of scales, and of one token."""
    pairs = itertools.product(HEADS, TOPK)
    found = [(h, k, PAGES_OF[i % 7], bool(i % 2)) for i, (h, k) in enumerate(pairs)]
    found += [(heads, 1, 64, True) for heads in HEADS]
    return found + [(64, 128, page, powers) for page in PAGES_OF for powers in (False, True)]


def test_flashmlas_gates() -> None:
    bad = []
    for case in cases():
        step = Step(case)
        out, lse = step.run()
        want, want_lse, size = step.truth()
        got = out.double()
        wrong = outside(got, want, ABS, REL)
        cosine = 1 - 2 * float((got * want).sum() / (got.square().sum() + want.square().sum()))
        wrong_lse = outside(lse.double(), want_lse, LSE_ABS, LSE_REL)
        if wrong_lse and case[1] < 17 and not case[3]:
            near = (lse - want_lse).abs() <= torch.maximum(
                FREE_LSE * size, LSE_REL * want_lse.abs()
            )  # fmt: skip
            wrong_lse = int((~torch.where(torch.isfinite(want_lse), near, lse == want_lse)).sum())
        if wrong or wrong_lse or not cosine < COSINE:
            bad.append((case, wrong, wrong_lse, cosine))
    assert not bad, bad


@pytest.mark.parametrize("style", ["std3", "std30", "rising", "falling", "equal", "rope", "groups"])
def test_inputs_that_move_the_frames(style: str) -> None:
    """Relative L2 to fp64; the LSE within its bound at the largest logit."""
    bad = []
    for heads, topk, powers in itertools.product((16, 64, 128), (100, 512), (False, True)):
        step = Step((heads, topk, 64, powers), style)
        out, lse = step.run()
        want, want_lse, size = step.truth()
        error = metrics.relative_l2(out.double(), want)
        finite = torch.isfinite(want_lse)
        apart = (lse.double() - want_lse)[finite].abs()
        bound = torch.maximum(FREE_LSE * size, LSE_REL * want_lse.abs())[finite] + LSE_ABS
        mimic = metrics.relative_l2(step.mimic(), want.cpu())
        if not error < 1.1 * mimic + 2.5e-3 or not bool((apart <= bound).all()):
            bad.append(((heads, topk, powers), error, mimic, float((apart / bound).max())))
    assert not bad, (style, bad)


@pytest.mark.parametrize("junk", [0.0, 1e30, math.nan])
def test_rows_do_not_meet(junk: float) -> None:
    """A head's bits are the same whatever other heads hold."""
    step = Step((96, 200, 64, False))
    out, lse = step.run(sink=False)
    step.q[:, :, ::2] = junk
    again, again_lse = step.run(sink=False)
    assert torch.equal(out[:, :, 1::2], again[:, :, 1::2])
    assert torch.equal(lse[:, 1::2], again_lse[:, 1::2])
