"""Folders of built variants, and the commands that fill them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from codegen import artifacts
from dsl_kernels.spec import VariantSpec

CHEAP = VariantSpec(op="merge")
Done = subprocess.CompletedProcess[str]


def entries(directory: Path) -> dict[str, dict]:
    """The manifest of a directory, by variant name."""
    manifest = json.loads((directory / artifacts.MANIFEST).read_text())
    return {v["name"]: v for v in manifest["variants"]}


def codegen(*arguments: str, cwd: Path = artifacts.ROOT, **environment: str) -> Done:
    """Runs ``python -m codegen`` of the tree in ``cwd``."""
    return subprocess.run(
        [sys.executable, "-m", "codegen", *arguments], capture_output=True, text=True, cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(cwd), **environment}, timeout=300,
    )  # fmt: skip


def borrow(pattern: str, source: Path, target: Path) -> list[str]:
    """Copies built variants into a directory of the test's own; returns their names."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.glob(f"{pattern}_sm90a.*"):
        shutil.copy(path, target / path.name)
    return sorted(path.stem for path in target.glob("*.json"))
