"""``profiles.prologue_cost``: what it times is checked first, on the software GPU."""

from __future__ import annotations

import pytest

from profiles import prologue_cost
from snapmla.testing.workloads import dsa_prologue
from snapmla.testing.workloads.call import Sizes
from tests.support.needs import needs_compiler

pytestmark = [needs_compiler, pytest.mark.whole_matrix]


def given(fmt: str) -> prologue_cost.Given:
    return dsa_prologue.sized(prologue_cost.spec_of(fmt), Sizes(1, 2), "cpu", 0)


@pytest.mark.parametrize("fmt", prologue_cost.FORMATS)
def test_all_are_checked(fmt: str) -> None:
    """Ours has the bits of the truth, and so have both appends."""
    told = prologue_cost.check(fmt, given(fmt))
    ours = prologue_cost.OURS, prologue_cost.NO_ROPE, prologue_cost.APPENDS
    assert {told[name] for name in ours} == {"none"} and prologue_cost.STEPS in told


def test_what_is_not_written_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {prologue_cost.OURS: lambda: None}
    monkeypatch.setattr(prologue_cost, "contenders", lambda *_: nothing)
    with pytest.raises(ValueError, match="2 tokens: bytes differ"):
        prologue_cost.check("fp8", given("fp8"))
