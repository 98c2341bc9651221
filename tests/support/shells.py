"""Empty shells for modules that are not installed, so that an engine's Python can be imported.

    shells.install(["flashinfer", "sgl_kernel"])

From then on names below these are found, as modules that have every attribute.  An attribute can be
called, subscripted, used as a decorator or as a base class; it computes nothing.  Tests only.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


class _Meta(type):
    """Metaclass of things that stand for anything."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _thing(f"{cls.__name__}.{name}")

    def __call__(cls, *given: Any, **named: Any) -> Any:
        if len(given) == 1 and not named and callable(given[0]):
            return given[0]  # a decorator without arguments
        return _thing(f"{cls.__name__}()")

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__


def _thing(name: str) -> Any:
    return _Meta(name, (), {})


class _Shell(types.ModuleType):
    """A module with every attribute."""

    __path__ = ()
    __version__ = "99.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _thing(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder behind all others: it is asked for what is not installed."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Shell(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(names: Iterable[str]) -> None:
    """Makes shells of those that are not installed."""
    sys.meta_path.append(_Finder(names))
