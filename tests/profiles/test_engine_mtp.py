"""``profiles.engine.mtp``: drafts that are right, what attention is worth to them, its gates."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from profiles.engine import case as engines
from profiles.engine import mtp, spec, study
from profiles.engine.spec import Case
from profiles.model.model import Layer, RmsNorm

TOKENS, SEEN = 500, 150  # of the sequence; before the first that counts


@torch.no_grad()
def accepted(attentions: Sequence[Callable[[Tensor], Tensor]]) -> list[float]:
    """The part of drafts that the target would accept, of random tokens.

    Args:
        attentions: what a draft makes of its attention's output (b, n, d), a function each.
    """
    made, head = mtp.model().float(), mtp.output().float()
    written = {name: value.float() for name, value in mtp.weights(made, head).items()}
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, spec.VOCABULARY, (1, TOKENS), generator=generator)
    positions = torch.arange(TOKENS)
    norm = RmsNorm(made.config.hidden_size, made.config.rms_norm_eps)
    x = made.model.embed_tokens(tokens)
    for each in made.model.layers:
        x, _ = each(x, positions, None, None)
    wanted = (norm(x) @ head.T).softmax(-1)[0, 1:]

    draft, prefix = Layer(made.config), f"model.layers.{mtp.LAYERS}."
    block = {n.removeprefix(prefix): v for n, v in written.items() if n.startswith(prefix)}
    projected, own = block.pop("eh_proj.weight"), block.pop("shared_head.head.weight")
    missing, more = draft.load_state_dict(block, strict=False)
    assert not missing and set(more) == {
        "enorm.weight", "hnorm.weight", "shared_head.norm.weight", "embed_tokens.weight",
    }  # fmt: skip
    new = norm(torch.nn.functional.embedding(tokens[:, 1:], block["embed_tokens.weight"]))
    new[:, 0] = 0  # as vLLM has it at position 0
    both = torch.cat([new, norm(x[:, :-1])], -1)
    found = []
    for attention in attentions:
        hook = draft.self_attn.o_proj.register_forward_hook(
            lambda _module, _given, mixed, attention=attention: attention(mixed)
        )
        y, _ = draft(both @ projected.T, positions[:-1], None, None)
        hook.remove()
        best = (norm(y) @ own.T)[0].argmax(-1, keepdim=True)
        found.append(float(wanted.gather(1, best)[SEEN:].mean()))
    return found


def others(mixed: Tensor) -> Tensor:
    order = torch.randperm(mixed.shape[1], generator=torch.Generator().manual_seed(1))
    return mixed[:, order]


def test_what_attention_is_worth() -> None:
    right, without, wrong = accepted([lambda mixed: mixed, torch.zeros_like, others])
    assert right == pytest.approx(0.80, abs=0.03)
    assert without == pytest.approx(0.54, abs=0.03)
    assert wrong < without


def test_the_folder_and_the_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: dict[str, Tensor] = {}
    library: Any = ModuleType("safetensors.torch")
    library.save_file = lambda tensors, path, metadata: saved.update(tensors)
    monkeypatch.setitem(sys.modules, "safetensors", ModuleType("safetensors"))
    monkeypatch.setitem(sys.modules, "safetensors.torch", library)
    mtp.prepare(tmp_path)
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    shared = [saved[f"model.layers.2.{name}"] for name in ("embed_tokens.weight",
                                                           "shared_head.head.weight")]  # fmt: skip
    assert torch.equal(shared[0], saved["model.embed_tokens.weight"])
    assert torch.equal(shared[1], saved["lm_head.weight"])
    written = json.loads((tmp_path / "mtp" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 1 and written["first_k_dense_replace"] == 3
    assert written["num_hidden_layers"] == mtp.LAYERS
    made = mtp.cases(tmp_path)
    assert [each.name for each in made] == [
        "flashmla_bf16-mtp1", "snapmla-mtp1", "flashmla_bf16-mtp3", "snapmla-mtp3",
    ]  # fmt: skip
    for each in made:
        each.write(tmp_path / "case.json")
        assert Case.read(tmp_path / "case.json") == each and each.graphs
        config = engines.drafting(each)["speculative_config"]
        assert config == {
            "method": "mtp", "num_speculative_tokens": each.drafts,
            "attention_backend": each.backend,
        }  # fmt: skip
    assert len(mtp.prompts()) == mtp.REQUESTS
    assert study.speed(tmp_path, made) == {}


def test_counters_of_vllm() -> None:
    counter = lambda name, value: SimpleNamespace(name=f"vllm:{name}", value=value)
    found = [
        counter("spec_decode_num_drafts", 5), counter("spec_decode_num_draft_tokens", 15),
        counter("spec_decode_num_accepted_tokens", 9), counter("prompt_tokens", 3),
        SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[5, 3, 1]),
    ]  # fmt: skip
    assert mtp.counted(SimpleNamespace(get_metrics=lambda: found)) == {
        "drafts": 5, "draft_tokens": 15, "accepted_tokens": 9,
    }  # fmt: skip


def result(kind: str, accepted: int, drafted: int = 10_000) -> dict[str, Any]:
    layers = {f"model.layers.{i}.self_attn.attn": kind for i in range(mtp.LAYERS + 1)}
    return {"drafts": drafted, "draft_tokens": drafted, "accepted_tokens": accepted,
            "layers": layers, "cache_dtype": "auto"}  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "ours", "verdict"),
    [
        (result("FlashMLAImpl", 8000), result("SnapMLAImpl", 7801), "holds"),
        (result("FlashMLAImpl", 8000), result("SnapMLAImpl", 7799), "FAILS"),
        (result("FlashMLAImpl", 4999), result("SnapMLAImpl", 4999), "FAILS"),  # wrong drafts
        (result("FlashMLAImpl", 8000), result("SnapMLAImpl", 1600, 1999), "FAILS"),
        (result("FlashMLAImpl", 8000), result("FlashMLAImpl", 8000), "FAILS"),
        (result("SnapMLAImpl", 8000), result("SnapMLAImpl", 8000), "FAILS"),
    ],
)
def test_gates(theirs: dict[str, Any], ours: dict[str, Any], verdict: str) -> None:
    found = {"flashmla_bf16-mtp1": theirs, "snapmla-mtp1": ours}
    one, three = mtp.gates(found)
    assert one.verdict == verdict and three.verdict == "not measured"
    ours["layers"] = dict(list(ours["layers"].items())[:2])  # the draft's is another
    assert mtp.gates(found)[0].verdict == "FAILS"
    assert "| snapmla-mtp1 | auto |" in mtp.page(["- x"], found)
