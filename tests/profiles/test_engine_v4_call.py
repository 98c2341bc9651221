"""``profiles.engine.v4_call``: both names are called as its ways say, and what is told of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from profiles.engine import v4_call
from profiles.engine.v4 import Shape
from profiles.engine.v4_call import ALL, WAYS, Way
from profiles.tables import sparse_v4_cost
from profiles.tables.sparse_cost import filled, stored
from tests.support.needs import needs_compiler

SHAPE = Shape(2, 16, 64, 128)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> v4_call.Drawn:
    monkeypatch.setattr(sparse_v4_cost, "TOKENS", 256)  # as many as the caches below
    monkeypatch.setattr(sparse_v4_cost, "WINDOW", 64)
    device = torch.device("cpu")
    caches = [filled("fp8_v4", 256, device, 64, mean=0.0) for _ in range(2)]
    return v4_call.draw(SHAPE, caches, SHAPE.heads)


def told(way: Way, drawn: v4_call.Drawn, ours: bool) -> list[dict[str, Any]]:
    """Arguments of each call of a graph by name."""
    found: list[dict[str, Any]] = []

    def name(*given: Any, **named: Any) -> None:
        found.append({"schedule": given[5], **named})

    v4_call.calls_of(way, drawn, name, object, ours)()
    return found


def test_each_way_differs_by_one_thing(drawn: v4_call.Drawn) -> None:
    table = told(Way(calls=2), drawn, True)
    assert {call["schedule"] for call in table} == {table[0]["schedule"]} and len(table) == 3
    assert "attn_sink" not in table[0] and table[0]["topk_length"] is None
    assert table[0]["lse"] is table[1]["lse"] and table[0]["out"] is table[1]["out"]
    assert "lse" not in told(Way(calls=2), drawn, False)[0]  # FlashMLA's has none
    full = told(Way(lengths="full", calls=1), drawn, True)[-1]
    assert full["topk_length"].tolist() == full["extra_topk_length"].tolist() == [64, 64]
    some = told(Way(lengths="drawn", calls=1), drawn, True)[-1]["extra_topk_length"]
    assert int(some.min()) >= 0 and int(some.max()) <= 64
    assert (
        told(Way(sinks=True, calls=1), drawn, True)[-1]["attn_sink"].tolist() == [-torch.inf] * 16
    )
    own = told(Way(own_results=True, calls=2), drawn, True)[1:]
    assert own[0]["out"] is not own[1]["out"]
    assert "lse" not in told(Way(own_lse=True, calls=1), drawn, True)[-1]
    inside = told(Way(inside=True, calls=2), drawn, True)  # and none before the graph
    assert len(inside) == 2 and inside[0]["schedule"] is inside[1]["schedule"]
    assert told(ALL._replace(calls=1), drawn, True)[0].keys() == (
        full | {"attn_sink": 0}
    ).keys() - {"lse"}
    different = [way for way in WAYS.values() if way != Way()]
    assert len(set(WAYS.values())) == len(WAYS) == len(different) + 1


@needs_compiler
@pytest.mark.whole_matrix
def test_uncut_lists_have_the_same_results(
    drawn: v4_call.Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, found = Way(lengths="drawn", calls=1), []
    run = v4_call.sparse_decode

    def kept(*given: Any, **named: Any) -> Any:
        assert named["plan"].merges == 0
        found.append(run(*given, **named))
        return found[-1]

    # the software GPU has no times by which the host knows that full lists stay whole
    monkeypatch.setattr("snapmla.dense.plan_decode.dispatch.tile_times", lambda *_: (1000, 10))
    monkeypatch.setattr(v4_call, "sparse_decode", kept)
    v4_call.uncut(way, drawn)()
    (out, _), lists = found[0], drawn.sets[0]
    lengths = drawn.lengths["drawn"][1]
    assert lists.second is not None and lengths is not None
    for t in range(SHAPE.tokens):
        entries = lists.second[t, 0, : int(lengths[t])].long()
        kv = torch.cat((stored(drawn.caches[0], lists.first[t, 0].long()),
                        stored(drawn.caches[1], entries)))  # fmt: skip
        weights = (drawn.q[t, 0].double() @ kv.T * sparse_v4_cost.SCALE).softmax(-1)
        want = weights @ kv
        assert (out[t, 0].double() - want).norm() <= sparse_v4_cost.COST.gate * want.norm()


def test_the_page() -> None:
    ways = {
        v4_call.TABLE: {"FlashMLA": 15.0, "snapmla": 10.0},
        "lengths": {"FlashMLA": 15.0, "snapmla": 12.0, "snapmla, uncut": 10.0},
    }
    page = v4_call.page(["- x"], {"a": ways})
    assert "| the table's call | 15.0 | 10.0 | 1.500 | 1.000 | – | – |" in page
    assert "| lengths | 15.0 | 12.0 | 1.250 | 0.833 | 10.0 | 1.500 |" in page
    assert v4_call.gates({"a": ways}) == []
