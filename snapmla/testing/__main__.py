"""``python -m snapmla.testing``: run, check, mutate and cost compiled variants on the software GPU.

Variants are named as in ``build/variants``, globs are fine; ``--dir`` names another directory.
"""

from __future__ import annotations

import fnmatch
import gc
import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from codegen import artifacts, matrix
from dsl_kernels.spec import VariantSpec
from snapmla.errors import VariantError
from snapmla.runtime import env
from snapmla.testing import explanations, launches, selfcheck
from softgpu import Hazard, LoadedKernel, Options, SoftGpuError, using
from softgpu import mutate as mutation
from softgpu.accumulate import BY_NAME
from softgpu.options import HAZARDS, LANDINGS

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)
console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)

# What an explanation names is a survivor after so many schedules, one of each landing: most of a
# study's time would go there, and prove nothing more.
SEEDS_OF_EXPLAINED = len(LANDINGS)
Names = Annotated[list[str], typer.Argument(help="variant names or globs")]
Directory = Annotated[Path | None, typer.Option("--dir", help="directory of built variants")]
Seeds = Annotated[int, typer.Option(min=1, help="adversarial schedules to run")]
RecordFile = Annotated[
    Path | None, typer.Option("--record", help="file to tell profiles.prove what was run")
]


def _one_of(names: Iterable[str]) -> Callable[[str | None], str | None]:
    """An option's callback that refuses other words."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in names:
            raise typer.BadParameter(f"expected one of {', '.join(names)}, got {value!r}")
        return value

    return check


def _variants(names: list[str], directory: Path | None) -> tuple[list[str], Path]:
    """Built variants that match, by name, and where they are."""
    at = directory if directory is not None else env.variant_dirs()[0]
    found: list[str] = []
    for name in names:
        hits = sorted(p.stem for p in at.glob(f"{name}.ptx"))
        if not hits:
            close = matrix.did_you_mean(name, (p.stem for p in at.glob("*.ptx")))
            hint = close or "; `make precompile` builds them all"
            print(f"no built variant in {at} matches {name!r}{hint}", file=sys.stderr)
            raise typer.Exit(2)
        found += [h for h in hits if h not in found]
    return found, at


def _workload(name: str, directory: Path) -> selfcheck.Workload:
    try:
        return selfcheck.Workload(VariantSpec.from_name(name), directory)
    except VariantError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None


def _run(workload: selfcheck.Workload) -> selfcheck.Result:
    """One run of many.  What the one before left are circles of large arrays, whose size the
    collector does not see: unasked it leaves gigabytes of them."""
    gc.collect()
    return workload.run()


@app.callback()
def _environment() -> None:
    """Refuses SOFTGPU_* of no meaning in one sentence, whatever is run."""
    try:
        Options()
    except ValueError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None


@app.command()
def run(
    variants: Names,
    directory: Directory = None,
    seed: Annotated[int | None, typer.Option(help="adversarial schedule; -1: in order")] = None,
    landing: Annotated[
        str | None,
        typer.Option(
            "--async",
            help="when asynchronous work lands: early, late, random",
            callback=_one_of(LANDINGS),
        ),
    ] = None,
    hazards: Annotated[
        str | None,
        typer.Option(help="hazard check: off, raise, collect", callback=_one_of(HAZARDS)),
    ] = None,
    accumulate: Annotated[
        str | None,
        typer.Option(help="arithmetic: hopper, blackwell, exact", callback=_one_of(BY_NAME)),
    ] = None,
) -> None:
    """Run variants once on small inputs and compare with the reference.

    What no option says, SOFTGPU_SEED, _ASYNC, _HAZARDS and _ACCUMULATE do.
    """
    names, at = _variants(variants, directory)
    found: list[Hazard] = []
    arithmetic = None if accumulate is None else BY_NAME[accumulate]
    asked = {
        "accumulate": arithmetic, "asynchronous": landing, "seed": seed, "hazards": hazards
    }  # fmt: skip
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    options = Options(on_hazard=found.append, **given)
    failed = False
    for name in names:
        found.clear()
        started = time.perf_counter()
        try:
            with using(options):
                result = selfcheck.check(VariantSpec.from_name(name), at)
        except SoftGpuError as error:
            result = selfcheck.Result(False, f"{type(error).__name__}\n{error}")
        took = time.perf_counter() - started
        right = result.passed and not found
        failed |= not right
        watched = ", no hazards" if options.hazards != "off" and not found else ""
        verdict = f"{'ok' if right else 'FAILED'} {result.summary}{watched}"
        console.print(f"{name}: {verdict} ({took:.1f} s)")
        for text in dict.fromkeys(map(str, found)):
            console.print(text)
    raise typer.Exit(1 if failed else 0)


@app.command()
def check(
    variants: Names,
    seeds: Seeds = 10,
    directory: Directory = None,
    first: Annotated[int, typer.Option(min=0, help="number of the first schedule")] = 0,
    record: RecordFile = None,
) -> None:
    """Hazard check under many adversarial schedules: every hazard, each pair of places once."""
    names, at = _variants(variants, directory)
    bad = 0
    for name in names:
        started = time.perf_counter()
        problems = _check(_workload(name, at), range(first, first + seeds))
        took = time.perf_counter() - started
        bad += bool(problems)
        verdict = f"{len(problems)} PROBLEMS" if problems else "clean"
        console.print(f"{name}: {verdict}, {seeds} schedules, {took:.1f} s")
        for text in problems:
            console.print(text)
    if not bad:
        _write(record, names[0], at)
    raise typer.Exit(1 if bad else 0)


def _check(workload: selfcheck.Workload, seeds: range) -> list[str]:
    """Texts of the problems that these schedules show, one for each kind and place."""
    problems: dict[tuple[Any, ...], str] = {}
    for seed in seeds:
        try:
            with using(mutation.schedule(seed)):
                result = _run(workload)
        except SoftGpuError as error:
            lines = tuple(e.ptx_line for e in getattr(error, "events", []))
            key = (getattr(error, "kind", type(error).__name__), *lines)
            problems.setdefault(key, f"schedule {seed}: {error}")
            continue
        if not result.passed:
            problems.setdefault(("wrong result",), f"schedule {seed}: {result.summary}")
    return list(problems.values())


@app.command()
def mutate(
    variant: Annotated[str, typer.Argument(help="variant name")],
    seeds: Seeds = 10,
    directory: Directory = None,
    reports: Annotated[bool, typer.Option(help="print what killed each mutant")] = False,
    explained: Annotated[
        list[str] | None,
        typer.Option(
            help="'OPCODE' or 'OPCODE @ ROLE', a role of snapmla.testing.explanations, whose "
            "removal may go unnoticed, under one schedule of each landing; '2 x' in front: of two "
            "at most; given, other survivors fail"
        ),
    ] = None,
    lines: Annotated[
        list[str] | None,
        typer.Option(help="study those of these source lines alone: FILE:LINE, globs are fine"),
    ] = None,
    part: Annotated[
        str, typer.Option(help="k/n: the k-th of n parts of them, which take about as long each")
    ] = "1/1",
    record: RecordFile = None,
) -> None:
    """Remove each synchronisation instruction in turn: which removals go unnoticed?"""
    names, at = _variants([variant], directory)
    workload = _workload(names[0], at)
    workload.again = True
    kernel = workload.kernel
    assert isinstance(kernel, LoadedKernel)
    entry = kernel.entry
    places = _chosen(mutation.sites(kernel.program(entry)), lines)
    known = [] if explained is None else explained
    for text in known:
        _check_explanation(text)
    places = _part(places, part, known, min(seeds, SEEDS_OF_EXPLAINED))
    with using(mutation.schedule(0)):
        first = _run(workload)
    if not first.passed:
        console.print(f"{names[0]} itself is wrong: {first.summary}")
        raise typer.Exit(1)
    outcomes = []

    def tried(site: mutation.Site) -> int:
        named = any(_names(text, site) for text in known)
        return min(seeds, SEEDS_OF_EXPLAINED) if named else seeds

    study = mutation.study(kernel, entry, lambda: _run(workload).passed, tried, places)
    bar = Console(stderr=True, markup=False, emoji=False)
    for outcome in track(study, "mutants", len(places), console=bar, transient=True):
        outcomes.append(outcome)
        if outcome.killed:
            console.print(_line(outcome))
        if reports and outcome.report:
            console.print(outcome.report)
    for outcome in outcomes:  # last, where a long output is read first
        if not outcome.killed:
            console.print(_line(outcome))
    killed = sum(o.killed for o in outcomes)
    console.print(
        f"{names[0]}: {killed} of {len(outcomes)} mutants killed "
        f"({100 * killed / max(len(outcomes), 1):.0f} %), at most {seeds} schedules each"
        + (f", {min(seeds, SEEDS_OF_EXPLAINED)} where explained" if explained else "")
    )
    survivors = [explanations.Survivor.of(o.site, tried(o.site)) for o in outcomes if not o.killed]
    _write(record, names[0], at, survivors=[survivor.data() for survivor in survivors])
    raise typer.Exit(1 if known and explanations.unexplained(survivors, known) else 0)


def _check_explanation(text: str) -> None:
    try:
        explanations.check(text)
    except ValueError as error:
        print(f"--explained: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


Card = Annotated[str | None, typer.Option(help="card on file, such as H200, H100, B200")]
Rows = Annotated[int | None, typer.Option(help="query rows; as many as the row tile has")]


def _cost(name: str, at: Path, card: str | None, rows: int | None, tiles: tuple[int, int]) -> Any:
    """The cost of a variant, or one sentence and exit code 2."""
    from snapmla.testing import cost as costs  # not at the top: it needs nvdisasm's package

    found, _ = _variants([name], at)
    try:
        return costs.measure(VariantSpec.from_name(found[0]), at, card, rows, tiles)
    except (ValueError, VariantError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None


@app.command()
def cost(
    variant: Annotated[str, typer.Argument(help="variant name")],
    compare: Annotated[str | None, typer.Option(help="another variant, beside it")] = None,
    card: Card = None,
    rows: Rows = None,
    tiles: Annotated[tuple[int, int], typer.Option(help="KV tiles of the two records")] = (6, 14),
    opcodes: Annotated[bool, typer.Option(help="SASS opcodes of each role too")] = False,
    directory: Directory = None,
) -> None:
    """Model a variant's use of each SM unit per tile, and name what bounds it; nothing is timed."""
    from softgpu.cost import report

    at = directory if directory is not None else env.variant_dirs()[0]
    names = [variant] if compare is None else [variant, compare]
    found = [_cost(name, at, card, rows, tiles) for name in names]
    if compare is None:
        c = found[0]
        title = f"{c.spec.name}, {c.rows} rows"
        console.print(report.text(title, c.profile, c.card, c.cycles, c.handovers, c.hot, opcodes))
        return
    if not all(c.measured for c in found):
        console.print(report.PREDICTED)
    console.print(report.comparison([c.spec.name for c in found], [c.numbers() for c in found]))


@app.command()
def trace(
    variant: Annotated[str, typer.Argument(help="variant name")],
    out: Annotated[Path, typer.Argument(help="file to write, such as trace.json")],
    card: Card = None,
    rows: Rows = None,
    tiles: Annotated[int, typer.Option(min=3, help="KV tiles")] = 8,
    directory: Directory = None,
) -> None:
    """Write a modelled timeline of one cluster, for ui.perfetto.dev or chrome://tracing."""
    from softgpu.cost import trace as traces

    at = directory if directory is not None else env.variant_dirs()[0]
    c = _cost(variant, at, card, rows, (2, tiles))
    artifacts.write_atomic(out, traces.text(c.play, c.profile, c.card, c.spec.name))
    console.print(f"{out}: {c.play.cycles:,.0f} modelled cycles, {c.card.name}; nothing was timed")


def _chosen(places: list[mutation.Site], lines: list[str] | None) -> list[mutation.Site]:
    """Sites whose source lines match one of ``lines``; all sites if there are none.

    Exits with code 2 if one of ``lines`` matches no site.
    """
    if not lines:
        return places
    for line in lines:
        if not any(fnmatch.fnmatchcase(place.source, line) for place in places):
            print(f"--lines: nothing that synchronises comes from {line!r}", file=sys.stderr)
            raise typer.Exit(2)
    return [p for p in places if any(fnmatch.fnmatchcase(p.source, line) for line in lines)]


def _part(
    places: list[mutation.Site], part: str, explained: list[str], seeds: int
) -> list[mutation.Site]:
    """The k-th of n parts of the places; exit code 2 if ``part`` is not such a k/n.

    What one counted explanation is about stays together, so that each part can hold to the count.
    Parts are as long as one another if what is explained survives all schedules, and the rest one.
    """
    match = re.fullmatch(r"([1-9]\d?)/([1-9]\d?)", part)
    if match is None or int(match[1]) > int(match[2]):
        wanted = "expected k/n with k from 1 to n, such as 2/4"
        print(f"--part: {wanted}, got {part!r}", file=sys.stderr)
        raise typer.Exit(2)
    units: dict[str | mutation.Site, list[mutation.Site]] = {}
    weights: dict[str | mutation.Site, int] = {}
    for place in places:
        found = [text for text in explained if _names(text, place)]
        counted = found[0] if found and all(map(explanations.counted, found)) else None
        unit: str | mutation.Site = counted or place
        units.setdefault(unit, []).append(place)
        weights[unit] = weights.get(unit, 0) + (1 if counted or not found else seeds)
    for text in set(explained) & set(units):
        weights[text] += (seeds - 1) * min(int(text.split()[0]), len(units[text]))
    parts: list[list[mutation.Site]] = [[] for _ in range(int(match[2]))]
    filled = [0] * len(parts)
    for name in sorted(units, key=lambda name: -weights[name]):
        least = filled.index(min(filled))
        parts[least] += units[name]
        filled[least] += weights[name]
    mine = parts[int(match[1]) - 1]
    return [place for place in places if place in mine]


def _line(outcome: mutation.Outcome) -> str:
    """One line about a mutant: killed or survived, its site, and how."""
    site, fate, how = outcome.site, "SURVIVED", "no schedule noticed"
    if outcome.killed:
        fate, how = "killed  ", f"{outcome.how}, schedule {outcome.seed}"
    elif known := explanations.roles(site):
        how += f"; {', '.join(known)}"
    return f"{fate} {site.family:8s}{site.source}: {site.text[:60]}  ({how})"


def _names(text: str, site: mutation.Site) -> bool:
    """True if an explanation is about an instruction."""
    return explanations.about(text, explanations.instruction(site), explanations.roles(site))


def _write(record: Path | None, name: str, directory: Path, **found: Any) -> None:
    """Tells ``profiles.prove`` what was run; nothing without a file for it."""
    if record is not None:
        found["launches"] = launches.digest(VariantSpec.from_name(name), directory)
        artifacts.write_atomic(record, json.dumps(found) + "\n")


def main(argv: list[str] | None = None) -> int:
    """The exit status of a command line."""
    try:
        app(argv, prog_name="snapmla.testing")
    except SystemExit as leave:
        return int(leave.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
