"""Makes ``snapmla/data/decode_costs.json``, what the dispatcher knows of time, from the tables.

    python -m profiles.dispatch_data            # after a new H200 table was committed

Of pipeline ``f16`` it is ``logits_cost.md``; of sparse decode they are ``sparse-cost-*.md`` of an
H200 and an H100, a block for each.  Per pipeline and row tile it fits ``us = fixed_us + tile_us *
(tiles a part walks)`` to the rows of the committed tables (least squares of the relative error);
the rows themselves go along as measured points, which override the model.  Nothing here touches a
GPU.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen.artifacts import write_atomic
from dsl_kernels.families import sparse_decode
from dsl_kernels.families.formats import FORMATS as COSTED
from dsl_kernels.families.fp8_decode import FAMILY
from dsl_kernels.spec import VariantSpec
from profiles.roofline import FORMATS, card_by_name
from snapmla.dispatch import parts_of, unit_rows

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
# Sparse decode: table and card; of each of our columns pipeline, cache format and place.
SPARSE_TABLES = {"sparse-cost-h200": "H200", "sparse-cost-h100": "H100 SXM"}
SPARSE_COLUMNS = (("etap", "fp8", 3), ("mix16", "fp8_ds_mla", 8))
# How calls of those tables were planned: by the least row tile that holds the heads, or the
# largest; few tokens of several row blocks on 44 parts, others on as many as fill 132 SMs.
SMS, FEW_BLOCKS, PARTS_OF_FEW = 132, 4, 44
BOUND = 0.85  # of the most bytes a time that a column reaches: such rows are no kernel's own time
LONG = 0.8  # of a call's time is not fixed, where rows tell the rate of reading
LEAST_FREE = 3  # of the others that tell a line; else all do
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

    @property
    def work(self) -> float:
        """Token tiles that each part walks."""
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
    """(commit of a table of sparse decode, its rows of ours): a sequence is a query token."""
    text = (RESULTS / f"{table}.md").read_text()
    rows = []
    for cells in (line.strip("| ").split(" | ") for line in text.splitlines()):
        if len(cells) != 13 or not cells[0][0].isdigit():
            continue
        b, s_q, heads, topk = map(int, cells[0].split(", "))
        for pipeline, _, column in SPARSE_COLUMNS:
            tiles = sparse_decode.ROW_TILES[pipeline]
            tile = next((t for t in tiles if t >= heads), tiles[-1])
            blocks, tokens = -(-heads // tile), b * s_q
            few = blocks > 1 and tokens * blocks <= FEW_BLOCKS
            parts = PARTS_OF_FEW if few else SMS // blocks
            us = float(cells[column])
            rows.append(
                Row(pipeline, tile, heads, tokens, topk, parts, us, 0.0, table, "sparse_decode")
            )
    assert rows, table
    return _commit_of(text, table), rows


def sparse_block(table: str) -> dict[str, Any]:
    """Of one card: every row as a point; the line through those that memory does not bound, where
    a kernel has some; the most that is read a time, beside what a call takes at least."""
    commit, rows = read_sparse(table)
    token_bytes = {pipeline: COSTED[fmt].token_bytes for pipeline, fmt, _ in SPARSE_COLUMNS}
    read = {row: token_bytes[row.pipeline] * row.batch * row.seqlen * 1e-3 for row in rows}
    most = {
        pipeline: max(x / row.us for row, x in read.items() if row.pipeline == pipeline)
        for pipeline in token_bytes
    }
    groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.pipeline, row.row_tile].append(row)
    fitted: list[Row] = []
    for (pipeline, _), group in groups.items():
        free = [row for row in group if read[row] / row.us < BOUND * most[pipeline]]
        fitted += free if len(free) >= LEAST_FREE else group
    tiles = fit(fitted)
    fixed = {(tile["pipeline"], tile["row_tile"]): tile["fixed_us"] for tile in tiles}
    beside = ((row, row.us - fixed[row.pipeline, row.row_tile]) for row in rows)
    gbs = max(read[row] / us for row, us in beside if us > LONG * row.us)
    card = SPARSE_TABLES[table]
    return {
        "op": "sparse_decode",
        "card": card,
        "tables": {table: commit},
        "read_fraction": round(gbs / card_by_name(card).ceilings.read_gbs, 3),
        "tiles": tiles,
        "measured": measured(rows),
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
