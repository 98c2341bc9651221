"""A decode step of transformers' DeepSeek-V3 over our cache, beside transformers' own attention.

    python -m profiles.studies.transformers_step --out profiles/results

A random model of V3's sizes with few layers and plain MLPs, so that attention is a share of the
step as it is in the whole model's dense layers.  All contenders have the same latents cached, and
their logits are compared before anything is timed.  ``eager`` and ``sdpa`` keep latents in
bfloat16 and expand K and V of all tokens in every step.  Milliseconds are wall time of a step, the
device waited for at the end of each round.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__" and "cpu" not in sys.argv:
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import transformers
import typer

from codegen.artifacts import write_atomic
from profiles import page, timing
from profiles.machine import machine
from snapmla.integrations.transformers import DecodeGraph, SnapMLACache, patch, unpatch

Tensor = torch.Tensor
LATENT, ROPE, PAGE = 512, 64, 64
LENGTHS, BATCHES = (4096, 8192, 16384, 32768), (1, 8)
PIECE = 4096  # tokens of a sequence that are made and cached at a time
ROUNDS, STEPS = 5, 10
GATE = 0.3  # relative L2 of logits to eager's: an FP8 cache of random latents gives some 0.06 a
# layer (tests hold attention itself to what is predicted); what is misplaced gives 1 or more
COLUMNS = (
    "batch × tokens", "snapmla ms", "snapmla, graph ms", "sdpa ms", "eager ms", "cache",
    "logits' L2 to eager",
)  # fmt: skip


def model_of(layers: int, heads: int, device: str) -> Any:
    """Random, in bfloat16; weights of attention as large as trained ones."""
    hidden = 7168 if device == "cuda" else 256
    config = transformers.DeepseekV3Config(
        vocab_size=4096, hidden_size=hidden, intermediate_size=18432 * hidden // 7168,
        num_hidden_layers=layers, first_k_dense_replace=layers, num_attention_heads=heads,
        num_key_value_heads=heads, q_lora_rank=1536 * hidden // 7168, kv_lora_rank=LATENT,
        qk_nope_head_dim=128, qk_rope_head_dim=ROPE, v_head_dim=128,
        max_position_embeddings=2 * max(LENGTHS), attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.DeepseekV3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return model.eval()


def pieces(batch: int, tokens: int, layer: int, device: str) -> Any:
    """Latents and RoPE parts of a layer's tokens, the same for every contender."""
    for first in range(0, tokens, PIECE):
        n = min(PIECE, tokens - first)
        generator = torch.Generator(device).manual_seed(layer * 100_000 + first)
        both = torch.randn(batch, 1, n, LATENT + ROPE, generator=generator, device=device)
        yield both.bfloat16().split([LATENT, ROPE], -1)


def fill_ours(cache: SnapMLACache, batch: int, tokens: int, device: str) -> None:
    made = [list(pieces(batch, tokens, i, device)) for i in range(len(cache.layers))]
    for at in range(len(made[0])):
        cache.pool.begin(made[0][at][0].shape[2], None)
        for layer, parts in zip(cache.layers, made):
            layer.update(*parts[at])
        cache.pool.end()


def fill_theirs(config: Any, batch: int, tokens: int, device: str) -> Any:
    cache = transformers.DynamicCache(config=config)
    for i in range(config.num_hidden_layers):
        latent, rope = (torch.cat(parts, 2) for parts in zip(*pieces(batch, tokens, i, device)))
        cache.update(latent, rope, i)
    return cache


def per_step(step: Callable[[], Any], device: str) -> float:
    """Median over rounds of a step's milliseconds."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    rounds, steps = (ROUNDS, STEPS) if device == "cuda" else (1, 1)
    step()
    found = []
    for _ in range(rounds):
        wait()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        found.append((time.perf_counter() - begin) / steps * 1e3)
    return median(found)


def stepper(model: Any, cache: Any, ids: Tensor) -> Callable[[], Tensor]:
    """A step that leaves the cache as long as it was."""

    def step() -> Tensor:
        with torch.no_grad():
            logits = model(ids, past_key_values=cache).logits
        cache.crop(-1)
        return logits

    return step


def row(model: Any, batch: int, tokens: int, device: str) -> str:
    """A line of the table."""
    ids = torch.arange(batch, device=device)[:, None]
    room = tokens + ROUNDS * STEPS + 64
    patch(model)
    cache = SnapMLACache(model.config, batch, room, page_size=PAGE, device=device)
    fill_ours(cache, batch, tokens, device)
    step = stepper(model, cache, ids)
    ours = step().clone()
    times = [per_step(step, device)]
    graph = DecodeGraph(model, cache)
    in_graph = graph(ids).clone()
    times.append(per_step(partial(graph, ids), device))
    size = 644 * PAGE * cache.pool.batch * cache.pool.width * len(cache.layers)
    del cache, step, graph  # their memory is the next contender's
    unpatch(model)
    theirs, texts = fill_theirs(model.config, batch, tokens, device), []
    error = ""
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        step = stepper(model, theirs, ids)
        try:
            want = step().float()
            ms = per_step(step, device)
        except torch.OutOfMemoryError:
            texts.append("no memory")
            continue
        texts.append(f"{ms:.2f} ({ms / times[1]:.2f}×)")
        far = [float((each.float() - want).norm() / want.norm()) for each in (ours, in_graph)]
        if max(far) > GATE:
            raise AssertionError(f"{batch} x {tokens}: logits are {far} from {name}'s")
        error = f"{max(far):.3f}"
    if not error:
        return f"| {batch} × {tokens} | not timed: no peer to compare with had memory |" + "|" * 5
    return (
        f"| {batch} × {tokens} | {times[0]:.2f} | {times[1]:.2f} | {texts[0]} | {texts[1]} "
        f"| {size / 1e6:.1f} MB | {error} |"
    )


def main(
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    device: Annotated[str, typer.Option(help="cuda; cpu rehearses with small sizes.")] = "cuda",
    layers: Annotated[int, typer.Option(help="Of the model.")] = 4,
    heads: Annotated[int, typer.Option(help="Of the model.")] = 128,
    seconds: Annotated[float, typer.Option(help="No row begins after so many.")] = 240,
) -> None:
    """Times steps and writes ``transformers-step.md``."""
    cuda, until = device == "cuda", time.monotonic() + seconds
    lengths, batches = (LENGTHS, BATCHES) if cuda else ((100,), (2,))
    place = torch.device(device, torch.cuda.current_device()) if cuda else torch.device(device)
    facts = machine(place, timing.Nvml(place.index) if cuda else None)
    model = model_of(layers, heads, device)
    lines = [
        *page.head(
            "A decode step of transformers", "profiles.studies.transformers_step",
            page.told(facts, ("gpu", "driver", "cuda", "torch"))
            + f", transformers {transformers.__version__}",
            f"ms a step of {layers} layers of DeepSeek-V3's sizes with plain MLPs, {heads} heads; "
            "wall time, one token a sequence; ratios to ours in a graph",
        ),
        f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|",
    ]  # fmt: skip
    for batch in batches:
        for tokens in lengths:
            if time.monotonic() > until:
                lines.append(f"\nNot run, the time was over: {batch} × {tokens} and what follows.")
                break
            lines.append(row(model, batch, tokens, device))
            print(lines[-1], flush=True)
            write_atomic(out / "transformers-step.md", "\n".join(lines) + "\n")
    write_atomic(out / "transformers-step.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
