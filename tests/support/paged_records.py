"""Dense decode over caches of bytes beside sparse decode of the same tokens, on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsl_kernels.families.record_decode import FORMATS
from dsl_kernels.formats.dims import KV_LORA_RANK, PARTIAL_ROW
from dsl_kernels.formats.registered import FORMATS as FORMATS_OF
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import selfcheck
from snapmla.testing.paged_record_job import PagedRecordJob, PagedShape
from snapmla.testing.plan_tables import PlanTables
from snapmla.testing.record_job import ARGUMENTS, TWO_LISTS
from snapmla.testing.reference_plan import Queries, plan_reference
from snapmla.testing.sparse_job import HEAD_SCALE, placed
from snapmla.testing.workloads.call import DTYPES, NATURAL

TILES = (16, 32, 64)
CACHES = FORMATS


def kernel_of(
    rows: int, device: str = "cpu", op: str = "record_decode", cache: str = "fp8_ds_mla"
) -> tuple[VariantSpec, Any]:
    """A variant, compiled if it must be; on a GPU skipped where nothing compiles."""
    spec = VariantSpec(op=op, pipeline="mix16", row_tile=rows, out_dtype="bf16", cache_dtype=cache)
    if device != "cpu":
        if variants.jit_refusal() and variants.find(spec) is None:
            pytest.skip(f"{spec.name} is not built, and nothing compiles here")
        return spec, variants.kernel(spec, device)
    directory: Path = variants.find_or_build(spec, need_library=False).directory
    return spec, selfcheck.load(spec, directory)


def by_lists(job: PagedRecordJob, kernel: Any, split_tiles: int = 0) -> tuple[Tensor, Tensor]:
    """(out, lse) of sparse decode over the tokens that ``job`` sees, a list a query token, in
    pieces of so many tiles."""
    shape, q = job.shape, job.q16
    lengths = [max(min(n, shape.topk), 0) for n in shape.lengths]
    queries = Queries(shape.heads, shape.s_q, shape.heads, row_seqlens=shape.counts)
    plan = plan_reference(lengths, 1, 64, 1, shape.topk, split_tiles, queries=queries)
    slots = max(plan.split_begin[-1], 1)
    given: dict[str, Any] = {
        "q": q, "q_rope": q, "q_stride": q.shape[-1], "q_rope_stride": q.shape[-1],
        "cache": job.cache, "indices": job.indices.unflatten(0, q.shape[:2]),
        "topk_length": torch.tensor(lengths, dtype=torch.int32), "attn_sink": torch.empty(0),
        "out": torch.full((*q.shape[:3], KV_LORA_RANK), math.nan, dtype=DTYPES["bf16"]),
        "lse": torch.full((q.shape[0], shape.heads, shape.s_q), math.nan),
        "o_accum": torch.full((slots, shape.heads, PARTIAL_ROW), math.nan).half(),
        "lse_accum": torch.full((slots, shape.heads), math.nan),
        **PlanTables.of(plan).arguments(), "softmax_scale": HEAD_SCALE, **NATURAL,
        "may_split": int(plan.split_begin[-1] > 0), "witness": 0,
    }  # fmt: skip
    names = ARGUMENTS
    if job.record.two_lists:  # of which the second is empty
        names, nothing = TWO_LISTS, job.indices.unflatten(0, q.shape[:2])[..., :0]
        given |= {"extra_cache": job.cache, "extra_indices": nothing, "extra_length": job.lengths}
    moved = {k: placed(x, job.device) if isinstance(x, Tensor) else x for k, x in given.items()}
    kernel(*(moved[name] for name in names))
    return moved["out"].cpu(), moved["lse"].cpu()


def assert_bits_of_lists(
    rows: int, page_size: int, lengths: Sequence[int], device: str, style: str = "std3",
    cache: str = "fp8_ds_mla",
) -> None:  # fmt: skip
    """Asserts that both decodes agree bit for bit, for one and three query tokens a sequence, whole
    and in pieces of two tiles; and that the dense one is right."""
    spec, kernel = kernel_of(rows, device, cache=cache)
    _, lists = kernel_of(rows, device, "sparse_decode", cache)
    width = -(-max(lengths) // page_size) + 1
    for heads, s_q, split_tiles in ((rows, 1, 0), (rows // 3, 3, 0), (rows - 3, 1, 2)):
        shape = PagedShape(
            heads, width * page_size, tuple(lengths), page_size, s_q, layout="padded",
            style=style, parts=1, split_tiles=split_tiles, row_tile=rows,
        )  # fmt: skip
        torch.manual_seed(page_size + s_q)
        job = PagedRecordJob(spec, shape, device=device)
        assert (job.plan.split_begin[-1] > 0) == (split_tiles > 0 and max(lengths) > 128)
        out, lse = job.run(kernel)
        want, want_lse = by_lists(job, lists, split_tiles)
        assert torch.equal(out, want) and torch.equal(lse, want_lse), shape
        errors = job.errors((out, lse))
        assert errors.right, f"{shape}: {errors}"


def nan_cases(cache: str) -> list[tuple[int, Sequence[int] | None]]:
    """Tokens of a sequence, and which groups of the last one are NaN, None for all of it: some in
    the middle of a line, of tokens that a swizzle treats differently."""
    scale = FORMATS_OF[cache].scale
    assert scale is not None
    some = [g for g in (3, 6, 13) if g < scale.count]
    return [(70, None), (70, [2]), (70, some), (65, some), (67, some), (72, some)]
