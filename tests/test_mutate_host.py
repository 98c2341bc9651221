"""The mutation study of the host package: its table is up to date, and it can tell outcomes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutate_host import MUTANTS, Mutant, homes, record, study
from tests.support import ROOT

HALF = "def half(n: int) -> int:\n    return n // 2\n"
TEST = """
import pytest
from toy.half import half

@pytest.mark.parametrize("n", [5], ids=["five - or so"])
def test_half(n):
    assert half(n) == 2
"""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.file}-{m.target.partition('::')[2]}")
def test_the_table_fits_the_sources(mutant: Mutant) -> None:
    """A text that is gone, or a test that moved, is noticed without running the study."""
    text = (ROOT / "snapmla" / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.old!r} is there {text.count(mutant.old)} times"
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    file, _, test = mutant.target.partition("::")
    assert file in homes(mutant.file), "a test of another module"
    name = re.escape(test.split("[")[0])
    assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE)


def test_the_table_is_wide_enough() -> None:
    assert len(MUTANTS) == len({(m.file, m.old, m.new) for m in MUTANTS}) >= 16
    assert len({m.file for m in MUTANTS}) >= 12


def test_a_study_of_a_toy(tmp_path: Path) -> None:
    """A mistake is killed, a harmless edit survives, a text that is gone is said to be gone."""
    for name, text in (("toy/half.py", HALF), ("tests/test_half.py", TEST)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)

    def mutant(old: str, new: str) -> Mutant:
        return Mutant("half.py", old, new, "test_half.py::test_half", "a toy")

    mutants = [mutant("// 2", "// 3"), mutant("n // 2", "(n) // 2"), mutant("% 2", "% 3")]
    found = list(study(tmp_path, mutants, copied=("toy", "tests"), package="toy"))
    assert [o.state for o in found] == ["killed", "SURVIVED", "GONE"]
    assert found[0].by.startswith("test_half.py::test_half[five")
    assert (tmp_path / "toy" / "half.py").read_text() == HALF
    page = record(found, "abc")
    assert "1 of 3 mutants killed" in page and "| `// 2` → `// 3` | a toy | killed: " in page
    (tmp_path / "tests" / "test_half.py").write_text(TEST.replace("== 2", "== 3"))
    with pytest.raises(RuntimeError, match=r"(?s)without a mutant.*assert 2 == 3"):
        list(study(tmp_path, mutants, copied=("toy", "tests"), package="toy"))
