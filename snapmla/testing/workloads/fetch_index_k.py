"""``fetch_index_k``: index keys back from the index cache, as stored or multiplied out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsl_kernels.index_cache import INDEX_DIM, PAGE, PAGE_BYTES, SCALES_AT
from dsl_kernels.spec import VariantSpec
from snapmla.dsa.fetch import fetch_index_k
from snapmla.testing import index_tables
from snapmla.testing.workloads import exact
from snapmla.testing.workloads.call import DTYPES, INDEX, Call, Sizes, Workload, bit_for_bit
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.testing.workloads.samples import Random

UNTOUCHED = 7


def truth(spec: VariantSpec, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Rows of the slots that the arguments mean; those of no sequence stay as they are."""
    keys, scales = given["keys"].cpu().clone(), given["scales"].cpu().clone()
    slots = slots_of(spec, given)
    written = slots != index_tables.UNTOUCHED
    found, factors = index_tables.keys_at(given["cache"], slots)
    if spec.key_dtype == "fp8":
        keys[written] = found.view(torch.uint8)[written]
        scales[written] = factors[written]
    else:
        keys[written] = index_tables.dequantised(found, factors, keys.dtype)[written]
    return {"keys": keys.to(given["keys"].device), "scales": scales.to(given["keys"].device)}


def slots_of(spec: VariantSpec, given: Mapping[str, Any]) -> Tensor:
    """The slot of each row of a result."""
    if spec.mode == "indices":
        index = given["indices"].cpu().long()
        real = (index >= 0) & (index < PAGE * len(given["cache"]))
        return torch.where(real, index, index_tables.NO_TOKEN)
    starts = given["seq_starts"].cpu()
    return index_tables.packed_slots(
        given["block_table"].cpu(), given["cu_seqlens"].cpu(), starts if len(starts) else None,
        len(given["cache"]), len(given["keys"]),
    )  # fmt: skip


def results(spec: VariantSpec, rows: int, device: str, gap: int = 0) -> dict[str, Tensor]:
    """Tensors to fetch into; ``gap``: elements between rows of keys."""
    stored = spec.key_dtype == "fp8"
    dtype = torch.uint8 if stored else DTYPES[spec.key_dtype]
    keys = torch.full((rows, INDEX_DIM + gap), UNTOUCHED, dtype=dtype, device=device)
    scales = torch.full((rows if stored else 0,), float(UNTOUCHED), device=device)
    return {"keys": keys[:, :INDEX_DIM], "scales": scales}


def small(spec: VariantSpec) -> Iterator[Call]:
    """All codes, NaN among them, scales of any size; pages apart; what is no token; chunks."""
    pages = 5
    pool = torch.randint(256, (pages, PAGE_BYTES + 48), dtype=torch.uint8)[:, :PAGE_BYTES]
    scales = torch.randn(pages, PAGE).exp() * 0.1
    scales[1, 3] = torch.nan
    pool[:, SCALES_AT:] = scales.view(torch.uint8)
    if spec.mode == "indices":
        slots = torch.randperm(pages * PAGE)[:21]
        slots[4], slots[9], slots[13] = -1, pages * PAGE, PAGE + 3
        if spec.index_dtype == "i64":
            slots[11] = slots[0] + 2**32
        told = {"indices": slots.to(INDEX[spec.index_dtype])}
        rows = len(slots)
    else:
        table = torch.tensor([[4, 2], [-1, 9], [0, 1], [3, 3]], dtype=torch.int32)
        begins = torch.tensor([0, 70, 73, 73, 90], dtype=torch.int32)
        starts = torch.tensor([3, 63, 0, 120], dtype=torch.int32)
        told, rows = {"block_table": table, "cu_seqlens": begins, "seq_starts": starts}, 95
    for gap in (0, 16):
        if gap and spec.mode == "ragged":
            told["seq_starts"] = told["seq_starts"][:0]
        given = {"cache": pool, **told, **results(spec, rows, "cpu", gap)}
        names = {f"{x} with gaps of {gap}": x for x in ("keys", "scales")}
        yield Call(given, names, truth(spec, given))


def recorded(case: Case, run: Runner) -> Recorded:
    """Any bytes and scales."""
    spec, bits, pages = case.spec, case.bits(), 6
    raw = bits.below(256, (pages, PAGE_BYTES + 16 * (case.index % 2))).astype(np.uint8)
    factors = exact.scales(bits, (pages, PAGE), -3)
    raw[:, SCALES_AT:PAGE_BYTES] = factors.view(np.uint8)
    told: dict[str, Tensor] = {}
    if spec.mode == "indices":
        index = (bits.below(pages * PAGE + 20, (99,)) - 10).astype(exact.WIDTH[spec.index_dtype])
        told, seen, rows = {"indices": run.there(index)}, [raw, index], 99
    else:
        table = (bits.below(pages + 2, (7, 3)) - 1).astype(np.int32)
        begins = np.concatenate([[0], np.cumsum(bits.below(40, (7,)))]).astype(np.int32)
        starts = bits.below(180, (7,)).astype(np.int32)
        told = {"block_table": run.there(table), "cu_seqlens": run.there(begins)}
        told["seq_starts"] = run.there(starts)
        seen, rows = [raw, table, begins, starts], int(begins[-1]) + 5
    made = results(spec, rows, run.device, 16 * (case.index % 2))
    cache = run.there(raw)[:, :PAGE_BYTES]
    run.call(case.variant, cache=cache, **told, **made)
    found = [made["keys"].contiguous(), made["scales"]]
    return exact.of_problems(seen, [found], "keys")


def sized(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
    """All tokens of the batch, from pages in random order."""
    source, n = Random(device, seed), sizes.batch * sizes.tokens
    width = -(-sizes.tokens // PAGE)
    pages = sizes.batch * width
    cache = torch.zeros(pages, PAGE_BYTES, dtype=torch.uint8, device=device)
    made = results(spec, n, device)
    if spec.mode == "indices":
        index = source.order(pages * PAGE)[:n].to(INDEX[spec.index_dtype])
        return {"cache": cache, "indices": index, **made}
    return {
        "cache": cache, "block_table": source.order(pages).view(sizes.batch, width).int(),
        "cu_seqlens": source.i32(range(0, n + 1, sizes.tokens)),
        "seq_starts": torch.empty(0, dtype=torch.int32, device=device), **made,
    }  # fmt: skip


def public(spec: VariantSpec, given: Mapping[str, Any]) -> Callable[[], Any]:
    """``snapmla.dsa.fetch_index_k``."""
    out: Any = given["keys"]
    if spec.key_dtype == "fp8":
        out = out.view(torch.float8_e4m3fn), given["scales"]
    where = given["indices"] if spec.mode == "indices" else given["block_table"]
    begins = given.get("cu_seqlens")
    return lambda: fetch_index_k(given["cache"], where, cu_seqlens=begins, out=out)


def moved(spec: VariantSpec, sizes: Sizes) -> float:
    """Reads 132 bytes a key, writes those or its channels."""
    own = PAGE_BYTES // PAGE
    written = own if spec.key_dtype == "fp8" else INDEX_DIM * DTYPES[spec.key_dtype].itemsize
    return float(sizes.batch * sizes.tokens) * (own + written)


WORKLOAD = Workload(small, bit_for_bit, recorded, sized, truth, public, moved)
