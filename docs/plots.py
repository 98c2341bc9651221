"""Draws plots of committed tables: ``speed``, ``roofline``, ``stamps`` and ``lse-bias.svg``.

    pip install -e '.[plots]'       # matplotlib
    python docs/plots.py            # write
    python docs/plots.py --check    # exit 1 if one is stale; without matplotlib, by its data

Each picture holds a digest of the figures that it was drawn from, so that a test finds a stale one
without matplotlib; with the release that drew it, the test draws it again and compares.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from codegen.artifacts import write_atomic  # noqa: E402
from profiles.report import counts  # noqa: E402
from profiles.roofline import FORMATS, Ceilings, Energies  # noqa: E402
from profiles.shapes import DecodeShape, parse  # noqa: E402

RESULTS = ROOT / "profiles" / "results"
DOCS = ROOT / "docs"
# tables with even batches of 32; of a shape in several the first one's row is drawn
SPEED_TABLES = ("lengths", "h200-table", "snapmla-fig5", "etap-fig1")
ROOFLINE_TABLE, POWER_TABLE, STAMPS, BIAS = "h200-table", "power", "stamps-h200", "qk-bias"
HEADS, BATCH = (16, 64, 128), 32
PEERS = {"flashmla_bf16": "FlashMLA BF16", "flashmla_fp8": "FlashMLA FP8"}
COLOURS = {"snapmla": "#2e7d4f", "flashmla_bf16": "#8a94a3", "flashmla_fp8": "#c08a2b"}
INK = "#33475f"
PHASES = (
    "#eceff3",
    "#c9ced6",
    "#f6d9a8",
    "#8fc3e8",
    "#c08a2b",
    "#8a3fa0",
    "#5b6b2f",
)  # up to each event
MERGE: dict[str, Any] = {"facecolor": "white", "edgecolor": INK, "hatch": "//"}
STYLE = {
    "svg.hashsalt": "snapmla", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "font.family": "DejaVu Sans", "legend.frameon": False,
}  # fmt: skip
Data = dict[str, Any]


class Missing(Exception):
    """A table that a plot needs is not committed yet; says which, and what makes it."""


def table(name: str, made_by: str) -> Data:
    """A committed result.  Raises Missing."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise Missing(f"no profiles/results/{name}.json: {made_by}")
    return json.loads(path.read_text("utf-8"))


def short(tokens: int) -> str:
    """16384 -> 16K, 2097152 -> 2M."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= size:
            return f"{tokens // size}{letter}"
    return str(tokens)


def card_of(report: Data) -> str:
    """The GPU's name without its maker's."""
    return str(report["machine"]["gpu"]).removeprefix("NVIDIA ")


# ---------------------------------------------------------------- speed over length


def speed_data() -> Data:
    """heads -> backend -> [[tokens, speed as a multiple of the fastest peer's in that run]]."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    commits: dict[str, str] = {}
    cards: set[str] = set()
    for name in SPEED_TABLES:
        if not (RESULTS / f"{name}.json").is_file():
            continue
        report = table(name, "")
        rows: dict[tuple[int, int], dict[str, float]] = {}
        for row in filter(counts, report["rows"]):
            shape = parse(row["shape"])
            if isinstance(shape, DecodeShape) and not shape.uneven and shape.s_q == 1:
                key = shape.num_heads, shape.seqlen
                if shape.batch == BATCH and shape.num_heads in HEADS:
                    rows.setdefault(key, {})[row["backend"]] = row["us"]
        whole = {k: v for k, v in rows.items() if {"snapmla", *PEERS} <= v.keys()}
        if whole.keys() - found.keys():
            commits[name], cards = report["commit"][:7], cards | {card_of(report)}
        found = {**whole, **found}
    if not found:
        raise Missing("no table of profiles/results has even batches of 32 beside both peers")
    lines: Data = {str(h): {b: [] for b in COLOURS} for h in HEADS}
    for (heads, tokens), us in sorted(found.items()):
        best = min(us[p] for p in PEERS)
        for backend in COLOURS:
            lines[str(heads)][backend].append([tokens, round(best / us[backend], 4)])
    return {"lines": lines, "commits": commits, "cards": sorted(cards)}


def draw_speed(data: Data) -> Any:
    """One panel a head count."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(HEADS), figsize=(9.0, 3.1), sharey=True)
    for panel, heads in zip(panels, HEADS, strict=True):
        for backend, points in data["lines"][str(heads)].items():
            x, y = zip(*points, strict=True)
            name = PEERS.get(backend, backend)
            width = 1.4 if backend in PEERS else 2.2
            panel.plot(x, y, "o-", color=COLOURS[backend], ms=3.5, lw=width, label=name)
        panel.set_xscale("log", base=2)
        ticks = sorted({t for line in data["lines"].values() for t, _ in line["snapmla"]})[::2]
        panel.set_xticks(ticks, [short(t) for t in ticks], fontsize=8)
        panel.set_xlim(ticks[0] * 0.8, 1.25 * ticks[-1] * 2)
        panel.set_title(f"{heads} heads", fontsize=10)
        panel.set_xlabel("tokens of a sequence")
        panel.grid(axis="y", lw=0.5, alpha=0.5)
    panels[0].set_ylabel("speed, fastest peer = 1")
    panels[0].set_ylim(bottom=0)
    panels[-1].legend(loc="lower left", fontsize=8)
    runs = ", ".join(f"{name} ({commit})" for name, commit in data["commits"].items())
    what = f"{' and '.join(data['cards'])}, batches of {BATCH}, one query token; tables {runs}"
    figure.text(0.995, 0.01, what, ha="right", va="bottom", fontsize=7, color=INK)
    figure.subplots_adjust(left=0.065, right=0.995, top=0.91, bottom=0.22, wspace=0.06)
    return figure


# ---------------------------------------------------------------- roofline


def roofline_data() -> Data:
    """Our rows' FLOP a byte and TFLOP/s, the roofs, and the power roof where it was measured."""
    report = table(ROOFLINE_TABLE, f"run `python -m profiles.bench {ROOFLINE_TABLE}`")
    used = Ceilings(**report["ceilings"]["used"])
    points = []
    for row in filter(counts, report["rows"]):
        shape = parse(row["shape"])
        if row["backend"] == "snapmla" and isinstance(shape, DecodeShape):
            intensity = round(row["flops"] / row["bytes"], 3)
            points.append([intensity, round(row["tflops"], 2), shape.tokens, shape.label])
    data = {
        "points": points, "read_gbs": used.read_gbs, "card": card_of(report),
        "peak": round(used.effective_tflops(FORMATS["snapmla"]), 1), "commit": report["commit"][:7],
        "energies": None,
    }  # fmt: skip
    if (RESULTS / f"{POWER_TABLE}.json").is_file():
        power = table(POWER_TABLE, "")
        if card_of(power) == data["card"]:
            data["energies"] = power["power"]["energies"]
    return data


def power_tflops(energies: Energies, intensity: float) -> float:
    """TFLOP/s that the power cap allows at so many FLOP a byte."""
    return 1e-6 / energies.row_us(1.0 / intensity, 1.0, FORMATS["snapmla"])


def draw_roofline(data: Data) -> Any:
    """Rows coloured by how many tokens all sequences have."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    x = [20 * (1200 / 20) ** (i / 200) for i in range(201)]
    roof = [min(data["peak"], data["read_gbs"] * 1e-3 * i) for i in x]
    label = f"{data['read_gbs']:.0f} GB/s; {data['peak']:.0f} TFLOP/s"
    axes.plot(x, roof, color=INK, lw=1.8, label=label)
    if data["energies"]:
        energies = Energies(**data["energies"])
        y = [min(r, power_tflops(energies, i)) for i, r in zip(x, roof, strict=True)]
        cap = f"power roof, {energies.cap_w:.0f} W"
        axes.plot(x, y, "--", color="#8a3fa0", lw=1.4, label=cap)
    totals = sorted({tokens for _, _, tokens, _ in data["points"]})
    colours = pyplot.get_cmap("viridis_r")
    for i, total in enumerate(totals):
        mine = [(a, b) for a, b, tokens, _ in data["points"] if tokens == total]
        colour = colours(0.1 + 0.9 * i / max(1, len(totals) - 1))
        u, v = zip(*mine, strict=True)
        axes.plot(u, v, "o", color=colour, ms=5, label=f"{short(total)} tokens")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    x_ticks, y_ticks = [32, 64, 128, 256, 512, 1024], [32, 64, 128, 256, 512, 1024]
    axes.set_xticks(x_ticks, list(map(str, x_ticks)))
    axes.set_yticks(y_ticks, list(map(str, y_ticks)))
    axes.set_xlim(x[0], x[-1])
    axes.set_xlabel("FLOP a byte (2·(576 + 512)·rows over 644, queries and results)")
    axes.set_ylabel("TFLOP/s")
    axes.grid(lw=0.5, alpha=0.4)
    axes.legend(fontsize=7.5, loc="lower right")
    note = f"{data['card']}, table {ROOFLINE_TABLE} ({data['commit']})"
    figure.text(0.995, 0.01, note, ha="right", va="bottom", fontsize=7, color=INK)
    figure.subplots_adjust(left=0.105, right=0.99, top=0.98, bottom=0.16)
    return figure


# ---------------------------------------------------------------- stamps


def stamps_data() -> Data:
    """Events of the shapes by length, as recorded."""
    report = table(STAMPS, f"run `python -m profiles.stamps --name {STAMPS}` (docs/lab-book.md)")
    entries = []
    for e in report["stamps"]:
        shape = parse(e["shape"])
        assert isinstance(shape, DecodeShape)
        if None not in e["events"].values():
            entries.append({
                "tokens": shape.seqlen, "name": f"{shape.num_heads * shape.s_q} rows",
                "events": e["events"], "merge_us": e["merge_us"],
            })  # fmt: skip
    return {"entries": entries, "card": card_of(report), "commit": report["commit"][:7]}


def draw_stamps(data: Data) -> Any:
    """One panel a length, one bar a head count: medians, with the range over CTAs."""
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    lengths = sorted({e["tokens"] for e in data["entries"]})
    figure, panels = pyplot.subplots(
        len(lengths), 1, figsize=(8.4, 0.6 + 1.35 * len(lengths)), squeeze=False
    )
    names = list(data["entries"][0]["events"])
    for panel, tokens in zip(panels[:, 0], lengths, strict=True):
        entries = [e for e in data["entries"] if e["tokens"] == tokens]
        for y, entry in enumerate(entries):
            left = 0.0
            for name, colour in zip(names, PHASES, strict=True):
                event = entry["events"][name]
                panel.barh(y, event["median"] - left, 0.55, left, color=colour)
                panel.plot([event["min"], event["max"]], [y, y], color=INK, lw=0.8)
                panel.plot([event["median"]], [y], "|", color=INK, ms=9)
                left = event["median"]
            if entry["merge_us"] is not None:
                end = entry["events"][names[-1]]["max"]
                panel.barh(y, entry["merge_us"], 0.55, end, **MERGE)
        panel.set_yticks(range(len(entries)), [e["name"] for e in entries])
        panel.invert_yaxis()
        panel.set_xlim(left=0)
        panel.set_title(f"{short(tokens)} tokens", fontsize=9, loc="left", pad=2)
    panels[-1, 0].set_xlabel("µs after the first CTA's entry; medians, lines from min to max")
    keys = [Patch(color=c, label=f"to: {n}") for n, c in zip(names, PHASES, strict=True)]
    keys.append(Patch(**MERGE, label="merge"))
    figure.legend(handles=keys, fontsize=7.5, ncol=4, loc="lower center")
    note = f"{data['card']}, {STAMPS} ({data['commit']})"
    figure.text(0.995, 0.995, note, ha="right", va="top", fontsize=7, color=INK)
    height = figure.get_figheight()
    figure.subplots_adjust(
        left=0.085, right=0.985, top=1 - 0.3 / height, bottom=1.0 / height, hspace=0.62
    )
    return figure


# ---------------------------------------------------------------- bias of LSE


def bias_data() -> Data:
    """Error of two merged ranks by their logit, and the bias of the matching one."""
    report = table(BIAS, "it is committed: `git checkout profiles/results`")
    points = [
        [r["logit"], *(r[name] for name in ("standard", "two", "high")), r["bias"]["standard"][0]]
        for r in report["merged"]
    ]
    return {"points": points, "card": card_of(report), "commit": report["commit"][:7]}


def merged_error(bias: float) -> float:
    """Relative L2 of a + b, orthogonal and of one size, where a is weighed exp(bias) of b."""
    weight = 1 / (1 + math.exp(-bias))
    return math.hypot(weight - 0.5, 0.5 - weight) / math.hypot(0.5, 0.5)


def draw_bias(data: Data) -> Any:
    """Measured points on the line that the bias predicts, and of exact logits below it."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.6, 3.2))
    logits, standard, two, high, biases = zip(*data["points"], strict=True)
    slope = sum(b / x for x, b in zip(logits, biases, strict=True)) / len(logits)
    x = [logits[0] * (logits[-1] / logits[0]) ** (i / 50) for i in range(51)]
    label = f"by a bias of {slope:.2e} of the logit".replace("e-0", "e-")
    axes.plot(x, [merged_error(slope * v) for v in x], color=INK, lw=1.2, label=label)
    axes.plot(logits, standard, "o", color=COLOURS["flashmla_fp8"], ms=7, label='"standard"')
    axes.plot(logits, two, "o", color=COLOURS["flashmla_bf16"], ms=3.5, label="two terms of P")
    axes.plot(logits, high, "o", color=COLOURS["snapmla"], ms=5, label='"high"')
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(logits, [f"{v:g}" for v in logits])
    axes.set_ylim(5e-8, 1.5)
    axes.set_xlabel("logit of the token that the query equals, on its rank")
    axes.set_ylabel("relative L2 of the merged output")
    axes.grid(lw=0.5, alpha=0.4)
    axes.legend(fontsize=8, loc="upper left")
    note = f"two ranks of equal LSE; {data['card']}, table {BIAS} ({data['commit']})"
    figure.text(0.995, 0.01, note, ha="right", va="bottom", fontsize=7, color=INK)
    figure.subplots_adjust(left=0.125, right=0.985, top=0.97, bottom=0.21)
    return figure


# ---------------------------------------------------------------- files


@dataclass(frozen=True)
class Plot:
    """A picture: its file in docs/, what it shows, how it is drawn."""

    file: str
    data: Callable[[], Data]
    draw: Callable[[Data], Any]

    @property
    def path(self) -> Path:
        return DOCS / self.file

    def text(self, data: Data) -> str:
        """The SVG, the same bytes of the same figures and matplotlib."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        with matplotlib.rc_context(STYLE):
            figure, sink = self.draw(data), io.StringIO()
            about = {"Date": None, "Description": f"data {digest(data)}"}
            figure.savefig(sink, format="svg", metadata=about)
            pyplot.close(figure)
        return "\n".join(line.rstrip() for line in sink.getvalue().splitlines()) + "\n"

    def stale(self, data: Data) -> bool:
        """Whether the file shows other figures; with its matplotlib, whether it differs at all."""
        old = self.path.read_text("utf-8") if self.path.is_file() else ""
        if f"data {digest(data)}<" not in old:
            return True
        return drawn_by(old) == matplotlib_version() and old != self.text(data)


PLOTS = (
    Plot("speed.svg", speed_data, draw_speed),
    Plot("roofline.svg", roofline_data, draw_roofline),
    Plot("stamps.svg", stamps_data, draw_stamps),
    Plot("lse-bias.svg", bias_data, draw_bias),
)


def digest(data: Data) -> str:
    """Of the figures that a plot shows."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def drawn_by(svg: str) -> str | None:
    """The release of matplotlib that a picture names."""
    found = re.search(r"Matplotlib v([\w.]+)", svg)
    return found[1] if found else None


def matplotlib_version() -> str:
    """Of the one installed, empty if none is."""
    try:
        import matplotlib
    except ImportError:
        return ""
    return str(matplotlib.__version__)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, name stale pictures")
    check, bad = parser.parse_args().check, False
    for plot in PLOTS:
        try:
            data = plot.data()
        except Missing as error:
            print(f"{plot.file} is not drawn, {error}")
            continue
        if check or not matplotlib_version():
            if plot.stale(data):
                bad = True
                print(f"docs/{plot.file} is stale: python docs/plots.py, which needs matplotlib")
            continue
        write_atomic(plot.path, plot.text(data))
        print(plot.path.relative_to(ROOT))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
