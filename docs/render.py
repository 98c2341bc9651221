"""Writes what the docs generate from the code: ``api.md``, pictures and tables between markers.

    python docs/render.py            # write
    python docs/render.py --check    # name what is stale, exit 1 if anything is

The API page comes from docstrings (``api_page.py``), byte maps from ``snapmla.layouts``: real
caches are allocated and the addresses of their bytes drawn, so a picture cannot disagree with the
code.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import speeds  # noqa: E402
import support  # noqa: E402
import torch  # noqa: E402
from api_page import api_page  # noqa: E402

import snapmla  # noqa: E402
from dsl_kernels.formats.registered import FORMATS  # noqa: E402
from snapmla.cache import layouts  # noqa: E402
from snapmla.runtime import env  # noqa: E402

API = ROOT / "docs" / "api.md"
README = ROOT / "README.md"
PAGES = ("formats", "integration", "numerics", "performance")
FILLED = (README, *(ROOT / "docs" / f"{name}.md" for name in PAGES))
RESULTS = ROOT / "profiles" / "results"
SPEED = "h200-table"
ALONE = ("power-alone", "power")  # rows each alone on the card, the first table that is there
OTHER_CARDS = ("h100-table",)  # the same shapes on other cards, one sentence each
PEERS = {"flashmla_bf16": "BF16", "flashmla_fp8": "FP8 (one scale per tensor)"}
SHAPES = (
    "b32_L16384_h16_q1", "b32_L16384_h64_q1", "b32_L16384_h128_q1", "b16_L1024_h16_q1",
    "b16_L65536_h16_q1", "b1_L131072_h16_q1",
)  # fmt: skip
PICTURE_PAGE = 64  # tokens of a page in the pictures
BAR = 64  # characters of a byte map


# ---------------------------------------------------------------- byte maps


@dataclasses.dataclass(frozen=True)
class Field:
    """Bytes [begin, end) of one allocation, and what lies there."""

    begin: int
    end: int
    label: str


def bar(fields: list[Field], stop: int) -> str:
    """A byte map: offsets above, boxes, labels inside; not to scale where a field is narrow."""
    cells = [max(len(f.label) + 2, round(BAR * (f.end - f.begin) / stop)) for f in fields]
    top = ""
    for f, width in zip(fields, cells):
        top += str(f.begin).ljust(width + 1)
    lines = [top + str(stop), "", "", ""]
    lines[1] = "┌" + "┬".join("─" * w for w in cells) + "┐"
    lines[2] = "│" + "│".join(f.label.center(w) for f, w in zip(fields, cells)) + "│"
    lines[3] = "└" + "┴".join("─" * w for w in cells) + "┘"
    return "\n".join(lines)


def picture(name: str, page: int = PICTURE_PAGE) -> str:
    """Byte maps of one layout, measured on a real cache of three pages."""
    content, rope, scale = layouts.LAYOUTS[name].allocate(3, page, torch.device("cpu"))
    views = {
        "content": (content, f"{page} x 512 e4m3"),
        "rope": (rope, f"{page} x 64 bf16"),
        "scale": (scale, f"{page} fp32"),
    }
    lines = []
    groups: dict[int, list[str]] = {}
    for label, (view, _) in views.items():
        groups.setdefault(view.untyped_storage().data_ptr(), []).append(label)
    for storage, labels in groups.items():
        stride = max(v.stride(0) * v.element_size() for v, _ in (views[k] for k in labels))
        fields = []
        by_row = len(labels) > 1 and views[labels[0]][0].stride(1) > layouts.KV_LORA_RANK
        for label in labels:
            view, text = views[label]
            start = view.data_ptr() - storage
            size = view.element_size()
            one = view.shape[2] * size if view.ndim == 3 else size
            length = one if by_row else (page - 1) * view.stride(1) * size + one
            fields.append(Field(start, start + length, label if by_row else f"{label} {text}"))
        if by_row:
            row = views[labels[0]][0].stride(1)
            lines.append(f"one token of {row} bytes, {page} of them a page of {stride} bytes")
            lines.append(bar(fields, row))
        else:
            what = "one page" if len(labels) > 1 else f"tensor {labels[0]}, one page"
            lines.append(f"{what}: {stride} bytes")
            lines.append(bar(fields, stride))
        lines.append("")
    return "\n".join(lines).rstrip()


def bytes_picture(fmt: str, page: int = PICTURE_PAGE) -> str:
    """Byte maps of a token of a format of bytes, one for each plane, measured on a real cache."""
    cache = snapmla.PagedKVCache.allocate(3, page, device="cpu", dtype=fmt)
    record, (kv,) = FORMATS[fmt], cache.named_tensors.values()
    views = {"content": cache.content, "scale": cache.scale, "rope": cache.rope}
    planes: dict[int, list[Field]] = {}
    for label, view in views.items():
        if view is None or not view.shape[2]:
            continue
        at, count = view.data_ptr() - kv.data_ptr(), view.shape[2]
        token = view.stride(1) * view.element_size()
        plane = next(p for p in range(len(record.planes)) if at < page * record.begins(p + 1))
        assert token == record.planes[plane]
        start = at - page * record.begins(plane)
        text = f"{label} x {count}" if label == "scale" else label
        size = count * view.element_size()
        planes.setdefault(plane, []).append(Field(start, start + size, text))
    lines = []
    for plane, fields in sorted(planes.items()):
        row, fields = record.planes[plane], sorted(fields, key=lambda f: f.begin)
        first = page * record.begins(plane)
        where = f"{page} of them a page of {kv.stride(0)} bytes"
        if len(record.planes) > 1:
            where = f"{page} of them from byte {first} on of a page of {kv.stride(0)} bytes"
        if fields[-1].end < row:
            fields.append(Field(fields[-1].end, row, "any"))
        lines += [f"one token of {row} bytes, {where}", bar(fields, row)]
    return "\n".join(lines)


def strides_table(page: int = PICTURE_PAGE) -> str:
    """Strides in bytes of every layout: page and token."""
    head = "| layout | content | rope | scale |\n|---|---|---|---|"
    rows = []
    for name, layout in layouts.LAYOUTS.items():
        views = layout.allocate(2, page, torch.device("cpu"))
        cells = [
            f"page {v.stride(0) * v.element_size()}, token {v.stride(1) * v.element_size()}"
            for v in views
        ]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join([head, *rows])


def environment_rows() -> str:
    """The table of environment variables."""
    head = "| environment variable | default | what |\n|---|---|---|"
    rows = [
        f"| `{v.name}` | {f'`{v.default}`' if v.default else ''} | {v.doc} |" for v in env.TABLE
    ]
    return "\n".join([head, *rows])


def search_order() -> str:
    """Where variants are looked for, in order."""
    everything = {env.VARIANT_DIR.name: "set", "XDG_CACHE_HOME": "set"}
    wheel = env.Place("an installed `snapmla-kernels-sm90-cu13`", Path(), False)
    with (
        mock.patch.dict(os.environ, everything),
        mock.patch.object(env, "kernel_wheels", return_value=(wheel,)),
    ):
        listed = [place.what for place in env.places()]
    sentence = f"A server finds its variants in {', then in '.join(listed)}."
    return textwrap.fill(sentence, 106, break_on_hyphens=False)


# ---------------------------------------------------------------- the README's numbers


def _report(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def speed_block() -> str:
    """Decode times beside the peers', from the committed table."""
    report = _report(SPEED)
    times: dict[str, dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        if row["status"] == "ok" and row["check_ok"]:
            times.setdefault(row["shape"], {})[row["backend"]] = row
    lines = [
        "| batch × tokens, heads, query tokens | snapmla µs (of roof) | FlashMLA BF16 µs | "
        "FlashMLA FP8 µs |",
        "|---|---|---|---|",
    ]
    for shape in SHAPES:
        found = re.fullmatch(r"b(\d+)_L(\d+)_h(\d+)_q(\d+)", shape)
        row = times.get(shape, {})
        if found is None or not {"snapmla", *PEERS} <= set(row):
            continue
        ours = row["snapmla"]
        cells = [f"{row[p]['us']:.1f} ({row[p]['us'] / ours['us']:.2f}×)" for p in PEERS]
        share = f"{ours['us']:.1f} ({100 * ours['roof_us'] / ours['us']:.0f} %)"
        what = f"{found[1]} × {found[2]}, {found[3]}, {found[4]}"
        lines.append(f"| {what} | {share} | {cells[0]} | {cells[1]} |")
    others = [name for name in OTHER_CARDS if (RESULTS / f"{name}.json").is_file()]
    tables = [_speed_words(_report(name), name) for name in (SPEED, *others)]
    shapes = len({row["shape"] for row in report["rows"] if row["backend"] == "snapmla"})
    words = [*_alone_words(), f"{shapes} shapes: {'; '.join(tables)}."]
    head = textwrap.wrap(" ".join(words), 119, break_on_hyphens=False, break_long_words=False)
    return "\n".join([*head, "", *lines])


def _alone_words() -> list[str]:
    """Ratios of rows that each ran alone beside the same rows in turn, the lower first."""
    name = next((name for name in ALONE if (RESULTS / f"{name}.json").is_file()), "")
    if not name:
        return []
    report, words = _report(name), []
    rows = {(r["shape"], r["backend"]): r for r in report["rows"] if r.get("alone_us")}
    for peer, label in PEERS.items():
        pairs = [(r, rows[shape, "snapmla"]) for (shape, who), r in rows.items()
                 if who == peer and (shape, "snapmla") in rows]  # fmt: skip
        if not pairs:
            continue
        both = []
        for key, how in (("alone_us", "alone"), ("us", "in turn")):
            each = [theirs[key] / ours[key] for theirs, ours in pairs]
            mean = math.exp(sum(map(math.log, each)) / len(each))
            both.append((mean, f"{mean:.2f}× ({min(each):.2f}×) {how}"))
        words.append(f"its {label} kernel {' and '.join(text for _, text in sorted(both))}")
    if not words:
        return []
    count = len({shape for shape, _ in rows})
    return [
        f"Speed beside FlashMLA on an {_card(report)}, geometric mean (and least): "
        f"{'; '.join(words)}, {count} shapes ([table](profiles/results/{name}.md)). In turn, which "
        "flatters who lowers the card's clock more, is all that follows."
    ]


def _card(report: dict[str, Any]) -> str:
    return str(report["machine"]["gpu"]).removeprefix("NVIDIA ").partition(" ")[0]


def _speed_words(report: dict[str, Any], name: str) -> str:
    """How fast we are beside FlashMLA's kernels on a table's card, in words."""
    summary = {(s["ours"], s["peer"]): s for s in report["summary"]}
    words = []
    for peer, label in PEERS.items():
        s = summary["snapmla", peer]
        words.append(f"{label.partition(' ')[0]} {s['geomean']:.2f}× ({s['worst']:.2f}×)")
    link = f"[{_card(report)}](profiles/results/{name}.md)"
    return f"{link} at `{report['commit'][:7]}` {' and '.join(words)}"


def accuracy_block() -> str:
    """Error by length beside the peer's, from the committed sweep."""
    errors: dict[tuple[str, int], float] = {}
    for result in _report("check_decode_sweep")["results"]:
        found = re.fullmatch(r"h16 std 0.1 mean 2 L (\d+)", result["group"])
        if found and result["pipeline"] in ("etap", "flashmla_fp8"):
            key = (result["pipeline"], int(found[1]))
            errors[key] = max(errors.get(key, 0.0), result["figures"]["to fp64"])
    lengths = sorted({length for _, length in errors})
    names = [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths]
    names = [f"{n // 1048576}M" if n >= 1 << 20 else text for n, text in zip(lengths, names)]
    lines = [f"| tokens | {' | '.join(names)} |", "|---" * (len(lengths) + 1) + "|"]
    for pipeline, label in (("etap", "snapmla"), ("flashmla_fp8", "FlashMLA FP8")):
        cells = [
            "" if (pipeline, n) not in errors else f"{errors[pipeline, n]:.1e}".replace("e-0", "e-")
            for n in lengths
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    head = (
        "Accuracy: relative L2 to fp64 on each kernel's own quantised inputs, 16 heads, "
        "near-uniform attention, latent mean 2σ "
        "([the whole sweep](../profiles/results/check_decode_sweep.md)):"
    )
    return "\n".join([*textwrap.wrap(head, 105), "", *lines])


def explain_block() -> str:
    """What the dispatcher says of one call; without what this machine happens to have built."""
    text = str(snapmla.explain(16, 1, batch=32, seqlen=16384, card="H200"))
    return f"```text\n{text.replace(' (not built here)', '')}\n```"


def blocks() -> dict[str, str]:
    """Generated text by marker."""
    found = {f"picture {name}": f"```text\n{picture(name)}\n```" for name in layouts.LAYOUTS}
    named = [name for name, each in FORMATS.items() if each.named]
    found |= {f"picture {name}": f"```text\n{bytes_picture(name)}\n```" for name in named}
    return {
        **found,
        "strides": strides_table(),
        "environment": environment_rows(),
        "search order": search_order(),
        "explain": explain_block(),
        "speed": speed_block(),
        "support": support.matrix(),
        "formats": support.formats(),
        "accuracy": accuracy_block(),
        **speeds.blocks(),
    }


def filled(text: str) -> str:
    """A page with the blocks between its markers made anew."""
    known = blocks()

    def fill(found: re.Match[str]) -> str:
        return f"<!-- begin {found[1]} -->\n{known[found[1]]}\n<!-- end -->"

    return re.sub(r"<!-- begin ([a-z0-9_ ]+) -->\n.*?<!-- end -->", fill, text, flags=re.S)


def pages() -> dict[Path, str]:
    """What each generated page should hold."""
    return {API: api_page(), **{page: filled(page.read_text("utf-8")) for page in FILLED}}


def stale() -> list[Path]:
    """Pages that differ from what the code says.

    The README's numbers may lag behind a newer table: they name the commit that they come from.
    """
    found = []
    for path, text in pages().items():
        old = path.read_text("utf-8") if path.is_file() else ""
        if path == README and f"commit\n`{_report(SPEED)['commit'][:7]}`" not in _joined(old):
            continue
        if old != text:
            found.append(path)
    return found


def _joined(text: str) -> str:
    """Text with one break between words, however it was wrapped."""
    return re.sub(r"commit\s+`", "commit\n`", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, name stale pages")
    if parser.parse_args().check:
        found = stale()
        for path in found:
            print(f"{path.relative_to(ROOT)} is stale: run python docs/render.py")
        return 1 if found else 0
    from codegen.artifacts import write_atomic

    for path, text in pages().items():
        write_atomic(path, text)
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
