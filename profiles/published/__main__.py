"""Runs published tcgen05 programs on the software GPU and writes the page of results.

    python -m profiles.published list
    python -m profiles.published run 1cta_mma_basic tokenspeed_m64 --from DIR
    python -m profiles.published page

``run`` without names takes all; each program is a process of its own, and its result a file in
``build/published``.  ``page`` puts what is there into profiles/results/tcgen05-programs.md.
DIR holds the folders named in ``programs.SOURCES``: checkouts (``cutlass``, ``flash-attention`` and
``quack``, which that imports) and unpacked wheels (``tokenspeed``,
``flashinfer``).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import time
import traceback
import types
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .programs import PROGRAMS, SOURCES, Program

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "published"
SEEDS = 3

app = typer.Typer(add_completion=False, help=__doc__, no_args_is_help=True)


class _Nothing(types.ModuleType):
    """A module whose every name is a decorator that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **named: args[0] if args else lambda function: function


def _package(name: str, path: Path | None) -> None:
    """A package without its ``__init__``, which imports more than is here; or one of nothing."""
    module = types.ModuleType(name) if path else _Nothing(name)
    if path:
        module.__path__ = [str(path)]
    sys.modules[name] = module


def _module(folder: Path, program: Program) -> Any:
    """Imports the program: a file of a checkout, or a module of an unpacked wheel."""
    if program.source != "cutlass":
        sys.path[:0] = [str(folder), *(str(folder.parent / x) for x in program.beside)]
        for name, path in program.packages:
            _package(name, folder / path if path else None)
        for name in program.first:
            importlib.import_module(name)
        return importlib.import_module(program.path.removesuffix(".py").replace("/", "."))
    path = folder / program.path
    if program.edit is not None:
        text, count = re.subn(*program.edit, path.read_text(), flags=re.MULTILINE)
        if count != 1:
            raise ValueError(f"{path}: {count} places for the edit, expected 1")
        path = RESULTS / "edited" / path.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sys.path[:0] = [str(path.parent), str(folder / "examples" / "python" / "CuTeDSL")]
    spec = importlib.util.spec_from_file_location("published_program", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_one(name: str, folder: Path, hazards: bool, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Runs one program in this process; what came out, as JSON types."""
    os.environ["CUTE_DSL_ARCH"] = "sm_100a"
    import softgpu
    from softgpu import machine

    from . import blackwell, launches

    program = PROGRAMS[name]
    check = "collect" if hazards and program.hazards else "off"
    common: dict[str, Any] = {"hazards": check, "rules": frozenset()}
    schedules = {"early": softgpu.Options(**common)}
    if program.turns:
        machine.QUANTUM = program.turns
        schedules = {f"turns of {program.turns}": schedules["early"]}
    else:
        schedules["late"] = softgpu.Options(asynchronous="late", **common)
        schedules |= {
            f"random {s}": softgpu.Options(asynchronous="random", seed=s, **common) for s in seeds
        }
    compiler = launches.Compiler(schedules)
    started, error, output = time.process_time(), "", io.StringIO()
    with blackwell.pretend(compiler) as comparisons, contextlib.redirect_stdout(output):
        try:
            program.call(_module(folder / SOURCES[program.source].folder, program))
        except Exception:
            error = traceback.format_exc()
    record = asdict(compiler.record) | {"opcodes": sorted(compiler.record.opcodes)}
    return record | {
        "name": name, "error": error, "seconds": time.process_time() - started,
        "schedules": list(schedules), "hazards_on": check != "off",
        "comparisons": comparisons.seen, "output": output.getvalue()[-2000:],
        "verdict": verdict(program, error, comparisons.seen, compiler.record.differing),
    }  # fmt: skip


def verdict(
    program: Program, error: str, seen: list[tuple[float, float]], differing: list[str]
) -> str:
    """ "passes", or what is wrong."""
    if error:
        said = [line for line in error.strip().splitlines() if not line.startswith(" ")]
        return said[-1]
    if not seen:
        return "compared nothing"
    for i, (off, _) in enumerate(seen):
        # a program called several times, or on several rows, compares the same things in turn
        bound = program.bounds[i % len(program.bounds)]
        if not off <= bound:
            return f"comparison {i}: off by {off:.2e}, bound {bound:.2e}"
    if differing and not program.atomics:
        return f"other bits under {', '.join(sorted(set(differing)))}"
    return "passes"


Folder = Annotated[
    Path,
    typer.Option("--from", help="local copies of the programs", exists=True, file_okay=False),
]
Seeds = Annotated[int, typer.Option(min=0, help="random schedules")]
Hazards = Annotated[bool, typer.Option("--hazards/--no-hazards", help="check for hazards")]


def _known(names: list[str]) -> list[str]:
    if unknown := set(names) - PROGRAMS.keys():
        known = ", ".join(PROGRAMS)
        raise typer.BadParameter(f"no program {', '.join(sorted(unknown))}; there are {known}")
    return names


@app.command("list")
def list_() -> None:
    """The programs and what each shows."""
    for program in PROGRAMS.values():
        print(f"{program.name:32} {program.shows}")


@app.command()
def run(
    folder: Folder,
    names: Annotated[list[str] | None, typer.Argument(help="programs; all by default")] = None,
    seeds: Seeds = SEEDS,
    hazards: Hazards = True,
    verbose: Annotated[bool, typer.Option(help="print tracebacks")] = False,
) -> None:
    """Runs programs, each in a process of its own.  Exit status 1: one did not pass."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in _known(names or []) or PROGRAMS:
        command = [sys.executable, "-m", "profiles.published", "one", name]
        command += ["--from", str(folder), "--seeds", str(seeds)]
        command += [] if hazards else ["--no-hazards"]
        done = subprocess.run(command, cwd=ROOT)
        path = RESULTS / f"{name}.json"
        result = json.loads(path.read_text()) if done.returncode == 0 else {}
        text = result.get("verdict", f"the process ended with {done.returncode}")
        failed += text != "passes"
        print(f"{name:32} {result.get('seconds', 0):6.1f} s  {text}", flush=True)
        if result.get("error") and verbose:
            print(result["error"])
    raise typer.Exit(1 if failed else 0)


@app.command()
def one(name: str, folder: Folder, seeds: Seeds = SEEDS, hazards: Hazards = True) -> None:
    """Runs one program in this process, for ``run``."""
    _known([name])
    path = RESULTS / f"{name}.json"
    path.unlink(missing_ok=True)
    result = run_one(name, folder, hazards, tuple(range(seeds)))
    path.write_text(json.dumps(result, indent=1))


@app.command()
def page() -> None:
    """Puts the results into profiles/results/tcgen05-programs.md."""
    from .page import write

    write()


if __name__ == "__main__":
    app()
