"""SM100's decode over a 16-bit cache: a sample in which every two values of every two axes meet.

Lengths are ragged, sequences are split and merged, pools, buffers and the tails of block tables are
poisoned; results are held to 1.1 times the error of the mimic, whose P has 16 bits, and to
FlashMLA's gates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import dense_job, selfcheck
from snapmla.testing.dense_job import SCALE, DenseJob
from softgpu import LoadedKernel, Options, using
from tests.support.pairwise import Point, pairwise

LENGTHS = (0, 1, 63, 64, 65, 321)
ROW_TILES = {"ws": 64, "pair": 128}
AXES = {
    "pipeline": tuple(ROW_TILES),
    "heads": (1, 7, 16, 20, 48, 64, 96, 128),
    "s_q": (1, 2, 4),
    "page": (16, 32, 64, 128),
    "dtype": tuple(dense_job.DTYPES),
    "inputs": ("usual", "peaked", "sink", "rope", "keys", "swings"),
    "parts": (1, 4),
    "asynchronous": ("early", "late", "random"),
}
SAMPLE = list(pairwise(AXES))


def spec_of(pipeline: str, dtype: str = "bf16", page: int = 64) -> VariantSpec:
    return VariantSpec(
        op="dense_decode", arch="sm_100a", pipeline=pipeline, row_tile=ROW_TILES[pipeline],
        page_size=page, dtype=dtype,
    )  # fmt: skip


def kernel_of(spec: VariantSpec) -> LoadedKernel:
    """Compiled first if need be, its planner too."""
    variants.find_or_build(VariantSpec(op="plan_decode", arch=spec.arch), need_library=False)
    return selfcheck.load(spec, variants.find_or_build(spec, need_library=False).directory)


LEVEL = 200.0  # nats, of ``swings``: of every 64 tokens in turn
MARK = 16.0  # the queries' last RoPE channel, where keys have their logit


class Drawn(DenseJob):
    """Ragged lengths, and inputs of one kind."""

    kind: str

    @staticmethod
    def of(kind: str, spec: VariantSpec, point: Point) -> Drawn:
        made = type("Made", (Drawn,), {"kind": kind})
        job = made(
            spec, LENGTHS, parts=point["parts"], heads=point["heads"], s_q=point["s_q"],
            amplitude=100.0 if kind == "peaked" else 10.0,
        )  # fmt: skip
        if kind in ("sink", "swings"):
            job.q[..., -1] = MARK
        if kind == "keys":
            for i, tokens in enumerate(job.tokens):
                rows = torch.arange(job.s_q * job.heads)
                if len(tokens):
                    job.q[i] = tokens[rows * 7 % len(tokens), 0].view(job.q[i].shape)
        return job

    def _sample(self, n: int, dtype: torch.dtype) -> Tensor:
        tokens = super()._sample(n, dtype).float()
        if type(self).kind == "rope":
            signs = 2.0 * torch.randint(0, 2, tokens[..., 512::16].shape) - 1.0
            tokens[..., 512::16] = 1e3 * signs
        if type(self).kind == "keys":
            tokens[..., 512:] *= 30.0  # logits of some 24 nats; V, and so its gate, as ever
        if type(self).kind == "sink":
            tokens[:1, :, -1] = (math.log(max(n, 1)) + 2.0) / (MARK * SCALE)
        if type(self).kind == "swings":
            odd = torch.arange(n) // 64 % 2
            tokens[..., -1] = ((2 * odd - 1) * (LEVEL / (MARK * SCALE)))[:, None]
        return tokens.to(dtype)


def run(point: Point) -> selfcheck.DecodeErrors:
    """The errors of one point; the hazard check is on."""
    spec = spec_of(point["pipeline"], point["dtype"], point["page"])
    torch.manual_seed(point["heads"])
    job = Drawn.of(point["inputs"], spec, point)
    assert point["parts"] == 1 or int(job.plan.split_begin[-1]) >= 2, "a sequence is split"
    options = Options(hazards="raise", asynchronous=point["asynchronous"], seed=1)
    with using(options):
        return job.errors(job.run(kernel_of(spec)))
