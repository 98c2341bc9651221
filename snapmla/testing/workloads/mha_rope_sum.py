"""``mha_rope_sum``: partial sums of RoPE channels' gradients, added in the order of heads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla.testing.workloads.call import DTYPES, Call, Sizes, bit_for_bit
from snapmla.testing.workloads.draw import Draw
from snapmla.testing.workloads.problem import Problem, hashed, named, workload


def truth(_spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """fp32 sums, one head behind the other, then rounded."""
    parts, out = given["parts"], given["dk_rope"]
    groups = parts.unflatten(1, (out.shape[1], -1))
    total = torch.zeros_like(groups[:, :, 0])
    for i in range(groups.shape[2]):
        total = total + groups[:, :, i]
    return {"dk_rope": total.to(out.dtype)}


@dataclass(frozen=True)
class Groups(Problem):
    """Partial sums of groups of heads.

    Attributes:
        tokens, groups, heads: extents.
        size: deviation of the sums.
        apart: rows have gaps, and a value is NaN.
    """

    tokens: int
    groups: int
    heads: int = 1
    size: float = 1.0
    apart: bool = False


def arguments(spec: VariantSpec, problem: Groups, draw: Draw) -> dict[str, Any]:
    """Arguments by name."""
    n, gap = problem.tokens, 4 * problem.apart
    parts = draw.rows(n, problem.groups, 64 + gap)[..., :64] * problem.size
    if gap:
        parts[1, 1, 3] = math.nan
    draw.identify_by(parts)
    out = draw.full(n, problem.heads, 64 + 2 * gap, value=draw.fill, dtype=DTYPES[spec.dtype])
    return {"parts": draw.there(parts), "dk_rope": out[..., 2 * gap :]}


# strided rows; one head, two, one of its own group each
SMALL = [
    Groups(tokens, groups, heads, 8.0, apart=True)
    for tokens, groups, heads in ((70, 5, 1), (33, 6, 2), (3, 2, 2))
]


def sized(_spec: VariantSpec, sizes: Sizes) -> Groups:
    """A group for every four heads."""
    return Groups(sizes.batch * sizes.tokens, -(-sizes.heads // 4))


def moved(_spec: VariantSpec, sizes: Sizes) -> float:
    """Reads the partial sums, writes theirs."""
    return sizes.batch * sizes.tokens * (256.0 * -(-sizes.heads // 4) + 128.0)


def behind(spec: VariantSpec) -> Iterator[Call]:
    """The last of the small calls, behind itself."""
    *_, call = WORKLOAD.small(spec)
    yield from (call, call)


WORKLOAD = workload(
    bit_for_bit, truth, arguments, small=lambda _: SMALL,
    recorded=lambda _: [Groups(50, 5, 1, 0.5)], sized=sized, results=named("dk_rope"),
    rows=hashed("dk_rope", "dk_rope"), moved=moved, behind=behind,
)  # fmt: skip
