"""Use of an SM's units by roles, per tile or per launch, and the unit that bounds a kernel.

Two records of one kernel with different numbers of tiles give the steady state: their difference,
divided by the tiles.  A role is warps that run the same code.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..ptx import Kernel
from . import rates, sass
from .recorder import ENGINE, EXCHANGE, LSU, OPERANDS, SECTOR, Recorder, WarpRecord

ALIKE = 0.5  # share of executions that warps of one role have in common, at least


@dataclass
class Counts:
    """Executions and accesses by PTX instruction: of a role, one CTA."""

    fetched: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    waves: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    ideal: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    moved: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    tensor: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, other: Any, factor: float = 1.0) -> None:
        """Adds a warp's record, or other counts, so many times."""
        for name in self.__annotations__:
            mine, theirs = getattr(self, name), getattr(other, name)
            for key, value in theirs.items():
                mine[key] += factor * value


@dataclass(frozen=True)
class Figures:
    """Use of each unit by one CTA, or by one of its roles.

    Attributes:
        ptx: PTX instructions, of warps.
        opcodes: estimated SASS instructions by opcode, see ``softgpu.cost.sass``; empty without
            the object.
        waves: wavefronts of shared memory by kind: ``load``, ``store``, ``ldmatrix``,
            ``stmatrix``, ``cp.async``, ``shuffle``, ``arrive``, ``fill``, ``drain``, ``operands``.
        conflicts: of those, what bank conflicts cost.
        moved: bytes by path: ``load``, ``store`` (sectors of 32 bytes), ``cp.async``,
            ``TMA load``, ``TMA store`` (bulk copies too; whole boxes).
        tensor: cycles of the SM's tensor cores.
        dram: bytes of distinct sectors that were read, and written; of all roles only.
    """

    ptx: float
    opcodes: Mapping[str, float]
    waves: Mapping[str, float]
    conflicts: Mapping[str, float]
    moved: Mapping[str, float]
    tensor: float
    dram: tuple[float, float] = (0.0, 0.0)

    @property
    def issued(self) -> float:
        """Warp instructions that were issued: SASS, or PTX where there is no object."""
        return sum(self.opcodes.values()) if self.opcodes else self.ptx

    @property
    def mufu(self) -> float:
        """Special-function instructions of warps."""
        return self.opcodes.get("MUFU", 0.0)

    def wavefronts(self, *kinds: str) -> float:
        """Wavefronts of these kinds, or of all."""
        return sum(n for kind, n in self.waves.items() if not kinds or kind in kinds)

    @property
    def lsu(self) -> float:
        """Wavefronts to shared memory, as an H200's LSU counter adds them up."""
        return self.wavefronts(*LSU, *EXCHANGE, OPERANDS)


@dataclass(frozen=True)
class Role:
    """Warps of a CTA that run the same code; ``name`` is the file that most of it comes from."""

    name: str
    warps: tuple[int, ...]
    figures: Figures

    def __str__(self) -> str:
        return f"{self.name}, {span(self.warps)}"


def span(warps: tuple[int, ...]) -> str:
    """``warp 4``, ``warps 4-7, 9``"""
    runs: list[list[int]] = []
    for w in warps:
        if runs and runs[-1][1] == w - 1:
            runs[-1][1] = w
        else:
            runs.append([w, w])
    texts = [f"{a}-{b}" if b > a else str(a) for a, b in runs]
    return ("warp " if len(warps) == 1 else "warps ") + ", ".join(texts)


@dataclass(frozen=True)
class Profile:
    """One kernel: a steady tile of one CTA by role, and what a CTA costs besides its tiles.

    Attributes:
        tiles: (few, many) of the two records; (0, 0): one record, ``tile`` is the whole CTA.
        ctas: of a cluster.
    """

    kernel: str
    architecture: int
    tiles: tuple[int, int]
    roles: tuple[Role, ...]
    tile: Figures
    fixed: Figures
    ctas: int

    def whole(self, tiles: float, items: float = 1.0) -> dict[str, float]:
        """Counters of a CTA that runs so many tiles in so many work tiles; see ``counters``."""
        tile, fixed = counters(self.tile), counters(self.fixed)
        return {name: tiles * tile[name] + items * fixed[name] for name in tile}


def counters(f: Figures) -> dict[str, float]:
    """Figures by the names that ``profiles.record_cost`` gives to a card's counters."""
    return {
        "issued instructions": f.issued,
        "tensor cycles": f.tensor,
        "shared memory, loads": f.wavefronts("load", "ldmatrix"),
        "shared memory, stores": f.wavefronts("store", "stmatrix"),
        "shared memory, LSU": f.lsu,
        "bank conflicts": sum(f.conflicts.get(kind, 0.0) for kind in LSU),
        "DRAM read": f.dram[0],
        "MUFU": f.mufu,
    }


# ---- from records --------------------------------------------------------------------------------
def entry(recorder: Recorder) -> str:
    """The kernel that was launched first.  Raises ValueError if none was."""
    if not recorder.warps:
        raise ValueError("cost: no kernel was launched")
    return recorder.warps[0].kernel


def profile(
    few: Recorder, many: Recorder | None, tiles: tuple[int, int], code: list[sass.Block] | None
) -> Profile:
    """Profile of the kernel that ``few`` launched first.

    Args:
        few, many: records of calls with ``tiles`` tiles a CTA; no ``many``: one whole launch.
        code: blocks of the kernel's SASS; None: PTX instructions stand for issued ones.

    Raises:
        ValueError: nothing was launched.
    """
    name = entry(few)
    last = many if many is not None else few
    program = last.programs[name]
    kernel = program.kernel
    estimate = sass.Estimate(kernel, code) if code is not None else None
    groups = roles_of([w for w in last.warps if w.kernel == name])
    roles, tile_total, fixed_total = [], Counts(), Counts()
    for warps in groups:
        counts = _of_warps(few, name, warps)
        tile, fixed = counts, Counts()
        if many is not None:
            tile, fixed = _split(counts, _of_warps(many, name, warps), tiles)
        tile_total.add(tile)
        fixed_total.add(fixed)
        roles.append(Role(_file(kernel, tile), warps, figures(kernel, tile, estimate)))
    dram = [_dram(few, name), _dram(last, name)]
    each = tuple((b - a) / max(1, tiles[1] - tiles[0]) for a, b in zip(*dram, strict=True))
    rest = tuple(a - tiles[0] * e for a, e in zip(dram[0], each, strict=True))
    if many is None:
        each, rest = dram[0], (0.0, 0.0)
    return Profile(
        name, program.architecture, tiles if many is not None else (0, 0), tuple(roles),
        figures(kernel, tile_total, estimate, (each[0], each[1])),
        figures(kernel, fixed_total, estimate, (rest[0], rest[1])),
        len({w.rank for w in few.warps if w.kernel == name}),
    )  # fmt: skip


def figures(
    kernel: Kernel, counts: Counts, estimate: sass.Estimate | None,
    dram: tuple[float, float] = (0.0, 0.0),
) -> Figures:  # fmt: skip
    """Sums over the instructions of a role."""
    waves, ideal, moved = (_by_kind(x) for x in (counts.waves, counts.ideal, counts.moved))
    return Figures(
        sum(counts.fetched.values()),
        estimate.opcodes(counts.fetched) if estimate is not None else {},
        waves, {kind: n - ideal[kind] for kind, n in waves.items()}, moved,
        sum(counts.tensor.values()), dram,
    )  # fmt: skip


def conflicts(recorder: Recorder, kernel: str) -> list[tuple[float, str]]:
    """Wavefronts of a whole launch that bank conflicts cost: (how many, where), most first."""
    total, code = Counts(), recorder.programs[kernel].kernel
    for w in recorder.warps:
        if w.kernel == kernel:
            total.add(w)
    lost: dict[int, float] = defaultdict(float)
    for (pc, kind), n in total.waves.items():
        lost[pc] += n - total.ideal[pc, kind]
    found = [(n, code.where(code.code[pc])) for pc, n in lost.items() if n > 0]
    return sorted(found, reverse=True)


def roles_of(warps: Iterable[WarpRecord]) -> list[tuple[int, ...]]:
    """Warp numbers of a CTA, those together that run the same code; the busiest decides."""
    runs: dict[int, Counter[int]] = {}
    for w in warps:
        runs.setdefault(w.index, Counter()).update(w.fetched)
    groups: list[list[int]] = []
    for index, mine in sorted(runs.items()):
        for group in groups:
            theirs = runs[group[0]]
            common, most = (mine & theirs).total(), (mine | theirs).total()
            if most and common / most >= ALIKE:
                group.append(index)
                break
        else:
            groups.append([index])
    return [tuple(g) for g in groups]


def _of_warps(recorder: Recorder, kernel: str, warps: tuple[int, ...]) -> Counts:
    """Counts of these warps, of one CTA in the mean."""
    total, n = Counts(), recorder.ctas[kernel]
    for w in recorder.warps:
        if w.kernel == kernel and w.index in warps:
            total.add(w, 1 / n)
    return total


def _split(few: Counts, many: Counts, tiles: tuple[int, int]) -> tuple[Counts, Counts]:
    """(one tile, what is left of the few)"""
    tile, fixed = Counts(), Counts()
    tile.add(many, 1 / (tiles[1] - tiles[0]))
    tile.add(few, -1 / (tiles[1] - tiles[0]))
    fixed.add(few)
    fixed.add(tile, -tiles[0])
    return tile, fixed


def _dram(recorder: Recorder, kernel: str) -> tuple[float, float]:
    """Bytes read and written by one CTA, each sector once."""
    n = recorder.ctas[kernel]
    read, written = (len(recorder.sectors[kernel, what]) for what in ("read", "written"))
    return SECTOR * read / n, SECTOR * written / n


def _by_kind(values: Mapping[tuple[int, str], float]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for (_, kind), n in values.items():
        found[kind] += n
    return found


def _file(kernel: Kernel, counts: Counts) -> str:
    """The file most executed instructions come from, without its ending."""
    found: Counter[str] = Counter()
    for pc, n in counts.fetched.items():
        line = sass.line_of(kernel, kernel.code[pc])
        if line is not None and n > 0:
            found[line[0].removesuffix(".py")] += n  # type: ignore[assignment]
    return found.most_common(1)[0][0] if found else "no steady code"


# ---- ceilings ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Card:
    """Rates of a card, against which a cost is held.

    Attributes:
        name: of the card.
        memory: bytes from memory a cycle and SM, at the clock of ``mhz``.
        mhz: SM clock.
        sms: multiprocessors.
    """

    name: str
    memory: float
    mhz: float
    sms: int


@dataclass(frozen=True)
class Load:
    """One unit: cycles that it is busy, and what those are of the busiest unit's."""

    unit: str
    cycles: float
    share: float
    what: str


def loads(f: Figures, architecture: int, card: Card) -> list[Load]:
    """Cycles of each unit of an SM, busiest first."""
    rate = rates.of(architecture)
    port = 128 / rate.port * f.wavefronts()
    found = {
        "memory": (sum(f.dram) / card.memory, f"{sum(f.dram):,.0f} bytes at {card.memory:.1f}"),
        "shared memory": (
            port,
            f"{f.wavefronts(*LSU, *EXCHANGE):,.0f} by threads + {f.wavefronts(OPERANDS):,.0f} MMA "
            f"operands + {f.wavefronts(*ENGINE):,.0f} copies",
        ),
        "tensor cores": (f.tensor, "MMA shapes at the nominal rate"),
        "issue": (f.issued / rate.issue, f"{f.issued:,.0f} instructions at {rate.issue}"),
        "special functions": (32 * f.mufu / rate.mufu, f"{f.mufu:,.0f} MUFU"),
    }
    most = max(cycles for cycles, _ in found.values()) or 1.0
    made = [Load(unit, cycles, cycles / most, what) for unit, (cycles, what) in found.items()]
    return sorted(made, key=lambda x: -x.cycles)
