"""``profiles.engine.v4``: a step of vLLM's V4 layers by their own text, and what is told of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from profiles.engine import v4
from profiles.engine.v4 import Shape, Step
from profiles.tables import sparse_v4_cost
from profiles.tables.sparse_cost import filled, stored
from snapmla.integrations.vllm import flashmla
from tests.support import fetch_vllm
from tests.support import flashmla_calls as calls
from tests.support.needs import needs_compiler

FILE = "vllm/models/deepseek_v4/nvidia/flashmla.py"


class TheirMeta:
    """vLLM's dataclass: what its own kernel fills."""


def decodes(**told: Any) -> SimpleNamespace:
    """Metadata of a step without prompts."""
    return SimpleNamespace(num_prefills=0, **told)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step imports of vLLM: the layer's class by its own text, the rest as values."""
    path = fetch_vllm.path_of(fetch_vllm.RELEASES[0])
    if path is None:
        pytest.skip("vLLM is not there: python -m tests.support.fetch_vllm")
    context: list[Any] = []

    @contextlib.contextmanager
    def overriding(given: Any) -> Iterator[None]:
        context.append(given)
        yield
        context.pop()

    layer = ModuleType(v4.MODULE)
    vars(layer).update(torch=torch, cast=cast, get_forward_context=lambda: context[-1])
    names = ("forward_mqa", "_forward_decode")
    found = calls.methods(path[0] / FILE, "DeepseekV4FlashMLAAttention", names, {})
    own = {
        name: FunctionType(function.__code__, vars(layer), name, function.__defaults__)
        for name, function in found.items()
    }
    kind = type("DeepseekV4FlashMLAAttention", (torch.nn.Module,), own)
    vars(layer).update(
        DeepseekV4FlashMLAAttention=kind, DeepseekV4FlashMLAMetadata=SimpleNamespace,
        flash_mla_with_kvcache=None,
    )  # fmt: skip
    contents: dict[str, dict[str, Any]] = {
        "vllm": {}, "vllm.forward_context": {"override_forward_context": overriding},
        "vllm.models.deepseek_v4.sparse_mla": {"DeepseekV4FlashMLAMetadata": SimpleNamespace},
        "vllm.v1.attention.backends.mla.sparse_swa": {"DeepseekSparseSWAMetadata": decodes},
        "vllm.v1.attention.ops.flashmla": {"get_mla_metadata": lambda: (TheirMeta(), None)},
    }  # fmt: skip
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, v4.MODULE, layer)
    monkeypatch.setattr(sparse_v4_cost, "TOKENS", 256)  # as many as the caches below
    monkeypatch.setattr(sparse_v4_cost, "WINDOW", 64)
    monkeypatch.setattr(v4, "LAYERS", 2)


def theirs(*given: Any, **named: Any) -> Any:
    raise AssertionError("vLLM's kernel was called")


@needs_compiler
@pytest.mark.whole_matrix
@pytest.mark.parametrize(("more", "ratio"), [(64, 128), (0, 1)])
def test_a_step(more: int, ratio: int, vllm: None) -> None:
    torch.manual_seed(0)
    device = torch.device("cpu")
    caches = [filled("fp8_v4", 256, device, 64, mean=0.0) for _ in range(2)]
    shape = Shape(2, 16, more, ratio)
    q = torch.randn(shape.tokens, shape.heads, 512).bfloat16()
    step, name = Step(shape, caches, q, shape.heads), flashmla._Decode(theirs)
    step.run(name)
    assert name.calls == v4.LAYERS
    lists = step.sets[(v4.LAYERS - 1) % len(step.sets)]
    for t in range(shape.tokens):
        kv = stored(caches[0], lists.first[t, 0].long())
        if lists.second is not None:
            kv = torch.cat((kv, stored(caches[1], lists.second[t, 0].long())))
        want = (q[t].double() @ kv.T * sparse_v4_cost.SCALE).softmax(-1) @ kv
        assert (step.out[t].double() - want).norm() <= sparse_v4_cost.COST.gate * want.norm()


def row(label: str, kernels: float, replays: float = 10.0) -> dict[str, Any]:
    return {
        "shape": label, "table": {"FlashMLA": 15.0, "snapmla": 10.0},
        "us": {"FlashMLA": 13.0, "snapmla, 16 heads": replays, "snapmla, 64 heads": 12.0},
        "kernels_us": {"FlashMLA": 12.0, "snapmla, 16 heads": kernels, "snapmla, 64 heads": 11.0},
        "difference": {"FlashMLA": 0.0, "snapmla, 16 heads": 2e-3},
    }  # fmt: skip


def test_gates_and_page() -> None:
    kept, step = v4.gates({"a": row("a", 8.6)})
    assert kept.verdict == step.verdict == "holds" and "1.40 (0.930)" in kept.figures[0]
    assert v4.gates({"a": row("a", 8.6), "b": row("b", 8.8)})[0].verdict == "FAILS"
    assert v4.gates({"a": row("a", 8.6, 13.3)})[1].verdict == "FAILS"
    assert v4.gates({})[0].verdict == "not measured"
    assert "| a | 1.50 | 1.40 | 0.930 | 1.30 |" in v4.page(["- x"], {"a": row("a", 8.6)})
    assert Shape(*v4.SHAPES[3]).label == "128 tokens, 16 heads, 128 + 512, every 128th"
