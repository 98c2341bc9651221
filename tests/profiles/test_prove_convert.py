"""Outcomes with keys of bytes: only those that counted in their checkout are taken along."""

from __future__ import annotations

import json
from pathlib import Path

from profiles import prove_convert


def row(name: str, key: str = "1", **more: object) -> dict[str, object]:
    told = {"commit": "c", "cpu_seconds": 1.0, "message": "said", "finished": "now"}
    return {"name": name, "key": key, **told, **more}


def test_what_passed_by_its_own_key_is_taken(tmp_path: Path) -> None:
    record = tmp_path / "profiles/results/prove.json"
    record.parent.mkdir(parents=True)
    rows = [
        row("a", state="passed"), row("b", state="failed"), row("c", "2", state="passed"),
        {"name": "d", "key": "1", "state": "not run"},
    ]  # fmt: skip
    record.write_text(json.dumps({"steps": rows}))
    book = tmp_path / "build/prove"
    book.mkdir(parents=True)
    for each in (row("a", passed=True, message="later"), row("b", passed=False), row("e", "0")):
        (book / f"{each['name']}.json").write_text(json.dumps({"passed": True, **each}))
    found = prove_convert.passed(tmp_path, dict.fromkeys("abcde", "1"))
    assert found == [row("a", message="later")]


def test_tools_that_are_put_over_the_old_sources_exist(tmp_path: Path) -> None:
    for name in ("codegen", "dsl_kernels", "profiles", "snapmla", "softgpu", "tests"):
        (tmp_path / "old" / name).mkdir(parents=True)
        (tmp_path / "old" / name / "x.py").write_text("old")
    (tmp_path / "old/pyproject.toml").write_text("")
    (tmp_path / "old/profiles/prove.py").write_text("old")
    prove_convert.overlay(tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "new/snapmla/x.py").read_text() == "old"
    for name in prove_convert.OVERLAID:
        new = (tmp_path / "new" / name).read_bytes()
        assert new == (prove_convert.ROOT / name).read_bytes()
