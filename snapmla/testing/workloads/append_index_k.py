"""``append_index_k``: index keys into slots of an index cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.index_cache import INDEX_DIM, PAGE, PAGE_BYTES
from dsl_kernels.spec import VariantSpec
from snapmla.indexer.append_index_k import SCALES, append_index_k
from snapmla.testing import index_reference as reference
from snapmla.testing.workloads import exact, rotary
from snapmla.testing.workloads.call import DTYPES, INDEX, Sizes, bit_for_bit
from snapmla.testing.workloads.draw import Draw, Plant, nothing
from snapmla.testing.workloads.exact import Exact
from snapmla.testing.workloads.problem import Problem, workload


def truth(spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The cache with the keys in their slots."""
    cache = given["cache"].clone(memory_format=torch.contiguous_format)
    k, slots = given["k"].cpu(), given["slot_mapping"].long().cpu()
    if spec.norm == "layer":
        norm = given["norm_weight"].cpu(), given["norm_bias"].cpu(), given["norm_eps"]
        k = reference.layer_norm(k, *norm)
    elif spec.norm == "rms":
        k = reference.rms_norm(k, given["norm_weight"].cpu(), given["norm_eps"])
    if spec.rope_style != "applied":
        angles = given["positions"].cpu(), given["cos_sin"].cpu()
        k = reference.rotate(k, *angles, spec.rope_style == "neox", spec.turned == "last")
    if spec.hadamard:
        k = reference.hadamard(k).to(k.dtype)
    keys, scales = reference.quantize_keys(k, power_of_two=bool(given["power_of_two"]))
    stored, factors = reference.pages_of(cache.cpu())
    kept = (slots >= 0) & (slots < PAGE * len(cache))
    rows = slots[kept]
    stored.view(torch.uint8).view(-1, INDEX_DIM)[rows] = keys[kept].view(torch.uint8)
    factors.view(-1)[rows] = scales[kept]
    reference.fill_pages(cache, stored.to(cache.device), factors.to(cache.device))
    return {"cache": cache}


def norm_of(spec: VariantSpec, weight: Tensor, bias: Tensor) -> dict[str, Any]:
    """Arguments of the norm, where the variant has one."""
    if spec.norm == "given":
        return {}
    if spec.norm == "rms":
        return {"norm_weight": 1 + 0.2 * weight, "norm_eps": rotary.EPS}
    return {"norm_weight": 1 + 0.2 * weight, "norm_bias": 0.3 * bias, "norm_eps": rotary.EPS}


@dataclass(frozen=True, kw_only=True)
class Keys(Problem):
    """Keys for the slots of an index cache.

    Attributes:
        tokens, pages: extents.
        power_of_two: scales.
        gap: bytes behind a page, and elements behind a key.
        outside, edges: tokens and slots as ``Draw.slots`` has them.
        plant: (draw, keys).
    """

    tokens: int
    pages: int
    power_of_two: int
    gap: tuple[int, int] = (0, 0)
    outside: Sequence[int] = ()
    edges: Sequence[int] = ()
    plant: Plant = nothing


def arguments(spec: VariantSpec, problem: Keys, draw: Draw) -> dict[str, Any]:
    """Arguments by name."""
    n, room = problem.tokens, problem.pages * PAGE
    wide = draw.keys(n, DTYPES[spec.in_dtype], problem.gap[1])
    k = wide[:, :INDEX_DIM]
    problem.plant(draw, k)
    norm = norm_of(spec, *draw.affine(INDEX_DIM))
    slots = draw.slots(
        n, room, INDEX[spec.index_dtype], outside=problem.outside, edges=problem.edges
    )  # fmt: skip
    draw.identify_by(slots.long(), bits=(wide,))
    return {
        "cache": draw.index_pages(problem.pages, problem.gap[0]), "k": draw.there(k),
        "slot_mapping": slots, "power_of_two": problem.power_of_two,
        **rotary.arguments(spec, n, draw), **norm,
    }  # fmt: skip


def _awkward(_draw: Draw, k: Tensor) -> None:
    """Plants zeros, tiny keys, NaN, infinity."""
    k[2], k[3], k[4, 7], k[5, 100] = 0.0, k[3] * 1e-6, math.nan, -math.inf


# eleven keys, free scales and powers of two, into pages side by side and apart; the last into the
# first slots of pages and the last of all
SMALL = tuple(
    Keys(
        note=("pages side by side", "pages apart")[apart], tokens=11, pages=3, power_of_two=apart,
        gap=(48 * apart, 64 * apart), outside=(6, 7), edges=(0, 3 * PAGE - 1, PAGE), plant=_awkward,
    )
    for apart in (0, 1)
)  # fmt: skip


def recorded(draw: Exact) -> Iterator[Keys]:
    """57 keys of every awkward kind."""
    yield Keys(tokens=57, pages=4, power_of_two=draw.odd, gap=(16 * draw.odd, 0), outside=(18, 19))


def sized(_spec: VariantSpec, sizes: Sizes) -> Keys:
    """All tokens of the batch, to slots in random order."""
    n = sizes.batch * sizes.tokens
    return Keys(tokens=n, pages=-(-n // PAGE), power_of_two=1)


def public(spec: VariantSpec, given: Mapping[str, Any]) -> Callable[[], Any]:
    """``snapmla.indexer.append_index_k``."""
    told: dict[str, Any] = {
        "scale": SCALES[given["power_of_two"]], "hadamard": bool(spec.hadamard),
        "is_neox": spec.rope_style == "neox", "rope_last": spec.turned == "last",
        "cos_sin_cache": given.get("cos_sin"),
    }  # fmt: skip
    told |= {n: given[n] for n in ("positions", "norm_weight", "norm_bias") if n in given}
    return lambda: append_index_k(given["cache"], given["k"], given["slot_mapping"], **told)


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads a key and a slot, writes 132 bytes."""
    read = INDEX_DIM * DTYPES[spec.in_dtype].itemsize + INDEX[spec.index_dtype].itemsize
    n = sizes.batch * sizes.tokens
    return float(n) * (read + PAGE_BYTES // PAGE) + rotary.moved(spec, n)


WORKLOAD = workload(
    bit_for_bit, truth, arguments, small=lambda _: SMALL, recorded=recorded, sized=sized,
    results=lambda _, problem: {problem.note: "cache"},
    rows=lambda _, given: {"pool": exact.bits_of(given["cache"].contiguous())},
    public=public, moved=moved,
)  # fmt: skip
