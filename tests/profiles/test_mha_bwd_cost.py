"""The cost script of dense prefill's backward: what needs no card."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from profiles import mha_bwd_cost
from profiles.tables import mha_cost


class Graph:
    """Stands for a graph, which knows addresses alone."""

    def replay(self) -> None:
        """Does nothing."""


def test_a_replay_holds_the_tensors_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else what it writes to is the driver's by then: an illegal access on a card."""
    monkeypatch.setattr(mha_cost, "graph_of", lambda _call, _calls: Graph())

    def made() -> tuple[Any, Any]:
        parts = torch.zeros(3)
        return mha_bwd_cost.Replay(parts.sum), weakref.ref(parts)

    replay, alive = made()
    gc.collect()
    replay()
    assert alive() is not None
    del replay
    gc.collect()
    assert alive() is None


def test_shapes_have_kinds() -> None:
    """Workspace of the first one: RoPE channels of four heads in a sum, 64 bytes a head."""
    for shape in mha_bwd_cost.shapes():
        kinds = mha_bwd_cost.kinds_of(shape)
        assert kinds[0][2] == (4 if shape.d_qk == 192 else 1)
        assert len({label for label, _, _ in kinds}) == len(kinds)
