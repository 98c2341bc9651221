"""``mha_prefill_backward``: gradients of ``mha_prefill``, for code that keeps its own graph.

Launches, in this order: two lists of work; LSE and sum(O dO) of each row; dQ; dK and dV; with 192
channels the sum of RoPE channels' gradients.  ``gradients.py`` calls it from autograd.

Workspace, int32 words, each part at a multiple of 16 bytes:

    work      row tiles, as of mha_prefill         workspace_words(total_q, n)
    key_work  tiles of keys                        workspace_words(total_k, n)
    stats     f32 (h, blocks, PAD, 2)              dsl_kernels/formats/mha_grads.py
    parts     f32 (total_k, groups, 64)            192 channels
    tables    cu_seqlens of n = b + 4 sequences    ``zero_rest``; else n = b
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dsl_kernels import registry
from dsl_kernels.formats.mha_grads import PAD, rope_groups, stats_blocks
from dsl_kernels.formats.mha_list import WIDTHS, most_tiles, workspace_words
from dsl_kernels.spec import VariantSpec
from snapmla import checks
from snapmla.call import memo as calls
from snapmla.checks import overlap
from snapmla.errors import VariantError
from snapmla.mha.checking import MAX_WORK, NAMES, Mha, check_memory, check_shapes
from snapmla.runtime import launch, variants
from snapmla.runtime.launch import sm_count

Tensor = torch.Tensor
Grads = tuple[Tensor, Tensor, Tensor | None, Tensor]
ROPE = 64
TOGETHER = 4  # KV heads whose RoPE channels one CTA sums, where there are heads enough for all CTAs
MANY_HEADS = 64
BEHIND_DQ = 1  # mha_dkv is launched right behind mha_dq, beside which it may begin
REST = 4  # sequences that cover the rows of none
D_QK = (192, 128)


class Backward(NamedTuple):
    """A call of ``mha_prefill_backward``, checked or not."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k_nope: Tensor
    k_rope: Tensor | None
    v: Tensor
    out: Tensor
    lse: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: Any  # an int, or a tracer's
    max_seqlen_k: Any
    softmax_scale: float | None
    causal: bool
    zero_rest: bool
    dq: Tensor | None
    dk_nope: Tensor | None
    dk_rope: Tensor | None
    dv: Tensor | None
    workspace: Tensor | None

    @property
    def forward(self) -> Mha:
        """The call whose gradients are asked for."""
        return Mha(
            self.q, self.k_nope, self.k_rope, self.v, self.cu_seqlens_q, self.cu_seqlens_k,
            self.max_seqlen_q, self.max_seqlen_k, self.softmax_scale, self.causal, False, None,
            None, None,
        )  # fmt: skip

    @property
    def room(self) -> Room:
        """Parts of the workspace."""
        rope = None if self.k_rope is None else self.k_rope.shape[1]
        total_k, kv_heads, _ = self.k_nope.shape
        total_q, heads, d_qk = self.q.shape
        batch = self.cu_seqlens_q.shape[0] - 1
        return Room.of(
            total_q, total_k, batch, heads, kv_heads, int(d_qk), rope, bool(self.zero_rest)
        )


class Room(NamedTuple):
    """Extents of the workspace's parts.

    Attributes:
        sequences: of the lists.
        work, key_work: words of the lists.
        blocks: of ``stats``.
        groups: of ``parts``; 0: there is none.
        together: KV heads of a group.
        stats, parts, tables, words: where these begin, and the end, in words.
    """

    sequences: int
    work: int
    key_work: int
    blocks: int
    groups: int
    together: int
    stats: int
    parts: int
    tables: int
    words: int

    @classmethod
    def of(
        cls, total_q: int, total_k: int, batch: int, heads: int, kv_heads: int, d_qk: int,
        rope_heads: int | None, zero_rest: bool,
    ) -> Room:  # fmt: skip
        """Extents for a call's; ``rope_heads`` None: K is one tensor."""
        n = batch + REST if zero_rest else batch
        work, key_work = (-(-workspace_words(t, n) // 4) * 4 for t in (total_q, total_k))
        blocks = stats_blocks(total_q, n)
        together = TOGETHER if rope_heads == 1 and kv_heads >= MANY_HEADS else 1
        groups = rope_groups(kv_heads, together) if len(WIDTHS[d_qk]) == 2 else 0
        stats = work + key_work
        parts = stats + 2 * PAD * blocks * heads
        tables = parts + ROPE * groups * total_k
        words = tables + (2 * (n + 1) if zero_rest else 0)
        return cls(n, work, key_work, blocks, groups, together, stats, parts, tables, words)


def backward_workspace_size(
    total_q: int, total_k: int, batch: int, heads: int, kv_heads: int, d_qk: int = 192, *,
    k_rope_heads: int = 1, zero_rest: bool = False,
) -> int:  # fmt: skip
    """int32 words of a workspace of ``mha_prefill_backward``.

    A query token and head takes 8 bytes, of which a sequence has up to 191 more; lists take 8 bytes
    a row tile and 8 a tile of keys (128 tokens).  With 192 channels a key takes 256 bytes for each
    group of KV heads whose RoPE channels one CTA sums: 4 heads where ``k_rope`` is one head that 64
    or more share, else 1.

    Args:
        total_q, total_k: the first extents of q and k_nope.
        batch: sequences.
        heads, kv_heads: of q and of k_nope.
        d_qk: channels of q: 192 or 128.
        k_rope_heads: of ``k_rope``: 1 or kv_heads; kv_heads too where K is one tensor.
        zero_rest: as of the call.

    Returns:
        Words; one of a larger call serves a smaller one with as many heads.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: our own.
    """
    for name, value in (("total_q", total_q), ("total_k", total_k), ("batch", batch)):
        checks.integer(name, value, 0)
    checks.integer("heads", heads, 1)
    checks.integer("kv_heads", kv_heads, 1)
    checks.choice("d_qk", d_qk, D_QK)
    checks.choice("k_rope_heads", k_rope_heads, {1: (1,)}.get(kv_heads, (1, kv_heads)))
    checks.flag("zero_rest", zero_rest)
    extents = total_q, total_k, batch, heads, kv_heads, d_qk
    return Room.of(*extents, k_rope_heads, zero_rest).words


def mha_prefill_backward(
    dout: Tensor,
    q: Tensor,
    k_nope: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    k_rope: Tensor | None = None,
    dlse: Tensor | None = None,
    zero_rest: bool = False,
    dq: Tensor | None = None,
    dk_nope: Tensor | None = None,
    dk_rope: Tensor | None = None,
    dv: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Grads:
    """Gradients of ``mha_prefill``; tensors that require a gradient have them by autograd already.

    Four launches, five with 192 channels; ``zero_rest`` takes four small ones more. A gradient
    is a sum in an order of its own sequence alone, without atomics: its bits are the same in
    every run, in any batch and on any number of SMs. Nothing is waited for, so that a CUDA
    graph may hold the call.

    Rows behind a sequence's end never reach it, whatever they hold, nor does what the causal rule
    hides.  A NaN in a row of q or dout is in that row's dq and in dk and dv of the keys that it
    sees, of dlse in dq and dk alone; a NaN in a key is in dq of the rows that see it and, through
    them, in dk and dv of the keys that they see, of a row of v in dq and dk alone.

    Args:
        dout: same dtype as q (total_q, h, 128), the gradient of ``out``; rows may be strided,
            16-byte aligned, as of all that have its dtype.
        q: bfloat16 or float16 (total_q, h, d_qk), as it was given; d_qk is 192 or 128.
        k_nope, v, k_rope: same dtype as q (total_k, h_k, ...), as they were given.
        out: same dtype as q (total_q, h, 128), as ``mha_prefill`` returned it.
        lse: float32 (h, total_q), any strides, likewise.
        cu_seqlens_q, cu_seqlens_k: int32 (b + 1,), as they were given.
        max_seqlen_q, max_seqlen_k: as they were given; they scale the order of the work alone.
        softmax_scale, causal: as they were given.
        dlse: float32 (h, total_q), any strides: the gradient of ``lse``.  None: there is none.
        zero_rest: True writes 0 to gradients of rows of no sequence, as autograd does; else dq,
            dk_nope and dv are left as they are there, and dk_rope is undefined.  All are 0 if q or
            k_nope has no rows at all.
        dq, dk_nope, dk_rope, dv: same dtype and same shapes as q, k_nope, k_rope and v, to write;
            rows may be strided.  dk_nope and dv may be views of one gradient of kv_b_proj's output.
            None allocates.
        workspace: int32 (n,), n at least ``snapmla.mha.backward_workspace_size``, 16-byte aligned,
            for this call alone while it runs.  None allocates.

    Returns:
        (dq, dk_nope, dk_rope, dv); dk_rope is None without k_rope.  Of one head that all share it
        is summed over heads in their order, in fp32.

    Raises:
        TypeError, ValueError: naming the argument.
        VariantError: the device's architecture has no kernel, or the variants, which are built when
            they are asked for, are not there; the text says how to build them.

    Example:
        q, k, v = (torch.randn(5, 2, n).bfloat16() for n in (192, 192, 128))
        begins = torch.tensor([0, 3, 5], dtype=torch.int32)  # two prompts, of 3 and 2 tokens
        out, lse = snapmla.mha_prefill(q, k, v, begins, begins, 3, 3)
        dout = torch.ones_like(out)
        dq, dk, dk_rope, dv = snapmla.mha_prefill_backward(
            dout, q, k, v, out, lse, begins, begins, 3, 3
        )

    Source: our own two-kernel form; FlashAttention-2 (Dao) has the equations.
    """
    call = Backward(
        dout, dlse, q, k_nope, k_rope, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, softmax_scale, causal, zero_rest, dq, dk_nope, dk_rope, dv, workspace,
    )  # fmt: skip
    return run(call)


def run(call: Backward) -> Grads:
    """Gradients of a call; wrong ones raise."""
    made: Grads = calls.run(_BACKWARD, _BACKWARD, call)
    return made


# ---------------------------------------------------------------- checks


def check_channels(d_qk: int) -> None:
    """Raises ValueError of heads whose gradients have no kernel."""
    if d_qk not in D_QK:
        hint = "there is no backward of 256 channels: call mha_prefill under torch.no_grad()"
        checks.value_error("q", "192 or 128 channels where gradients are wanted", d_qk, hint)


def check_extents(call: Backward) -> None:
    """Checks all but memory."""
    forward = call.forward
    check_shapes(forward)
    check_channels(int(call.q.shape[-1]))
    total, heads, _ = call.q.shape
    rows, logs = (total, heads, forward.d_v), (heads, total)
    device = call.q.device
    checks.tensor("dout", call.dout, (call.q.dtype,), rows, device)
    checks.tensor("out", call.out, (call.q.dtype,), rows, device)
    checks.tensor("lse", call.lse, (torch.float32,), logs, device)
    if call.dlse is not None:
        checks.tensor("dlse", call.dlse, (torch.float32,), logs, device)
    checks.flag("zero_rest", call.zero_rest)
    if call.dk_rope is not None and call.k_rope is None:
        checks.value_error("dk_rope", "None without k_rope", "a tensor", "dk_nope has all of K")


def _checked(call: Backward) -> Backward:
    check_extents(call)
    forward = call.forward
    check_memory(forward)
    for name, value in (("dout", call.dout), ("out", call.out)):
        if value.numel():
            checks.aligned_rows(name, value)
            if any(n > 1 and not s for n, s in zip(value.shape, value.stride())):
                hint = "call .contiguous() once"
                checks.value_error(name, "no expanded dimension", f"strides {value.stride()}", hint)
    if call.workspace is not None:
        _check_workspace(call.workspace, call)
    read = {name: getattr(call, name) for name in _READ}
    for name, like in (("dq", "q"), ("dk_nope", "k_nope"), ("dk_rope", "k_rope"), ("dv", "v")):
        value, source = getattr(call, name), getattr(call, like)
        if value is not None:
            checks.tensor(name, value, (source.dtype,), source.shape, source.device)
            checks.aligned_rows(name, value)
            checks.distinct(name, value)
            checks.apart(name, value, read)
            read[name] = value
    checks.apart("workspace", call.workspace, read)
    if _most_work(call) > MAX_WORK:
        checks.value_error("q", f"at most {MAX_WORK} row tiles of all heads", tuple(call.q.shape))
    return call


_READ = (
    "dout", "dlse", "q", "k_nope", "k_rope", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip


def _check_workspace(workspace: Any, call: Backward) -> None:
    checks.tensor("workspace", workspace, (torch.int32,), ("words",), call.q.device)
    checks.contiguous("workspace", workspace)
    checks.aligned("workspace", workspace)
    words = call.room.words
    if workspace.shape[0] < words:
        hint = "snapmla.mha.backward_workspace_size says how many"
        checks.value_error("workspace", f"{words} or more words", workspace.shape[0], hint)


def _most_work(call: Backward) -> int:
    """The most work tiles of either kernel."""
    n = call.room.sequences
    rows = most_tiles(call.q.shape[0], n) * call.q.shape[1]
    return max(rows, most_tiles(call.v.shape[0], n) * call.v.shape[1])


# ---------------------------------------------------------------- known calls


def _parts(call: Backward) -> calls.Parts:
    given = (
        call.dout, call.dlse, call.q, call.k_nope, call.k_rope, call.v, call.out, call.lse,
        call.cu_seqlens_q, call.cu_seqlens_k, call.dq, call.dk_nope, call.dk_rope, call.dv,
        call.workspace,
    )  # fmt: skip
    tensors = tuple([t for t in given if t is not None])
    longest = call.max_seqlen_q, call.max_seqlen_k
    flags = call.causal, call.zero_rest
    options = (
        call.softmax_scale.__class__, call.softmax_scale, *flags, *[f.__class__ for f in flags],
        *longest, *[n.__class__ for n in longest], *[t is None for t in given],
    )  # fmt: skip
    written = any([t is not None for t in given[10:]])
    return tensors, options, tuple([t.data_ptr() for t in tensors]) if written else None


def _places(call: Backward, _: object) -> calls.Groups:
    written = {name: getattr(call, name) for name in ("dq", "dk_nope", "dk_rope", "dv")}
    written = {name: x for name, x in written.items() if x is not None}
    if call.workspace is not None:
        written["workspace"] = call.workspace
    rows = {name: getattr(call, name) for name in ("dout", "q", "k_nope", "v", "out")}
    for name, value in (*rows.items(), *written.items()):
        checks.aligned(name, value)
    read = [x for x in (getattr(call, name) for name in _READ) if x is not None]
    return *((overlap.span(x),) for x in written.values()), tuple(map(overlap.span, read))


# ---------------------------------------------------------------- launches


class Kernels(NamedTuple):
    """The launches of a call."""

    items: variants.Kernel
    delta: variants.Kernel
    dq: variants.Kernel
    dkv: variants.Kernel
    rope_sum: variants.Kernel | None = None


class Ready(NamedTuple):
    """State of a launch that follows from shapes and options."""

    kernels: Kernels
    room: Room
    tiles: int  # row tiles that the list has room for
    ctas: tuple[int, int]  # of dQ; of dK and dV
    scale: float
    causal: int
    odd: bool  # some tensor's strides over extents of 1 are none that kernels take
    place: int = 0


def _prepared(call: Backward) -> Ready:
    q, v, room = call.q, call.v, call.room
    found = kernels(q.device, int(q.shape[-1]), q.dtype)
    tiles = most_tiles(q.shape[0], room.sequences)
    keys = most_tiles(v.shape[0], room.sequences) * (room.groups or v.shape[1])
    sms = sm_count(q.device)
    ctas = min(sms, tiles * q.shape[1]), min(sms, keys)
    forward = call.forward
    rows = (*_rows(call), call.dq, call.dk_nope, call.dk_rope, call.dv)
    odd = any(t is not None and launch.regular(t) is not t for t in rows)
    return Ready(found, room, tiles, ctas, forward.scale, int(call.causal), odd)


def _rows(call: Backward) -> list[Tensor]:
    """Tensors that kernels read by rows, in their order; ``out`` last."""
    return [call.q, *call.forward.keys, call.v, call.dout, call.out]


def _results(call: Backward) -> Grads:
    """Tensors given to be written, and new ones for the rest."""
    allocate = launch.allocator(call.q.device)

    def made(given: Tensor | None, like: Tensor) -> Tensor:
        if given is not None:
            return given
        total, heads, width = like.shape
        return allocate((total, heads, width), (heads * width, width, 1), like.dtype)

    rope = None if call.k_rope is None else made(call.dk_rope, call.k_rope)
    return made(call.dq, call.q), made(call.dk_nope, call.k_nope), rope, made(call.dv, call.v)


def _launch(call: Backward, ready: Ready | None) -> tuple[Grads, Ready | None]:
    grads = _results(call)
    batch = call.cu_seqlens_q.shape[0] - 1
    if not batch and not call.zero_rest:
        return grads, None
    if not (batch and call.q.shape[0] and call.v.shape[0]):
        for each in grads:  # nothing is seen by anyone
            if each is not None:
                each.zero_()
        return grads, None
    if ready is None:
        ready = _prepared(call)
    room, work = ready.room, call.workspace
    if work is None:
        work = launch.allocator(call.q.device)((room.words,), (1,), torch.int32)
    floats = work[: room.words].view(torch.float32)
    stats = floats[room.stats : room.parts].view(call.q.shape[1], room.blocks, PAD, 2)
    tables: Sequence[Tensor] = (call.cu_seqlens_q, call.cu_seqlens_k)
    if call.zero_rest:
        tables = _whole_tables(call, work[room.tables : room.words])
    rows, own = _rows(call), grads
    if ready.odd:
        rows = [launch.regular(x) for x in rows]
        dq, dk, dk_rope, dv = grads
        shared = None if dk_rope is None else launch.regular(dk_rope)
        own = launch.regular(dq), launch.regular(dk), shared, launch.regular(dv)
    lists = work[: room.work], work[room.work : room.stats]
    _launch_all(call, ready, (rows, stats, tables), lists, floats, own)
    return grads, ready


def _launch_all(
    call: Backward, ready: Ready, given: Any, lists: tuple[Tensor, Tensor], floats: Tensor,
    grads: Grads,
) -> None:  # fmt: skip
    """The kernels, in their order; ``given`` = (rows, stats, cu_seqlens)."""
    (*rows, out), stats, tables = given
    at, room, (work, key_work) = ready.kernels, ready.room, lists
    dq, dk, dk_rope, dv = grads
    longest = int(call.max_seqlen_q), int(call.max_seqlen_k)
    at.items(*tables, work, key_work, ready.causal, *longest)
    dlse = call.lse[:0] if call.dlse is None else call.dlse
    at.delta(out, rows[-1], call.lse, dlse, tables[0], *lists, stats, ready.tiles)
    common, how = (*rows, stats, *tables), (ready.scale, ready.causal)
    at.dq(*common, work, dq, *how, ready.ctas[0])
    if at.rope_sum is None:
        at.dkv(*common, key_work, dk, dv, *how, BEHIND_DQ, ready.ctas[1])
        return
    if dk_rope is None:
        dk, dk_rope = dk[..., :-ROPE], dk[..., -ROPE:]
    parts = floats[room.parts : room.tables].view(call.v.shape[0], room.groups, ROPE)
    at.dkv(*common, key_work, dk, parts, dv, *how, room.together, BEHIND_DQ, ready.ctas[1])
    at.rope_sum(parts, dk_rope)


def _whole_tables(call: Backward, into: Tensor) -> tuple[Tensor, Tensor]:
    """cu_seqlens with four sequences more, of the rows and the keys of none: rows that see no key,
    and keys that no row sees, whose gradients are 0."""
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_k
    zero, all_q, all_k = (
        cu_q.new_full((2,), n) for n in (0, call.q.shape[0], call.v.shape[0])
    )  # fmt: skip
    torch.cat((
        zero[:1], cu_q[:1], cu_q, all_q,
        zero, cu_k, cu_k[-1:], all_k[:1],
    ), out=into)  # fmt: skip
    half = into.shape[0] // 2
    return into[:half], into[half:]


@functools.lru_cache(maxsize=64)
def kernels(device: torch.device, d_qk: int, dtype: torch.dtype) -> Kernels:
    """The launches for heads of ``d_qk`` channels on a device."""
    arch = variants.arch_of(device)
    of = {"arch": arch, "dtype": NAMES[dtype]}
    specs = [
        VariantSpec(op="mha_items", arch=arch, lists="backward"),
        VariantSpec(op="mha_delta", **of),
        VariantSpec(op="mha_dq", d_qk=d_qk, **of),
        VariantSpec(op="mha_dkv", d_qk=d_qk, **of),
    ]
    if registry.module_name(specs[2]) is None:
        raise VariantError(
            f"{arch}: no kernel for the gradients of dense prefill exists for this architecture "
            "yet; there FlashAttention-4 (flash_attn.cute) and FlashMLA's own "
            "flash_attn_varlen_func serve"
        )
    if len(WIDTHS[d_qk]) == 2:
        specs.append(VariantSpec(op="mha_rope_sum", **of))
    try:
        found = [variants.kernel(spec, device.type) for spec in specs]
    except VariantError as error:
        names = ",".join(spec.name for spec in specs)
        raise VariantError(f"{error}; gradients take `make precompile FILTER={names}`") from error
    return Kernels(*found)


# ---------------------------------------------------------------- operators


def backward_now(call: Backward) -> Grads:
    """``mha_prefill_backward`` on tensors with memory, whoever traces."""
    made, _ = _launch(_checked(call), None)
    return made


def _traced(call: Backward) -> Grads:
    """The call as an operator, for tracers."""
    check_extents(call)
    common: tuple[Any, ...] = (
        call.dout, call.dlse, call.q, call.k_nope, call.k_rope, call.v, call.out, call.lse,
        call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k,
        call.forward.scale, bool(call.causal), bool(call.zero_rest),
    )  # fmt: skip
    given = call.dq, call.dk_nope, call.dk_rope, call.dv
    if all(x is None for x in (*given, call.workspace)):
        dq, dk, rope, dv = torch.ops.snapmla.mha_prefill_backward(*common)
        return dq, dk, None if call.k_rope is None else rope, dv
    new = new_grads(call)
    dq, dk, rope, dv = (x if x is not None else y for x, y in zip(given, new))
    rope = None if call.k_rope is None else rope
    torch.ops.snapmla.mha_prefill_backward_out(*common, dq, dk, rope, dv, call.workspace)
    return dq, dk, rope, dv


def new_grads(call: Backward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised gradients, as ``mha_prefill_backward`` allocates them; no rows for what is
    None there."""
    rope = no_rope(call.q) if call.k_rope is None else _like(call.k_rope)
    return _like(call.q), _like(call.k_nope), rope, _like(call.v)


def no_rope(x: Tensor) -> Tensor:
    """The gradient that an operator has for a ``k_rope`` that is None: no rows, of x's dtype."""
    return x.new_empty((0, 1, ROPE))


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_BACKWARD = calls.Op("mha_prefill_backward", _checked, _launch, _traced, _parts, _places)
variants.on_forget(_BACKWARD.memo.forget)
variants.on_forget(kernels.cache_clear)
