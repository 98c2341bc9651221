"""Imported for what it does: from then on the process cannot import the rest of this repository.

``pytest -p tests.support.alone --confcutdir=tests/softgpu -p softgpu.pytest_plugin -p pytester
tests/softgpu`` runs the software GPU's tests without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

REST = frozenset({"snapmla", "codegen", "dsl_kernels", "profiles"})


class Refuse:
    """A finder that knows the rest of the repository, and does not give it."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in REST:
            raise ModuleNotFoundError(f"{name}: softgpu stands alone", name=name)
        return None


sys.meta_path.insert(0, Refuse)
