"""``mha_rope_sum``: partial sums of RoPE channels' gradients, added in the order of heads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import DTYPES, Call, Sizes, Workload, bit_for_bit
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.samples import Random


def truth(_spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """fp32 sums, one head behind the other, then rounded."""
    parts, out = given["parts"], given["dk_rope"]
    groups = parts.unflatten(1, (out.shape[1], -1))
    total = torch.zeros_like(groups[:, :, 0])
    for i in range(groups.shape[2]):
        total = total + groups[:, :, i]
    return {"dk_rope": total.to(out.dtype)}


def small(spec: VariantSpec) -> Iterator[Call]:
    """Strided rows; one head, two, one of its own group each; a token that is NaN."""
    for tokens, groups, heads in ((70, 5, 1), (33, 6, 2), (3, 2, 2)):
        parts = torch.randn(tokens, groups, 68)[..., :64] * 8
        parts[1, 1, 3] = math.nan
        out = torch.full((tokens, heads, 72), 7.0).to(DTYPES[spec.dtype])[..., 8:]
        given = {"parts": parts, "dk_rope": out}
        yield Call(given, {"dk_rope": "dk_rope"}, truth(spec, given))


def recorded(case: Case, run: Runner) -> Recorded:
    """Five groups."""
    parts = exact.bell(case.bits(), (50, 5, 64), 1)
    out = run.full((50, 1, 64), 5.0, DTYPES[case.spec.dtype])
    run.call(case.variant, parts=run.there(parts), dk_rope=out)
    return exact.of_problems([parts], [[out]], "dk_rope")


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """A group for every four heads."""
    source, t = Random(device, seed), sizes.batch * sizes.tokens
    groups = -(-sizes.heads // 4)
    return {
        "parts": source.normal(t, groups, 64, dtype=torch.float32),
        "dk_rope": source.full(t, 1, 64, dtype=DTYPES[spec.dtype]),
    }


def moved(_spec: VariantSpec, sizes: Sizes) -> float:
    """Reads the partial sums, writes theirs."""
    return sizes.batch * sizes.tokens * (256.0 * -(-sizes.heads // 4) + 128.0)


def behind(spec: VariantSpec) -> Iterator[Call]:
    """The last of the small calls, behind itself."""
    *_, call = small(spec)
    yield call
    yield call


WORKLOAD = Workload(small, bit_for_bit, recorded, sized, truth, moved=moved, behind=behind)
