"""The arithmetic of the dense prefill table; its times need a GPU."""

from __future__ import annotations

import pytest
import torch

from profiles import table
from profiles.tables import mha_cost
from profiles.tables.mha_cost import Problem, Shape, even
from snapmla.testing.mha_job import mha_reference
from tests.support.needs import needs_kernels


@pytest.mark.parametrize("d_qk", [192, 256])
@pytest.mark.parametrize("causal", [True, False])
def test_flop_are_of_the_pairs_that_are_seen(causal: bool, d_qk: int) -> None:
    lq, lk = (3, 5, 4), (7, 2, 4)
    shape = Shape("x", lq, lk, 4, d_qk, causal, 1.0)
    seen = 0
    for s_q, s_k in zip(lq, lk):
        mask = torch.ones(s_q, s_k)
        seen += int((mask.tril(s_k - s_q) if causal else mask).sum())
    assert shape.pairs == seen and shape.flop == 2 * seen * 4 * {192: 320, 256: 512}[d_qk]


def test_every_gate_has_its_shape() -> None:
    """One row a gate of the table; FA3's ratio within 1 % counts."""
    shapes = {(s.label, s.heads, s.kv_heads, s.d_qk, s.causal) for s in mha_cost.SHAPES}
    assert len(shapes) == len(mha_cost.SHAPES) == 20
    assert even("x", 2, 5, 8, 128, True, 1.0, kv_heads=2).group == 4


def test_cudnn_is_asked_for_what_it_takes() -> None:
    """Not for ragged batches, nor for bottom-right masks."""
    device = torch.device("cpu")
    squares = Problem.draw(even("x", 2, 8, 2, 192, True, 1.0), device)
    assert squares.cudnn() is not None
    for lq, lk, causal, taken in (
        ((3, 4), (3, 4), True, False), ((3,), (9,), True, False), ((3,), (9,), False, True),
    ):  # fmt: skip
        problem = Problem.draw(Shape("x", lq, lk, 2, 192, causal, 1.0), device)
        assert (problem.cudnn() is not None) == taken


@needs_kernels
def test_ours_is_compared_before_it_is_timed() -> None:
    """The library's call on the software GPU beside the reference; a wrong row is refused."""
    problem = Problem.draw(even("x", 1, 6, 1, 192, True, 1.0), torch.device("cpu"))
    problem.ours()()
    inputs = (problem.q, problem.k, problem.v, problem.cu_q, problem.cu_k, 192**-0.5, True)
    want = mha_reference(*inputs)
    assert mha_cost.compare(problem.out, problem.lse, *want) < 4e-3
    problem.out[3] *= 1.05
    with pytest.raises(ValueError, match="ours is not the peer's"):
        mha_cost.compare(problem.out, problem.lse, *want)


def test_figures() -> None:
    row = {"rounds": {"ours": [1.0, 2.0, 3.0, 4.0, 5.0], "peer": [2.0, 3.0, 3.0, 8.0, 5.0]}}
    assert table.spread("ours")[1](row) == "3.0 (1.5–4.5)"
    assert table.speed("peer", "ours")[1](row) == "1.500"
