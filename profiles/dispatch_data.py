"""Makes ``snapmla/data/decode_costs.json``, what the dispatcher knows of time, from the tables.

    python -m profiles.dispatch_data            # after a new H200 table was committed

Of pipeline ``f16`` it is ``logits_cost.md``; of sparse decode they are ``sparse_tiles*.md`` of an
H200 and an H100, a block for each.  Per pipeline and row tile it fits ``us = fixed_us + tile_us *
(tiles a part walks)`` to the rows of the committed tables (least squares of the relative error; of
sparse decode a part's items count as tiles, too, and there is ``cut_us`` where lists are cut:
``snapmla.rank.load``); the rows themselves go along as measured points, which override the
model.  Nothing here touches a GPU.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from codegen.artifacts import write_atomic
from dsl_kernels.families.fp8_decode import FAMILY
from dsl_kernels.formats.registered import FORMATS as COSTED
from dsl_kernels.spec import VariantSpec
from profiles.roofline import FORMATS, card_by_name
from snapmla.rank import Load, Share, parts_of, parts_of_lists, unit_rows
from snapmla.sparse.plan import sparse_spec

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "profiles" / "results"
TARGET = ROOT / "snapmla" / "data" / "decode_costs.json"
CARD = "H200"
OP = FAMILY.op
DUAL_WG = "snapmla:dual_wg"
BOTH = ("snapmla", DUAL_WG)  # default options only, so that rows are comparable
TABLES = ("h200-table", "etap-fig1", "snapmla-fig5", "snapmla-fig6")
LOGITS, EXACT = "logits_cost", "f16"  # table of a pipeline beside the default, and which
SHORTEST = 512  # tokens of a sequence there; shorter ones are left whole, which is no line's work
# Sparse decode: table and card; of each of its caches pipeline and format.
SPARSE_TABLES = {"sparse_tiles": "H200", "sparse_tiles-h100": "H100 SXM"}
SPARSE_CACHES = {"native": ("etap", "fp8"), "rows": ("mix16", "fp8_ds_mla")}
SMS = 132  # of both cards
BOUND = 0.85  # of the most bytes a time that a column reaches: such rows are no kernel's own time
LONG = 0.8  # of a call's time is not fixed, where rows tell the rate of reading
LEAST_SPREAD = 2.0  # largest over smallest work that still tells fixed_us from tile_us

_KERNEL = re.compile(r"(\w+) row_tile (\d+) parts (\d+)")
_SHAPE = re.compile(r"b(\d+)_L(\d+)_h(\d+)_q(\d+)")


@dataclass(frozen=True)
class Row:
    """One timed decode: which kernel, on what, how long."""

    pipeline: str
    row_tile: int
    rows: int
    batch: int
    seqlen: int
    parts: int
    us: float
    mhz: float
    table: str
    op: str = OP
    share: Share | None = None

    @property
    def is_cut(self) -> bool:
        """True if lists are cut, where that is known."""
        return self.share is not None and self.share.cut

    @property
    def work(self) -> float:
        """Token tiles that each part walks."""
        if self.share is not None:
            return self.share.work
        tile = VariantSpec(op=self.op, pipeline=self.pipeline).token_tile
        return self.batch * -(-self.seqlen // tile) / self.parts


def read_tables() -> tuple[dict[str, str], list[Row]]:
    """(commit of every table, its usable rows of ours)."""
    commits: dict[str, str] = {}
    rows: list[Row] = []
    for table in TABLES:
        report = json.loads((RESULTS / f"{table}.json").read_text())
        commits[table] = report["commit"]
        for entry in report["rows"]:
            kernel = _KERNEL.fullmatch(entry.get("kernel", ""))
            shape = _SHAPE.fullmatch(entry["shape"])
            usable = entry["backend"] in BOTH and entry["status"] == "ok" and entry["check_ok"]
            if not (kernel and shape and usable):
                continue
            batch, seqlen, heads, s_q = map(int, shape.groups())
            rows.append(
                Row(
                    kernel[1], int(kernel[2]), heads * s_q, batch, seqlen, int(kernel[3]),
                    entry["us"], entry["mhz"], table,
                )
            )  # fmt: skip
    commits[LOGITS], exact = read_logits()
    return commits, rows + exact


def read_logits() -> tuple[str, list[Row]]:
    """(commit of the table of exact logits, its rows of pipeline ``f16``)."""
    text = (RESULTS / f"{LOGITS}.md").read_text()
    rows = []
    for cells in (line.strip("| ").split(" | ") for line in text.splitlines()):
        shape = _SHAPE.fullmatch(cells[0])
        if shape is None:
            continue
        batch, seqlen, heads, s_q = map(int, shape.groups())
        if seqlen < SHORTEST:
            continue
        tile, us = int(cells[5]), float(cells[6].split()[0])
        spec = VariantSpec(op=OP, pipeline=EXACT, row_tile=tile)
        parts = parts_of(SMS, unit_rows(SMS, heads * s_q, spec), spec)
        rows.append(Row(EXACT, tile, heads * s_q, batch, seqlen, parts, us, 0.0, LOGITS))
    return _commit_of(text, LOGITS), rows


def _commit_of(text: str, table: str) -> str:
    """That a page says it was measured at."""
    found = re.search(r"^- commit ([0-9a-f]{40}),", text, re.M)
    assert found is not None, table
    return found[1]


def _line(points: list[Row], fixed: float | None = None) -> tuple[float, float]:
    """(fixed_us, tile_us) with the least squared relative error; ``fixed`` may be given."""
    # minimise sum (fixed / us + tile * work / us - 1)^2
    u = [1 / p.us for p in points]
    v = [p.work / p.us for p in points]
    if fixed is not None:
        tile = sum(b * (1 - fixed * a) for a, b in zip(u, v)) / sum(b * b for b in v)
        return fixed, tile
    uu, vv = sum(a * a for a in u), sum(b * b for b in v)
    uv, su, sv = sum(a * b for a, b in zip(u, v)), sum(u), sum(v)
    determinant = uu * vv - uv * uv
    return (su * vv - sv * uv) / determinant, (sv * uu - su * uv) / determinant


def fit(rows: list[Row]) -> list[dict[str, Any]]:
    """One entry per (pipeline, row tile), in that order."""
    groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.pipeline, row.row_tile].append(row)
    lines: dict[tuple[str, int], tuple[float, float]] = {}
    narrow = []
    for key, points in sorted(groups.items()):
        if max(p.work for p in points) < LEAST_SPREAD * min(p.work for p in points):
            narrow.append(key)
        else:
            lines[key] = _line(points)
    for key in narrow:
        same = [fixed for (pipeline, _), (fixed, _) in lines.items() if pipeline == key[0]]
        lines[key] = _line(groups[key], statistics.mean(same) if same else 0.0)
    entries = []
    for (pipeline, row_tile), (fixed, tile) in sorted(lines.items()):
        points = groups[pipeline, row_tile]
        worst = max(abs((fixed + tile * p.work) / p.us - 1) for p in points)
        entries.append(
            {
                "pipeline": pipeline,
                "row_tile": row_tile,
                "fixed_us": round(fixed, 2),
                "tile_us": round(tile, 4),
                "fixed_from": "pipeline's mean" if (pipeline, row_tile) in narrow else "fit",
                "rows_fitted": len(points),
                "worst_error": round(worst, 3),
            }
        )
    return entries


def fit_lists(rows: list[Row]) -> list[dict[str, Any]]:
    """Like ``fit``, with what cutting lists takes beside the line."""
    groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.pipeline, row.row_tile].append(row)
    entries = []
    for (pipeline, row_tile), points in sorted(groups.items()):
        terms = torch.tensor([[1.0, row.work, float(row.is_cut)] for row in points]).double()
        terms /= torch.tensor([row.us for row in points]).double()[:, None]
        ones = torch.ones(len(points), 1, dtype=torch.float64)
        fixed, tile, cut = torch.linalg.lstsq(terms, ones).solution[:, 0].tolist()
        worst = float((terms @ torch.tensor([fixed, tile, cut]).double() - 1).abs().max())
        entries.append(
            {
                "pipeline": pipeline, "row_tile": row_tile, "fixed_us": round(fixed, 2),
                "tile_us": round(tile, 4), "cut_us": round(cut, 2),
                "rows_fitted": len(points), "worst_error": round(worst, 3),
            }
        )  # fmt: skip
    return entries


def measured(rows: list[Row]) -> list[dict[str, Any]]:
    """Every distinct point, the median where tables repeat it."""
    groups: dict[tuple[str, int, int, int, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.pipeline, row.row_tile, row.rows, row.batch, row.seqlen].append(row)
    return [
        {
            "pipeline": key[0], "row_tile": key[1], "rows": key[2], "batch": key[3],
            "seqlen": key[4], "us": round(statistics.median(p.us for p in points), 2),
            "tables": sorted({p.table for p in points}),
        }
        for key, points in sorted(groups.items())
    ]  # fmt: skip


def read_sparse(table: str) -> tuple[str, list[Row]]:
    """(commit of a table of row tiles and cuts, a row for each): a sequence is a query token."""
    text, rows = (RESULTS / f"{table}.md").read_text(), []
    lines = [line.strip("| ").split(" | ") for line in text.splitlines()]
    (head,) = (cells for cells in lines if cells[0] == "cache")
    columns = {i: name.split() for i, name in enumerate(head) if name.split()[0].isdigit()}
    for cells in lines:
        if cells[0] not in SPARSE_CACHES:
            continue
        pipeline, fmt = SPARSE_CACHES[cells[0]]
        tokens, heads, entries = map(int, cells[1].split(" × "))
        for i, (tile, cut) in columns.items():
            if cells[i] == "–":
                continue
            spec = sparse_spec("sm_90a", int(tile), "bf16", cache=fmt)
            load = Load(
                tokens, parts_of_lists(SMS, heads, tokens, spec), -(-entries // spec.token_tile)
            )
            share = next(s for s in load.shares() if s.cut == (cut == "cut"))
            rows.append(
                Row(
                    pipeline, int(tile), heads, tokens, entries, load.parts, float(cells[i]), 0.0,
                    table, "sparse_decode", share,
                )
            )  # fmt: skip
    assert rows, table
    return _commit_of(text, table), rows


def sparse_block(table: str) -> dict[str, Any]:
    """Of one card: the least time of each size and row tile as a point; the line through all that
    memory does not bound; the most that is read a time, beside what a call takes at least."""
    commit, rows = read_sparse(table)
    token_bytes = {pipeline: COSTED[fmt].token_bytes for pipeline, fmt in SPARSE_CACHES.values()}
    read = {row: token_bytes[row.pipeline] * row.batch * row.seqlen * 1e-3 for row in rows}
    most = {
        pipeline: max(x / row.us for row, x in read.items() if row.pipeline == pipeline)
        for pipeline in token_bytes
    }
    tiles = fit_lists([row for row in rows if read[row] / row.us < BOUND * most[row.pipeline]])
    fixed = {(tile["pipeline"], tile["row_tile"]): tile["fixed_us"] for tile in tiles}
    beside = ((row, row.us - fixed[row.pipeline, row.row_tile]) for row in rows)
    gbs = max(read[row] / us for row, us in beside if us > LONG * row.us)
    card = SPARSE_TABLES[table]
    least: dict[tuple[str, int, int, int, int], Row] = {}
    for row in sorted(rows, key=lambda row: -row.us):
        least[row.pipeline, row.row_tile, row.rows, row.batch, row.seqlen] = row
    return {
        "op": "sparse_decode",
        "card": card,
        "tables": {table: commit},
        "read_fraction": round(gbs / card_by_name(card).ceilings.read_gbs, 3),
        "tiles": tiles,
        "measured": measured(list(least.values())),
    }


def make() -> dict[str, Any]:
    """The data file: one block an op and card."""
    commits, rows = read_tables()
    card = card_by_name(CARD)
    token_bytes = FORMATS["snapmla"].token_bytes
    best = max(token_bytes * r.batch * r.seqlen / r.us * 1e-3 for r in rows)
    return {
        "about": "Made by `python -m profiles.dispatch_data` from committed tables; not by hand.",
        "costs": [
            {
                "op": OP,
                "card": CARD,
                "tables": commits,
                "read_fraction": round(best / card.ceilings.read_gbs, 3),
                "tiles": fit(rows),
                "measured": measured(rows),
            },
            *map(sparse_block, SPARSE_TABLES),
        ],
    }


def render(data: dict[str, Any]) -> str:
    """The data file's text: one line for each entry of a block's two lists."""
    blocks = ",\n".join(_block(block) for block in data["costs"])
    return f'{{\n  "about": {json.dumps(data["about"])},\n  "costs": [\n{blocks}\n  ]\n}}\n'


def _block(block: dict[str, Any]) -> str:
    lines = []
    for key, value in block.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"        {json.dumps(item)}" for item in value) + "\n      ]"
        lines.append(f'      "{key}": {text}')
    return "    {\n" + ",\n".join(lines) + "\n    }"


if __name__ == "__main__":
    write_atomic(TARGET, render(make()))
    print(TARGET.relative_to(ROOT))
