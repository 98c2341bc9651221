"""Checks of a dense prefill: kinds, dtypes, shapes, strides, and where its results lie."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dsl_kernels.formats.mha_list import (
    VALUES,
    WIDTHS,
    SplitRoom,
    may_split,
    most_tiles,
    workspace_words,
)
from snapmla import checks

Tensor = torch.Tensor

NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}  # as variants have them
DTYPES = tuple(NAMES)
D_QK = tuple(VALUES)  # channels of a head of q and k
MAX_TOKENS = 2**31 - 2**16  # of all sequences: the kernel's int32, with room for a tile
MAX_HEADS = 2**16
MAX_WORK = 2**31 - 1  # row tiles times heads
DEFAULT_D_V = 128  # that ``workspace_size`` takes where it is not told
_CHANNELS = (
    "channels of q and k are 192 (128 and 64 of RoPE), 128, or 256 (192 and 64); "
    "latents are decode's"
)


class Mha(NamedTuple):
    """A call of ``mha_prefill``, checked or not."""

    q: Tensor
    k_nope: Tensor
    k_rope: Tensor | None
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: Any  # an int, or a tracer's
    max_seqlen_k: Any
    softmax_scale: float | None
    causal: bool
    split_keys: bool
    out: Tensor | None
    lse: Tensor | None
    workspace: Tensor | None

    @property
    def scale(self) -> float:
        """The factor of the logits."""
        given = self.softmax_scale
        return float(self.q.shape[-1] ** -0.5 if given is None else given)

    @property
    def d_v(self) -> int:
        """Channels of a head of v and out."""
        return VALUES[int(self.q.shape[-1])]

    @property
    def split_room(self) -> SplitRoom | None:
        """Room for pieces, where some sequence's keys may be split."""
        total_k = self.k_nope.shape[0]
        if not (self.split_keys and may_split(total_k, int(self.max_seqlen_k))):
            return None
        room = SplitRoom.of(self.q.shape[0], self.cu_seqlens_q.shape[0] - 1, total_k)
        return room if room.splits else None

    @property
    def keys(self) -> tuple[Tensor, ...]:
        """K as kernels take it: channels of a head, and 64 of RoPE where q has 192 or 256.

        A RoPE part that is one head expanded is that head.
        """
        nope, rope = self.k_nope, self.k_rope
        if rope is not None:
            shared = rope.shape[1] > 1 and rope.stride(1) == 0
            return nope, rope[:, :1] if shared else rope
        own, *shared_by_all = WIDTHS[int(self.q.shape[-1])]
        return (nope[..., :own], nope[..., own:]) if shared_by_all else (nope,)


def wants_gradients(*tensors: Any) -> bool:
    """Says if autograd would want gradients of a tensor, where it records at all."""
    for value in tensors:  # noqa: SIM110 (on every call: faster than any())
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return True
    return False


def check_shapes(call: Mha) -> None:
    """Checks all but memory: kinds, dtypes, shapes, options."""
    q, v = call.q, call.v
    _heads("q", q, D_QK, _CHANNELS, DTYPES)
    device = q.device
    _check_keys(call)
    total_k, kv_heads = call.k_nope.shape[:2]
    hint = f"values beside queries of {q.shape[-1]} channels have {call.d_v} a head"
    _heads("v", v, (call.d_v,), hint, (q.dtype,))
    checks.tensor("v", v, (q.dtype,), (total_k, kv_heads, call.d_v), device)
    heads = q.shape[1]
    if not 1 <= heads <= MAX_HEADS:
        checks.value_error("q", f"1 to {MAX_HEADS} heads", heads)
    if kv_heads < 1 or heads % kv_heads:
        wanted = f"a number of heads that divides q's {heads}"
        checks.value_error("k_nope", wanted, kv_heads, "query heads share heads of k evenly")
    for name, total in (("q", q.shape[0]), ("k_nope", total_k)):
        if total > MAX_TOKENS:
            checks.value_error(name, f"at most {MAX_TOKENS} tokens", total)
    checks.vector("cu_seqlens_q", call.cu_seqlens_q, ("b + 1",), device)  # type: ignore[arg-type]
    entries = call.cu_seqlens_q.shape[0]
    if entries < 1:
        checks.value_error("cu_seqlens_q", "b + 1 entries", 0)
    checks.vector("cu_seqlens_k", call.cu_seqlens_k, (entries,), device)
    for name, longest in (("max_seqlen_q", call.max_seqlen_q), ("max_seqlen_k", call.max_seqlen_k)):
        checks.integer(name, longest, 0, 2**31 - 1)
    if call.softmax_scale is not None:
        checks.softmax_scale(call.softmax_scale, checks.MAX_ROWS_SCALE)
    checks.flag("causal", call.causal)
    checks.flag("split_keys", call.split_keys)


def _check_keys(call: Mha) -> None:
    """K's one tensor, or its two."""
    q, nope, rope = call.q, call.k_nope, call.k_rope
    d_qk = int(q.shape[-1])  # of a tensor in a trace a symbol, which is no key of a table
    parts = WIDTHS[d_qk]
    if rope is not None and len(parts) == 1:
        checks.value_error("k_rope", f"None beside queries of {d_qk} channels", "a tensor")
    hint = f"all {d_qk} channels of a head"
    if len(parts) == 2:
        hint = f"{parts[0]} channels of a head beside k_rope, or all {d_qk} without it"
    _heads("k_nope", nope, (d_qk if rope is None else parts[0],), hint, (q.dtype,))
    checks.tensor("k_nope", nope, (q.dtype,), nope.shape, q.device)
    if rope is not None:
        _heads("k_rope", rope, parts[1:], "64 RoPE channels of one head that all share", (q.dtype,))
        total, heads = nope.shape[:2]
        if rope.shape[0] != total or rope.shape[1] not in (1, heads):
            wanted = f"shape ({total}, 1, {parts[1]}) or ({total}, {heads}, {parts[1]})"
            checks.value_error("k_rope", wanted, tuple(rope.shape), "one row for each key")
        checks.tensor("k_rope", rope, (q.dtype,), rope.shape, q.device)


def _heads(
    name: str, value: Any, widths: tuple[int, ...], hint: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    """(tokens, heads, channels) with one of these widths."""
    checks.not_nested(name, value)
    if isinstance(value, torch.Tensor) and (value.ndim != 3 or value.shape[-1] not in widths):
        wanted = f"shape (tokens, heads, {' or '.join(map(str, widths))})"
        checks.value_error(name, wanted, tuple(value.shape), hint)
    checks.tensor(name, value, dtypes, ("tokens", "heads", "channels"))


def check_memory(call: Mha) -> None:
    """Checks strides, alignment and the tensors that are written, of tensors with memory."""
    named = {"q": call.q, "k_nope": call.k_nope, "v": call.v, "k_rope": call.k_rope}
    keys = call.keys
    if call.k_rope is not None:
        named["k_rope"] = keys[1]
    for name, value in named.items():
        if value is not None and value.numel():
            checks.aligned_rows(name, value)
            if any(n > 1 and not s for n, s in zip(value.shape, value.stride())):
                hint = "kernels read heads that are there: give k and v fewer heads instead"
                checks.value_error(name, "no expanded dimension", f"strides {value.stride()}", hint)
    total, heads, _ = call.q.shape
    device = call.q.device
    if call.out is not None:
        checks.tensor("out", call.out, (call.q.dtype,), (total, heads, call.d_v), device)
        checks.aligned_rows("out", call.out)
        checks.distinct("out", call.out)
    if call.lse is not None:
        checks.tensor("lse", call.lse, (torch.float32,), (heads, total), device)
        checks.distinct("lse", call.lse)
    if call.workspace is not None:
        _check_workspace(call.workspace, call)
    _check_apart(call)


def _check_workspace(workspace: Any, call: Mha) -> None:
    checks.tensor("workspace", workspace, (torch.int32,), ("words",), call.q.device)
    checks.contiguous("workspace", workspace)
    words = words_of(call)
    if workspace.shape[0] < words:
        given = "total_q, batch, heads, total_k" if call.split_keys else "total_q, batch"
        given += ", d_v" if call.split_keys and call.d_v != DEFAULT_D_V else ""
        hint = f"snapmla.mha.workspace_size({given}) says how many"
        checks.value_error("workspace", f"{words} or more words", workspace.shape[0], hint)
    if call.split_room is not None:
        checks.aligned("workspace", workspace)


def words_of(call: Mha) -> int:
    """int32 words of the call's workspace."""
    room = call.split_room
    if room is not None:
        return room.words(call.q.shape[1], call.d_v)
    return workspace_words(call.q.shape[0], call.cu_seqlens_q.shape[0] - 1)


def most_work(call: Mha) -> int:
    """The most work tiles of all heads: row tiles, or pieces of them."""
    room = call.split_room
    batch = call.cu_seqlens_q.shape[0] - 1
    tiles = most_tiles(call.q.shape[0], batch) if room is None else room.entries
    return tiles * call.q.shape[1]


def _check_apart(call: Mha) -> None:
    """Checks that what is written shares no memory with what is read, or with one another."""
    read = {
        "q": call.q, "k_nope": call.k_nope, "k_rope": call.k_rope, "v": call.v,
        "cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k,
    }  # fmt: skip
    for name in ("out", "lse", "workspace"):
        written = getattr(call, name)
        checks.apart(name, written, read)
        read[name] = written
