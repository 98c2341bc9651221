"""The SGLang plugin on a real GPU: SGLang's own classes, and a CUDA graph of its decode.

Needs an unpacked SGLang (``python -m tests.support.fetch_sglang``, or a folder of the same form
that ``SNAPMLA_SGLANG`` names), not its server: libraries that it imports for a GPU are shells, and
multi-head attention is torch's.  For a machine without network ``python -m
tests.support.carry_sglang`` makes ``build/sglang``, 28 MiB, which ``profiles/gpu_run.sh`` unpacks.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import ROOT, fetch_sglang

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("release", fetch_sglang.RELEASES)
def test_sglangs_own_classes(release: str) -> None:
    path = fetch_sglang.path_of(release)
    if path is None:
        pytest.skip(f"SGLang {release} is not there: python -m tests.support.fetch_sglang")
    given = os.environ.get("PYTHONPATH")  # of gpu_run.sh: what else is not installed there
    folders = os.pathsep.join([*map(str, (ROOT, *path)), *([given] if given else [])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.sglang_driver", "--device=cuda"],
        env={**os.environ, "PYTHONPATH": folders}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-3000:]
    assert "replay 2 of a graph" in done.stdout and done.stdout.endswith("all right\n")
