"""The table of the prologue: all that it times is checked first, on the software GPU."""

from __future__ import annotations

import pytest
import torch

from profiles.tables import prologue_cost
from tests.support.needs import needs_compiler

pytestmark = [needs_compiler, pytest.mark.whole_matrix]


@pytest.fixture(autouse=True)
def one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prologue_cost, "BUFFERS", 1)


@pytest.mark.parametrize("fmt", prologue_cost.FORMATS)
def test_all_are_checked(fmt: str) -> None:
    """Ours has the bits of the truth, and so have both appends."""
    made = prologue_cost.Prologue(torch.device("cpu"), (fmt, 2))
    told = {name: made.check(name, calls) for name, calls in made.contenders().items()}
    ours = prologue_cost.OURS, prologue_cost.NO_ROPE, prologue_cost.APPENDS
    assert {told[name] for name in ours} == {"none"} and prologue_cost.STEPS in told


def test_what_is_not_written_is_noticed() -> None:
    made = prologue_cost.Prologue(torch.device("cpu"), ("fp8", 2))
    with pytest.raises(ValueError, match="bytes differ"):
        made.check(prologue_cost.OURS, [lambda: None])
