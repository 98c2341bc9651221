"""``snapmla.integrations.vllm.indexer`` over stand-ins for vLLM's modules: whose indexer is ours,
what a step's metadata becomes, and the choice of several ranks.

vLLM's own classes drive it in ``tests/host/test_vllm.py``, where they are there.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from snapmla.integrations import vllm as plugin
from tests.support.needs import needs_compiler

NAME = "sparse_attn_indexer"
LAYER = "vllm.models.deepseek_v32.attention"
K = 8


def vllms(hidden_states: Any, k_cache_prefix: str, kv_cache: Any = None, **named: Any) -> str:
    """vLLM's function, as far as it is looked at."""
    return f"vLLM's, of {k_cache_prefix}"


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our module over the names of vLLM that it imports; its library of operators is a mock."""
    step = types.SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=None)
    layers = types.ModuleType("vllm.model_executor.layers")
    layers.sparse_attn_indexer = types.ModuleType(f"{layers.__name__}.{NAME}")  # type: ignore[attr-defined]
    layers.sparse_attn_indexer.sparse_attn_indexer = vllms  # type: ignore[attr-defined]
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"envs": types.SimpleNamespace(VLLM_SPARSE_INDEXER_MAX_LOGITS_MB=1)},
        "vllm.compilation.breakable_cudagraph": {"eager_break_during_capture": lambda f: f},
        "vllm.distributed": {"get_dcp_group": None},
        "vllm.forward_context": {"get_forward_context": lambda: step},
        "vllm.model_executor.layers": vars(layers),
        "vllm.platforms": {"current_platform": types.SimpleNamespace(dispatch_key="CPU")},
        "vllm.utils.torch_utils": {"_resolve_layer_name": lambda name: name},
        LAYER: {NAME: vllms},
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    ours = f"{plugin.__name__}.indexer"
    monkeypatch.delitem(sys.modules, ours, raising=False)
    module = importlib.import_module(ours)
    monkeypatch.setattr(module, "_library", mock.Mock())
    module.step = step  # type: ignore[attr-defined]
    yield module
    sys.modules.pop(ours, None)
    vars(plugin).pop("indexer", None)


def indexer(prefix: str, **change: Any) -> Any:
    """A layer's, as far as it is looked at."""
    known = {
        "n_head": 64, "head_dim": 128, "quant_block_size": 128, "topk_tokens": 2048,
        "k_cache": types.SimpleNamespace(prefix=prefix),
    }  # fmt: skip
    return types.SimpleNamespace(**known | change)


def test_only_our_layers_get_our_choice(choosing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "choose", lambda **given: ("ours", given))
    with pytest.raises(ValueError, match="48 heads"):
        choosing.serve(indexer("layers.0", n_head=48))
    assert sys.modules[LAYER].sparse_attn_indexer is vllms, "nothing was replaced for it"
    choosing.serve(indexer("layers.0"))
    choosing.serve(indexer("layers.2"))
    (told,) = choosing._library.return_value.impl.call_args_list  # once, however many layers
    function = sys.modules[LAYER].sparse_attn_indexer
    assert told.args == (NAME, function, "CPU") and told.kwargs == {"allow_override": True}
    assert choosing.theirs.sparse_attn_indexer is function and function.__name__ == "vllms"
    given = {"hidden_states": "h", "k_cache_prefix": "layers.2", "kv_cache": 3, "more": 4}
    assert function("h", "layers.2", 3, more=4) == ("ours", given)
    assert function("h", "layers.1", 3, more=4) == "vLLM's, of layers.1"


def test_what_is_not_served(choosing: Any) -> None:
    given = {"topk_indices_buffer": None, "q_scale": None, "k_cache_prefix": "a"}
    for change, said in (
        ({"candidate_blocks": 1}, "two levels"), ({"use_fp4_cache": True}, "FP4"),
        ({"q_scale": 1}, "FP4"), ({"use_pcp": True}, "prefill context parallelism"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            choosing.choose(**given | change)


def test_memory_is_profiled(choosing: Any) -> None:
    """Without a step's metadata the buffer is given back, and scores' memory was taken once."""
    choosing.step.attn_metadata = None
    buffer, sizes = torch.zeros(2, K, dtype=torch.int32), []
    make = lambda size, **_: sizes.append(size)
    given = {"topk_indices_buffer": buffer, "q_scale": None, "hidden_states": buffer}
    with mock.patch.object(torch, "empty", make):
        assert choosing.choose(**given) is buffer
    assert sizes == [2**20 * 65 // 64]


def chunk(lengths: list[int], queries: list[int], begin: int = 0, end: int | None = None) -> Any:
    """vLLM's description of prompts, of whose query tokens ``begin`` to ``end`` are in it."""
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    ks = torch.cat([cu[i].repeat(n) for i, n in enumerate(queries)])
    seen = [torch.arange(length - n, length) + 1 for length, n in zip(lengths, queries)]
    ke = ks + torch.cat(seen).int()
    return types.SimpleNamespace(
        cu_seqlen_ks=ks[begin:end], cu_seqlen_ke=ke[begin:end], cu_seq_lens=cu,
        local_cu_seq_lens=cu, num_reqs=len(lengths),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("told", "begins", "lengths"),
    [
        (chunk([10, 4, 9], [3, 4, 1]), [0, 3, 7, 8], [10, 4, 9]),
        (chunk([10], [7], 2, 5), [0, 3], [8]),  # query tokens 2, 3, 4 of 7: the last sees 8
        (chunk([5, 6], [5, 2], 0, 5), [0, 5, 5], [5, 0]),  # none of the second
    ],
)
def test_prompts(choosing: Any, told: Any, begins: list[int], lengths: list[int]) -> None:
    """Ranges over keys side by side become ragged queries over pages."""
    found, seen = choosing._bounds(told)
    assert found.tolist() == begins and seen.tolist() == lengths
    assert found.dtype == seen.dtype == torch.int32
    request = choosing._requests(told)
    want = torch.arange(len(lengths)).repeat_interleave(found.diff())
    assert torch.equal(request, want)


@needs_compiler
@pytest.mark.parametrize("turn", [1, 3])
def test_two_ranks_choose_as_one_would(choosing: Any, turn: int) -> None:
    """Scores with many ties, of which the lowest position wins; fewer tokens than wanted."""
    lengths, width = [40, 5, 0], 40
    scores = torch.randint(-2, 3, (3, width)).float()
    want = torch.full((3, K), -1, dtype=torch.int32)
    ids = torch.arange(width)
    told, ranks = [], []
    for rank in range(2):
        own = ids // turn % 2 == rank
        best, mine = torch.zeros(3, K), torch.full((3, K), -1, dtype=torch.int32)
        for row, length in enumerate(lengths):
            local = scores[row, own & (ids < length)]
            at = local.sort(descending=True, stable=True).indices[:K].sort().values
            best[row, : len(at)], mine[row, : len(at)] = local[at], at.int()
            whole = scores[row, :length].sort(descending=True, stable=True).indices[:K]
            want[row, : len(whole)] = whole.sort().values.int()
        ranks.append((best, mine))
    for rank, (best, mine) in enumerate(ranks):
        note = lambda x: told.append(x.clone()) or torch.cat([x, x], 1)
        choosing.best_of_ranks(best, mine, choosing.Ranks(rank, 2, turn, note))
    for rank, (best, mine) in enumerate(ranks):
        gather = lambda _: torch.cat(told, 1)
        found = choosing.best_of_ranks(best, mine, choosing.Ranks(rank, 2, turn, gather))
        assert torch.equal(found, want), rank
