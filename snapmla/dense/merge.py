"""``merge_state``, ``merge_states``: attention results over disjoint sets of tokens become one.

For context parallelism, cascades over a shared prefix, chunks of a long prompt: each gives rows and
their LSE, and what attention over all tokens gives follows from these alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dsl_kernels.formats.dims import KV_LORA_RANK
from dsl_kernels.spec import VariantSpec
from snapmla import checks
from snapmla.call import memo as calls
from snapmla.dense.choices import LSE_FACTOR, OUT_NAMES
from snapmla.runtime import variants

MAX_LIST = 8  # tensors that the kernel takes without their being stacked
WIDTHS = (KV_LORA_RANK, 256, 128)  # channels of a row: a latent's, or those of a head of prefill
_FLOAT32 = (torch.float32,)
_DTYPES = tuple(OUT_NAMES)
Merged = tuple[torch.Tensor, torch.Tensor]


class Part(NamedTuple):
    """One result, or a stack of them: rows and LSE, and how messages call them."""

    out: torch.Tensor
    lse: torch.Tensor
    out_name: str
    lse_name: str


def merge_state(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    lse_base: str = "e",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two attention results over disjoint sets of tokens.

    ``lse = log(exp(lse_a) + exp(lse_b))`` and ``out = exp(lse_a - lse) * out_a + exp(lse_b - lse) *
    out_b``, summed in float32 and rounded once.  One launch; no plan, no synchronisation, and with
    ``out`` and ``lse`` given no allocation.  Where calls are recorded or watched it is one node,
    ``torch.ops.snapmla.merge_states``.

    A row whose LSE is infinite, of either sign, has seen no token there: it weighs nothing,
    whatever its values, NaN included, and the other part comes out as it is.  A row that is empty
    in both has out 0 and the LSE that ``lse_a`` has, with its sign.  A NaN LSE gives NaN.

    Args:
        out_a: bfloat16 or float32 (b, s_q, h, d_v), or packed (total, h, d_v), where d_v is 512, as
            of ``decode``, 256 or 128, as of dense prefill; rows may be strided, 16-byte aligned.
        lse_a: float32 (b, h, s_q), or (h, total) beside a packed ``out_a``, as ``decode`` gives it;
            any strides: where tokens come before heads, give ``lse.mT``.
        out_b, lse_b: of the same dtype and the same shape as those of part a; any strides that
            those may have.
        lse_base: base of the LSE given and returned: ``e`` (here, FlashAttention, vLLM) or ``2``
            (FlashInfer).
        out: bfloat16 or float32, of the same shape as ``out_a``; may be ``out_a`` or ``out_b`` (the
            same memory with the same strides), else memory of its own.  None allocates, in the
            dtype of the parts.
        lse: float32, of the same shape as ``lse_a``; may be ``lse_a`` or ``lse_b``.  None
            allocates.

    Returns:
        (out, lse).

    Raises:
        TypeError, ValueError: naming the argument.

    Example:
        out_a, out_b = torch.randn(2, 1, 1, 16, 512).bfloat16()
        lse_a, lse_b = torch.randn(2, 1, 16, 1)
        out, lse = snapmla.merge_state(out_a, lse_a, out_b, lse_b)

    Source: online softmax (Milakov and Gimelshein); the names are FlashInfer's.
    """
    call = Merge((out_a, out_b), (lse_a, lse_b), "pair", _factor(lse_base), out, lse)
    return calls.run(_MERGE, _MERGE, call)


def merge_states(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    *,
    lse_base: str = "e",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges n attention results over disjoint sets of tokens, as ``merge_state`` does two.

    One launch that reads every part once, and adds them in their order.

    Args:
        outs: bfloat16 or float32; one tensor (n, b, s_q, h, d_v) or (n, total, h, d_v), or a list
            of n tensors without the first dimension; d_v is 512, 256 or 128; rows may be strided,
            16-byte aligned.  Up to 8 tensors are read where they are; a longer list is stacked
            first, which copies it.
        lses: float32 (n, b, h, s_q) or (n, h, total), or a list, as ``outs`` is; any strides.
        lse_base: base of the LSE given and returned, ``e`` or ``2``.
        out: bfloat16 or float32 (b, s_q, h, d_v) or (total, h, d_v); may be one of the parts (the
            same memory with the same strides), else memory of its own.  None allocates, in the
            dtype of the parts.
        lse: float32 (b, h, s_q) or (h, total); may be one of the parts'.  None allocates.

    Returns:
        (out, lse); of a row that is empty in all parts 0 and the LSE of the first.

    Raises:
        TypeError, ValueError: naming the argument.

    Example:
        outs, lses = torch.randn(3, 1, 1, 16, 512).bfloat16(), torch.randn(3, 1, 16, 1)
        out, lse = snapmla.merge_states(outs, lses)  # three parts

    Source: as ``merge_state``.
    """
    form = "stack" if isinstance(outs, torch.Tensor) else "list"
    return calls.run(_MERGE, _MERGE, Merge(*_listed(outs, lses), form, _factor(lse_base), out, lse))


class Merge(NamedTuple):
    """A call of ``merge_state`` (form ``pair``) or ``merge_states`` (``list``, ``stack``)."""

    outs: tuple[torch.Tensor, ...]
    lses: tuple[torch.Tensor, ...]
    form: str
    lse_factor: float  # of the logarithm to base 2
    out: torch.Tensor | None
    lse: torch.Tensor | None

    @property
    def stacked(self) -> bool:
        return self.form == "stack"

    @property
    def parts(self) -> list[Part]:
        """The parts as the call's arguments are called."""
        if self.form != "pair":
            return named(self.outs, self.lses, self.stacked)
        (a, b), (lse_a, lse_b) = self.outs, self.lses
        return [Part(a, lse_a, "out_a", "lse_a"), Part(b, lse_b, "out_b", "lse_b")]


def _parts(call: Merge) -> calls.Parts:
    outs, lses, form, lse_factor, out, lse = call
    tensors, over = (*outs, *lses), []
    for result in (out, lse):
        at = next((i for i, part in enumerate(tensors) if part is result), -1)
        over.append(at)  # a tensor that is a part's is asked about once
        if at < 0 and result is not None:
            tensors = (*tensors, result)
    options = (form, lse_factor, len(outs), out is None, lse is None, *over)
    return tensors, options, tuple([tensor.data_ptr() for tensor in tensors])


def _places(call: Merge, _: object) -> calls.Groups:
    """Nothing more to compare: a result may lie exactly over a part, which spans cannot tell."""
    for part in call.parts:
        if part.out.numel():
            checks.aligned_rows(part.out_name, part.out)
    if call.out is not None:
        checks.aligned_rows("out", call.out)
    _check_apart(call.parts, call.stacked, call.out, call.lse)
    return ()


def _checked(call: Merge) -> Merge:
    _check(call.parts, call.stacked, call.out, call.lse)
    return call


def _run(call: Merge, _: object) -> tuple[Merged, bool]:
    return _merged(call, call.parts), True


def _traced(call: Merge) -> Merged:
    """The call as an operator, for tracers."""
    given, lses, _, factor, out, lse = call
    outs, lses_, stacked = list(given), list(lses), call.stacked
    if out is None and lse is None:
        return torch.ops.snapmla.merge_states(outs, lses_, stacked, factor)
    shape, lse_shape = check_parts(named(outs, lses_, stacked), stacked)
    if out is None:
        out = outs[0].new_empty(shape)
    if lse is None:
        lse = lses_[0].new_empty(lse_shape)
    torch.ops.snapmla.merge_states_out(outs, lses_, stacked, factor, out, lse)
    return out, lse


_MERGE = calls.Op("merge_states", _checked, _run, _traced, _parts, _places)


def _listed(
    outs: torch.Tensor | Sequence[torch.Tensor], lses: torch.Tensor | Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Both one by one, of one tensor each where they are stacked."""
    if isinstance(outs, torch.Tensor):
        if not isinstance(lses, torch.Tensor):
            checks.type_error("lses", "a torch.Tensor, as outs is", type(lses).__name__)
        return (outs,), (lses,)
    for name, value in (("outs", outs), ("lses", lses)):
        if not isinstance(value, (list, tuple)):
            wanted = "a torch.Tensor, or a list of them" if name == "outs" else "a list, as outs is"
            checks.type_error(name, wanted, type(value).__name__)
    if not outs or len(lses) != len(outs):
        if not outs:
            checks.value_error("outs", "1 part or more", 0)
        checks.value_error("lses", f"{len(outs)} tensors, one for each of outs", len(lses))
    return tuple(outs), tuple(lses)


def named(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], stacked: bool) -> list[Part]:
    """Parts as arguments of ``merge_states`` are called."""
    if stacked:
        return [Part(outs[0], lses[0], "outs", "lses")]
    pairs = enumerate(zip(outs, lses))
    return [Part(out, lse, f"outs[{i}]", f"lses[{i}]") for i, (out, lse) in pairs]


def _factor(lse_base: str) -> float:
    """Factor that converts a logarithm to base 2 into one to base ``lse_base``."""
    checks.choice("lse_base", lse_base, LSE_FACTOR)
    return LSE_FACTOR[lse_base]


def merge_now(call: Merge) -> Merged:
    """Checks tensors with memory, and merges them, whoever traces."""
    parts = call.parts
    _check(parts, call.stacked, call.out, call.lse)
    return _merged(call, parts)


def _merged(call: Merge, parts: list[Part]) -> Merged:
    """``merge_now`` of what was checked."""
    stacked, out, lse = call.stacked, call.out, call.lse
    if out is None or lse is None:
        out, lse = _allocated(parts[0], int(stacked), out, lse)
    if out.numel():
        _launch(parts, stacked, call.lse_factor, out, lse)
    return out, lse


def _allocated(part: Part, lead: int, out: torch.Tensor | None, lse: torch.Tensor | None) -> Merged:
    """The results, made where they were not given; ``lead``: dimensions of a part that are n."""
    if out is None:
        out = torch.empty(part.out.shape[lead:], dtype=part.out.dtype, device=part.out.device)
    if lse is None:
        lse = torch.empty(part.lse.shape[lead:], dtype=torch.float32, device=part.out.device)
    return out, lse


def _check(
    parts: list[Part], stacked: bool, out: torch.Tensor | None, lse: torch.Tensor | None
) -> None:
    """Checks all of a call on tensors with memory."""
    shape, lse_shape = check_parts(parts, stacked)
    device = parts[0].out.device
    if out is not None:
        checks.tensor("out", out, _DTYPES, shape, device)
        checks.aligned_rows("out", out)
        checks.distinct("out", out)
    if lse is not None:
        checks.tensor("lse", lse, _FLOAT32, lse_shape, device)
        checks.distinct("lse", lse)
    _check_apart(parts, stacked, out, lse)


def check_parts(parts: list[Part], stacked: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Checks the parts and returns the shapes of ``out`` and ``lse``."""
    first, name = parts[0].out, parts[0].out_name
    free: tuple[str, ...] = ("n",) if stacked else ()
    packed = isinstance(first, torch.Tensor) and first.ndim == len(free) + 3
    rows = ("total", "h") if packed else ("b", "s_q", "h")
    known = isinstance(first, torch.Tensor) and not first.is_nested and first.ndim > 0
    known = known and first.shape[-1] in WIDTHS
    checks.tensor(name, first, _DTYPES, (*free, *rows, first.shape[-1] if known else KV_LORA_RANK))
    if stacked and not first.shape[0]:
        checks.value_error(name, "1 part or more", 0)
    shape, lead = tuple(first.shape), len(free)
    lse_shape = (*shape[: -3 if packed else lead + 1], shape[-2], shape[-3])
    for part in parts:
        checks.tensor(part.out_name, part.out, (first.dtype,), shape, first.device)
        checks.tensor(part.lse_name, part.lse, _FLOAT32, lse_shape, first.device)
        if part.out.numel():
            checks.aligned_rows(part.out_name, part.out)
    return shape[lead:], lse_shape[lead:]


def _check_apart(
    parts: list[Part], stacked: bool, out: torch.Tensor | None, lse: torch.Tensor | None
) -> None:
    """Checks that results share no memory with what is read, but for a part that is all theirs."""
    if out is None and lse is None:
        return
    if stacked:
        singles = enumerate(zip(parts[0].out.unbind(), parts[0].lse.unbind()))
        parts = [Part(o, s, f"outs[{i}]", f"lses[{i}]") for i, (o, s) in singles]
    checks.apart("lse", lse, {"out": out})
    for part in parts:
        if not _is(out, part.out):
            checks.apart("out", out, {part.out_name: part.out})
        if not _is(lse, part.lse):
            checks.apart("lse", lse, {part.lse_name: part.lse})
        checks.apart("out", out, {part.lse_name: part.lse})
        checks.apart("lse", lse, {part.out_name: part.out})


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Address and strides of a tensor's elements; a dimension of one element has no stride."""
    steps = tuple(s for s, n in zip(tensor.stride(), tensor.shape) if n > 1)
    return tensor.data_ptr(), tensor.shape, steps, tensor.dtype


def _is(result: torch.Tensor | None, part: torch.Tensor) -> bool:
    """True if a result is to be written exactly where a part is read, element for element."""
    return result is not None and _place(result) == _place(part)


@functools.lru_cache(maxsize=64)
def _kernel(
    device: torch.device, in_dtype: torch.dtype, out_dtype: torch.dtype, d_v: int, mode: str
) -> variants.Kernel:
    spec = VariantSpec(
        op="merge_states", arch=variants.arch_of(device), in_dtype=OUT_NAMES[in_dtype],
        out_dtype=OUT_NAMES[out_dtype], mode=mode, d_v=d_v,
    )  # fmt: skip
    return variants.kernel(spec, device.type)


variants.on_forget(_kernel.cache_clear)


def _launch(
    parts: list[Part], stacked: bool, lse_factor: float, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """The launch on checked arguments; packed rows are those of one sequence."""
    outs, lses = [part.out for part in parts], [part.lse for part in parts]
    if stacked and outs[0].shape[0] == 2:
        outs, lses, stacked = list(outs[0].unbind()), list(lses[0].unbind()), False
    if len(outs) > MAX_LIST:
        outs, lses, stacked = [torch.stack(outs)], [torch.stack(lses)], True
    if out.ndim == 3:
        at = int(stacked)
        outs, lses = [t.unsqueeze(at) for t in outs], [t.unsqueeze(at) for t in lses]
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)
    mode = "stack" if stacked else "pair" if len(outs) == 2 else "list"
    kernel = _kernel(out.device, outs[0].dtype, out.dtype, out.shape[-1], mode)
    if mode == "list":
        unused = MAX_LIST - len(outs)  # the kernel takes them and does not look
        outs_, lses_ = outs + outs[:1] * unused, lses + lses[:1] * unused
        kernel(*outs_, *lses_, out, lse, len(outs), lse_factor)
    else:
        kernel(*outs, *lses, out, lse, lse_factor)
