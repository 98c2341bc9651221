"""``profiles/first_minutes_b200.sh``, as far as it goes without its card."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from codegen import matrix
from dsl_kernels.families import FAMILIES
from profiles import shapes

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "profiles" / "first_minutes_b200.sh"


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={**os.environ, "PYTHON": sys.executable, **environment}, capture_output=True, text=True,
    )  # fmt: skip


def setting(name: str) -> str:
    found = re.search(rf"^{name}=(?:\$\{{\w+:-)?([\w,]+)", SCRIPT.read_text(), re.MULTILINE)
    assert found
    return found[1]


def test_steps_fit_ten_minutes_of_commands_that_exist() -> None:
    listed = script("--list")
    assert listed.returncode == 0, listed.stderr
    names = [line.split()[0] for line in listed.stdout.splitlines()]
    assert names[:5] == ["info", "helpers", "plans", "indexer", "decode"]
    cases = re.findall(r"^        (\w+)\)", SCRIPT.read_text(), re.MULTILINE)
    assert sorted(cases) == sorted(names)
    assert setting("smallest") in {spec.name for spec in matrix.default_specs("sm_100a")}
    for label in setting("shapes").split(","):
        shapes.parse(label)
    assert len(SCRIPT.read_text().splitlines()) <= 150


def test_every_variant_of_sm100_is_in_a_step() -> None:
    """Small calls of all that is built, by names: of what lands later, too."""
    globs = re.findall(r"small_calls '([\w|]+)'", SCRIPT.read_text())
    chosen = [re.compile(rf"({glob})") for glob in globs]
    for op, family in FAMILIES.items():
        names = [spec.name for spec in matrix.points("sm_100a") if spec.op == op]
        for name in names or [f"{op}_sm100a"]:
            found = [glob.pattern for glob in chosen if glob.match(name)]
            assert found, f"no step of {SCRIPT.name} runs {name}, of kind {family.kind}"


def test_what_is_skipped_is_no_success(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        return
    done = script(STEPS="helpers", OUT=str(tmp_path))
    assert done.returncode == 1
    table = (tmp_path / "steps.md").read_text().splitlines()
    assert table[-1].startswith("| helpers | ") and "| 1 | " in table[-1]
    assert "look at launch shim" in done.stdout
