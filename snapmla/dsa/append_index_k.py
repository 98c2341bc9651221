"""``append_index_k``: quantises index keys into the paged index cache."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from dsl_kernels.index_cache import INDEX_DIM
from dsl_kernels.spec import VariantSpec
from snapmla import call as calls
from snapmla import checks, overlap, runtime
from snapmla.dsa.index_logits import check_cache, pages
from snapmla.quant import FLOAT_NAMES, INDEX_NAMES

SCALES = ("free", "ue8m0")  # by the kernel's flag ``power_of_two``


def append_index_k(
    cache: torch.Tensor,
    k: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scale: str = "ue8m0",
    hadamard: bool = False,
) -> None:
    """Quantises index keys and scatters them into the index cache, in place.

    ``scale = max(amax, 1e-4) / 448`` of each key, ``key = e4m3(k / scale)``.  A key with a NaN or
    an infinity is stored as NaN, its scale too.

    Args:
        cache: uint8 (pages, 64, 132), (pages, 64, 1, 132) or (pages, 8448), as of
            ``index_logits``; written at the slots.
        k: bfloat16, float16 or float32 (n, 128), normalised, RoPE applied; rows may be strided,
            16-byte aligned.
        slot_mapping: int32 or int64 (n,), ``page * 64 + offset``; negative slots and slots past the
            pool are skipped.  Of slots that are named twice one of the keys is stored, or parts of
            them.
        scale: ``ue8m0``: scales are rounded up to powers of two, as vLLM does; ``free``: they are
            not.  Both are stored as float32.
        hadamard: whether keys are first multiplied by the Hadamard matrix of 128 (Sylvester's
            order) and 128^-0.5 and rounded to their dtype, as SGLang does; queries must be, too.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: the lightning indexer of DeepSeek-V3.2; vLLM's ``indexer_k_quant_and_cache`` writes the
    same bytes.
    """
    calls.run(_APPEND, _APPEND, Append(cache, k, slot_mapping, scale, hadamard))


class Append(NamedTuple):
    """A call of ``append_index_k``."""

    cache: torch.Tensor
    k: torch.Tensor
    slot_mapping: torch.Tensor
    scale: str
    hadamard: bool


def _parts(call: Append) -> calls.Parts:
    tensors = call[:3]
    options = call.scale, call.hadamard, type(call.hadamard)
    return tensors, options, tuple([t.data_ptr() for t in tensors])


def _places(call: Append, _: object) -> calls.Groups:
    return (overlap.span(call.cache),), (overlap.span(call.k), overlap.span(call.slot_mapping))


def check_tokens(call: Append) -> None:
    """Checks keys, slots and options."""
    device = call.cache.device
    checks.tensor("k", call.k, checks.FLOATS, ("n", INDEX_DIM), device)
    slots = call.slot_mapping
    checks.tensor("slot_mapping", slots, tuple(INDEX_NAMES), (call.k.shape[0],), device)
    checks.contiguous("slot_mapping", slots)
    if call.k.shape[0]:
        checks.aligned_rows("k", call.k)
    checks.choice("scale", call.scale, SCALES)
    checks.flag("hadamard", call.hadamard)


def _checked(call: Append) -> Append:
    """Checks all of a call."""
    check_cache(call.cache)
    check_tokens(call)
    checks.distinct("cache", pages(call.cache))
    for name in ("k", "slot_mapping"):
        checks.apart(name, getattr(call, name), {"cache": call.cache})
    return call


@functools.lru_cache(maxsize=64)
def _kernel(
    device: torch.device, dtype: torch.dtype, index: torch.dtype, hadamard: bool
) -> runtime.Kernel:
    spec = VariantSpec(
        op="append_index_k", arch=runtime.arch_of(device), in_dtype=FLOAT_NAMES[dtype],
        index_dtype=INDEX_NAMES[index], hadamard=int(hadamard),
    )  # fmt: skip
    return runtime.kernel(spec, device.type)


runtime.on_forget(_kernel.cache_clear)


def _launch(call: Append, _: object) -> tuple[None, bool]:
    cache, k, slots, scale, hadamard = call
    if k.shape[0]:
        kernel = _kernel(k.device, k.dtype, slots.dtype, bool(hadamard))
        kernel(pages(cache), k, slots, SCALES.index(scale))
    return None, True


def _traced(call: Append) -> None:
    """The call as an operator, for tracers."""
    check_cache(call.cache)
    check_tokens(call)
    torch.ops.snapmla.append_index_k(*call[:4], bool(call.hadamard))


def now(call: Append) -> None:
    """Checks and launches, whoever traces: what the operator does."""
    _launch(_checked(call), None)


_APPEND = calls.Op("append_index_k", _checked, _launch, _traced, _parts, _places)
