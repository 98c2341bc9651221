"""Row tiles and cuts of sparse decode by size, beside what the dispatcher chooses.

    python -m profiles.sparse_tiles --out profiles/results

Query tokens x heads x entries over both caches of ``profiles.sparse_cost``: every row tile, with
lists cut so that all parts have equal shares, and whole (where that is not the same), and the plan
that a call gets by itself.  *Regret* is its time over the least of all.  Results are compared with
fp64 as there.  The dispatcher's times are fitted to the table (``profiles.dispatch_data``).
"""

from __future__ import annotations

import datetime
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

from codegen.artifacts import write_atomic
from dsl_kernels.dims import TOKEN_TILE
from dsl_kernels.families.sparse_decode import ROW_TILES as TILES_OF
from profiles import sparse_cost as cost
from profiles import timing
from profiles.bench import command_line, commit
from profiles.machine import machine
from snapmla.dispatch import Load, parts_of_lists
from snapmla.sparse.plan import sparse_spec

CACHES = {"native": "fp8", "rows": "fp8_ds_mla"}
TOKENS, HEADS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (16, 32, 64, 128)
ENTRIES = (512, 2048)
MOST = 128 * 2048 * 128  # tokens x entries x heads: larger work is not in question
CUTS = ("cut", "whole")
CHOSEN = "chosen"
ROW_TILES = TILES_OF["mix16"]


def candidates(
    name: str, shape: tuple[int, int, int], sms: int
) -> dict[tuple[int, str] | str, dict[str, Any]]:
    """Options of ``plan_sparse_decode`` by row tile and cut, those that differ; by ``CHOSEN``."""
    tokens, heads, entries = shape
    full = -(-entries // TOKEN_TILE) * TOKEN_TILE
    found: dict[tuple[int, str] | str, dict[str, Any]] = {CHOSEN: {}}
    for tile in ROW_TILES:
        if tile >= 2 * heads:
            continue
        spec = sparse_spec("sm_90a", tile, "bf16", cache=CACHES[name])
        load = Load(tokens, parts_of_lists(sms, heads, tokens, spec), full // TOKEN_TILE)
        for share in load.shares():
            how = {"num_parts": load.parts} if share.cut else {"fixed_split_tokens": full}
            found[tile, "cut" if share.cut else "whole"] = {"row_tile": tile, **how}
    return found


def row(pools: cost.Pools, name: str, shape: tuple[int, int, int]) -> str:
    """One line of the table.  Raises ValueError for results that are wrong."""
    tokens, heads, entries = shape
    device = pools.rows.device
    x = torch.randn(tokens, 1, heads, 576, device=device).bfloat16()
    sets = cost.index_sets(pools, tokens, 1, entries)
    found, sms = {}, torch.cuda.get_device_properties(device).multi_processor_count
    for label, options in candidates(name, shape, sms).items():
        one = cost.CONTENDERS[name](pools, x, sets, options)
        if not (error := cost.error(one, sets[0], entries)) < 2 * cost.GATES[name]:
            raise ValueError(f"{name} {shape} {label}: {error}")
        one.name = str(label)
        found[label] = one
    times = cost.in_turn(list(found.values()))
    us = {label: times[one.name] for label, one in found.items()}
    own, plan = us.pop(CHOSEN), found[CHOSEN].plan
    best = min(us, key=lambda label: us[label])
    cells = [f"{us[t, c]:.1f}" if (t, c) in us else "–" for t in ROW_TILES for c in CUTS]
    what = f"{plan.row_tile}, {'whole' if plan.split_tiles else f'{plan.num_parts} parts'}"
    return (
        f"| {name} | {tokens} × {heads} × {entries} | {' | '.join(cells)} | {what} | {own:.1f} | "
        f"{' '.join(map(str, best))} | {own / us[best]:.2f} |"
    )


def sizes(chosen: Callable[[tuple[int, int, int]], bool]) -> list[tuple[int, int, int]]:
    """Of the table."""
    return [
        (tokens, heads, entries)
        for entries, heads, tokens in itertools.product(ENTRIES, HEADS, TOKENS)
        if chosen((tokens, heads, entries))
    ]


def main(
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    names: Annotated[str, typer.Option("--ours", help="native, rows, by commas.")] = "native,rows",
) -> None:
    """Times the sizes and writes ``sparse_tiles.md``."""
    facts = machine(torch.device("cuda"), timing.Nvml())
    named = ("gpu", "driver", "cuda", "torch")
    columns = " | ".join(f"{tile} {cut}" for tile in ROW_TILES for cut in CUTS)
    lines = [
        "# Row tiles and cuts of sparse decode by size", "",
        f"`{command_line(sys.argv[1:], '-m profiles.sparse_tiles')}`", "",
        f"- commit {commit()}, {datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S}Z",
        f"- {', '.join(f'{k} {facts[k]}' for k in named if facts.get(k) is not None)}",
        "- µs a call in a graph; row tile, and how lists are cut", "",
        f"| cache | tokens × heads × entries | {columns} | chosen | its µs | least | regret |",
        "|---" * 12 + "|",
    ]  # fmt: skip
    torch.manual_seed(0)
    with torch.inference_mode():
        pools = cost.Pools(128, "split", torch.device("cuda"))
        for shape in sizes(lambda s: s[0] * s[1] * s[2] <= MOST):
            for name in names.split(","):
                lines.append(row(pools, name, shape))
                typer.echo(lines[-1])
    write_atomic(out / "sparse_tiles.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
