"""mha_rope_sum: gradient of RoPE channels that KV heads share, from the partial sums of mha_dkv.

Roles        four lanes own a token of one RoPE head, 16 channels each.
Memory       registers only: 16 sums a lane.
Timeline     wait for the previous grid | partial sums, in the order of heads | to 16 bits | store
Bytes moved  256 a token and group of heads read, 128 a token written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, cute

from ...blocks import compat, quant

if TYPE_CHECKING:
    from ...spec import VariantSpec

THREADS, LANES, WIDTH = 128, 4, 64
TOKENS = THREADS // LANES  # of a CTA


@cute.jit
def mha_rope_sum(
    parts: cute.Tensor,  # f32 (total_k, groups, 64), as mha_dkv leaves it
    dk_rope: cute.Tensor,  # bf16 | f16 (total_k, h_rope, 64); h_rope divides groups
    stream: Any,
) -> None:
    """Host half: group i is of RoPE head i // (groups / h_rope)."""
    tiles = (dk_rope.shape[0] + (TOKENS - 1)) // TOKENS
    _sum(parts, dk_rope).launch(
        grid=(tiles, dk_rope.shape[1], 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
    )


@cute.kernel
def _sum(parts: cute.Tensor, dk_rope: cute.Tensor) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    tile, head, _ = cute.arch.block_idx()
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    token, channel = tile * TOKENS + tidx // LANES, tidx % LANES * 4
    groups = parts.shape[1] // dk_rope.shape[1]
    if token < dk_rope.shape[0]:
        sums = cute.make_rmem_tensor((16,), Float32)
        sums.fill(0.0)
        for g in cutlass.range(groups, unroll=2):
            # channels of a quad's load lie side by side
            at = parts.iterator + cute.crd2idx((token, head * groups + g, channel), parts.layout)
            for x in cutlass.range_constexpr(4):
                words = compat.load_words((at + 16 * x).align(16), 4)
                for i in cutlass.range_constexpr(4):
                    sums[4 * x + i] = sums[4 * x + i] + words[i].bitcast(Float32)
        to = dk_rope.iterator + cute.crd2idx((token, head, channel), dk_rope.layout)
        for x in cutlass.range_constexpr(4):
            four = [sums[4 * x + i] for i in range(4)]
            compat.store_words((to + 16 * x).align(8), quant.pack(four, dk_rope.element_type))


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    total, groups, heads = (compat.sym(name=x) for x in ("total_k", "groups", "h_rope"))
    return mha_rope_sum, {
        "parts": compat.rows(compat.DTYPES["f32"], (total, groups, WIDTH)),
        "dk_rope": compat.rows(compat.dtype(spec.dtype), (total, heads, WIDTH)),
    }
