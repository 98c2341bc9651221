"""Builds many variants with a few worker processes.

A worker imports the compiler once and builds variant after variant (1-2 s each instead of 5).
A worker that dies takes only its own variant down: what is unfinished by then is built once more,
each variant in a process of its own.  A run that is killed leaves whole variants only; the next one
goes on from there and ends in the same manifest.  Workers end with the process that started them,
however that ends; an interrupt (Ctrl-C) lets them finish the variant they are at.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

from codegen import artifacts
from codegen import compile as compiler
from codegen.artifacts import Record
from dsl_kernels.spec import VariantSpec

MAX_JOBS = 8
_DIED = (
    "the compiler process died; memory that runs out is the usual cause (see the log file, if any)"
)


@dataclass
class Report:
    """Outcome of a precompile: records by variant name, failures as sentences."""

    built: dict[str, Record] = field(default_factory=dict)
    reused: dict[str, Record] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)

    @property
    def records(self) -> dict[str, Record]:
        """Built and reused ones, by name."""
        return dict(sorted({**self.reused, **self.built}.items()))


Progress = Callable[[str, Record | list[str]], None]
Outcome = tuple[Record, bool] | list[str]  # (record, was it built?), or what went wrong


def precompile(
    specs: Iterable[VariantSpec],
    out_dir: Path,
    *,
    jobs: int | None = None,
    linked: bool = True,
    force: bool = False,
    progress: Progress | None = None,
    begin: Callable[[int], None] | None = None,
) -> Report:
    """Brings all ``specs`` up to date in ``out_dir`` and rewrites its manifest.

    Args:
        jobs: worker processes; None is one per core, at most 8.
        linked: also link loadable libraries where possible.
        force: rebuild variants that are up to date.
        progress: called in this process as each variant finishes.
        begin: called before the first is built, with the number that is to be built.

    Raises:
        KeyboardInterrupt: after the variants in work are finished; the manifest stays as it was.
    """
    report = Report()
    todo: dict[str, list[VariantSpec]] = {}
    for spec in specs:
        record = None if force else compiler.up_to_date(spec, out_dir, linked)
        if record is None:
            todo.setdefault(spec.arch, []).append(spec)
        else:
            report.reused[spec.name] = record
    jobs = jobs or min(MAX_JOBS, os.cpu_count() or 1)
    if begin is not None:
        begin(sum(map(len, todo.values())))
    for arch, pending in todo.items():
        _build_all(arch, pending, out_dir, linked, force, jobs, report, progress)
    if todo or not _manifest_is_current(out_dir):
        artifacts.write_manifest(out_dir)
    return report


def _manifest_is_current(out_dir: Path) -> bool:
    """False after a run that was killed between its last build and its manifest."""
    path = out_dir / artifacts.MANIFEST
    return path.is_file() and path.read_text() == artifacts.manifest_text(out_dir)


def _build_all(
    arch: str,
    pending: list[VariantSpec],
    out_dir: Path,
    linked: bool,
    force: bool,
    jobs: int,
    report: Report,
    progress: Progress | None,
) -> None:
    """Builds the variants of one arch; a target is a property of a whole worker process."""

    def finish(spec: VariantSpec, outcome: Outcome) -> None:
        if isinstance(outcome, list):
            report.failed[spec.name] = outcome
        else:
            record, built = outcome
            (report.built if built else report.reused)[spec.name] = record
        if progress is not None:
            progress(spec.name, outcome if isinstance(outcome, list) else outcome[0])

    lost: list[VariantSpec] = []
    with workers(arch, min(jobs, len(pending))) as executor:
        futures = {executor.submit(_build_one, s, out_dir, linked, force): s for s in pending}
        waiting: set[Future[Outcome]] = set(futures)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                try:
                    finish(futures[future], future.result())
                except BrokenProcessPool:
                    lost.append(futures[future])
    for spec in lost:
        with workers(arch, 1) as executor:
            try:
                finish(spec, executor.submit(_build_one, spec, out_dir, linked, force).result())
            except BrokenProcessPool:
                finish(spec, [_DIED])


@contextlib.contextmanager
def workers(arch: str, count: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes that compile for ``arch``; on the way out nothing more is begun."""
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(
        count, mp_context=context, initializer=_start_worker, initargs=(arch,)
    )
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _start_worker(arch: str) -> None:
    """Runs first in each worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    compiler.set_target(arch)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker waits for work in a pipe that it holds open itself: nothing else would end it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _build_one(spec: VariantSpec, out_dir: Path, linked: bool, force: bool) -> Outcome:
    try:
        return compiler.ensure(spec, out_dir, linked=linked, force=force)
    except compiler.BuildError as error:
        return error.problems
    except Exception as error:  # a link failure must not stop the other variants
        return [f"{type(error).__name__}: {error}"]
