"""Sparse prefill straight from the FP8 cache beside FlashMLA's kernel over BF16 rows, on one GPU.

    python -m profiles.sparse_prefill_cache_cost --peers DIR --out profiles/results

``--designs`` times other builds of the kernel for 16 heads, those that are there: more tiles in
flight, a row a copy.

What FlashMLA's callers pay before their call, rows out of an FP8 cache, is timed beside and is in
no ratio.  Results are compared with fp64 before anything is timed.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

import snapmla
from codegen.artifacts import write_atomic
from profiles import page, timing
from profiles.machine import machine
from profiles.mha_cost import gemm, in_turn, ratio, spread
from profiles.sparse_prefill_cost import Problem, Shape, verdict
from snapmla import runtime
from snapmla.sparse.plan import sparse_spec, variant_of
from snapmla.sparse.prefill import sparse_prefill
from snapmla.sparse.prefill_fp8 import plan_sparse_prefill

PAGE = 64
# relative L2 to fp64 on the quantised inputs: e4m3 P over latents without a mean costs up to 2.7e-2
FP8_GATE = 3e-2
FP8_SHAPES = tuple(
    Shape(4096, s_kv, heads, 2048, gate)
    for s_kv, heads, gate in (
        (8192, 128, 1.15), (32768, 128, 1.15), (32768, 64, 1.10), (32768, 16, 1.6),
    )
)  # fmt: skip
FP8_COLUMNS = (
    "query tokens", "rows of KV", "heads", "topk", "snapmla FP8 µs", "TFLOP/s", "FlashMLA BF16 µs",
    "ratio", "gate", "snapmla BF16 µs", "ratio to it", "fetch_dequant µs", "error",
)  # fmt: skip
DESIGN_COLUMNS = ("build", "µs", "cycles a tile", "ratio to FlashMLA", "error")
# Of the kernel for 16 heads: values of its unnamed axes.
DESIGNS: dict[str, dict[str, Any]] = {
    "in service": {}, "four tiles in flight": {"stages": 4}, "a row a copy": {"lines": 0},
}  # fmt: skip


@dataclass(frozen=True)
class FromFP8:
    """The same rows and queries, quantised."""

    problem: Problem
    cache: snapmla.PagedKVCache
    query: snapmla.QuantizedQuery
    plan: Any

    @classmethod
    def of(cls, problem: Problem) -> FromFP8:
        shape, device, kv = problem.shape, problem.q.device, problem.kv[:, 0]
        pages = -(-shape.s_kv // PAGE)
        cache = snapmla.PagedKVCache.allocate(pages, PAGE, device=device)
        slots = torch.arange(shape.s_kv, device=device, dtype=torch.int32)
        snapmla.append_kv(cache, kv[:, :512], kv[:, 512:], slots)
        query = snapmla.quantize_q(problem.q[..., :512], problem.q[..., 512:])
        plan = plan_sparse_prefill(shape.heads, shape.s_q, topk=shape.topk, device=device)
        return cls(problem, cache, query, plan)

    def ours(self) -> Any:
        out, _, lse = self.problem.results
        return sparse_prefill(
            self.query, self.cache, self.problem.indices, self.problem.scale, out=out, lse=lse,
            plan=self.plan,
        )  # fmt: skip

    def fetch(self) -> Any:
        """Rows of BF16 out of the whole cache, which FlashMLA's callers make first."""
        pages = self.cache.content.shape[0]
        table = torch.arange(pages, device=self.problem.q.device, dtype=torch.int32)[None]
        lengths = torch.full_like(table[0, :1], self.problem.shape.s_kv)
        return lambda: snapmla.fetch_dequant(self.cache, table, lengths)

    def error(self, results: Any, allowed: float = FP8_GATE) -> float:
        """Largest relative L2 of a few query tokens to fp64 on the quantised inputs.

        Raises:
            ValueError: it is above what is ``allowed``, or the LSE is off.
        """
        out, _, lse = results
        cache, query, shape = self.cache, self.query, self.problem.shape
        assert cache.scale is not None
        worst = 0.0
        for i in (0, 1, shape.s_q // 2, shape.s_q - 1):
            at = self.problem.indices[i, 0].long()
            content, rope, scale = (
                x.flatten(0, 1)[at].double() for x in (cache.content, cache.rope, cache.scale)
            )
            kv = torch.cat((content, rope), -1) * scale[:, None]
            q = torch.cat((query.nope[i].double(), query.rope[i].double()), -1)
            logits = q * query.row_scale[i].double()[:, None] @ kv.T * self.problem.scale
            want = logits.softmax(-1) @ kv[:, :512]
            error = float((out[i].double() - want).norm() / want.norm())
            of_lse = float((lse[i] - logits.logsumexp(-1)).abs().max())
            if not (error < allowed and of_lse < 2e-3):
                raise ValueError(f"{shape}, token {i}: {error}, LSE {of_lse}")
            worst = max(worst, error)
        return worst


def fp8_row(shape: Shape, device: torch.device, seed: int) -> str:
    """A line of the table."""
    problem = Problem.draw(shape, device)
    made = FromFP8.of(problem)
    error = made.error(made.ours())
    problem.error(problem.flashmla())
    calls = {
        "fp8": made.ours, "rows": problem.ours, "flashmla": problem.flashmla, "fetch": made.fetch(),
    }  # fmt: skip
    found = in_turn(calls, seed)
    us, relative = median(found["fp8"]), ratio(found["fp8"], found["flashmla"])
    return (
        f"| {shape.s_q} | {shape.s_kv} | {shape.heads} | {shape.topk} | {spread(found['fp8'])} | "
        f"{shape.flop / us * 1e-6:.0f} | {spread(found['flashmla'])} | {relative:.3f} | "
        f"{verdict(relative, shape.gate)} | {spread(found['rows'])} | "
        f"{ratio(found['fp8'], found['rows']):.3f} | {median(found['fetch']):.1f} | {error:.1e} |"
    )


def design_rows(shape: Shape, device: torch.device, seed: int) -> list[str]:
    """Lines of the other table: each build that is there, and FlashMLA's kernel, in turn.

    Raises:
        ValueError: a build is wrong.
    """
    problem = Problem.draw(shape, device)
    made = FromFP8.of(problem)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    usual = sparse_spec(runtime.arch_of(device), 16, "bf16")
    calls: dict[str, Any] = {"FlashMLA": problem.flashmla}
    errors: dict[str, str] = {}
    for name, axes in DESIGNS.items():
        spec = usual.replace(**axes)
        if runtime.find(spec) is None:
            continue
        plan = snapmla.plan_sparse_decode(
            shape.heads, 1, topk=shape.topk, batch=shape.s_q, device=device, row_tile=16,
            num_parts=sms, fixed_split_tokens=shape.topk,
        )  # fmt: skip
        calls[name] = functools.partial(
            _by_kernel, replace(made, plan=plan), runtime.kernel(spec, device.type)
        )
        made.problem.results[0].fill_(torch.nan)  # else those of the build before would do
        errors[name] = f"{made.error(calls[name]()):.1e}"
    found = in_turn(calls, seed)
    variant_of(device, "etap", 16, 1, "fp8").kernels.clear()
    return [
        f"| {name} | {spread(found[name])} | "
        f"{shape.cycles(median(found[name]), sms):.0f} | "
        f"{ratio(found[name], found['FlashMLA']):.3f} | {error} |"
        for name, error in errors.items()
    ]


def _by_kernel(made: FromFP8, kernel: Any) -> Any:
    """A call by another build of its kernel, which all plans of its row tile share."""
    made.plan.variant.kernels[torch.bfloat16] = kernel
    return made.ours()


def main(
    peers: Annotated[Path, typer.Option(help="Folder of peers, with FlashMLA's library.")],
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    first: Annotated[int, typer.Option(help="Shapes to time, the first ones.")] = 99,
    designs: Annotated[bool, typer.Option(help="Other builds for 16 heads, nothing else.")] = False,
) -> None:
    """Times the shapes and writes ``sparse_prefill_cache_cost.md``."""
    torch.ops.load_library(str(peers / "vllm_flashmla" / "_flashmla_C.abi3.so"))
    device = torch.device("cuda")
    facts = page.told(machine(device, timing.Nvml()), ("gpu", "driver", "cuda", "torch"))
    torch.manual_seed(0)
    lines = page.head(
        "Sparse prefill from the FP8 cache", "profiles.sparse_prefill_cache_cost", facts,
        gemm(device),
        "median of the rounds, and their middle half; ratio: the other's time / ours by rounds",
        "fetch_dequant: the whole cache to rows of BF16; error: relative L2 on each one's inputs",
    )  # fmt: skip
    with torch.inference_mode():
        if designs:
            lines += ["", f"| {' | '.join(DESIGN_COLUMNS)} |", "|---" * len(DESIGN_COLUMNS) + "|"]
            lines += design_rows(FP8_SHAPES[-1], device, 0)
            typer.echo("\n".join(lines))
            write_atomic(out / "sparse_prefill_designs.md", "\n".join(lines) + "\n")
            return
        lines += ["", f"| {' | '.join(FP8_COLUMNS)} |", "|---" * len(FP8_COLUMNS) + "|"]
        for seed, shape in enumerate(FP8_SHAPES[:first]):
            lines.append(fp8_row(shape, device, seed))
            typer.echo(lines[-1])
            write_atomic(out / "sparse_prefill_cache_cost.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
