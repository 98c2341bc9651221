"""CPU tensors on a software B200, decoded through the public API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import snapmla
from dsl_kernels.spec import decode_spec
from snapmla import rank
from snapmla.dense import launching
from snapmla.reference import MIMIC_BLACKWELL
from snapmla.runtime import variants
from snapmla.testing import selfcheck
from snapmla.testing.comparison import blocks_of
from tests.support import cases

ROW_TILES = {"ws": 64, "pair": 128}  # of each pipeline


@contextlib.contextmanager
def software_gpu(arch: str) -> Iterator[pytest.MonkeyPatch]:
    """CPU tensors run on one of that architecture; nothing that is kept outlives it, nor what the
    patch that it gives replaces."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SNAPMLA_SOFTGPU_ARCH", arch)
            _forget()
            yield patch
    finally:
        _forget()


def _forget() -> None:
    """Clears the caches of what depends on the architecture."""
    for cached in (variants.arch_of, rank.card_of, launching._plan_kernel):
        cached.cache_clear()
    variants.forget()


def blackwell() -> contextlib.AbstractContextManager[pytest.MonkeyPatch]:
    """CPU tensors run on a software B200."""
    return software_gpu("sm_100a")


def decode(
    inputs: cases.DecodeInputs,
    pipeline: str,
    parts: int,
    out_dtype: torch.dtype = torch.float32,  # which hides nothing
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(plan, out, lse) of one call."""
    case = inputs.case
    q = snapmla.QuantizedQuery(inputs.q8, inputs.q_rope_scaled, inputs.q_scale)
    cache = snapmla.PagedKVCache.from_tensors(inputs.content, inputs.rope, inputs.scale)
    table, lengths = inputs.block_table, inputs.cache_seqlens
    made = snapmla.plan_decode(
        lengths, case.heads, case.s_q, page_size=case.page_size, max_pages=table.shape[1],
        num_parts=parts, fixed_overhead=1, causal=case.causal, pipeline=pipeline,
        fixed_split_tokens=128 if parts > 1 else None,
    )  # fmt: skip
    out, lse = snapmla.decode(
        q, cache, table, lengths, softmax_scale=inputs.softmax_scale, plan=made,
        causal=case.causal, out_dtype=out_dtype,
    )  # fmt: skip
    return made, out, lse


def errors(
    inputs: cases.DecodeInputs, pipeline: str, out: torch.Tensor, lse: torch.Tensor
) -> selfcheck.DecodeErrors:
    """Errors of a call's results against fp64 and the mimic with the pipeline's blocks."""
    q = snapmla.QuantizedQuery(inputs.q8, inputs.q_rope_scaled, inputs.q_scale)
    cache = snapmla.PagedKVCache.from_tensors(inputs.content, inputs.rope, inputs.scale)
    spec = decode_spec(pipeline, ROW_TILES[pipeline], inputs.case.page_size, "f32", "sm_100a")
    return selfcheck.decode_errors(
        out, lse, q, cache, inputs.block_table, inputs.cache_seqlens, inputs.softmax_scale,
        causal=inputs.case.causal, config=blocks_of(spec, MIMIC_BLACKWELL),
    )  # fmt: skip


def with_queries_like_keys(inputs: cases.DecodeInputs) -> cases.DecodeInputs:
    """Every query row is one of its sequence's tokens, byte for byte, where it has any."""
    q8, rope, scale = (x.clone() for x in (inputs.q8, inputs.q_rope_scaled, inputs.q_scale))
    size = inputs.case.page_size
    for b, length in enumerate(inputs.case.lengths):
        if not length:
            continue
        rows = torch.arange(q8.shape[1] * q8.shape[2])
        token = (rows * 7) % length
        page = inputs.block_table[b].long()[token // size]
        shape = q8.shape[1:3]
        picked = inputs.content.view(torch.uint8)[page, token % size]
        q8.view(torch.uint8)[b] = picked.view(*shape, -1)
        rope[b] = inputs.rope[page, token % size].view(*shape, -1)
        scale[b] = inputs.scale[page, token % size].view(shape)
    return replace(inputs, q8=q8, q_rope_scaled=rope, q_scale=scale)
