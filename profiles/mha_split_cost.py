"""Dense prefill of few query tokens against many keys: split over keys or not, on one GPU.

    python -m profiles.mha_split_cost --out profiles/results

Contenders take turns in a new order each round, as in ``profiles.mha_cost``, and only ratios of one
table hold.  Results are compared with each other before anything is timed.  A shape that is not
split (2048 query tokens) shows what the launches that might split cost.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

from dsl_kernels.mha_list import pieces_of
from profiles import page, timing
from profiles.machine import machine
from profiles.mha_cost import OUT_GATE, in_turn, ratio, spread
from snapmla.mha import mha_prefill, workspace_size
from snapmla.testing import metrics

SHAPES = (  # sequences, query tokens, keys of each, heads
    (1, 128, 32768, 16), (1, 1, 32768, 16), (1, 128, 4096, 16), (1, 128, 131072, 16),
    (1, 512, 32768, 16), (8, 128, 16384, 16), (1, 128, 32768, 128), (4, 128, 16384, 128),
    (1, 2048, 32768, 16), (1, 2048, 8192, 16),
)  # fmt: skip
COLUMNS = (
    "prompts", "keys", "heads", "pieces", "workspace, MB", "split µs", "whole µs", "speed ratio",
    "apart",
)  # fmt: skip


def row(shape: tuple[int, int, int, int], device: torch.device, seed: int) -> str:
    """One line of the table."""
    torch.cuda.empty_cache()  # what the row before it had
    b, s_q, s_k, h = shape
    draw = lambda *extents: torch.randn(*extents, device=device).bfloat16()
    q, kv, rope = draw(b * s_q, h, 192), draw(b * s_k, h, 256), draw(b * s_k, 1, 64)
    offsets = [
        torch.arange(b + 1, device=device, dtype=torch.int32) * tokens for tokens in (s_q, s_k)
    ]
    words = workspace_size(b * s_q, b, h, b * s_k)
    results = {
        split: (
            torch.empty(b * s_q, h, 128, device=device, dtype=torch.bfloat16),
            torch.empty(h, b * s_q, device=device),
            torch.empty(words, device=device, dtype=torch.int32),
        )
        for split in (True, False)
    }

    def call(split: bool) -> None:
        out, lse, work = results[split]
        mha_prefill(
            q, kv[..., :128], kv[..., 128:], *offsets, s_q, s_k, k_rope=rope, split_keys=split,
            out=out, lse=lse, workspace=work,
        )  # fmt: skip

    call(True)
    call(False)
    apart = metrics.relative_l2(results[True][0].float(), results[False][0].float())
    if apart > OUT_GATE:
        raise SystemExit(f"{shape}: split and whole differ by {apart:.1e}")
    found = in_turn({"split": lambda: call(True), "whole": lambda: call(False)}, seed)
    return (
        f"| {b} × {s_q} | {s_k} | {h} | {pieces_of(s_q, s_k)} | {4e-6 * words:.1f} | "
        f"{spread(found['split'])} | {spread(found['whole'])} | "
        f"{ratio(found['split'], found['whole']):.2f} | {apart:.1e} |"
    )


def main(
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    seed: Annotated[int, typer.Option(help="Of the order of contenders.")] = 0,
) -> None:
    """Times the shapes and writes ``mha_split_cost.md``."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    head = page.head(
        "Dense prefill split over keys", "profiles.mha_split_cost",
        page.told(machine(device, timing.Nvml()), page.FACTS),
        "192/128, causal; the median (middle half) of rounds in random order",
    )  # fmt: skip
    with torch.inference_mode():
        rows = (row(shape, device, seed) for shape in SHAPES)
        page.write_rows(out / "mha_split_cost.md", head, COLUMNS, rows)


if __name__ == "__main__":
    typer.run(main)
