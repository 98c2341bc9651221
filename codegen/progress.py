"""Progress of a build: a bar on a terminal; in a file or a CI log a line for each variant."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text


class Shown:
    """Progress of one run; ``showing`` makes it.

    Args:
        bar: None where there is no terminal.
        what: is built, and where to.
        total: variants of the run, those that are up to date included.
    """

    def __init__(self, console: Console, bar: Progress | None, what: str, total: int) -> None:
        self.console, self.bar, self.total, self.done = console, bar, total, 0
        self.pending, self.began = total, time.perf_counter()
        self.task = TaskID(0) if bar is None else bar.add_task(what, total=total)
        if bar is None:
            self._print(f"{what}: {total} variants")

    def begin(self, pending: int) -> None:
        """Says how many variants are not up to date, before the first of them is built."""
        self.pending = pending
        if self.bar is None:
            self._print(f"{pending} to build")
        else:
            self.bar.update(self.task, completed=self.total - pending)

    def finished(self, name: str, failed: bool = False) -> None:
        """Counts a variant; a failed one is named on a terminal, too."""
        self.done += 1
        line = Text("failed ", "red").append(name, "default") if failed else Text(name)
        if self.bar is None:
            seconds = time.perf_counter() - self.began
            width = len(str(self.pending))
            line = Text(f"{self.done:{width}}/{self.pending}  {seconds:6.1f} s  ") + line
            self._print(line)
            return
        self.bar.advance(self.task)
        if failed:
            self._print(line)

    def _print(self, line: str | Text) -> None:
        """Prints a line; rich flushes it."""
        self.console.print(line, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def showing(console: Console, what: str, total: int) -> Iterator[Shown]:
    """Shows a run while it lasts."""
    if not console.is_terminal:
        yield Shown(console, None, what, total)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        shown = Shown(console, bar, what, total)
        yield shown
        bar.update(shown.task, completed=total)
