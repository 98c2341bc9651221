"""How exact a decode over a 16-bit cache is, beside its peers on the same tensors.

    python -m profiles.studies.dense_accuracy --peers PEERS --out profiles/results

Truth is float64 on the stored tensors, computed on the device.  Three parts:

* ``sweep``: relative L2 by length, on the tokens and logits of ``check_decode``'s sweep.  Gate, of
  the default plan: 1.3 times the error at 1K.  With one part a sequence, which is shown beside it
  without a gate, a single tensor-core accumulator sums all tokens and cuts every sum toward zero.
* ``rmse``: root mean square error of ours and of each peer.  Gate: 1.05 times each peer's.
* ``grid`` (``profiles.studies.flashmla_grid``): FlashMLA's own gates on its own shapes, ours by
  ``snapmla.flash_mla``.  Gate: no element outside, no case beyond the cosine.

A peer that is missing or refuses is named with its reason.  The exit code is 1 if a gate fails.
"""

from __future__ import annotations

import datetime
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

from codegen.artifacts import write_atomic
from profiles import contenders, timing
from profiles.studies import flashmla_grid
from profiles.bench import command_line, commit
from profiles.check import Truth, decode_truth
from profiles.decode_row import CACHES, SOFTMAX_SCALE, Contender, Problem
from profiles.machine import machine
from profiles.pools import RowsPool
from profiles.roofline import CONTENT_DIM, HEAD_DIM_QK
from profiles.shapes import DecodeShape
from snapmla.testing import draws, metrics

PAGE = 64
DTYPES = ("bf16", "f16")
PEERS = ("flashmla_bf16", "fa3", "etap")
PUBLISHED = "ETAP's paper, fp16 RMSE: ETAP 1.25e-5, FlashAttention-3 1.9e-4 (as published)"

SWEEP = ((1024, 32), (16384, 32), (131072, 32), (1 << 20, 1))  # (length, batch), of check_decode
SWEEP_HEADS, LOGIT_STDS, MEANS = (16, 128), (0.1, 1.0), (0.0, 0.5, 2.0)
GROWTH = 1.3

RMSE_LENGTHS = tuple(512 << i for i in range(8))
RMSE_BATCH, RMSE_HEADS, RMSE_FACTOR = 2, 16, 1.05
# channels of N(0, 1) tokens that are made louder, whose queries' are made quieter: (first, end,
# factor, bound).  RoPE to 1e3 is check_decode's, the latent's the accuracy study's loudest dial.
KINDS: dict[str, tuple[int, int, float, float] | None] = {
    "N(0, 1)": None,
    "RoPE to 1e3": (CONTENT_DIM, CONTENT_DIM + draws.OUTLIER_CHANNELS, 1e3 / 3, 1e3),
    "latent x 64": (0, 16, 64.0, math.inf),
}


@dataclass
class Figure:
    """One error of one contender.

    Attributes:
        inputs: what distinguishes the row of a table; ``length`` is its column.
        error: relative L2 (sweep), RMSE (rmse); None: ``note`` says why there is none.
        base: the error that the gate is a multiple of; None: no gate.
        factor: which multiple.
    """

    inputs: str
    dtype: str
    who: str
    length: int
    error: float | None
    base: float | None = None
    factor: float = math.nan
    note: str = ""

    @property
    def failed(self) -> bool:
        if self.base is None:
            return False
        return self.error is None or not self.error <= self.factor * self.base  # NaN fails

    def __str__(self) -> str:
        if self.error is None:
            return f"no result: {self.note}"
        gate = "" if self.base is None else f", gate {self.factor:g} x {self.base:.3e}"
        return f"{self.error:.3e}{gate}"


@dataclass
class Step:
    """Decode inputs in the memory that all contenders share."""

    problem: Problem
    pool: RowsPool

    def truth(self, request: int) -> Truth:
        """float64 on what is stored."""
        table = self.problem.tables[PAGE][0][request].long()

        def keys(begin: int, end: int) -> torch.Tensor:
            token = torch.arange(begin, end, device=table.device)
            return self.pool.load(table[token // PAGE] * PAGE + token % PAGE)

        query = self.problem.query[request].double()
        return decode_truth(query, keys, int(self.problem.lengths[request]), SOFTMAX_SCALE)

    def run(self, contender: Contender) -> torch.Tensor:
        """``out`` (b, s_q, h, 512)."""
        out = contender.enter(self.problem, self.pool).calls[0]()[0]
        return out.reshape(*self.problem.query.shape[:-1], CONTENT_DIM)


def fill_pages(
    dtype: torch.dtype, length: int, batch: int, device: torch.device,
    sequence: Callable[[], torch.Tensor], seed: int,
) -> tuple[RowsPool, torch.Tensor]:  # fmt: skip
    """A pool of shuffled pages and its block table; ``sequence()`` draws (length, 576) fp32."""
    pages = -(-length // PAGE)
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(seed))
    table = order.view(batch, pages).int().to(device)
    pool = RowsPool(batch * pages * PAGE, device, dtype)
    for own in table.long():
        rows = torch.zeros(pages * PAGE, HEAD_DIM_QK, device=device)
        rows[:length] = sequence()
        pool.cache[own] = rows.to(dtype).view(pages, PAGE, 1, HEAD_DIM_QK)
    return pool, table


def make_step(
    pool: RowsPool, table: torch.Tensor, query: torch.Tensor, length: int
) -> Step:  # fmt: skip
    """``query`` (b, 1, h, 576) fp32 over the pool's sequences."""
    batch, s_q, heads, _ = query.shape
    lengths = torch.full((batch,), length, dtype=torch.int32, device=query.device)
    shape = DecodeShape(batch, length, heads, s_q)
    return Step(Problem(shape, query.to(pool.dtype), lengths, {PAGE: [table]}), pool)


# ------------------------------------------------------------------------------------- contenders


def ours(dtype: str, parts: int | None = None) -> str:
    """The name of our contender."""
    return f"snapmla:cache={dtype}" + (f":num_parts={parts}" if parts else "")


def find(name: str, peers: Path | None) -> Contender | str:
    """The contender, or why there is none."""
    try:
        found = contenders.make(name, peers)
    except ValueError as error:
        return str(error)
    return found.unavailable() or found


def attempt(step: Step, contender: Contender | str) -> torch.Tensor | str:
    """Its ``out``, or why there is none."""
    if isinstance(contender, str):
        return contender
    try:
        return step.run(contender)
    except Exception as error:  # a peer's refusal is a finding, and must not cost the others' rows
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


# ------------------------------------------------------------------------------------------ sweep


def compared(length: int, batch: int) -> list[int]:
    """Sequences that the truth is computed of, as in ``check_decode``."""
    if length <= 1024:
        return list(range(batch))
    return sorted({0, batch // 2, batch - 1} if length <= 16384 else {0, batch - 1})


def sweep_steps(
    length: int, batch: int, mean: float, heads: Sequence[int], device: torch.device
) -> Iterator[tuple[str, str, Step]]:
    """(inputs, dtype, step) of every dtype, logit spread and head count, over the same tokens."""
    for name in DTYPES:
        seed = length % 1000
        generator = torch.Generator(device).manual_seed(seed)

        def sequence(generator: torch.Generator = generator) -> torch.Tensor:
            return torch.cat(draws.draw_tokens(length, generator, device, mean=mean), 1)

        pool, table = fill_pages(CACHES[name], length, batch, device, sequence, seed)
        behind = generator.get_state()
        for h in heads:
            for std in LOGIT_STDS:
                generator.set_state(behind)
                halves = draws.draw_queries(
                    (batch, 1, h), generator, device, logit_std=std, softmax_scale=SOFTMAX_SCALE
                )
                step = make_step(pool, table, torch.cat(halves, -1), length)
                yield f"h{h} std {std:g} mean {mean:g}", name, step


def sweep(
    points: Sequence[tuple[int, int]], heads: Sequence[int], device: torch.device,
    find_contender: Callable[[str], Contender | str],
) -> list[Figure]:  # fmt: skip
    """Relative L2 at each (length, batch); of BF16 FlashMLA's too.

    Args:
        points: in ascending order; errors are gated against those at the first.
    """
    figures: list[Figure] = []
    base: dict[tuple[str, str], float] = {}
    for length, batch in points:
        for mean in MEANS:
            for inputs, dtype, step in sweep_steps(length, batch, mean, heads, device):
                picked = compared(length, batch)
                truth = torch.stack([step.truth(i).out for i in picked])
                names = {"ours": ours(dtype), "ours, a part a sequence": ours(dtype, batch)}
                if dtype == "bf16":
                    names["flashmla_bf16"] = "flashmla_bf16"
                for who, name in names.items():
                    out = attempt(step, find_contender(name))
                    figure = Figure(inputs, dtype, who, length, None)
                    if isinstance(out, str):
                        figure.note = out
                    else:
                        figure.error = metrics.relative_l2(out[picked], truth)
                    if who == "ours":
                        if length == points[0][0]:
                            base[inputs, dtype] = math.nan if figure.error is None else figure.error
                        figure.base, figure.factor = base[inputs, dtype], GROWTH
                    figures.append(figure)
    return figures


# ------------------------------------------------------------------------------------------- rmse


def rmse_step(
    kind: str, dtype: str, length: int, batch: int, heads: int, device: torch.device
) -> Step:
    """N(0, 1) tokens and queries; ``kind`` is one of ``KINDS``."""
    generator = torch.Generator(device).manual_seed(length)
    loud = KINDS[kind]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, HEAD_DIM_QK, generator=generator, device=device)

    def sequence() -> torch.Tensor:
        rows = normal(length)
        if loud is not None:
            first, end, factor, bound = loud
            rows[:, first:end] = (rows[:, first:end] * factor).clamp(-bound, bound)
        return rows

    pool, table = fill_pages(CACHES[dtype], length, batch, device, sequence, length)
    query = normal(batch, 1, heads)
    if loud is not None:
        query[..., loud[0] : loud[1]] /= loud[2]
    return make_step(pool, table, query, length)


def rmse(
    lengths: Sequence[int], device: torch.device, find_contender: Callable[[str], Contender | str],
    batch: int = RMSE_BATCH, heads: int = RMSE_HEADS,
) -> list[Figure]:  # fmt: skip
    """RMSE of ours and of every peer; ours is gated by the least of theirs.

    With a part a sequence, shown beside it, ours has no partial results, which are 16 bits wide.
    """
    figures = []
    for dtype in DTYPES:
        for kind in KINDS:
            for length in lengths:
                step = rmse_step(kind, dtype, length, batch, heads, device)
                truth = torch.stack([step.truth(i).out for i in range(batch)])
                row = []
                names = {"ours": ours(dtype), "ours, a part a sequence": ours(dtype, batch)}
                for who, name in {**names, **{p: p for p in PEERS}}.items():
                    out = attempt(step, find_contender(name))
                    if isinstance(out, str):
                        row.append(Figure(kind, dtype, who, length, None, note=out))
                    elif out.dtype != step.problem.query.dtype:
                        note = f"results in {out.dtype}"
                        row.append(Figure(kind, dtype, who, length, None, note=note))
                    else:
                        error = metrics.rmse(out, truth)
                        row.append(Figure(kind, dtype, who, length, error))
                # a peer whose own result is NaN sets no gate
                theirs = [f.error for f in row[2:] if f.error is not None and f.error == f.error]
                row[0].base, row[0].factor = min(theirs, default=None), RMSE_FACTOR
                figures += row
    return figures


# ----------------------------------------------------------------------------------------- report


@dataclass
class Found:
    """What the parts found."""

    sweep: list[Figure] = field(default_factory=list)
    rmse: list[Figure] = field(default_factory=list)
    grid: list[flashmla_grid.Tally] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def failures(self) -> list[str]:
        """A sentence for each gate that failed."""
        lines = []
        for part, figures in (("sweep", self.sweep), ("rmse", self.rmse)):
            for f in figures:
                if f.failed:
                    lines.append(f"{part}: {f.inputs}, {f.dtype}, {f.who}, L {f.length}: {f}")
        return lines + [text for tally in self.grid for text in tally.failures()]


def table(figures: Sequence[Figure]) -> list[str]:
    """Markdown: a row for each inputs, dtype and contender; a column for each length."""
    lengths = sorted({f.length for f in figures})
    rows: dict[tuple[str, str, str], dict[int, Figure]] = {}
    for f in figures:
        rows.setdefault((f.inputs, f.dtype, f.who), {})[f.length] = f
    lines = [
        "| inputs | dtype | who | " + " | ".join(f"L {n}" for n in lengths) + " |",
        "|---" * (len(lengths) + 3) + "|",
    ]
    notes: dict[str, None] = {}
    for (inputs, dtype, who), row in rows.items():
        cells = [_cell(row.get(n)) for n in lengths]
        lines.append(f"| {inputs} | {dtype} | {who} | {' | '.join(cells)} |")
        notes |= dict.fromkeys(f"- {who}, {dtype}: {f.note}" for f in row.values() if f.note)
    return [*lines, "", *notes]


def _cell(f: Figure | None) -> str:
    if f is None or f.error is None:
        return "–"
    over = f" ({f.error / f.base:.2f})" if f.base else ""
    return f"{f.error:.2e}{over}{' **FAIL**' if f.failed else ''}"


def page(found: Found, facts: dict[str, Any]) -> str:
    """The report as markdown."""
    machine_ = facts["machine"]
    named = ("gpu", "driver", "cuda", "torch", "max_sm_mhz", "power_limit_w")
    failures = found.failures()
    lines = [
        "# dense-accuracy", "",
        f"`{facts['command']}`", "",
        f"- commit {facts['commit']}, {facts['created']}",
        f"- {', '.join(f'{k} {machine_[k]}' for k in named if machine_.get(k) is not None)}",
        f"- seconds: {', '.join(f'{k} {v:.1f}' for k, v in found.seconds.items())}",
        f"- gates failed: {len(failures)}",
    ]  # fmt: skip
    if found.sweep:
        lines += [
            "", "## Length sweep: relative L2 to fp64 (over the error at the first length)", "",
            f"Gate, of the default plan alone: {GROWTH}. Tokens and logits are those of"
            " [check_decode's sweep](check_decode_sweep.md), unquantised. With a part a sequence"
            " one accumulator sums every token; a tensor core cuts each sum toward zero.", "",
            *table(found.sweep),
        ]  # fmt: skip
    if found.rmse:
        lines += [
            "", "## RMSE to fp64 (over the best peer's)", "",
            f"Gate: {RMSE_FACTOR}. b {RMSE_BATCH}, h {RMSE_HEADS}, one query token, tokens and"
            " queries N(0, 1); of outlier inputs four RoPE channels reach 1e3, or sixteen latent"
            f" channels are 64 times as large, and queries as much smaller. {PUBLISHED}.", "",
            *table(found.rmse),
        ]  # fmt: skip
    if found.grid:
        lines += ["", *flashmla_grid.lines(found.grid)]
    if failures:
        lines += ["", "## Gates that failed", "", *(f"- {text}" for text in failures[:100])]
    return "\n".join([*lines, ""])


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def save(found: Found, facts: dict[str, Any], folder: Path) -> None:
    """Writes ``dense-accuracy.json`` and ``.md``."""
    report = {**facts, **asdict(found), "failures": found.failures()}
    text = json.dumps(_plain(report), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(folder / "dense-accuracy.json", text + "\n")
    write_atomic(folder / "dense-accuracy.md", page(found, facts))


def main(
    parts: Annotated[list[str] | None, typer.Argument(help="Of sweep, rmse, grid.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("build/bench"),
    peers: Annotated[
        Path | None, typer.Option(envvar="SNAPMLA_PEERS", help="Folder of the peers' libraries.")
    ] = None,
    sweep_longest: Annotated[int, typer.Option(help="Tokens; of the sweep.")] = 1 << 20,
) -> None:
    """Runs the parts, writes the report after each; exits with 1 if a gate fails."""
    device, found = torch.device("cuda"), Found()
    cache: dict[str, Contender | str] = {}

    def find_contender(name: str) -> Contender | str:
        if name not in cache:
            cache[name] = find(name, peers)
        return cache[name]

    points = [point for point in SWEEP if point[0] <= sweep_longest]
    work: dict[str, Callable[[], list[Any]]] = {
        "sweep": lambda: sweep(points, SWEEP_HEADS, device, find_contender),
        "rmse": lambda: rmse(RMSE_LENGTHS, device, find_contender),
        "grid": lambda: flashmla_grid.run(flashmla_grid.kernels(peers), device),
    }
    for part in parts or work:
        if part not in work:
            raise typer.BadParameter(f"expected some of {', '.join(work)}, got {part!r}")
    facts = {
        "name": "dense-accuracy",
        "command": command_line(sys.argv[1:], "-m profiles.studies.dense_accuracy"),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(device, timing.Nvml()),
    }
    with torch.inference_mode():
        for part in parts or work:
            begin = time.monotonic()
            setattr(found, part, work[part]())
            torch.cuda.synchronize()
            found.seconds[part] = time.monotonic() - begin
            save(found, facts, out)
            torch.cuda.empty_cache()
            typer.echo(f"{part}: {found.seconds[part]:.1f} s")
    typer.echo(page(found, facts))
    raise typer.Exit(1 if found.failures() else 0)


if __name__ == "__main__":
    typer.run(main)
