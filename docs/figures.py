"""Draws ``docs/tile.svg``: the data flow of one tile, from what the kernel declares.

    python docs/figures.py            # write
    python docs/figures.py --check    # exit 1 if the picture is stale

Every number comes from ``budget(spec)`` of the kernel module, or is a product of its MMA shapes and
the format's widths; only positions and words are written here.  Plain SVG text, no dependency; it
asks the kernel module, so it needs the compiler.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from codegen.artifacts import write_atomic  # noqa: E402
from dsl_kernels import registry  # noqa: E402
from dsl_kernels.blocks import budget as bud  # noqa: E402
from dsl_kernels.formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM, TOKEN_TILE  # noqa: E402
from dsl_kernels.spec import VariantSpec, decode_spec  # noqa: E402

TARGET = ROOT / "docs" / "tile.svg"
SPEC = decode_spec("etap", 64, 64, "bf16")
WIDTH, HEIGHT = 1160, 872
THREADS = 32 * bud.WARPS_IN_GROUP
Area = tuple[float, float, float, float]  # left, top, width, height
Paint = tuple[str, str]  # fill, edge
GLOBAL, SHARED, WARPS = ("#eceff3", "#8a94a3"), ("#dcebfa", "#3f7cb8"), ("#fdeccd", "#c08a2b")
MATH, PAPER = ("#ddf1dd", "#4a9152"), ("#ffffff", "#c9ced6")
INK, PALE, DATA, SIGNAL = "#1d2430", "#5b6675", "#33475f", "#8a3fa0"
TILES = ("#e3e6ea", "#cfe3f7", "#ffe0a8", "#cdebcf")  # one colour a stage in the timeline
IDLE = -9
MBARRIERS = "copies × arrivals that complete a phase"
CHARACTER = 6.4  # width of one of small text, about


@dataclass(frozen=True)
class Facts:
    """Numbers of the picture, all derived from the declared budget."""

    spec: VariantSpec
    budget: bud.Budget

    @classmethod
    def of(cls, spec: VariantSpec) -> Facts:
        budget = registry.budget(spec)
        if budget is None:
            raise ValueError(f"{spec.name}: its module declares no budget")
        return cls(spec, budget)

    def barrier(self, name: str) -> bud.Barrier:
        return next(b for b in self.budget.barriers if b.name == name)

    def mma(self, name: str) -> bud.Mma:
        return next(m for m in self.budget.mmas if m.name == name)

    def group(self, name: str) -> bud.WarpGroup:
        return next(g for g in self.budget.groups if g.name == name)

    def registers_of(self, m: int, n: int) -> int:
        """fp32 accumulator registers a thread of a warpgroup's m x n tile."""
        return m * n // THREADS

    @property
    def rows(self) -> int:
        return min(self.spec.row_tile, TOKEN_TILE)

    @property
    def q_bytes(self) -> int:
        return self.rows * (KV_LORA_RANK + 2 * QK_ROPE_HEAD_DIM)

    @property
    def stage(self) -> tuple[int, int, int]:
        """Bytes of content, RoPE and scales of a stage of the ring."""
        return TOKEN_TILE * KV_LORA_RANK, TOKEN_TILE * 2 * QK_ROPE_HEAD_DIM, TOKEN_TILE * 4

    @property
    def p_bytes(self) -> int:
        return self.rows * TOKEN_TILE

    @property
    def chains(self) -> int:
        """Partial sums of Q.K over the content channels."""
        return KV_LORA_RANK // self.mma("Q.K content").k

    @property
    def channels(self) -> int:
        """Output channels of one P.V warpgroup."""
        return KV_LORA_RANK // self.group("P.V").count


@dataclass
class Svg:
    """Elements of a picture, in painting order."""

    lines: list[str] = field(default_factory=list)

    def box(self, at: Area, paint: Paint, extra: str = "") -> None:
        x, y, w, h = at
        self.lines.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="{paint[0]}" '
            f'stroke="{paint[1]}" {extra}/>'
        )

    def text(
        self, x: float, y: float, words: str, kind: str = "", anchor: str = "start", ink: str = INK
    ) -> None:
        style = f' class="{kind}"' if kind else ""
        place = f'x="{x}" y="{y}"{style} text-anchor="{anchor}"'
        self.lines.append(f'<text {place} fill="{ink}">{escape(words)}</text>')

    def block(self, at: Area, paint: Paint, title: str, *rows: str) -> None:
        """A box with a bold title and lines of small text; raises ValueError if one is too long."""
        self.box(at, paint)
        self.text(at[0] + 9, at[1] + 19, title, "bold")
        for i, row in enumerate(rows):
            if CHARACTER * len(row) > at[2] - 9:
                raise ValueError(f"does not fit into its box: {row}")
            inset = 10 if row.startswith(" ") else 0
            self.text(at[0] + 9 + inset, at[1] + 39 + 18 * i, row.strip(), "small")

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line with a head at its last point; a pale edge keeps crossings apart."""
        path = '<path fill="none" d="M' + " L".join(f"{x} {y}" for x, y in points) + '"'
        self.lines.append(f'{path} stroke="#ffffff" stroke-width="5.8"/>')
        self.lines.append(f'{path} stroke="{DATA}" stroke-width="1.8" marker-end="url(#head)"/>')

    def pill(self, x: float, y: float, words: str) -> None:
        """The name of a barrier on the arrow that it guards, centred at (x, y)."""
        w = 7.0 * len(words) + 10
        self.lines.append(
            f'<rect x="{x - w / 2}" y="{y - 9}" width="{w}" height="17" rx="8" fill="#f6ebf9" '
            f'stroke="{SIGNAL}" stroke-width="0.8"/>'
        )
        self.text(x, y + 3.5, words, "mono", "middle", SIGNAL)

    def __str__(self) -> str:
        return "\n".join([*self.lines, "</svg>", ""])


HEAD = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" \
width="{WIDTH}" height="{HEIGHT}" font-family="DejaVu Sans, Verdana, Helvetica, Arial, sans-serif" \
font-size="13">
<style>
.title {{ font-size: 18px; font-weight: bold }}
.bold {{ font-weight: bold }}
.small {{ font-size: 12px }}
.mono {{ font-size: 11px; font-family: DejaVu Sans Mono, Menlo, Consolas, monospace }}
</style>
<defs>
<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" \
orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{DATA}"/></marker>
</defs>"""

# columns: left edge and width
LEFT, PRODUCERS, SMEM, CORE, RIGHT = (16, 128), (170, 168), (400, 212), (722, 276), (1044, 100)


def heading(svg: Svg, f: Facts) -> None:
    """Paper, title, and the outline of the CTA."""
    svg.box((1, 1, WIDTH - 2, HEIGHT - 2), PAPER)
    svg.text(16, 30, f"One tile of {TOKEN_TILE} tokens through {f.spec.name}", "title")
    pool = " + ".join(
        f"{g.count} × {g.registers}" if g.count > 1 else str(g.registers) for g in f.budget.groups
    )
    svg.text(
        16, 50, f"one CTA: {f.budget.threads} threads; registers a thread by warpgroup {pool}, in "
        f"all {f.budget.registers:,} of {bud.REGISTERS:,}; at most {f.budget.smem:,} of "
        f"{bud.SMEM_MAX:,} bytes of shared memory", "small", ink=PALE,
    )  # fmt: skip
    outline = 'stroke-dasharray="6 4" stroke-width="1.3"'
    svg.box((158, 64, 854, 546), ("#fafbfc", PALE), outline)
    for (x, w), words in (
        (PRODUCERS, "warpgroup 0"), (SMEM, "shared memory"), (CORE, "registers"),
    ):  # fmt: skip
        svg.text(x + w / 2, 84, words, "bold", "middle", PALE)
    for (x, w), words in ((LEFT, "global memory"), (RIGHT, "global memory")):
        svg.text(x + w / 2, 84, words, "bold", "middle", PALE)


def inputs(svg: Svg, f: Facts) -> None:
    """Global memory on the left, the arrows of TMA, and the warps that start them."""
    x, w = LEFT
    right, edge = x + w, SMEM[0]
    svg.block(
        (x, 96, w, 72), GLOBAL, "query rows", f"{f.rows} × {KV_LORA_RANK} e4m3",
        f"{f.rows} × {QK_ROPE_HEAD_DIM} bf16",
    )  # fmt: skip
    svg.block(
        (x, 264, w, 122), GLOBAL, "cache pages", f"{KV_LORA_RANK} e4m3",
        f"{QK_ROPE_HEAD_DIM} bf16, σ fp32", "found through", "block_table,", "ids clamped",
    )  # fmt: skip
    svg.arrow((right, 132), (edge, 132))
    svg.arrow((right, 326), (edge, 326))
    x, w = PRODUCERS
    registers = f"{f.group('producers').registers} registers a thread"
    svg.block((x, 104, w, 58), WARPS, "warp 1: Q producer", "TMA, once an item")
    svg.block((x, 186, w, 58), WARPS, "warp 2: scale warp", "σ → σ, log2 σ, 1/σ")
    svg.block(
        (x, 280, w, 92), WARPS, "warp 0: KV producer", "TMA: content, RoPE", "bulk copy: σ",
        f"{f.barrier('k_full').copies} tiles in flight",
    )  # fmt: skip
    svg.text(x + w / 2, 400, registers, "small", "middle", PALE)
    svg.pill(x + w + 27, 132, "q_full")
    svg.pill(x + w + 27, 326, "k_full")


def shared(svg: Svg, f: Facts) -> None:
    """The arrays in shared memory, with their bytes."""
    x, w = SMEM
    copies = f.barrier("q_full").copies
    svg.block(
        (x, 96, w, 62), SHARED, f"Q  {copies} × {f.q_bytes:,} B",
        f"{f.rows} rows of {f.q_bytes // f.rows} bytes",
    )  # fmt: skip
    stages = f.barrier("sigma_full").copies
    svg.block((x, 184, w, 62), SHARED, f"scale triples, {stages} stages", "σ, log2 σ, 1/σ a token")
    stages = f.barrier("k_full").copies
    svg.box((x, 270, w, 154), SHARED)
    svg.text(x + 9, 289, f"K ring  {stages} × {sum(f.stage):,} B", "bold")
    cells = (("content", 96), ("RoPE", 50), ("σ", 34))
    for i in range(stages):
        left, y = x + 9, 298 + 26 * i
        svg.text(left + 4, y + 16, str(i), "mono", ink=PALE)
        left += 16
        for (name, width), size in zip(cells, f.stage, strict=True):
            svg.box((left, y, width, 23), ("#f4f9ff", SHARED[1]), 'stroke-width="0.7"')
            label = f"{size:,}" if i else name
            svg.text(left + width / 2, y + 15.5, label, "mono", "middle")
            left += width
    svg.text(x + 9, 418, "V is the content of the same tile", "small", ink=PALE)
    copies = f.barrier("p_full").copies
    svg.block(
        (x, 446, w, 62), SHARED, f"P  {copies} × {f.p_bytes:,} B", "e4m3; with it β, γ, moved?",
    )  # fmt: skip
    svg.block((x, 532, w, 62), SHARED, "1/l", "a row's sum, once an item")


def core(svg: Svg, f: Facts) -> None:
    """The warpgroups that compute, and what their registers hold."""
    x, w = CORE
    content, rope, pv = (f.mma(n) for n in ("Q.K content", "Q.K RoPE", "P.V"))
    s = f.registers_of(content.m, content.n)
    softmax, group = f.group("softmax"), f.group("P.V")
    svg.block(
        (x, 96, w, 196), MATH, "warpgroup 1: softmax",
        f"{softmax.registers} registers a thread",
        f"S = Q·Kᵀ, {content.m} × {content.n} fp32: {f.chains} × {s} registers",
        f"  k = {f.chains} × {content.k} {content.dtype}, then {rope.k} {rope.dtype}",
        "t = S · scales + log2 σ; masked",
        "m′ = max t of the row's block",
        "P′ = exp2(t − m′ + 8);  l += Σ P′/σ",
        "β = 2^(m′ − 8 − frame);  γ if it moved",
        "P = e4m3(P′) → shared memory",
    )  # fmt: skip
    o, blocks = f.registers_of(f.channels, f.rows), f.channels // pv.m
    svg.block(
        (x, 322, w, 186), MATH, "warpgroups 2, 3: P·V",
        f"{group.registers} registers a thread",
        f"each: {f.channels} of {KV_LORA_RANK} channels of {f.rows} rows",
        "Vᵀ as A operand, in registers:",
        "  ldmatrix.trans + prmt",
        f"Vᵀ·Pᵀ, {pv.m} × {pv.n}, k = {pv.k} {pv.dtype}:",
        f"  {f.registers_of(pv.m, pv.n)} registers, {blocks} × {f.rows // pv.n} times a tile",
        f"Oᵀ += β · (Vᵀ·Pᵀ), fp32: {o} registers",
        "  (γ · Oᵀ first if a frame moved)",
    )  # fmt: skip
    svg.block((x, 532, w, 62), MATH, "at the item's end", "rows of Oᵀ · (1/l)")


def flows(svg: Svg, f: Facts) -> None:
    """Arrows between shared memory, warps and results."""
    edge, wall = SMEM[0] + SMEM[1], CORE[0]
    label = (edge + wall) / 2 - 16
    # P, beta and 1/l leave the softmax warpgroup by one lane each
    svg.arrow((wall, 262), (wall - 14, 262), (wall - 14, 461), (edge, 461))
    svg.arrow((wall, 240), (wall - 28, 240), (wall - 28, 549), (edge, 549))
    for y, words in ((127, "A operand"), (279, "B operand"), (400, "as Vᵀ")):
        svg.arrow((edge, y), (wall, y))
        svg.text(label, y - 7, words, "small", "middle")
    svg.text(label, 454, "P, β, γ", "small", "middle")
    svg.text(label, 542, "1/l", "small", "middle")
    for y, name in ((215, "sigma"), (490, "p_full"), (576, "inv_full")):
        svg.arrow((edge, y), (wall, y))
        svg.pill(label - 3, y, name)
    # sigma of a stage to the scale warp and back as triples
    left, right = SMEM[0], PRODUCERS[0] + PRODUCERS[1]
    svg.arrow((left, 290), (right + 32, 290), (right + 32, 229), (right, 229))
    svg.arrow((right, 201), (left, 201))
    x, w = RIGHT
    svg.block((x, 150, w, 56), GLOBAL, "lse", "or a slot")
    svg.block((x, 532, w, 62), GLOBAL, "out", "or a slot")
    end = CORE[0] + CORE[1]
    svg.arrow((CORE[0] + CORE[1] / 2, 508), (CORE[0] + CORE[1] / 2, 532))
    svg.arrow((end, 178), (x, 178))
    svg.arrow((end, 563), (x, 563))


def barriers(svg: Svg, f: Facts) -> None:
    """Every mbarrier of the budget: copies, arrivals, who."""
    svg.text(16, 640, f"mbarriers: {MBARRIERS}", "bold")
    for i, b in enumerate(f.budget.barriers):
        y = 664 + 20.5 * i
        svg.pill(60, y - 4, b.name)
        who = " + ".join(
            role if n == 1 and b.count == 1 else f"{n} {role}" for role, n in b.arrivals.items()
        )
        svg.text(118, y, f"{b.copies} × {b.count}", "mono")
        tail = " (and the bytes of TMA)" if b.name in ("q_full", "k_full") else ""
        svg.text(176, y, who + tail, "small")
    svg.text(
        16, 856, "one lane arrives for its warp; *_full: data is there, *_empty: its stage is free",
        "small", ink=PALE,
    )  # fmt: skip


Spans = list[tuple[float, str, int]]  # share of the width, words, tile - i (IDLE: nothing)


def lanes(ring: int) -> dict[str, Spans]:
    """Who works on what while softmax takes tiles i and i + 1; ``ring``: stages."""
    tma = [f"TMA i + {ring - 2 + n}" for n in range(3)]
    return {
        "KV producer": [(0.27, tma[0], ring - 2), (0.5, tma[1], ring - 1), (0.23, tma[2], ring)],
        "scale warp": [(0.14, "", IDLE), (0.2, "σ i+1", 1), (0.3, "", IDLE), (0.2, "σ i+2", 2)],
        "softmax": [
            (0.17, "Q·K i", 0), (0.33, "exp2, P i", 0), (0.17, "Q·K i+1", 1),
            (0.33, "exp2, P i+1", 1),
        ],
        "P·V": [
            (0.33, "WGMMA, FFMA i−1", -1), (0.17, "Vᵀ i", 0), (0.33, "WGMMA, FFMA i", 0),
            (0.17, "Vᵀ i+1", 1),
        ],
    }  # fmt: skip


def timeline(svg: Svg, f: Facts) -> None:
    """Who works on which tile at a time; not to scale."""
    x, y, width = 666, 652, 478
    svg.text(580, 640, "in time, not to scale (colour: stage of the ring)", "bold")
    ring = f.barrier("k_full").copies
    for row, (name, spans) in enumerate(lanes(ring).items()):
        top, left = y + 34 * row, float(x)
        svg.text(x - 8, top + 18, name, "small", "end")
        for share, words, number in spans:
            span = round(width * share, 1)
            if number != IDLE:
                colour = TILES[(number + 1) % ring % len(TILES)]
                svg.box((left, top, span - 2, 26), (colour, PALE), 'stroke-width="0.7"')
                svg.text(round(left + span / 2, 1), top + 17, words, "small", "middle")
            left = round(left + span, 1)
    words_below = (
        "P·V loads Vᵀ of a tile before its P is there; the fp32 adds of one product run beside",
        "the next WGMMA. A stage is free when softmax and then P·V have read it: TMA follows.",
    )
    for i, line in enumerate(words_below):
        svg.text(580, 812 + 18 * i, line, "small")


def tile(spec: VariantSpec = SPEC) -> str:
    """The picture's text.  Raises ValueError if the module of ``spec`` declares no budget."""
    facts, svg = Facts.of(spec), Svg([HEAD])
    for part in (heading, inputs, shared, core, flows, barriers, timeline):
        part(svg, facts)
    return str(svg)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, name a stale picture")
    text = tile()
    if parser.parse_args().check:
        if TARGET.is_file() and TARGET.read_text("utf-8") == text:
            return 0
        print(f"{TARGET.relative_to(ROOT)} is stale: run python docs/figures.py")
        return 1
    write_atomic(TARGET, text)
    print(TARGET.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
