"""``dsa_prologue``: a layer's projections into both caches, and the indexer's queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsl_kernels.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.families.formats import FORMATS
from dsl_kernels.index_cache import INDEX_DIM, PAGE, PAGE_BYTES
from dsl_kernels.spec import VariantSpec
from snapmla.dsa.append_index_k import SCALES
from snapmla.dsa.prologue import Prologue, prologue
from snapmla.testing import index_reference, rope
from snapmla.testing.workloads import append_index_k, append_kv, exact, rotary, samples
from snapmla.testing.workloads.call import DTYPES, INDEX, Call, Sizes, Workload, bit_for_bit
from snapmla.testing.workloads.exact import Case, Exact, Recorded, Runner
from snapmla.testing.workloads.samples import Adversarial, Random

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


def projections(spec: VariantSpec, n: int, heads: int, num_heads: int) -> dict[str, Tensor]:
    """Of ``n`` tokens, in rows that have gaps: zeros, NaN, infinity, tiny values among them."""
    dtype = DTYPES[spec.in_dtype]
    c_kv, k_rope = (t.to(dtype) for t in samples.sample_tokens(n))
    joint = torch.randn(n, INDEX_DIM + heads + 8).to(dtype)
    q = torch.randn(n, heads, INDEX_DIM + 8).to(dtype)[..., 8:]
    q_rope = torch.randn(n, num_heads, QK_ROPE_HEAD_DIM + 128).to(dtype)[..., 128:]
    index_k = joint[:, :INDEX_DIM]
    if n > 8:
        c_kv[2], k_rope[2] = 0.0, 1e3  # an all-zero latent with a large RoPE
        c_kv[3, 7] = math.nan
        index_k[2], index_k[3], index_k[4, 7], index_k[5, 100] = 0.0, 1e-6, math.nan, -math.inf
        q[1, 3], q[2, 4], q[3, 5, 100], q[5, 6, 9] = 0.0, q[2, 4] * 1e-6, math.nan, math.inf
        q_rope[6, 1:, 5] = math.nan
    weights = joint[:, INDEX_DIM : INDEX_DIM + heads].to(DTYPES[spec.weights_dtype])
    return {
        "c_kv": c_kv, "k_rope": k_rope, "index_k": index_k, "index_q": q,
        "index_weights": weights, "q_rope": q_rope,
    }  # fmt: skip


def norms(spec: VariantSpec, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Weights of both norms."""
    weight = (1 + 0.2 * torch.randn(KV_LORA_RANK)).to(DTYPES[spec.in_dtype])
    return {
        "kv_norm_weight": weight.to(device), "kv_norm_eps": EPS,
        "index_norm_weight": (1 + 0.2 * torch.randn(INDEX_DIM)).to(device),
        "index_norm_bias": (0.3 * torch.randn(INDEX_DIM)).to(device), "index_norm_eps": EPS,
    }  # fmt: skip


def _cache(spec: VariantSpec, page_size: int, flag: int) -> tuple[dict[str, Tensor], int]:
    """Poisoned pages, in (planes, slots) of them; side by side or apart."""
    record, pages = FORMATS[spec.cache_dtype], 48 // page_size
    if record.named:
        cache = samples.poisoned_bytes(spec.cache_dtype, pages, page_size, strided=bool(flag))
    elif record.rows:
        dtype = DTYPES[spec.cache_dtype]
        cache = samples.poisoned_rows(pages, page_size, dtype, strided=bool(flag))
    else:
        cache = samples.poisoned_cache(pages, page_size, ("split", "row640")[flag])
    return samples.planes(cache), pages * page_size


def small(spec: VariantSpec) -> Iterator[Call]:
    """Nine tokens of 32 and 64 index heads, free scales and powers of two: what is no number, what
    has no slot, the last without angles; no heads of attention's queries, and nine of them."""
    n = 9
    for flag, (heads, num_heads) in enumerate(((32, 0), (64, 9))):
        cache, room = _cache(spec, 16, flag)
        pool = torch.full((2, PAGE_BYTES + 48 * flag), 0x7F, dtype=torch.uint8)
        dtype = INDEX[spec.index_dtype]
        slots, index_slots = torch.randperm(room)[:n], torch.randperm(2 * PAGE)[:n]
        slots[5], slots[7] = -1, room
        index_slots[6], index_slots[7] = -1, 2 * PAGE
        given: dict[str, Any] = {
            **cache, "index_cache": pool[:, :PAGE_BYTES], **projections(spec, n, heads, num_heads),
            "slot_mapping": slots.to(dtype), "index_slot_mapping": index_slots.to(dtype),
            **rotary.arguments(latents_of(spec), n, Adversarial()), **norms(spec),
            "weight_scale": 0.011, "power_of_two": flag,
        }  # fmt: skip
        for name in ("norm_weight", "norm_eps"):
            del given[name]
        if FORMATS[spec.cache_dtype].named:
            given["kv_power_of_two"] = 1 - flag
        given |= results(given)
        yield Call(given, {name: name for name in _written(given)}, truth(spec, given))


def _written(given: Mapping[str, Any]) -> list[str]:
    planes = [name for name in CACHE if name in given]
    return [*planes, "index_cache", "out_q", "out_weights", "out_rope"]


def recorded(case: Case, run: Runner) -> Recorded:
    """21 tokens of 32 index heads and five of attention's."""
    spec, n, heads, num_heads, room = case.spec, 21, 32, 5, 64
    c, r = exact.latents(case, n, spec.in_dtype)
    q, q_rope = exact.latents(case, n * heads, spec.in_dtype)
    slots = np.argsort(case.bits().below(1 << 40, (room,)), kind="stable")[:n]
    slots[8], slots[9] = -1, room
    index = torch.from_numpy(slots.astype(exact.WIDTH[spec.index_dtype]))
    check = exact.digest([exact.bits_of(c), exact.bits_of(q), slots])
    record, device = FORMATS[spec.cache_dtype], run.device
    if record.named:
        cache = {"kv": exact.bytes_pool(record, 1, room, device, case.index % 2)}
    elif record.rows:
        cache = {"kv": exact.rows_pool(1, room, 1, spec.cache_dtype, device, case.index % 3)}
    else:
        cache = exact.pool(1, room, exact.LAYOUTS[case.index % 3], device)
    pool = run.full((1, PAGE_BYTES), 3, torch.uint8)
    parts = (exact.bell(case.bits(name), (INDEX_DIM,), 0) for name in (".weight", ".bias"))
    weight, bias = (run.there(part) for part in parts)
    angles = rotary.arguments(latents_of(spec), n, Exact(case, run.device).of(latents_of(spec)))
    given: dict[str, Any] = {
        **cache, "c_kv": c.to(device), "k_rope": r.to(device), "slot_mapping": index.to(device),
        "index_cache": pool, "index_k": c[:, 128 : 128 + INDEX_DIM].to(device),
        "index_slot_mapping": index.flip(0).to(device),
        "index_q": q[:, :INDEX_DIM].reshape(n, heads, INDEX_DIM).to(device),
        "index_weights": c[:, :heads].contiguous().to(DTYPES[spec.weights_dtype]).to(device),
        "q_rope": q_rope.view(n, heads, -1)[:, :num_heads].to(device),
        "positions": angles["positions"], "cos_sin": angles["cos_sin"],
        "kv_norm_weight": angles["norm_weight"], "kv_norm_eps": EPS,
        "index_norm_weight": 1 + 0.2 * weight, "index_norm_bias": 0.3 * bias,
        "index_norm_eps": EPS, "weight_scale": 0.011, "power_of_two": case.index % 2,
    }  # fmt: skip
    if record.named:
        given["kv_power_of_two"] = case.index % 2
    given |= results(given)
    run.call(case.variant, **given)
    names = ("index_cache", "out_q", "out_weights", "out_rope")
    return Recorded(check, {
        name: exact.bits_of(given[name].contiguous()) for name in (*cache, *names)
    })  # fmt: skip


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """All tokens of the batch, of DeepSeek-V3.2's heads, to slots in random order."""
    source, n, dtype = Random(device, seed), sizes.batch * sizes.tokens, DTYPES[spec.in_dtype]
    pages = -(-n // PAGE)
    latent = source.normal(n, HEAD_DIM_QK, dtype=dtype)
    key = source.normal(n, INDEX_DIM + HEADS, dtype=dtype)
    angles = rotary.arguments(latents_of(spec), n, source)
    index = INDEX[spec.index_dtype]
    given: dict[str, Any] = {
        **source.planes(pages, PAGE, spec.cache_dtype),
        "c_kv": latent[:, :KV_LORA_RANK], "k_rope": latent[:, KV_LORA_RANK:],
        "slot_mapping": source.order(pages * PAGE)[:n].to(index),
        "index_cache": torch.empty(pages, PAGE_BYTES, dtype=torch.uint8, device=device),
        "index_k": key[:, :INDEX_DIM],
        "index_slot_mapping": source.order(pages * PAGE)[:n].to(index),
        "index_q": source.normal(n, HEADS, INDEX_DIM, dtype=dtype),
        "index_weights": key[:, INDEX_DIM:].to(DTYPES[spec.weights_dtype]),
        "q_rope": source.normal(n, NUM_HEADS, 192, dtype=dtype)[..., 128:],
        "positions": angles["positions"], "cos_sin": angles["cos_sin"],
        "kv_norm_weight": angles["norm_weight"], "kv_norm_eps": EPS,
        "index_norm_weight": 1 + 0.2 * source.normal(INDEX_DIM, dtype=torch.float32),
        "index_norm_bias": 0.3 * source.normal(INDEX_DIM, dtype=torch.float32),
        "index_norm_eps": EPS, "weight_scale": (INDEX_DIM * HEADS) ** -0.5, "power_of_two": 1,
    }  # fmt: skip
    if FORMATS[spec.cache_dtype].named:
        given["kv_power_of_two"] = 0
    return given | results(given)


def public(spec: VariantSpec, given: Mapping[str, Any]) -> Callable[[], Any]:
    """``snapmla.dsa.prologue``."""
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


WORKLOAD = Workload(
    small, bit_for_bit, recorded, sized, truth, public, moved,
)  # fmt: skip
