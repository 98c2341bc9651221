"""Time of a decode CTA by its parts: %globaltimer at seven events, from builds that record it.

    for rows in 16 64 128; do
        python -m codegen build decode_etap_r${rows}_p64_obf16_stamps1_sm90a
    done
    python -m profiles.stamps --out profiles/results --name stamps-h200

Each event's time is told in microseconds after the first CTA's entry, as minimum, median and
maximum over the CTAs of a launch (each the median of several launches behind ordinary ones, as in
a decode loop).  ``merge`` is the difference of decode with and without it, ordinary builds.  A
stamped build writes its records into the last slot of the workspace, which gets one slot more for
it, and must return the ordinary build's bits.  On the software GPU (``--device cpu``) the times are
numbers of readings.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

import snapmla
from codegen.artifacts import write_atomic
from dsl_kernels.formats.stamp import WORDS, Stamp
from dsl_kernels.spec import VariantSpec, decode_spec
from profiles import roofline, timing
from profiles.machine import machine
from profiles.page import command_line, commit
from profiles.pools import Latents, SnapPool, fill
from profiles.shapes import DecodeShape, parse
from snapmla.dense import PlanVariant
from snapmla.dense import decode as dense
from snapmla.runtime import variants

PAGE, GRAIN = 64, 128
NUMBERS = (192**-0.5, 1, 0.6931471805599453, -float("inf"))  # scale, causal, lse factor, empty LSE
EVENTS: dict[str, tuple[Stamp, ...]] = {  # of several words the latest counts
    "entry": (Stamp.ENTRY,),
    "behind the PDL wait": (Stamp.WAITED,),
    "first TMA issued": (Stamp.FIRST_TMA,),
    "first tile landed": (Stamp.FIRST_TILE,),
    "softmax ends": (Stamp.SOFTMAX_END,),
    "products end": (Stamp.PRODUCTS_END,),
    "rows written": (Stamp.ROWS_WRITTEN, Stamp.ROWS_WRITTEN_TOO),
}
SHAPES = [DecodeShape(32, n, h).label for h in (16, 64, 128) for n in (1024, 4096, 16384)]
Spread = dict[str, float]  # min, median, max


def event_times(words: torch.Tensor) -> dict[str, torch.Tensor]:
    """Microseconds after the first entry of every event, for the CTAs that have it.

    Args:
        words: int32 (CTAs, WORDS), as the kernel left them; 0 is absent.

    Raises:
        ValueError: no CTA has an entry: the launch recorded nothing.
    """
    there, low = words != 0, words.long()
    entered = there[:, Stamp.ENTRY]
    if not entered.any():
        raise ValueError("no CTA recorded its entry: is the build a stamped one?")
    some = low[entered, Stamp.ENTRY][0]
    # the low half of the counter wraps every 4.3 s; differences are far below half of that
    since = (low - some + 2**31) % 2**32 - 2**31
    since = since - since[entered, Stamp.ENTRY].min()
    found = {}
    for name, which in EVENTS.items():
        columns = list(map(int, which))
        whole = there[:, columns].all(1)
        found[name] = since[whole][:, columns].amax(1).double() / 1e3
    return found


def spread(launches: list[torch.Tensor]) -> Spread | None:
    """Minimum, median and maximum over CTAs, each the median over launches; None of no CTAs."""
    if not all(len(times) for times in launches):
        return None
    of: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "min": torch.min, "median": torch.median, "max": torch.max,
    }  # fmt: skip
    return {k: statistics.median(float(f(times)) for times in launches) for k, f in of.items()}


class Step:
    """A decode step that ordinary and stamped kernels take in turn; page tables rotate."""

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        on_gpu = device.type == "cuda"
        config = timing.TimingConfig(rotate_bytes=1e9 if on_gpu else 1.0)
        width = -(-shape.seqlen // PAGE)
        used = [-(-n // PAGE) for n in shape.lengths()]
        buffers = timing.buffer_count(
            float(shape.tokens * roofline.FORMATS["snapmla"].token_bytes), config
        )
        tokens = -(-buffers * sum(used) * PAGE // GRAIN) * GRAIN
        pool = SnapPool(tokens, device, PAGE)
        fill([pool], tokens, Latents(), device)
        self.cache = pool.cache
        rng = torch.Generator(device=device).manual_seed(3)
        mask = torch.arange(width, device=device) < torch.tensor(used, device=device)[:, None]
        self.tables = []
        for i in range(buffers):
            table = torch.zeros(mask.shape, dtype=torch.int32, device=device)
            order = torch.randperm(sum(used), generator=rng, device=device)
            table[mask] = order.int() + i * sum(used)
            self.tables.append(table)
        self.lengths = torch.tensor(shape.lengths(), dtype=torch.int32, device=device)
        x = torch.randn(
            shape.batch, shape.s_q, shape.num_heads, 576, generator=rng, device=device
        ).bfloat16()
        self.q = snapmla.quantize_q(x[..., :512], x[..., 512:])
        self.plan = snapmla.plan_decode(
            self.lengths, shape.num_heads, shape.s_q, page_size=PAGE, max_pages=width,
            pipeline="etap",
        )  # fmt: skip
        rows = (shape.batch, shape.s_q, shape.num_heads)
        self.out = torch.empty(*rows, 512, dtype=torch.bfloat16, device=device)
        self.lse = torch.empty(rows[0], rows[2], rows[1], device=device)
        grown = {}
        for name in ("o_accum", "lse_accum"):  # one slot more, for the records
            tensor = getattr(self.plan, name)
            grown[name] = tensor.new_zeros(tensor.shape[0] + 1, *tensor.shape[1:])
        self.o_accum = grown["o_accum"]
        self.arguments = dataclasses.replace(self.plan, **grown).arguments

    @property
    def spec(self) -> VariantSpec:
        """The ordinary build's."""
        arch = variants.arch_of(self.device)
        return decode_spec(self.plan.pipeline, self.plan.row_tile, PAGE, "bf16", arch)

    @property
    def ctas(self) -> int:
        """CTAs of the decode kernel."""
        rows = self.shape.num_heads * self.shape.s_q
        return -(-rows // self.plan.row_tile) * self.spec.cluster * self.plan.num_parts

    @property
    def records(self) -> torch.Tensor:
        """(CTAs, WORDS) int32 in the workspace's last slot."""
        words = self.o_accum[-1].view(-1).view(torch.int32)
        return words[: self.ctas * WORDS].view(self.ctas, WORDS)

    def call(self, spec: VariantSpec, table: torch.Tensor, merge: bool = True) -> None:
        """One decode by the variant ``spec``."""
        kernel = {torch.bfloat16: variants.kernel(spec, self.device.type)}
        plan = self.plan
        variant = PlanVariant(self.device, plan.pipeline, plan.row_tile, PAGE, kernel)
        dense.launch_decode(
            (self.q.nope_u8, self.q.rope, self.q.row_scale), self.cache.arguments, table,
            self.lengths, variant, self.arguments, int(merge), (self.out, self.lse), NUMBERS,
        )  # fmt: skip

    def sync(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(shape: DecodeShape, device: torch.device, launches: int) -> dict[str, Any]:
    """One entry of the report: the spread of every event, and the merge."""
    step = Step(shape, device)
    plain, stamped = step.spec, step.spec.replace(stamps=1)
    if step.records.numel() != step.ctas * WORDS:
        raise ValueError(f"{shape.label}: a slot is too small for {step.ctas} CTAs' records")
    seen: list[dict[str, torch.Tensor]] = []
    for i in range(launches):
        table = step.tables[i % len(step.tables)]
        step.call(plain, table)
        step.sync()
        want = step.out.clone(), step.lse.clone()
        step.records.zero_()
        for _ in range(2 if device.type == "cuda" else 0):  # what a decode finds in front of it
            step.call(plain, step.tables[(i + 1) % len(step.tables)])
        step.call(stamped, table)
        step.sync()
        if not (torch.equal(step.out, want[0]) and torch.equal(step.lse, want[1])):
            raise ValueError(f"{stamped.name}: other bits than {plain.name}")
        seen.append(event_times(step.records.cpu()))
    decode, merge = _merge_us(step, plain) if device.type == "cuda" else (None, None)
    return {
        "shape": shape.label,
        "kernel": stamped.name,
        "parts": step.plan.num_parts,
        "ctas": step.ctas,
        "idle_ctas": step.ctas - len(seen[-1]["first tile landed"]),
        "launches": launches,
        "events": {name: spread([times[name] for times in seen]) for name in EVENTS},
        "decode_us": decode,
        "merge_us": merge,
    }


def _merge_us(step: Step, spec: VariantSpec) -> tuple[float, float]:
    """(decode without merge, what the merge adds) of the ordinary build, microseconds."""
    config = timing.TimingConfig(cold_iters=0, host_iters=0, rounds=9)

    def loop(name: str, merge: bool) -> timing.Loop:
        def call(table: torch.Tensor) -> timing.Call:
            return lambda: step.call(spec, table, merge)

        return timing.make_loop(name, [call(t) for t in step.tables], config, cuda=True)

    found = timing.interleave([loop("alone", False), loop("both", True)], config)
    return found["alone"].us, found["both"].us - found["alone"].us


def page(report: dict[str, Any]) -> str:
    """The report as markdown."""
    facts = report["machine"]
    named = ("gpu", "driver", "cuda", "torch", "max_sm_mhz", "power_limit_w")
    entries = report["stamps"]
    lines = [
        f"# {report['name']}", "",
        f"`{report['command']}`", "",
        f"- commit {report['commit']}, {report['created']}",
        f"- {', '.join(f'{k} {facts[k]}' for k in named if facts.get(k) is not None)}",
        "- µs after the first CTA's entry, min / median / max over CTAs",
        "",
        "| event | " + " | ".join(e["shape"] for e in entries) + " |",
        "|---" * (len(entries) + 1) + "|",
    ]  # fmt: skip
    for name in EVENTS:
        lines.append(f"| {name} | {' | '.join(_cell(e['events'][name]) for e in entries)} |")
    for key, name in (("decode_us", "decode alone, in a graph"), ("merge_us", "merge, beside it")):
        cells = ("–" if e[key] is None else f"{e[key]:.1f}" for e in entries)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append(f"| CTAs (idle) | {' | '.join(_ctas(e) for e in entries)} |")
    return "\n".join([*lines, ""])


def _cell(found: Spread | None) -> str:
    if found is None:
        return "–"
    return " / ".join(f"{found[k]:.1f}" for k in ("min", "median", "max"))


def _ctas(entry: dict[str, Any]) -> str:
    return f"{entry['ctas']} ({entry['idle_ctas']})"


def main(
    shapes: Annotated[list[str] | None, typer.Argument(help="Such as b32_L16384_h64_q1.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("build/bench"),
    name: Annotated[str, typer.Option(help="Name of the results.")] = "stamps",
    device: Annotated[str, typer.Option(help="cuda, or cpu for the software GPU.")] = "cuda",
    launches: Annotated[int, typer.Option(help="Stamped launches of a shape.", min=1)] = 9,
) -> None:
    """Runs shapes with stamped builds; prints the events, writes JSON and markdown."""
    at = torch.device(device)
    entries = []
    with torch.inference_mode():
        for label in shapes or SHAPES:
            shape = parse(label)
            if not isinstance(shape, DecodeShape):
                raise typer.BadParameter(f"expected a decode's shape, got {label!r}")
            entries.append(measure(shape, at, launches))
            cells = [f"{event} {_cell(found)}" for event, found in entries[-1]["events"].items()]
            typer.echo(f"{label}: {', '.join(cells)}")
            if at.type == "cuda":
                torch.cuda.empty_cache()
    report = {
        "name": name,
        "command": command_line(sys.argv[1:], "-m profiles.stamps"),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(at, timing.Nvml() if at.type == "cuda" else None),
        "stamps": entries,
    }
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(out / f"{name}.json", text + "\n")
    write_atomic(out / f"{name}.md", page(report))


if __name__ == "__main__":
    typer.run(main)
