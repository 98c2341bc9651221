"""append_kv: quantise new tokens and scatter them into the paged cache.

Roles        one warp a token, WARPS warps a CTA, no barrier; a CTA is 128 threads so that a decode
             step's few hundred tokens already spread over the SMs, and 4096 tokens are one wave.
Memory       registers only: 9 (16-bit input) or 18 (fp32) words of the row a lane; no shared
             memory.
Timeline     wait for the previous grid | load row, slot | max, redux | scale, divide, pack | store
             All loads of a row are in flight before the first is used; the slot is loaded with
             them and only decides where (and whether) to store.
Bytes moved  per token 1152 read (16-bit input) + 644 written + the slot.

Slots outside [0, pages * P), such as -1, are skipped.  Offsets are 64-bit: pools may exceed 4 GiB.
Quantisation rule: see ``quant.py``.  This is the Fused-K-Append kernel of the SnapMLA paper
(section 3.3), with the scale floors this project adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cutlass import Int32, Int64, Uint32, cute

from .. import compat
from ..dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from . import quant

if TYPE_CHECKING:
    from ..spec import VariantSpec

WARPS = 4


@cute.jit
def append_kv(
    content: cute.Tensor,  # u8 (pages, P, 512)
    rope: cute.Tensor,  # bf16 (pages, P, 64)
    scale: cute.Tensor,  # f32 (pages, P)
    c_kv: cute.Tensor,  # in_dtype (n, 512)
    k_rope: cute.Tensor,  # in_dtype (n, 64)
    slot_mapping: cute.Tensor,  # i32|i64 (n,)
    stream: Any,
) -> None:
    """Host half: one CTA for every WARPS tokens."""
    n = c_kv.shape[0]
    by_page = compat.fast_divisor(content.shape[1])
    if n > 0:  # an empty grid is a launch error
        _append_kv(content, rope, scale, c_kv, k_rope, slot_mapping, by_page).launch(
            grid=((n + (WARPS - 1)) // WARPS, 1, 1),
            block=(WARPS * quant.WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )


@cute.kernel
def _append_kv(
    content: cute.Tensor,
    rope: cute.Tensor,
    scale: cute.Tensor,
    c_kv: cute.Tensor,
    k_rope: cute.Tensor,
    slot_mapping: cute.Tensor,
    by_page: compat.FastDivisor,
) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane = tidx % quant.WARP
    token = block * WARPS + tidx // quant.WARP
    dt = c_kv.element_type
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    if token < c_kv.shape[0]:
        chunks, rope_words = quant.load_row(
            c_kv.iterator + Int64(token) * c_kv.stride[0],
            k_rope.iterator + Int64(token) * k_rope.stride[0],
            lane,
            dt,
        )
        slot = Int64(slot_mapping[token])
        bits = quant.warp_max(quant.scale_bits(chunks, rope_words, dt))
        sigma, inv = quant.finish_scale(bits)
        page_size = content.shape[1]
        if slot >= 0 and slot < Int64(content.shape[0]) * page_size:
            # 2^31 tokens would be a pool of more than 1 TB: the quotient fits 32 bits
            page, offset = divmod(Int32(slot), by_page)
            at = (Int64(page), Int64(offset))
            quant.store_row(
                chunks,
                rope_words,
                dt,
                inv,
                lane,
                content.iterator + (at[0] * content.stride[0] + at[1] * content.stride[1]),
                rope.iterator + (at[0] * rope.stride[0] + at[1] * rope.stride[1]),
            )
            if lane == 0:
                compat.store_words(
                    scale.iterator + (at[0] * scale.stride[0] + at[1]), [sigma.bitcast(Uint32)]
                )


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    dt = compat.dtype(spec.in_dtype)
    n = compat.sym(name="n")
    fakes = {
        **compat.cache_fakes(),
        "c_kv": compat.rows(dt, (n, KV_LORA_RANK)),
        "k_rope": compat.rows(dt, (n, QK_ROPE_HEAD_DIM)),
        "slot_mapping": compat.vector(compat.dtype(spec.index_dtype), n),
    }
    return append_kv, fakes
