"""``mha_prefill``: dense attention of ragged prompts, keys and values of every head in 16 bits."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dsl_kernels import registry
from dsl_kernels.formats.mha_list import VALUES, SplitRoom, workspace_words
from dsl_kernels.spec import VariantSpec
from snapmla import checks
from snapmla.call import memo as calls
from snapmla.checks import overlap
from snapmla.errors import VariantError
from snapmla.mha.checking import (
    DEFAULT_D_V,
    MAX_WORK,
    NAMES,
    Mha,
    check_memory,
    check_shapes,
    most_work,
    wants_gradients,
    words_of,
)
from snapmla.mha.gradients import attend
from snapmla.runtime import launch, variants
from snapmla.runtime.launch import sm_count

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor]
MERGE_WAVES = 4  # CTAs of 8 warps for each SM of the launch that merges pieces


def mha_prefill(
    q: Tensor,
    k_nope: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    split_keys: bool = False,
    k_rope: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Results:
    """softmax(softmax_scale * q k^T) v of each sequence of a ragged batch; has gradients.

    K may come as a model has it: ``k_nope`` and ``v`` are views of kv_b_proj's output, ``k_rope``
    is one head that all share, and nothing is concatenated.  Two launches, three where keys may be
    split; lengths stay on the device, nothing is waited for, so that a CUDA graph may hold the
    call.

    Rows behind a sequence's end, the next sequence's or nobody's, never reach it, whatever they
    hold; nor do keys reach a query token that the causal rule hides from it: beside a NaN or an
    infinity in such a key's K or V it has the bits that it would have beside numbers.  A row's
    result depends on its own sequence alone: bits are the same in any batch, also where keys are
    split, as whether and where that is follows from the sequence's two lengths.

    Where autograd records and q, k_nope, v or k_rope require a gradient, both results have one, of
    192 and 128 channels: ``mha_prefill_backward`` tells of it.  Rows of no sequence get 0.  A
    second derivative is refused.

    Causal masks of unequal lengths are aligned at the bottom right (1: seen), 3 queries of 5 keys
    and 5 of 3:

        1 1 1 0 0      0 0 0
        1 1 1 1 0      0 0 0    out 0, LSE -inf
        1 1 1 1 1      1 0 0
                       1 1 0
                       1 1 1

    Args:
        q: bfloat16 or float16 (total_q, h, d_qk); rows may be strided, 16-byte aligned, as of all
            that follow.  Heads (d_qk, d_v) are (192, 128), (128, 128) or, as of GLM, (256, 256),
            whose kernels are built when they are first asked for.
        k_nope: same dtype as q, (total_k, h_k, d_qk): all of K; beside ``k_rope`` the first
            d_qk - 64 channels.  Query heads j * g to (j + 1) * g - 1 read head j, where
            g = h / h_k.
        v: same dtype as q, (total_k, h_k, d_v).
        cu_seqlens_q: int32 (b + 1,), where each sequence's query tokens begin, and the end of the
            last.  Ascending within 0..total_q; the host never reads it.  Rows of no sequence are
            left as they are.
        cu_seqlens_k: int32 (b + 1,), the same of its keys; lengths of 0 are fine on either side.
        max_seqlen_q: at least the longest sequence's query tokens; as other libraries want it,
            nothing depends on it.
        max_seqlen_k: at least the longest sequence's keys; it scales the order of the work, results
            do not depend on it.
        softmax_scale: factor of the logits, positive, at most 2**16; None: d_qk ** -0.5.  A row
            with a logit of 2**31 or more (of float16 2**24), times log2 e, is NaN in ``out`` and
            ``lse``.
        causal: query token i of s_q sees keys up to i + s_k - s_q: bottom right.  More queries than
            keys are fine: the first rows then see none.
        split_keys: cuts the keys of a sequence of few query tokens into pieces that are computed
            side by side and merged in their order: of r row tiles (128 query tokens) and n tiles
            of 128 keys min(8, n // 8) // r, where that is 2 or more (128 query tokens: from 1921
            keys on; 512: from 8065).  One prompt of 16 heads and 32K keys is 5.5 times as fast on
            an H200; where heads and prompts fill the GPU it is slower (0.74 to 0.91).
        k_rope: same dtype as q, (total_k, 1, 64), or (total_k, h_k, 64): the last channels of K;
            not where d_qk is 128.
        out: same dtype as q, (total_q, h, d_v); rows may be strided, 16-byte aligned.  None
            allocates.
        lse: float32 (h, total_q), any strides: of an LSE with tokens first give ``.mT``.  None
            allocates.
        workspace: int32 (n,), n at least ``workspace_size``, for this call alone while it runs; it
            may be used again behind it on the same stream; 16-byte aligned where keys are split.
            None allocates.

    Returns:
        (out, lse): rows without keys have out 0 and lse -inf.  lse is the natural logarithm.

    Raises:
        TypeError, ValueError: naming the argument; also where a gradient is wanted of 256 channels,
            or beside ``out``, ``lse`` or ``workspace``.
        VariantError: the device's architecture has no kernel; the text says what serves there.

    Example:
        q, k, v = (torch.randn(5, 2, n).bfloat16() for n in (192, 192, 128))
        begins = torch.tensor([0, 3, 5], dtype=torch.int32)  # two prompts, of 3 and 2 tokens
        out, lse = snapmla.mha_prefill(q, k, v, begins, begins, 3, 3)

    Source: FlashAttention (Dao); the contract is FlashMLA's ``flash_attn_varlen_func``.
    """
    call = Mha(
        q, k_nope, k_rope, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale, causal, split_keys, out, lse, workspace,
    )  # fmt: skip
    if torch.is_grad_enabled() and wants_gradients(q, k_nope, v, k_rope):
        return attend(call, run)
    return calls.run(_MHA, _MHA, call)


def run(call: Mha) -> Results:
    """Results of a call without gradients; wrong ones raise."""
    made: Results = calls.run(_MHA, _MHA, call)
    return made


def workspace_size(
    total_q: int, batch: int, heads: int = 0, total_k: int = 0, d_v: int = DEFAULT_D_V
) -> int:
    """int32 words of a workspace for ``total_q`` query tokens of ``batch`` sequences: 16 bytes and
    8 a row tile (128 query tokens), of which a sequence may have one that is not full.

    With ``split_keys`` lists take 16 bytes a row tile, and partial rows are added, each 516 bytes a
    head (1028 of 256 channels): at most 1024 a sequence, 8 a query token, and 1 for every 8 keys
    (and 16 a sequence), which is an eighth of the bytes of k_nope and v.

    Args:
        total_q: the first extent of q.
        batch: sequences.
        heads: of q, where keys may be split.
        total_k: the first extent of k_nope, likewise; 0: they are not split.
        d_v: channels of a head of v, likewise: 128 or 256.

    Returns:
        Words; one of a larger call serves a smaller one.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: our own.
    """
    checks.integer("total_q", total_q, 0)
    checks.integer("batch", batch, 0)
    checks.integer("heads", heads, 0)
    checks.integer("total_k", total_k, 0)
    checks.choice("d_v", d_v, tuple(sorted(set(VALUES.values()))))
    room = SplitRoom.of(total_q, batch, total_k)
    plain = workspace_words(total_q, batch)
    return max(plain, room.words(heads, d_v)) if heads and room.splits else plain


class Ready(NamedTuple):
    """Kernels, sizes and switches of a call's launches.

    They follow from its tensors' shapes, strides, dtype and device, and from its options.
    """

    list_work: variants.Kernel
    attend: variants.Kernel
    words: int
    ctas: int
    scale: float
    causal: int
    merge: variants.Kernel | None = None  # of pieces, with room for them
    room: SplitRoom | None = None
    odd: bool = False  # some tensor's strides over extents of 1 are none that TMA takes
    place: int = 0


def _parts(call: Mha) -> calls.Parts:
    given = (
        call.q, call.k_nope, call.k_rope, call.v, call.cu_seqlens_q, call.cu_seqlens_k, call.out,
        call.lse, call.workspace,
    )  # fmt: skip
    tensors = tuple([t for t in given if t is not None])
    longest = call.max_seqlen_q, call.max_seqlen_k
    options = (
        call.softmax_scale.__class__, call.softmax_scale, call.causal.__class__, call.causal,
        call.split_keys.__class__, call.split_keys,
        *longest, *[n.__class__ for n in longest], *[t is None for t in given],
    )  # fmt: skip
    written = not (call.out is None and call.lse is None and call.workspace is None)
    return tensors, options, tuple([t.data_ptr() for t in tensors]) if written else None


def _places(call: Mha, _: object) -> calls.Groups:
    for name, value in (("q", call.q), ("k_nope", call.k_nope), ("v", call.v)):
        checks.aligned(name, value)
    if call.out is not None:
        checks.aligned("out", call.out)
    if call.workspace is not None and call.split_room is not None:
        checks.aligned("workspace", call.workspace)
    read = (call.q, *call.keys, call.v, call.cu_seqlens_q, call.cu_seqlens_k)
    written = [t for t in (call.out, call.lse, call.workspace) if t is not None]
    return *((overlap.span(t),) for t in written), tuple(map(overlap.span, read))


def _checked(call: Mha) -> Mha:
    check_shapes(call)
    check_memory(call)
    if most_work(call) > MAX_WORK:
        checks.value_error("q", f"at most {MAX_WORK} row tiles of all heads", tuple(call.q.shape))
    return call


def _prepared(call: Mha) -> Ready:
    q, room = call.q, call.split_room
    keys = "whole" if room is None else "split"
    list_work, attend = kernels(q.device, q.shape[-1], q.dtype, keys)
    ctas = min(sm_count(q.device), most_work(call))
    ready = Ready(list_work, attend, words_of(call), ctas, call.scale, int(call.causal))
    by_tma = q, *call.keys, call.v, q if call.out is None else call.out
    ready = ready._replace(odd=any(launch.regular(t) is not t for t in by_tma))
    if room is None:
        return ready
    return ready._replace(merge=merging_kernel(q.device, q.dtype, call.d_v), room=room)


def _launch(call: Mha, ready: Ready | None) -> tuple[Results, Ready | None]:
    q, v = call.q, call.v
    (total, heads, _), d_v = q.shape, call.d_v
    out, lse, work = call.out, call.lse, call.workspace
    allocate = launch.allocator(q.device)
    if out is None:
        out = allocate((total, heads, d_v), (heads * d_v, d_v, 1), q.dtype)
    if lse is None:
        lse = allocate((heads, total), (max(total, 1), 1), torch.float32)
    if not total or call.cu_seqlens_q.shape[0] == 1:
        return (out, lse), None
    if not v.shape[0]:  # there is nothing for a TMA descriptor to describe
        out.zero_()
        lse.fill_(-math.inf)
        return (out, lse), None
    if ready is None:
        ready = _prepared(call)
    if work is None:
        work = allocate((ready.words,), (1,), torch.int32)
    tables = (call.cu_seqlens_q, call.cu_seqlens_k)
    rows: Sequence[Tensor] = (q, *call.keys, v)
    own = out
    if ready.odd:
        *rows, own = map(launch.regular, (*rows, out))
    if ready.room is not None:
        _launch_split(call, ready, ready.room, work, rows, (own, lse))
        return (out, lse), ready
    ready.list_work(*tables, work, ready.causal, int(call.max_seqlen_k))
    ready.attend(*rows, *tables, work, own, lse, ready.scale, ready.causal, ready.ctas)
    return (out, lse), ready


def _launch_split(
    call: Mha, ready: Ready, room: SplitRoom, workspace: Tensor, rows: Sequence[Tensor],
    results: Results,
) -> None:  # fmt: skip
    """The launches where keys may be split; the workspace ends in partial rows and their LSEs."""
    q, tables, heads = call.q, (call.cu_seqlens_q, call.cu_seqlens_k), call.q.shape[1]
    values = room.rows * heads * call.d_v
    work, floats = workspace[: room.list_words], workspace[room.list_words :].view(torch.float32)
    partial = (
        floats[:values].view(room.rows, heads, call.d_v),
        floats[values : values + room.rows * heads].view(room.rows, heads),
    )
    ready.list_work(
        *tables, work, ready.causal, int(call.max_seqlen_k), room.splits, room.rows
    )  # fmt: skip
    ready.attend(*rows, *tables, work, *results, *partial, ready.scale, ready.causal, ready.ctas)
    assert ready.merge is not None
    ctas = min(MERGE_WAVES * sm_count(q.device), -(-room.rows // 2) * heads)
    ready.merge(tables[0], work, *partial, *results, ctas)


def prefill_now(call: Mha) -> Results:
    """``mha_prefill`` on tensors with memory, whoever traces."""
    made, _ = _launch(_checked(call), None)
    return made


def _traced(call: Mha) -> Results:
    """The call as an operator, for tracers."""
    check_shapes(call)
    common: tuple[Any, ...] = (
        call.q, call.k_nope, call.k_rope, call.v, call.cu_seqlens_q, call.cu_seqlens_k,
        call.max_seqlen_q, call.max_seqlen_k, call.scale, bool(call.causal), bool(call.split_keys),
    )  # fmt: skip
    if call.out is None and call.lse is None and call.workspace is None:
        made: Results = torch.ops.snapmla.mha_prefill(*common)
        return made
    out, lse = new_results(call.q)
    out = out if call.out is None else call.out
    lse = lse if call.lse is None else call.lse
    torch.ops.snapmla.mha_prefill_out(*common, out, lse, call.workspace)
    return out, lse


def new_results(q: Tensor) -> Results:
    """Uninitialised results of queries, as ``mha_prefill`` allocates them."""
    total, heads, d_qk = q.shape
    out = q.new_empty((total, heads, VALUES[int(d_qk)]))
    return out, q.new_empty((heads, total), dtype=torch.float32)


@functools.lru_cache(maxsize=64)
def kernels(
    device: torch.device, d_qk: int, dtype: torch.dtype, keys: str
) -> tuple[variants.Kernel, variants.Kernel]:
    """(kernel of the list, kernel of attention) on a device; keys ``whole`` or ``split``."""
    arch = variants.arch_of(device)
    spec = VariantSpec(op="mha_fwd", arch=arch, d_qk=d_qk, dtype=NAMES[dtype], keys=keys)
    if registry.module_name(spec) is None:
        raise VariantError(
            f"{arch}: no kernel for dense prefill exists for this architecture yet; there "
            "FlashAttention-4 (flash_attn.cute) and FlashMLA's own flash_attn_varlen_func serve"
        )
    attend = variants.kernel(spec, device.type)
    items = VariantSpec(op="mha_items", arch=arch, keys=keys)
    return variants.kernel(items, device.type), attend


@functools.lru_cache(maxsize=16)
def merging_kernel(device: torch.device, dtype: torch.dtype, d_v: int) -> variants.Kernel:
    """Loads the kernel that merges partial rows into rows."""
    arch = variants.arch_of(device)
    spec = VariantSpec(op="mha_merge", arch=arch, dtype=NAMES[dtype], d_v=d_v)
    return variants.kernel(spec, device.type)


_MHA = calls.Op("mha_prefill", _checked, _launch, _traced, _parts, _places)
variants.on_forget(_MHA.memo.forget)
variants.on_forget(kernels.cache_clear)
variants.on_forget(merging_kernel.cache_clear)
