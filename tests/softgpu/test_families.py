"""Software GPU: every registered instruction has a test that is about it (``@covers``)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from softgpu import SoftGpuError, decode
from softgpu.testing import launch
from tests.support.ptx import covers, run

HERE = Path(__file__).resolve().parent


@covers("trap", "brkpt")
def test_traps_stop() -> None:
    for name in ("trap", "brkpt"):
        with pytest.raises(SoftGpuError, match=f"executed {name}"):
            run(f"{name};")
    launch("setp.ne.s32 %p1, %r1, %r1; @%p1 trap; @%p1 brkpt;", [])


ELSEWHERE = {  # registered name -> file whose PTX uses it
    name: "test_wgmma.py"
    for name in ("wgmma.mma_async", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group")
}


def claimed() -> set[str]:
    """What ``@covers`` names in the files of this folder."""
    found: set[str] = set()
    for path in HERE.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "covers":
                found.update(map(ast.literal_eval, node.args))
    return found


def test_every_registered_name_has_a_test() -> None:
    for name, file in ELSEWHERE.items():
        assert f"{name}." in (HERE / file).read_text(), f"{name} is not in {file}"
    names = claimed()
    missing = set(decode._BUILDERS) - names - set(ELSEWHERE)
    assert not missing, f"registered, but no test: {sorted(missing)}"
    assert set(decode._BUILDERS) >= names, "tests claim names that are not registered"
