"""FlashMLA's scheduling records: made as it makes them, and made up."""

from __future__ import annotations

import random

Record = list[int]
INT32 = 2**31


def flash_mla_records(lengths: list[int], parts: int, overhead: int = 5) -> list[Record]:
    """FlashMLA's greedy fill (``get_mla_metadata``), in its words; slots and flags are left 0."""
    tiles = [-(-max(n, 0) // 64) for n in lengths]
    payload = -(-sum(n + overhead for n in tiles) // parts) + overhead
    records: list[Record] = []
    request, block = 0, 0
    for _ in range(parts):
        record, left = [request, block, 0, 0, 0, 0, 0, 0], payload
        while request < len(tiles):
            rest = tiles[request] - block
            if left < rest + overhead:
                block += max(left - overhead, 0)
                break
            left -= rest + overhead
            request, block = request + 1, 0
        record[2:4] = (request, block) if block else (request - 1, tiles[request - 1])
        records.append(record)
    return records


def drawn(g: random.Random, case: int) -> tuple[list[Record], list[int]]:
    """(records, lengths): of FlashMLA for these lengths, for others, with parts cut off, small
    numbers, any numbers; by ``case``."""
    b, parts = g.randint(1, 12), g.randint(1, 9)
    lengths = [g.choice([0, 1, 64, 65, g.randint(-5, 3000)]) for _ in range(b)]
    kind = case % 5
    if kind < 3:
        planned = lengths if kind == 0 else [g.randint(0, 3000) for _ in range(g.randint(1, 12))]
        made = flash_mla_records(planned, parts)
        return (made if kind < 2 else made[g.randrange(parts) :]), lengths

    def word() -> int:
        return g.randint(-2, b + 1) if g.random() < 0.7 else g.randint(-INT32, INT32 - 1)

    if kind == 3:
        return [[g.randint(0, b), g.randint(0, 40)] + [0] * 6 for _ in range(parts)], lengths
    return [[word() for _ in range(8)] for _ in range(parts)], lengths
