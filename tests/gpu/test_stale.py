"""Plans that are stale on a card: rows are right, NaN, or the call is refused."""

from __future__ import annotations

import pytest

from tests.support.stale_fuzz import KINDS, fuzz

pytestmark = pytest.mark.gpu


def test_fuzz() -> None:
    """2000 steps, half with ``check_stale``, half with a witness."""
    found = fuzz(2000, "cuda")
    assert found.total() == 2000
    for kind in KINDS:  # each outcome was met
        assert all(found[f"{kind}: {outcome}"] for outcome in ("refused", "right", "some void"))
