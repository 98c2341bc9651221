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
    """RoPE channels of four heads in a sum where there are many: a fourth of the workspace."""
    for shape in mha_bwd_cost.shapes():
        for every in (False, True):
            kinds = mha_bwd_cost.kinds_of(shape, every)
            assert kinds[0][2] == (4 if shape.d_qk == 192 and shape.heads == 128 else 1)
            assert len({label for label, _, _ in kinds}) == len(kinds)


def test_a_gate_is_to_the_faster_peer_of_each_round() -> None:
    """1.03 of peers, 1.4 of the deterministic mode; what is missed by less than 2 % counts."""
    shape = mha_bwd_cost.shapes()[0]
    found = {"ours": [100.0, 100.0], "cuDNN": [102.0, 300.0], "FA4": [300.0, 102.0],
             "FA4 det": [130.0, 130.0]}  # fmt: skip
    said = mha_bwd_cost.verdicts(shape, "ours", found)
    assert said == ("to peers 1.020 (gate 1.03 met), to deterministic 1.300 (gate 1.4 MISSED)")
    assert mha_bwd_cost.verdicts(shape, "ours", {"ours": [1.0]}) == ""


def test_gates_name_the_peers_that_take_the_shape() -> None:
    """FlashAttention-4 has no backward of several query heads a KV head with 192 channels."""
    for shape in mha_bwd_cost.shapes():
        names = mha_bwd_cost.gates_of(shape)["peers"][0]
        assert ("FA4" in names) == (shape.group == 1)
        assert ("cuDNN" in names) == (shape.d_qk == 192)
