"""The figures of docs/fidelity.md, drawn from the committed JSON; one figure a claim."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from profiles.studies.fidelity.gates import Result, Results, by_layer

LINES = ("ours", "ours2", "A", "B", "C", "D")
WHOLE = ("bf16", "ours", "ours2", "A", "kernel", "kernel2", "flashmla_bf16", "flashmla_fp8")
LABELS = {
    "bf16": "BF16", "ours": "ours", "ours2": "ours, two terms", "paper": "paper's P",
    "pow2": "power-of-two scales", "phased": "scales of many phases",
    "plain": "largest element at 448", "c128": "128-channel scales", "exact_p": "P exact",
    "kernel": "our kernel", "kernel2": "our kernel, two terms", "high": "ours, high",
    "kernel_high": "our kernel, high", "flashmla_bf16": "FlashMLA BF16",
    "flashmla_fp8": "FlashMLA FP8",
}  # fmt: skip
COLOURS = {name: f"C{i}" for i, name in enumerate(("ours", "A", "B", "C", "D", "flashmla_fp8"))}
COLOURS |= {"ours2": "C6", "kernel": "C7", "kernel2": "C8", "flashmla_bf16": "C9", "bf16": "k"}


def _plot(panels: int, width: float = 3.4) -> tuple[Any, list[Any]]:
    """A figure with panels in a row, that needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "snapmla", "font.size": 8, "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, panels, figsize=(width * panels, 2.8), layout="constrained", squeeze=False
    )
    return figure, list(axes[0])


def _line(axis: Any, xs: Iterable[float], ys: Iterable[float], name: str, **options: Any) -> None:
    label, colour = LABELS.get(name, name), COLOURS.get(name, "0.5")
    axis.plot(list(xs), list(ys), marker=".", label=label, color=colour, linewidth=1, **options)


def _largest(found: dict[str, Any]) -> tuple[str, Any]:
    """The result that pages show: the full model's, else any."""
    return next(((m, v) for m, v in found.items() if m == "full"), next(iter(found.items())))


def distribution(results: Results) -> Any:
    """Figure 3: how far content and RoPE reach, naturally and dialled, and what e4m3 costs."""
    model, data = _largest(results.data("statistics"))
    figure, axes = _plot(2)
    for dial in ("natural", "rope 1000", "gain 1e3", "channels 64"):
        for part, style in (("content", "-"), ("rope", ":")):
            worst = [max(column) for column in zip(*data["dials"][dial][part])]
            axes[0].plot(worst, style, marker=".", linewidth=1, label=f"{part}, {dial}")
    axes[0].set_xticks(range(5), [f"{q:.3g}" for q in data["quantiles"]])
    axes[0].legend(fontsize=5, frameon=False, loc="upper left")
    axes[0].set(ylim=(0.1, 1e8), yscale="log", title=model)
    axes[0].set(xlabel="quantile", ylabel="|x|, largest layer")
    natural, loud = (data["dials"][dial] for dial in ("natural", "rope 1000"))
    for label, row in (("content", natural["content_mse"]), ("RoPE", natural["rope_mse"]),
                       ("RoPE at 1e3", loud["rope_mse"])):  # fmt: skip
        axes[1].plot(row, marker=".", linewidth=1, label=label)
    axes[1].set(yscale="log", xlabel="layer", ylabel="mean square error in e4m3")
    return figure, axes


def layers(results: Results) -> Any:
    """Figure 4: errors of each layer, naturally and with RoPE at 1e3."""
    model, data = _largest(results.data("layers"))
    figure, axes = _plot(4)
    panels = (("natural", "rmse"), ("natural", "cosine"), ("natural", "l2"), ("rope 1000", "l2"))
    words = {"rmse": "RMSE", "cosine": "1 - cos", "l2": "relative L2"}
    for axis, (dial, measure) in zip(axes, panels, strict=True):
        for name in LINES:
            ys = by_layer(data[dial]["errors"], name, measure)
            _line(axis, range(len(ys)), ys, name)
        axis.set(yscale="log", xlabel="layer", ylabel=words[measure], title=f"{model}, {dial}")
        axis.set_xticks(range(len(ys)))
    return figure, axes


def dials(results: Results) -> Any:
    """Error against each dial, the mean over layers."""
    model, data = _largest(results.data("layers"))
    figure, axes = _plot(4)
    kinds = {"rope": "reach of RoPE", "gain": "gain of the latent", "channels": "gain of channels",
             "amplitude": "log-normal amplitude (changes the function)"}  # fmt: skip
    for axis, (kind, words) in zip(axes, kinds.items(), strict=True):
        also = ("natural",) if kind in ("gain", "channels") else ()  # both are 1 there
        rows = [each for each in data.values() if each["kind"] in (kind, *also)]
        rows.sort(key=lambda each: each["value"])
        for name in LINES:
            ys = [fmean(by_layer(row["errors"], name)) for row in rows]
            _line(axis, [row["value"] for row in rows], ys, name)
        scale = "linear" if kind == "amplitude" else "log"
        axis.set(xscale=scale, yscale="log", xlabel=words, title=model)
    axes[0].set_ylabel("median relative L2 of a token")
    return figure, axes


def perplexity(results: Results) -> Any:
    """KL to BF16 against context; beyond the trained length nothing else is said."""
    found = results.of("perplexity")
    figure, axes = _plot(len(found))
    for axis, (model, result) in zip(axes, found.items(), strict=True):
        for name in WHOLE[1:]:
            rows = [(int(n), row[name]["kl"]) for n, row in result["data"].items() if name in row]
            if not rows:
                continue
            _line(axis, [n for n, _ in rows], [fmean(kl) for _, kl in rows], name)
            low, high = ([pick(kl) for _, kl in rows] for pick in (min, max))
            colour = COLOURS.get(name, "0.5")
            axis.fill_between([n for n, _ in rows], low, high, alpha=0.15, color=colour)
        axis.axvline(result["trained_length"], color="0.7", linewidth=0.8)
        label = "tokens of context (line: trained length)"
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel="KL to BF16", title=model)
    return figure, axes


def needles(results: Results) -> Any:
    """Retrieval over depth and length."""
    model, data = _largest(results.data("needles"))
    figure, axes = _plot(len(data), width=2.0)
    for axis, (name, lengths) in zip(axes, data.items(), strict=True):
        rows = [[fmean(hits) for hits in depths.values()] for depths in lengths.values()]
        axis.imshow(rows, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        depths = list(next(iter(lengths.values())))
        axis.set_xticks(range(len(depths)), depths)
        axis.set_yticks(range(len(lengths)), list(lengths))
        axis.set(xlabel="depth", title=LABELS.get(name, name))
    axes[0].set_ylabel(f"tokens, {model}")
    return figure, []


def greedy(results: Results) -> Any:
    """How many greedy continuations still are BF16's after so many tokens."""
    model, data = _largest(results.data("greedy"))
    figure, axes = _plot(1, width=4.5)
    for name in [each for each in WHOLE if each in data["first"]]:
        first = [step for seed in data["first"][name] for step in seed]
        steps = range(data["steps"] + 1)
        alive = [fmean(at >= step for at in first) for step in steps]
        colour = COLOURS.get(name, "0.5")
        axes[0].plot(steps, alive, linewidth=1, color=colour, label=LABELS.get(name, name))
    axes[0].set(xlabel="greedy tokens", ylabel="still BF16's", title=model)
    return figure, axes


def drift(results: Results) -> Any:
    """Error against length on replayed latents: all of it, and the arithmetic's own."""
    model, data = _largest(results.data("drift"))
    figure, axes = _plot(2 * len(data), width=2.8)
    panels = [(constant, kind) for constant in data for kind in ("total", "own")]
    words = {"total": "against BF16 inputs", "own": "against what is stored"}
    for axis, (constant, kind) in zip(axes, panels, strict=True):
        for name in WHOLE:
            rows = data[constant].get(name, {}).get(kind)
            if not rows:
                continue
            ys = [fmean(x for seed in row for x in seed) for row in rows.values()]
            _line(axis, map(int, rows), ys, name)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=f"{model}, {constant} sigma")
        axis.set_ylabel(f"relative L2 {words[kind]}")
    return figure, axes


FIGURES: dict[str, tuple[str, Callable[[Results], Any]]] = {
    "distribution": ("statistics", distribution),
    "layers": ("layers", layers),
    "dials": ("layers", dials),
    "perplexity": ("perplexity", perplexity),
    "needles": ("needles", needles),
    "greedy": ("greedy", greedy),
    "drift": ("drift", drift),
}


def draw(results: Iterable[Result], folder: Path) -> list[Path]:
    """Writes an SVG of every figure whose part was measured; the same bytes from the same JSON."""
    found, written = Results(results), []
    folder.mkdir(parents=True, exist_ok=True)
    for name, (part, drawn) in FIGURES.items():
        if not found.of(part):
            continue
        figure, axes = drawn(found)
        for axis in axes[-1:]:
            lines = axis.get_legend_handles_labels()
            figure.legend(*lines, loc="outside right center", fontsize=6, frameon=False)
        path = folder / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        _close(figure)
        written.append(path)
    return written


def _close(figure: Any) -> None:
    from matplotlib import pyplot

    pyplot.close(figure)
