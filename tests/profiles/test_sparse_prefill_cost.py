"""The arithmetic of the sparse prefill table, and its comparison; its times need a GPU."""

from __future__ import annotations

import pytest
import torch

from profiles.tables.sparse_prefill_cost import Problem, Shape
from tests.support.needs import needs_kernels

CPU = torch.device("cpu")


def test_figures_of_a_shape() -> None:
    """Both products; a row of CTAs that is not full takes as long as a full one."""
    shape = Shape(4096, 8192, 128, 2048, 1.0)
    assert shape.flop == 2 * 4096 * 128 * 2048 * (576 + 512)
    assert shape.cycles(4237.0, 132) == pytest.approx(4237 * 1700 / (63 * 32))
    assert Shape(133, 99, 16, 65, 1.0).cycles(10.0, 132) == pytest.approx(17000 / 4)


def test_sequences_of_their_own() -> None:
    problem = Problem.draw(Shape(5, 5 * 64, 16, 20, 1.0, span=64), CPU)
    sequence = torch.arange(5)[:, None]
    assert torch.equal(problem.indices[:, 0] // 64, sequence.expand(-1, 20).int())
    assert all(len(set(row.tolist())) == 20 for row in problem.indices[:, 0])
    assert problem.padded.shape == (5, 64, 576) and not problem.padded[:, 16:].any()


@needs_kernels
def test_wrong_results_are_refused() -> None:
    """The library's call on the software GPU is right; a wrong row, or LSE, is refused."""
    problem = Problem.draw(Shape(2, 50, 8, 30, 1.0), CPU)
    out, most, lse = problem.ours()
    assert 1e-4 < problem.error((out, most, lse)) < 4e-3
    with pytest.raises(ValueError, match="token 0"):
        problem.error((out * 1.05, most, lse))
    with pytest.raises(ValueError, match="token 0"):
        problem.error((out, most, lse + 1e-3))
