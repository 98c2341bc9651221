"""The table of environment variables is complete."""

from __future__ import annotations

import re
from pathlib import Path

from snapmla import env

QUOTED = re.compile(r"""["']((?:SNAPMLA|SOFTGPU)_[A-Z_]+)["']""")
SOFTGPU_OPTION = re.compile(r"""_environment\(["']([A-Z_]+)["']""")


def used(root: Path) -> set[str]:
    """Names of the project's variables in its Python sources."""
    names: set[str] = set()
    for folder in ("snapmla", "codegen", "dsl_kernels", "softgpu", "profiles", "tests"):
        for path in (root / folder).rglob("*.py"):
            text = path.read_text()
            names.update(QUOTED.findall(text))
            names.update(f"SOFTGPU_{option}" for option in SOFTGPU_OPTION.findall(text))
    return names


def test_table_lists_what_is_read() -> None:
    listed = [variable.name for variable in env.TABLE]
    assert len(set(listed)) == len(listed)
    assert set(listed) == used(env.ROOT)
    assert all(variable.doc for variable in env.TABLE)
