"""profiles.engine.why without vLLM: hashes, rows of requests, what is told of a difference."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from profiles.engine import why


def test_a_hash_is_of_all_bits_of_a_row() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 64).bfloat16()
    found = why.Hash()(x)
    assert found.shape == (5,) and torch.equal(why.Hash()(x[2:4]), found[2:4])
    for row, at in ((0, (0, 0)), (4, (2, 63))):
        other = x.clone()
        other[row][at] = -other[row][at]
        unlike = (why.Hash()(other) != found).nonzero().flatten().tolist()
        assert unlike == [row]
    assert not torch.equal(why.Hash()(x.flip(1)), found), "by place"
    zero = torch.zeros(1, 4)
    assert not torch.equal(why.Hash()(zero), why.Hash()(-zero)), "bits, not values"
    wide = torch.randn(2, why.BLOCK + 5)
    padded = torch.nn.functional.pad(wide, (0, 3 * why.BLOCK))
    assert torch.equal(why.Hash()(wide), why.Hash()(padded)), "zeros behind"
    for dtype in (torch.float8_e4m3fn, torch.int32, torch.int64):
        assert why.Hash()(wide.to(dtype)).unique().numel() == 2


def test_rows_of_a_request_are_found_by_position() -> None:
    """In one step, and in chunks beside others."""
    torch.manual_seed(0)
    rows = torch.randn(10, 8)
    steps: list[tuple[int, int, int, int]] = []
    trace = why.Trace(lambda: steps)
    with trace.of(0):
        steps[:] = [(0, 0, 10, 0)]
        trace.note(3, "x", rows)
        alone = trace.taken(0)
    other = torch.randn(4, 8)
    with trace.of(5, 7):
        steps[:] = [(7, 0, 4, 0), (5, 4, 6, 0)]
        trace.note(3, "x", torch.cat((other, rows[:6])))
        steps[:] = [(5, 0, 4, 6), (1, 4, 4, 0)]
        trace.note(3, "x", torch.cat((rows[6:8], other)), 0)
        trace.note(3, "y", rows[6:10], 0)
        steps[:] = [(1, 0, 3, 0), (5, 3, 2, 8)]
        trace.note(3, "x", rows[8:10], 3)  # as of a call that has the rows from 3 on
        assert [begin for begin, _ in trace.found[5][3, "x"]] == [0, 6, 8]
        batch = trace.taken(5)
    assert batch[3, "x"][:8].tolist() == alone[3, "x"][:8].tolist()
    trace.note(3, "x", rows)
    assert set(trace.found) == {5, 7}, "nothing is noted outside"


def test_the_first_difference() -> None:
    order = {(0, "in"): 0, (0, "out"): 1, (1, "in"): 2}
    alone = {key: torch.arange(8) for key in order}

    def told(**changes: list[int]) -> Any:
        batch = {key: value.clone() for key, value in alone.items()}
        for name, places in changes.items():
            batch[int(name[-1]), name[:-1]][places] += 1
        return why.first_difference(alone, batch, order, prompt=5)

    assert told() is None
    first = told(in1=[0, 6], out0=[3, 4])
    assert (first["layer"], first["name"], first["position"]) == (0, "out", 3)
    assert first["in_prompt"] and first["tokens"] == 2 and first["tensors"] == 2
    first = told(in0=[7], in1=[6])  # of new tokens the earlier one, whatever its layer
    assert (first["layer"], first["position"], first["in_prompt"]) == (1, 6, False)
    assert "`in` of layer 1, in its new tokens, from position 6, 1 of 8" in why.said(first)
    with pytest.raises(ValueError, match="not in both"):
        why.first_difference(alone, {}, order, 5)
    with pytest.raises(ValueError, match="other numbers"):
        why.first_difference(alone, alone | {(0, "in"): torch.arange(7)}, order, 5)


@pytest.mark.parametrize("ragged", [False, True])
def test_how_many_tokens_a_query_token_sees(ragged: bool) -> None:
    lengths, counts = [9, 3, 20], [2, 3, 4] if ragged else [2, 2, 2]
    begins = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    found = why.tokens_seen(
        torch.tensor(lengths, dtype=torch.int32), begins if ragged else None, sum(counts)
    )
    wanted = [
        length - n + 1 + j for length, n in zip(lengths, counts, strict=True) for j in range(n)
    ]
    assert found.tolist() == wanted


class Chosen:
    """In the place of the plugin's, which is called with vLLM's arguments."""

    names = ("k_cache_prefix", "q_quant", "weights", "k", "topk_indices_buffer", "topk_tokens")

    def __init__(self, module: types.ModuleType, begins: torch.Tensor) -> None:
        self.module, self.begins = module, begins

    def __call__(self, *given: Any, **named: Any) -> Any:
        told = dict(zip(self.names, given), **named)
        q, out = told["q_quant"][1:], told["topk_indices_buffer"]
        lengths = self.begins.diff().int() + 2
        pages, table = torch.zeros(1, 64, 132), torch.zeros(2, 1, dtype=torch.int32)
        self.module.index_topk(
            q, told["weights"][1:], pages, table, lengths, 2, cu_seqlens_q=self.begins,
            max_tokens=50, slots=False, out=out,
        )  # fmt: skip
        return out


def test_scores_behind_what_is_seen_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a call that begins within the step; columns behind a row's length hold anything."""
    begins = torch.tensor([0, 3, 5], dtype=torch.int32)
    module: Any = types.ModuleType("indexer")
    module._Chosen, module._resolve_layer_name = Chosen, lambda name: name
    module.index_topk = lambda *_, out, **__: out.fill_(4)
    seen = why.tokens_seen(begins.diff().int() + 2, begins, 5)

    def scores(*_: Any, max_tokens: int, **__: Any) -> torch.Tensor:
        values = torch.arange(5.0)[:, None] * 100 + torch.arange(max_tokens)
        return torch.where(torch.arange(max_tokens) < seen[:, None], values, torch.rand(()))

    monkeypatch.setattr(why, "index_logits", scores)
    trace = why.Trace(lambda: [(9, 0, 1, 30), (0, 1, 3, 2), (2, 4, 2, 2)])
    told = ["model.layers.2.self_attn.indexer.k_cache", torch.randn(6, 4, 128), torch.randn(6, 4),
            torch.randn(6, 128), torch.zeros(6, 3, dtype=torch.int32), 2]  # fmt: skip
    taken = []
    for _ in range(2):
        first, second = why.Indexer(trace, module).patches()
        with trace.of(0, 2), first, second:
            Chosen(module, begins)(*told)
            taken.append((trace.taken(0), trace.taken(2)))
    for one, two in zip(*taken, strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)
    kept = scores(max_tokens=50) * (torch.arange(50) < seen[:, None])
    for found, rows in zip(taken[0], (slice(0, 3), slice(3, 5)), strict=True):
        assert torch.equal(found[2, "index scores"], why.Hash()(kept[rows]))
    assert len(taken[0][1][2, "choices"]) == 2
    assert {name for _, name in taken[0][0]} == {
        "index scores", "choices", "indexer takes q_quant", "indexer takes weights",
        "indexer takes k",
    }  # fmt: skip
    assert Chosen.__call__.__name__ == "__call__", "put back"


def test_modules_are_noted_by_layer_and_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class MLAAttention(nn.Module):
        def forward(self, q: Any, kv_c: Any, k_pe: Any, output_shape: Any = None) -> Any:
            return q + kv_c + k_pe

    class Norm(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2, x

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_layernorm, self.attn, self.other = Norm(), MLAAttention(), Norm()

        def forward(self, x: Any) -> Any:
            x, _ = self.input_layernorm(x)
            return self.other(self.attn(x, x, x, output_shape=None))[0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.norm = nn.ModuleList((Layer(), Layer())), Norm()

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    name = "vllm.model_executor.layers.attention.mla_attention"
    module: Any = types.ModuleType(name)
    module.MLAAttention = MLAAttention
    monkeypatch.setitem(sys.modules, name, module)
    model, trace = Model(), why.Trace(lambda: [(0, 0, 4, 0)])
    why.hook(trace, model)
    with trace.of(0):
        model(torch.randn(4, 8))
    wanted = ["input_layernorm", "input_layernorm[1]", "attention takes q", "attention takes kv_c",
              "attention takes k_pe", "attention"]  # fmt: skip
    wanted = [(i, each) for i in (0, 1) for each in wanted]
    assert list(trace.order) == [*wanted, (why.LAST, "norm"), (why.LAST, "norm[1]")]


def test_the_page_says_what_differs() -> None:
    first = {"layer": 0, "name": "post_attention_layernorm", "position": 7, "tokens": 3, "of": 127,
             "in_prompt": True, "tensors": 60, "of_tensors": 90}  # fmt: skip
    row = {"request": 20, "tokens": 64, "same": False, "first": first}
    data = {"norm depends on rows": True, "vLLM's norm": [row], "alone": [True] * 32,
            "rows": [row | {"same": True, "first": None}]}  # fmt: skip
    page = why.page(["- here"], data)
    assert "| vLLM's | 20 | 64 | no | `post_attention_layernorm` of layer 0, in its prompt" in page
    assert "| row by row | 20 | 64 | yes | nothing |" in page and "32 of 32" in page
    assert [gate.passed for gate in why.gates(data | {"alone": [True, False]})] == [False]
    assert [gate.passed for gate in why.gates({})] == [None]
