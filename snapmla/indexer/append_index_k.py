"""``append_index_k``: quantises index keys into the paged index cache."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from dsl_kernels.formats.index_cache import INDEX_DIM
from dsl_kernels.spec import VariantSpec
from snapmla import checks
from snapmla.cache.quant import FLOAT_NAMES, INDEX_NAMES
from snapmla.cache.rope import check_angles, check_eps
from snapmla.call import memo as calls
from snapmla.call import op
from snapmla.indexer.index_logits import check_cache, pages
from snapmla.runtime import variants

_NORMS = {(False, False): "given", (True, True): "layer", (True, False): "rms"}
SCALES = ("free", "ue8m0")  # by the kernel's flag ``power_of_two``


def append_index_k(
    cache: torch.Tensor,
    k: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scale: str = "ue8m0",
    hadamard: bool = False,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    is_neox: bool = True,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    rope_last: bool = False,
) -> None:
    """Quantises index keys and scatters them into the index cache, in place.

    ``scale = max(amax, 1e-4) / 448`` of each key, ``key = e4m3(k / scale)``.  A key with a NaN or
    an infinity is stored as NaN, its scale too.  With ``positions`` the keys' RoPE is applied
    first, with ``norm_weight`` LayerNorm or RMSNorm before that, in the same launch: each step
    computes in float32 from what the one before rounded to the keys' dtype, as separate kernels do.
    DeepSeek-V3.2's indexer is ``norm_weight`` with ``norm_bias`` and the defaults; V4's, whose keys
    the caller compresses, ``norm_weight`` alone, ``rope_last=True`` and ``is_neox=False``.

    Args:
        cache: uint8 (pages, 64, 132), (pages, 64, 1, 132) or (pages, 8448), as of
            ``index_logits``; written at the slots.
        k: bfloat16, float16 or float32 (n, 128); without ``positions`` normalised, RoPE applied;
            rows may be strided, 16-byte aligned.
        slot_mapping: int32 or int64 (n,), ``page * 64 + offset``; negative slots and slots past the
            pool are skipped.  Of slots that are named twice one of the keys is stored, or parts of
            them.
        scale: ``ue8m0``: scales are rounded up to powers of two, as vLLM does; ``free``: they are
            not.  Both are stored as float32.
        hadamard: whether keys are first multiplied by the Hadamard matrix of 128 (Sylvester's
            order) and 128^-0.5 and rounded to their dtype, as SGLang does; queries must be, too.
        positions: int32 or int64 (n,): the keys' rows of ``cos_sin_cache``, whose angles turn their
            first 64 channels, or the last.  A key whose position has no row is stored as NaN.
        cos_sin_cache: (max_position, 64) float32 or the keys' dtype, beside ``positions``: 32
            cosines, 32 sines of a position; rows may be strided.
        is_neox: channels i and i + 32 make a pair, as in DeepSeek-V3.2's indexer; else 2 i and
            2 i + 1.
        norm_weight, norm_bias: float32 (128,), of LayerNorm, which is then done here; without a
            bias it is RMSNorm; beside ``positions``.
        norm_eps: of the norm, 1e-12 to 1.
        rope_last: whether it is the last 64 channels that are turned; beside ``positions``.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: the lightning indexer of DeepSeek-V3.2; vLLM's ``indexer_k_quant_and_cache`` writes the
    same bytes.
    """
    call = Append(
        cache, k, slot_mapping, positions, cos_sin_cache, norm_weight, norm_bias, scale, hadamard,
        is_neox, norm_eps, rope_last,
    )  # fmt: skip
    calls.run(APPEND.op, APPEND.op, call)


class Append(NamedTuple):
    """A call of ``append_index_k``."""

    cache: torch.Tensor
    k: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor | None
    cos_sin_cache: torch.Tensor | None
    norm_weight: torch.Tensor | None
    norm_bias: torch.Tensor | None
    scale: str
    hadamard: bool
    is_neox: bool
    norm_eps: float
    rope_last: bool = False


def _check_tokens(call: Append, _: op.Extents) -> None:
    """Checks the cache, keys, slots, angles, the norm and options."""
    check_cache(call.cache)
    device, k = call.cache.device, call.k
    hint = f"an index key has {INDEX_DIM} channels; latents go to snapmla.append_kv"
    checks.tensor("k", k, checks.FLOATS, ("n", INDEX_DIM), device, hint)
    slots = call.slot_mapping
    checks.tensor("slot_mapping", slots, tuple(INDEX_NAMES), (k.shape[0],), device)
    checks.contiguous("slot_mapping", slots)
    if k.shape[0]:
        checks.aligned_rows("k", k)
    checks.choice("scale", call.scale, SCALES)
    checks.flag("hadamard", call.hadamard)
    checks.flag("is_neox", call.is_neox)
    checks.flag("rope_last", call.rope_last)
    if call.rope_last and call.positions is None:
        checks.value_error("rope_last", "False without positions", call.rope_last)
    check_eps(call.norm_eps)
    if call.positions is not None or call.cos_sin_cache is not None:
        check_angles(k.dtype, k.shape[:1], call.positions, call.cos_sin_cache, device)  # type: ignore[arg-type]
    if call.norm_weight is None and call.norm_bias is None:
        return
    if call.positions is None:
        checks.value_error("norm_weight", "None without positions", "a tensor", _APART)
    for name in ("norm_weight", "norm_bias"):
        value = getattr(call, name)
        if value is None and name == "norm_bias":  # RMSNorm
            continue
        checks.tensor(name, value, (torch.float32,), (INDEX_DIM,), device)
        checks.aligned_rows(name, value)


_APART = "the norm is done here only before RoPE: apply it, or give both"


@functools.lru_cache(maxsize=64)
def _kernel(device: torch.device, axes: tuple[tuple[str, str | int], ...]) -> variants.Kernel:
    spec = VariantSpec(op="append_index_k", arch=variants.arch_of(device), **dict(axes))
    return variants.kernel(spec, device.type)


variants.on_forget(_kernel.cache_clear)


def _axes(call: Append) -> tuple[tuple[str, str | int], ...]:
    """The variant of a checked call."""
    axes: dict[str, str | int] = {
        "in_dtype": FLOAT_NAMES[call.k.dtype], "index_dtype": INDEX_NAMES[call.slot_mapping.dtype],
        "hadamard": int(call.hadamard),
    }  # fmt: skip
    if call.positions is not None and call.cos_sin_cache is not None:
        axes |= {
            "rope_style": "neox" if call.is_neox else "interleaved",
            "norm": _NORMS[call.norm_weight is not None, call.norm_bias is not None],
            "turned": "last" if call.rope_last else "first",
            "cos_sin_dtype": FLOAT_NAMES[call.cos_sin_cache.dtype],
            "position_dtype": INDEX_NAMES[call.positions.dtype],
        }
    return tuple(axes.items())


def _launch(call: Append, _: object) -> tuple[None, bool]:
    if call.k.shape[0]:
        eps = () if call.norm_weight is None else (float(call.norm_eps),)
        kernel = _kernel(call.k.device, _axes(call))
        read = [t for t in call[1:7] if t is not None]
        kernel(pages(call.cache), *read, *eps, SCALES.index(call.scale))
    return None, True


APPEND = op.Declared("append_index_k", Append, ("cache",), (_check_tokens,), _launch)
