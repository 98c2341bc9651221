"""Multi-token prediction in vLLM: how many drafts the target accepts, ours and vLLM's own.

A random model's drafts are wrong whoever computes them, and say nothing.  Here they are right, as
a trained model's: target and draft share embedding and output, the residual branches are small
beside the embedding, and the draft's layer is the target's first, whose attention is the largest
branch.  So the draft sees what the target sees, one token behind.  80 % of its tokens are accepted
then, 54 % with attention left out of the draft, and fewer with that of other tokens
(``tests/profiles/test_engine_mtp.py`` computes it in torch).

Tokens are sampled at temperature 1, where a draft is accepted with the probability that the target
gives it: greedy tokens of such a model soon repeat themselves, and a repeated draft is no sample.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codegen.artifacts import write_atomic
from profiles.engine import spec
from profiles.engine.spec import Case
from profiles.gate import Gate
from profiles.gate import page as gates_page
from profiles.model.model import MlaModel

LAYERS, HEADS = 2, 16
DRAFTS = (1, 3)
BRANCHES = ((0.4, 0.1), (0.05, 0.05))  # of each layer: factors of attention's and MLP's output
SHARP = 12.0  # deviation of logits
REQUESTS, NEW = 32, 512  # about 9000 drafted tokens
LEAST, RIGHT, WITHIN = 2000, 0.5, 0.02  # drafted tokens, vLLM's own rate, ours from it
# Backend of target and draft, and the cache's dtype.
ENGINES = {"flashmla_bf16": ("FLASHMLA", "auto"), "snapmla": ("CUSTOM", "fp8_ds_mla")}
PREFIX = "vllm:spec_decode_num_"
TITLE = "# Multi-token prediction in vLLM"


def model() -> MlaModel:
    """The target, whose branches are small beside its embedding."""
    made = spec.random_model(LAYERS, HEADS)
    generator = torch.Generator().manual_seed(spec.SEED + 1)
    with torch.no_grad():
        embedding = made.get_parameter("model.embed_tokens.weight")
        embedding.copy_(torch.randn(embedding.shape, generator=generator).bfloat16())
        for i, factors in enumerate(BRANCHES):
            for name, factor in zip(("self_attn.o_proj", "mlp.down_proj"), factors, strict=True):
                made.get_parameter(f"model.layers.{i}.{name}.weight").mul_(factor)
    return made


def output() -> Tensor:
    """(vocabulary, hidden) of target and draft."""
    generator = torch.Generator().manual_seed(spec.SEED + 2)
    shape = (spec.VOCABULARY, spec.config(LAYERS, HEADS).hidden_size)
    return (torch.randn(shape, generator=generator) * SHARP * shape[1] ** -0.5).bfloat16()


def weights(made: MlaModel, head: Tensor) -> dict[str, Tensor]:
    """A checkpoint: the target, and as layer ``LAYERS`` the draft, which takes the new token's
    embedding and nothing of the target's last state."""
    found = {name: value.bfloat16().clone() for name, value in made.state_dict().items()}
    width, draft = head.shape[1], f"model.layers.{LAYERS}."
    first = {n: v for n, v in found.items() if n.startswith("model.layers.0.")}
    found |= {
        name.replace("model.layers.0.", draft): value.clone() for name, value in first.items()
    }
    ones = torch.ones(width).bfloat16()
    found |= {f"{draft}{name}.weight": ones.clone() for name in ("enorm", "hnorm")}
    found[f"{draft}eh_proj.weight"] = torch.cat([torch.eye(width), torch.zeros(width, width)], 1)
    found[f"{draft}shared_head.norm.weight"] = ones.clone()
    found[f"{draft}embed_tokens.weight"] = found["model.embed_tokens.weight"].clone()
    for name in (f"{draft}shared_head.head.weight", "lm_head.weight"):
        found[name] = head.clone()
    return {name: value.bfloat16().contiguous() for name, value in found.items()}


def prepare(folder: Path) -> None:
    """The model as a Hugging Face folder."""
    from safetensors.torch import save_file

    made = folder / "mtp"
    if (made / "model.safetensors").exists():
        return
    target = model()
    spec.write_config(made, target.config)
    written = json.loads((made / "config.json").read_text())
    # the draft's layer is dense as the others are
    changed = written | {"num_nextn_predict_layers": 1, "first_k_dense_replace": LAYERS + 1}
    write_atomic(made / "config.json", json.dumps(changed, indent=1))
    save_file(weights(target, output()), str(made / "model.safetensors"), metadata={"format": "pt"})


def cases(folder: Path) -> list[Case]:
    """Both engines, with one draft and with three; ours beside vLLM's own, as nothing is timed."""
    return [
        Case(
            name=f"{engine}-mtp{drafts}", model=str(folder / "mtp"), backend=backend,
            cache_dtype=cache, drafts=drafts, draft_backend=backend, study="mtp", cache_gib=4.0,
            lane=engine,
        )
        for drafts in DRAFTS
        for engine, (backend, cache) in ENGINES.items()
    ]  # fmt: skip


def prompts() -> list[list[int]]:
    """Random tokens, 40 to 1900 of them."""
    generator = torch.Generator().manual_seed(spec.SEED)
    lengths = [40 + 60 * i for i in range(REQUESTS)]
    return [torch.randint(2, spec.VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def measure(engine: Any, _: Path) -> dict[str, Any]:
    """Drafts of a case, how many were accepted, and whose attention the layers have."""
    from vllm import SamplingParams, TokensPrompt

    asked = SamplingParams(temperature=1.0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    before = counted(engine.llm)
    given = [TokensPrompt(prompt_token_ids=each) for each in prompts()]
    found = engine.llm.generate(given, asked, use_tqdm=False)
    spent = {name: count - before.get(name, 0) for name, count in counted(engine.llm).items()}
    layers = engine.llm.llm_engine.vllm_config.compilation_config.static_forward_context
    kinds = {name: type(each.impl).__qualname__ for name, each in layers.items()}
    return spent | {
        "tokens": sum(len(each.outputs[0].token_ids) for each in found), "layers": kinds,
    }  # fmt: skip


def counted(llm: Any) -> dict[str, int]:
    """vLLM's counters of drafts: ``drafts``, ``draft_tokens``, ``accepted_tokens``."""
    return {
        each.name.removeprefix(PREFIX): int(each.value)
        for each in llm.get_metrics()
        if each.name.startswith(PREFIX) and hasattr(each, "value")
    }


def rate(row: Mapping[str, Any]) -> float:
    """Accepted part of the drafted tokens."""
    return float(row["accepted_tokens"] / row["draft_tokens"])


def gates(results: Mapping[str, Mapping[str, Any]]) -> list[Gate]:
    """The acceptance, of each number of drafts."""
    found = []
    for drafts in DRAFTS:
        claim = (
            f"{drafts} drafted: vLLM's own accepts >= {RIGHT}, ours is within {WITHIN} of it, each "
            f"over >= {LEAST} drafted tokens, and the draft's layer is ours"
        )
        rows = [results.get(f"{engine}-mtp{drafts}") for engine in ENGINES]
        name = f"{drafts} drafted"
        if None in rows:
            found.append(Gate(name, claim, None))
            continue
        theirs, ours = (row for row in rows if row is not None)
        passed = (
            rate(theirs) >= RIGHT
            and abs(rate(ours) - rate(theirs)) <= WITHIN
            and min(row["draft_tokens"] for row in (theirs, ours)) >= LEAST
            and len(ours["layers"]) == LAYERS + 1
            and all(kind.startswith("SnapMLA") for kind in ours["layers"].values())
            and not any(kind.startswith("SnapMLA") for kind in theirs["layers"].values())
        )
        shown = f"vLLM's {rate(theirs):.4f} of {theirs['draft_tokens']}, "
        shown += f"ours {rate(ours):.4f} of {ours['draft_tokens']}"
        found.append(Gate(name, claim, passed, (shown,)))
    return found


def page(header: Sequence[str], results: Mapping[str, Mapping[str, Any]]) -> str:
    """What was found, as Markdown."""
    judged = gates_page(gates(results)).rstrip()
    lines = [TITLE, "", *header, "", judged, ""]
    lines += ["| engine | cache | drafts | drafted tokens | accepted | part | attention |",
              "|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, row in results.items():
        kinds = ", ".join(dict.fromkeys(row["layers"].values()))
        lines.append(
            f"| {name} | {row['cache_dtype']} | {row['drafts']} | {row['draft_tokens']} | "
            f"{row['accepted_tokens']} | {rate(row):.4f} | {kinds} |"
        )
    return "\n".join(lines) + "\n"
