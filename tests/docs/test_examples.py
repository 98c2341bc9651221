"""examples/: every script runs and checks itself; its README lists it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, fetch_transformers
from tests.support.needs import needs_compiler

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
NAMES = [path.stem for path in SCRIPTS]
# What makes the results wrong: the plan is not told of the new lengths.
FORGOTTEN = re.compile(r"^( *)(?:step\.)?plan\.update_\(.*$", re.M)


def run(source: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    engine = fetch_transformers.path_of(fetch_transformers.RELEASES[-1])
    theirs = [] if source.stem not in WITH_TRANSFORMERS or engine is None else [str(engine)]
    path = os.pathsep.join([str(ROOT), *theirs, *filter(None, [os.environ.get("PYTHONPATH")])])
    known = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, str(source)], capture_output=True, text=True, cwd=ROOT, env=known
    )


WITH_TRANSFORMERS = ("generate",)  # which is fetched, or there
# a graph of the software GPU is a list of calls: the one that matters runs on a GPU; steps of
# sparse attention are made of calls that other tests run; test_transformers.py has a model; a few
# steps of training are as many backwards
RARELY = ("cuda_graph", "sparse_step", "dsa_step", "generate", "train_mla")
EVERY_DAY = [
    pytest.param(path, marks=pytest.mark.whole_matrix if path.stem in RARELY else ())
    for path in SCRIPTS
]


def skip_without_transformers(path: Path, done: subprocess.CompletedProcess[str]) -> None:
    if path.stem in WITH_TRANSFORMERS and "this example wants transformers" in done.stderr:
        pytest.skip("transformers is not there: python -m tests.support.fetch_transformers")


@needs_compiler
@pytest.mark.parametrize("path", EVERY_DAY, ids=NAMES)
def test_on_the_software_gpu(path: Path) -> None:
    done = run(path, CUDA_VISIBLE_DEVICES="")
    skip_without_transformers(path, done)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "right"
    assert "cpu" in done.stdout or "no CUDA device" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("path", SCRIPTS, ids=NAMES)
def test_on_the_gpu(path: Path) -> None:
    done = run(path)
    skip_without_transformers(path, done)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "right" and "no CUDA device" not in done.stdout


@needs_compiler
@pytest.mark.whole_matrix
def test_a_forgotten_update_is_noticed(tmp_path: Path) -> None:
    """The examples' own checks can fail."""
    source, found = FORGOTTEN.subn(r"\1pass", (ROOT / "examples" / "cuda_graph.py").read_text())
    assert found == 1
    (tmp_path / "forgotten.py").write_text(source)
    done = run(tmp_path / "forgotten.py", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and done.stdout.splitlines()[-1] == "WRONG", done.stderr[-2000:]


def test_every_example_is_listed() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    assert set(re.findall(r"\]\((\w+\.py)\)", text)) == {path.name for path in SCRIPTS}
    assert "examples/README.md" in (ROOT / "README.md").read_text()
