"""``append_index_k``: index keys into slots of an index cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsl_kernels.index_cache import INDEX_DIM, PAGE, PAGE_BYTES
from dsl_kernels.spec import VariantSpec
from snapmla.dsa.append_index_k import SCALES, append_index_k
from snapmla.testing import index_reference as reference
from snapmla.testing.workloads import exact, rotary
from snapmla.testing.workloads.call import DTYPES, INDEX, Call, Sizes, Workload, bit_for_bit
from snapmla.testing.workloads.exact import Case, Exact, Recorded, Runner
from snapmla.testing.workloads.samples import Adversarial, Random


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


def small(spec: VariantSpec) -> Iterator[Call]:
    """Eleven keys, free scales and powers of two, into pages side by side and apart: zeros, tiny
    ones, NaN, infinity, slots that are none."""
    n = 11
    for flag in (0, 1):
        pool = torch.full((3, PAGE_BYTES + 48 * flag), 0x7F, dtype=torch.uint8)
        joint = torch.randn(n, INDEX_DIM + 64 * flag).to(DTYPES[spec.in_dtype])
        k = joint[:, :INDEX_DIM]
        k[2], k[3], k[4, 7], k[5, 100] = 0.0, k[3] * 1e-6, math.nan, -math.inf
        norm = norm_of(spec, *torch.randn(2, INDEX_DIM))
        others = torch.tensor([s for s in range(3 * PAGE) if s not in (0, PAGE, 3 * PAGE - 1)])
        slots = others[torch.randperm(len(others))[:n]].to(INDEX[spec.index_dtype])
        slots[6], slots[7], slots[8], slots[9] = -1, 3 * PAGE, 0, 3 * PAGE - 1
        slots[10] = PAGE  # the first of a page
        given = {
            "cache": pool[:, :PAGE_BYTES], "k": k, "slot_mapping": slots, "power_of_two": flag,
            **rotary.arguments(spec, n, Adversarial()), **norm,
        }  # fmt: skip
        yield Call(given, {f"pages {('side by side', 'apart')[flag]}": "cache"}, truth(spec, given))


def recorded(case: Case, run: Runner) -> Recorded:
    """57 keys of every awkward kind."""
    spec, n, pages = case.spec, 57, 4
    c, _ = exact.latents(case, n, spec.in_dtype)
    order = case.bits().below(1 << 40, (pages * PAGE,))
    slots = np.argsort(order, kind="stable")[:n]
    slots[18], slots[19] = -1, pages * PAGE
    index = torch.from_numpy(slots.astype(exact.WIDTH[spec.index_dtype]))
    check = exact.digest([exact.bits_of(c), slots])
    pool = run.full((pages, PAGE_BYTES + 16 * (case.index % 2)), 3, torch.uint8)[:, :PAGE_BYTES]
    parts = (exact.bell(case.bits(name), (INDEX_DIM,), 0) for name in (".weight", ".bias"))
    norm = norm_of(spec, *(run.there(part) for part in parts))
    run.call(
        case.variant, cache=pool, k=c[:, :INDEX_DIM].to(run.device),
        slot_mapping=index.to(run.device), power_of_two=case.index % 2,
        **rotary.arguments(spec, n, Exact(case, run.device)), **norm,
    )  # fmt: skip
    return Recorded(check, {"pool": exact.bits_of(pool.contiguous())})


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """All tokens of the batch, to slots in random order."""
    source, n = Random(device, seed), sizes.batch * sizes.tokens
    pages = -(-n // PAGE)
    return {
        "cache": torch.empty(pages, PAGE_BYTES, dtype=torch.uint8, device=device),
        "k": source.normal(n, INDEX_DIM, dtype=DTYPES[spec.in_dtype]),
        "slot_mapping": source.order(pages * PAGE)[:n].to(INDEX[spec.index_dtype]),
        "power_of_two": 1, **rotary.arguments(spec, n, source),
        **norm_of(spec, *source.normal(2, INDEX_DIM)),
    }  # fmt: skip


def public(spec: VariantSpec, given: Mapping[str, Any]) -> Callable[[], Any]:
    """``snapmla.dsa.append_index_k``."""
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


WORKLOAD = Workload(small, bit_for_bit, recorded, sized, truth, public, moved)
