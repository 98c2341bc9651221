"""Another checkout of this project beside ours in one process: ``snapmla@DIR``.

Old and new have to meet in one run, because the card's clock drifts; the other checkout's host
package, ABI and built variants may differ from ours.  So its packages are imported a second time,
from its own folder, and put aside under their own names.

What a process can have only once stays ours: operators (``torch.ops.snapmla``), pytrees, and what
``torch.load`` may make.  The other package is therefore good for eager calls and captured graphs,
not for ``torch.compile``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree

PACKAGES = ("snapmla", "dsl_kernels", "softgpu", "codegen")
VARIANT_DIR = "SNAPMLA_VARIANT_DIR"
COMMIT_FILE = "commit"  # of a packed checkout, which has no .git


class Checkout:
    """A folder with another version of the packages, and with its variants in build/variants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._modules: dict[str, ModuleType] = {}

    def unavailable(self) -> str | None:
        """Reason why nothing can be imported from here, or None."""
        if not (self.folder / "snapmla" / "__init__.py").is_file():
            return f"no snapmla package in {self.folder}"
        if not (self.folder / "build" / "variants").is_dir():
            return f"no build/variants in {self.folder}: run `make precompile` there"
        return None

    @functools.cached_property
    def commit(self) -> str:
        """Its commit, ``unknown`` if nothing tells."""
        packed = self.folder / COMMIT_FILE
        if packed.is_file():
            return packed.read_text().strip()
        command = ["git", "-C", str(self.folder), "rev-parse", "HEAD"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return "unknown"
        return done.stdout.strip() or "unknown"

    @contextlib.contextmanager
    def active(self) -> Iterator[ModuleType]:
        """Its ``snapmla``; imports and kernels loaded in here are the checkout's.

        First calls belong in here: they import and load.  Later ones need not.
        """
        ours = _set_aside()
        sys.modules.update(self._modules)
        sys.path.insert(0, str(self.folder))
        here = {VARIANT_DIR: str(self.folder / "build" / "variants")}
        try:
            with mock.patch.dict(os.environ, here), _registering_nothing():
                package = importlib.import_module("snapmla")
                _expect_from(package, self.folder)
                yield package
        finally:
            sys.path.remove(str(self.folder))
            self._modules = _set_aside()
            sys.modules.update(ours)


def _set_aside() -> dict[str, ModuleType]:
    """Takes the packages out of ``sys.modules``."""
    names = [n for n in sys.modules if n.partition(".")[0] in PACKAGES]
    return {name: sys.modules.pop(name) for name in names}


def _expect_from(package: ModuleType, folder: Path) -> None:
    found = Path(str(package.__file__)).resolve().parent.parent
    if found != folder:
        raise ImportError(f"import snapmla gave the package of {found}, not of {folder}")


class _Library(torch.library.Library):
    """Keeps no definition of ours: the process has them already.  Others are as they are."""

    def __init__(self, ns: str, *rest: Any, **options: Any) -> None:
        self.ns, self._ours = ns, ns in PACKAGES
        if not self._ours:
            super().__init__(ns, *rest, **options)

    def define(self, *given: Any, **options: Any) -> Any:
        return None if self._ours else super().define(*given, **options)

    def impl(self, *given: Any, **options: Any) -> Any:
        return None if self._ours else super().impl(*given, **options)


@contextlib.contextmanager
def _registering_nothing() -> Iterator[None]:
    """Operators, pytrees and classes of ours that are registered in here are not."""
    fake, node = torch.library.register_fake, _pytree.register_pytree_node

    def register_fake(op: Any, *given: Any, **options: Any) -> Any:
        ours = isinstance(op, str) and op.partition("::")[0] in PACKAGES
        return None if ours else fake(op, *given, **options)

    def register_node(cls: type, *given: Any, **options: Any) -> None:
        if cls.__module__.partition(".")[0] not in PACKAGES:
            node(cls, *given, **options)

    def add_safe_globals(classes: list[Any]) -> None:
        """What ``torch.load`` may make stays ours: it goes by names, and theirs are the same."""

    with (
        mock.patch.object(torch.serialization, "add_safe_globals", add_safe_globals),
        mock.patch.object(torch.library, "Library", _Library),
        mock.patch.object(torch.library, "register_fake", register_fake),
        mock.patch.object(_pytree, "register_pytree_node", register_node),
    ):
        yield


@functools.cache
def checkout(folder: str) -> Checkout:
    """The checkout in ``folder``, one object a folder: its modules are imported once."""
    return Checkout(Path(folder))
