"""Progress of a build: a line a variant, at once, where there is no terminal; there a bar."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from codegen import __main__ as command
from codegen.precompile import Report
from codegen.progress import showing
from dsl_kernels.spec import VariantSpec


class Log(io.StringIO):
    """A file that remembers what had been flushed when it was last looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def test_a_line_a_variant_where_there_is_no_terminal() -> None:
    """Each is in the file before the next is built."""
    log = Log()
    with showing(Console(file=log, width=140), "sm_90a -> there", 12) as shown:
        assert log.flushed == "sm_90a -> there: 12 variants\n"
        shown.begin(10)
        assert log.flushed.splitlines()[1:] == ["10 to build"]
        for number, name in enumerate(("merge_obf16_sm90a", "x" * 200), 1):
            shown.finished(name, failed=number == 2)
            last = log.flushed.splitlines()[-1]
            failed = "failed " if number == 2 else ""
            assert re.fullmatch(rf" {number}/10 +\d+\.\d s  {failed}{name}", last)
    assert len(log.getvalue().splitlines()) == 4


def test_a_bar_on_a_terminal() -> None:
    """What is up to date is counted from the start; what failed is named, what is built is not."""
    log = io.StringIO()
    console = Console(file=log, width=100, force_terminal=True)
    with showing(console, "sm_90a -> there", 3) as shown:
        assert shown.bar is not None
        shown.begin(2)
        assert shown.bar.tasks[0].completed == 1
        shown.finished("merge_obf16_sm90a")
        shown.finished("index_rows_sm90a", failed=True)
        assert shown.bar.finished
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", log.getvalue())
    assert "3/3" in text and "failed index_rows_sm90a" in text and "merge_obf16" not in text


def test_precompile_says_what_it_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One variant is up to date, one is built, one fails; then the count, as ever."""
    record: Any = object()
    specs = [VariantSpec(op=op) for op in ("plan_decode", "index_rows", "mha_items")]

    def precompile(specs: list[VariantSpec], *_: Any, **options: Any) -> Report:
        options["begin"](2)
        options["progress"](specs[1].name, record)
        options["progress"](specs[2].name, ["spills"])
        built = {specs[1].name: record}
        return Report(built, {specs[0].name: record}, {specs[2].name: ["spills"]})

    monkeypatch.setattr(command, "run_precompile", precompile)
    monkeypatch.setattr(command, "_need_compiler", lambda: None)
    monkeypatch.setattr(
        command.mx, "matrix", lambda *_, **__: [command.mx.Point(spec, None) for spec in specs]
    )
    done = CliRunner().invoke(command.app, ["precompile", "--out", str(tmp_path)])
    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert lines[0].endswith(f"{tmp_path}: 3 variants") and lines[1] == "2 to build"
    assert re.fullmatch(r"1/2 +\d+\.\d s  index_rows_sm90a", lines[2])
    assert re.fullmatch(r"2/2 +\d+\.\d s  failed mha_items_sm90a", lines[3])
    assert any(line.startswith("1 built, 1 up to date, 1 failed") for line in lines[4:])
