"""The words of ``cost``: tables of roles and units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import rates
from .profile import Card, Figures, Load, Profile, loads
from .recorder import ENGINE, EXCHANGE, LSU, OPERANDS

NOT_MODELLED = (
    "not modelled: polling while a warp waits, L2 misses and DRAM pages, instruction fetch, "
    "register-bank conflicts, clock and power"
)
PREDICTED = "predicted: nothing of this architecture has been compared with hardware"
TOP = 14  # opcodes of a role
_MMA, _COPIES = (OPERANDS,), ENGINE


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns, the first to the left."""
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w)
                  for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in (head, *rows)
    ]  # fmt: skip


def roles(p: Profile) -> list[str]:
    """A line a role, and one for the CTA."""
    head = ("role", "issued", "PTX", "MUFU", "tensor", "LSU", "operands", "copies", "conflicts")
    rows = [_row(str(role), role.figures) for role in p.roles if role.figures.ptx > 0]
    return table(head, [*rows, _row("CTA", p.tile)])


def _row(name: str, f: Figures) -> list[str]:
    numbers = (
        f.issued, f.ptx, f.mufu, f.tensor, f.wavefronts(*LSU, *EXCHANGE), f.wavefronts(*_MMA),
        f.wavefronts(*_COPIES), sum(f.conflicts.values()),
    )  # fmt: skip
    return [name, *(f"{n:,.1f}" if 0 < n < 10 else f"{n:,.0f}" for n in numbers)]


def units(found: Sequence[Load]) -> list[str]:
    """A line a unit, busiest first."""
    rows = [[x.unit, f"{x.cycles:,.0f}", f"{100 * x.share:.0f} %", x.what] for x in found]
    widths = [max(len(r[i]) for r in rows) for i in range(3)]
    return [f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c.rjust(widths[2])}  {d}"
            for a, b, c, d in rows]  # fmt: skip


def paths(f: Figures) -> str:
    """Wavefronts by kind and bytes by path, in two lines."""
    waves = ", ".join(f"{k} {n:,.0f}" for k, n in sorted(f.waves.items()) if n > 0.5)
    moved = ", ".join(f"{k} {n:,.0f}" for k, n in sorted(f.moved.items()) if n > 0.5)
    return f"wavefronts: {waves}\nbytes: {moved}; of distinct sectors {f.dram[0]:,.0f} read, " \
        f"{f.dram[1]:,.0f} written"  # fmt: skip


def opcodes(p: Profile) -> list[str]:
    """The most frequent SASS opcodes of each role."""
    lines = []
    for role in (r for r in p.roles if r.figures.ptx > 0):
        most = sorted(role.figures.opcodes.items(), key=lambda x: -x[1])[:TOP]
        lines.append(f"{role}: " + ", ".join(f"{k} {n:,.0f}" for k, n in most if n >= 0.5))
    return lines


def verdict(p: Profile, card: Card, cycles: float, handovers: Mapping[str, float]) -> list[str]:
    """Lines on the unit that bounds ``p``, the modelled time, and the critical path's handovers.

    If ``p`` compares two numbers of tiles, they say how much of the time that unit is busy.
    """
    found = loads(p.tile, p.architecture, card)
    second = f", then {found[1].unit} ({100 * found[1].share:.0f} % of that)"
    waits = ", ".join(f"{n:.1f} {what}" for what, n in sorted(handovers.items()) if n >= 0.05)
    word = "" if rates.of(p.architecture).measured else "predicted: "
    time = f"{cycles:,.0f} cycles, {cycles / card.mhz:.2f} us at {card.mhz:.0f} MHz"
    if p.tiles[1]:
        time = (
            f"modelled time {time}: {100 * found[0].cycles / cycles:.0f} % of it the bound is busy"
        )
    else:  # of one cluster, which need not be like the mean
        time = f"modelled time of the first cluster {time}"
    return [
        f"{word}bound by {found[0].unit}: {found[0].cycles:,.0f} cycles{second}",
        f"{word}{time}",
        f"{word}handovers on its critical path: {waits or 'none'}",
    ]


def text(
    title: str, p: Profile, card: Card, cycles: float, handovers: Mapping[str, float],
    hot: Sequence[tuple[float, str]], full: bool = False,
) -> str:  # fmt: skip
    """The report of one variant."""
    few, many = p.tiles
    each = f"a tile, from {few} and {many} tiles of one part" if many else "a CTA, in the mean"
    source = "SASS estimated from executed PTX" if p.tile.opcodes else "no object: PTX"
    lines = [
        f"{title}: {each}, CTA of a cluster of {p.ctas}; {card.name} at {card.mhz:.0f} MHz",
        *([] if rates.of(p.architecture).measured else [PREDICTED]),
        f"issued: {source}; tensor: cycles; LSU, operands, copies: wavefronts of 128 bytes", "",
        *roles(p), "", *units(loads(p.tile, p.architecture, card)), "", paths(p.tile), "",
        *verdict(p, card, cycles, handovers),
    ]  # fmt: skip
    if hot:
        lines.append("bank conflicts: " + "; ".join(f"{n:,.0f} at {at}" for n, at in hot[:3]))
    if full:
        lines += ["", *opcodes(p)]
    return "\n".join([*lines, NOT_MODELLED])


def comparison(names: Sequence[str], found: Sequence[Mapping[str, float]]) -> str:
    """Two columns and the second over the first; lines that are nothing in both are left out."""
    rows = []
    for label in found[0]:
        a, b = (x.get(label, 0.0) for x in found)
        if a or b:
            rows.append([label, f"{a:,.0f}", f"{b:,.0f}", f"{b / a:.2f}" if a else ""])
    return "\n".join(table(["", *names, "ratio"], rows))
