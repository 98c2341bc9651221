"""A chunk of prefill over a cached prefix: ``REQUESTS`` prompts whose first ``CACHED`` tokens lie
in the cache, and ``NEW`` tokens of each in one step.

The prefixes are computed before, and found by vLLM's prefix cache; of each step that counts is
checked that it had just that.  Log-probabilities of the chunk's last tokens, and of decode steps
behind it, are compared with the model in torch, in which the chunk sees the prefix as it is stored.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from profiles import spans
from profiles.engine import spec, truth
from profiles.engine.spec import NEW_TOKENS, SEED, VOCABULARY, Case
from profiles.engine.within import watched
from profiles.gate import Gate
from profiles.gate import page as gates_page
from profiles.model.attention import attend_plainly, backends
from profiles.model.fake import SETTINGS
from profiles.model.model import Attend, Latents, MlaModel

REQUESTS, CACHED, NEW = 8, 8192, 2048
MORE = 4  # steps of other new tokens, of which the first log-probabilities count, too
WARM, STEPS = 3, 15  # steps that are timed
LONGEST = CACHED + NEW + 2 * NEW_TOKENS
CLOSE = 1.15  # KL of an engine over that of the model with fake-quantised attention
# Attention backend, cache dtype and prefill backend by name
ENGINES = {
    "snapmla-mha": ("CUSTOM", "fp8_ds_mla", "CUSTOM"),
    "snapmla-fa3": ("CUSTOM", "fp8_ds_mla", "FLASH_ATTN"),
    "flashmla_bf16-fa3": ("FLASHMLA", "auto", "FLASH_ATTN"),
    "flashmla_fp8-fa3": ("FLASHMLA", "fp8", "FLASH_ATTN"),
}
# A step's kernels by part, the first that matches.
PARTS = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "append": r"append_kv|concat_and_cache",
        "prefix": r"cutlass__(indices|ragged|pages)_|gather_and_maybe_dequant|cp_gather",
        "merge": r"merge_attn_states|mask_empty",
        "attention": r"mha_fwd|cutlass__list|flash",
        "projections": r"nvjet|gemm|cublas",
        "copies": r"elementwise|catarray|concat|copy",
    }.items()
}


def cases(folder: Path) -> list[Case]:
    """An engine each."""
    return [
        Case(name=f"chunk-{name}", model=str(folder / "model"), backend=backend, cache_dtype=dtype,
             prefill=prefill, study="chunk", prefix_caching=True, longest=LONGEST)
        for name, (backend, dtype, prefill) in ENGINES.items()
    ]  # fmt: skip


def tokens(count: int, *which: int) -> list[int]:
    """Random tokens, the same of the same numbers."""
    generator = torch.Generator().manual_seed(SEED + sum(n * 1000**i for i, n in enumerate(which)))
    return torch.randint(2, VOCABULARY, (count,), generator=generator).tolist()


def prefixes() -> list[list[int]]:
    return [tokens(CACHED, i) for i in range(REQUESTS)]


def prompts(step: int) -> list[list[int]]:
    """The prefixes, and new tokens of a step."""
    return [prefix + tokens(NEW, i, 1 + step) for i, prefix in enumerate(prefixes())]


def forced() -> list[list[int]]:
    """What every engine is made to write behind step 0."""
    return [tokens(NEW_TOKENS, i, 0, 1) for i in range(REQUESTS)]


# ---------------------------------------------------------------------------- within the engine


@contextmanager
def scheduled(engine: Any) -> Iterator[list[list[tuple[int, int]]]]:
    """Of each step (tokens cached before, new tokens) of the requests that it begins with."""
    steps: list[list[tuple[int, int]]] = []

    def note(step: Any) -> None:
        known = step.num_scheduled_tokens
        steps.append([(r.num_computed_tokens, known[r.req_id]) for r in step.scheduled_new_reqs])

    with watched(engine, note):
        yield steps


def check(steps: list[list[tuple[int, int]]]) -> None:
    """Stops where the first step was not the one that is to be measured."""
    if not steps or steps[0] != [(CACHED, NEW)] * REQUESTS:
        raise RuntimeError(
            f"a step of {REQUESTS} prompts of {CACHED} cached and {NEW} new tokens was expected; "
            f"(cached, new) were {steps[:1]}"
        )


def continued(engine: Any, step: int, force: Any, count: int) -> tuple[list[list[int]], Tensor]:
    """Like ``Engine.continued``, over the prompts of a step, with nothing cached but prefixes."""
    if not engine.llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache is in use")
    engine.continued(prefixes(), steps=1)
    with scheduled(engine) as steps:
        found = engine.continued(prompts(step), force, steps=count)
    check(steps)
    return found


def timed(engine: Any, step: int, run: Callable[[], Any]) -> Any:
    """``run`` of one step, which has the new tokens of a step and nothing else."""
    from vllm import SamplingParams, TokensPrompt

    asked = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    inner = engine.llm.llm_engine
    for i, prompt in enumerate(prompts(step)):
        inner.add_request(f"{step}-{i}", TokensPrompt(prompt_token_ids=prompt), asked)
    torch.cuda.synchronize()
    with scheduled(engine) as steps:
        found = run()
    check(steps)
    while inner.has_unfinished_requests():
        inner.step()
    return found


def measure(engine: Any, out: Path) -> dict[str, Any]:
    """All of a case; log-probabilities go to ``OUT/NAME.pt``."""
    ids, logs = continued(engine, 0, forced(), NEW_TOKENS)
    if ids != forced():
        raise RuntimeError("the given tokens were not followed")
    again = continued(engine, 0, forced(), NEW_TOKENS)
    first = [logs[:, :1]] + [continued(engine, 1 + i, None, 1)[1] for i in range(MORE)]
    torch.save({"decode": logs[:, 1:], "first": torch.cat(first)}, out / f"{engine.case.name}.pt")
    inner, times = engine.llm.llm_engine, []

    def step() -> float:
        begin = time.perf_counter()
        inner.step()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    for i in range(WARM + STEPS):
        times.append(timed(engine, 1 + MORE + i, step))
    kept = times[WARM:]

    def profiled() -> dict[str, float]:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            step()
        return spans.charged(spans.of_profile(profile))

    return {
        "again": again[0] == ids and bool(torch.equal(again[1], logs)),
        "prefill": chosen(inner), "ms": round(median(kept) * 1e3, 4),
        "range_ms": [round(min(kept) * 1e3, 4), round(max(kept) * 1e3, 4)],
        "parts": shares(timed(engine, 1 + MORE + WARM + STEPS, profiled)),
    }  # fmt: skip


def chosen(inner: Any) -> str:
    """The prefill backend that the model's layers have, and the version of FlashAttention."""
    layers = inner.vllm_config.compilation_config.static_forward_context.values()
    found = {type(b): b for b in (getattr(each, "prefill_backend", None) for each in layers) if b}
    (backend,) = found.values()
    version = getattr(backend, "vllm_flash_attn_version", None)
    return str(backend.get_name()) + (f" {version}" if version else "")


def shares(spent: dict[str, float]) -> dict[str, float]:
    """Microseconds of a step by part, and of its largest kernels."""
    found = {part: 0.0 for part in (*PARTS, "rest")}
    for name, us in spent.items():
        found[next((part for part, names in PARTS.items() if names.search(name)), "rest")] += us
    largest = sorted(spent, key=lambda name: -spent[name])[:16]
    return found | {"all": sum(spent.values())} | {f"us of {n[:90]}": spent[n] for n in largest}


# ------------------------------------------------------------------------------------- the truth

Store = Callable[[Latents], Latents]


def as_ours(latents: Latents) -> Latents:
    """What ``fetch_dequant`` gives of them."""
    setting = SETTINGS["ours"]
    rows = [setting.cache(*each) for each in zip(latents.c_kv, latents.k_rope, strict=True)]
    parts = zip(*((c.float() * s[:, None], r.float() * s[:, None]) for c, r, s in rows))
    return Latents(*(torch.stack(part).to(latents.c_kv.dtype) for part in parts))


@torch.no_grad()
def log_probabilities(
    model: MlaModel, given: Sequence[list[int]], ids: Sequence[list[int]], attend: Attend,
    store: Store, cached: int = CACHED,
) -> Tensor:  # fmt: skip
    """(prompts, tokens of ``ids``, vocabulary) fp32.

    A prefix is computed exactly.  What follows of the prompt attends to it as ``store`` leaves it,
    and to itself exactly; tokens behind the prompt go through ``attend``, over all.
    """
    device = next(model.parameters()).device
    rows = []
    row = lambda ids: torch.tensor([ids], device=device)
    for prompt, written in zip(given, ids, strict=True):
        _, past = model(row(prompt[:cached]), last=1)
        logits, seen = model(row(prompt[cached:]), [store(each) for each in past], last=1)
        if len(written) > 1:
            whole = [a.then(Latents(b.c_kv[:, cached:], b.k_rope[:, cached:]))
                     for a, b in zip(past, seen, strict=True)]  # fmt: skip
            rest, _ = model(row(written[:-1]), whole, attend)
            logits = torch.cat((logits, rest), 1)
        rows.append(logits[0].float().log_softmax(-1).cpu())
    return torch.stack(rows)


def references(model: MlaModel, device: torch.device) -> dict[str, dict[str, Tensor]]:
    """``decode`` and ``first`` as engines have them, by name: fp32, bf16, fake-quantised."""
    torch.backends.cuda.matmul.allow_tf32 = False
    found = {}
    for name, attention, store in (
        ("fp32", None, lambda x: x), ("bf16", "bf16", lambda x: x), ("fake", "ours", as_ours),
    ):  # fmt: skip
        narrow = model.float().to(device) if attention is None else model.bfloat16()
        attend: Attend = attend_plainly
        if attention is not None:
            (backend,) = backends([attention], device, None)
            assert backend.attend is not None
            attend = backend.attend
        logs = log_probabilities(narrow, prompts(0), forced(), attend, store)
        more = [prompt for i in range(MORE) for prompt in prompts(1 + i)]
        others = log_probabilities(narrow, more, [[0]] * len(more), attend, store)
        found[name] = {"decode": logs[:, 1:], "first": torch.cat((logs[:, :1], others))}
    return found


def found(folder: Path, results: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Distance of engines and torch's models from the exact one, and the engines' results."""
    logs = references(spec.random_model(layers=4, heads=16), device)
    exact = logs["fp32"]
    logs |= {name: torch.load(folder / f"{name}.pt") for name in results}
    return {
        name: {part: truth.divergence(values[part], exact[part]) for part in ("first", "decode")}
        | results.get(name, {})
        for name, values in logs.items()
    }


# -------------------------------------------------------------------------------------- the page


def gates(data: dict[str, Any]) -> list[Gate]:
    """KL of the chunk's last tokens, and of the decode steps behind."""
    judged = []
    shape = f"{REQUESTS} prompts of {CACHED} cached and {NEW} new tokens"
    for part, what in (("first", "a chunk's last tokens"), ("decode", "decode steps behind it")):
        claim = f"{shape}: mean KL to fp32 of {what} within {CLOSE} x fake's"
        fake = data.get("fake", {}).get(part)
        figures, passed = [], []
        for name, row in data.items():
            kl = row[part]["kl"]
            figures.append(f"{name}: KL {kl:.3g}, best tokens equal {row[part]['agree']:.4f}")
            if name.startswith("chunk-snapmla") and fake:
                passed.append(kl <= CLOSE * fake["kl"])
        verdict = all(passed) if len(passed) >= 2 else None
        judged.append(Gate(f"KL, {part}", claim, verdict, tuple(figures)))
    return judged


def page(header: Sequence[str], data: dict[str, Any]) -> str:
    """Gates, times and parts of the step, as Markdown."""
    lines = ["# vLLM: a chunk of prefill over a cached prefix", "", *header, "",
             gates_page(gates(data)).rstrip()]  # fmt: skip
    timed = {name: row for name, row in data.items() if "ms" in row}
    if timed:
        lines += ["", f"## The step: {REQUESTS} x {NEW} new tokens over {CACHED} cached, 4 layers, "
                  "16 heads", "", "| engine | prefill | ms | least, most | same bits again |",
                  "|---|---|---|---|---|"]  # fmt: skip
        for name, row in timed.items():
            least, most = row["range_ms"]
            lines.append(f"| {name} | {row['prefill']} | {row['ms']:.2f} | {least:.2f}, {most:.2f} "
                         f"| {'yes' if row['again'] else 'no'} |")  # fmt: skip
        parts = (*PARTS, "rest", "all")
        lines += ["", "## Microseconds of its kernels", "", f"| engine | {' | '.join(parts)} |",
                  "|---" * (1 + len(parts)) + "|"]  # fmt: skip
        for name, row in timed.items():
            spent = " | ".join(f"{row['parts'][part]:.0f}" for part in parts)
            lines.append(f"| {name} | {spent} |")
    return "\n".join(lines) + "\n"
