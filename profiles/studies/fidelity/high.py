"""``accuracy="high"`` in the study: layers and drift beside the default, as a page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean
from typing import Any

from profiles.studies.fidelity.gates import Result, by_layer
from profiles.studies.fidelity.study import Scope

NAME, PARTS = "fidelity-high", ("layers", "drift")
# By name of an attention what a column says.
COLUMNS = {
    "bf16": "BF16", "ours": "default, mimic", "ours2": "two terms, mimic", "high": "high, mimic",
    "exact_p": "P exact, mimic", "kernel": "default", "kernel2": "two terms",
    "kernel_high": "high", "flashmla_bf16": "FlashMLA BF16",
}  # fmt: skip


def scope_of(scope: Scope) -> Scope:
    """The same with these attentions alone."""
    names = tuple(COLUMNS)
    return replace(scope, names=names, far=names, few=names)


def page(layers: Result, drift: Result) -> str:
    """Both parts' results as Markdown."""
    facts = [
        f"# `accuracy=\"high\"` in the accuracy study: model {layers['model']}", "",
        "`python -m profiles.studies.fidelity high`", "",
        f"- commit {layers['commit']}",
        f"- {layers['device']}, torch {layers['torch']}, seeds {len(layers['seeds'])}",
        "- columns \"mimic\" are fake-quantised torch with exact sums, the others kernels; BF16 "
        "rounds inputs and results only", "",
    ]  # fmt: skip
    return "\n".join([*facts, *layer_lines(layers["data"]), "", *drift_lines(drift["data"])]) + "\n"


def layer_lines(data: dict[Any, Any]) -> list[str]:
    """Median relative L2 of a token to BF16 inputs, the mean over layers and seeds, by dial."""
    names = [name for name in COLUMNS if name in data["natural"]["errors"]]
    lines = [
        "## Layers: median relative L2 of a token's attention to that on the inputs as they are",
        "",
        *_head("dial", names),
    ]  # fmt: skip
    for dial, entry in data.items():
        found = (fmean(by_layer(entry["errors"], name)) for name in names)
        lines.append(_row(dial, found))
    return lines


def drift_lines(data: dict[Any, Any]) -> list[str]:
    """Relative L2 by constant and length, the mean over layers and seeds: of the arithmetic alone,
    and to BF16 inputs."""
    lines = ["## Drift: relative L2 by length, a constant of so many deviations on every channel"]
    for kind, told in (("own", "what is stored (the arithmetic alone)"), ("total", "BF16 inputs")):
        shown = data[next(iter(data))]
        names = [name for name in COLUMNS if name in shown]
        lines += ["", f"To exact attention over {told}:", "", *_head("constant, tokens", names)]
        for constant, by_name in data.items():
            for length in by_name["ours"][kind]:
                found = (_mean(by_name[name][kind].get(length)) for name in names)
                lines.append(_row(f"{constant}, {length}", found))
    return lines


def _mean(rows: list[list[float]] | None) -> float | None:
    """Over seeds and layers; None where a kernel is not run over so many tokens."""
    return None if rows is None else fmean(x for row in rows for x in row)


def _head(first: str, names: list[str]) -> list[str]:
    return [
        f"| {first} | {' | '.join(COLUMNS[n] for n in names)} |",
        "|---" * (len(names) + 1) + "|",
    ]


def _row(first: str, found: Iterable[float | None]) -> str:
    cells = ("" if value is None else f"{value:.2e}" for value in found)
    return f"| {first} | {' | '.join(cells)} |"
