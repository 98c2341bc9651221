"""Shared fixtures: the variants of a run, one directory of them built, seeds, skips, what it cost.

A run takes the *test set* of variants (``codegen.matrix.sample_specs``), with ``--whole-matrix``
every variant; a test that asks for ``spec`` and is marked ``variants("decode_*")`` runs for each of
them that matches.  Tests marked ``whole_matrix`` run with that switch only.
``--precompile`` (what ``make test`` passes) brings the run's variants up to date once, before any
test runs; without it a test that needs a variant compiles just that one.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import resource
import statistics
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from codegen import artifacts, matrix, toolchain
from codegen.precompile import Report, precompile
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import env
from tests.support import calibration
from tests.support.variants import called_for, shipped

pytest_plugins = ["softgpu.pytest_plugin", "pytester"]

# Inductor compiles here what few graphs need: its pool of processes imports torch in each of them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

PRECOMPILED = pytest.StashKey[float]()  # when that had ended
LAST_REPORT = pytest.StashKey[float]()  # CPU seconds of the process then
CALIBRATED = pytest.StashKey[float]()  # CPU seconds of the process at its last calibration
COMPILING = pytest.StashKey[tuple[float, list[float]]]()  # CPU seconds, those of fixed compiles


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--precompile", action="store_true", help="build the run's variants before the first test"
    )
    parser.addoption(
        "--whole-matrix", action="store_true", help="every variant instead of the test set"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``@pytest.mark.variants(patterns, everyday=narrower)``: ``spec`` is each variant of the run
    that matches one of them, separated by commas; ``everyday`` is for runs of the test set."""
    marker = metafunc.definition.get_closest_marker("variants")
    if marker is not None:
        whole = metafunc.config.getoption("--whole-matrix")
        pattern = marker.args[0] if whole else marker.kwargs.get("everyday", marker.args[0])
        globs = matrix.globs(pattern)
        known = shipped(whole=whole)
        specs = [s for s in known if any(fnmatch.fnmatchcase(s.name, glob) for glob in globs)]
        if not specs and toolchain.have_compiler():  # without one, no variant is to be had
            raise pytest.UsageError(f"{metafunc.definition.nodeid}: no variant is {pattern!r}")
        metafunc.parametrize("spec", specs, ids=[spec.name for spec in specs])


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    is_worker = hasattr(config, "workerinput")
    if not config.getoption("--precompile") or is_worker or not toolchain.have_compiler():
        return
    specs = shipped(whole=config.getoption("--whole-matrix"))
    every = len(shipped(whole=True))
    names = f": {' '.join(s.name for s in specs)}" if config.getoption("verbose") > 0 else ""
    print(f"{len(specs)} of {every} variants (-v names them){names}", flush=True)
    print(f"precompiling them into {artifacts.default_dir()}", flush=True)
    before, needed = sum(cpu_seconds()), called_for(specs)
    compiles = calibration.Compiles(len(needed) // (calibration.COMPILES + 1))
    report = precompile(needed, artifacts.default_dir(), progress=compiles)
    config.stash[COMPILING] = sum(cpu_seconds()) - before, compiles.seconds
    config.stash[PRECOMPILED] = time.time()
    print(f"{len(report.built)} built, {len(report.reused)} up to date", flush=True)
    for (
        name,
        reasons,
    ) in report.failed.items():  # the tests of these variants report them as failures
        print(f"{name}: {'; '.join(reasons)}", flush=True)


def cpu_seconds() -> tuple[float, float]:
    """(user, system) of this process and of its children that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime for u in usage), sum(u.ru_stime for u in usage)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Writes into a report what this process has taken since the report before.

    Under ``--precompile`` now and then the calibration too, while other workers are at work.
    """
    report = yield
    now = sum(cpu_seconds())
    begun = item.config.stash.setdefault(CALIBRATED, now)
    if item.config.getoption("--precompile") and now - begun >= calibration.EVERY:
        item.config.stash[CALIBRATED] = now
        report.calibration = calibration.work()
    report.cpu_seconds = now - item.config.stash.get(LAST_REPORT, now)
    item.config.stash[LAST_REPORT] = now
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[LAST_REPORT] = sum(cpu_seconds())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """CPU seconds of this process, the workers (reaped by now), compilers and other children."""
    user, system = cpu_seconds()
    stash = terminalreporter.config.stash
    by_file, works = Counter[str](), []
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        by_file[getattr(report, "nodeid", "").split("::")[0]] += getattr(report, "cpu_seconds", 0)
        if (took := getattr(report, "calibration", None)) is not None:
            works.append(took)
    compiling, compiles = stash.get(COMPILING, (0.0, []))
    cost = calibration.Cost(compiling, user + system - compiling, compiles, works)
    units = "" if cost.units is None else f", {cost.units:.0f} units"
    terminalreporter.write_line(
        f"CPU seconds: {user + system:.0f} (user {user:.0f}, system {system:.0f}){units}; "
        f"`make test` may take {calibration.CEILING} units (CONTRIBUTING.md, The budget)"
    )
    since = stash.get(PRECOMPILED, None)
    if since is None:
        return
    terminalreporter.write_line(
        f"compiling took {compiling:.0f} of them; fixed compiles {_listed(compiles)}, fixed work "
        f"{_listed(works)}"
    )
    record = {"units": cost.units, "compiling": round(compiling, 1), "files": _rounded(by_file)}
    written = artifacts.ROOT / "build" / "test-seconds.json"  # for profiles.baseline
    artifacts.write_atomic(written, json.dumps(record, indent=1) + "\n")
    terminalreporter.write_line(calibration.shares(by_file, compiling))
    most = ", ".join(f"{name} {seconds:.0f}" for name, seconds in by_file.most_common(20))
    terminalreporter.write_line(f"CPU seconds of the files that took most: {most}")
    if late := _compiled_since(since):
        terminalreporter.write_line(
            "compiled on demand, at 4 CPU seconds more each than those that "
            f"tests/support/variants.py names: {' '.join(late)}"
        )


def _rounded(by_file: Counter[str]) -> dict[str, float]:
    return {name: round(seconds, 2) for name, seconds in by_file.most_common() if name}


def _listed(seconds: list[float]) -> str:
    """Of how many measurements which median."""
    return f"{len(seconds)} of {statistics.median(seconds):.3f} s" if seconds else "none"


def _compiled_since(moment: float) -> list[str]:
    """Names of variants whose objects are newer."""
    objects = artifacts.default_dir().glob("*.o")
    return sorted(path.stem for path in objects if path.stat().st_mtime > moment)


@pytest.fixture(scope="session")
def specs(request: pytest.FixtureRequest) -> list[VariantSpec]:
    """The variants of this run."""
    return shipped(whole=request.config.getoption("--whole-matrix"))


@pytest.fixture(scope="session")
def variant_dir() -> Path:
    """Directory of built variants that the tests share."""
    return artifacts.default_dir()


@pytest.fixture(scope="session")
def built(variant_dir: Path, specs: list[VariantSpec]) -> Report:
    """The variants of the run, brought up to date (at once after ``--precompile``)."""
    if not toolchain.have_compiler():
        pytest.skip("needs nvidia-cutlass-dsl")
    from filelock import FileLock

    variant_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(variant_dir / ".tests.lock"):
        return precompile(specs, variant_dir)


@pytest.fixture(autouse=True)
def _quiet_machine() -> Iterator[None]:
    """Fixed seed and one thread a process, so that parallel workers do not fight for cores."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbids compiling at run time."""
    monkeypatch.setenv("SNAPMLA_NO_JIT", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--whole-matrix"):
        left = [item for item in items if "whole_matrix" in item.keywords]
        items[:] = [item for item in items if "whole_matrix" not in item.keywords]
        config.hook.pytest_deselected(items=left)
    if torch.cuda.is_available() and env.TEST_GPU.enabled():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
