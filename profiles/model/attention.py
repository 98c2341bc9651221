"""Contenders that attend: plain torch, fake-quantised torch, our kernels, FlashMLA's.

Each is an ``Attend`` of ``profiles.model.model``: absorbed queries of the last n tokens over
latents in bf16 (or wider), which it stores in its own format first.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from profiles.contenders import make
from profiles.model.fake import CHUNK_ELEMENTS, SETTINGS, Setting, attend_quantised
from profiles.model.model import Attend
from profiles.peer_libraries import PeerLibrary

PAGE = 64
MAX_S_Q = 8
E4M3_MAX = 448.0


def attend_plainly(
    q_nope: Tensor, q_rope: Tensor, c_kv: Tensor, k_rope: Tensor, softmax_scale: float
) -> Tensor:
    """Attention on the inputs as they are, in fp32 (fp64 if they are), nothing rounded."""
    dtype = torch.promote_types(c_kv.dtype, torch.float32)
    n, heads, length = q_nope.shape[1], q_nope.shape[2], c_kv.shape[1]
    limits = torch.arange(length - n + 1, length + 1, device=c_kv.device).repeat_interleave(heads)
    rows = max(1, CHUNK_ELEMENTS[c_kv.device.type] // length)
    found = []
    for i in range(q_nope.shape[0]):
        content, rope = c_kv[i].to(dtype), k_rope[i].to(dtype)
        nope, turned = q_nope[i].to(dtype).flatten(0, 1), q_rope[i].to(dtype).flatten(0, 1)
        parts = []
        for begin in range(0, n * heads, rows):
            part = slice(begin, begin + rows)
            seen = int(limits[part][-1])
            logits = (nope[part] @ content[:seen].T).addmm_(turned[part], rope[:seen].T)
            hidden = torch.arange(seen, device=c_kv.device) >= limits[part, None]
            p = (logits * softmax_scale).masked_fill_(hidden, -torch.inf).softmax(-1)
            parts.append(p @ content[:seen])
        found.append(torch.cat(parts).unflatten(0, (n, heads)))
    return torch.stack(found)


def in_bf16(attend: Attend) -> Attend:
    """The same with its result rounded to bf16, as kernels return it."""

    def rounded(*arguments: Any) -> Tensor:
        return attend(*arguments).bfloat16()

    return rounded


def fake(setting: Setting, dtype: torch.dtype = torch.float32) -> Attend:
    """Fake-quantised attention."""

    def attend(
        q_nope: Tensor, q_rope: Tensor, c_kv: Tensor, k_rope: Tensor, softmax_scale: float
    ) -> Tensor:
        return torch.stack(
            [
                attend_quantised(*each, softmax_scale, setting, dtype)
                for each in zip(q_nope, q_rope, c_kv, k_rope, strict=True)
            ]
        )

    return attend


# ------------------------------------------------------------------------- kernels on a cache


@dataclass(frozen=True)
class Blocks:
    """The last n tokens of each sequence as requests of a decode step, ``s_q`` tokens each.

    Requests of a sequence share its pages and differ in length, so that one step computes what
    n tokens would see one after another.

    Attributes:
        s_q: query tokens of a request.
        table: (requests, pages) int32.
        lengths: (requests,) int32.
    """

    s_q: int
    table: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, sequences: int, n: int, length: int, device: torch.device) -> Blocks:
        s_q = next(size for size in range(MAX_S_Q, 0, -1) if n % size == 0)
        width = -(-length // PAGE)
        pages = torch.arange(sequences * width, dtype=torch.int32, device=device)
        table = pages.view(sequences, width).repeat_interleave(n // s_q, 0)
        ends = torch.arange(length - n + s_q, length + 1, s_q, dtype=torch.int32, device=device)
        return cls(s_q, table, ends.repeat(sequences))

    def split(self, x: Tensor) -> Tensor:
        """(sequences, n, ...) as (requests, s_q, ...)."""
        return x.unflatten(1, (-1, self.s_q)).flatten(0, 1).contiguous()


def _padded(x: Tensor) -> Tensor:
    """(sequences, L, d) with L up to whole pages, zeros behind."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % PAGE))


def kernels(**options: str) -> Attend:
    """snapmla's own: append to a paged cache, quantise queries, plan, decode.

    Args:
        options: of ``plan_decode``.
    """
    import snapmla

    def attend(
        q_nope: Tensor, q_rope: Tensor, c_kv: Tensor, k_rope: Tensor, softmax_scale: float
    ) -> Tensor:
        sequences, n, heads, _ = q_nope.shape
        length, device = c_kv.shape[1], c_kv.device
        blocks = Blocks.of(sequences, n, length, device)
        cache = snapmla.PagedKVCache.allocate(
            sequences * blocks.table.shape[1], PAGE, device=device
        )
        tokens = torch.arange(length, dtype=torch.int32, device=device)
        first = torch.arange(sequences, dtype=torch.int32, device=device)
        slots = (tokens + first[:, None] * blocks.table.shape[1] * PAGE).flatten()
        content, rope = (x.bfloat16().flatten(0, 1).contiguous() for x in (c_kv, k_rope))
        snapmla.append_kv(cache, content, rope, slots)
        nope, turned = (blocks.split(x.bfloat16()) for x in (q_nope, q_rope))
        query = snapmla.quantize_q(nope, turned)
        plan = snapmla.plan_decode(
            blocks.lengths, heads, blocks.s_q, page_size=PAGE, max_pages=blocks.table.shape[1],
            **options,  # type: ignore[arg-type]
        )  # fmt: skip
        out, _ = snapmla.decode(
            query, cache, blocks.table, blocks.lengths,
            softmax_scale=softmax_scale, plan=plan,
        )  # fmt: skip
        return out.view(sequences, n, heads, -1)

    return attend


def flash_mla(library: PeerLibrary) -> Attend:
    """FlashMLA's dense kernels, BF16 or FP8 (one dynamic scale per tensor, RoPE included)."""
    library.load()
    fp8 = library.name == "flashmla_fp8"

    def attend(
        q_nope: Tensor, q_rope: Tensor, c_kv: Tensor, k_rope: Tensor, softmax_scale: float
    ) -> Tensor:
        sequences, n, heads, rank = q_nope.shape
        blocks = Blocks.of(sequences, n, c_kv.shape[1], c_kv.device)
        query = blocks.split(torch.cat((q_nope, q_rope), -1).bfloat16())
        cache = _padded(torch.cat((c_kv, k_rope), -1).bfloat16())
        pages = cache.view(-1, PAGE, 1, cache.shape[-1])
        common = (rank, blocks.lengths, blocks.table, softmax_scale, True)
        if not fp8:
            out = torch.ops._flashmla_C.dense_decode_fwd(query, pages, *common, None, None, None)
            return out[0].reshape(sequences, n, heads, rank)
        ops = torch.ops._flashmla_extension_C
        (query, q_scale), (pages, k_scale) = _per_tensor(query), _per_tensor(pages)
        schedule = ops.get_mla_decoding_metadata_dense_fp8(blocks.lengths, blocks.s_q * heads, 1)
        out = ops.fwd_kvcache_mla_fp8(query, pages, *common, *schedule, q_scale, k_scale)
        return out[0].reshape(sequences, n, heads, rank)

    return attend


def _per_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 under one scale, and the scale (1,) fp32."""
    scale = (x.float().abs().amax() / E4M3_MAX).clamp_min(2.0**-80).view(1)
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


# --------------------------------------------------------------------------------- by name


Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Backend:
    """An attention by name.

    Attributes:
        attend: None if it cannot run here.
        stored: (q_nope, q_rope, c_kv, k_rope), each (b, ...), as it stores them, in fp32: against
            these its arithmetic alone is judged.
        reason: why it cannot run here.
    """

    name: str
    text: str
    attend: Attend | None
    stored: Callable[[Inputs], Inputs]
    reason: str = ""


def _stored_by(setting: Setting) -> Callable[[Inputs], Inputs]:
    """What a setting's rounded operands mean."""

    def stored(inputs: Inputs) -> Inputs:
        rows = []
        for q_nope, q_rope, c_kv, k_rope in zip(*inputs, strict=True):
            operands = (setting.query(q_nope, q_rope), setting.cache(c_kv, k_rope))
            rows.append([x.float() * scale[..., None] for *two, scale in operands for x in two])
        q_nope, q_rope, c_kv, k_rope = (torch.stack(each) for each in zip(*rows, strict=True))
        return q_nope, q_rope, c_kv, k_rope

    return stored


def _stored_as_they_are(inputs: Inputs) -> Inputs:
    return inputs


def _stored_per_tensor(inputs: Inputs) -> Inputs:
    """FlashMLA FP8's: one scale for all queries, one for all latents."""
    rank = inputs[0].shape[-1]
    joint = (torch.cat(pair, -1).bfloat16() for pair in (inputs[:2], inputs[2:]))
    (query, q_scale), (cache, k_scale) = (_per_tensor(x) for x in joint)
    both = (query.float() * q_scale, cache.float() * k_scale)
    return tuple(part for x in both for part in (x[..., :rank], x[..., rank:]))  # type: ignore[return-value]


def backends(names: Sequence[str], device: torch.device, peers: Path | None) -> list[Backend]:
    """The attentions of these names: ``bf16``, the settings, the kernels.

    Raises:
        ValueError: no such name.
    """
    return [_backend(name, device, peers) for name in names]


# Our kernels: by name the options of their plans.
OURS: dict[str, dict[str, str]] = {
    "kernel": {}, "kernel2": {"accuracy": "high", "pipeline": "etap"},
    "kernel_high": {"accuracy": "high"},
}  # fmt: skip
KERNELS = (*OURS, "flashmla_bf16", "flashmla_fp8")
NAMES = ("bf16", *SETTINGS, *KERNELS)
_TEXTS = {
    "bf16": "BF16",
    "kernel": "our kernel, one term",
    "kernel2": "our kernel, two terms",
    "kernel_high": "our kernel, accuracy high",
    "flashmla_bf16": "FlashMLA BF16",
    "flashmla_fp8": "FlashMLA FP8",
}


def _backend(name: str, device: torch.device, peers: Path | None) -> Backend:
    if name in SETTINGS:
        setting = SETTINGS[name]
        return Backend(name, setting.text, in_bf16(fake(setting)), _stored_by(setting))
    if name == "bf16":
        return Backend(name, _TEXTS[name], in_bf16(attend_plainly), _stored_as_they_are)
    if name not in NAMES:
        raise ValueError(f"attention: expected one of {', '.join(NAMES)}; got {name!r}")
    made: Callable[[], Attend]
    if name in OURS:
        reason, made = _without_kernels(), lambda: kernels(**OURS[name])
        stored = _stored_by(SETTINGS["ours"])
    else:
        library = make(name, peers)
        if not isinstance(library, PeerLibrary):
            raise TypeError(f"attention: {name!r} is no library")
        reason = library.unavailable() if device.type == "cuda" else "needs a GPU"
        made = lambda: flash_mla(library)
        stored = _stored_per_tensor if name == "flashmla_fp8" else _stored_as_they_are
    return Backend(name, _TEXTS[name], None if reason else made(), stored, reason or "")


def _without_kernels() -> str | None:
    """Reason why our kernels cannot run, or None."""
    found = importlib.util.find_spec("tvm_ffi") is not None
    return None if found else "apache-tvm-ffi is not installed"


def sane(attend: Attend, device: torch.device) -> float:
    """Relative L2 error on a small random problem, which catches arguments in a wrong order.

    A kernel of another library cannot be tried where there is no GPU; this runs before it counts.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    inputs = (normal(1, 16, 16, 512), normal(1, 16, 16, 64), normal(1, 200, 512),
              normal(1, 200, 64), 3.0 / math.sqrt(576))  # fmt: skip
    truth = attend_plainly(*inputs)
    return float((attend(*inputs).float() - truth).norm() / truth.norm())
