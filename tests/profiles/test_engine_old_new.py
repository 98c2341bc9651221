"""``profiles.engine.old_new``: whose package a case runs, and what the page says of the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from codegen.artifacts import ROOT
from profiles.engine import __main__ as commands
from profiles.engine import old_new, study

FAKE = """
import json, os, sys
from pathlib import Path
name = json.loads(Path(sys.argv[1]).read_text())["name"]
found = {"cwd": os.getcwd(), "path": os.environ.get("PYTHONPATH", ""),
         "variants": os.environ.get("SNAPMLA_VARIANT_DIR", "")}
Path(sys.argv[2], f"{name}.json").write_text(json.dumps(found))
sys.exit(name == "new-step")
"""


def test_cases_in_turn_each_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "case.py").write_text(FAKE)
    (old := tmp_path / "base").mkdir()
    monkeypatch.setattr(study, "CASE", (sys.executable, str(tmp_path / "case.py")))
    monkeypatch.setenv("PYTHONPATH", "site")
    monkeypatch.setenv("SNAPMLA_VARIANT_DIR", "mine")
    names = [case.name for case in old_new.cases(tmp_path)]
    assert names == ["old-share", "new-share", "old-step", "new-step"]
    assert old_new.run(tmp_path, old, 60.0) == ["new-step: exit code 1"]
    told = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in names}
    assert told["new-share"] == {"cwd": str(ROOT), "path": "site", "variants": "mine"}
    assert told["old-share"] == {
        "cwd": str(old), "path": f"{old}:{ROOT}:site", "variants": str(old / "build" / "variants"),
    }  # fmt: skip
    assert old_new.run(tmp_path, old, 60.0) == []  # what has a result is left alone


def test_the_committed_page_is_of_its_data() -> None:
    result = commands.read(commands.RESULTS, commands.OLD_NEW)
    page = old_new.page(commands.headed({commands.OLD_NEW: result}), result["data"])
    assert page == (commands.RESULTS / "engine-sparse-old-new.md").read_text()
    assert "- top-k: 26.3 us a layer before, 13.8 now, 0.524 of it (gate: 0.57)" in page
    assert "not measured of both, so no ratio is told" in page
    whole = result["data"] | {"old-step": result["data"]["new-step"]}
    assert "3.69 ms before, 3.69 now, 1.000" in old_new.page([], whole)
