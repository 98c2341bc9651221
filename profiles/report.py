"""Reports from a worker's raw rows: derived figures, summary, JSON and markdown on disk.

No torch here: ``python -m profiles.report FILE.json...`` prints the short tables of finished runs.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from codegen.artifacts import write_atomic
from profiles import roofline
from profiles.roofline import FORMATS, Card, Ceilings, Energies
from profiles.shapes import DecodeShape, is_decode, parse

Row = dict[str, Any]
PEERS = ("flashmla_bf16", "flashmla_fp8", "fa3", "etap", "torch")
DEQUANT_ROWS = 64
TILE = 64  # rows and tokens of the tile that energy and cycles are told for


def enrich(
    row: Row, label: str, card: Card | None, ceilings: Ceilings | None,
    energies: Energies | None = None,
) -> Row:  # fmt: skip
    """Adds to a worker's row what follows from shape, time and card.

    Adds ``shape``, ``op``, ``bytes``, ``flops`` and, where there is a time, ``gbs``, ``tflops``,
    ``roof_us``, ``roof_fraction`` (of the contender's own cache format and tensor-core rate),
    ``eq7_fraction`` and ``dequant_model_us`` (the least a kernel that dequantises to BF16 could
    take at this row's clock).  Rows that were also run alone get ``power_fields``.
    """
    shape = parse(label)
    us = row.get("us")
    new: Row = {**row, "shape": label, "op": shape.op, "reproduce": reproduce(label, row)}
    if not isinstance(shape, DecodeShape):
        new["bytes"] = shape.bytes
        if us:
            new["gbs"] = shape.bytes / us * 1e-3
        if us and ceilings:
            new["roof_us"] = roofline.helper_us(shape.bytes, 0.0, ceilings)
            new["roof_fraction"] = new["roof_us"] / us
        return new
    fmt = FORMATS[row["format"]] if "format" in row else FORMATS["snapmla"]
    new["flops"] = shape.flops
    new["bytes"] = shape.bytes(fmt, row.get("out_bytes", 2))
    if not us:
        return new
    new["gbs"] = new["bytes"] / us * 1e-3
    new["tflops"] = shape.flops / us * 1e-6
    if card and ceilings:
        new["roof_us"] = roofline.roof_us(new["bytes"], shape.flops, ceilings, fmt)
        new["roof_fraction"] = new["roof_us"] / us
        new["eq7_fraction"] = new["tflops"] / card.eq7_tflops
        new["dequant_model_us"] = _dequant_us(shape, card, row.get("mhz") or card.boost_mhz)
        if row.get("alone_us"):
            new.update(power_fields(new, shape, card, ceilings, energies))
    return new


def tiles(shape: DecodeShape) -> int:
    """Tiles of 64 rows x 64 tokens of a decode; fewer rows, or a sequence's last tokens, fill one.

    That is what CTAs walk, except that a CTA of 16 or 32 rows has smaller ones.
    """
    row_blocks = -(-shape.num_heads * shape.s_q // TILE)
    return row_blocks * sum(-(-n // TILE) for n in shape.lengths())


def power_fields(
    row: Row, shape: DecodeShape, card: Card, ceilings: Ceilings, energies: Energies | None
) -> Row:
    """What follows from a row's time, clock and power alone on the card.

    ``uj_tile``: board power x time over ``tiles``, microjoules.  ``cycles_tile``: SM cycles, time x
    clock x SMs over ``tiles``; launch, ramp and merge are in both.  With ``energies`` also
    ``power_roof_us`` and ``power_roof_fraction``, that roof over the time *alone*.
    """
    us, count = row["alone_us"], tiles(shape)
    new: Row = {"uj_tile": row["alone_watts"] * us / count}
    if row.get("alone_mhz"):
        new["cycles_tile"] = us * row["alone_mhz"] * card.sms / count
    if energies:
        fmt = FORMATS[row["format"]]
        work = row["bytes"], row["flops"]
        new["energy_roof_us"] = energies.row_us(*work, fmt)
        new["power_roof_us"] = roofline.power_roof_us(*work, ceilings, energies, fmt)
        new["power_roof_fraction"] = new["power_roof_us"] / us
    return new


def _dequant_us(shape: DecodeShape, card: Card, mhz: float) -> float:
    rows = shape.num_heads * shape.s_q
    blocks = -(-rows // DEQUANT_ROWS)
    cost = roofline.dequant_cost(DEQUANT_ROWS, 2 if blocks > 1 else 1)
    return cost.floor_us(blocks, shape.tokens, card.sms, mhz)


def reproduce(label: str, row: Row) -> str:
    """The command that makes this row again."""
    backend = "" if not is_decode(parse(label).op) else f" --backends {row.get('backend', '')}"
    return f"python -m profiles.bench --shape {label}{backend}"


def counts(row: Row) -> bool:
    """True if a row has a time and passed its check."""
    return row.get("status") == "ok" and bool(row.get("us"))


def geomean(values: Sequence[float]) -> float:
    """Geometric mean; NaN of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def summarise(rows: Iterable[Row]) -> list[Row]:
    """Ours against each peer: over the decode rows that both ran and passed.

    Each entry has ``ours``, ``peer``, ``rows``, ``faster``, ``geomean``, ``worst`` and
    ``worst_shape``; ratios are peer's time over ours, so above 1 is faster.  A last kind of entry,
    peer ``both FlashMLA``, counts the rows that beat FlashMLA BF16 and FP8.
    """
    times: dict[str, dict[str, float]] = {}
    ours: list[str] = []
    for row in rows:
        if not is_decode(row["op"]) or not counts(row):
            continue
        times.setdefault(row["backend"], {})[row["shape"]] = row["us"]
        if not row["peer"] and row["backend"] not in ours:
            ours.append(row["backend"])
    found = []
    for name in ours:
        for peer in [p for p in PEERS if p in times]:
            found.append(_versus(name, peer, times[name], times[peer]))
        if "flashmla_bf16" in times and "flashmla_fp8" in times:
            bf16, fp8 = times["flashmla_bf16"], times["flashmla_fp8"]
            best = {s: min(bf16[s], fp8[s]) for s in bf16.keys() & fp8.keys()}
            found.append(_versus(name, "both FlashMLA", times[name], best))
    return [entry for entry in found if entry["rows"]]


def _versus(name: str, peer: str, ours: dict[str, float], theirs: dict[str, float]) -> Row:
    ratios = {shape: theirs[shape] / us for shape, us in ours.items() if shape in theirs}
    worst = min(ratios, key=lambda s: ratios[s], default="")
    return {
        "ours": name,
        "peer": peer,
        "rows": len(ratios),
        "faster": sum(r > 1 for r in ratios.values()),
        "geomean": geomean(list(ratios.values())),
        "worst": ratios.get(worst, math.nan),
        "worst_shape": worst,
    }


# ------------------------------------------------------------------------------------------ text


def _cell(value: Any, form: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if form == "%":
        return f"{100 * value:.0f} %"
    return format(value, form)


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(cells) + " |" for cells in body]


DECODE_COLUMNS = (
    ("µs", "us", ".1f"), ("cold µs", "us_cold", ".1f"), ("host µs", "host_us", ".1f"),
    ("TFLOP/s", "tflops", ".0f"), ("GB/s", "gbs", ".0f"), ("roof µs", "roof_us", ".1f"),
    ("of roof", "roof_fraction", "%"), ("of Eq. 7", "eq7_fraction", "%"),
    ("dequant. model µs", "dequant_model_us", ".1f"), ("error", "error", ".1e"),
    ("LSE error", "lse_error", ".1e"), ("MHz", "mhz", ".0f"), ("W", "watts", ".0f"),
)  # fmt: skip
POWER_COLUMNS = (
    ("µs in turn", "us", ".1f"), ("by snapmla's", "turn_ratio", ".2f"),
    ("µs alone", "alone_us", ".1f"), ("by snapmla's", "alone_ratio", ".2f"),
    ("W", "alone_watts", ".0f"), ("MHz", "alone_mhz", ".0f"),
    ("cycles a tile", "cycles_tile", ".0f"), ("µJ a tile", "uj_tile", ".2f"),
    ("roof µs", "roof_us", ".1f"), ("energy / (cap − floor) µs", "energy_roof_us", ".1f"),
    ("power roof µs", "power_roof_us", ".1f"), ("of power roof", "power_roof_fraction", "%"),
)  # fmt: skip
HELPER_COLUMNS = (
    ("µs", "us", ".2f"), ("cold µs", "us_cold", ".1f"), ("host µs", "host_us", ".1f"),
    ("GB/s", "gbs", ".0f"), ("of copy", "copy_fraction", "%"), ("of roof", "roof_fraction", "%"),
    ("error", "error", ".1e"), ("MHz", "mhz", ".0f"), ("W", "watts", ".0f"),
)  # fmt: skip


def _full_table(rows: Sequence[Row], columns: Sequence[tuple[str, str, str]]) -> list[str]:
    head = ["shape", "backend", *(c[0] for c in columns), "check"]
    body = []
    for row in rows:
        verdict = row.get("status", "?")
        if verdict != "ok" and row.get("note"):
            verdict += ": " + str(row["note"]).replace("|", "/")[:120]
        body.append(
            [row["shape"], row["backend"], *(_cell(row.get(k), f) for _, k, f in columns), verdict]
        )
    return _table(head, body)


def with_copy_fractions(rows: Sequence[Row]) -> list[Row]:
    """Adds ``copy_fraction`` to helper rows: the copy's time over theirs, at equal bytes."""
    copies = {r["shape"]: r["us"] for r in rows if r["backend"] == "torch_copy" and counts(r)}
    return [
        {**r, "copy_fraction": copies[r["shape"]] / r["us"]}
        if not is_decode(r["op"]) and r.get("us") and r["shape"] in copies
        else r
        for r in rows
    ]


def short_table(report: dict[str, Any]) -> list[str]:
    """One line per shape, microseconds per backend; ``!`` marks rows that failed their check."""
    rows = report["rows"]
    lines: list[str] = []
    decode = [r for r in rows if is_decode(r["op"])]
    names = list(dict.fromkeys(r["backend"] for r in decode))
    by_shape: dict[str, dict[str, Row]] = {}
    for row in decode:
        by_shape.setdefault(row["shape"], {})[row["backend"]] = row
    if decode:
        body = []
        for shape, cells in by_shape.items():
            line = [shape]
            for name in names:
                row = cells.get(name, {})
                mark = "" if row.get("status") in ("ok", None) else f" {row['status']}!"
                fraction = row.get("roof_fraction")
                part = f" ({100 * fraction:.0f} %)" if fraction and not row.get("peer") else ""
                line.append(_cell(row.get("us"), ".1f") + part + mark)
            body.append(line)
        lines += _table(["µs (of roof)", *names], body)
    for row in rows:
        if not is_decode(row["op"]):
            lines.append(
                f"{row['shape']:32s} {row['backend']:12s} {_cell(row.get('us'), '.2f'):>8s} µs "
                f"{_cell(row.get('gbs'), '.0f'):>5s} GB/s  "
                f"of copy {_cell(row.get('copy_fraction'), '%')}  {row.get('status')} "
                f"{row.get('note', '')}"
            )
    own = [*uneven_lines(decode), *quantise_lines(by_shape)]
    return [*lines, "", *own, *summary_lines(report["summary"]), *power_lines(report)]


def power_lines(report: dict[str, Any]) -> list[str]:
    """Rows alone on the card beside their power roof, and what that roof rests on."""
    rows = [r for r in report["rows"] if r.get("alone_us")]
    found = report.get("power", {})  # not in tables made before
    lines: list[str] = []
    if found.get("energies"):
        e = Energies(**found["energies"])
        lines += [
            f"power: cap {e.cap_w:.0f} W, {e.floor_w:.0f} W while all SMs wait; above that a byte "
            f"costs {e.dram_pj:.1f} pJ from memory, {e.l2_pj:.1f} from L2, a FLOP "
            f"{e.fp8_pj:.3f} pJ in FP8, {e.bf16_pj:.3f} in BF16",
        ]
    if found.get("probes"):
        lines += ["", *_probe_table(found["probes"])]
    if not (rows or lines):
        return []
    return ["", *lines, "", *_full_table(with_alone_ratios(rows), POWER_COLUMNS)]


def with_alone_ratios(rows: Sequence[Row]) -> list[Row]:
    """Adds to peers' rows what they take by ours of that shape, in turn and alone."""
    ours = {r["shape"]: r for r in rows if r["backend"] == "snapmla"}
    found = []
    for row in rows:
        mine = ours.get(row["shape"])
        if mine is not None and mine is not row and row.get("us") and mine.get("us"):
            turn, alone = row["us"] / mine["us"], row["alone_us"] / mine["alone_us"]
            row = {**row, "turn_ratio": turn, "alone_ratio": alone}
        found.append(row)
    return found


def _probe_table(probes: Iterable[dict[str, Any]]) -> list[str]:
    return _table(
        ["what", "µs", "rate", "MHz", "W"],
        [
            [p["what"], f"{p['us']:.1f}", f"{p['rate']:.0f} {p['unit']}" if p["unit"] else "–",
             _cell(p["mhz"], ".0f"), _cell(p["watts"], ".0f")]
            for p in probes
        ],
    )  # fmt: skip


def uneven_lines(rows: Sequence[Row]) -> list[str]:
    """What unequal lengths cost: each uneven row over the even one of as many tokens beside it."""
    times = {(r["shape"], r["backend"]): r["us"] for r in rows if counts(r)}
    lines = []
    for (label, backend), us in times.items():
        shape = parse(label)
        if isinstance(shape, DecodeShape) and shape.uneven:
            even = shape.levelled().label
            if (even, backend) in times:
                ratio = us / times[even, backend]
                lines.append(f"{backend} {label}: {ratio:.2f}x of {even}")
    return lines


def quantise_lines(by_shape: dict[str, dict[str, Row]]) -> list[str]:
    """What quantising the query adds to a decode, where both were timed."""
    lines = []
    for shape, cells in by_shape.items():
        both, alone = (cells.get(name, {}) for name in ("snapmla:quantise", "snapmla"))
        if counts(both) and counts(alone):
            lines.append(f"{shape}: quantise + decode {both['us'] / alone['us']:.2f}x of decode")
    return lines


def summary_lines(summary: Iterable[Row]) -> list[str]:
    """One sentence per comparison."""
    return [
        f"{s['ours']} against {s['peer']}: faster on {s['faster']} of {s['rows']} rows, "
        f"geomean {s['geomean']:.2f}x, worst {s['worst']:.2f}x ({s['worst_shape']})"
        for s in summary
    ]


def _ceiling_text(name: str, value: dict[str, Any] | None) -> str:
    if not value:
        return f"- {name}: none"
    return (
        f"- {name}: read {value['read_gbs']:.0f} GB/s, bf16 {value['bf16_tflops']:.0f}, "
        f"fp8 {value['fp8_tflops']:.0f} TFLOP/s ({value['source']})"
    )


def markdown(report: dict[str, Any]) -> str:
    """The whole report as a page."""
    machine = report["machine"]
    facts = [f"{k} {machine[k]}" for k in (
        "gpu", "driver", "power_limit_w", "max_sm_mhz", "cuda", "torch", "triton", "tvm_ffi",
        "python",
    ) if machine.get(k) is not None]  # fmt: skip
    lines = [
        f"# {report['name']}", "",
        f"`{report['command']}`", "",
        f"- commit {report['commit']}, {report['created']}",
        f"- {', '.join(facts)}",
        _ceiling_text("ceilings on file", report["ceilings"]["on_file"]),
        _ceiling_text("ceilings probed in this run", report["ceilings"]["probe"]),
    ]  # fmt: skip
    lines += [f"- {text}" for text in report["dequant_model"] + report["notes"]]
    lines += ["", "## Summary", "", *short_table(report)]
    decode = [r for r in report["rows"] if is_decode(r["op"])]
    helpers = [r for r in report["rows"] if not is_decode(r["op"])]
    if decode:
        lines += ["", "## Decode rows", "", *_full_table(decode, DECODE_COLUMNS)]
    if helpers:
        lines += ["", "## Helper rows", "", *_full_table(helpers, HELPER_COLUMNS)]
    if report["ceilings"]["probes"]:
        lines += ["", "## Probes", "", *_probe_table(report["ceilings"]["probes"])]
    lines += ["", "## Reproduce", "", "```"]
    lines += list(dict.fromkeys(r["reproduce"] for r in report["rows"]))
    lines += ["```", "", "How figures come about: `profiles/results/README.md`.", ""]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------ files


def _finite(value: Any) -> Any:
    """JSON has no NaN: non-finite floats become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return value


def save(report: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Writes ``<name>.json`` and ``<name>.md``; returns both paths."""
    json_path, md_path = folder / f"{report['name']}.json", folder / f"{report['name']}.md"
    write_atomic(json_path, json.dumps(_finite(report), indent=1, ensure_ascii=False) + "\n")
    write_atomic(md_path, markdown(report))
    return json_path, md_path


def main(paths: Sequence[str]) -> None:
    """Prints the short tables of finished reports."""
    for path in paths:
        report = json.loads(Path(path).read_text())
        if not {"name", "rows"} <= set(report):  # of a checker or a table, which printed its own
            continue
        print(f"== {report['name']} ({report['machine'].get('gpu')}, {report['commit'][:12]})")
        print("\n".join(short_table(report)))


if __name__ == "__main__":
    main(sys.argv[1:])
