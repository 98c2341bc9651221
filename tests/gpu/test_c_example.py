"""examples/c/decode.c on a real GPU: it computes what its README shows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from codegen import artifacts, bundle
from codegen.artifacts import Record
from dsl_kernels.spec import VariantSpec, decode_spec
from snapmla.runtime import variants

pytestmark = pytest.mark.gpu
EXAMPLE = artifacts.ROOT / "examples" / "c"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_decoding_from_c(tmp_path: Path) -> None:
    append, plan = VariantSpec(op="append_kv"), VariantSpec(op="plan_decode")
    for spec in (append, plan, decode_spec("etap", 16, 64, "bf16")):
        artifact = variants.find_or_build(spec, need_library=True)
        record = Record.read(artifact.directory / f"{spec.name}.json")
        assert record is not None
        root = tmp_path / spec.op
        bundle.copy_variants(
            root / "snapmla/variants", root / "include/snapmla", [record], artifact.directory
        )
        shutil.copytree(tmp_path / spec.op, tmp_path / "bundle", dirs_exist_ok=True)
    program = tmp_path / "example"
    subprocess.run(
        ["sh", EXAMPLE / "build.sh", tmp_path / "bundle", program], check=True,
        env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"```text\n{done.stdout}```\n" in (EXAMPLE / "README.md").read_text()
