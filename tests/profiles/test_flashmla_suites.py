"""The runner of FlashMLA's own suites, over a suite of a few lines of this file; theirs run on a
card."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import snapmla
from profiles import flashmla_suites as suites

LIB = """
from dataclasses import dataclass
from typing import Any

@dataclass
class Param:
    s_q: int
    s_kv: int
    topk: int
    h_q: int = 64
    d_qk: int = 576
    num_runs: int = 10
    seed: int = -1
    check_correctness: bool = True
    decode: Any = None
    ends: str = "right"

    def to_test_param(self):
        return self
"""
DECODE = """
import triton
from types import SimpleNamespace
from lib import Param

def gen_testcase():
    return [Param(1, 64, 64, ends=e) for e in ("right", "wrong", "refused", "bug", "memory")]

def test_flash_mla(p):
    import torch
    assert p.num_runs == 0 and torch.get_default_dtype() is torch.bfloat16
    torch.cuda.synchronize()
    if p.ends == "wrong":
        print("`out` mismatch")
    if p.ends == "refused":
        from snapmla import checks
        checks.value_error("indices", "one stride", f"stride {p.seed}")
    if p.ends == "bug":
        raise ValueError("of the test's own")
    if p.ends == "memory":
        raise torch.OutOfMemoryError("no room")
    return SimpleNamespace(is_correct=p.ends == "right")
"""
PREFILL = """
from lib import Param

def run_test(p):
    return True

if __name__ == "__main__":
    device = undefined_outside_of_a_gpu
    small_cases = [Param(n, 64, 64) for n in (1, 2)]
    templates_of_cases = [(70000, 8192)]
    testcases = small_cases + [Param(q, k, 2048) for q, k in templates_of_cases]
    failed_cases = []
    for test in testcases:
        failed_cases.append(run_test(test))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A suite whose modules are forgotten behind the test."""
    monkeypatch.setattr(snapmla, "install_as_flash_mla", lambda: None)
    (tmp_path / "tests").mkdir()
    (tmp_path / "standins").mkdir()
    (tmp_path / "standins" / "triton.py").write_text("")
    files = {"lib": LIB, suites.DECODE: DECODE, suites.PREFILL: PREFILL}
    for name, text in files.items():
        (tmp_path / "tests" / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    kept = {name: sys.modules.pop(name) for name in files if name in sys.modules}
    yield tmp_path
    for name in files:
        sys.modules.pop(name, None)
    sys.modules.update(kept)


def test_cases_come_from_the_files(folder: Path) -> None:
    """The list that the program makes, without running it; stand-ins do not stay."""
    before = sys.modules.get("triton"), list(sys.path)
    decode, prefill = (suites.load(folder, kind) for kind in ("decode", "prefill"))
    assert (sys.modules.get("triton"), sys.path) == before
    assert [len(decode.cases), len(prefill.cases)] == [5, 3]
    assert prefill.cases[2].s_q == 70000
    (folder / "tests" / f"{suites.PREFILL}.py").write_text(
        "if __name__ == '__main__':\n    x = 1\n"
    )
    with pytest.raises(ValueError, match="expected assignments that end in a list"):
        suites.cases_of_main(folder / "tests" / f"{suites.PREFILL}.py", suites)
    with pytest.raises(ValueError, match="--suite: expected a folder with FlashMLA's tests/"):
        suites.load(folder / "standins", "decode")


def test_samples_fit_and_are_seeded(folder: Path) -> None:
    """By their place in the list, whatever is left out; without times."""
    cases = suites.load(folder, "prefill").cases
    least, most = suites.memory(cases[0]), suites.memory(cases[2])
    assert least < 2**21 and most > 70000 * 2048 * 576 * 6
    chosen, fitting = suites.sample(cases, 300, 2**30, seed=0)
    assert fitting == 2 and sorted(c.seed for c in chosen) == [0, 1]
    assert all(c.num_runs == 0 for c in chosen) and cases[0].seed == -1
    both = [suites.sample(cases, 1, 1e15, seed=3)[0] for _ in range(2)]
    assert both[0] == both[1] and len(both[0]) == 1
    assert [c.s_q for c in suites.smallest(cases, 2)] == [1, 2]


def test_outcomes_are_told_apart(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is a sentence raised by us; the same kind of error of the test is a failure."""
    monkeypatch.setenv("SNAPMLA_COMMIT", "0123abc")
    monkeypatch.setattr(suites, "machine", lambda *_: {})
    app = suites.typer.Typer()
    app.command()(suites.main)
    given = ["--suite", str(folder), "--device", "cpu", "--out", str(tmp_path / "out")]
    synchronize, dtype = torch.cuda.synchronize, torch.get_default_dtype()
    done = CliRunner().invoke(app, given)
    assert torch.cuda.synchronize is synchronize and torch.get_default_dtype() is dtype
    assert done.exit_code == 1, done.output
    text = (tmp_path / "out" / "flashmla-suites-none.md").read_text()
    assert "| decode | 5 | 5 | 4 | 1 | 1 | 2 | 1 | 0 |" in text
    assert "| prefill | 3 | 3 | 3 | 3 | 0 | 0 | 0 | 0 |" in text
    assert "- decode, refused, 1: ValueError: indices: expected one stride, got stride N" in text
    assert "`out` mismatch" in text and "ends=refused: ValueError" in text
    done = CliRunner().invoke(app, [*given, "--kinds", "prefill"])
    assert done.exit_code == 0, done.output


def test_time_that_does_not_suffice(folder: Path) -> None:
    suite = suites.load(folder, "prefill")
    said: list[Any] = []
    tally = suites.run_suite(suite, suite.cases, 3, -1.0, said.append)
    assert (tally.left, tally.ran) == (3, 0)
