"""transformers' models on a real GPU: decode steps as CUDA graphs, prompts by our kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("transformers")

from transformers import AttentionInterface  # noqa: E402

from snapmla.integrations.transformers import (  # noqa: E402
    DecodeGraph,
    SnapMLACache,
    patch,
    unpatch,
)
from snapmla.integrations.transformers.attention import attention  # noqa: E402
from snapmla.integrations.transformers.patching import NAME  # noqa: E402
from tests.support import transformers_driver as driver  # noqa: E402

KINDS = {
    "v3": ("DeepseekV3", {**driver.DENSE, "q_lora_rank": None, "first_k_dense_replace": 2}),
    "v32": ("DeepseekV32", {**driver.DENSE, **driver.INDEXER, "index_topk": 12,
                            "first_k_dense_replace": 2}),
}  # fmt: skip
PADS, NEW = (0, 7), 6


def on_gpu(kind: str, **more: Any) -> Any:
    """A model whose MLPs may be captured, on the GPU."""
    if kind == "v32" and driver.RELEASE < (5, 18):
        pytest.skip("transformers below 5.18 caches expanded K and V there")
    name, settings = KINDS[kind]
    return driver.model_of(name, **{**settings, **more}).cuda()


def prompt() -> dict[str, torch.Tensor]:
    return {name: value.cuda() for name, value in driver.inputs(PADS).items()}


@torch.no_grad()
def after_prompt(model: Any, **settings: Any) -> tuple[SnapMLACache, torch.Tensor]:
    """A cache with the prompts, and the logits of their last tokens."""
    given = prompt()
    cache = SnapMLACache(model.config, len(PADS), driver.ROOM, **settings)
    places = (given["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    logits = model(**given, position_ids=places, **{driver.CACHE: cache}).logits
    return cache, logits[:, -1:]


@torch.no_grad()
def steps(model: Any, cache: SnapMLACache, ids: torch.Tensor) -> torch.Tensor:
    """Logits of eager steps over given tokens (b, n)."""
    found = []
    for i in range(ids.shape[1]):
        places = cache.lengths[:, None].long()
        mask = torch.ones(len(PADS), cache.get_seq_length() + 1, device="cuda").long()
        more = {"position_ids": places, "attention_mask": mask, driver.CACHE: cache}
        found.append(model(ids[:, i : i + 1], **more).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_replays_what_steps_compute(kind: str) -> None:
    """One capture serves all steps; prompts of another cache content, too."""
    model = patch(on_gpu(kind))
    ids = torch.randint(1, 256, (len(PADS), NEW), device="cuda")
    cache, _ = after_prompt(model)
    want = steps(model, cache, ids)
    cache, _ = after_prompt(model)
    step = DecodeGraph(model, cache)
    assert cache.get_seq_length() == driver.PROMPT, "the capture leaves no token behind"
    assert cache.lengths.tolist() == [driver.PROMPT - n for n in PADS]
    got = torch.cat([step(ids[:, i : i + 1]).clone() for i in range(NEW)], 1)
    error = float((got.float() - want.float()).norm() / want.float().norm())
    assert error < 1e-2 and cache.get_seq_length() == driver.PROMPT + NEW
    cache.crop(-NEW)
    again = torch.cat([step(ids[:, i : i + 1]).clone() for i in range(NEW)], 1)
    assert torch.equal(again, got), "the same tokens in the same places"


def test_a_graph_has_room_for_so_many() -> None:
    model = patch(on_gpu("v3"))
    cache, _ = after_prompt(model)
    step = DecodeGraph(model, cache)
    ids = torch.ones(len(PADS), 1, dtype=torch.int64, device="cuda")
    for _ in range(driver.ROOM - driver.PROMPT):
        step(ids)
    with pytest.raises(ValueError, match="at most 64 positions"):
        step(ids)
    assert int(cache.pool.position) == driver.ROOM


@pytest.mark.parametrize("prefill", ["torch", "kernels"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_prompts_and_steps(kind: str, prefill: str) -> None:
    """By the indices that layers were given, beside fp32; decode's error is the predicted one."""
    model = patch(on_gpu(kind))
    watch = driver.Watch()
    cache, _ = after_prompt(model, prefill=prefill)
    steps(model, cache, torch.randint(1, 256, (len(PADS), 2), device="cuda"))
    watch.check(f"{kind}, prompts by {prefill}")
    AttentionInterface.register(NAME, attention)


def test_generate_against_eager() -> None:
    """Equal tokens; the first that differs, if any, was within the FP8 cache's error for eager."""
    model, given = on_gpu("v3"), prompt()
    more = {"output_logits": True, "return_dict_in_generate": True}
    eager = driver.generate(unpatch(model), given, **more)
    patch(model)
    cache = SnapMLACache(model.config, len(PADS), driver.ROOM)
    ours = driver.generate(model, given, **{driver.CACHE: cache}, **more)
    prompted = ours.sequences.shape[1] - len(ours.logits)
    assert torch.equal(ours.sequences[:, : prompted + 1], eager.sequences[:, : prompted + 1])
    for i, differs in enumerate(ours.sequences != eager.sequences):
        if not differs.any():
            continue
        at = int(differs.nonzero()[0])
        logits = eager.logits[at - prompted][i].float()
        lost = logits.max() - logits[ours.sequences[i, at]]
        assert float(lost) < 0.1 * float(logits.std()), (i, at, float(lost), float(logits.std()))
