"""``dsa_prologue``: a layer's projections into both caches, and the indexer's queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.dims import HEAD_DIM_QK, QK_ROPE_HEAD_DIM
from dsl_kernels.formats.index_cache import INDEX_DIM, PAGE, PAGE_BYTES
from dsl_kernels.formats.registered import FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla.indexer.append_index_k import SCALES
from snapmla.indexer.dsa_prologue import Prologue, prologue
from snapmla.testing import index_reference, rope
from snapmla.testing.workloads import append_index_k, append_kv, exact, rotary, samples
from snapmla.testing.workloads.call import DTYPES, INDEX, Sizes, bit_for_bit
from snapmla.testing.workloads.draw import Draw, Plant, nothing
from snapmla.testing.workloads.exact import Exact
from snapmla.testing.workloads.problem import Problem, workload

CACHE = ("content", "rope", "scale", "kv")
HEADS, NUM_HEADS = 64, 128  # of DeepSeek-V3.2
EPS = 1e-6


def latents_of(spec: VariantSpec) -> VariantSpec:
    """The variant of ``append_kv`` whose bits the KV cache gets."""
    return VariantSpec(
        op="append_kv", arch=spec.arch, in_dtype=spec.in_dtype, index_dtype=spec.index_dtype,
        rope_style=spec.rope_style, norm="rms", cos_sin_dtype=spec.cos_sin_dtype,
        position_dtype=spec.position_dtype, cache_dtype=spec.cache_dtype,
    )  # fmt: skip


def keys_of(spec: VariantSpec) -> VariantSpec:
    """The variant of ``append_index_k`` whose bits the index cache gets."""
    return VariantSpec(
        op="append_index_k", arch=spec.arch, in_dtype=spec.in_dtype, index_dtype=spec.index_dtype,
        hadamard=spec.hadamard, rope_style=spec.index_style, norm="layer",
        cos_sin_dtype=spec.cos_sin_dtype, position_dtype=spec.position_dtype,
    )  # fmt: skip


def truth(spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Both caches as the two appends leave them; index queries by the keys' rule; RoPE."""
    angles = {name: given[name] for name in ("positions", "cos_sin")}
    tokens = {name: given[name] for name in ("c_kv", "k_rope", "slot_mapping")}
    planes = {name: given[name] for name in CACHE if name in given}
    norm = {"norm_weight": given["kv_norm_weight"], "norm_eps": given["kv_norm_eps"]}
    latents = {**planes, **tokens, **angles, **norm}
    if FORMATS[spec.cache_dtype].named:
        latents["power_of_two"] = given["kv_power_of_two"]
    if FORMATS[spec.cache_dtype].rows:  # which append takes as they are
        stored = rotary.truth(latents_of(spec), latents, tokens["c_kv"], tokens["k_rope"])
        latents |= dict(zip(("c_kv", "k_rope"), stored, strict=True))
    keys = {
        "cache": given["index_cache"], "k": given["index_k"],
        "slot_mapping": given["index_slot_mapping"], "power_of_two": given["power_of_two"],
        **angles, "norm_weight": given["index_norm_weight"],
        "norm_bias": given["index_norm_bias"], "norm_eps": given["index_norm_eps"],
    }  # fmt: skip
    at, table = given["positions"], given["cos_sin"]
    return {
        **append_kv.truth(latents_of(spec), latents),
        "index_cache": append_index_k.truth(keys_of(spec), keys)["cache"],
        **queries(spec, given),
        "out_rope": rope.rotate_rows(given["q_rope"], at, table, spec.rope_style == "neox"),
    }


def queries(spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The index queries and their weights."""
    q = given["index_q"]
    heads, device = q.shape[1], q.device
    rows, at = q.reshape(-1, INDEX_DIM).cpu(), given["positions"].cpu().repeat_interleave(heads)
    rows = index_reference.rotate(rows, at, given["cos_sin"].cpu(), spec.index_style == "neox")
    if spec.hadamard:
        rows = index_reference.hadamard(rows).to(q.dtype)
    made, scales = index_reference.quantize_keys(rows, power_of_two=bool(given["power_of_two"]))
    weights = given["index_weights"].float().cpu() * scales.view(q.shape[:2])
    factor = torch.tensor(given["weight_scale"], dtype=torch.float32)
    return {
        "out_q": made.view(torch.uint8).view(q.shape).to(device),
        "out_weights": (weights * factor).to(device),
    }


def results(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Poisoned memory for what a call writes beside caches."""
    q, turned = given["index_q"], given["q_rope"]
    return {
        "out_q": torch.full(q.shape, 0x7F, dtype=torch.uint8, device=q.device),
        "out_weights": torch.full(q.shape[:2], math.nan, device=q.device),
        "out_rope": torch.full_like(turned, math.nan, memory_format=torch.contiguous_format),
    }


@dataclass(frozen=True, kw_only=True)
class Layer(Problem):
    """Tokens of a layer's projections.

    Attributes:
        tokens, heads, num_heads: tokens, heads of index queries and of attention's.
        pages, page_size, index_pages: of the caches.
        outside, index_outside: tokens whose slots are none; None: index slots are the others
            in reverse.
        power_of_two, kv_power_of_two: scales of keys and of formats of bytes.
        weight_scale: as the kernel takes it.
        style, page_gap: of the caches' memory.
        gap: elements beside keys and index queries.
        keys_at, weights_at: columns of rows that have both.
        plant: (draw, c_kv, k_rope, index_k, index_q, q_rope).
    """

    tokens: int
    heads: int
    num_heads: int
    pages: int
    page_size: int
    index_pages: int
    outside: Sequence[int] = ()
    index_outside: Sequence[int] | None = ()
    power_of_two: int
    kv_power_of_two: int
    weight_scale: float = 0.011
    style: int = 0
    page_gap: int = 0
    gap: int = 0
    keys_at: int = 0
    weights_at: int = INDEX_DIM
    plant: Plant = nothing


def arguments(spec: VariantSpec, problem: Layer, draw: Draw) -> dict[str, Any]:
    """Arguments by name."""
    n, dtype, gap = problem.tokens, DTYPES[spec.in_dtype], problem.gap
    c_kv, k_rope = draw.tokens(n, dtype)
    rows = draw.keys(n, dtype, problem.heads + gap)
    turning = rotary.arguments(latents_of(spec), n, draw.of(latents_of(spec)))
    cache = draw.cache(spec.cache_dtype, problem.pages, problem.page_size, style=problem.style)
    slots, index_slots = _slots(spec, problem, draw)
    queries = draw.keys(n * problem.heads, dtype, gap)
    q_rope = draw.rope_queries(n, problem.num_heads, dtype)
    weight, bias = draw.affine(INDEX_DIM)
    index_k = rows[:, problem.keys_at : problem.keys_at + INDEX_DIM]
    index_q = queries.view(n, problem.heads, -1)[..., gap : gap + INDEX_DIM]
    problem.plant(draw, c_kv, k_rope, index_k, index_q, q_rope)
    draw.identify_by(slots.long(), bits=(c_kv, queries))
    weights = rows[:, problem.weights_at : problem.weights_at + problem.heads]
    given: dict[str, Any] = {
        **cache, "c_kv": draw.there(c_kv), "k_rope": draw.there(k_rope), "slot_mapping": slots,
        "index_cache": draw.index_pages(problem.index_pages, problem.page_gap),
        "index_k": draw.there(index_k), "index_slot_mapping": index_slots,
        "index_q": draw.there(index_q),
        "index_weights": draw.there(weights, DTYPES[spec.weights_dtype]),
        "q_rope": draw.there(q_rope),
        "positions": turning["positions"], "cos_sin": turning["cos_sin"],
        "kv_norm_weight": turning["norm_weight"], "kv_norm_eps": EPS,
        "index_norm_weight": 1 + 0.2 * weight, "index_norm_bias": 0.3 * bias,
        "index_norm_eps": EPS, "weight_scale": problem.weight_scale,
        "power_of_two": problem.power_of_two,
    }  # fmt: skip
    if FORMATS[spec.cache_dtype].named:
        given["kv_power_of_two"] = problem.kv_power_of_two
    return given | results(given)


def _slots(spec: VariantSpec, problem: Layer, draw: Draw) -> tuple[Tensor, Tensor]:
    """Slots of tokens in both caches."""
    n, dtype = problem.tokens, INDEX[spec.index_dtype]
    room, index_room = problem.pages * problem.page_size, problem.index_pages * PAGE
    slots = draw.slots(n, room, dtype, outside=problem.outside)
    if problem.index_outside is None:
        return slots, slots.flip(0)
    return slots, draw.slots(n, index_room, dtype, outside=problem.index_outside)


def _awkward(
    _draw: Draw, c_kv: Tensor, k_rope: Tensor, index_k: Tensor, q: Tensor, q_rope: Tensor
) -> None:
    """Plants zeros, NaN, infinity and tiny values."""
    c_kv[2], k_rope[2] = 0.0, 1e3  # an all-zero latent with a large RoPE
    c_kv[3, 7] = math.nan
    index_k[2], index_k[3], index_k[4, 7], index_k[5, 100] = 0.0, 1e-6, math.nan, -math.inf
    q[1, 3], q[2, 4], q[3, 5, 100], q[5, 6, 9] = 0.0, q[2, 4] * 1e-6, math.nan, math.inf
    q_rope[6, 1:, 5] = math.nan


# 32 and 64 index heads, free scales and powers of two: what is no number, what has no slot, the
# last token without angles; no heads of attention's queries, and nine of them
SMALL = tuple(
    Layer(
        tokens=9, heads=heads, num_heads=num_heads, pages=3, page_size=16, index_pages=2,
        outside=(5, 7), index_outside=(6, 7), power_of_two=flag, kv_power_of_two=1 - flag,
        style=2 * flag, page_gap=48 * flag, gap=8, plant=_awkward,
    )
    for flag, (heads, num_heads) in enumerate(((32, 0), (64, 9)))
)  # fmt: skip


def _written(spec: VariantSpec) -> tuple[str, ...]:
    """Names of results."""
    return (*FORMATS[spec.cache_dtype].parts, "index_cache", "out_q", "out_weights", "out_rope")


def recorded(draw: Exact) -> Iterator[Layer]:
    """21 tokens of 32 index heads and five of attention's; keys and weights are latents' channels,
    too."""
    form = FORMATS[draw.case.spec.cache_dtype]
    yield Layer(
        tokens=21, heads=32, num_heads=5, pages=1, page_size=PAGE, index_pages=1, outside=(8, 9),
        index_outside=None, power_of_two=draw.odd, kv_power_of_two=draw.odd,
        style=draw.odd if form.named else draw.case.index % 3, keys_at=INDEX_DIM, weights_at=0,
    )  # fmt: skip


def sized(_spec: VariantSpec, sizes: Sizes) -> Layer:
    """All tokens of the batch, of DeepSeek-V3.2's heads, to slots in random order."""
    n = sizes.batch * sizes.tokens
    return Layer(
        tokens=n, heads=HEADS, num_heads=NUM_HEADS, pages=-(-n // PAGE), page_size=PAGE,
        index_pages=-(-n // PAGE), power_of_two=1, kv_power_of_two=0,
        weight_scale=(INDEX_DIM * HEADS) ** -0.5,
    )  # fmt: skip


def public(spec: VariantSpec, given: Mapping[str, Any]) -> Callable[[], Any]:
    """``snapmla.indexer.dsa_prologue``."""
    cache = samples.cache_of(given, spec.cache_dtype)
    tokens = (
        "c_kv", "k_rope", "slot_mapping", "index_cache", "index_k", "index_q", "index_weights",
        "positions", "cos_sin",
    )  # fmt: skip
    turned = given["out_rope"] if given["q_rope"].shape[1] else None
    out = Prologue(given["out_q"].view(torch.float8_e4m3fn), given["out_weights"], turned)
    told: dict[str, Any] = {
        "norm_weight": given["kv_norm_weight"], "norm_eps": given["kv_norm_eps"],
        "index_slot_mapping": given["index_slot_mapping"],
        "index_norm_weight": given["index_norm_weight"],
        "index_norm_bias": given["index_norm_bias"], "index_norm_eps": given["index_norm_eps"],
        "weight_scale": given["weight_scale"], "is_neox": spec.rope_style == "neox",
        "index_is_neox": spec.index_style == "neox", "scale": SCALES[given["power_of_two"]],
        "hadamard": bool(spec.hadamard), "out": out,
        "q_rope": None if turned is None else given["q_rope"],
    }  # fmt: skip
    return lambda: prologue(cache, *(given[name] for name in tokens), **told)


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads projections, writes tokens, keys, queries, weights and RoPE."""
    n, size = sizes.batch * sizes.tokens, DTYPES[spec.in_dtype].itemsize
    rope_bytes = 2 * NUM_HEADS * QK_ROPE_HEAD_DIM * size
    read = (HEAD_DIM_QK + INDEX_DIM + HEADS * INDEX_DIM) * size
    read += HEADS * DTYPES[spec.weights_dtype].itemsize + 2 * INDEX[spec.index_dtype].itemsize
    written = samples.token_bytes(spec.cache_dtype) + PAGE_BYTES // PAGE + HEADS * (INDEX_DIM + 4)
    return float(n) * (read + written + rope_bytes) + rotary.moved(latents_of(spec), n)


WORKLOAD = workload(
    bit_for_bit, truth, arguments, small=lambda _: SMALL, recorded=recorded, sized=sized,
    results=lambda spec, _: {name: name for name in _written(spec)},
    rows=lambda spec, given: {
        name: exact.bits_of(given[name].contiguous()) for name in _written(spec)
    },
    public=public, moved=moved,
)  # fmt: skip
