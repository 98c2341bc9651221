"""The comparison of sparse prefill from the FP8 cache; its times need a GPU."""

from __future__ import annotations

import pytest
import torch

from profiles import table
from profiles.tables.sparse_prefill_cache_cost import FromFP8
from profiles.tables.sparse_prefill_cost import Problem, Shape
from tests.support.needs import needs_kernels


def test_a_gate_missed_by_less_than_a_fiftieth() -> None:
    for ratio, verdict in ((1.09, "met"), (1.07, "missed")):
        row = {"rounds": {"FlashMLA": [ratio] * 3, "fp8": [1.0] * 3}, "gate": 1.1}
        assert table.met("FlashMLA", "fp8")[1](row) == f"1.1 {verdict}"


@pytest.mark.whole_matrix
@needs_kernels
def test_wrong_results_are_refused() -> None:
    """The library's call on the software GPU is right, with what short lists have; a wrong row, or
    LSE, is refused."""
    torch.manual_seed(0)
    made = FromFP8.of(Problem.draw(Shape(2, 128, 5, 30, 1.0), torch.device("cpu")))
    out, most, lse = made.ours()
    assert 1e-3 < made.error((out, most, lse), 3e-2) < 3e-2
    for wrong in ((out * 1.05, most, lse), (out, most, lse + 1e-2)):
        with pytest.raises(ValueError, match="token 0"):
            made.error(wrong, 3e-2)
