"""What the FP8 tensor core's cuts in Q.K do to results where all products have one sign.

    python -m profiles.studies.qk_bias                     # on a GPU
    python -m profiles.studies.qk_bias --device cpu        # anywhere: on the software GPU, in a minute

Truth is float64 on the stored bytes; results are fp32, of the default kernel, of it with two terms
of P, and of exact logits (``accuracy="high"``).  Four tables: two tokens of one logit, of
which the query equals one; by the spread of random logits; bias and bound by what a query that
equals a key looks like; two context-parallel ranks, one token each, merged.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

from codegen.artifacts import write_atomic
from profiles.bench import command_line, commit
from snapmla import merge_states
from snapmla.testing import aligned, metrics
from snapmla.testing.aligned import Aligned
from snapmla.testing.qk_bounds import lse_bounds

NAME = "qk-bias"
# Options of plans; the first two have the same logits, and LSE, bit for bit.
CONTENDERS: dict[str, dict[str, str]] = {
    "standard": {}, "two": {"accuracy": "high", "pipeline": "etap"}, "high": {"accuracy": "high"},
}  # fmt: skip
PAIR_LOGITS = (0.5, 3.9, 9.7, 19.4, 38.8)
SPREADS, SPREAD_TOKENS, HEADS = (0.02, 1.0, 3.0, 10.0, 20.0), 1024, 16
PATTERN_LOGIT, PATTERN_ROWS = 40.0, 64
MERGE_LOGITS = (1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
Row = dict[str, Any]


def _errors(step: Aligned) -> Row:
    """Relative L2 by contender, and LSE's error of largest magnitude with its sign."""
    truth, truth_lse = step.truth()
    row: Row = {"lse_error": {}}
    for name, options in CONTENDERS.items():
        out, lse = step.decoded(step.plan(**options), torch.float32)
        row[name] = metrics.relative_l2(out, truth)
        off = (lse.double() - truth_lse).flatten()
        row["lse_error"][name] = float(off[off.abs().argmax()])
    low, high = lse_bounds(*step.stored)
    row["lse_bound"] = [float(low.min()), float(high.max())]
    return row


def pairs(device: torch.device) -> list[Row]:
    """Two tokens that weigh 1/2 each by fp64, by their logit."""
    rows = []
    for logit in PAIR_LOGITS:
        step = aligned.two_of_one_logit(logit, HEADS, device)
        weights = {
            name: first_weight(step, step.decoded(step.plan(**CONTENDERS[name]), torch.float32)[0])
            for name in ("two", "high")
        }
        rows.append({"logit": logit, "weight": weights, **_errors(step)})
    return rows


def first_weight(step: Aligned, out: torch.Tensor) -> float:
    """That of token 0 in row 0, a mixture of both tokens, by least squares."""
    content, _, scale = (x.double() for x in step.tokens)
    v = content * scale[:, None]
    both = torch.linalg.lstsq(v.T.cpu(), out[0, 0, 0].double().cpu()[:, None]).solution
    return float(both[0])


def spreads(device: torch.device) -> list[Row]:
    """Random queries over random tokens, latent mean 0, by the logits' standard deviation."""
    rows = []
    for deviation in SPREADS:
        random = torch.Generator().manual_seed(0)
        keys = torch.randn(SPREAD_TOKENS, 576, generator=random)
        queries = torch.randn(HEADS, 576, generator=random) * (deviation / 576**0.5 / aligned.SCALE)
        step = Aligned.of(keys.bfloat16().float().to(device), queries.to(device))
        logits = step.logits()
        rows.append({"deviation": deviation, "largest": float(logits.max()), **_errors(step)})
    return rows


def patterns(device: torch.device) -> list[Row]:
    """Bias over logit and share of the bound, of rows that each equal a key."""
    rows = []
    for kind in aligned.KINDS:
        step = aligned.each_its_key(kind, PATTERN_ROWS, PATTERN_LOGIT, device)
        _, lse = step.decoded(step.plan(pipeline="etap", row_tile=PATTERN_ROWS))
        off = (lse.double() - step.truth()[1]).flatten()
        low, _ = lse_bounds(*step.stored)
        bias, share = off / PATTERN_LOGIT, off / low.flatten()
        rows.append({
            "kind": kind, "bias": [float(x) for x in (bias.max(), bias.median(), bias.min())],
            "share": [float(x) for x in (share.min(), share.max())],
            "bound": float(low.min()) / PATTERN_LOGIT,
        })  # fmt: skip
    return rows


def merged(device: torch.device) -> list[Row]:
    """Two ranks with a token each, whose LSEs are equal by fp64, by that LSE."""
    rows = []
    for logit in MERGE_LOGITS:
        both = aligned.two_of_one_logit(logit, HEADS, device)
        truth, _ = both.truth()
        ranks = [both.only(token) for token in range(2)]
        row: Row = {"logit": logit, "bias": {}}
        for name, options in CONTENDERS.items():
            parts = [r.decoded(r.plan(**options), torch.float32) for r in ranks]
            out, _ = merge_states(*(torch.stack(x) for x in zip(*parts, strict=True)))
            row[name] = metrics.relative_l2(out, truth)
            row["bias"][name] = [
                float((lse.double() - r.truth()[1]).flatten()[0])
                for r, (_, lse) in zip(ranks, parts, strict=True)
            ]
        rows.append(row)
    return rows


# ----------------------------------------------------------------------------------------- report


def pair_lines(rows: list[Row]) -> list[str]:
    lines = [
        "| logits of both | weight (exact 0.5), two terms | high | rel. L2, standard | two terms"
        " | high | LSE error, standard | high |",
        "|---" * 8 + "|",
    ]
    for r in rows:
        lines.append(
            f"| {r['logit']:g} | {r['weight']['two']:.4f} | {r['weight']['high']:.5f} |"
            f"{_errors_of(r)}"
        )
    return lines


def spread_lines(rows: list[Row]) -> list[str]:
    lines = [
        "| logit std | largest logit | rel. L2, standard | two terms | high"
        " | LSE error, standard | high |",
        "|---" * 7 + "|",
    ]
    for r in rows:
        lines.append(f"| {r['deviation']:g} | {r['largest']:.2g} |{_errors_of(r)}")
    return lines


def _errors_of(r: Row) -> str:
    """Cells of a row's errors; of LSE the largest."""
    lse = r["lse_error"]
    cells = [f"{r[name]:.1e}" for name in CONTENDERS]
    return f" {' | '.join(cells)} | {lse['standard']:+.1e} | {lse['high']:+.1e} |"


def pattern_lines(rows: list[Row]) -> list[str]:
    lines = [
        "| the key that the query equals | bias / logit, median | worst | bound, worst"
        " | of its bound a row reaches |",
        "|---|---|---|---|---|",
    ]
    names = {
        "key": "N(0, 1)", "heavy tails": "Student's t, 3 degrees of freedom",
        "loud channel": "N(0, 1), one channel × 100",
        "448 among 3.75": "one channel of 448, 511 of ±3.75",
    }  # fmt: skip
    for r in rows:
        _, median, worst = r["bias"]
        least, most = r["share"]
        lines.append(
            f"| {names[r['kind']]} | {median:.1e} | {worst:.1e} | {r['bound']:.1e} |"
            f" {least:.0%} to {most:.0%} |"
        )
    return lines


def merge_lines(rows: list[Row]) -> list[str]:
    lines = [
        "| logit | LSE error of the matching rank, of the other, standard | high"
        " | merged: rel. L2, standard | two terms | high |",
        "|---" * 6 + "|",
    ]
    for r in rows:
        biases = " | ".join("{:+.1e}, {:+.1e}".format(*r["bias"][n]) for n in ("standard", "high"))
        errors = " | ".join(f"{r[name]:.1e}" for name in CONTENDERS)
        lines.append(f"| {r['logit']:g} | {biases} | {errors} |")
    return lines


def page(report: dict[str, Any]) -> str:
    """The report as markdown."""
    return "\n".join([
        f"# {NAME}", "", f"`{report['command']}`", "",
        f"- commit {report['commit']}, {report['created']}",
        f"- {report['machine']['gpu']}, torch {report['machine']['torch']}", "",
        "Results are fp32, to float64 on the stored bytes; what is told is in docs/numerics.md.",
        "", "## Two tokens of one logit, the query equals one of them", "",
        *pair_lines(report["pairs"]), "",
        f"## Random queries and tokens, {SPREAD_TOKENS} tokens, {HEADS} heads", "",
        *spread_lines(report["spreads"]), "",
        f"## LSE where a query equals a key, logit {PATTERN_LOGIT:g}, {PATTERN_ROWS} rows", "",
        *pattern_lines(report["patterns"]), "",
        "## Two ranks with one token each, of equal logits, merged", "",
        *merge_lines(report["merged"]), "",
    ])  # fmt: skip


def main(
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("build/bench"),
    device: Annotated[str, typer.Option(help="cuda, or cpu for the software GPU.")] = "cuda",
) -> None:
    """Measures, prints and writes qk-bias.json and .md."""
    on = torch.device(device)
    gpu = torch.cuda.get_device_name(on) if on.type == "cuda" else "software GPU, sm_90a"
    report = {
        "name": NAME, "command": command_line(sys.argv[1:], "-m profiles.studies.qk_bias"),
        "commit": commit(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"gpu": gpu, "torch": torch.__version__},
        "pairs": pairs(on), "spreads": spreads(on), "patterns": patterns(on), "merged": merged(on),
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / f"{NAME}.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    write_atomic(out / f"{NAME}.md", page(report))
    print(page(report))


if __name__ == "__main__":
    typer.run(main)
