"""What bounds sparse decode: gather and math by themselves, on one GPU.

    python -m profiles.sparse_bounds_cost --peers DIR --out profiles/results

Builds that do half of the work (dsl_kernels/sm90/bounds.py) beside the kernel itself, ``native``
over the FP8 cache and ``rows`` over rows of 656 bytes, with plan, indices and graphs of
profiles.sparse_cost.  The kernel's results are compared with fp64 before anything is timed; the
others have none.  The builds must be there (python -m codegen build of the names that the error
gives); one whose registers spill would bound nothing, and is refused when it is built.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

from codegen.artifacts import write_atomic
from dsl_kernels.spec import VariantSpec
from profiles import page, sparse_cost, timing
from profiles.machine import machine
from profiles.sparse_cost import BYTES, CONTENDERS, GATES, Contender, Pools, Results
from snapmla import runtime
from snapmla.errors import VariantError

HALVES = ("all", "gather", "math")  # of the work; the values of axis ``only``
SHAPES = ((128, 1, 64, 2048), (128, 1, 16, 2048), (2, 1, 64, 2048))  # b, s_q, heads, topk
# TB/s of the gather alone that are aimed at, of a kernel and heads; of 128 query tokens.
AIMS = {("native", 64): 3.3, ("native", 16): 3.3, ("rows", 64): 3.0}
COLUMNS = (
    "b, s_q, heads, topk", "kernel", "together µs", "error", "gather µs", "TB/s", "gate",
    "math µs", "TFLOP/s",
)  # fmt: skip


def build_of(contender: Contender, only: str) -> VariantSpec:
    """The build that does ``only`` this, of the kernel that the contender's plan chooses."""
    variant = contender.plan.variant
    return VariantSpec(
        op="sparse_decode", arch=runtime.arch_of(variant.device), pipeline=variant.pipeline,
        row_tile=variant.row_tile, out_dtype="bf16", cache_dtype=variant.cache_dtype, only=only,
    )  # fmt: skip


def by_build(contender: Contender, only: str) -> Contender:
    """The contender with another build, whose name it gets.

    All plans of a row tile share their kernels: a call first says which.

    Raises:
        VariantError: it is not built.
    """
    variant, spec = contender.plan.variant, build_of(contender, only)
    if runtime.find(spec) is None:
        raise VariantError(f"{spec.name} is not built: python -m codegen build {spec.name}")
    kernel = runtime.kernel(spec, variant.device.type)

    def with_build(call: Callable[[], Results]) -> Callable[[], Results]:
        def run() -> Results:
            variant.kernels[torch.bfloat16] = kernel
            return call()

        return run

    return replace(contender, name=only, calls=list(map(with_build, contender.calls)))


def gate(name: str, shape: tuple[int, int, int, int], rate: float) -> str:
    """What is aimed at of the gather alone; less than 2 % below counts as met."""
    aim = AIMS.get((name, shape[2])) if shape[0] == 128 else None
    return "–" if aim is None else f"{aim} {'met' if rate >= 0.98 * aim else 'missed'}"


def row(pools: Pools, shape: tuple[int, int, int, int], name: str) -> str:
    """A line of the table.  Raises ValueError if the kernel's results are wrong."""
    b, s_q, heads, topk = shape
    x = torch.randn(b, s_q, heads, 576, device=pools.rows.device).bfloat16()
    sets = sparse_cost.index_sets(pools, b, s_q, topk)
    builds = [by_build(CONTENDERS[name](pools, x, sets, {}), only) for only in HALVES]
    error = sparse_cost.error(builds[0], sets[0], topk)
    if not error < GATES[name]:
        raise ValueError(f"{shape}, {name}: {error}")
    us = sparse_cost.in_turn(builds)
    builds[0].plan.variant.kernels.clear()
    rate = 1e-6 * b * s_q * topk * BYTES[name] / us["gather"]
    flop = 2.0 * b * s_q * heads * topk * (576 + 512)
    cells = (
        ", ".join(map(str, shape)), name, f"{us['all']:.1f}", f"{error:.1e}", f"{us['gather']:.1f}",
        f"{rate:.2f}", gate(name, shape, rate), f"{us['math']:.1f}",
        f"{1e-6 * flop / us['math']:.0f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main(
    peers: Annotated[Path | None, typer.Option(help="Not read; as of the other parts.")] = None,
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    layout: Annotated[str, typer.Option(help="Of our cache.")] = "split",
    names: Annotated[str, typer.Option("--ours", help="native, rows, by commas.")] = "native,rows",
) -> None:
    """Times the shapes and writes ``sparse_bounds_cost.md``."""
    device = torch.device("cuda")
    facts = page.told(machine(device, timing.Nvml()), ("gpu", "driver", "cuda", "torch"))
    torch.manual_seed(0)
    lines = page.head(
        "What bounds sparse decode", "profiles.sparse_bounds_cost", facts,
        f"µs a call, medians; pages of {sparse_cost.PAGE}, layout {layout}",
        "gather, math: builds that do nothing else; error: relative L2 of the kernel to fp64",
    )  # fmt: skip
    lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    with torch.inference_mode():
        pools = Pools(128, layout, device)
        for shape in SHAPES:
            for name in names.split(","):
                lines.append(row(pools, shape, name))
                typer.echo(lines[-1])
                write_atomic(out / "sparse_bounds_cost.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
