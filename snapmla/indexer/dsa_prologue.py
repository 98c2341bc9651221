"""``prologue``: norms, RoPE, quantisation and appends of a layer, in one launch."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from dsl_kernels.formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.formats.format import Format
from dsl_kernels.formats.index_cache import HEADS, INDEX_DIM
from dsl_kernels.formats.registered import FORMATS
from snapmla import checks
from snapmla.cache import quant
from snapmla.cache.paged import PagedKVCache, expect_cache
from snapmla.cache.quant import FLOAT_NAMES, INDEX_NAMES
from snapmla.cache.rope import check_angles, check_eps, check_weight
from snapmla.call import memo as calls
from snapmla.call import tracing
from snapmla.checks import overlap
from snapmla.indexer.append_index_k import SCALES
from snapmla.indexer.index_logits import check_cache, pages
from snapmla.runtime import launch, variants


class Prologue(NamedTuple):
    """Results of ``prologue``.

    Attributes:
        index_q: float8_e4m3fn (n, h, 128), contiguous: ``q`` of ``index_topk``.
        index_weights: float32 (n, h), contiguous: its ``w``.
        q_rope: attention's RoPE channels, turned, (n, num_heads, 64); None where none were given.

    Raises:
        TypeError, ValueError: as ``out`` of a call, naming the attribute.

    Source: our own.
    """

    index_q: torch.Tensor
    index_weights: torch.Tensor
    q_rope: torch.Tensor | None = None


def prologue(
    cache: PagedKVCache,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    slot_mapping: torch.Tensor,
    index_cache: torch.Tensor,
    index_k: torch.Tensor,
    index_q: torch.Tensor,
    index_weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    norm_weight: torch.Tensor,
    index_norm_weight: torch.Tensor,
    index_norm_bias: torch.Tensor,
    norm_eps: float = 1e-6,
    index_norm_eps: float = 1e-6,
    index_slot_mapping: torch.Tensor | None = None,
    weight_scale: float | None = None,
    is_neox: bool = False,
    index_is_neox: bool = True,
    scale: str = "ue8m0",
    hadamard: bool = False,
    q_rope: torch.Tensor | None = None,
    out: Prologue | None = None,
) -> Prologue:
    """Brings a sparse attention layer's projections to caches and index queries, in one launch.

    * ``rope_append_kv``: RMSNorm and RoPE of the new tokens' latents, which go into the KV cache;
    * ``append_index_k``: LayerNorm and RoPE of their index keys, which go into the index cache;
    * RoPE of the index queries, quantised as ``append_index_k`` quantises keys, a scale for each
      token and head, and ``w = (index_weights * scale) * weight_scale`` in float32;
    * with ``q_rope``, RoPE of attention's queries.

    Caches get the bits of those calls.  Of ``fp8``, whose queries are quantised once they are
    absorbed, ``rope_quantize_q`` is the second launch.  Without tokens nothing is launched.  With
    ``out`` nothing is allocated, and the call may be captured in a CUDA graph.  Built by default
    for bfloat16, int64 slots and positions, float32 ``cos_sin_cache``, of ``fp8_ds_mla`` and
    ``fp8``; others are compiled when they are first asked for.

    Args:
        cache: ``fp8``, ``fp8_ds_mla``, or of 16 bits and one KV head, which gets rows as norm and
            RoPE leave them; written at the slots.
        c_kv: bfloat16, float16 or float32 (n, 512); rows may be strided, 16-byte aligned, here and
            in all tensors of several dimensions but results.
        k_rope: same dtype, (n, 64), RoPE not yet applied.
        slot_mapping: int32 or int64 (n,), ``page * page_size + offset``; negative slots and slots
            past the pool are skipped.
        index_cache: uint8 (pages, 64, 132), (pages, 64, 1, 132) or (pages, 8448), as of
            ``append_index_k``; written at its slots.
        index_k: same dtype, (n, 128), as the layer's projection leaves them.
        index_q: same dtype, (n, h, 128), h 64 or 32, RoPE not yet applied.
        index_weights: float32 or the same dtype, (n, h): each head's weight.
        positions: int32 or int64 (n,): the tokens' rows of ``cos_sin_cache``.  A token whose
            position has no row there is stored as NaN, its queries and weights are NaN; in rows of
            16 bits its RoPE channels are.
        cos_sin_cache: (max_position, 64) float32 or the same dtype: 32 cosines, 32 sines.
        norm_weight: same dtype as c_kv, (512,), of ``kv_a_layernorm``.
        index_norm_weight, index_norm_bias: float32 (128,), of the index keys' LayerNorm.
        norm_eps, index_norm_eps: of the norms, 1e-12 to 1.
        index_slot_mapping: int32 or int64 (n,), as the other, of the index cache; None:
            ``slot_mapping``.
        weight_scale: a positive number; None: 128^-0.5 * h^-0.5, DeepSeek-V3.2's.
        is_neox: pairs of latents' and attention's RoPE are channels i and i + 32; else 2 i and
            2 i + 1, as in DeepSeek's models.
        index_is_neox: pairs of the first 64 channels of index keys and queries, likewise;
            DeepSeek-V3.2's are i and i + 32.
        scale: ``ue8m0``: scales of index keys and queries are rounded up to powers of two;
            ``free``: they are not.
        hadamard: whether index keys and queries are multiplied by the Hadamard matrix, as
            ``append_index_k`` does.
        q_rope: same dtype as c_kv, (n, num_heads, 64), num_heads 1 to 128, RoPE not yet applied.
        out: tensors to write into, which share no memory with others; its ``q_rope`` may be
            strided, rows 16-byte aligned: the last channels of queries of 576.  None allocates.

    Returns:
        The index queries, their weights and ``q_rope`` turned (``out`` itself if given).

    Raises:
        TypeError, ValueError: naming the argument; a format whose content is not 512 channels with
            RoPE apart (V4, V4.1, NoPE).

    Source: DeepSeek-V3.2's reference implementation, the indexer's and the layer's forward.
    """
    call = Call(
        cache, c_kv, k_rope, slot_mapping, index_cache, index_k,
        slot_mapping if index_slot_mapping is None else index_slot_mapping, index_q, index_weights,
        q_rope, positions, cos_sin_cache, norm_weight, index_norm_weight, index_norm_bias,
        norm_eps, index_norm_eps, weight_scale, is_neox, index_is_neox, scale, hadamard, out,
    )  # fmt: skip
    return calls.run(_PROLOGUE, _PROLOGUE, call)


class Call(NamedTuple):
    """A call of ``prologue``, in the order of the kernel's arguments."""

    cache: PagedKVCache
    c_kv: torch.Tensor
    k_rope: torch.Tensor
    slot_mapping: torch.Tensor
    index_cache: torch.Tensor
    index_k: torch.Tensor
    index_slot_mapping: torch.Tensor
    index_q: torch.Tensor
    index_weights: torch.Tensor
    q_rope: torch.Tensor | None
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    norm_weight: torch.Tensor
    index_norm_weight: torch.Tensor
    index_norm_bias: torch.Tensor
    norm_eps: float
    index_norm_eps: float
    weight_scale: float | None
    is_neox: bool
    index_is_neox: bool
    scale: str
    hadamard: bool
    out: Prologue | None

    @property
    def read(self) -> dict[str, torch.Tensor]:
        """Tensors that are read, by name."""
        return {name: t for name in _READ if (t := getattr(self, name)) is not None}

    @property
    def written(self) -> dict[str, torch.Tensor]:
        """Results that are given, by name."""
        if self.out is None:
            return {}
        pairs = zip(Prologue._fields, self.out, strict=True)
        return {f"out.{name}": t for name, t in pairs if t is not None}


_READ = (*Call._fields[1:4], *Call._fields[5:15])


def _parts(call: Call) -> calls.Parts:
    cache = call.cache
    given: tuple[Any, ...] = (*call[1:15], *(call.out or ()))
    tensors = tuple([t for t in given if t is not None])
    told = call[15:22]
    options = (
        cache.format, told, tuple([x.__class__ for x in told]), call.q_rope is None,
        call.out is None,
    )  # fmt: skip
    asked = [ask() for ask in cache.asks]
    return tensors, options, (*[t.data_ptr() for t in tensors], cache.place, *asked)


def _places(call: Call, _: object) -> calls.Groups | None:
    cache, written = call.cache, (call.index_cache, *call.written.values())
    read = call.read.values()
    if not (tracing.plain(cache) and cache.stays and launch.all_on(cache.device, *read, *written)):
        return None
    groups = [(overlap.span(t),) for t in written]
    return cache.spans, *groups, tuple(map(overlap.span, read))


_INSTEAD = "call append_kv and append_index_k on tokens that are normalised and rotated"


def _check_format(record: Format) -> None:
    """Checks that latents of 512 channels and 64 of RoPE apart go into a cache."""
    if record.rope is None or record.content.count != KV_LORA_RANK:
        wanted = f"a format of {KV_LORA_RANK} channels with RoPE apart"
        checks.value_error("cache", wanted, record.about, _INSTEAD)


def check_call(call: Call) -> None:
    """Checks all that can be told without addresses."""
    cache, c_kv, device = call.cache, call.c_kv, call.cache.device
    _check_format(FORMATS[cache.format])
    if cache.num_kv_heads != 1:
        checks.value_error("cache", "one KV head", cache.num_kv_heads, _INSTEAD)
    quant.check_tokens(c_kv, call.k_rope, call.slot_mapping, device, fmt=cache.format)
    n, dtype = c_kv.shape[0], c_kv.dtype
    _check_keys(call, n, dtype, device)
    checks.tensor("index_q", call.index_q, (dtype,), (n, "h", INDEX_DIM), device)
    heads = call.index_q.shape[1]
    checks.choice("index_q", heads, HEADS, "heads of its second dimension")
    weights = (torch.float32,) if dtype == torch.float32 else (torch.float32, dtype)
    checks.tensor("index_weights", call.index_weights, weights, (n, heads), device)
    check_weight(call.norm_weight, c_kv)
    if call.norm_weight is None:
        hint = "of tokens that are normalised, append_kv and append_index_k"
        checks.type_error("norm_weight", "a torch.Tensor", "None", hint)
    if call.q_rope is not None:
        shape = (n, "num_heads", QK_ROPE_HEAD_DIM)
        checks.tensor("q_rope", call.q_rope, (dtype,), shape, device)
        checks.num_heads(call.q_rope.shape[1])
    for name in ("index_q", "index_weights", "q_rope"):
        value = getattr(call, name)
        if n and value is not None:
            checks.aligned_rows(name, value)
    check_eps(call.norm_eps)
    checks.flag("is_neox", call.is_neox)
    weight_scale(call.weight_scale, heads)
    if call.out is not None:
        _check_out(call, n, heads)


def _check_keys(call: Call, n: int, dtype: torch.dtype, device: torch.device) -> None:
    """The checks of ``append_index_k``, by the names of this call."""
    check_cache(call.index_cache, device, "index_cache")
    checks.tensor("index_k", call.index_k, (dtype,), (n, INDEX_DIM), device)
    if n:
        checks.aligned_rows("index_k", call.index_k)
    slots = call.index_slot_mapping
    checks.tensor("index_slot_mapping", slots, (call.slot_mapping.dtype,), (n,), device)
    checks.contiguous("index_slot_mapping", slots)
    for name in ("index_norm_weight", "index_norm_bias"):
        value = getattr(call, name)
        checks.tensor(name, value, (torch.float32,), (INDEX_DIM,), device)
        checks.aligned_rows(name, value)
    check_angles(dtype, (n,), call.positions, call.cos_sin_cache, device)
    check_eps(call.index_norm_eps, "index_norm_eps")
    checks.flag("index_is_neox", call.index_is_neox)
    checks.choice("scale", call.scale, SCALES)
    checks.flag("hadamard", call.hadamard)


def weight_scale(value: Any, heads: int) -> float:
    """Checks ``weight_scale`` and returns it; DeepSeek's for None."""
    if value is None:
        return float(INDEX_DIM**-0.5 * heads**-0.5)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        hint = "convert it with float(...)"
        checks.type_error("weight_scale", "a Python float", checks.class_name(value), hint)
    if not 0 < value < math.inf:
        checks.value_error("weight_scale", "a positive finite number", value)
    return float(value)


def _check_out(call: Call, n: int, heads: int) -> None:
    """Checks dtypes and shapes of results."""
    out, device = call.out, call.cache.device
    if not isinstance(out, Prologue):
        checks.type_error("out", "a snapmla.dsa.Prologue", type(out).__name__)
    assert out is not None
    checks.tensor("out.index_q", out.index_q, (checks.FP8,), (n, heads, INDEX_DIM), device)
    checks.tensor("out.index_weights", out.index_weights, (torch.float32,), (n, heads), device)
    for name, value in (("out.index_q", out.index_q), ("out.index_weights", out.index_weights)):
        checks.contiguous(name, value)
    if n:
        checks.aligned("out.index_q", out.index_q)
    if (out.q_rope is None) != (call.q_rope is None):
        wanted, got = ("None", "a tensor") if call.q_rope is None else ("a tensor", "None")
        beside = "without q_rope" if call.q_rope is None else "beside q_rope"
        checks.value_error("out.q_rope", f"{wanted} {beside}", got)
    if out.q_rope is not None and call.q_rope is not None:
        shape = tuple(call.q_rope.shape)
        checks.tensor("out.q_rope", out.q_rope, (call.q_rope.dtype,), shape, device)
        if n:
            checks.aligned_rows("out.q_rope", out.q_rope)
        checks.distinct("out.q_rope", out.q_rope)


def _checked(call: Call) -> Call:
    """Checks all of a call."""
    cache = call.cache
    expect_cache(cache)
    check_call(call)
    checks.distinct("index_cache", pages(call.index_cache))
    quant.check_apart(cache, call.read)
    before: dict[str, torch.Tensor] = {**quant.named("cache", cache), **call.read}
    for name, value in {"index_cache": call.index_cache, **call.written}.items():
        checks.apart(name, value, before)
        before[name] = value
    return call


@functools.lru_cache(maxsize=256)
def _no_rope(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """RoPE channels of no heads."""
    return torch.empty((n, 0, QK_ROPE_HEAD_DIM), dtype=dtype, device=device)


def _kernel_of(call: Call) -> variants.Kernel:
    return quant.variant_kernel(
        call.c_kv.device,
        "dsa_prologue",
        in_dtype=FLOAT_NAMES[call.c_kv.dtype],
        index_dtype=INDEX_NAMES[call.slot_mapping.dtype],
        hadamard=int(call.hadamard),
        rope_style="neox" if call.is_neox else "interleaved",
        index_style="neox" if call.index_is_neox else "interleaved",
        cos_sin_dtype=FLOAT_NAMES[call.cos_sin_cache.dtype],
        position_dtype=INDEX_NAMES[call.positions.dtype],
        weights_dtype=FLOAT_NAMES[call.index_weights.dtype],
        cache_dtype=call.cache.format,
    )  # type: ignore[arg-type]


def results(call: Call) -> Prologue:
    """Memory for the results of a checked call."""
    q, rope = call.index_q, call.q_rope
    return Prologue(
        q.new_empty(q.shape, dtype=torch.uint8).view(checks.FP8),
        q.new_empty(q.shape[:2], dtype=torch.float32),
        None if rope is None else rope.new_empty(rope.shape),
    )


def _launch(call: Call, kernel: variants.Kernel | None) -> tuple[Prologue, variants.Kernel | None]:
    out, (n, heads, _) = call.out, call.index_q.shape
    if out is None:
        out = results(call)
    if not n:
        return out, None
    kernel = kernel or _kernel_of(call)
    rope, turned = call.q_rope, out.q_rope
    if rope is None:
        rope = turned = _no_rope(n, call.c_kv.dtype, call.c_kv.device)
    kernel(
        *call.cache.arguments, *call[1:4], pages(call.index_cache), *call[5:9],
        rope, *call[10:15], out.index_q.view(torch.uint8), out.index_weights, turned,
        float(call.norm_eps), float(call.index_norm_eps), weight_scale(call.weight_scale, heads),
        SCALES.index(call.scale), *call.cache.append_options,
    )  # fmt: skip
    return out, kernel


def _traced(call: Call) -> Prologue:
    """The call as an operator, for tracers."""
    cache = call.cache
    expect_cache(cache)
    quant.expect_traceable(cache)
    check_call(call)
    told = (
        *map(float, call[15:17]), weight_scale(call.weight_scale, call.index_q.shape[1]),
        bool(call.is_neox), bool(call.index_is_neox), call.scale, bool(call.hadamard),
    )  # fmt: skip
    out = results(call) if call.out is None else call.out
    torch.ops.snapmla.dsa_prologue(
        *cache.memory_now(), cache.format, cache.scale_fmt, *call[1:15], *told,
        out.index_q.view(torch.uint8), *out[1:],
    )  # fmt: skip
    return out


def now(call: Call) -> None:
    """Checks and launches, whoever traces: what the operator does."""
    _launch(_checked(call), None)


_PROLOGUE = calls.Op("dsa_prologue", _checked, _launch, _traced, _parts, _places)
variants.on_forget(_PROLOGUE.memo.forget)  # kernels
