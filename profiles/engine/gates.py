"""The acceptance of the engine study: each line of it as a named check over its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from profiles.engine.spec import LONG, LONG_TOKENS, shape_of
from profiles.fidelity.gates import Gate
from profiles.fidelity.gates import page as gates_page

CLOSE = 1.15  # KL of an engine over that of the model with fake-quantised attention
EQUAL = 1.02  # times that count as equal


@dataclass(frozen=True)
class Wanted:
    """A step is to be so many times as fast as vLLM's own backends'."""

    heads: int
    timing: str
    bf16: float
    fp8: float


WANTED = (
    Wanted(16, "32x32768", 1.6, 1.25),
    Wanted(16, "32x16384", 1.5, 1.2),
    Wanted(128, "32x16384", 1 / EQUAL, 1 / EQUAL),
)


def kl(accuracy: dict[str, Any]) -> Gate:
    claim = f"mean KL to fp32 on {LONG} prompts of >= {LONG_TOKENS} tokens within {CLOSE} x fake's"
    fake = accuracy.get("fake", {}).get("long")
    figures, passed = [], []
    for name, row in accuracy.items():
        found = row["long"]
        figures.append(f"{name}: KL {found['kl']:.3g}, best tokens equal {found['agree']:.4f}")
        if name.startswith("snapmla") and fake:
            passed.append(found["kl"] <= CLOSE * fake["kl"])
    return Gate("KL", claim, all(passed) if len(passed) >= 2 else None, tuple(figures))


def invariance(accuracy: dict[str, Any]) -> Gate:
    claim = "a request alone and in a batch: the same bits in batch-invariant mode"
    row = accuracy.get("snapmla-invariant")
    figures = tuple(f"{n}: {r['alone']}" for n, r in accuracy.items() if "alone" in r)
    return Gate("invariance", claim, all(row["alone"]) if row else None, figures)


def steps(speed: dict[str, Any]) -> list[Gate]:
    """A gate a row of ``WANTED``."""

    def milliseconds(engine: str, wanted: Wanted) -> float | None:
        times = speed.get(f"{engine}-{wanted.heads}", {}).get("times", {}).get(wanted.timing)
        return median(times["ms"]) if times else None

    found = []
    for wanted in WANTED:
        claim = (
            f"a step of 27 layers x {wanted.heads} heads at {wanted.timing}: "
            f">= {wanted.bf16:.3g} x FLASHMLA BF16's speed, {wanted.fp8:.3g} x FLASHMLA FP8's"
        )
        ours = milliseconds("snapmla", wanted)
        theirs = [milliseconds(name, wanted) for name in ("flashmla_bf16", "flashmla_fp8")]
        name = f"step {wanted.heads} heads, {wanted.timing}"
        if ours is None or None in theirs:
            found.append(Gate(name, claim, None))
            continue
        ratios = [t / ours for t in theirs if t is not None]
        passed = ratios[0] >= wanted.bf16 and ratios[1] >= wanted.fp8
        shown = f"ours {ours:.2f} ms, BF16 {theirs[0]:.2f} ({ratios[0]:.2f} x), "
        shown += f"FP8 {theirs[1]:.2f} ({ratios[1]:.2f} x)"
        found.append(Gate(name, claim, passed, (shown,)))
    return found


def gates(accuracy: dict[str, Any], speed: dict[str, Any]) -> list[Gate]:
    return [kl(accuracy), invariance(accuracy), *steps(speed)]


def speed_table(speed: dict[str, Any]) -> list[str]:
    """Milliseconds, tokens/s, attention's share and blocks, as Markdown rows."""
    lines = ["| engine | batch x tokens | ms a step | tokens/s | attention | blocks of 64 tokens |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name, row in speed.items():
        for timing, times in row["times"].items():
            middle = median(times["ms"])
            rate = shape_of(timing)[0] / middle * 1e3
            part = times["share"].get("attention")
            share = "" if part is None else f"{part:.0%}"
            lines.append(
                f"| {name} | {timing} | {middle:.2f} | {rate:.0f} | {share} | {row['blocks']} |"
            )
    return lines


def page(header: Sequence[str], accuracy: dict[str, Any], speed: dict[str, Any]) -> str:
    """All of it as Markdown."""
    judged = gates_page(gates(accuracy, speed)).rstrip()
    lines = ["# vLLM on an H200", "", *header, "", judged]
    greedy = {n: r["greedy_until"] for n, r in accuracy.items() if "greedy_until" in r}
    if greedy:
        lines += ["", "## Greedy tokens equal to the base's until step", ""]
        lines += [f"- {name}: {steps}" for name, steps in greedy.items()]
    if speed:
        lines += ["", "## Steps", "", *speed_table(speed)]
    return "\n".join(lines) + "\n"
