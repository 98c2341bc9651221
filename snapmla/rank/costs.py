"""Times of decode kernels: measured points of committed tables, and a model fitted to them.

``data/decode_costs.json`` has a block for every op and card that was measured; ``python -m
profiles.dispatch_data`` makes it.  Time of a decode = fixed + tiles of a part * max(issue time,
tensor-core time) of a tile, and never less than the cache's bytes at the read rate that the tables
reach.  Other cards of the same arch scale by clocks and ceilings.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dsl_kernels.spec import VariantSpec
from snapmla.rank.cards import Card, card_named, data
from snapmla.rank.load import Share
from snapmla.rank.verdicts import Size

ROW_BLOCKS = ("in_step", "balanced")  # ``row_blocks`` of ``plan_decode``
FEW_IDLE = 0.95  # of the SMs, where row blocks run in step


class Tile(NamedTuple):
    """Times of a kernel, in microseconds.

    Attributes:
        fixed_us: of a call, however many tiles it has.
        tile_us: of each tile of the busiest part.
        cut_us: added if units are cut; 0 if that was not fitted.
    """

    fixed_us: float
    tile_us: float
    cut_us: float = 0.0

    def us(self, share: Share, least: float = 0.0) -> float:
        """Predicted microseconds of a call whose units are shared out as ``share`` says.

        Args:
            least: microseconds that tiles take at least.
        """
        cut_us = self.cut_us if share.cut else 0.0
        return self.fixed_us + max(share.work * self.tile_us, least) + cut_us


@dataclass(frozen=True)
class Costs:
    """Known times of one op's kernels on one card.

    Attributes:
        card: the one that was measured.
        read_fraction: of its read rate, the most that a table reaches.
        tiles: by (pipeline, row tile).
        points: by (pipeline, row tile, rows, batch): (tokens of a sequence, us), ascending.
    """

    card: Card
    read_fraction: float
    tiles: dict[tuple[str, int], Tile]
    points: dict[tuple[str, int, int, int], list[tuple[int, float]]]

    def measured_us(self, spec: VariantSpec, rows: int, size: Size) -> float | None:
        """Time on ``card``, between two measured lengths; None outside of them."""
        curve = self.points.get((spec.pipeline, spec.row_tile, rows, size.batch), [])
        for (low, us_low), (high, us_high) in itertools.pairwise(curve):
            if low <= size.seqlen <= high:
                return us_low + (us_high - us_low) * (size.seqlen - low) / (high - low)
        return next((us for length, us in curve if length == size.seqlen), None)

    def model_us(
        self, spec: VariantSpec, size: Size, card: Card, *, shares: Iterable[Share],
        tensor_cycles: float, token_bytes: float, more_cycles: float = 0.0,
    ) -> float | None:  # fmt: skip
        """Microseconds on a card of the same arch; None if ``tiles`` lacks the kernel.

        Args:
            shares: how the work may be shared out; the one counts that takes least.
            tensor_cycles: that a tile keeps an H100's tensor core busy.
            token_bytes: of the cache, that are read.
            more_cycles: those of them that the measured kernel did not have.
        """
        entry = self.tiles.get((spec.pipeline, spec.row_tile))
        if entry is None:
            return None
        issue_us = entry.tile_us * self.card.mhz / card.mhz
        issue_us += more_cycles * card.tensor_slowdown / card.mhz
        tile_us = max(issue_us, tensor_cycles * card.tensor_slowdown / card.mhz)
        read_gbs = self.read_fraction * card.read_gbs
        read_us = size.batch * size.seqlen * token_bytes / read_gbs * 1e-3
        tile = entry._replace(tile_us=tile_us)
        return min(tile.us(share, read_us) for share in shares)


def parts_of(sms: int, unit_rows: int, spec: VariantSpec) -> int:
    """CTAs (or clusters) that share the tokens of each row block of a unit so that they fill the
    SMs."""
    return max(1, sms // (-(-unit_rows // spec.row_tile) * spec.cluster))


def unit_rows(sms: int, rows: int, spec: VariantSpec) -> int:
    """Query rows that are scheduled together, of a sequence that has ``rows``.

    All of them where its row blocks, side by side, leave few SMs idle: CTAs that read the same
    tokens at the same time read them from memory once.  Else a row block.
    """
    blocks, parts = -(-rows // spec.row_tile), sms // spec.cluster
    return rows_of_unit(rows, spec, in_step=parts // blocks * blocks >= FEW_IDLE * parts)


def rows_of_unit(rows: int, spec: VariantSpec, *, in_step: bool) -> int:
    """Rows of a unit, in whole row tiles: those of a sequence, or of a row block."""
    return -(-rows // spec.row_tile) * spec.row_tile if in_step else spec.row_tile


@functools.lru_cache(maxsize=16)
def costs_of(op: str, arch: str, own: str = "") -> Costs | None:
    """Costs of an op on an architecture, from the tables on file; None if there are none.

    Args:
        own: name of a card whose block goes before those of others.
    """
    blocks = [block for block in data("decode_costs.json")["costs"] if block["op"] == op]
    for block in sorted(blocks, key=lambda block: block["card"] != own):
        card = card_named(block["card"])
        assert card is not None
        if card.arch != arch:
            continue
        points: dict[tuple[str, int, int, int], list[tuple[int, float]]] = {}
        for m in block["measured"]:
            key = (m["pipeline"], m["row_tile"], m["rows"], m["batch"])
            points.setdefault(key, []).append((m["seqlen"], m["us"]))
        for curve in points.values():
            curve.sort()
        tiles = {
            (t["pipeline"], t["row_tile"]): Tile(t["fixed_us"], t["tile_us"], t.get("cut_us", 0.0))
            for t in block["tiles"]
        }
        return Costs(card, block["read_fraction"], tiles, points)
    return None
