"""Costs of a compiled variant on an SM, from calls of its op recorded on the software GPU.

A decode runs twice, with one sequence and one part (a CTA or a cluster): first with few KV tiles,
then with many.  The difference is the cost of tiles in the steady state.  An op whose workload has
``Workload.steady`` runs twice likewise.  Others run once; their figures are a CTA's mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsl_kernels.spec import VariantSpec
from snapmla.rank.cards import cards, find_card
from snapmla.testing import selfcheck, workloads
from snapmla.testing.workloads.call import Sizes
from softgpu import LoadedKernel, Options, using
from softgpu.cost import rates, sass, timeline
from softgpu.cost.profile import Card, Profile, conflicts, counters, entry, loads, profile
from softgpu.cost.recorder import Recorder

TILES = (6, 14)  # of the two records
TOKENS, BATCH, PARTS = 192, 2, 3  # of a sequence, sequences, parts, of an op without tiles
ROWS = 64  # query rows, of an op without row tiles


@dataclass(frozen=True)
class Cost:
    """A variant's cost.

    Attributes:
        spec: the variant.
        rows: query rows of the call.
        profile: of its kernel; of a CTA a tile, or all of it.
        card: what it is held against.
        cycles: of the modelled timeline, as ``profile`` counts: a tile, or the launch.
        handovers: of the critical path: what was waited for -> how often, likewise.
        hot: (wavefronts that bank conflicts cost, where), most first; of the larger record.
        play: the modelled timeline of the larger record.
    """

    spec: VariantSpec
    rows: int
    profile: Profile
    card: Card
    cycles: float
    handovers: dict[str, float]
    hot: list[tuple[float, str]]
    play: timeline.Timeline

    @property
    def measured(self) -> bool:
        """True if a card's counters have been compared with the model of this architecture."""
        return rates.of(self.profile.architecture).measured

    def numbers(self) -> dict[str, float]:
        """Figures by name, in which ``--compare`` sets two variants side by side."""
        f = self.profile.tile
        units = loads(f, self.profile.architecture, self.card)
        return {
            "modelled cycles": self.cycles,
            **{f"{x.unit}, cycles": x.cycles for x in units},
            **counters(f),
            **{f"wavefronts, {kind}": n for kind, n in sorted(f.waves.items())},
            **{f"bytes, {path}": n for path, n in sorted(f.moved.items())},
            **{f"handovers, {what}": n for what, n in sorted(self.handovers.items())},
        }


def card_of(arch: str, name: str | None) -> Card:
    """A card on file, by name, or the first of an architecture.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    found = next(c for c in cards() if c.arch == arch)
    if name is not None:
        found = find_card(None, name)
        if found.arch != arch:
            raise ValueError(f"card: {found.name} runs {found.arch}, the variant is for {arch}")
    per_cycle = found.read_gbs * 1e3 / (found.sms * found.mhz)
    return Card(found.name, per_cycle, found.mhz, found.sms)


def rows_of(spec: VariantSpec) -> int:
    """Query rows that fill a row tile."""
    return int(dict(spec.values).get("row_tile", ROWS))


def record(spec: VariantSpec, kernel: LoadedKernel, sizes: Sizes) -> Recorder:
    """Runs one call with a recorder."""
    given: dict[str, Any] = workloads.of(spec.op).sized(spec, sizes, "cpu", 0)
    recorder = Recorder()
    options = Options(asynchronous="early", seed=None, hazards="off", observer=recorder)
    torch.manual_seed(0)
    with using(options):
        kernel(*(given[name] for name in kernel.names.arguments))
    return recorder


def measure(
    spec: VariantSpec, directory: Path, card: str | None = None, rows: int | None = None,
    tiles: tuple[int, int] = TILES,
) -> Cost:  # fmt: skip
    """The cost of a variant.

    Args:
        spec, directory: what was built where.
        card: name of a card on file; None: an H200, or a B200 of an sm_100a variant.
        rows: query rows of the sequence; None: as many as the variant's row tile.
        tiles: (few, many) KV tiles of the two records.

    Raises:
        VariantError: it is not built.
        ValueError: an argument that makes no sense.
    """
    if not 2 <= tiles[0] < tiles[1]:
        raise ValueError(f"tiles: expected two rising numbers from 2, got {tiles}")
    kernel = selfcheck.load(spec, directory)
    held, heads = card_of(spec.arch, card), rows_of(spec) if rows is None else rows
    if not 1 <= heads <= rows_of(spec):
        raise ValueError(f"rows: expected 1 to {rows_of(spec)} of {spec.name}, got {heads}")
    sizes = _steady(spec, heads, tiles)
    steady = sizes is not None
    if sizes is not None:
        few, many = (record(spec, kernel, each) for each in sizes)
    else:
        few = many = record(spec, kernel, Sizes(BATCH, TOKENS, 1, min(heads, 16), PARTS))
    code = sass.blocks(kernel.ptx_path.with_suffix(".o")).get(entry(few))
    found = profile(few, many if steady else None, tiles, code)
    plays = [_played(r, found, held) for r in ((few, many) if steady else (few,))]
    each = 1 / (tiles[1] - tiles[0]) if steady else 1.0
    cycles, waited = plays[-1].cycles, plays[-1].waits()
    if steady:
        cycles -= plays[0].cycles
        before = plays[0].waits()
        waited = {k: n - before.get(k, 0.0) for k, n in waited.items()}
    handovers = {k: n * each for k, n in waited.items() if n > 0}
    hot = conflicts(many, entry(many))
    return Cost(spec, heads, found, held, cycles * each, handovers, hot, plays[-1])


def _steady(spec: VariantSpec, heads: int, tiles: tuple[int, int]) -> list[Sizes] | None:
    """Extents of the calls whose difference is the steady state, None where an op has none."""
    of_op = workloads.of(spec.op).steady
    if of_op is not None:
        return [of_op(spec, n) for n in tiles]
    if spec.family.token_tile is None:
        return None
    return [Sizes(1, spec.token_tile * n, 1, heads) for n in tiles]


def _played(recorder: Recorder, found: Profile, card: Card) -> timeline.Timeline:
    """The timeline of the first cluster."""
    name = entry(recorder)
    factors = {
        w: role.figures.issued / role.figures.ptx
        for role in found.roles for w in role.warps if role.figures.ptx > 0
    }  # fmt: skip
    warps = [w for w in recorder.warps if w.kernel == name and w.cluster == 0]
    return timeline.Player(recorder.programs[name].kernel, warps, factors, card.memory).play()
