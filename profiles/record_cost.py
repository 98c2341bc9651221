"""The counters of an H200 that ``python -m snapmla.testing cost`` predicts, and how well it does.

    python -m profiles.record_cost record --out DIR    # on the GPU, with ncu: about two minutes
    python -m profiles.record_cost compare             # anywhere, from build/variants: the page

``record`` profiles one launch of each of ``VARIANTS`` (as ``make profile`` does) and writes
``cost-h200.json``.  ``compare`` holds the software GPU's counts against it, and against the shares
of peaks in ``ncu-h200.md``, an older record of four of them whose LSU counter is one sum.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from codegen import artifacts, matrix
from dsl_kernels.spec import VariantSpec
from profiles import ncu, page
from profiles.device import require_cuda
from snapmla.testing import cost
from snapmla.testing.workloads.samples import split_evenly
from softgpu.cost.profile import loads

RESULTS = artifacts.ROOT / "profiles" / "results"
VARIANTS = (
    "decode_etap_r16_p64_obf16_sm90a", "decode_etap_r32_p64_obf16_sm90a",
    "decode_etap_r64_p64_obf16_sm90a", "decode_etap_r128_p64_obf16_sm90a",
    "decode_dual_wg_r64_p64_obf16_sm90a", "dense_decode_split_r64_p64_dbf16_sm90a",
)  # fmt: skip
SIZES = ncu.Sizes(batch=32, tokens=16384, s_q=1)
SMS = 132  # of the H200 that both records come from
COUNTERS: dict[str, str] = {  # as ``softgpu.cost.profile.counters`` names them -> ncu's metric
    "issued instructions": "smsp__inst_executed.sum",
    "tensor cycles": "sm__pipe_tensor_cycles_active.sum",
    "shared memory, LSU": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "DRAM read": "dram__bytes_read.sum",
    "MUFU": "smsp__inst_executed_pipe_xu.sum",
}
UNITS = {  # as ``softgpu.cost.profile.loads`` names them -> the row of ``profiles.ncu``
    "memory": "DRAM", "shared memory": "shared memory by LSU", "tensor cores": "tensor pipe",
    "issue": "issue slots",
}  # fmt: skip
TENSOR_CORES = 4  # of an SM, whose cycles ncu adds up
DRAM_PEAK = 4800.0  # bytes a ns of an H200, by its datasheet
# Recorded for whoever asks next: what else passes the port.  Its wavefronts by kind of instruction
# are not compared: an ldmatrix counts twice as a load, and the kinds sum to more than the port has.
MORE = (
    "smsp__issue_active.sum", "smsp__inst_issued.sum", "l1tex__data_pipe_lsu_wavefronts.sum",
    "l1tex__data_bank_reads.sum", "l1tex__data_bank_writes.sum",
    "regex:l1tex__data_pipe_lsu_wavefronts_mem_shared_.*sum",
    "regex:l1tex__data_bank_conflicts_pipe_lsu_mem_shared_.*sum",
    "regex:smsp__inst_executed_op_(ldsm|shared|shuffle).*sum", "sm__cycles_elapsed.max",
    "gpu__time_duration.sum",
)  # fmt: skip
MEMORY = tuple(label for label in COUNTERS if re.match("shared memory|bank|DRAM", label))
APART = {
    "bank conflicts": "a few in a thousand wavefronts: those between the accesses of several warps "
    "and operand reads are not seen",
    "MUFU": "the counter is of the XU pipe, which converts too",
}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@dataclass(frozen=True)
class Card:
    """Counts of one launch on a card.

    Attributes:
        counters: by the names of ``COUNTERS``.
        shares: unit of ``UNITS`` -> percent of its peak.
    """

    counters: Mapping[str, float]
    shares: Mapping[str, float]

    @property
    def busiest(self) -> str:
        """The unit that is nearest to its peak; empty where no share was recorded."""
        return max(self.shares, key=self.shares.__getitem__, default="")


@dataclass(frozen=True)
class Row:
    """One counter of one variant: the card's and the model's."""

    counter: str
    card: float
    model: float

    @property
    def difference(self) -> float:
        """Difference of the model from the card, as a share of the card's count."""
        return self.model / self.card - 1 if self.card else 0.0


# ---------------------------------------------------------------- the card's side


def recorded(found: Mapping[str, tuple[str, float | str]]) -> Card:
    """Counters and shares by our names, those that ncu gave; shares else of counters."""
    shares = {unit: ncu.METRICS[row] for unit, row in UNITS.items()}
    counters = _given(found, COUNTERS)
    if "tensor cycles" in counters:
        counters["tensor cycles"] /= TENSOR_CORES
    return Card(counters, _given(found, shares) or _shares(found, counters))


def _shares(
    found: Mapping[str, tuple[str, float | str]], counters: Mapping[str, float]
) -> dict[str, float]:
    """Percent of each unit's peak, where the launch's cycles were recorded."""
    times = _given(found, {"cycles": "sm__cycles_elapsed.max", "ns": "gpu__time_duration.sum"})
    if len(times) < 2:
        return {}
    peaks = {
        "memory": ("DRAM read", times["ns"] * DRAM_PEAK),
        "shared memory": ("shared memory, LSU", times["cycles"] * SMS),
        "tensor cores": ("tensor cycles", times["cycles"] * SMS),
        "issue": ("issued instructions", times["cycles"] * SMS * 4),
    }
    return {u: 100 * counters[c] / peak for u, (c, peak) in peaks.items() if c in counters}


def _given(
    found: Mapping[str, tuple[str, float | str]], metrics: Mapping[str, str]
) -> dict[str, float]:
    """Numbers that ncu gave for ``metrics`` (our name -> ncu's), by our name."""
    values = {label: found.get(metric, ("", ""))[1] for label, metric in metrics.items()}
    return {label: value for label, value in values.items() if isinstance(value, float)}


def of_page(text: str) -> dict[str, Card]:
    """Variant -> counters, from the shares of peaks that ``ncu-h200.md`` has.

    A share has one decimal: 0.4 % of the smallest counter.
    """
    lines = [line for line in text.splitlines() if line.startswith("|")]
    names = _cells(lines[0])[1:]
    rows = {cells[0]: cells[1:] for cells in map(_cells, lines[2:])}
    found: dict[str, Card] = {}
    for i, name in enumerate(names):
        match = re.search(r"([\d,]+) cycles", rows["duration"][i])
        if match is None:
            raise ValueError(f"ncu-h200.md: no cycles of {name}")
        cycles = float(match[1].replace(",", ""))
        of_peak = lambda label, i=i: float(rows[label][i].split(" ")[0]) / 100
        counters = {
            "issued instructions": of_peak("issue slots") * cycles * 4 * SMS,
            "tensor cycles": of_peak("tensor pipe") * cycles * SMS,
            "shared memory, LSU": of_peak("shared memory by LSU") * cycles * SMS,
            "bank conflicts": float(rows["bank conflicts"][i].replace(",", "")),
            "DRAM read": 1e6 * float(rows["DRAM read"][i].split(" ")[0]),
        }
        found[name] = Card(counters, {unit: 100 * of_peak(row) for unit, row in UNITS.items()})
    return found


def on_file() -> dict[str, Card]:
    """Variant -> what a card counted, for those of ``VARIANTS`` that were recorded: the split
    counters where there are any, else the older page's."""
    found = {
        **of_page((RESULTS / "ncu-h200.md").read_text()), **records(RESULTS / "cost-h200.json")
    }  # fmt: skip
    return {name: found[name] for name in VARIANTS if name in found}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


# ---------------------------------------------------------------- the model's side


def predicted(found: cost.Cost, sizes: ncu.Sizes = SIZES) -> dict[str, float]:
    """Counters of the whole launch that was recorded, by the model.

    A part's tiles cost what a steady tile does; what a part costs besides is counted once for
    each of its work tiles.
    """
    ctas = found.profile.ctas
    parts, tiles = SMS // ctas, -(-sizes.tokens // found.spec.token_tile)
    items, *_ = split_evenly(sizes.batch, 1, tiles, parts)
    each = found.profile.whole(sizes.batch * tiles / parts, len(items) / parts)
    return {label: parts * ctas * n for label, n in each.items()}


def rows(card: Mapping[str, float], model: Mapping[str, float]) -> list[Row]:
    """Counters that both have."""
    return [Row(label, card[label], model[label]) for label in COUNTERS if label in card]


def bound(found: cost.Cost) -> str:
    """The unit that the model calls the busiest, in a steady tile."""
    return loads(found.profile.tile, found.profile.architecture, found.card)[0].unit


def table(name: str, found: Sequence[Row], units: tuple[str, str] = ("", "")) -> list[str]:
    """A variant's lines; ``units``: the busiest by the card and by the model."""
    lines = [f"## {name}", "", "| counter | card | model | difference |", "|---|---|---|---|"]
    for row in found:
        mark = " (not modelled)" if row.counter in APART else ""
        lines.append(
            f"| {row.counter}{mark} | {row.card:,.0f} | {row.model:,.0f} | "
            f"{100 * row.difference:+.1f} % |"
        )
    said = ["", f"Busiest unit: {units[0]} by the card, {units[1]} by the model."]
    return [*lines, *(said if units[0] else []), ""]


# ---------------------------------------------------------------- commands


@app.command()
def record(
    out: Annotated[Path, typer.Option(help="folder of cost-h200.json")] = RESULTS,
    variants: Annotated[str, typer.Option(help="names, with commas")] = ",".join(VARIANTS),
) -> None:
    """Records the counters of one launch of each variant."""
    found: dict[str, Any] = {}
    try:
        specs = [matrix.named(name) for name in variants.split(",")]
        require_cuda()
    except ValueError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    failed = False
    facts = {"machine": ncu.versions(), "sizes": vars(SIZES), "variants": found}
    with tempfile.TemporaryDirectory() as folder:
        for spec in specs:
            try:
                kept = _profile(spec, Path(folder))
            except ValueError as error:
                print(f"{spec.name}: {error}", file=sys.stderr)
                failed = True
                continue
            found[spec.name] = json.loads(ncu.raw(kept))
            # after each: a run that is cut off keeps what it has
            artifacts.write_atomic(out / "cost-h200.json", json.dumps(facts, indent=1) + "\n")
            card = recorded(kept)
            for label, value in card.counters.items():
                typer.echo(f"{spec.name}: {label} {value:,.0f}")
            typer.echo(f"{spec.name}: busiest unit {card.busiest or 'not recorded'}")
    raise typer.Exit(1 if failed else 0)


def _profile(spec: VariantSpec, folder: Path) -> dict[str, tuple[str, float | str]]:
    """All metrics, or without those of ``MORE``, of which an ncu may not know one."""
    needed = [*COUNTERS.values(), *(ncu.METRICS[row] for row in UNITS.values())]
    try:
        return ncu.profile(spec, SIZES, folder, [*needed, *MORE])
    except ValueError as error:
        print(f"{spec.name}: again with fewer metrics, since {error}", file=sys.stderr)
        return ncu.profile(spec, SIZES, folder, needed)


@app.command()
def compare(
    out: Annotated[Path, typer.Option(help="folder of cost-h200.md")] = RESULTS,
    directory: Annotated[Path | None, typer.Option("--dir", help="of built variants")] = None,
) -> None:
    """Writes the page: every recorded counter beside the model's."""
    at = directory if directory is not None else artifacts.default_dir()
    sources = on_file()
    split = (RESULTS / "cost-h200.json").is_file()
    notes = [
        f"counters: {'cost-h200.json' if split else 'ncu-h200.md, shares of peaks'}; batch "
        f"{SIZES.batch}, {SIZES.tokens} tokens, {SMS} SMs",
        "model: `python -m snapmla.testing cost`, a steady tile times the tiles of a part, and "
        "what a part costs besides for each of its work tiles",
        *(f"{label}: {why}" for label, why in APART.items()),
    ]  # fmt: skip
    lines = page.head("Cost without a clock, and an H200's counters", "profiles.record_cost",
                      "model: the software GPU, on a CPU", *notes)  # fmt: skip
    for name in VARIANTS:
        if name not in sources:
            lines += [f"## {name}", "", "Not recorded yet.", ""]
            continue
        card, model = sources[name], cost.measure(matrix.named(name), at)
        units = card.busiest, bound(model)
        lines += table(name, rows(card.counters, predicted(model)), units)
    artifacts.write_atomic(out / "cost-h200.md", "\n".join(lines))
    typer.echo("\n".join(lines))


def records(path: Path) -> dict[str, Card]:
    """Variant -> what was counted, as ``record`` wrote it; nothing if that has not run."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())["variants"]
    return {
        name: recorded({metric: tuple(value) for metric, value in values.items()})
        for name, values in found.items()
    }


if __name__ == "__main__":
    app()
