"""Inputs on which inexact logits show, for tests of pipeline ``f16`` on either device.

Each row of the query equals a key of its sequence, so that all products of Q.K have one sign.
Bounds are those that the pipeline promises: of LSE ``lse_bound``, of results ``FP32_ERROR``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla.testing import metrics
from snapmla.testing.aligned import PAGE, SCALE, Aligned
from snapmla.testing.sparse_job import SparseJob, SparseShape

# name -> what a key looks like; of ``loud N`` one channel of each key is N times as large
KINDS = ("normal", "heavy tails", "loud 5", "loud 30", "loud 100", "448 among 3.75")
LENGTHS = (1, 64, 4097)
PAIR_LOGITS = (3.9, 9.7, 19.4, 38.8)  # of ``aligned.two_of_one_logit``
FP32_ERROR = 1.0e-3  # relative L2 of results of fp32
LSE_ERROR, LSE_SHARE = 2e-4, 2e-5  # of LSE; a share is of the largest content logit
LEVEL = 40.0  # logit of a query with its key, of every other seed; of the others what the keys give


def keys_of(kind: str, n: int, random: torch.Generator) -> Tensor:
    """(n, 576) fp32 on the CPU."""
    keys, token = torch.randn(n, 576, generator=random), torch.arange(n)
    loud = torch.randint(512, (n,), generator=random)
    if kind == "heavy tails":  # Student's t with 3 degrees of freedom
        keys *= (3 / torch.randn(3, n, 576, generator=random).square().sum(0)).sqrt()
    elif kind.startswith("loud"):
        keys[token, loud] *= float(kind.split()[1])
    elif kind == "448 among 3.75":
        keys[:, :512] = 3.75 * keys[:, :512].sign()
        keys[:, 512:] = 0
        keys[token, loud] = 448
    return keys


def equal_to_keys(
    kind: str, heads: int, n: int, seed: int, device: torch.device | str = "cpu"
) -> Aligned:
    """One sequence of ``n`` tokens, and a query token whose heads each equal a token of it."""
    random = torch.Generator().manual_seed(seed)
    keys = keys_of(kind, n, random).bfloat16().float()
    own = torch.randint(n, (heads,), generator=random)
    own[0] = n - 1  # the last token counts
    made = Aligned.of(keys.to(device), keys[own].to(device))
    if seed % 2:
        logits = made.logits()[torch.arange(heads), own.to(device)]
        made.q.scale.mul_((LEVEL / logits).float())
    return made


def content_logits(step: Aligned) -> Tensor:
    """(h,) the largest content logit of each row by magnitude, fp64."""
    content, _, scale = (x.double() for x in step.tokens)
    dot = step.q.nope[0, 0].double() @ content.T
    return (dot * step.q.scale[0, 0].double()[:, None] * scale * SCALE).abs().amax(1)


@dataclass(frozen=True)
class Found:
    """Errors of a result, and what may be.

    Attributes:
        error: relative L2 of all rows.
        lse: the largest error of an LSE as a share of what its row may have.
    """

    error: float
    lse: float

    @property
    def right(self) -> bool:
        """True if both errors are within the bounds of fp32 results."""
        return self.error <= FP32_ERROR and self.lse <= 1.0


def found(step: Aligned, out: Tensor, lse: Tensor) -> Found:
    """Errors of out (1, 1, h, 512) and natural lse (1, h, 1) against the step's truth."""
    truth, truth_lse = step.truth()
    allowed = LSE_ERROR + LSE_SHARE * content_logits(step)
    off = (lse.double() - truth_lse).abs()[0, :, 0]
    return Found(metrics.relative_l2(out, truth), float((off / allowed).nan_to_num(2.0).max()))


class ListedStep(SparseJob):
    """A step's tokens named one by one, in an order of their own, some places idle."""

    def __init__(self, spec: VariantSpec, step: Aligned, device: torch.device | str = "cpu"):
        self.step, n = step, int(step.cache_seqlens[0])
        self.topk = n + 5
        heads = step.q.nope.shape[2]
        shape = SparseShape(heads, self.topk, (self.topk,), PAGE, parts=1)
        super().__init__(spec, shape, device=device)

    def _fill(self) -> None:
        cache, n = self.step.cache, int(self.step.cache_seqlens[0])
        self.planes = cache.content_u8, cache.rope, cache.named_tensors["scale"]
        named = torch.cat([PAGE + torch.arange(n), torch.full((self.topk - n,), -1)])
        self.indices = named[torch.randperm(self.topk)].int()[None]
        self.q = self.step.q

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), "softmax_scale": SCALE}
