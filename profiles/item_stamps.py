"""Where the items of a V4 decode CTA spend their time: %globaltimer at each event, from builds that
record them (dsl_kernels/sm90/mix16_v4_stamps.py).

    for rows in 16 64; do
        python -m codegen build sparse_decode_mix16_r${rows}_obf16_stamps1_kvfp8_v4_sm90a
    done
    python -m profiles.item_stamps 128x2x128x0 2x2x128x512 --out profiles/results

A shape is batch, query tokens, heads, entries of the second list (0: none), and maybe heads of a
CTA and tokens of a piece, as the tables of profiles.sparse_v4_cost have them.  Each event is told
in microseconds after its CTA's entry, first occurrence first: the median over CTAs that have it.
Then the first CTA's, as they came.  The stamped build must return the ordinary one's bits.
"""

from __future__ import annotations

import datetime
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

import snapmla
from codegen.artifacts import write_atomic
from dsl_kernels.item_stamp import EVENTS, KEPT, SLOTS, Event
from dsl_kernels.spec import VariantSpec
from profiles import sparse_v4_cost as cost
from profiles.bench import command_line, commit
from profiles.machine import machine
from profiles.timing import Nvml
from snapmla import runtime
from snapmla.decode_plan.witness import no_offsets
from snapmla.sparse import two_lists

Shape = tuple[int, ...]
SHAPES = ("128x2x128x0", "2x2x128x512", "2x2x64x1024", "128x1x16x512")
LAUNCHES = 7
NUMBERS = (cost.SCALE, 0.6931471805599453, -float("inf"))  # scale, LSE's factor, of empty rows


class Job:
    """A call that ordinary and stamped kernels take in turn."""

    def __init__(self, caches: list[Any], shape: Shape) -> None:
        b, s_q, heads, more, row_tile, tokens = (*shape, 0, 0)[:6]
        device = caches[0].device
        self.x = torch.randn(b, s_q, heads, 512, device=device).bfloat16()
        self.sets = cost.list_sets((b, s_q, heads, more), device)
        self.caches, self.batch = caches, b
        self.plan = snapmla.plan_sparse_decode(
            heads, s_q, topk=cost.WINDOW + more, batch=b, device=device,
            row_tile=row_tile or None, fixed_split_tokens=tokens or None, cache_dtype="fp8_v4",
        )  # fmt: skip
        self.out = self.x.new_empty(b, s_q, heads, 512)
        self.lse = torch.empty(b, heads, s_q, device=device)
        o, lse = self.plan.o_accum, self.plan.lse_accum
        self.room = (o.new_zeros(o.shape[0] + SLOTS, *o.shape[1:]),
                     lse.new_zeros(lse.shape[0] + SLOTS, *lse.shape[1:]))  # fmt: skip

    @property
    def grid(self) -> tuple[int, int]:
        """(CTAs of a part, parts)."""
        return -(-self.plan.unit_rows // self.plan.row_tile), self.plan.num_parts

    def words(self) -> torch.Tensor:
        """(parts, CTAs of a part, events, times) int64."""
        x, parts = self.grid
        flat_words = self.room[0][-SLOTS:].flatten().view(torch.int32)
        n = x * parts * EVENTS * KEPT
        return flat_words[:n].view(parts, x, EVENTS, KEPT).cpu().long()

    def call(self, kernel: Any, lists: cost.Lists) -> None:
        """One decode with its merge."""
        plan, entries = self.plan, lists.first
        extra, lengths = None, plan.planned_seqlens
        if lists.second is not None:
            extra = two_lists.Second(self.caches[1], lists.second, None)
        kernel(
            self.x, self.x, *self.caches[0].gather_arguments, entries, lengths,
            *two_lists.arguments(self.caches[0], entries, extra, lengths),
            torch.empty(0, dtype=torch.float32, device=self.x.device),
            *plan.arguments[:-2], no_offsets(self.x.device), self.out, self.lse, *self.room,
            *NUMBERS, plan.merges, 0, 512, 512,
        )  # fmt: skip


def measured(caches: list[Any], shape: Shape) -> list[str]:
    """Lines about a shape.  Raises ValueError where the stamped build has other bits."""
    job, cuda = Job(caches, shape), caches[0].device.type == "cuda"
    name = f"sparse_decode_mix16_r{job.plan.row_tile}_obf16_kvfp8_v4_sm90a"
    ordinary = VariantSpec.from_name(name)
    plain, stamped = (
        runtime.kernel(s, caches[0].device.type) for s in (ordinary, ordinary.replace(stamps=1))
    )
    seen = []
    for i in range(LAUNCHES if cuda else 1):
        lists = job.sets[i % len(job.sets)]
        job.call(plain, lists)
        want = job.out.clone(), job.lse.clone()
        job.room[0][-SLOTS:] = 0
        for _ in range(2 if cuda else 0):  # what a decode finds in front of it
            job.call(plain, job.sets[(i + 1) % len(job.sets)])
        job.call(stamped, lists)
        if cuda:
            torch.cuda.synchronize()
        if not (torch.equal(job.out, want[0]) and torch.equal(job.lse, want[1])):
            raise ValueError(f"{shape}: the stamped build has other bits")
        seen.append(job.words())
    return [f"## {','.join(map(str, shape))}, {name}, grid {job.grid}", "", *table(seen)]


def since(words: torch.Tensor) -> torch.Tensor:
    """Microseconds after each CTA's entry; NaN where there was no event."""
    entry = words[..., Event.ENTRY, :1][..., None, :]
    after = (words - entry + 2**31) % 2**32 - 2**31
    return torch.where(words != 0, after.double() / 1e3, torch.nan)


def table(seen: list[torch.Tensor]) -> list[str]:
    """Medians over CTAs, each the median over launches; then one CTA of the last launch."""
    lines = ["| event | " + " | ".join(map(str, range(1, KEPT + 1))) + " | CTAs |",
             "|---" * (KEPT + 2) + "|"]  # fmt: skip
    times = [since(words) for words in seen]
    for event in Event:
        cells = []
        for n in range(KEPT):
            found = [t[..., event, n].flatten() for t in times]
            found = [x[~x.isnan()] for x in found]
            there = all(len(x) for x in found)
            cells.append(f"{statistics.median(float(x.median()) for x in found):.2f}" if there
                         else "")  # fmt: skip
        ctas = int((~times[-1][..., event, 0].isnan()).sum())
        lines.append(f"| {event.name.lower()} | {' | '.join(cells)} | {ctas} |")
    entries = seen[-1][..., Event.ENTRY, 0].flatten()
    apart = float((entries - entries[entries != 0].min()).clamp(min=0).max()) / 1e3
    first = times[-1].flatten(0, 1)[0]
    came = sorted(
        (float(first[e, n]), f"{e.name.lower()} {n + 1}")
        for e in Event for n in range(KEPT) if not first[e, n].isnan()
    )  # fmt: skip
    lines += ["", f"Entries lie {apart:.2f} µs apart.  The first CTA's events:", ""]
    return [*lines, *(f"    {when:7.2f}  {what}" for when, what in came), ""]


def main(
    shapes: Annotated[list[str] | None, typer.Argument(help="Such as 128x2x128x0.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("build/bench"),
    device: Annotated[str, typer.Option(help="cuda, or cpu for the software GPU.")] = "cuda",
) -> None:
    """Runs shapes with stamped builds; prints the tables, writes ``item_stamps.md``."""
    at = torch.device(device)
    facts = machine(at, Nvml() if at.type == "cuda" else None)
    named = ("gpu", "driver", "cuda", "torch")
    lines = [
        "# Events of V4 decode's items", "",
        f"`{command_line(sys.argv[1:], '-m profiles.item_stamps')}`", "",
        f"- commit {commit()}, {datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S}Z",
        f"- {', '.join(f'{k} {facts[k]}' for k in named if facts.get(k) is not None)}",
        "- µs after a CTA's entry; medians over CTAs", "",
    ]  # fmt: skip
    torch.manual_seed(0)
    with torch.inference_mode():
        caches = [cost.filled(page_size, at) for page_size in cost.PAGES]
        for label in shapes or SHAPES:
            found = measured(caches, tuple(int(word) for word in label.split("x")))
            lines += found
            typer.echo("\n".join(found))
    write_atomic(out / "item_stamps.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
