"""The acceptance of the engine study: each line of it as a named check over its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from profiles.engine.spec import LONG, LONG_TOKENS, SPARSE_TIMINGS, shape_of
from profiles.gate import Gate
from profiles.gate import page as gates_page

CLOSE = 1.15  # KL of an engine over that of the model with fake-quantised attention
EQUAL = 1.02  # times that count as equal
ATTENTION = 1.8  # sparse attention beside FLASHMLA_SPARSE's


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


def invariance(accuracy: dict[str, Any], name: str = "snapmla-invariant") -> Gate:
    claim = "a request alone and in a batch: the same bits in batch-invariant mode"
    row = accuracy.get(name)
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
        default = milliseconds("flash_attn_mla", wanted)  # not in results made before it was there
        if default is not None:
            shown += f", FLASH_ATTN_MLA {default:.2f} ({default / ours:.2f} x)"
        found.append(Gate(name, claim, passed, (shown,)))
    return found


def sparse_kl(accuracy: dict[str, Any]) -> list[Gate]:
    """Ours beside vLLM's own, both to the model in fp32 that chooses by exact scores."""
    found = []
    for part, which in (
        ("long", f"{LONG} prompts of >= {LONG_TOKENS} tokens"), ("short", "shorter ones"),
    ):  # fmt: skip
        claim = f"mean KL to fp32 on {which} within {CLOSE} x flashmla_sparse-eager's"
        base = accuracy.get("flashmla_sparse-eager")
        figures, passed = [], []
        for name, row in accuracy.items():
            kl = row[part]["kl"]
            figures.append(f"{name}: KL {kl:.3g}, best tokens equal {row[part]['agree']:.4f}")
            if name.startswith("snapmla") and base:
                passed.append(kl <= CLOSE * base[part]["kl"])
        verdict = all(passed) if len(passed) >= 2 else None
        found.append(Gate(f"KL, {part}", claim, verdict, tuple(figures)))
    return found


def sparse_steps(speed: dict[str, Any], layers: int) -> list[Gate]:
    """Of a DSA model: kernels of attention, and whole steps."""
    found = []
    for timing in SPARSE_TIMINGS:

        def of(how: str, timing: str = timing) -> list[dict[str, Any]]:
            names = [f"{e}-{layers}-{how}-{timing}" for e in ("snapmla_sparse", "flashmla_sparse")]
            return [speed[n]["times"][timing] for n in names if timing in _times(speed, n)]

        shares = [times["share"]["attention_us"] for times in of("share")]
        claim = f"{layers} layers at {timing}: attention's kernels >= {ATTENTION} x FLASHMLA_SPARSE"
        passed, figures = None, []
        if len(shares) == 2:
            passed = shares[1] >= ATTENTION * shares[0]
            figures = [f"ours {shares[0]:.0f} us a step, its {shares[1]:.0f} "
                       f"({shares[1] / shares[0]:.2f} x)"]  # fmt: skip
        found.append(Gate(f"attention, {layers} layers, {timing}", claim, passed, tuple(figures)))

        steps = [median(times["ms"]) for times in of("step")]
        claim = f"a step of {layers} layers at {timing} not slower than FLASHMLA_SPARSE's"
        passed, figures = None, []
        if len(steps) == 2:
            passed = steps[0] <= EQUAL * steps[1]
            figures = [f"ours {steps[0]:.2f} ms, its {steps[1]:.2f} ({steps[1] / steps[0]:.2f} x)"]
        found.append(Gate(f"step, {layers} layers, {timing}", claim, passed, tuple(figures)))
    return found


def _times(speed: dict[str, Any], name: str) -> dict[str, Any]:
    times: dict[str, Any] = speed.get(name, {}).get("times", {})
    return times


def sparse_gates(
    accuracy: dict[str, Any], speed: dict[str, Any], depths: Sequence[int]
) -> list[Gate]:
    """The acceptance of DSA models."""
    steps = [gate for layers in depths for gate in sparse_steps(speed, layers)]
    return [*sparse_kl(accuracy), invariance(accuracy, "snapmla_sparse-invariant"), *steps]


def parts_table(speed: dict[str, Any]) -> list[str]:
    """Microseconds of a step by part, as Markdown rows; of older results what kernels waited for
    others is in the parts."""
    lines = ["| engine | attention | indexer | rows of positions | append | rest | all | waited |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    parts = ("attention", "indexer", "rows", "append", "rest", "all")
    for name, row in speed.items():
        for times in row["times"].values():
            if times["share"]:
                spent = " | ".join(f"{times['share'][f'{part}_us']:.0f}" for part in parts)
                waited = times["share"].get("waited_us")
                last = "in the parts" if waited is None else f"{waited:.0f}"
                lines.append(f"| {name} | {spent} | {last} |")
    return lines


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


def sparse_page(
    header: Sequence[str], accuracy: dict[str, Any], speed: dict[str, Any], depths: Sequence[int]
) -> str:
    """What DSA models gave, as Markdown."""
    title = "# vLLM with sparse attention"
    lines = written_page(title, header, sparse_gates(accuracy, speed, depths), accuracy, speed)
    if speed:
        lines += ["", "## Microseconds of a step's kernels", "", *parts_table(speed)]
    return "\n".join(lines) + "\n"


def page(header: Sequence[str], accuracy: dict[str, Any], speed: dict[str, Any]) -> str:
    """All of it as Markdown."""
    found = gates(accuracy, speed)
    return "\n".join(written_page("# vLLM on an H200", header, found, accuracy, speed)) + "\n"


def written_page(
    title: str, header: Sequence[str], found: Sequence[Gate], accuracy: dict[str, Any],
    speed: dict[str, Any],
) -> list[str]:  # fmt: skip
    """Lines of a page: gates, what engines wrote, their steps."""
    judged = gates_page(found).rstrip()
    lines = [title, "", *header, "", judged]
    greedy = {n: r["greedy_until"] for n, r in accuracy.items() if "greedy_until" in r}
    if greedy:
        lines += ["", "## Greedy tokens equal to the base's until step", ""]
        lines += [f"- {name}: {steps}" for name, steps in greedy.items()]
    if speed:
        lines += ["", "## Steps", "", *speed_table(speed)]
    return lines
