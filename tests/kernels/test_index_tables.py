"""``index_rows`` and ``fetch_index_k`` on the software GPU, bit for bit, with the hazard check."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsl_kernels import registry
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import index_reference as reference
from snapmla.testing import index_tables, selfcheck
from snapmla.testing.workloads import fetch_index_k, index_rows
from snapmla.testing.workloads.call import Call
from softgpu import mutate, using
from tests.support.needs import needs_compiler

EVERYDAY = ("index_rows", "fetch_index_k_xfp8_ragged")
OTHERS = (
    "fetch_index_k_xbf16_indices_ii64",
    "fetch_index_k_xfp8_indices", "fetch_index_k_xfp8_indices_ii64", "fetch_index_k_xbf16_ragged",
    "fetch_index_k_xf16_indices", "fetch_index_k_xf32_ragged", "fetch_index_k_xf32_indices",
)  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    "name", [*EVERYDAY, *(pytest.param(x, marks=pytest.mark.whole_matrix) for x in OTHERS)]
)
def test_clean_and_right(name: str) -> None:
    spec = VariantSpec.from_name(f"{name}_sm90a")
    workload = selfcheck.Workload(spec, variants.find_or_build(spec, need_library=False).directory)
    with using(mutate.schedule(0)):
        result = workload.run()
    assert result.passed, result.summary


def test_what_cannot_be_built_says_why() -> None:
    axes = {"key_dtype": "fp8", "mode": "ragged", "index_dtype": "i64"}
    assert registry.feasible(VariantSpec(op="fetch_index_k", **axes)) == (
        "mode ragged reads no indices"
    )


def judged(calls: list[Call], name: str, change: str) -> bool:
    """True if a judge takes the truth with one entry of a result changed."""
    spec = VariantSpec.from_name(f"{name}_sm90a")
    for call in calls:
        for result, want in call.want.items():
            call.arguments[result].copy_(want)
    judge = fetch_index_k.WORKLOAD.judge if "fetch" in name else index_rows.WORKLOAD.judge
    assert judge(spec, calls).passed
    value: Tensor = calls[1].arguments[change]
    value[int(value.nonzero()[0])] = 0
    return judge(spec, calls).passed


def test_a_wrong_entry_is_noticed() -> None:
    rows = list(index_rows.WORKLOAD.small(VariantSpec.from_name("index_rows_sm90a")))
    assert not judged(rows, "index_rows", "lengths")
    name = "fetch_index_k_xfp8_indices"
    keys = list(fetch_index_k.WORKLOAD.small(VariantSpec.from_name(f"{name}_sm90a")))
    assert not judged(keys, name, "scales")


def test_rows_by_hand() -> None:
    """Three query tokens of five tokens, none of a sequence of none, two of more than there are."""
    lengths = torch.tensor([5, 0, 900]).int()
    begins, table = torch.tensor([0, 3, 3, 5]).int(), torch.arange(6).int().view(3, 2)
    seen, tables = index_tables.rows_tables(lengths, begins, table, 128, 6)
    assert seen.tolist() == [3, 4, 5, 127, 128, 0]
    assert tables.tolist() == [[0, 1]] * 3 + [[4, 5]] * 3


def test_keys_by_hand() -> None:
    """Tokens 63 and 64 of a sequence, and one behind its table."""
    cache = torch.zeros(3, 8448, dtype=torch.uint8)
    keys, scales = reference.pages_of(cache)
    keys.view(torch.uint8)[2, 63], scales[2, 63] = 0x38, 2.0
    keys.view(torch.uint8)[1, 0], scales[1, 0] = 0x40, 3.0
    reference.fill_pages(cache, keys, scales)
    table = torch.tensor([[2, 1]]).int()
    begins, starts = torch.tensor([0, 2, 2])[:2].int(), torch.tensor([63]).int()
    slots = index_tables.packed_slots(table, begins, starts, 3, 3)
    assert slots.tolist() == [2 * 64 + 63, 64, index_tables.UNTOUCHED]
    found, factors = index_tables.keys_at(cache, slots[:2])
    assert found.float()[:, 5].tolist() == [1.0, 2.0] and factors.tolist() == [2.0, 3.0]
    assert index_tables.dequantised(found, factors, torch.float32)[:, 0].tolist() == [2.0, 6.0]
