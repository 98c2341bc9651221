"""``snapmla.call``: what a known call has in common with the one that was checked."""

from __future__ import annotations

import pytest
import torch

import snapmla
from tests.support.needs import needs_compiler

pytestmark = needs_compiler


def test_other_strides_are_another_kind() -> None:
    """The same addresses, shapes and dtypes."""
    memory = torch.zeros(2 * 513 * 3)
    right, other = memory[: 2 * 512].view(1, 2, 512), torch.zeros(1, 2, 512)
    odd = memory.as_strided(right.shape, (2 * 513, 513, 1))
    lses = torch.zeros(2, 2, 1).unbind()
    for _ in range(2):
        snapmla.merge_states([right, other], list(lses))
    with pytest.raises(ValueError, match=r"^outs\[0\]: expected outer strides that are multiples"):
        snapmla.merge_states([odd, other], list(lses))
